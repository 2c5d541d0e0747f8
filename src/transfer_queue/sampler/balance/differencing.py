"""Largest differencing for k parts (Karmarkar and Karp, "The differencing method of set partitioning", 1982)."""

from __future__ import annotations

import heapq
from enum import Enum
from typing import TypeAlias

import numpy as np

from transfer_queue.sampler.balance.validation import Floats, Ints

# The non-empty parts of a state: their sums in descending order, and for each part the item that represents it.
_Parts: TypeAlias = tuple[Floats, Ints]


class Ties(Enum):
    """Which of the states with equal spreads is merged first.

    The value is a tuple of signs: of the largest sum, of the state's number, and of the numbers of the initial states,
    which are counted from the one with the largest values.
    """

    LARGEST = (-1, 1, 1)
    """The state with the largest sum; of several, the one that was made first."""

    OLDEST = (0, 1, 1)
    """The state that was made first; of the initial states, the one with the largest values."""

    OLDEST_SMALLEST = (0, 1, -1)
    """The state that was made first; of the initial states, the one with the smallest values."""

    NEWEST = (0, -1, -1)
    """The state that was made last; of the initial states, the one with the largest values."""

    NEWEST_SMALLEST = (0, -1, 1)
    """The state that was made last; of the initial states, the one with the smallest values."""


def divide_by_differencing(ranked: Floats, k: int, *, equal: bool, ties: Ties = Ties.LARGEST) -> Ints:
    """Return the part of each rank by differencing alone.

    Args:
        ranked: Values in descending order.
        k: Number of parts, at most the number of values.
        equal: Whether counts are equal; they differ by one if k does not divide the number of values.
        ties: Which of the states with equal spreads is merged first.
    """
    if not equal:
        return differencing(ranked, np.arange(len(ranked)).reshape(-1, 1), k, ties)
    short = -len(ranked) % k
    padded = np.concatenate([ranked, np.zeros(short)]) if short else ranked
    return differencing(padded, np.arange(len(padded)).reshape(-1, k), k, ties)[: len(ranked)]


def differencing(ranked: Floats, rows: Ints, k: int, ties: Ties) -> Ints:
    """Return the part of each rank, of k parts, none empty.

    A state is k sums in descending order. The two states with the largest spread are merged, the largest sums of one
    with the smallest of the other, until one state is left.

    Args:
        ranked: Values in descending order.
        rows: [r, c] ranks, c <= k; the items of one row go to different parts.
        k: Number of parts, at most the number of values.
        ties: Which of the states with equal spreads is merged first.
    """
    heap = [_state(ties.value[2] * number, (ranked[row], row), k, ties) for number, row in enumerate(rows)]
    heapq.heapify(heap)
    parent = np.arange(rows.size)
    for number in range(len(rows), 2 * len(rows) - 1):
        one = heapq.heappop(heap)[-1]
        two = heap[0][-1]
        heapq.heapreplace(heap, _state(number, _merged(one, two, k, parent), k, ties))
    while not np.array_equal(parent, above := parent[parent]):
        parent = above
    part_of = np.empty(rows.size, np.int64)
    part_of[heap[0][-1][1]] = np.arange(k)
    return part_of[parent]


def _state(number: int, parts: _Parts, k: int, ties: Ties) -> tuple[float, float, int, _Parts]:
    """Return the entry of a state in the heap, whose smallest entry is merged next."""
    sums, (by_sum, by_number, _) = parts[0], ties.value
    largest = float(sums[0])
    smallest = float(sums[-1]) if len(sums) == k else 0.0
    return smallest - largest, by_sum * largest, by_number * number, parts


def _merged(one: _Parts, two: _Parts, k: int, parent: Ints) -> _Parts:
    """Merge the parts of two states. For each merged part, `parent` gets the item of the part that it is now in."""
    (sums, items), (others, more) = one, two
    alone = k - len(others)  # parts of `one` that are merged with an empty part
    if len(sums) > alone:
        met = k - len(sums)
        parent[more[met:][::-1]] = items[alone:]
        together = sums[alone:] + others[met:][::-1]
        if alone or met:
            together = np.concatenate([sums[:alone], together, others[:met]])
            items = np.concatenate([items, more[:met]])
    else:
        together, items = np.concatenate([sums, others]), np.concatenate([items, more])
    order = np.argsort(-together, kind="stable")
    return together[order], items[order]
