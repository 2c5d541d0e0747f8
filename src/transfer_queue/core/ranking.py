"""Which rows of a bitmap have the highest keys, found by looking only where they can be.

The keys come from a column of the tag (`rows.Chunk.numbers`). Per chunk the highest key is kept and computed anew
after a change; a chunk is looked into only if that is among the highest asked for.
"""

from __future__ import annotations

import numpy as np

from transfer_queue.core.rows import CHUNK_BITS, Chunk, Rows
from transfer_queue.sampler.tags import no_number
from transfer_queue.sampler.views import Key

Bits = dict[int, np.ndarray]


class Ranking:
    """highest: chunk number -> the highest key of its rows in the bitmap, no entry where it has none.

    dirty: chunks whose rows, tags or bits changed since.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.highest: dict[int, float] = {}
        self.dirty: set[int] = set()

    def _refresh(self, bits: Bits, rows: Rows) -> None:
        for number in sorted(self.dirty):
            chunk = rows.chunks.get(number)
            self.highest.pop(number, None)
            if chunk is not None and number in bits:
                keys = self._keys(bits[number], chunk)[1]
                if len(keys):
                    self.highest[number] = float(keys.max())
            self.dirty.discard(number)

    def _keys(self, bits: np.ndarray, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        """Where in the chunk the bitmap has rows, and their keys. InvalidArgumentError for a tag that is no number."""
        at = bits.view(bool).nonzero()[0]
        wrong = chunk.wrong.get(self.key.tag)
        if wrong:
            for found in sorted(wrong.intersection(at.tolist())):
                assert chunk.tags is not None
                raise no_number(int(chunk.index[found]), self.key.tag, (chunk.tags[found] or {}).get(self.key.tag))
        return at, self.key.of(chunk.numbers[self.key.tag][at], chunk.index[at])

    def top(self, bits: Bits, rows: Rows, count: int) -> np.ndarray:
        """The positions of the `count` highest rows (all where there are fewer), highest first, equal ones in order."""
        self._refresh(bits, rows)
        numbers = np.fromiter(self.highest, "i8", len(self.highest))
        highest = np.fromiter(self.highest.values(), "f8", len(self.highest))
        order = np.lexsort((numbers, -highest))
        positions, keys = np.zeros(0, "i8"), np.zeros(0)
        for number, most in zip(numbers[order].tolist(), highest[order].tolist(), strict=True):
            start = number << CHUNK_BITS
            full = len(keys) >= count
            if full and (most, -start) < (keys[-1], -positions[-1]):
                break  # neither this chunk nor a later one holds a higher row
            at, found = self._keys(bits[number], rows.chunks[number])
            if full:
                good = found >= keys[-1]
                at, found = at[good], found[good]
            at, found = _highest(at, found, count)
            positions = np.concatenate([positions, at + start])
            keys = np.concatenate([keys, found])
            best = np.lexsort((positions, -keys))[:count]
            positions, keys = positions[best], keys[best]
        return positions

    def above(self, bits: Bits, rows: Rows, bound: float) -> np.ndarray:
        """The positions of the rows whose key is above the bound, ascending."""
        self._refresh(bits, rows)
        parts = []
        for number in sorted(number for number, most in self.highest.items() if most > bound):
            at, keys = self._keys(bits[number], rows.chunks[number])
            parts.append(at[keys > bound] + (number << CHUNK_BITS))
        return np.concatenate(parts) if parts else np.zeros(0, "i8")


def _highest(at: np.ndarray, keys: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` highest, of equal ones the first; in no order. at ascends."""
    if len(keys) <= count:
        return at, keys
    least = np.partition(keys, len(keys) - count)[len(keys) - count]
    keep = keys > least
    equal = np.flatnonzero(keys == least)
    keep[equal[: count - int(np.count_nonzero(keep))]] = True
    return at[keep], keys[keep]
