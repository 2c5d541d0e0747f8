"""Picking complete groups, from plain lists and from ready rows that know their groups."""

from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import GRPOGroupNSampler, SeqlenBalancedSampler
from transfer_queue.sampler.base import ReadyIndexes
from transfer_queue.sampler.ready_views import pick_groups


class Lazy(Sequence):
    """Ready rows with declared groups that count how many groups were read and refuse to be read completely."""

    def __init__(self, groups, loose=()):
        self.groups = sorted(sorted(group) for group in groups)
        self.rows = sorted(chain(*self.groups, loose))
        self.looked_at = 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        assert not isinstance(at, slice) or at.stop is not None
        return self.rows[at]

    def __iter__(self):
        raise AssertionError("read whole")

    def whole_groups(self, size):
        for group in self.groups:
            self.looked_at += 1
            if len(group) == size:
                yield list(group)


def naive_runs(ready, size):
    """Greedy runs by definition: from the lowest index on, take a run of `size`, or skip one index."""
    left, found = sorted(ready), []
    while left:
        run = list(range(left[0], left[0] + size))
        if left[:size] == run:
            found.append(run)
            left = left[size:]
        else:
            left = left[1:]
    return found


@given(st.lists(st.integers(0, 40), unique=True), st.integers(1, 5), st.integers(1, 6))
def test_runs_of_a_list(ready, size, count):
    before = list(ready)
    expected = naive_runs(ready, size)[:count]
    assert pick_groups(ready, size, count) == (expected if len(expected) == count else [])
    assert ready == before


@given(st.permutations(range(24)), st.integers(1, 4), st.integers(0, 5))
def test_declared_groups(rows, size, count):
    """Groups need not be consecutive; rows outside complete groups are never dealt."""
    groups = [rows[start : start + size] for start in range(0, 12, size)]
    whole = sorted(sorted(group) for group in groups if len(group) == size)
    ready = Lazy(groups, loose=rows[12:])
    sampled, consumed = GRPOGroupNSampler(size).sample(ready, size * count)
    expected = list(chain(*whole[:count])) if len(whole) >= count else []
    assert sampled == consumed == expected


def test_no_more_groups_are_read_than_needed():
    ready = Lazy([[2 * i, 2 * i + 1] for i in range(1000)])
    assert isinstance(ready, ReadyIndexes)
    GRPOGroupNSampler(2).sample(ready, 8)
    assert ready.looked_at <= 5


def test_too_few_rows_read_no_group():
    ready = Lazy([[0, 1]])
    assert GRPOGroupNSampler(2).sample(ready, 8) == ([], [])
    assert ready.looked_at == 0


def test_balanced_deals_declared_groups():
    ready = Lazy([[0, 7], [1, 6], [2, 5], [3, 4]], loose=[8, 9])
    shares = SeqlenBalancedSampler(2, 2).deal(ready, 4, batch_index=0)
    assert [sampled for sampled, _ in shares.values()] == [[0, 7, 1, 6], [2, 5, 3, 4]]


def test_a_list_does_not_implement_ready_indexes():
    assert not isinstance([1, 2], ReadyIndexes)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5])
def test_not_a_multiple(batch_size):
    sampler = GRPOGroupNSampler(3)
    for call in (
        lambda: sampler.sample(range(9), batch_size),
        lambda: sampler.deal(range(9), batch_size),
        lambda: sampler.validate(batch_size, {}),
    ):
        with pytest.raises(InvalidArgumentError, match="must be a multiple of n_samples_per_prompt"):
            call()
