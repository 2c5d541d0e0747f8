"""Partitioning lengths into k parts of nearly equal sums.

Owns the two partitioners and the check of their input; knows nothing of samples, tags or ranks.

`karmarkar_karp` is the largest differencing method for k parts (Karmarkar & Karp, "The differencing method of
set partitioning", 1982). `get_seqlen_balanced_partitions` starts from it, and from a greedy assignment of the
longest first (Graham, "Bounds on multiprocessing timing anomalies", 1969), and relieves the heaviest part by
exchanges with lighter ones until none helps. Everything is deterministic: ties go to the lower position.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import BalanceInputError

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

# Pairs of parts that one refinement looks at; bounds the time where the parts cannot become even
# (at 64 items a part a pair costs about 10 us).
_MAX_PAIRS = 2500
# Parts whose sums differ by no more than this share of the even load are even enough. The steps of the last
# digits would be many and worth nothing.
_EVEN = 1e-6


def karmarkar_karp(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The plain method: k lists of positions by largest differencing, with no refinement.

    Arguments, result and errors as `get_seqlen_balanced_partitions`. Takes time and memory in proportion to
    len(seqlen_list) * k_partitions.
    """
    lengths, k = _checked(seqlen_list, k_partitions, equal_size)
    order = _longest_first(lengths)
    ranked = lengths[order]
    rows = np.arange(len(order)).reshape(-1, k if equal_size else 1)
    if not equal_size:
        # A pinch for each item keeps a part that holds only zeros apart from an empty one.
        ranked = ranked + (float(ranked[0]) or 1.0) * 1e-12
    return _as_lists(_differencing(ranked, rows, k), order, k)


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Partitions lengths into k parts whose sums are as even as a quick search makes them.

    seqlen_list: n finite, non-negative numbers. equal_size: every part gets n / k of them, else counts are free.
    Returns k lists of positions, each ascending and none empty, that together hold 0..n-1 once; the lists
    come in the order of their first positions.
    Raises BalanceInputError (a ValueError and an AssertionError) for anything else than such numbers, for k < 1,
    k > n, and for equal parts where k does not divide n.
    """
    lengths, k = _checked(seqlen_list, k_partitions, equal_size)
    order = _longest_first(lengths)
    ranked = lengths[order]
    starts: list[Callable[[], Ints]] = [lambda: _even_counts(ranked, k)]
    if equal_size:
        starts.append(lambda: _greedy_rows(ranked, k))
    else:
        # Where counts are free the greedy start is mostly the better one, and one start mostly does.
        starts.insert(0, lambda: _greedy(ranked, k))
    even = ranked.sum() / k
    best: tuple[float, float] | None = None
    for start in starts:
        owner = _refine(ranked, start(), k, free=not equal_size)
        sums = np.bincount(owner, ranked, k)
        score = (float(sums.max()), -float(sums.min()))
        if best is None or score < best:
            best, part_of = score, owner
        if score[0] <= max(even, float(ranked[0])) * (1 + _EVEN) or score[0] + score[1] <= _step(ranked, even):
            break
    return _as_lists(part_of, order, k)


# --- input and output


def _checked(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> tuple[Floats, int]:
    lengths = _numbers(seqlen_list)
    try:
        k = operator.index(k_partitions)
    except TypeError:
        raise BalanceInputError(f"k_partitions must be an int, but is a {type(k_partitions).__name__}") from None
    n = len(lengths)
    if k < 1:
        raise BalanceInputError(f"k_partitions must be positive, but is {k}")
    if n < k:
        raise BalanceInputError(f"{n} lengths cannot fill {k} partitions; give at least one length for each")
    if equal_size and n % k:
        raise BalanceInputError(
            f"{n} lengths cannot be dealt to {k} partitions of equal size; pass equal_size=False or a multiple of {k}"
        )
    wrong = np.flatnonzero(~(np.isfinite(lengths) & (lengths >= 0)))
    if len(wrong):
        raise BalanceInputError(
            f"lengths must be finite and not negative, but the one at position {wrong[0]} is {lengths[wrong[0]]}"
        )
    with np.errstate(over="ignore"):
        if not np.isfinite(lengths.sum() * 2):
            raise BalanceInputError("the sum of the lengths is beyond the range of float64; scale them down")
    return lengths, k


def _numbers(seqlen_list: Sequence[float]) -> Floats:
    if isinstance(seqlen_list, np.ndarray):
        if seqlen_list.ndim != 1 or seqlen_list.dtype.kind not in "iuf":
            raise BalanceInputError(
                f"lengths must be one row of numbers, but are {seqlen_list.dtype} of shape {seqlen_list.shape}"
            )
        return seqlen_list.astype(np.float64)
    try:
        values: list[Any] = list(seqlen_list)
    except TypeError:
        raise BalanceInputError(f"lengths must be a list, but are a {type(seqlen_list).__name__}") from None
    strange = {kind for kind in set(map(type, values)) if issubclass(kind, bool) or not issubclass(kind, Real)}
    if strange:
        position = next(at for at, value in enumerate(values) if type(value) in strange)
        raise BalanceInputError(
            f"lengths must be numbers, but the one at position {position} is a {type(values[position]).__name__}"
        )
    try:
        return np.array(values, np.float64)
    except OverflowError:
        raise BalanceInputError("a length is beyond the range of float64; scale the lengths down") from None


def _longest_first(lengths: Floats) -> Ints:
    """Positions by falling length. All work below names an item by its rank in this order."""
    return np.argsort(-lengths, kind="stable")


def _as_lists(part_of: Ints, order: Ints, k: int) -> list[list[int]]:
    """The positions in each part, given the part of each rank."""
    of_position = np.empty_like(part_of)
    of_position[order] = part_of
    by_part = np.argsort(of_position, kind="stable")
    cuts = np.cumsum(np.bincount(of_position, minlength=k))[:-1]
    return sorted(part.tolist() for part in np.split(by_part, cuts))


# --- starts: the part of each rank


def _differencing(ranked: Floats, rows: Ints, k: int) -> Ints:
    """Largest differencing. rows: (r, c) ranks, c <= k; the items of one row go to different parts.

    A state is k sums, falling. The two states with the largest spread are merged, the largest sums of one with the
    smallest of the other, until one is left; then the slots are traced back from the last merge to the rows.
    """
    width = rows.shape[1]
    heap: list[tuple[float, int, Floats]] = []
    for number, row in enumerate(rows):
        sums = np.zeros(k)
        sums[:width] = ranked[row]
        heap.append((float(sums[-1] - sums[0]), number, sums))
    heapq.heapify(heap)
    merges: list[tuple[int, int, Ints]] = []
    for number in range(len(rows), 2 * len(rows) - 1):
        _, first, one = heapq.heappop(heap)
        _, second, two = heapq.heappop(heap)
        merged = one + two[::-1]
        slots = np.argsort(-merged, kind="stable")
        merges.append((first, second, slots))
        sums = merged[slots]
        heapq.heappush(heap, (float(sums[-1] - sums[0]), number, sums))
    part_of_slot = {heap[0][1]: np.arange(k)}
    for number in range(2 * len(rows) - 2, len(rows) - 1, -1):
        first, second, slots = merges.pop()
        parts = np.empty(k, np.int64)
        parts[slots] = part_of_slot.pop(number)
        part_of_slot[first] = parts
        part_of_slot[second] = parts[::-1]
    part_of = np.empty(rows.size, np.int64)
    for number, row in enumerate(rows):
        part_of[row] = part_of_slot[number][:width]
    return part_of


def _even_counts(ranked: Floats, k: int) -> Ints:
    """Largest differencing of rows of k: counts are equal, or differ by one where k does not divide them."""
    short = -len(ranked) % k
    padded = np.concatenate([ranked, np.zeros(short)])
    return _differencing(padded, np.arange(len(padded)).reshape(-1, k), k)[: len(ranked)]


def _greedy_rows(ranked: Floats, k: int) -> Ints:
    """Each row of k goes longest to lightest; k divides the number of items."""
    part_of = np.empty(len(ranked), np.int64)
    sums = np.zeros(k)
    for first in range(0, len(ranked), k):
        lightest = np.argsort(sums, kind="stable")
        part_of[first : first + k] = lightest
        sums[lightest] += ranked[first : first + k]
    return part_of


def _greedy(ranked: Floats, k: int) -> Ints:
    """Each item, longest first, goes to the part that is lightest, of those to the one with the fewest items."""
    heap = [(0.0, 0, part) for part in range(k)]
    part_of = []
    for length in ranked.tolist():
        load, count, part = heap[0]
        part_of.append(part)
        heapq.heapreplace(heap, (load + length, count + 1, part))
    return np.array(part_of, np.int64)


# --- refinement


def _step(ranked: Floats, even: float) -> float:
    """The difference of two sums that need not become smaller."""
    integral = bool((ranked == np.floor(ranked)).all())
    return max(even * _EVEN, 1.0 if integral else 0.0)


def _refine(ranked: Floats, part_of: Ints, k: int, *, free: bool) -> Ints:
    """Relieves the heaviest part, then the next, until no exchange with a lighter part helps any.

    An exchange is one item for one, or where counts are `free` one for none, and leaves both parts lighter
    than the heavier was. A part that cannot be relieved stands aside until any other part changes.
    """
    # Ranks descend in length; their negatives ascend with it, so a sorted part is sorted by length.
    by_part = np.argsort(part_of, kind="stable")
    cuts = np.cumsum(np.bincount(part_of, minlength=k))[:-1]
    parts = [part[::-1] for part in np.split(by_part, cuts)]
    sums = np.array([ranked[part].sum() for part in parts])
    enough = _step(ranked, float(sums.mean()))
    stuck = np.zeros(k, bool)
    pairs = 0
    while pairs < _MAX_PAIRS and not stuck.all():
        heavy = int(np.where(stuck, -1.0, sums).argmax())
        stuck[heavy] = True
        for light in np.argsort(sums, kind="stable").tolist():
            gap = float(sums[heavy] - sums[light])
            if gap <= enough or pairs == _MAX_PAIRS:
                break
            pairs += 1
            exchanged = _exchange(ranked, parts[heavy], parts[light], gap, free)
            if exchanged is not None:
                parts[heavy], parts[light] = exchanged
                sums[heavy], sums[light] = (ranked[part].sum() for part in exchanged)
                stuck[:] = False
                break
    for number, part in enumerate(parts):
        part_of[part] = number
    return part_of


def _exchange(ranked: Floats, heavy: Ints, light: Ints, gap: float, free: bool) -> tuple[Ints, Ints] | None:
    """Both parts after the one exchange that brings their sums nearest; None if none brings them nearer.

    heavy, light: ranks by rising length. An item a for an item b takes 2 (a - b) off the gap, best is a - b = gap / 2.
    """
    have = ranked[light]
    if free:
        have = np.concatenate([[0.0], have])  # taking nothing in return
    want = ranked[heavy] - gap / 2
    above = np.searchsorted(have, want)
    below = np.maximum(above - 1, 0)
    above = np.minimum(above, len(have) - 1)
    over, under = np.abs(have[above] - want), np.abs(want - have[below])
    nearest = np.where(over < under, above, below)
    rest = np.minimum(over, under)
    give = int(rest.argmin())
    # Rounding must not pass for progress.
    if rest[give] >= gap / 2 * (1 - 1e-9):
        return None
    take = int(nearest[give]) - int(free)
    given = heavy[give]
    if take < 0:
        if len(heavy) == 1:
            return None
        return np.delete(heavy, give), _insert(light, given)
    return _insert(np.delete(heavy, give), light[take]), _insert(np.delete(light, take), given)


def _insert(part: Ints, rank: np.int64) -> Ints:
    """The part with one more rank, in falling order."""
    return np.insert(part, int(np.searchsorted(-part, -rank)), rank)
