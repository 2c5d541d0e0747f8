"""Refines a division: exchanges items of the heaviest part with lighter parts until no exchange helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from transfer_queue.sampler.balance.validation import Floats, Ints, members

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
