"""Division without a cap: the best of refined starts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from transfer_queue.sampler.balance.arrays import Floats, Ints, by_position, largest_first
from transfer_queue.sampler.balance.differencing import Ties, plain
from transfer_queue.sampler.balance.greedy import greedy, greedy_rows
from transfer_queue.sampler.balance.refine import EVEN, refine, step

# Up to so many values each way to break ties is tried: it decides much among few values, and costs little.
_FEW = 128


class _Start(NamedTuple):
    """A division to begin with."""

    divide: Callable[[Floats, int], Ints]
    """Gives the part of each rank."""

    if_ahead: bool = False
    """Whether it is refined only if it is better than the best so far even before that."""


def spread(values: Floats, k: int, *, equal: bool) -> Ints:
    """The part of each value, of k parts, none empty; `equal` counts differ by one at most. 1 <= k <= len(values).

    Never worse than largest differencing (`plain`) for the same counts: that is one of the starts, unless one before it
    is within a share of EVEN of the least that the largest sum can be.
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
    """The starts for so many values, in the order in which they are tried. One mostly does."""
    even_counts = _Start(partial(plain, equal=True))
    if equal:
        starts = [even_counts, _Start(greedy_rows)]
    else:
        # where counts are free the greedy start is mostly the better one, and refining takes longer than all starts
        starts = [_Start(greedy), even_counts, _Start(partial(plain, equal=False), if_ahead=count > _FEW)]
    if count <= _FEW:
        others = (ties for ties in Ties if ties is not Ties.LARGEST)
        starts += [_Start(partial(plain, equal=equal, ties=ties), if_ahead=True) for ties in others]
    return starts


def _score(ranked: Floats, part_of: Ints, k: int) -> tuple[float, float]:
    """How uneven a division is, the less the better: its largest sum, then how small its smallest one is."""
    sums = np.bincount(part_of, ranked, k)
    return float(sums.max()), -float(sums.min())
