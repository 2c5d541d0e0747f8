"""Priority: the highest first, groups by their highest member; otherwise like the inner sampler."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tagged import Partition, tagged

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
)
from transfer_queue.sampler.sampler_wrapper import built_in, dealer

WHO = {"task_name": "t", "partition_id": "p"}
priorities = st.dictionaries(st.integers(0, 30), st.integers(-3, 3) | st.floats(-3, 3), max_size=20)


def test_the_highest_come_first_and_equal_ones_in_order():
    partition = tagged("priority", {1: 5, 3: -1, 4: 5, 6: 0.5})
    assert PrioritySampler().sample([0, 1, 2, 3, 4, 6], 5, partition=partition) == ([1, 4, 6, 0, 2],) * 2


@given(st.lists(st.integers(0, 30), unique=True).map(sorted), priorities, st.integers(0, 10))
def test_the_order_equals_a_sort(ready, values, size):
    expected = sorted(ready, key=lambda row: (-values.get(row, 0), row))[:size]
    assert PrioritySampler("p").sample(ready, size, partition=tagged("p", values))[0] == expected


def test_without_a_partition_all_are_equal():
    assert PrioritySampler().sample([3, 1, 2], 2) == ([3, 1], [3, 1])


@pytest.mark.parametrize(("aging", "first"), [(0.0, 9), (0.4, 9), (0.5, 5), (1.0, 5)])
def test_aging_raises_priority_with_every_later_sample(aging, first):
    """Row 9 is higher by 2 than row 5, and four rows younger."""
    partition = tagged("priority", {5: 1, 9: 3})
    assert PrioritySampler(aging=aging).sample([5, 9], 1, partition=partition)[0] == [first]


def test_a_group_is_as_high_as_its_highest_member():
    partition = tagged("priority", {3: 1, 5: 7, 6: 2, 7: 2})
    sampler = PrioritySampler(inner=GRPOGroupNSampler(2))
    assert sampler.sample(list(range(8)), 6, partition=partition)[0] == [4, 5, 6, 7, 2, 3]


def test_a_wrapper_is_rank_consistent_if_its_inner_sampler_is():
    partition = tagged("priority", {7: 1, 6: 2, 5: 3, 4: 4})
    sampler = PrioritySampler(inner=RankAwareSampler())
    who = {**WHO, "dp_rank": 1, "batch_index": 0}
    assert not sampler.has_cached_result("p", "t", who)
    assert sampler.sample(list(range(8)), 2, partition=partition, **who)[0] == [4, 5]
    assert sampler.has_cached_result("p", "t", who)
    partition.tags.clear()
    assert sampler.sample([], 2, partition=partition, **who)[0] == [4, 5]
    again = PrioritySampler(inner=RankAwareSampler())
    again.load_checkpoint(sampler.save_checkpoint())
    assert again.sample([], 2, **who)[0] == [4, 5]
    assert again.save_checkpoint() == sampler.save_checkpoint()
    again.clear_cache("p")
    assert again.sample([1, 2], 2, **who)[0] == [1, 2]


def test_a_balanced_deal_of_the_highest():
    tags = {row: {"total_lengths": row + 1, "priority": row // 4} for row in range(12)}
    sampler = PrioritySampler(inner=SeqlenBalancedSampler(1, 2))
    shares = sampler.deal(list(range(12)), 2, partition=Partition(tags), batch_index=0)
    assert {rank: sorted(rows) for rank, (rows, _) in shares.items()} == {0: [8, 11], 1: [9, 10]}
    assert sampler.deal_key({"batch_index": 3}) == (0, 3)
    assert sampler.n_samples_per_prompt == 1
    assert not hasattr(PrioritySampler(), "n_samples_per_prompt")


@pytest.mark.parametrize("value", ["high", True, math.nan, [1], np.float32("nan")])
def test_a_tag_that_is_not_a_number_is_refused(value):
    with pytest.raises(InvalidArgumentError, match=r"tag 'priority' of row 2 must be a number, got .*set it to"):
        PrioritySampler().sample([1, 2], 1, partition=tagged("priority", {2: value}))


def test_numbers_of_any_type():
    values = {0: Fraction(1, 2), 1: np.int64(2), 2: 10**400, 3: -(10**400), 4: math.inf, 5: None}
    rows = PrioritySampler().sample(list(range(6)), 6, partition=tagged("priority", values))[0]
    assert rows == [2, 4, 1, 0, 5, 3]


@pytest.mark.parametrize("aging", [-1, math.inf, math.nan, "1", True])
def test_aging_is_checked(aging):
    with pytest.raises(InvalidArgumentError, match="aging must be a finite number, not negative"):
        PrioritySampler(aging=aging)


def test_arguments():
    with pytest.raises(InvalidArgumentError, match="tag must be the name of a tag, got 3"):
        PrioritySampler(3)
    with pytest.raises(InvalidArgumentError, match="inner of PrioritySampler must be a sampler, an instance"):
        PrioritySampler(inner=RankAwareSampler)
    with pytest.raises(InvalidArgumentError, match="must be a multiple of n_samples_per_prompt"):
        PrioritySampler(inner=GRPOGroupNSampler(2)).validate(3, WHO)
    with pytest.raises(InvalidArgumentError, match="SequentialSampler does not deal to ranks"):
        PrioritySampler().deal([1], 1)


class Users(BaseSampler):
    """Takes the last of the rows that it is shown."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        self.shown = ready_indexes
        rows = ready_indexes[:][::-1][:batch_size]
        return rows, rows


@pytest.mark.parametrize("wants_list", [True, False])
def test_around_a_users_sampler(wants_list):
    inner = Users()
    if not wants_list:
        inner.wants_list = False
    sampler = PrioritySampler(inner=PrioritySampler("other", inner))
    partition = Partition({0: {"other": 5, "priority": -1}})
    assert sampler.sample([0, 1, 2], 2, partition=partition)[0] == [2, 1]
    assert isinstance(inner.shown, list) == wants_list
    assert list(inner.shown) == [0, 1, 2], "the sampler inside of the other sees the other's order"


def test_which_samplers_deal_to_ranks():
    class Own(GRPOGroupNSampler):
        def sample(self, *args, **kwargs):
            return [], []

    class Subclass(GRPOGroupNSampler):
        pass

    replaced = RankAwareSampler()
    replaced.sample = lambda *args, **kwargs: ([], [])
    for inner, by_deal, ours in [
        (GRPOGroupNSampler(2), True, True),
        (PrioritySampler(), False, True),
        (Users(), False, False),
        (Own(), False, False),
        (Subclass(), True, False),
        (replaced, False, False),
    ]:
        for sampler in (inner, PrioritySampler(inner=inner), PrioritySampler(inner=PrioritySampler(inner=inner))):
            assert (dealer(sampler) is (inner if by_deal else None), built_in(sampler)) == (True, ours), inner
