"""Dealt batches: rank-consistent and balanced; late, partly cleared, gone, forgotten."""

from __future__ import annotations

import itertools

import pytest
from harness import Harness, rows_of

from transfer_queue.errors import BatchGoneError, InvalidArgumentError, SamplerError, StorageKeyNotFoundError
from transfer_queue.messages.base import Failure
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.partitions import Seal
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler


@pytest.fixture(params=[RankAwareSampler, lambda: GRPOGroupNSampler(2)], ids=["rank_aware", "grpo"])
def ranks(request: pytest.FixtureRequest) -> Harness:
    return Harness(request.param())


# ---------------------------------------------------------------- rank-consistent


def test_every_process_of_a_rank_gets_the_same_batch(ranks: Harness) -> None:
    ranks.put(8)
    first = ranks.dealt(2, dp_rank=0, batch_index=0)
    assert first == [0, 1]
    for _ in range(3):
        assert ranks.dealt(2, dp_rank=0, batch_index=0) == first
    assert ranks.dealt(2, dp_rank=1, batch_index=0) == [2, 3]
    assert ranks.dealt(2, dp_rank=0, batch_index=1) == [4, 5]
    assert ranks.dealt(2, "other", dp_rank=0, batch_index=0) == [0, 1]
    assert ranks.controller.context.measures.counters["dealt_rows"] == 8


@pytest.mark.design("the same key asked with another batch_size is a ValueError")
def test_another_batch_size_is_an_error(ranks: Harness) -> None:
    ranks.put(6)
    waiting = ranks.claim(8, wait=10, name="late", dp_rank=0, batch_index=0)
    ranks.dealt(2, dp_rank=0, batch_index=0)
    with pytest.raises(InvalidArgumentError, match="dealt with batch_size 2, but this claim has 4"):
        ranks.dealt(4, dp_rank=0, batch_index=0)
    with pytest.raises(InvalidArgumentError, match="but this claim has 8"):
        ranks.result(waiting, "late")
    assert ranks.dealt(2, dp_rank=0, batch_index=0) == [0, 1]


@pytest.mark.design(
    "a dealt batch is kept until all its rows are cleared or its partition is dropped",
    "a later ask for a batch that is gone is an error and never fresh rows",
)
def test_a_batch_that_is_gone_is_an_error_and_not_replaced(ranks: Harness) -> None:
    ranks.put(6)
    ranks.dealt(2, dp_rank=0, batch_index=0)
    ranks.clear([0, 1])
    for _ in range(2):
        with pytest.raises(BatchGoneError, match=r"batch 0 of dp_rank 0.*do not replace it"):
            ranks.dealt(2, dp_rank=0, batch_index=0)
    assert ranks.dealt(2, dp_rank=1, batch_index=0) == [2, 3]
    assert ranks.dealt(2, dp_rank=0, batch_index=1) == [4, 5]
    dealt = ranks.state.partitions["p"].dealt["t"]
    assert {rank: (issued.starts, issued.ends) for rank, issued in dealt.issued.items()} == {
        0: ([0], [1]),
        1: ([0], [0]),
    }


@pytest.mark.design("issued batch indexes are kept as intervals")
def test_the_dealt_batch_indexes_take_bounded_space(ranks: Harness) -> None:
    for number in range(50):
        ranks.put(2)
        ranks.clear(ranks.dealt(2, dp_rank=0, batch_index=number) or [])
    dealt = ranks.state.partitions["p"].dealt["t"]
    assert (dealt.batches, dealt.by_key, dealt.issued[0].ends) == ({}, {}, [49])
    with pytest.raises(BatchGoneError):
        ranks.dealt(2, dp_rank=0, batch_index=25)


def test_a_partly_cleared_batch_still_contains_all_its_rows(ranks: Harness) -> None:
    ranks.put(4, tags=[{"n": number} for number in range(4)])
    ranks.dealt(4, dp_rank=0, batch_index=0)
    ranks.clear([1, 2])
    sequence = ranks.claim(4, dp_rank=0, batch_index=0)
    reply = ranks.result(sequence, "r")
    assert rows_of(reply) == [0, 1, 2, 3]
    assert reply.tags == [{"n": 0}, {}, {}, {"n": 3}]
    with pytest.raises(StorageKeyNotFoundError, match=r"\[1, 2\]"):
        ranks.lookup(rows_of(reply), ["x"])


@pytest.mark.design("reset_consumption forgets that task's dealt batches")
def test_a_reset_forgets_dealt_batches(ranks: Harness) -> None:
    ranks.put(4)
    ranks.dealt(2, dp_rank=0, batch_index=0)
    ranks.dealt(2, dp_rank=1, batch_index=0)
    ranks.dealt(4, "u", dp_rank=0, batch_index=0)
    ranks.ask(ResetConsumption("p", "t"))
    assert ranks.dealt(4, dp_rank=1, batch_index=0) == [0, 1, 2, 3]
    assert ranks.dealt(4, "u", dp_rank=0, batch_index=0) == [0, 1, 2, 3]
    ranks.clear([0, 1, 2, 3])
    ranks.ask(ResetConsumption("p", "t"))
    assert ranks.dealt(4, dp_rank=1, batch_index=0) == []


