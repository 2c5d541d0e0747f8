"""Balancing is never worse than largest differencing, of which this file has a second implementation, as published.

Karmarkar & Karp, "The differencing method of set partitioning", 1982; for k parts a state is a tuple of k sums. With
equal counts the values are dealt to the first states k at a time, in order of size.
"""

import heapq
import random

import pytest
from divisions import heaviest
from hypothesis import given, settings
from hypothesis import strategies as st
from tagged import tagged

from transfer_queue.sampler import SeqlenBalancedSampler
from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions, karmarkar_karp

CASES = 2_000


def differencing(lengths, k, equal):
    """The parts, as lists of positions, by pure Python on plain lists."""
    ascending = sorted((length, position) for position, length in enumerate(lengths))
    step = k if equal else 1
    states = []
    for first in range(0, len(ascending), step):
        parts = [(length, [position]) for length, position in ascending[first : first + step]]
        states.append(_state(parts + [(0, [])] * (k - len(parts)), first))
    heapq.heapify(states)
    for number in range(len(lengths), len(lengths) + len(states) - 1):
        one, two = heapq.heappop(states)[-1], heapq.heappop(states)[-1]
        parts = [(a + b, some + more) for (a, some), (b, more) in zip(one, reversed(two))]
        heapq.heappush(states, _state(parts, number))
    return [positions for _, positions in states[0][-1]]


def _state(parts, number):
    """The largest spread comes first, of equal ones that with the largest sum."""
    falling = sorted(parts, key=lambda part: -part[0])
    return falling[-1][0] - falling[0][0], -falling[0][0], number, falling


def drawn(seed, count):
    """Small problems: (lengths, k, equal counts)."""
    generator = random.Random(seed)
    for _ in range(count):
        k, equal = generator.randint(2, 5), generator.random() < 0.5
        size = k * generator.randint(1, 4) if equal else generator.randint(k, 4 * k)
        top = generator.choice([3, 20, 100, 1000])
        yield [generator.randint(1, top) for _ in range(size)], k, equal


def test_balancing_is_never_worse_than_differencing():
    for problem in drawn(1, CASES):
        lengths = problem[0]
        found = heaviest(get_seqlen_balanced_partitions(*problem), lengths)
        assert found <= heaviest(differencing(*problem), lengths), problem
        assert found <= heaviest(karmarkar_karp(*problem), lengths), problem


@pytest.mark.parametrize("size", [1, 2])
def test_a_samplers_deal_is_never_worse_than_differencing(size):
    for sums, ranks, equal in drawn(2, 500):
        if len(sums) % ranks == 0 and not equal:
            sums.append(7)  # groups that divide evenly are dealt in equal counts
        if size * len(sums) % ranks:
            continue  # no batch_size has so many groups
        lengths = [part for total in sums for part in (total, *[0] * (size - 1))]
        partition = tagged("total_lengths", dict(enumerate(lengths)))
        sampler = SeqlenBalancedSampler(size, ranks)
        batch = len(sums) * size // ranks
        shares = sampler.deal(range(len(sums) * size), batch, batch_index=0, partition=partition)
        parts = [[row // size for row in rows[::size]] for rows, _ in shares.values()]
        even = len(sums) % ranks == 0
        assert heaviest(parts, sums) <= heaviest(differencing(sums, ranks, even), sums)


@pytest.mark.parametrize(
    ("lengths", "k", "equal", "best"),
    [
        ([7, 1, 13, 17, 14, 7], 2, False, 30),
        ([100, 3, 40, 79, 29, 11, 96, 29, 36, 88, 81, 44], 3, False, 213),
    ],
)
def test_cases_that_used_to_be_worse(lengths, k, equal, best):
    assert heaviest(get_seqlen_balanced_partitions(lengths, k, equal), lengths) == best


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 10**6), min_size=2, max_size=24, unique=True), data=st.data())
def test_the_plain_method_is_the_published_one(lengths, data):
    """If all spreads differ, there are no ties, so both divide in the same way."""
    k = data.draw(st.integers(2, min(5, len(lengths))))
    equal = data.draw(st.booleans())
    if equal:
        lengths = lengths[: len(lengths) // k * k]
    assert heaviest(karmarkar_karp(lengths, k, equal), lengths) == heaviest(differencing(lengths, k, equal), lengths)
