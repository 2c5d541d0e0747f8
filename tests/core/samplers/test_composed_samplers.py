"""Samplers by priority, freshness and tokens through the controller, around built-in samplers and a user's."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness

from transfer_queue.errors import InvalidArgumentError, SamplerError
from transfer_queue.messages.partitions import Seal, SetPolicyVersion
from transfer_queue.sampler import (
    BaseSampler,
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SamplerWrapper,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)

STALE = "stale: more than 1 policy versions behind"
LATE = "in a group of which other samples were skipped, consumed or cleared"


def by(tag: str, *values: Any) -> list[dict[str, Any]]:
    return [{} if value is None else {tag: value} for value in values]


def versions(*values: int | None) -> list[dict[str, Any]]:
    return by("policy_version", *values)


def advance(h: Harness, version: int) -> None:
    h.ask(SetPolicyVersion("p", version))


def passed(h: Harness) -> dict[str, int]:
    return h.state.partitions["p"].passed.counts_of("t")


def rank(number: int, batch: int = 0) -> dict[str, int]:
    return {"dp_rank": number, "batch_index": batch}


# --- priority


def test_the_highest_first_as_tags_change() -> None:
    h = Harness(PrioritySampler())
    h.put(4, tags=by("priority", 1, None, 3, 2))
    assert h.dealt(1) == [2]
    h.ask(h.publish(1, None, rows=[1], tags=[{"priority": 9}]))
    assert h.dealt(2) == [1, 3]
    waiting = h.claim(3, wait=10)
    h.put(2, tags=by("priority", 0, 5))
    assert h.got(waiting) == [5, 0, 4]


def test_aging() -> None:
    h = Harness(PrioritySampler(aging=0.5))
    h.put(1, tags=by("priority", 1))
    h.put(3, tags=by("priority", 2, 2, 9))
    assert h.dealt(4) == [3, 1, 0, 2]


def test_groups_by_their_highest_member() -> None:
    h = Harness(PrioritySampler(inner=GRPOGroupNSampler(2)))
    h.put(6, tags=by("priority", 1, 0, 0, 3, 2, 2))
    assert h.dealt(4, **rank(0)) == [2, 3, 4, 5]
    assert h.dealt(4, **rank(0)) == [2, 3, 4, 5], "kept as a dealt batch"
    h.put(6, groups=["a", "b", "c", "a", "b", "c"], tags=by("priority", 0, 0, 0, 0, 5, 1), partition="q")
    assert h.dealt(4, partition="q") == [7, 10, 8, 11]


def test_a_balanced_deal_of_the_highest() -> None:
    h = Harness(PrioritySampler(inner=SeqlenBalancedSampler(1, 2)))
    h.put(6, tags=[{"priority": row, "total_lengths": 1 + row} for row in range(6)])
    assert h.dealt(2, **rank(0)) == [5, 2]
    assert h.dealt(2, **rank(1)) == [4, 3]


# --- freshness


@pytest.mark.parametrize("inner", [SequentialSampler, RankAwareSampler], ids=["sample", "deal"])
def test_rows_that_are_too_old_are_skipped_and_counted(inner: type[BaseSampler]) -> None:
    h = Harness(FreshnessSampler(inner(), 1))
    h.put(5, tags=versions(0, 1, None, 2, 0))
    advance(h, 2)
    assert h.dealt(2, **rank(0)) == [1, 2]
    assert passed(h) == {STALE: 2}
    assert h.state.partitions["p"].tasks == {"t": 4}
    advance(h, 4)
    waiting = h.claim(1, wait=10, **rank(0, 1))
    assert passed(h) == {STALE: 3}, "asked also where nothing can be dealt"
    h.put(1, tags=versions(3))
    assert h.got(waiting) == [5]


def test_a_claim_may_pass_the_policy_version() -> None:
    h = Harness(FreshnessSampler(SequentialSampler(), 0))
    h.put(2, tags=versions(3, 4))
    assert h.dealt(1, policy_version=4) == [1]
    with pytest.raises(InvalidArgumentError, match="policy_version must be an int"):
        h.dealt(1, policy_version="4")


def test_a_new_policy_version_ends_waits() -> None:
    """The claim gets none of its rows, and fresh rows of another group do not wait behind the old ones."""
    h = Harness(FreshnessSampler(SequentialSampler(), 1))
    h.put(2, tags=versions(0, 0))
    waiting = h.claim(3, wait=10)
    advance(h, 5)
    assert h.parked(waiting)
    h.put(1, tags=versions(5))
    assert h.parked(waiting)
    h.put(2, tags=versions(5, 5))
    assert h.got(waiting) == [2, 3, 4]
    assert passed(h) == {STALE: 2}


def test_a_sealed_partition_with_only_old_rows_has_ended() -> None:
    h = Harness(FreshnessSampler(GRPOGroupNSampler(2), 1))
    h.put(4, tags=versions(0, 0, 0, 0))
    h.ask(Seal("p"))
    waiting = h.claim(8, wait=10, **rank(0))
    assert h.got(waiting) == [0, 1, 2, 3]
    h.put(4, partition="q", tags=versions(0, 0, 0, 0))
    h.ask(Seal("q"))
    h.ask(SetPolicyVersion("q", 2))
    assert h.dealt(2, partition="q", **rank(0)) is None


def test_a_group_is_skipped_with_its_late_members() -> None:
    h = Harness(FreshnessSampler(GRPOGroupNSampler(3), 1))
    h.put(3, groups=["a", "a", "b"], tags=versions(0, 5, 5))
    h.put(1, ("other",), groups=["a"])
    advance(h, 5)
    assert h.dealt(3) == []
    assert passed(h) == {STALE: 3}, "also what is not ready yet"
    h.put(3, groups=["b", "c", "b"], tags=versions(5, 5, 5))
    assert h.dealt(3) == [2, 4, 6]
    h.put(1, groups=["c"], tags=versions(1))
    assert h.dealt(3) == []
    h.put(1, groups=["c"], tags=versions(5))
    assert h.dealt(3) == []
    assert passed(h) == {STALE: 5, LATE: 1}
    assert h.state.partitions["p"].is_wholly_consumed("t")


def test_skipped_rows_are_freed_by_free_when() -> None:
    h = Harness(FreshnessSampler(SequentialSampler(), 1))
    h.create(free_when=["t"])
    h.put(3, tags=versions(0, 5, 0))
    advance(h, 5)
    assert h.dealt(1) == [1]
    assert h.state.partitions["p"].rows.live_positions().tolist() == [1]


def test_unchanged_rows_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer_queue.core.tables.complete_groups import Ranking

    h = Harness(FreshnessSampler(RankAwareSampler(), 1))
    h.put(3 * 4096, tags=versions(*[5] * 3 * 4096))
    advance(h, 5)
    assert h.dealt(1, **rank(0)) == [0]
    looked = []
    keys = Ranking._keys
    monkeypatch.setattr(Ranking, "_keys", lambda *given: looked.append(given) or keys(*given))
    assert h.dealt(1, **rank(0, 1)) == [1]
    assert len(looked) == 1, "the chunk of which row 0 was dealt"


def test_nested() -> None:
    h = Harness(FreshnessSampler(PrioritySampler(inner=GRPOGroupNSampler(2)), 1))
    h.put(
        8, tags=[{"policy_version": version, "priority": row} for row, version in enumerate([5, 5, 5, 0, 4, 5, 0, 0])]
    )
    advance(h, 5)
    assert h.dealt(2, **rank(0)) == [4, 5]
    assert h.dealt(2, **rank(1)) == [0, 1]
    assert passed(h) == {STALE: 4}


# --- token budget


def test_micro_batches_in_lockstep() -> None:
    h = Harness(TokenBudgetSampler(10, dp_size=2))
    h.put(5, tags=by("total_lengths", 6, 5, 4, 5, 3))
    assert h.dealt(2, **rank(1)) == [1, 3]
    assert h.dealt(2, **rank(0)) == [0, 2]
    waiting = h.claim(2, wait=10, **rank(0, 1))
    h.put(1, tags=by("total_lengths", 50))
    assert h.parked(waiting), "row 4 and the over-long one do not fill both ranks"
    h.put(1, tags=by("total_lengths", 8))
    assert h.got(waiting) == [4]
    assert h.dealt(2, **rank(1, 1)) == [5]
    h.ask(Seal("p"))
    assert h.dealt(2, **rank(1, 2)) is None
    assert h.dealt(2, **rank(0, 2)) is None
    assert passed(h) == {"remainder": 1}


def test_drop_last() -> None:
    h = Harness(TokenBudgetSampler(10, drop_last=True))
    h.put(3, tags=by("total_lengths", 8, 8, 1))
    h.ask(Seal("p"))
    assert h.dealt(4, **rank(0)) == [0]
    assert h.dealt(4, **rank(0, 1)) is None
    assert passed(h) == {"remainder": 2}


def test_a_caller_without_a_batch_index_is_alone() -> None:
    h = Harness(TokenBudgetSampler(10, dp_size=2))
    h.put(3, tags=by("total_lengths", 8, 8, 1))
    assert h.dealt(2) == [0]
    h.ask(Seal("p"))
    assert h.dealt(2) == [1, 2]
    assert h.dealt(2) is None


def test_a_missing_length() -> None:
    h = Harness(TokenBudgetSampler(10))
    h.put(2, tags=by("total_lengths", 8, None))
    with pytest.raises(InvalidArgumentError, match="tag 'total_lengths' of row 1 is missing"):
        h.dealt(1, **rank(0))


# --- around a user's


class Mine(BaseSampler):
    """Deals the last of the rows that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        self.shown.append(ready_indexes)
        rows = list(ready_indexes)[-batch_size:]
        return rows, rows


