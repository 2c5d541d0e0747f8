"""Divides values into k parts: `spread` refines several starts by exchanges of items, and takes the best result.

Largest differencing and the greedy method make the starts. `refine` also keeps a cap, for `capped_division`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from transfer_queue.sampler.balance.validation import Floats, Ints, by_position, largest_first, members

# ---------------------------------------------------------------- largest differencing
# Karmarkar and Karp, "The differencing method of set partitioning", 1982.

# The non-empty parts of a state: their sums in descending order, and for each part the item that represents it.
_Parts: TypeAlias = tuple[Floats, Ints]


class Ties(Enum):
    """Which of the states with equal spreads is merged first.

    The value is a tuple of signs: of the largest sum, of the state's number, and of the numbers of the initial states,
    which are counted from the one with the largest values.
    """

    LARGEST = (-1, 1, 1)
    """The state with the largest sum; of several, the one that was made first."""

    OLDEST = (0, 1, 1)
    """The state that was made first; of the initial states, the one with the largest values."""

    OLDEST_SMALLEST = (0, 1, -1)
    """The state that was made first; of the initial states, the one with the smallest values."""

    NEWEST = (0, -1, -1)
    """The state that was made last; of the initial states, the one with the largest values."""

    NEWEST_SMALLEST = (0, -1, 1)
    """The state that was made last; of the initial states, the one with the smallest values."""


def divide_by_differencing(ranked: Floats, k: int, *, equal: bool, ties: Ties = Ties.LARGEST) -> Ints:
    """Return the part of each rank by differencing alone.

    Args:
        ranked: Values in descending order.
        k: Number of parts, at most the number of values.
        equal: Whether counts are equal; they differ by one if k does not divide the number of values.
        ties: Which of the states with equal spreads is merged first.
    """
    if not equal:
        return differencing(ranked, np.arange(len(ranked)).reshape(-1, 1), k, ties)
    short = -len(ranked) % k
    padded = np.concatenate([ranked, np.zeros(short)]) if short else ranked
    return differencing(padded, np.arange(len(padded)).reshape(-1, k), k, ties)[: len(ranked)]


def differencing(ranked: Floats, rows: Ints, k: int, ties: Ties) -> Ints:
    """Return the part of each rank, of k parts, none empty.

    A state is k sums in descending order. The two states with the largest spread are merged, the largest sums of one
    with the smallest of the other, until one state is left.

    Args:
        ranked: Values in descending order.
        rows: [r, c] ranks, c <= k; the items of one row go to different parts.
        k: Number of parts, at most the number of values.
        ties: Which of the states with equal spreads is merged first.
    """
    heap = [_state(ties.value[2] * number, (ranked[row], row), k, ties) for number, row in enumerate(rows)]
    heapq.heapify(heap)
    parent = np.arange(rows.size)
    for number in range(len(rows), 2 * len(rows) - 1):
        one = heapq.heappop(heap)[-1]
        two = heap[0][-1]
        heapq.heapreplace(heap, _state(number, _merged(one, two, k, parent), k, ties))
    while not np.array_equal(parent, above := parent[parent]):
        parent = above
    part_of = np.empty(rows.size, np.int64)
    part_of[heap[0][-1][1]] = np.arange(k)
    return part_of[parent]


def _state(number: int, parts: _Parts, k: int, ties: Ties) -> tuple[float, float, int, _Parts]:
    """Return the entry of a state in the heap, whose smallest entry is merged next."""
    sums, (by_sum, by_number, _) = parts[0], ties.value
    largest = float(sums[0])
    smallest = float(sums[-1]) if len(sums) == k else 0.0
    return smallest - largest, by_sum * largest, by_number * number, parts


def _merged(one: _Parts, two: _Parts, k: int, parent: Ints) -> _Parts:
    """Merge the parts of two states. For each merged part, `parent` gets the item of the part that it is now in."""
    (sums, items), (others, more) = one, two
    alone = k - len(others)  # parts of `one` that are merged with an empty part
    if len(sums) > alone:
        met = k - len(sums)
        parent[more[met:][::-1]] = items[alone:]
        together = sums[alone:] + others[met:][::-1]
        if alone or met:
            together = np.concatenate([sums[:alone], together, others[:met]])
            items = np.concatenate([items, more[:met]])
    else:
        together, items = np.concatenate([sums, others]), np.concatenate([items, more])
    order = np.argsort(-together, kind="stable")
    return together[order], items[order]


# ---------------------------------------------------------------- exchanges
# Items of the heaviest part are exchanged with lighter parts until no exchange helps.

# Pairs of parts that one refinement tries. It limits the time if the parts cannot become even
# (with 64 items in a part, a pair takes about 10 us).
_MAX_PAIRS = 2500
# Parts whose sums differ by at most this fraction of the even load are even enough. Further steps would be many and
# would improve only the last digits.
EVEN = 1e-6


@dataclass(frozen=True)
class Cap:
    """A cap that both parts of an exchange must keep."""

    tokens: Floats
    """The tokens of each rank, whole numbers."""
    most: int
    """The maximum number of tokens in a part."""


@dataclass(frozen=True)
class _Gain:
    """The tokens that the lighter part may gain in an exchange, which are those that the heavier part loses."""

    tokens: Floats
    """The tokens of each rank."""
    least: float
    """The minimum of the gain, without which the heavier part would exceed the cap."""
    most: float
    """The maximum of the gain."""

    def allows(self, given: Ints, taken: Floats) -> np.ndarray:
        """Return for each rank in `given` whether it may be exchanged for the tokens in `taken`."""
        gained = self.tokens[given] - taken
        return (gained <= self.most) & (gained >= self.least)


def step(ranked: Floats, even: float) -> float:
    """Return the difference of two sums that need not become smaller."""
    integral = bool((ranked == np.floor(ranked)).all())
    return max(even * EVEN, 1.0 if integral else 0.0)


def refine(
    ranked: Floats, part_of: Ints, k: int, *, free: bool, cap: Cap | None = None, most_pairs: int = _MAX_PAIRS
) -> Ints:
    """Return an improved part of each rank. Overwrites `part_of`.

    An exchange is one item for one, or one for none if counts are `free` or the heavier part has more items. It leaves
    both parts lighter than the heavier one was. With a `cap`, which the given parts keep, both parts keep it. A part
    that no exchange improves is ignored until another part changes.

    most_pairs: the number of pairs of parts to try.
    """
    # Ranks descend in value; reversed, a part is sorted by rising value.
    parts = [part[::-1] for part in members(part_of, k)]
    sums = np.array([ranked[part].sum() for part in parts])
    held = np.bincount(part_of, cap.tokens, k) if cap else sums
    enough = step(ranked, float(sums.mean()))
    # A part with a single item cannot become lighter: the part that takes the item would be as heavy.
    stuck = np.bincount(part_of, minlength=k) == 1
    single = stuck.copy()
    pairs = 0
    while pairs < most_pairs and not stuck.all():
        heavy = int(np.where(stuck, -1.0, sums).argmax())
        stuck[heavy] = True
        for light in _lightest_first(sums):
            gap = float(sums[heavy] - sums[light])
            if gap <= enough or pairs == most_pairs:
                break
            pairs += 1
            may_move = free or len(parts[heavy]) > len(parts[light])
            gain = _Gain(cap.tokens, held[heavy] - cap.most, cap.most - held[light]) if cap else None
            exchanged = _exchange(ranked, parts[heavy], parts[light], gap, may_move, gain)
            if exchanged is not None:
                parts[heavy], parts[light] = exchanged
                sums[heavy], sums[light] = (ranked[part].sum() for part in exchanged)
                if cap:
                    held[heavy], held[light] = (cap.tokens[part].sum() for part in exchanged)
                single[heavy], single[light] = (len(part) == 1 for part in exchanged)
                stuck[:] = single
                break
    for number, part in enumerate(parts):
        part_of[part] = number
    return part_of


def _lightest_first(sums: Floats) -> Iterator[int]:
    """Iterate over the parts by ascending sum. Usually the first is enough, and a full sort is not needed."""
    yield int(sums.argmin())
    yield from np.argsort(sums, kind="stable")[1:].tolist()


def _exchange(
    ranked: Floats, heavy: Ints, light: Ints, gap: float, may_move: bool, gain: _Gain | None
) -> tuple[Ints, Ints] | None:
    """Return both parts after the exchange that brings their sums nearest; None if no exchange brings them nearer.

    heavy, light: ranks by ascending value. Exchanging an item a for an item b reduces the gap by 2 (a - b), so that
    a - b = gap / 2 is best.
    """
    have = ranked[light]
    if may_move:
        have = np.concatenate([[0.0], have])  # 0: move an item and take nothing for it
    want = ranked[heavy] - gap / 2
    above = np.searchsorted(have, want)
    below = np.maximum(above - 1, 0)
    above = np.minimum(above, len(have) - 1)
    over, under = np.abs(have[above] - want), np.abs(want - have[below])
    if gain is not None:
        tokens = gain.tokens[light]
        if may_move:
            tokens = np.concatenate([[0.0], tokens])
        over = np.where(gain.allows(heavy, tokens[above]), over, np.inf)
        under = np.where(gain.allows(heavy, tokens[below]), under, np.inf)
    nearest = np.where(over < under, above, below)
    rest = np.minimum(over, under)
    give = int(rest.argmin())
    # Rounding errors must not count as progress.
    if rest[give] >= gap / 2 * (1 - 1e-9):
        return None
    take = int(nearest[give]) - int(may_move)
    given = heavy[give]
    if take < 0:
        if len(heavy) == 1:
            return None
        return np.delete(heavy, give), _insert(light, given)
    return _insert(np.delete(heavy, give), light[take]), _insert(np.delete(light, take), given)


def _insert(part: Ints, rank: np.int64) -> Ints:
    """Return the part with one more rank, in descending order."""
    return np.insert(part, int(np.searchsorted(-part, -rank)), rank)


# ---------------------------------------------------------------- several starts

# Up to this number of values, all ways to break ties are tried: with few values they matter, and take little time.
_FEW = 128


class _Start(NamedTuple):
    """A division from which refining starts."""

    divide: Callable[[Floats, int], Ints]
    """Returns the part of each rank."""

    if_ahead: bool = False
    """Whether it is refined only if it is already better than the best result so far."""


def spread(values: Floats, k: int, *, equal: bool) -> Ints:
    """Return the part of each value, of k parts, none empty. If `equal`, counts differ by at most one.

    1 <= k <= len(values). The result is never worse than largest differencing (`divide_by_differencing`) for the same
    counts: that is one of the starts, unless a start before it is within a share of EVEN of the lower bound of the
    largest sum.
    """
    order = largest_first(values)
    ranked = values[order]
    even = ranked.sum() / k
    best: tuple[float, float] | None = None
    for start in _starts(len(values), equal=equal):
        divided = start.divide(ranked, k)
        if start.if_ahead and best is not None and _score(ranked, divided, k) >= best:
            continue
        divided = refine(ranked, divided, k, free=not equal)
        score = _score(ranked, divided, k)
        if best is None or score < best:
            best, part_of = score, divided
        if score[0] <= max(even, float(ranked[0])) * (1 + EVEN) or score[0] + score[1] <= step(ranked, even):
            break
    return by_position(part_of, order)


def _starts(count: int, *, equal: bool) -> list[_Start]:
    """Return the starts for `count` values, in the order in which they are tried. The first one is usually enough."""
    even_counts = _Start(partial(divide_by_differencing, equal=True))
    if equal:
        starts = [even_counts, _Start(greedy_rows)]
    else:
        # With free counts the greedy start is usually the best one, and refining takes longer than all starts.
        starts = [
            _Start(greedy),
            even_counts,
            _Start(partial(divide_by_differencing, equal=False), if_ahead=count > _FEW),
        ]
    if count <= _FEW:
        others = (ties for ties in Ties if ties is not Ties.LARGEST)
        starts += [_Start(partial(divide_by_differencing, equal=equal, ties=ties), if_ahead=True) for ties in others]
    return starts


def _score(ranked: Floats, part_of: Ints, k: int) -> tuple[float, float]:
    """Return how uneven a division is, as (largest sum, negative smallest sum); less is better."""
    sums = np.bincount(part_of, ranked, k)
    return float(sums.max()), -float(sums.min())


def greedy(ranked: Floats, k: int) -> Ints:
    """Return the part of each rank: each item goes to the lightest part, with the fewest items if several are."""
    heap = [(0.0, 0, part) for part in range(k)]
    part_of = []
    for value in ranked.tolist():
        load, count, part = heap[0]
        part_of.append(part)
        heapq.heapreplace(heap, (load + value, count + 1, part))
    return np.array(part_of, np.int64)


def greedy_rows(ranked: Floats, k: int) -> Ints:
    """Do the same in rows of k items, the largest item to the lightest part, so that counts are equal.

    In an incomplete last row only the lightest parts get an item.
    """
    part_of = np.empty(len(ranked), np.int64)
    sums = np.zeros(k)
    for first in range(0, len(ranked), k):
        row = ranked[first : first + k]
        lightest = np.argsort(sums, kind="stable")[: len(row)]
        part_of[first : first + k] = lightest
        sums[lightest] += row
    return part_of
