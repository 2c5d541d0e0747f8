"""After a seal every dp_rank gets the same number of batches; the rest is skipped and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.cli.status_table import format_table
from transfer_queue.core.claims.final_rounds import split_evenly
from transfer_queue.core.columns.kinds import IntervalSet
from transfer_queue.core.events.records import Dealt, PassedOver
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.partitions import ClearPartition, Seal
from transfer_queue.messages.queries import CheckConsumption, Explain
from transfer_queue.messages.system import Status
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)


def ask(h: Harness, rank: int, number: int, count: int = 4, **more: Any) -> list[int] | None:
    return h.dealt(count, dp_rank=rank, batch_index=number, **more)


def sealed(sampler: BaseSampler, rows: int) -> Harness:
    h = Harness(sampler)
    h.put(rows)
    h.ask(Seal("p"))
    return h


def sizes(h: Harness, ranks: int, number: int, count: int = 4) -> list[int | None]:
    """Return how many rows each rank gets in a round; None for the end."""
    got = [ask(h, rank, number, count) for rank in range(ranks)]
    return [None if rows is None else len(rows) for rows in got]


def passed(h: Harness) -> dict[tuple[str, str], int]:
    return h.state.partitions["p"].passed.counts


# ---------------------------------------------------------------- the remainder


@pytest.mark.design("the remainder is dealt over dp_size")
def test_the_remainder_is_divided_over_all_ranks() -> None:
    h = sealed(RankAwareSampler(dp_size=3), 19)
    assert sizes(h, 3, 0) == [4, 4, 4]
    assert sizes(h, 3, 1) == [3, 2, 2]
    assert sizes(h, 3, 2) == [None, None, None]
    assert passed(h) == {}


def test_one_deal_makes_the_last_round() -> None:
    h = sealed(RankAwareSampler(dp_size=3), 7)
    waiting = h.claim(4, wait=10, name="b", dp_rank=2, batch_index=0)
    assert h.got(waiting, "b") == [5, 6], "0..2 and 3..4 are the others'"
    (deal,) = [record for record in h.records if isinstance(record, Dealt)]
    assert [share.dp_rank for share in deal.shares] == [0, 1, 2]
    h.clear([5, 6])
    assert [len(ask(h, rank, 0) or []) for rank in (0, 1)] == [3, 2]


@pytest.mark.parametrize(
    ("sampler", "rows", "over"),
    [
        (RankAwareSampler(2, drop_last=True), 15, 7),
        (GRPOGroupNSampler(2, 2, drop_last=True), 14, 6),
        (SeqlenBalancedSampler(2, 2, drop_last=True), 14, 6),
    ],
    ids=["rank_aware", "grpo", "balanced"],
)
@pytest.mark.design("the remainder is dropped and reported where dp_size is unknown or drop_last is set")
def test_drop_last(sampler: BaseSampler, rows: int, over: int) -> None:
    h = sealed(sampler, rows)
    assert sizes(h, 2, 0) == [4, 4]
    assert passed(h) == {("t", "remainder"): over}
    assert sizes(h, 2, 1) == [None, None]
    assert h.ask(CheckConsumption("p", "t")).value is True


def test_drop_last_without_ranks() -> None:
    h = sealed(GRPOGroupNSampler(2, drop_last=True), 7)
    assert h.dealt(4) == [0, 1, 2, 3]
    assert h.dealt(4) is None
    assert passed(h) == {("t", "remainder"): 2}, "the odd row is of no whole group"


def test_without_a_batch_index_the_caller_gets_the_remainder() -> None:
    h = sealed(GRPOGroupNSampler(2, dp_size=2), 6)
    assert [h.dealt(4), h.dealt(4), h.dealt(4)] == [[0, 1, 2, 3], [4, 5], None]
    h = sealed(SequentialSampler(), 5)
    assert [h.dealt(4), h.dealt(4), h.dealt(4)] == [[0, 1, 2, 3], [4], None]


# ---------------------------------------------------------------- ranks out of step


def test_ranks_that_are_behind_are_dealt_first() -> None:
    h = Harness(RankAwareSampler())
    h.put(24)
    assert [ask(h, 1, 0), *(ask(h, 0, number) for number in range(3))] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15],
    ]  # fmt: skip
    h.ask(Seal("p"))
    assert ask(h, 0, 3) is None, "8 rows are the two batches that rank 1 lacks"
    assert [ask(h, 1, number) for number in (1, 2, 3)] == [[16, 17, 18, 19], [20, 21, 22, 23], None]


def test_the_remainder_is_divided_over_owed_batches_and_a_last_round() -> None:
    def ahead(rows: int) -> Harness:
        h = Harness(RankAwareSampler())
        h.put(rows)
        assert [ask(h, 1, 0), ask(h, 0, 0), ask(h, 0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        h.ask(Seal("p"))
        return h

    h = ahead(23)
    waiting = h.claim(4, wait=10, name="b", dp_rank=1, batch_index=1)
    assert h.got(waiting, "b") == [12, 13, 14, 15], "owed, and all shares can be full"
    assert ask(h, 0, 2) == [16, 17, 18, 19]
    assert ask(h, 1, 2) == [20, 21, 22]
    h = ahead(22)
    assert [ask(h, 0, 2), ask(h, 1, 1), ask(h, 1, 2)] == [[16, 17, 18], [12, 13, 14, 15], [19, 20, 21]]
    assert [ask(h, 0, 3), ask(h, 1, 3)] == [None, None]


def test_a_remainder_too_small_for_the_ranks_behind() -> None:
    h = Harness(RankAwareSampler())
    h.put(27)
    for rank in range(3):
        ask(h, rank, 0)
    for number in (1, 2, 3):
        ask(h, 0, number)
    h.ask(Seal("p"))
    assert ask(h, 0, 4) is None
    assert [len(ask(h, 1, number) or []) for number in range(5)] == [4, 1, 1, 0, 0]
    assert [len(ask(h, 2, number) or []) for number in range(3)] == [4, 1, 0]
    words = h.ask(Explain("p", task="t", fields=["x"])).value
    assert "different numbers of batches (0: 4, 1: 3, 2: 2)" in words


def test_ranks_with_different_dp_sizes_are_refused() -> None:
    h = Harness(RankAwareSampler())
    h.put(12)
    assert ask(h, 1, 0) == [0, 1, 2, 3]
    with pytest.raises(InvalidArgumentError, match="must pass the same dp_size"):
        ask(h, 0, 0, dp_size=2)


@pytest.mark.parametrize("final", [False, True])
def test_a_last_round_gives_no_rank_a_batch_that_it_was_dealt_by_itself(final: bool) -> None:
    """The second batch under one key could not be cleared any more: the state would have forgotten its first."""
    h = Harness(RankAwareSampler())
    h.put(12 if not final else 7)
    assert ask(h, 0, 2) == [0, 1, 2, 3]
    h.ask(Seal("p"))
    with pytest.raises(InvalidArgumentError, match=r"already dealt to the dp_ranks \[0\] alone"):
        ask(h, 1, 2, dp_size=2)
    assert ask(h, 0, 2) == [0, 1, 2, 3]
    h.ask(ClearPartition("p"))


def test_ranks_ask_with_batch_sizes_of_their_own() -> None:
    h = Harness(RankAwareSampler())
    h.put(19)
    assert len(ask(h, 0, 0, 6) or []) == 6
    assert len(ask(h, 1, 0, 3) or []) == 3
    h.ask(Seal("p"))
    assert len(ask(h, 1, 1, 3) or []) == 3
    assert [len(ask(h, 0, 1, 6) or []), ask(h, 1, 2, 3), ask(h, 0, 2, 6)] == [6, None, None]
    assert passed(h) == {("t", "remainder"): 1}


def test_without_dp_size_the_ranks_are_those_seen() -> None:
    h = Harness(RankAwareSampler())
    h.put(6)
    waiting = [h.claim(4, wait=10, name=f"c{rank}", dp_rank=rank, batch_index=1) for rank in (0, 1)]
    assert [h.got(waiting[0], "c0"), h.parked(waiting[1], "c1")] == [[0, 1, 2, 3], True]
    h.put(5)
    assert h.got(waiting[1], "c1") == [4, 5, 6, 7]
    late = h.claim(4, wait=10, name="late", dp_rank=2, batch_index=1)
    h.ask(Seal("p"))
    assert h.got(late, "late") == [8, 9, 10]


def test_a_claim_may_say_how_many_ranks_there_are() -> None:
    h = sealed(SequentialSampler(), 7)
    more = {"sampler": "RankAwareSampler", "dp_size": 2}
    assert [len(ask(h, rank, 0, **more) or []) for rank in (1, 0)] == [3, 4]


# ---------------------------------------------------------------- before everything is ready


def test_full_batches_are_dealt_while_more_rows_may_become_ready() -> None:
    h = Harness(RankAwareSampler())
    h.put(25, ("prompt",))
    h.put(8, rows=range(8))
    assert [ask(h, 0, 0), ask(h, 1, 0)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    h.ask(Seal("p"))
    for number in (1, 2):
        h.put(4, rows=range(4 + 4 * number, 8 + 4 * number))
        assert ask(h, 0, number) == list(range(4 + 4 * number, 8 + 4 * number))
    h.put(4, rows=range(16, 20))
    ahead = h.claim(4, wait=10, name="a", dp_rank=0, batch_index=3)
    assert h.parked(ahead, "a"), "9 rows were to come, the 2 batches that rank 1 lacks: no round more can be full"
    assert ask(h, 1, 1) == [16, 17, 18, 19]
    h.put(4, rows=range(20, 24))
    assert ask(h, 1, 2) == [20, 21, 22, 23]
    assert h.parked(ahead, "a"), "one row is to come, and no decision can be made before"
    h.put(1, rows=[24])
    assert h.got(ahead, "a") is None
    assert passed(h) == {("t", "remainder"): 1}


def test_a_clear_may_make_the_remainder_final() -> None:
    h = Harness(GRPOGroupNSampler(2, dp_size=2))
    h.put(8, ("prompt",))
    h.ask(Seal("p"))
    h.put(6, rows=range(6))
    waiting = [h.claim(4, wait=10, name=f"c{rank}", dp_rank=rank, batch_index=0) for rank in (0, 1)]
    assert [h.parked(waiting[0], "c0"), h.parked(waiting[1], "c1")] == [True, True]
    h.clear([7])
    assert [h.got(waiting[0], "c0"), h.got(waiting[1], "c1")] == [[0, 1, 2, 3], [4, 5]]
    assert [ask(h, rank, 1) for rank in (0, 1)] == [None, None], "row 6 is of a group that can never be whole"


def test_groups_that_can_never_be_complete_do_not_count() -> None:
    h = Harness(GRPOGroupNSampler(2, dp_size=2))
    h.put(16, ("prompt",))
    h.clear([9, 11, 13, 15])
    h.ask(Seal("p"))
    h.put(4, rows=range(4))
    assert [ask(h, 0, 0, 2), ask(h, 1, 0, 2)] == [[0, 1], [2, 3]]
    h.put(2, rows=[4, 5])
    waiting = h.claim(2, wait=10, name="c", dp_rank=0, batch_index=1)
    assert h.parked(waiting, "c")
    h.put(2, rows=[6, 7])
    assert [h.got(waiting, "c"), ask(h, 1, 1, 2)] == [[4, 5], [6, 7]]
    assert ask(h, 0, 2, 2) is None, "what is left are rows of groups that never will be"


# ---------------------------------------------------------------- what holds as before


@pytest.mark.parametrize("count", [4, 8])
def test_a_probe_skips_no_rows(count: int) -> None:
    h = sealed(RankAwareSampler(dp_size=4), 3)
    assert ask(h, 0, 0, count, probe=True) is None
    assert passed(h) == {}


@pytest.mark.parametrize("sampler", [RankAwareSampler(dp_size=2), GRPOGroupNSampler(2, dp_size=2)])
def test_refusals(sampler: BaseSampler) -> None:
    h = sealed(sampler, 8)
    with pytest.raises(InvalidArgumentError, match=r"dp_rank \(2\) must be less than dp_size \(2\)"):
        ask(h, 2, 0)
    for wrong in (0, -1, 1.5):
        with pytest.raises(InvalidArgumentError, match="dp_size must be positive"):
            type(sampler)(dp_size=wrong)


def test_the_claims_dp_size_is_checked() -> None:
    h = sealed(RankAwareSampler(), 8)
    with pytest.raises(InvalidArgumentError, match=r"dp_rank \(2\) must be less than dp_size \(2\)"):
        ask(h, 2, 0, dp_size=2)
    with pytest.raises(InvalidArgumentError, match="dp_size must be an int"):
        ask(h, 1, 0, dp_size="2")


# ---------------------------------------------------------------- told


@pytest.mark.design("the remainder is dropped and reported where dp_size is unknown or drop_last is set")
def test_skipped_rows_are_reported() -> None:
    h = sealed(RankAwareSampler(dp_size=4), 6)
    h.put(1, ("y",), rows=[5])
    assert sizes(h, 4, 0) == [2, 2, 1, 1]
    h = sealed(RankAwareSampler(dp_size=4), 3)
    ask(h, 0, 0)
    words = h.ask(Explain("p", row=2, task="t")).value
    assert "is skipped by task 't': remainder after the seal" in words
    status = h.ask(Status())
    assert status.partitions[0].passed == {"t": {"remainder": 3}}
    assert "3 skipped (remainder)" in format_table(status)
    assert "is skipped" not in h.ask(Explain("p", row=2, task="u")).value


@pytest.mark.parametrize("tasks", [["t"], ["t", "u"]])
def test_rows_that_no_task_needs_are_freed(tasks: list[str]) -> None:
    h = Harness(RankAwareSampler(dp_size=2))
    h.create(free_when=tasks)
    h.put(5)
    h.ask(Seal("p"))
    assert [ask(h, rank, 0, 2) for rank in (0, 1)] == [[0, 1], [2, 3]]
    partition = h.state.partitions["p"]
    assert (passed(h), partition.freed) == ({("t", "remainder"): 1}, 1 if tasks == ["t"] else 0)
    if tasks == ["t", "u"]:
        assert [ask(h, rank, 0, 2, task="u") for rank in (0, 1)] == [[0, 1], [2, 3]]
        assert partition.freed == 1, "the last sample is passed over by both, the others are held"


def test_a_reset_forgets_skipped_rows() -> None:
    h = sealed(RankAwareSampler(dp_size=4), 3)
    ask(h, 0, 0)
    h.ask(ResetConsumption("p", "u"))
    assert passed(h) == {("t", "remainder"): 3}
    h.ask(ResetConsumption("p", "t"))
    assert passed(h) == {}
    assert "is skipped" not in h.ask(Explain("p", row=2, task="t")).value
    assert ask(h, 0, 0, dp_size=4) is None
    h.clear([0, 1])
    assert passed(h) == {("t", "remainder"): 3}
    assert "is skipped" in h.ask(Explain("p", row=2, task="t")).value
    h.clear([2])
    assert list(h.state.partitions["p"].passed.codes.columns()) == []
    h.ask(ClearPartition("p"))


# ---------------------------------------------------------------- parts


@given(st.data())
def test_evenly(data: Any) -> None:
    most = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    count = data.draw(st.integers(len(most), sum(most) + 3))
    shares = split_evenly(count, most)
    assert sum(shares) == min(count, sum(most))
    assert all(1 <= share <= limit for share, limit in zip(shares, most, strict=True))
    open_ = [share for share, limit in zip(shares, most, strict=True) if share < limit]
    assert all(max(shares) - share <= 1 for share in open_), "one could have more, another has two more"


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_without(one: set[int], other: set[int]) -> None:
    a, b = IntervalSet(), IntervalSet()
    for value in one:
        a.add(value)
    for value in other:
        b.add(value)
    assert list(a.difference(b)) == sorted(one - other)
    assert list(a.difference(None)) == sorted(one)


# ---------------------------------------------------------------- whatever the order


BUILD: dict[str, Callable[[int, int, bool], BaseSampler]] = {
    "rank_aware": lambda group, ranks, drop: RankAwareSampler(ranks, drop),
    "groups": lambda group, ranks, drop: GRPOGroupNSampler(group, ranks, drop),
    "balanced": lambda group, ranks, drop: SeqlenBalancedSampler(group, ranks, drop),
}


@pytest.mark.parametrize("name", sorted(BUILD))
@pytest.mark.design("after a seal every dp_rank gets the same number of batches")
@differential(50, costly=True)
@given(data=st.data())
def test_whatever_the_order(name: str, data: Any) -> None:
    """Ranks that fetch some batches ahead of the slowest one; fields and the seals of producers in any order."""
    draw = data.draw
    ahead = draw(st.integers(0, 2))
    ranks, drop = draw(st.integers(1, 4)), draw(st.booleans())
    group = 1 if name == "rank_aware" else draw(st.integers(1, 3))
    size, units = draw(st.integers(1, 3)), draw(st.integers(0, 20))
    rows = units * group
    h = Harness(BUILD[name](group, ranks, drop))
    producers = draw(st.integers(1, 2))
    h.create(producers=producers)
    if rows:
        h.put(rows, ("prompt",))
    events: list[Any] = [*draw(st.permutations(range(rows))), *["seal"] * producers]
    if draw(st.booleans()):
        events = draw(st.permutations(events))
    numbers = [0] * ranks
    parked: dict[int, int] = {}
    got: dict[tuple[int, int], list[int]] = {}
    over: set[int] = set()

    def look() -> None:
        for rank, sequence in list(parked.items()):
            if h.reply(sequence, f"c{rank}") is None:
                continue
            del parked[rank]
            batch = h.got(sequence, f"c{rank}")
            if batch is None:
                over.add(rank)
            else:
                got[rank, numbers[rank]] = batch
                numbers[rank] += 1

    while len(over) < ranks:
        slowest = min(numbers[rank] for rank in range(ranks) if rank not in over)
        able = [r for r in range(ranks) if r not in parked and r not in over and numbers[r] <= slowest + ahead]
        if able and (not events or draw(st.booleans())):
            rank = draw(st.sampled_from(able))
            parked[rank] = h.claim(size * group, wait=1e6, name=f"c{rank}", dp_rank=rank, batch_index=numbers[rank])
        else:
            assert events, "an asker waits though nothing more will come"
            event = events.pop(0)
            if event == "seal":
                rest = units - sum(map(len, got.values())) // group
                before = list(numbers)
                owed = sum(max(numbers) - number for number in numbers)
                h.ask(Seal("p"))
            else:
                h.put(1, rows=[event])
        look()
    for event in events:
        assert event != "seal"
        h.put(1, rows=[event])
    for (rank, number), batch in got.items():
        again = h.dealt(size * group, name=f"replica of {rank}", dp_rank=rank, batch_index=number)
        assert again == batch, "a replica of a rank got another batch"

    counts = Counter(rank for rank, _ in got)
    if rest < owed:
        assert sum(counts.values()) == sum(c for c in before) + rest
        assert max(counts.values()) == max(before), "a round was begun that could not be completed"
    else:
        assert len({counts[rank] for rank in range(ranks)}) == 1, counts
    dealt = [row for batch in got.values() for row in batch]
    assert len(dealt) == len(set(dealt))
    assert all(0 < len(batch) <= size * group for batch in got.values())
    left = {row for r in h.records if isinstance(r, PassedOver) for row in np.frombuffer(r.rows, "<i8").tolist()}
    assert not left & set(dealt)
    assert left | set(dealt) == set(range(rows))
    assert len(left) < (size * ranks * group if drop else ranks * group) or not left
