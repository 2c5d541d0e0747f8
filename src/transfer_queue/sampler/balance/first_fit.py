"""Bin packing: first fit decreasing, and a lower bound of the number of bins."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from transfer_queue.sampler.balance.validation import Floats, Ints, by_position, largest_first


def first_fit(tokens: Floats, cap: int) -> tuple[Ints, int]:
    """Return the bin of each item by first fit decreasing, and the number of bins. No item may be above the cap.

    Each bin is filled in turn with the longest remaining items that fit. This is the same as first fit decreasing,
    because the items of a bin do not depend on the bins after it.
    """
    order = largest_first(tokens)
    falling = tokens[order].astype(np.int64).tolist()
    rising = [-value for value in falling]
    count = len(falling)
    # For each item, the first one from it on that is in no bin. The paths to it are halved at each use.
    left = list(range(count + 1))
    bin_of = [0] * count
    first = bins = 0
    while first < count:
        space = cap
        item = first
        while item < count:
            bin_of[item] = bins
            left[item] = item + 1
            space -= falling[item]
            # No item before this one fits: it did not fit when the bin had more space.
            item = bisect_left(rising, -space, item + 1)
            while left[item] != item:
                left[item] = left[left[item]]
                item = left[item]
        bins += 1
        while left[first] != first:
            left[first] = left[left[first]]
            first = left[first]
    return by_position(np.array(bin_of, np.int64), order), bins


def least_bins(tokens: Floats, cap: int) -> int:
    """Return a lower bound of the number of bins (L2 of Martello and Toth, "Knapsack problems", 1990, section 8.3).

    For each threshold up to half a bin: each item above half a bin has its own bin. The items from the threshold up to
    half a bin use the space in those bins that have at least the threshold free, and need further bins for the rest.
    """
    if not len(tokens):
        return 0
    rising = np.sort(tokens)
    sums = np.concatenate([[0.0], np.cumsum(rising)])
    half = int(np.searchsorted(rising, cap / 2, side="right"))
    thresholds = np.concatenate([[0.0], rising[:half]])
    smallest = np.searchsorted(rising, thresholds)
    # The bins of items from here on have less space than the threshold.
    closed = np.maximum(np.searchsorted(rising, cap - thresholds, side="right"), half)
    space = (closed - half) * cap - (sums[closed] - sums[half])
    more = np.ceil((sums[half] - sums[smallest] - space) / cap)
    return max(len(tokens) - half + max(int(more.max()), 0), 1)