def test_around_a_users_sampler() -> None:
    mine = Mine()
    h = Harness(FreshnessSampler(PrioritySampler(inner=mine), 1))
    h.put(4, tags=[{"policy_version": version, "priority": row % 3} for row, version in enumerate([5, 0, 5, 5])])
    advance(h, 5)
    assert h.dealt(1) == [3]
    assert mine.shown == [[2, 0, 3]]
    assert passed(h) == {STALE: 1}


class Lazy(Mine):
    wants_list = False


def test_a_users_sampler_may_take_the_rows_lazily() -> None:
    lazy = Lazy()
    for sampler in (lazy, PrioritySampler(inner=lazy)):
        h = Harness(sampler)
        h.put(3)
        assert h.dealt(1) == [2]
        assert not isinstance(lazy.shown[-1], list)


class OnlyEven(SamplerWrapper):
    """Shows the rows with an even index to the inner sampler."""

    def view(self, ready_indexes: Any, config: Any) -> Any:
        return [row for row in ready_indexes if row % 2 == 0]


def test_a_users_wrapper() -> None:
    h = Harness(OnlyEven(RankAwareSampler()))
    h.put(8)
    assert h.dealt(2, **rank(0)) == [0, 2]
    assert h.dealt(2, **rank(1)) == [4, 6]
    assert h.dealt(2, **rank(0)) == [0, 2], "kept by the controller"
    assert h.dealt(2, **rank(0, 1)) == []


