"""Token budget: complete groups up to a budget, all ranks in lockstep, the others stay ready."""

import math
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tagged import tagged

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import PrioritySampler, TokenBudgetSampler

TAG = "total_lengths"
WHO = {"task_name": "t", "partition_id": "p"}


def deal(lengths, budget, size=1, ranks=1, batch_size=100, **more):
    """Return the micro-batches of one deal of rows 0.. with these lengths, by rank."""
    partition = tagged(TAG, dict(enumerate(lengths)))
    sampler = TokenBudgetSampler(budget, size, ranks)
    shares = sampler.deal(range(len(lengths)), batch_size, partition=partition, batch_index=0, **more)
    assert all(sampled == consumed for sampled, consumed in shares.values())
    assert list(shares) == list(range(ranks)) or not shares
    return [sampled for sampled, _ in shares.values()]


def test_groups_are_dealt_up_to_the_budget():
    assert deal([4, 3, 3, 1], 10) == [[0, 1, 2]]
    assert deal([4, 3, 3], 10) == [], "another could fit"
    assert deal([4, 3, 3], 10, final=True) == [[0, 1, 2]]
    assert deal([4, 3, 3], 10, batch_size=3) == [[0, 1, 2]]
    assert deal([4, 3, 3, 1], 10, batch_size=2) == [[0, 1]]


def test_later_ones_do_not_overtake():
    """Row 2 fits into no micro-batch, so the deal ends there, although row 3 would fit."""
    assert deal([6, 6, 5, 1], 10, ranks=2) == [[0], [1]]


def test_a_group_above_the_budget_is_alone():
    assert deal([50, 1, 1], 10) == [[0]]
    assert deal([1, 50, 1], 10) == [[0]], "it waits for an empty rank, and is not overtaken"
    assert deal([50, 4, 4, 4], 10, ranks=2) == [[0], [1, 2]]


def test_groups_are_complete_and_even():
    assert deal([1, 1, 9, 9, 8, 8, 2, 2, 9, 9], 20, size=2, ranks=2) == [[0, 1, 2, 3], [4, 5, 6, 7]], "dealt anew"
    assert deal([1, 2, 3, 4, 5], 9, ranks=2, final=True) == [[0, 1, 4], [2, 3]], "8 and 7"
    assert deal([8, 8, 8, 8, 8], 20, size=2) == [[0, 1]] == deal([8] * 4, 20, size=2)
    assert deal([8] * 3, 20, size=2) == []


def test_the_last_deals():
    assert deal([5], 10, ranks=2, final=True) == [], "a rank would get none"
    assert deal([5, 1, 1], 10, ranks=2, final=True) == [[0], [1, 2]]
    partition = tagged(TAG, {0: 5, 1: 5})
    tidy = TokenBudgetSampler(10, drop_last=True)
    assert tidy.deal([0], 4, partition=partition, final=True) == {}
    assert tidy.deal([0, 1], 2, partition=partition, final=True) == {0: ([0, 1], [0, 1])}


@given(
    st.lists(st.integers(0, 30), max_size=40),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_rounds_until_the_end(lengths, budget, size, ranks, held):
    """All deals after a seal are within the budget, complete, in lockstep and in order; only a remainder is left."""
    partition = tagged(TAG, dict(enumerate(lengths)))
    sampler = TokenBudgetSampler(budget, size, ranks)
    left = list(range(len(lengths)))
    groups = [left[first : first + size] for first in range(0, len(left) - size + 1, size)]
    while True:
        found = sampler.deal(left, held * size, partition=partition, batch_index=0)
        shares = found or sampler.deal(left, held * size, partition=partition, batch_index=0, final=True)
        if not shares:
            break
        assert set(shares) == set(range(ranks))
        taken = []
        for rows, _ in shares.values():
            parts = [rows[first : first + size] for first in range(0, len(rows), size)]
            assert parts
            assert len(rows) <= held * size
            assert sum(lengths[row] for row in rows) <= budget or len(parts) == 1
            taken += parts
        assert sorted(taken) == groups[: len(taken)], "the first ones, whole"
        groups = groups[len(taken) :]
        gone = set(chain.from_iterable(taken))
        left = [row for row in left if row not in gone]
    assert len(groups) < ranks


def test_a_direct_call_is_rank_consistent():
    partition = tagged(TAG, dict.fromkeys(range(10), 5))
    sampler = TokenBudgetSampler(10, dp_size=2)
    one = sampler.sample(list(range(10)), 4, partition=partition, dp_rank=1, batch_index=0, **WHO)
    assert one == ([1, 3], [1, 3]) or one == ([2, 3], [2, 3])
    other = sampler.sample([], 4, partition=partition, batch_index=0, **WHO)
    assert sorted(other[0] + one[0]) == [0, 1, 2, 3]
    assert sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0})
    assert sampler.sample([4, 5, 6], 4, partition=partition, batch_index=1, **WHO) == ([], [])
    assert not sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 1})


def test_it_reads_no_more_tags_than_a_deal_can_hold():
    partition = tagged(TAG, dict.fromkeys(range(1000), 1))
    TokenBudgetSampler(1000, 2, 2).deal(range(1000), 8, partition=partition, batch_index=0)
    assert partition.asked == 2 * 8 + 2


def test_by_priority():
    tags = tagged(TAG, dict.fromkeys(range(6), 5))
    tags.tags[4]["priority"] = 1
    assert PrioritySampler(inner=TokenBudgetSampler(10)).deal(range(6), 6, partition=tags)[0][0] == [4, 0]


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "is missing"), (-1, "is -1.0"), (math.inf, "is inf"), ("5", "must be a number, got '5'")],
)
def test_invalid_lengths_are_refused(value, words):
    with pytest.raises(InvalidArgumentError, match=f"tag 'total_lengths' of row 1 {words}"):
        deal([1, value], 10)


def test_arguments():
    for more in ({"token_budget": 0}, {"n_samples_per_prompt": 0}, {"dp_size": 0}, {"token_budget": "8"}):
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(more))} must be positive"):
            TokenBudgetSampler(**{"token_budget": 8, **more})
    with pytest.raises(InvalidArgumentError, match="tag must be the name of a tag"):
        TokenBudgetSampler(8, tag=None)
    sampler = TokenBudgetSampler(8, 2, 2)
    with pytest.raises(InvalidArgumentError, match=r"batch_size \(3\) must be a multiple"):
        sampler.validate(3, {})
    with pytest.raises(InvalidArgumentError, match=r"dp_rank \(2\) must be less than"):
        sampler.sample([], 2, dp_rank=2)
    assert sampler.sample([0, 1], 0) == ([], [])
