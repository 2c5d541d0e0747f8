"""Refinement of a division: relieves the heaviest part by exchanges with lighter ones until none helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from transfer_queue.sampler.balance.validation import Floats, Ints, members

# Pairs of parts that one refinement looks at; bounds the time where the parts cannot become even
# (at 64 items a part a pair costs about 10 us).
_MAX_PAIRS = 2500
# Parts whose sums differ by no more than this share of the even load are even enough. The steps of the last
# digits would be many and worth nothing.
EVEN = 1e-6


@dataclass(frozen=True)
class Cap:
    """A cap that both parts of an exchange must keep. tokens: by rank, whole."""

    tokens: Floats
    most: int


@dataclass(frozen=True)
class _Gain:
    """How many tokens the lighter part may gain in an exchange, and how many it must (the heavier loses as many)."""

    tokens: Floats
    least: float
    most: float

    def allows(self, given: Ints, taken: Floats) -> np.ndarray:
        """For each of these ranks given, and tokens taken in return."""
        gained = self.tokens[given] - taken
        return (gained <= self.most) & (gained >= self.least)


def step(ranked: Floats, even: float) -> float:
    """The difference of two sums that need not become smaller."""
    integral = bool((ranked == np.floor(ranked)).all())
    return max(even * EVEN, 1.0 if integral else 0.0)


def refine(
    ranked: Floats, part_of: Ints, k: int, *, free: bool, cap: Cap | None = None, most_pairs: int = _MAX_PAIRS
) -> Ints:
    """The part of each rank, better than the given one, which is overwritten.

    An exchange is one item for one, or one for none where counts are `free` or the heavier part has more items, and
    leaves both parts lighter than the heavier was; with a `cap`, which the given parts keep, both keep it.
    A part that cannot be relieved stands aside until any other part changes.
    most_pairs: how many pairs of parts to look at.
    """
    # Ranks descend in value; reversed, a part is sorted by rising value.
    parts = [part[::-1] for part in members(part_of, k)]
    sums = np.array([ranked[part].sum() for part in parts])
    held = np.bincount(part_of, cap.tokens, k) if cap else sums
    enough = step(ranked, float(sums.mean()))
    # A single item cannot be relieved: whoever takes it is as heavy.
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
    """Parts by rising sum; mostly the first is enough, and a full sort not needed."""
    yield int(sums.argmin())
    yield from np.argsort(sums, kind="stable")[1:].tolist()


def _exchange(
    ranked: Floats, heavy: Ints, light: Ints, gap: float, may_move: bool, gain: _Gain | None
) -> tuple[Ints, Ints] | None:
    """Both parts after the one exchange that brings their sums nearest; None if none brings them nearer.

    heavy, light: ranks by rising value. An item a for an item b takes 2 (a - b) off the gap, best is a - b = gap / 2.
    """
    have = ranked[light]
    if may_move:
        have = np.concatenate([[0.0], have])  # taking nothing in return
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
    # Rounding must not pass for progress.
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
    """The part with one more rank, in falling order."""
    return np.insert(part, int(np.searchsorted(-part, -rank)), rank)
