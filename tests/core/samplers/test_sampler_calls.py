"""Built-in samplers and their subclasses in the controller: separate tasks, and a group size for each claim."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.partitions import Seal
from transfer_queue.sampler import GRPOGroupNSampler, PrioritySampler, RankAwareSampler, SeqlenBalancedSampler


class ForwardingGroups(GRPOGroupNSampler):
    """A subclass that passes task and partition on by position."""

    def sample(
        self, ready_indexes: Any, batch_size: int, task_name: str = "", partition_id: str = "", *args: Any, **more: Any
    ) -> Any:
        return super().sample(ready_indexes, batch_size, task_name, partition_id, *args, **more)


class ForwardingBalance(SeqlenBalancedSampler):
    """The same with the balanced sampler."""

    def sample(
        self, ready_indexes: Any, batch_size: int, task_name: str = "", partition_id: str = "", *args: Any, **more: Any
    ) -> Any:
        return super().sample(ready_indexes, batch_size, task_name, partition_id, *args, **more)


class ForwardingRanks(RankAwareSampler):
    """The same with the sampler for ranks, whose rank and batch index come first."""

    def sample(
        self,
        ready_indexes: Any,
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **more: Any,
    ) -> Any:
        return super().sample(ready_indexes, batch_size, dp_rank, batch_index, task_name, partition_id, *args, **more)


@pytest.mark.parametrize("isolated", [False, True], ids=["inline", "process"])
@pytest.mark.parametrize(
    "build",
    [lambda: ForwardingGroups(2), lambda: ForwardingBalance(2, 1), ForwardingRanks,
     lambda: PrioritySampler(inner=ForwardingRanks())],
    ids=["groups", "balance", "ranks", "priority around ranks"],
)  # fmt: skip
def test_a_subclass_that_forwards_by_position_serves_two_tasks(
    build: Any, isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Harness, "isolated", isolated)
    h = Harness(build())
    h.put(2, tags=[{"total_lengths": 1}] * 2)
    asked = {"dp_rank": 0, "batch_index": 0}
    assert h.dealt(2, "actor", **asked) == [0, 1]
    h.clear([0, 1])
    h.put(2, tags=[{"total_lengths": 1}] * 2)
    assert h.dealt(2, "critic", **asked) == [2, 3], "a batch of its own, not that of the first task"


@pytest.mark.parametrize("isolated", [False, True], ids=["inline", "process"])
def test_a_rank_subclass_without_rank_or_batch_index_is_refused(
    isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Harness, "isolated", isolated)
    h = Harness(ForwardingRanks())
    h.put(2)
    for missing in ({"dp_rank": 0}, {"batch_index": 0}, {}):
        with pytest.raises(InvalidArgumentError, match="needs dp_rank and batch_index"):
            h.dealt(2, **missing)
    assert h.dealt(2, dp_rank=0, batch_index=0) == [0, 1]


class TestGroupSizePerClaim:
    def test_a_claim_can_have_the_size(self) -> None:
        h = Harness(GRPOGroupNSampler())
        h.put(6)
        assert h.dealt(4, n_samples_per_prompt=4) == [0, 1, 2, 3]
        assert h.dealt(2, "u", n_samples_per_prompt=2) == [0, 1]
        assert h.dealt(1, "v") == [0]

    def test_a_claim_waits_for_a_whole_group_of_its_size(self) -> None:
        h = Harness(PrioritySampler("n", GRPOGroupNSampler()))
        h.put(3)
        waiting = h.claim(4, wait=10, n_samples_per_prompt=4)
        assert h.parked(waiting)
        h.put(1)
        assert h.got(waiting) == [0, 1, 2, 3]

    def test_the_rest_after_a_seal_is_in_groups_of_that_size(self) -> None:
        h = Harness(GRPOGroupNSampler())
        h.put(7)
        h.ask(Seal("p"))
        assert h.dealt(6, n_samples_per_prompt=3) == [0, 1, 2, 3, 4, 5]
        assert h.dealt(6, n_samples_per_prompt=3) is None

    def test_a_partition_with_a_size_refuses_another(self) -> None:
        h = Harness(GRPOGroupNSampler())
        h.create(group_size=2)
        h.put(4)
        with pytest.raises(InvalidArgumentError, match=r"groups of 2 samples.*deals groups of 4"):
            h.dealt(4, n_samples_per_prompt=4)
