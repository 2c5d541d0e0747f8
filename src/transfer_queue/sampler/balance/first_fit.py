"""Bin packing: first fit decreasing, and how many bins any packing needs at least."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from transfer_queue.sampler.balance.validation import Floats, Ints, by_position, largest_first


def first_fit(tokens: Floats, cap: int) -> tuple[Ints, int]:
    """The bin of each item by first fit decreasing, and the number of bins. No item is above the cap.

    Bin by bin: the longest item left that still fits, again and again. That is first fit decreasing, as what the
    first bin holds depends on nothing that the others hold.
    """
    order = largest_first(tokens)
    falling = tokens[order].astype(np.int64).tolist()
    rising = [-value for value in falling]
    count = len(falling)
    # The first item from each one on that is in no bin yet, found along a path that is halved at each use.
    left = list(range(count + 1))
    bin_of = [0] * count
    first = bins = 0
    while first < count:
        room = cap
        item = first
        while item < count:
            bin_of[item] = bins
            left[item] = item + 1
            room -= falling[item]
            # Nothing before the item fits: it was passed over when there was more room.
            item = bisect_left(rising, -room, item + 1)
            while left[item] != item:
                left[item] = left[left[item]]
                item = left[item]
        bins += 1
        while left[first] != first:
            left[first] = left[left[first]]
            first = left[first]
    return by_position(np.array(bin_of, np.int64), order), bins


def least_bins(tokens: Floats, cap: int) -> int:
    """A number that no packing goes below (bound L2 of Martello & Toth, "Knapsack problems", 1990, section 8.3).

    For each threshold up to half a bin: the items above half a bin have a bin each, and those of them that leave a
    threshold's room or more can take in items from the threshold up to half a bin; what is left of these needs more.
    """
    if not len(tokens):
        return 0
    rising = np.sort(tokens)
    sums = np.concatenate([[0.0], np.cumsum(rising)])
    half = int(np.searchsorted(rising, cap / 2, side="right"))
    thresholds = np.concatenate([[0.0], rising[:half]])
    smallest = np.searchsorted(rising, thresholds)
    # Items from here on have too little room for anything that reaches the threshold.
    closed = np.maximum(np.searchsorted(rising, cap - thresholds, side="right"), half)
    room = (closed - half) * cap - (sums[closed] - sums[half])
    more = np.ceil((sums[half] - sums[smallest] - room) / cap)
    return max(len(tokens) - half + max(int(more.max()), 0), 1)
