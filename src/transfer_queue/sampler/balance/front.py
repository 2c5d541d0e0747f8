"""The functions that take and give lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from transfer_queue.errors import BalanceInputError
from transfer_queue.sampler.balance.arrays import Floats, as_lists, by_position, largest_first
from transfer_queue.sampler.balance.caps import spread_capped
from transfer_queue.sampler.balance.checks import Numbers, cap_of, numbers, parts_for, tokens_of
from transfer_queue.sampler.balance.costs import Cost, costs_of, linear
from transfer_queue.sampler.balance.differencing import plain
from transfer_queue.sampler.balance.spread import spread


def balance(
    lengths: Numbers,
    parts: int,
    *,
    equal_counts: bool = False,
    cost: Cost = linear,
    max_tokens: float | None = None,
) -> list[list[int]]:
    """Divides lengths over parts so that the most costly part costs as little as a quick search makes it.

    lengths: n finite, non-negative numbers; parts: 1..n. equal_counts: the counts of two parts differ by one at
    most, else counts are free. cost: takes the lengths as an array and gives the cost of each, `linear` or
    `quadratic(a, b)` or one's own. max_tokens: no part's sum of lengths is above it, whatever the costs; a length
    above it stands alone in its part, and a fraction of a token counts as one.
    Returns lists of positions, each ascending and none empty, that together hold 0..n-1 once; the lists come in the
    order of their first positions.
    Raises BalanceInputError for anything else than such arguments, and where the parts cannot keep max_tokens or no
    way to keep it was found; the message says how many parts are needed at least.
    """
    checked = numbers(lengths)
    k = parts_for(len(checked), parts)
    costs = costs_of(cost, checked)
    if max_tokens is None:
        return as_lists(spread(costs, k, equal=equal_counts), k)
    cap = cap_of(max_tokens)
    return as_lists(spread_capped(costs, tokens_of(checked), cap, k, equal=equal_counts), k)


def imbalance(lengths: Numbers, parts: Sequence[Sequence[int]]) -> float:
    """The largest load of the parts over the least it could be: the mean load, or the largest item if that is more.

    lengths: what each position weighs, lengths or costs. 1.0 is perfect, and the figure where nothing weighs anything.
    Raises BalanceInputError where the parts do not hold every position once.
    """
    checked = numbers(lengths)
    try:
        covered = len(checked) > 0 and sorted(chain.from_iterable(parts)) == list(range(len(checked)))
    except TypeError:
        covered = False
    if not covered:
        raise BalanceInputError(f"parts must hold each of the {len(checked)} positions once, and there must be some")
    heaviest = max(float(checked[np.asarray(part, np.int64)].sum()) for part in parts)
    least = max(float(checked.sum()) / len(parts), float(checked.max()))
    return heaviest / least if least else 1.0


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Partitions lengths into k parts whose sums are as even as a quick search makes them.

    The largest sum is never larger than with `karmarkar_karp`, except by at most one millionth for large inputs.
    seqlen_list: n finite, non-negative numbers. equal_size: every part gets n / k of them, else counts are free.
    Returns k lists of positions, each ascending and none empty, that together hold 0..n-1 once; the lists
    come in the order of their first positions.
    Raises BalanceInputError (a ValueError and an AssertionError) for anything else than such numbers, for k < 1,
    k > n, and for equal parts where k does not divide n.
    """
    lengths, k = _checked(seqlen_list, k_partitions, equal_size)
    return as_lists(spread(lengths, k, equal=equal_size), k)


def karmarkar_karp(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The plain method: k lists of positions by largest differencing, with no refinement.

    Arguments, result and errors as `get_seqlen_balanced_partitions`. Takes time in proportion to
    len(seqlen_list) * k_partitions.
    """
    lengths, k = _checked(seqlen_list, k_partitions, equal_size)
    order = largest_first(lengths)
    return as_lists(by_position(plain(lengths[order], k, equal=equal_size), order), k)


def _checked(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> tuple[Floats, int]:
    lengths = numbers(seqlen_list)
    k = parts_for(len(lengths), k_partitions, "k_partitions")
    if equal_size and len(lengths) % k:
        raise BalanceInputError(
            f"{len(lengths)} % {k} != 0: {len(lengths)} lengths cannot be divided into {k} parts of equal size; pass "
            f"equal_size=False, or a multiple of {k} lengths"
        )
    return lengths, k
