"""Largest differencing for k parts (Karmarkar & Karp, "The differencing method of set partitioning", 1982)."""

from __future__ import annotations

import heapq

import numpy as np

from transfer_queue.sampler.balance.arrays import Floats, Ints


def plain(ranked: Floats, k: int, *, equal: bool) -> Ints:
    """The part of each rank by differencing alone; k divides the number of items where counts shall be equal."""
    rows = np.arange(len(ranked)).reshape(-1, k if equal else 1)
    if not equal:
        # A pinch for each item keeps a part that holds only zeros apart from an empty one.
        ranked = ranked + (float(ranked[0]) or 1.0) * 1e-12
    return differencing(ranked, rows, k)


def even_counts(ranked: Floats, k: int) -> Ints:
    """Differencing of rows of k: counts are equal, or differ by one where k does not divide them."""
    short = -len(ranked) % k
    padded = np.concatenate([ranked, np.zeros(short)])
    return differencing(padded, np.arange(len(padded)).reshape(-1, k), k)[: len(ranked)]


def differencing(ranked: Floats, rows: Ints, k: int) -> Ints:
    """The part of each rank. rows: (r, c) ranks, c <= k; the items of one row go to different parts.

    A state is k sums, falling. The two states with the largest spread are merged, the largest sums of one with the
    smallest of the other, until one is left; then the slots are traced back from the last merge to the rows.
    """
    width = rows.shape[1]
    heap: list[tuple[float, int, Floats]] = []
    for number, row in enumerate(rows):
        sums = np.zeros(k)
        sums[:width] = ranked[row]
        heap.append((float(sums[-1] - sums[0]), number, sums))
    heapq.heapify(heap)
    merges: list[tuple[int, int, Ints]] = []
    for number in range(len(rows), 2 * len(rows) - 1):
        _, first, one = heapq.heappop(heap)
        _, second, two = heapq.heappop(heap)
        merged = one + two[::-1]
        slots = np.argsort(-merged, kind="stable")
        merges.append((first, second, slots))
        sums = merged[slots]
        heapq.heappush(heap, (float(sums[-1] - sums[0]), number, sums))
    part_of_slot = {heap[0][1]: np.arange(k)}
    for number in range(2 * len(rows) - 2, len(rows) - 1, -1):
        first, second, slots = merges.pop()
        parts = np.empty(k, np.int64)
        parts[slots] = part_of_slot.pop(number)
        part_of_slot[first] = parts
        part_of_slot[second] = parts[::-1]
    part_of = np.empty(rows.size, np.int64)
    for number, row in enumerate(rows):
        part_of[row] = part_of_slot[number][:width]
    return part_of
