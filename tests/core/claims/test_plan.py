"""Plans of claims: what is resolved once is never out of date. The harness checks each plan after every event."""

from __future__ import annotations

import pytest
from harness import Harness

from transfer_queue.core.claims.plan import ClaimPlan, Plans
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler


def test_claims_that_differ_only_in_rank_and_batch_have_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Claim] = []
    make = ClaimPlan.__init__
    h = Harness(RankAwareSampler())
    h.put(64)
    with monkeypatch.context() as patch:
        patch.setattr(ClaimPlan, "__init__", lambda plan, *args: (made.append(args[-1]), make(plan, *args))[1])
        for number in range(8):
            request = Claim("p", "t", ["x"], 2, {"dp_rank": number % 4, "batch_index": number // 4})
            h.controller.context.services[Plans].of(h.state.partitions["p"], request)
    assert len(made) == 1


def test_a_partition_of_the_same_name_has_plans_of_its_own() -> None:
    h = Harness(GRPOGroupNSampler())
    h.create(group_size=2)
    h.put(2, groups=["a", "a"])
    assert h.dealt(2) == [0, 1]
    h.ask(ClearPartition("p"))
    h.create(group_size=3)
    h.put(3, groups=["a", "a", "a"])
    assert h.dealt(3) == [2, 3, 4]


def test_equal_numbers_of_other_types_are_other_requests() -> None:
    h = Harness(RankAwareSampler())
    h.put(4)
    assert h.dealt(2, dp_rank=0, batch_index=0, dp_size=1) == [0, 1]
    with pytest.raises(InvalidArgumentError, match="dp_size must be an int"):
        h.dealt(2, dp_rank=0, batch_index=1, dp_size=1.0)