class Picky(Mine):
    """Skips the rows in its `passed`."""

    passed: Any = None

    def passes_over(self, ready_indexes: Any, **config: Any) -> Any:
        return self.passed or {}


def test_a_users_sampler_may_skip_rows() -> None:
    picky = Picky()
    h = Harness(picky)
    h.put(3)
    picky.passed = {"dull": [2], "nothing": []}
    assert h.dealt(1) == [1]
    assert passed(h) == {"dull": 1}
    for wrong, words in (({"dull": [7]}, "not offered"), ({"dull": [2]}, "not offered"), ({"dull": "x"}, "lists of")):
        picky.passed = wrong
        with pytest.raises(SamplerError, match=words):
            h.dealt(1)
    picky.passed = [1]
    with pytest.raises(SamplerError, match="passes_over must return a dict"):
        h.dealt(1)


@pytest.mark.parametrize("final", [False, True])
def test_a_large_micro_batch_is_filled_in_the_background(final: bool) -> None:
    h = Harness(FreshnessSampler(TokenBudgetSampler(1000, dp_size=2), 1))
    count = 999 if final else 1001
    h.put(count, tags=by("total_lengths", *[2] * count))
    if final:
        h.ask(Seal("p"))
    first = h.claim(600, wait=10, **rank(0))
    assert h.parked(first)
    h.work()
    found = [h.got(first), h.dealt(600, **rank(1))]
    assert sorted(row for rows in found for row in rows or ()) == list(range(min(count, 1000)))
    assert sorted(len(rows or ()) for rows in found) == ([499, 500] if final else [500, 500])