@pytest.mark.design("a replica that lags still gets its last batch")
def test_a_late_rank_gets_the_last_batch(ranks: Harness) -> None:
    ranks.put(4)
    ranks.dealt(4, dp_rank=0, batch_index=0)
    ranks.ask(Seal("p"))
    assert ranks.dealt(4, dp_rank=0, batch_index=0) == [0, 1, 2, 3]
    assert ranks.dealt(4, dp_rank=0, batch_index=1) is None
    assert ranks.dealt(4, dp_rank=0, batch_index=0, finite=True) == [0, 1, 2, 3]


@pytest.mark.parametrize("missing", ["dp_rank", "batch_index"])
def test_a_rank_consistent_claim_needs_dp_rank_and_batch_index(missing: str) -> None:
    h = Harness(RankAwareSampler())
    sampling = {name: 0 for name in ("dp_rank", "batch_index") if name != missing}
    with pytest.raises(InvalidArgumentError, match=missing):
        h.dealt(1, **sampling)


# ---------------------------------------------------------------- balanced


def balanced(size: int = 1, ranks: int = 2) -> Harness:
    return Harness(SeqlenBalancedSampler(size, ranks))


def lengths(*values: int) -> list[dict[str, int]]:
    return [{"total_lengths": value} for value in values]


@pytest.mark.design("a balanced deal takes all ranks' shares out of the ready set at once")
def test_one_deal_assigns_the_shares_of_all_ranks() -> None:
    h = balanced()
    h.put(6, tags=lengths(9, 1, 5, 5, 7, 7))
    assert h.dealt(2, dp_rank=1, batch_index=0) is not None
    assert h.state.partitions["p"].tasks["t"] == 4
    shares = [h.dealt(2, dp_rank=rank, batch_index=0) for rank in (0, 1)]
    assert sorted(itertools.chain(*(share or [] for share in shares))) == [0, 1, 2, 3]
    assert sorted(map(sorted, (share or [] for share in shares))) == [[0, 1], [2, 3]], "9 + 1 and 5 + 5"
    assert h.dealt(2, dp_rank=0, batch_index=1) == [], "two rows are too few for two ranks"


def test_a_claim_without_dp_rank_is_for_rank_0() -> None:
    h = balanced()
    second = h.claim(2, wait=10, name="b", dp_rank=1, batch_index=0)
    first = h.claim(2, wait=10, name="a", batch_index=0)
    h.put(4)
    assert sorted([*(h.got(first, "a") or []), *(h.got(second, "b") or [])]) == [0, 1, 2, 3]


def test_a_waiting_rank_with_another_batch_size_gets_an_error() -> None:
    h = balanced()
    odd = h.claim(1, wait=10, name="odd", dp_rank=1, batch_index=0)
    h.put(1)
    assert h.parked(odd, "odd")
    late = h.claim(3, wait=10, name="late", dp_rank=0, batch_index=0)
    h.put(1)
    assert h.got(odd, "odd") is not None
    with pytest.raises(InvalidArgumentError, match="batch_size 1, but this claim has 3"):
        h.result(late, "late")


def test_a_balanced_deal_refuses_wrong_ranks_and_lengths() -> None:
    h = balanced(2, 2)
    for count, sampling in ((2, {"dp_rank": 2, "batch_index": 0}), (1, {"batch_index": 0}), (3, {})):
        with pytest.raises(InvalidArgumentError):
            h.dealt(count, **sampling)
    h.put(4, tags=[{}, {}, {"total_lengths": "long"}, {}])
    waiting = h.claim(4, wait=10, batch_index=0)
    with pytest.raises(InvalidArgumentError, match="row 2 must be a finite number"):
        h.dealt(2, batch_index=0)
    h.put(4)
    with pytest.raises(InvalidArgumentError, match="row 2"):
        h.result(waiting, "r")
    assert h.state.partitions["p"].tasks == {}


# ---------------------------------------------------------------- a user's sampler


class Backwards(RankAwareSampler):
    """A user's sampler that deals the newest rows; `_sample` is inherited."""

    wrong = ""

    def deal(self, ready_indexes, batch_size, **config):  # type: ignore[no-untyped-def]
        rank, _ = self.deal_key(config)
        rows = ready_indexes[:][::-1][:batch_size]
        if self.wrong == "raise":
            raise KeyError("oops")
        if self.wrong == "foreign":
            rows = [10**6]
        return {rank + (self.wrong == "other"): (rows, rows)}


@pytest.mark.design("a Dealt record carries the outcome; replay never calls a sampler")
def test_a_user_sampler_deals_to_all_ranks() -> None:
    """The replay at the end has every deal, although a call of the sampler would fail by then."""
    sampler = Backwards()
    h = Harness(sampler)
    h.put(3)
    for wrong, text in (("raise", "KeyError: 'oops'"), ("foreign", "1000000"), ("other", "returned no share")):
        sampler.wrong = wrong
        with pytest.raises(SamplerError, match=text):
            h.dealt(2, dp_rank=0, batch_index=0)
    sampler.wrong = ""
    assert h.state.partitions["p"].tasks == {}
    assert h.dealt(2, dp_rank=0, batch_index=0) == [2, 1]
    assert h.dealt(2, dp_rank=0, batch_index=0) == [2, 1]
    waiting = h.claim(2, wait=10, dp_rank=1, batch_index=0)
    assert not isinstance(h.reply(waiting, "r"), Failure)
    h.put(1)
    assert h.got(waiting) == [3, 0]
    sampler.wrong = "raise"
