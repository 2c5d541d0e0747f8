"""Divides and packs under a cap of tokens: no part exceeds it, except for an item above it, which has its own part."""

from __future__ import annotations

import heapq
from bisect import bisect_left

import numpy as np

from transfer_queue.errors import BalanceInputError
from transfer_queue.sampler.balance.division import Cap, greedy, refine, spread
from transfer_queue.sampler.balance.validation import Floats, Ints, by_position, largest_first, members


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


# Pairs of parts that one levelling tries. This takes a few ms, as long as packing.
_LEVEL_PAIRS = 300


def spread_capped(costs: Floats, tokens: Floats, cap: int, k: int, *, equal: bool) -> Ints:
    """Return the part of each item, of k parts, none empty, even by cost; each part keeps the cap of tokens.

    Raises BalanceInputError if k parts cannot keep the cap, or if no way to keep it was found.
    """
    long = tokens > cap
    alone, rest = np.flatnonzero(long), np.flatnonzero(~long)
    others = k - len(alone)
    least = len(alone) + least_bins(tokens[rest], cap)
    if least > k:
        raise BalanceInputError(
            f"{k} parts of at most {cap} tokens cannot hold these lengths: at least {least} parts are needed "
            f"({len(alone)} of the lengths are longer than a part)"
        )
    if equal and len(alone) and len(rest) > 2 * others:
        raise BalanceInputError(
            f"the length at position {alone[0]} is above {cap} tokens and has its own part, so {len(tokens)} lengths "
            f"cannot have equal counts in {k} parts; allow free counts or more tokens"
        )
    part_of = np.empty(len(tokens), np.int64)
    part_of[alone] = np.arange(others, k)
    if len(rest):
        result = _divide_within_cap(costs[rest], tokens[rest], cap, others, equal=equal)
        if result is None and not equal:
            packed, bins = first_fit(tokens[rest], cap)
            if bins <= others:
                result = _refine(costs[rest], tokens[rest], cap, others, split(tokens[rest], packed, others), free=True)
        if result is None:
            counts = "equal counts" if equal else "any counts"
            advice = "allow free counts, or more parts" if equal else f"{len(alone) + bins} parts are enough"
            raise BalanceInputError(
                f"found no way to divide {len(tokens)} lengths in {counts} into {k} parts of at most {cap} tokens: "
                f"at least {least} parts are needed, whatever the counts; {advice}"
            )
        part_of[rest] = result
    return part_of


def level(tokens: Floats, cap: int, k: int, packed: Ints) -> Ints:
    """Return the part of each item, of k parts, none empty, even by tokens. Much faster than `spread_capped`.

    packed: the bin of each item; at most k bins, none empty.
    """
    order = largest_first(tokens)
    ranked = tokens[order]
    # A division that ignores the cap is nearly even at once. If it keeps the cap by chance, it is the better start.
    start = greedy(ranked, k)
    if not _keeps(start, ranked, cap, k):
        start = split(tokens, packed, k)[order]
    return by_position(refine(ranked, start, k, free=True, most_pairs=_LEVEL_PAIRS), order)


def split(tokens: Floats, bin_of: Ints, k: int) -> Ints:
    """Make k parts of fewer bins by halving the fullest bin with several items, again and again. Needs k items."""
    bins = int(bin_of.max()) + 1
    order = largest_first(tokens)
    parts = members(bin_of[order], bins)  # ranks, so that each lists its largest first
    ranked = tokens[order]
    fullest = [(-float(ranked[part].sum()), number) for number, part in enumerate(parts) if len(part) > 1]
    heapq.heapify(fullest)
    while len(parts) < k:
        _, number = heapq.heappop(fullest)
        whole = parts[number]
        parts[number] = whole[::2]
        parts.append(whole[1::2])
        for half in (number, len(parts) - 1):
            if len(parts[half]) > 1:
                heapq.heappush(fullest, (-float(ranked[parts[half]].sum()), half))
    part_of = np.empty(len(tokens), np.int64)
    for number, part in enumerate(parts):
        part_of[part] = number
    return by_position(part_of, order)


def _divide_within_cap(costs: Floats, tokens: Floats, cap: int, k: int, *, equal: bool) -> Ints | None:
    """Return the part of each item if a division even by cost or by tokens keeps the cap, as it usually does."""
    part_of = spread(costs, k, equal=equal)
    if _keeps(part_of, tokens, cap, k):
        return part_of
    if np.array_equal(costs, tokens):
        return None
    part_of = spread(tokens, k, equal=equal)
    if _keeps(part_of, tokens, cap, k):
        return _refine(costs, tokens, cap, k, part_of, free=not equal)
    return None


def _keeps(part_of: Ints, tokens: Floats, cap: int, k: int) -> bool:
    return bool(np.bincount(part_of, tokens, k).max() <= cap)


def _refine(costs: Floats, tokens: Floats, cap: int, k: int, part_of: Ints, *, free: bool) -> Ints:
    order = largest_first(costs)
    refined = refine(costs[order], part_of[order], k, free=free, cap=Cap(tokens[order], cap))
    return by_position(refined, order)
