"""Batches that a rank fetches ahead of need, if the number of ranks is not known."""

from __future__ import annotations

import pytest
from harness import Harness

from transfer_queue.messages.claims import RankGone
from transfer_queue.messages.partitions import Seal
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler, RankAwareSampler


def ask(h: Harness, rank: int, number: int, ahead: int = 0, **more: object) -> list[int] | None:
    return h.dealt(2, dp_rank=rank, batch_index=number, ahead=ahead, name=f"r{rank}", **more)


@pytest.fixture(params=[RankAwareSampler(), GRPOGroupNSampler(2)], ids=lambda sampler: type(sampler).__name__)
def ranks(request: pytest.FixtureRequest) -> Harness:
    return Harness(request.param)


def test_a_rank_that_needs_its_first_batch_fetches_no_second(ranks: Harness) -> None:
    """Other ranks may still be starting. No other rank is known when the rank needs the second batch."""
    ranks.put(12)
    assert ask(ranks, 0, 0) == [0, 1]
    assert ask(ranks, 0, 1, ahead=1) == []
    assert ask(ranks, 0, 1) == [2, 3]
    assert ask(ranks, 0, 2, ahead=1) == [4, 5]
    assert ask(ranks, 0, 3, ahead=2) == [6, 7]


def test_rows_that_a_slower_rank_needs_are_not_dealt_ahead(ranks: Harness) -> None:
    ranks.put(8)
    assert (ask(ranks, 0, 0), ask(ranks, 1, 0)) == ([0, 1], [2, 3])
    assert ask(ranks, 0, 1, ahead=1) == [4, 5]
    waiting = ranks.claim(2, dp_rank=0, batch_index=2, ahead=2, wait=9.0, name="r0")
    assert ranks.parked(waiting, "r0"), "the two rows that are left are those of dp_rank 1"
    assert ask(ranks, 1, 1, ahead=1) == [6, 7]
    ranks.put(2)
    assert ranks.parked(waiting, "r0"), "there must be enough for both"
    ranks.put(2)
    assert ranks.got(waiting, "r0") == [8, 9]
    assert ask(ranks, 1, 2) == [10, 11]


def test_a_waiting_rank_counts_as_known(ranks: Harness) -> None:
    ranks.put(2)
    assert ask(ranks, 0, 0) == [0, 1]
    first = ranks.claim(2, dp_rank=1, batch_index=0, wait=9.0, name="r1")
    ahead = ranks.claim(2, dp_rank=0, batch_index=1, ahead=1, wait=9.0, name="r0")
    ranks.put(2)
    assert ranks.got(first, "r1") == [2, 3]
    assert ranks.parked(ahead, "r0")


def test_a_batch_that_is_needed_now_does_not_wait_for_other_ranks(ranks: Harness) -> None:
    ranks.put(6)
    ask(ranks, 1, 0)
    assert [ask(ranks, 0, number) for number in range(2)] == [[2, 3], [4, 5]]


def test_a_rank_that_was_declared_gone_needs_nothing(ranks: Harness) -> None:
    ranks.put(4)
    ask(ranks, 0, 0), ask(ranks, 1, 0)
    ranks.put(2)
    assert ask(ranks, 0, 1, ahead=1) == []
    ranks.ask(RankGone("p", "t", 1))
    assert ask(ranks, 0, 1, ahead=1) == []
    assert ask(ranks, 0, 1) == [4, 5]
    ranks.put(2)
    assert ask(ranks, 0, 2, ahead=1) == [6, 7]


@pytest.mark.parametrize("sampler", [RankAwareSampler(dp_size=2), GRPOGroupNSampler(2, dp_size=2)])
def test_if_the_number_of_ranks_is_known_a_deal_is_for_all(sampler: BaseSampler) -> None:
    h = Harness(sampler)
    h.put(8)
    assert (ask(h, 0, 0), ask(h, 0, 1, ahead=1)) == ([0, 1], [4, 5])
    assert (ask(h, 1, 0), ask(h, 1, 1)) == ([2, 3], [6, 7])


def test_after_a_seal_ends_are_equal(ranks: Harness) -> None:
    ranks.put(4)
    assert (ask(ranks, 0, 0), ask(ranks, 1, 0, ahead=0)) == ([0, 1], [2, 3])
    ranks.ask(Seal("p"))
    assert (ask(ranks, 0, 1, ahead=1), ask(ranks, 1, 1, ahead=1)) == (None, None)


def test_without_ranks_a_batch_ahead_is_dealt() -> None:
    h = Harness()
    h.put(4)
    assert (ask(h, 0, 0), ask(h, 0, 1, ahead=1)) == ([0, 1], [2, 3])
