"""Packing into few parts under a cap of tokens."""

from __future__ import annotations

import numpy as np

from transfer_queue.errors import BalanceInputError
from transfer_queue.sampler.balance.arrays import as_lists
from transfer_queue.sampler.balance.caps import level
from transfer_queue.sampler.balance.checks import Numbers, cap_of, numbers, tokens_of, whole
from transfer_queue.sampler.balance.first_fit import first_fit


def pack(lengths: Numbers, max_tokens: float, multiple_of: int = 1) -> list[list[int]]:
    """Packs lengths into as few bins as first fit decreasing needs, each within max_tokens, then makes them even.

    lengths: n finite, non-negative numbers; a fraction of a token counts as one. One longer than max_tokens is alone
    in its bin. multiple_of: the number of bins is a multiple of it, as ranks in lockstep need.
    Returns lists of positions, each ascending and none empty, that together hold 0..n-1 once; the lists come in the
    order of their first positions. No bins for no lengths.
    Raises BalanceInputError for anything else than such numbers, and where the lengths are fewer than the bins.
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
