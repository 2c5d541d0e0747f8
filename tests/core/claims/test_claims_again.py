"""Claims that return only what was dealt before, and metadata of rows without a claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import Harness, column, rows_of

from transfer_queue.errors import BatchGoneError, InvalidArgumentError, UnknownPartitionError
from transfer_queue.messages.claims import Claim, ResetConsumption
from transfer_queue.messages.queries import ShowRows
from transfer_queue.sampler import (
    BaseSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)


def again(rank: int = 0, number: int = 0, count: int = 2, **more: Any) -> Claim:
    return Claim("p", "t", ["x"], count, {"dp_rank": rank, "batch_index": number}, again=True, **more)


class KeepsNothing(BaseSampler):
    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a claim of a batch that was dealt before must not call the sampler")


class TestWithRanks:
    @pytest.fixture
    def h(self) -> Harness:
        return Harness(sampler=RankAwareSampler())

    @pytest.mark.parametrize("more", [{}, {"wait": 100.0}, {"probe": True}, {"lease": 5.0}, {"finite": True}])
    def test_a_dealt_batch_comes_again_and_no_other(self, h: Harness, more: dict[str, Any]) -> None:
        h.put(8)
        dealt = rows_of(h.ask(Claim("p", "t", ["x"], 2, {"dp_rank": 0, "batch_index": 0})))
        assert rows_of(h.ask(again(**more))) == ([] if more.get("probe") else dealt)
        for rank, number in ((0, 1), (1, 0)):
            with pytest.raises(BatchGoneError, match=f"batch {number} of dp_rank {rank} was not dealt"):
                h.ask(again(rank, number, **more))
        with pytest.raises(InvalidArgumentError, match="batch_size"):
            h.ask(again(count=3, **more))
        assert h.dealt(2, dp_rank=1, batch_index=0) == [2, 3], "nothing was dealt"

    def test_cleared_batches_and_reset_tasks(self, h: Harness) -> None:
        h.put(4)
        h.ask(Claim("p", "t", ["x"], 2, {"dp_rank": 0, "batch_index": 0}))
        h.ask(Claim("p", "t", ["x"], 2, {"dp_rank": 0, "batch_index": 1}))
        h.clear([0, 1])
        with pytest.raises(BatchGoneError, match="rows were cleared"):
            h.ask(again())
        h.ask(ResetConsumption("p", "t"))
        with pytest.raises(BatchGoneError, match="consumption was reset"):
            h.ask(again(number=1))
        with pytest.raises(UnknownPartitionError):
            h.ask(Claim("q", "t", ["x"], 2, {"dp_rank": 0, "batch_index": 0}, again=True))


@pytest.mark.parametrize(
    "make",
    [SequentialSampler, KeepsNothing, PrioritySampler],
)
@pytest.mark.parametrize("more", [{}, {"wait": 100.0}, {"probe": True}, {"lease": 5.0}])
def test_samplers_without_numbers_return_nothing_again(make: Callable[[], BaseSampler], more: dict[str, Any]) -> None:
    h = Harness(sampler=make())
    h.put(4)
    with pytest.raises(BatchGoneError, match=r"keeps no batches under a \(dp_rank, batch_index\)"):
        h.ask(again(**more))
    assert sum(h.ask(ShowRows("p", ["x"])).produced) == 4


def test_a_claim_without_a_rank_names_no_batch() -> None:
    h = Harness(sampler=SeqlenBalancedSampler(dp_size=1))
    h.put(4)
    with pytest.raises(BatchGoneError):
        h.ask(Claim("p", "t", ["x"], 2, {}, again=True))


class TestRowsOfABatch:
    def test_in_their_order_without_cleared_ones(self, h: Harness) -> None:
        h.put(5, tags=[{"n": n} for n in range(5)])
        h.clear([3])
        reply = h.ask(ShowRows("p", ["x"], column([4, 3, 0, 99])))
        assert (rows_of(reply), reply.tags, reply.produced) == ([4, 0], [{"n": 4}, {"n": 0}], b"\1\1")
        assert rows_of(h.ask(ShowRows("p", ["x"], b""))) == []
        assert h.dealt(4) == [0, 1, 2, 4], "nothing was consumed"

    def test_without_rows_that_the_task_skips(self) -> None:
        h = Harness()
        h.create("p", max_deliveries=1)
        h.put(4)
        h.nack(h.lease(2))
        assert rows_of(h.ask(ShowRows("p", ["x"], column([0, 1, 2]), "t"))) == [2]
        assert rows_of(h.ask(ShowRows("p", ["x"], column([0, 1, 2]), "u"))) == [0, 1, 2]
        assert rows_of(h.ask(ShowRows("p", ["x"], task="t"))) == [2, 3]
