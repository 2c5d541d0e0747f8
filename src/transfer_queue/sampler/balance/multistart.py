"""Divides without a cap: refines several starts and takes the best result."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from transfer_queue.sampler.balance.differencing import Ties, divide_by_differencing
from transfer_queue.sampler.balance.local_search import EVEN, refine, step
from transfer_queue.sampler.balance.validation import Floats, Ints, by_position, largest_first

# Up to this number of values, all ways to break ties are tried: with few values they matter, and take little time.
_FEW = 128


class _Start(NamedTuple):
    """A division from which refining starts."""

    divide: Callable[[Floats, int], Ints]
    """Returns the part of each rank."""

    if_ahead: bool = False
    """Whether it is refined only if it is already better than the best result so far."""


def spread(values: Floats, k: int, *, equal: bool) -> Ints:
    """Return the part of each value, of k parts, none empty. If `equal`, counts differ by at most one.

    1 <= k <= len(values). The result is never worse than largest differencing (`divide_by_differencing`) for the same
    counts: that is one of the starts, unless a start before it is within a share of EVEN of the lower bound of the
    largest sum.
    """
    order = largest_first(values)
    ranked = values[order]
    even = ranked.sum() / k
    best: tuple[float, float] | None = None
    for start in _starts(len(values), equal=equal):
        found = start.divide(ranked, k)
        if start.if_ahead and best is not None and _score(ranked, found, k) >= best:
            continue
        found = refine(ranked, found, k, free=not equal)
        score = _score(ranked, found, k)
        if best is None or score < best:
            best, part_of = score, found
        if score[0] <= max(even, float(ranked[0])) * (1 + EVEN) or score[0] + score[1] <= step(ranked, even):
            break
    return by_position(part_of, order)


def _starts(count: int, *, equal: bool) -> list[_Start]:
    """Return the starts for `count` values, in the order in which they are tried. The first one is usually enough."""
    even_counts = _Start(partial(divide_by_differencing, equal=True))
    if equal:
        starts = [even_counts, _Start(greedy_rows)]
    else:
        # With free counts the greedy start is usually the best one, and refining takes longer than all starts.
        starts = [
            _Start(greedy),
            even_counts,
            _Start(partial(divide_by_differencing, equal=False), if_ahead=count > _FEW),
        ]
    if count <= _FEW:
        others = (ties for ties in Ties if ties is not Ties.LARGEST)
        starts += [_Start(partial(divide_by_differencing, equal=equal, ties=ties), if_ahead=True) for ties in others]
    return starts


def _score(ranked: Floats, part_of: Ints, k: int) -> tuple[float, float]:
    """Return how uneven a division is, as (largest sum, negative smallest sum); less is better."""
    sums = np.bincount(part_of, ranked, k)
    return float(sums.max()), -float(sums.min())


def greedy(ranked: Floats, k: int) -> Ints:
    """Return the part of each rank: each item goes to the lightest part, with the fewest items if several are."""
    heap = [(0.0, 0, part) for part in range(k)]
    part_of = []
    for value in ranked.tolist():
        load, count, part = heap[0]
        part_of.append(part)
        heapq.heapreplace(heap, (load + value, count + 1, part))
    return np.array(part_of, np.int64)


def greedy_rows(ranked: Floats, k: int) -> Ints:
    """Do the same in rows of k items, the largest item to the lightest part, so that counts are equal.

    In an incomplete last row only the lightest parts get an item.
    """
    part_of = np.empty(len(ranked), np.int64)
    sums = np.zeros(k)
    for first in range(0, len(ranked), k):
        row = ranked[first : first + k]
        lightest = np.argsort(sums, kind="stable")[: len(row)]
        part_of[first : first + k] = lightest
        sums[lightest] += row
    return part_of
