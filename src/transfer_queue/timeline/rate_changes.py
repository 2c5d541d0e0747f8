"""Finds when a rate changed for the last time."""

from __future__ import annotations

import numpy as np

BINS = 60
CHANGE = 0.25  # the least change, as a part of the previous rate
CERTAINTY = 3.0  # a change is larger than the scatter of the means by this factor
SHORTEST = 3  # bins on each side of a change


def last_rate_change(times: np.ndarray, rows: np.ndarray, start: float, end: float) -> float | None:
    """Return when the rate changed last by more than 25 %.

    Args:
        times: When something happened, in order.
        rows: How many rows each time.
        start: When the recording begins.
        end: When it ends.

    Returns:
        The time of the change; None if the rate did not change, or if too little happened.
    """
    if not end > start or len(times) < 2 * SHORTEST:
        return None
    # Bins that hold less than a few events would scatter more than they show.
    bins = min(BINS, max(len(times) // 4, 2 * SHORTEST))
    rate, edges = np.histogram(times, bins, (start, end), weights=rows)
    found, first = None, 0
    while True:
        at = _change(rate[first:])
        if at is None:
            return found
        first += at
        found = float(edges[first])


def _change(rate: np.ndarray) -> int | None:
    """Return the bin at which the two sides differ most, if they differ enough."""
    count = len(rate)
    if count < 2 * SHORTEST:
        return None
    before = np.arange(SHORTEST, count - SHORTEST + 1)
    sums, squares = np.cumsum(rate), np.cumsum(rate**2)
    left = sums[before - 1] / before
    right = (sums[-1] - sums[before - 1]) / (count - before)
    spread = squares[-1] - before * left**2 - (count - before) * right**2
    scatter = np.sqrt(np.maximum(spread, 0.0) / max(count - 2, 1) * (1 / before + 1 / (count - before)))
    score = np.abs(right - left) / np.maximum(scatter, 1e-9 * max(float(rate.max()), 1e-300))
    best = int(np.argmax(score))
    changed = abs(right[best] - left[best]) > CHANGE * max(left[best], 1e-300)
    return int(before[best]) if changed and score[best] > CERTAINTY else None
