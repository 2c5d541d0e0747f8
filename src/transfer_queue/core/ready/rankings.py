"""Finds the rows of a bitmap with the highest keys, and reads only chunks that can contain them.

The keys are computed from a column of the tag (`row_table.Chunk.numbers`). The highest key of each chunk is kept, and
computed again after a change. A chunk is read only if its highest key is among the highest keys that are needed.
"""

from __future__ import annotations

import numpy as np

from transfer_queue.core.tables.row_table import CHUNK_BITS, Chunk, RowTable
from transfer_queue.sampler.numeric_tags import not_a_number_error
from transfer_queue.sampler.ready_views import RankKey

Bits = dict[int, np.ndarray]


class Ranking:
    """The highest keys of the chunks of a bitmap."""

    def __init__(self, key: RankKey) -> None:
        self.key = key
        self.highest: dict[int, float] = {}
        """Chunk number -> the highest key of its rows in the bitmap; no entry if it has no such row."""
        self.dirty: set[int] = set()
        """The chunks whose rows, tags or bits have changed since their highest key was computed."""

    def refresh(self, bits: Bits, rows: RowTable, chunks: int | None = None) -> None:
        """Compute the highest keys of this number of changed chunks (None: all)."""
        for number in sorted(self.dirty)[:chunks]:
            chunk = rows.chunks.get(number)
            self.highest.pop(number, None)
            if chunk is not None and number in bits:
                keys = self._keys(bits[number], chunk)[1]
                if len(keys):
                    self.highest[number] = float(keys.max())
            self.dirty.discard(number)

    def _keys(self, bits: np.ndarray, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        """Return where the bitmap has rows in a chunk, and their keys. Raise InvalidArgumentError for a wrong tag."""
        at = bits.view(bool).nonzero()[0]
        wrong = chunk.wrong.get(self.key.tag)
        if wrong:
            for found in sorted(wrong.intersection(at.tolist())):
                assert chunk.tags is not None
                raise not_a_number_error(int(chunk.index[found]), self.key.tag, chunk.tags.row(found)[self.key.tag])
        return at, self.key.keys_of(chunk.numbers[self.key.tag][at], chunk.index[at] if self.key.aging else at)

    def highest_positions(self, bits: Bits, rows: RowTable, count: int) -> np.ndarray:
        """Return the positions of the `count` highest rows, or all if fewer: by key, descending, then by position."""
        self.refresh(bits, rows)
        numbers = np.fromiter(self.highest, "i8", len(self.highest))
        highest = np.fromiter(self.highest.values(), "f8", len(self.highest))
        # each chunk has at least one row, so `count` chunks contain enough rows, and no lower chunk is needed
        order = np.lexsort((numbers, -highest))[:count]
        least = highest[order[-1]] if len(order) == count else -np.inf
        positions, keys = np.zeros(0, "i8"), np.zeros(0)
        start, step = 0, 1
        while start < len(order):
            first = order[start]
            if len(keys) == count and (highest[first], -numbers[first] << CHUNK_BITS) < (keys[-1], -positions[-1]):
                break  # neither this chunk nor a later one contains a higher row
            parts, values = [positions], [keys]
            for number in numbers[order[start : start + step]].tolist():
                at, found = self._keys(bits[number], rows.chunks[number])
                good = found >= least
                parts.append(at[good] + (number << CHUNK_BITS))
                values.append(found[good])
            positions, keys = _highest(np.concatenate(parts), np.concatenate(values), count)
            if len(keys) == count:
                least = keys[-1]
            start, step = start + step, 2 * step
        return positions

    def positions_above(self, bits: Bits, rows: RowTable, bound: float) -> np.ndarray:
        """Return the positions of the rows whose key is above the bound, ascending."""
        self.refresh(bits, rows)
        parts = []
        for number in sorted(number for number, most in self.highest.items() if most > bound):
            at, keys = self._keys(bits[number], rows.chunks[number])
            parts.append(at[keys > bound] + (number << CHUNK_BITS))
        return np.concatenate(parts) if parts else np.zeros(0, "i8")


def _highest(positions: np.ndarray, keys: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` highest positions and their keys: by key, descending, then by position."""
    if len(keys) > 2 * count:
        least = np.partition(keys, len(keys) - count)[len(keys) - count]
        above = np.flatnonzero(keys > least)
        equal = np.flatnonzero(keys == least)
        first = equal[np.argsort(positions[equal], kind="stable")[: count - len(above)]]
        kept = np.concatenate([above, first])
        positions, keys = positions[kept], keys[kept]
    order = np.lexsort((positions, -keys))[:count]
    return positions[order], keys[order]
