"""Freshness: rows of a policy that is too old are skipped and counted; the inner sampler deals the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tagged import tagged

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import (
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SequentialSampler,
)

REASON = "stale: more than {} policy versions behind"
WHO = {"task_name": "t", "partition_id": "p"}


def fresh(inner, max_staleness=1, **more):
    return FreshnessSampler(inner, max_staleness, **more)


def test_rows_that_are_too_old_are_consumed():
    partition = tagged("policy_version", {0: 3, 1: 2, 2: 1, 3: 9, 5: 0}, policy_version=3)
    sampler = fresh(SequentialSampler())
    assert sampler.sample(list(range(6)), 3, partition=partition) == ([0, 1, 3], [0, 1, 3, 2, 5])
    assert sampler.passes_over(list(range(6)), partition=partition) == {REASON.format(1): [2, 5]}
    assert sampler.passes_over([0, 1, 3, 4], partition=partition) == {}


@given(
    st.lists(st.integers(0, 20), unique=True).map(sorted),
    st.dictionaries(st.integers(0, 20), st.integers(0, 6)),
    st.integers(0, 8),
    st.integers(0, 3),
)
def test_by_definition(ready, versions, current, bound):
    partition = tagged("v", versions)
    sampler = fresh(SequentialSampler(), bound, tag="v")
    old = [row for row in ready if current - versions.get(row, current) > bound]
    assert sampler.passes_over(ready, partition=partition, policy_version=current) == (
        {REASON.format(bound): old} if old else {}
    )
    expected = [row for row in ready if row not in old]
    assert sampler.sample(ready, 30, partition=partition, policy_version=current)[0] == expected


def test_the_current_version():
    partition = tagged("policy_version", {0: 1}, policy_version=2)
    sampler = fresh(SequentialSampler())
    assert sampler.sample([0], 1, partition=partition)[0] == [0]
    assert sampler.sample([0], 1, partition=partition, policy_version=3) == ([], [])
    partition.policy_version = 3
    assert sampler.sample([0], 1, partition=partition) == ([], [])
    assert sampler.sample([0], 1, partition=partition, policy_version=0)[0] == [0]
    assert sampler.sample([0], 1)[0] == [0], "without a partition nothing is known to be old"


def test_a_group_is_skipped_completely():
    partition = tagged("policy_version", {0: 5, 1: 1, 2: 5, 3: 5}, policy_version=5)
    sampler = fresh(GRPOGroupNSampler(2))
    assert sampler.sample(list(range(4)), 2, partition=partition) == ([2, 3], [2, 3, 0, 1])
    assert sampler.passes_over(list(range(4)), partition=partition) == {REASON.format(1): [0, 1]}


def test_nested_and_rank_consistent():
    partition = tagged("policy_version", {0: 0, 1: 5, 2: 5, 3: 5, 4: 5, 5: 5}, policy_version=5)
    partition.tags[4]["priority"] = 1
    for sampler in (
        fresh(PrioritySampler(inner=GRPOGroupNSampler(2))),
        PrioritySampler(inner=fresh(GRPOGroupNSampler(2))),
    ):
        who = {**WHO, "dp_rank": 0, "batch_index": 0}
        assert sampler.sample(list(range(6)), 2, partition=partition, **who)[0] == [4, 5]
        assert sampler.has_cached_result("p", "t", who)
        assert sampler.sample([2, 3], 2, partition=partition, **who)[0] == [4, 5]
        assert sampler.passes_over(list(range(6)), partition=partition) == {REASON.format(1): [0, 1]}


def test_two_bounds_of_one_kind_are_counted_together():
    partition = tagged("policy_version", {0: 0, 1: 5}, policy_version=5)
    partition.tags[1]["reward_version"] = 0
    sampler = fresh(fresh(RankAwareSampler()), tag="reward_version")
    assert sampler.passes_over([0, 1, 2], partition=partition) == {REASON.format(1): [0, 1]}
    assert sampler.remainder([0, 1, 2], partition=partition) == 1


def test_arguments():
    for bad, words in [(-1, "greater than or equal to 0"), (1.5, "must be an int"), (None, "got None")]:
        with pytest.raises(InvalidArgumentError, match=f"max_staleness .*{words}"):
            fresh(SequentialSampler(), bad)
    with pytest.raises(InvalidArgumentError, match="inner of FreshnessSampler must be a sampler"):
        fresh(None)
    with pytest.raises(InvalidArgumentError, match="tag must be the name of a tag"):
        fresh(SequentialSampler(), tag=None)
    with pytest.raises(InvalidArgumentError, match="policy_version must be an int, got a str"):
        fresh(SequentialSampler()).validate(1, {"policy_version": "3"})
    with pytest.raises(InvalidArgumentError, match="tag 'policy_version' of row 1 must be a number"):
        fresh(SequentialSampler()).sample([0, 1], 1, partition=tagged("policy_version", {1: "new"}))
