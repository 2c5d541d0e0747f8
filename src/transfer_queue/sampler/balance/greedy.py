"""Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969)."""

from __future__ import annotations

import heapq

import numpy as np

from transfer_queue.sampler.balance.arrays import Floats, Ints


def greedy(ranked: Floats, k: int) -> Ints:
    """The part of each rank: each item goes to the part that is lightest, of those to the one with fewest items."""
    heap = [(0.0, 0, part) for part in range(k)]
    part_of = []
    for value in ranked.tolist():
        load, count, part = heap[0]
        part_of.append(part)
        heapq.heapreplace(heap, (load + value, count + 1, part))
    return np.array(part_of, np.int64)


def greedy_rows(ranked: Floats, k: int) -> Ints:
    """The same in rows of k, largest to lightest, so that counts are equal; in the last row the lightest get one."""
    part_of = np.empty(len(ranked), np.int64)
    sums = np.zeros(k)
    for first in range(0, len(ranked), k):
        row = ranked[first : first + k]
        lightest = np.argsort(sums, kind="stable")[: len(row)]
        part_of[first : first + k] = lightest
        sums[lightest] += row
    return part_of
