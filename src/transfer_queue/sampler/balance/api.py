"""The functions that take lengths and return lists of positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from transfer_queue.errors import BalanceInputError
from transfer_queue.sampler.balance.capped_division import first_fit, level, spread_capped
from transfer_queue.sampler.balance.division import divide_by_differencing, spread
from transfer_queue.sampler.balance.validation import (
    Cost,
    Floats,
    Numbers,
    as_lists,
    by_position,
    cap_of,
    costs_of,
    largest_first,
    linear,
    numbers,
    parts_for,
    positive_int,
    tokens_of,
)


def balance(
    lengths: Numbers,
    parts: int,
    *,
    equal_counts: bool = False,
    cost: Cost = linear,
    max_tokens: float | None = None,
) -> list[list[int]]:
    """Divide lengths into parts so that the cost of the most costly part is as small as a quick search finds.

    Args:
        lengths: n finite, non-negative numbers.
        parts: The number of parts, 1 to n.
        equal_counts: True if the numbers of items of two parts may differ by at most one. Default: any counts.
        cost: A function that takes the lengths as a float64 array and returns the cost of each: `linear`, `quadratic(a,
            b)` or your own. Default: `linear`.
        max_tokens: The maximum sum of lengths in a part, whatever the costs. A longer item is alone in its part, and a
            fraction of a token counts as one. Default: no limit.

    Returns:
        `parts` lists of positions, each ascending and none empty, in the order of their first positions. Together they
        contain 0 to n-1 once.

    Raises:
        BalanceInputError: An argument is not valid, the parts cannot keep `max_tokens`, or no way to keep it was found.
            The message says how many parts are needed at least.

    Example:
        >>> from transfer_queue.sampler.balance import balance
        >>> balance([8, 1, 7, 2], parts=2)
        [[0, 1], [2, 3]]
    """
    checked = numbers(lengths)
    k = parts_for(len(checked), parts)
    costs = costs_of(cost, checked)
    if max_tokens is None:
        return as_lists(spread(costs, k, equal=equal_counts), k)
    cap = cap_of(max_tokens)
    return as_lists(spread_capped(costs, tokens_of(checked), cap, k, equal=equal_counts), k)


def imbalance(lengths: Numbers, parts: Sequence[Sequence[int]]) -> float:
    """Return the ratio of the largest load of the parts to the smallest possible one.

    The smallest possible load is taken as the mean load, or the largest item if that is more.

    Args:
        lengths: The weight of each position: lengths or costs.
        parts: The lists of positions.

    Returns:
        The ratio; 1.0 is perfect, and the result if all weights are 0.

    Raises:
        BalanceInputError: The parts do not contain every position once.

    Example:
        >>> from transfer_queue.sampler.balance import imbalance
        >>> imbalance([3, 1, 2, 2], [[0, 1], [2, 3]])
        1.0
    """
    checked = numbers(lengths)
    try:
        covered = len(checked) > 0 and sorted(chain.from_iterable(parts)) == list(range(len(checked)))
    except TypeError:
        covered = False
    if not covered:
        raise BalanceInputError(f"parts must contain each of the {len(checked)} positions once, and not be empty")
    heaviest = max(float(checked[np.asarray(part, np.int64)].sum()) for part in parts)
    least = max(float(checked.sum()) / len(parts), float(checked.max()))
    return heaviest / least if least else 1.0


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Divide lengths into parts whose sums are as even as a quick search finds.

    The largest sum is never larger than that of `karmarkar_karp`, except by at most one millionth for large inputs.

    Args:
        seqlen_list: n finite, non-negative numbers.
        k_partitions: The number of parts, k.
        equal_size: True if every part must have n / k items. False allows any counts.

    Returns:
        k lists of positions, each ascending and none empty, in the order of their first positions. Together they
        contain 0 to n-1 once.

    Raises:
        BalanceInputError: The lengths are not valid, k is less than 1 or more than n, or parts must be equal and k does
            not divide n (a ValueError and an AssertionError).

    Example:
        >>> from transfer_queue.sampler.balance import get_seqlen_balanced_partitions
        >>> get_seqlen_balanced_partitions([8, 1, 7, 2], 2, equal_size=True)
        [[0, 1], [2, 3]]
    """
    lengths, k = _validated(seqlen_list, k_partitions, equal_size)
    return as_lists(spread(lengths, k, equal=equal_size), k)


def karmarkar_karp(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Divide lengths into parts by the largest differencing method, without refinement.

    The method is that of Karmarkar and Karp, "The differencing method of set partitioning" (1982). It takes time in
    proportion to `len(seqlen_list) * k_partitions`.

    Args:
        seqlen_list: See `get_seqlen_balanced_partitions`.
        k_partitions: See `get_seqlen_balanced_partitions`.
        equal_size: See `get_seqlen_balanced_partitions`.

    Returns:
        See `get_seqlen_balanced_partitions`.

    Raises:
        BalanceInputError: See `get_seqlen_balanced_partitions`.

    Example:
        >>> from transfer_queue.sampler.balance import karmarkar_karp
        >>> karmarkar_karp([8, 1, 7, 2], 2, equal_size=True)
        [[0, 1], [2, 3]]
    """
    lengths, k = _validated(seqlen_list, k_partitions, equal_size)
    order = largest_first(lengths)
    return as_lists(by_position(divide_by_differencing(lengths[order], k, equal=equal_size), order), k)


def _validated(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> tuple[Floats, int]:
    lengths = numbers(seqlen_list)
    k = parts_for(len(lengths), k_partitions, "k_partitions")
    if equal_size and len(lengths) % k:
        raise BalanceInputError(
            f"{len(lengths)} % {k} != 0: {len(lengths)} lengths cannot be divided into {k} parts of equal size; pass "
            f"equal_size=False, or a multiple of {k} lengths"
        )
    return lengths, k


def pack(lengths: Numbers, max_tokens: float, multiple_of: int = 1) -> list[list[int]]:
    """Pack lengths into as few bins as first fit decreasing needs, and then even out the bins.

    Args:
        lengths: n finite, non-negative numbers; a fraction of a token counts as one.
        max_tokens: The maximum sum of lengths in a bin. A longer item is alone in its bin.
        multiple_of: The number of bins is a multiple of it, as ranks that work in lockstep need. Default: 1.

    Returns:
        Lists of positions, each ascending and none empty, in the order of their first positions. Together they contain
        0 to n-1 once. [] if there are no lengths.

    Raises:
        BalanceInputError: An argument is not valid, or there are fewer lengths than bins.

    Example:
        >>> from transfer_queue.sampler.balance import pack
        >>> pack([8, 1, 7, 2], max_tokens=9)
        [[0, 1], [2, 3]]
    """
    tokens = tokens_of(numbers(lengths))
    cap, multiple = cap_of(max_tokens), positive_int(multiple_of, "multiple_of")
    if not len(tokens):
        return []
    long = tokens > cap
    alone, rest = np.flatnonzero(long), np.flatnonzero(~long)
    packed, bins = first_fit(tokens[rest], cap)
    needed = len(alone) + bins
    k = -(-needed // multiple) * multiple
    if len(tokens) < k:
        raise BalanceInputError(
            f"{len(tokens)} lengths need {needed} bins of at most {cap} tokens, and {k} for a multiple of {multiple}, "
            f"but cannot fill this number of bins; give {k} lengths or more, or fewer ranks"
        )
    part_of = np.empty(len(tokens), np.int64)
    part_of[alone] = np.arange(k - len(alone), k)
    if len(rest):
        part_of[rest] = level(tokens[rest], cap, k - len(alone), packed)
    return as_lists(part_of, k)
