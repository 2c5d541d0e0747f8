"""Division without a cap: the best of refined starts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from transfer_queue.sampler.balance.arrays import Floats, Ints, by_position, largest_first
from transfer_queue.sampler.balance.differencing import even_counts
from transfer_queue.sampler.balance.greedy import greedy, greedy_rows
from transfer_queue.sampler.balance.refine import EVEN, refine, step


def spread(values: Floats, k: int, *, equal: bool) -> Ints:
    """The part of each value, of k parts, none empty; `equal` counts differ by one at most. 1 <= k <= len(values)."""
    order = largest_first(values)
    ranked = values[order]
    starts: list[Callable[[Floats, int], Ints]] = [even_counts]
    if equal:
        starts.append(greedy_rows)
    else:
        # Where counts are free the greedy start is mostly the better one, and one start mostly does.
        starts.insert(0, greedy)
    even = ranked.sum() / k
    best: tuple[float, float] | None = None
    for start in starts:
        found = refine(ranked, start(ranked, k), k, free=not equal)
        sums = np.bincount(found, ranked, k)
        score = (float(sums.max()), -float(sums.min()))
        if best is None or score < best:
            best, part_of = score, found
        if score[0] <= max(even, float(ranked[0])) * (1 + EVEN) or score[0] + score[1] <= step(ranked, even):
            break
    return by_position(part_of, order)
