"""Packing into few bins under a cap of tokens."""

from __future__ import annotations

import numpy as np

from transfer_queue.errors import BalanceInputError
from transfer_queue.sampler.balance.arrays import as_lists
from transfer_queue.sampler.balance.caps import level
from transfer_queue.sampler.balance.checks import Numbers, cap_of, numbers, tokens_of, whole
from transfer_queue.sampler.balance.first_fit import first_fit


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
    cap, multiple = cap_of(max_tokens), whole(multiple_of, "multiple_of")
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
            f"but cannot fill so many; give {k} lengths or more, or fewer ranks"
        )
    part_of = np.empty(len(tokens), np.int64)
    part_of[alone] = np.arange(k - len(alone), k)
    if len(rest):
        part_of[rest] = level(tokens[rest], cap, k - len(alone), packed)
    return as_lists(part_of, k)
