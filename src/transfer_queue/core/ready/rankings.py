"""Which rows of a bitmap have the highest keys, found by looking only where they can be.

The keys come from a column of the tag (`rows.Chunk.numbers`). Per chunk the highest key is kept and computed anew
after a change; a chunk is looked into only if that is among the highest asked for.
"""

from __future__ import annotations

import numpy as np

from transfer_queue.core.tables.row_table import CHUNK_BITS, Chunk, RowTable
from transfer_queue.sampler.numeric_tags import no_number
from transfer_queue.sampler.ready_views import RankKey

Bits = dict[int, np.ndarray]


class Ranking:
    """highest: chunk number -> the highest key of its rows in the bitmap, no entry where it has none.

    dirty: chunks whose rows, tags or bits changed since.
    """

    def __init__(self, key: RankKey) -> None:
        self.key = key
        self.highest: dict[int, float] = {}
        self.dirty: set[int] = set()

    def refresh(self, bits: Bits, rows: RowTable, chunks: int | None = None) -> None:
        """Finds the highest key of so many chunks of which it is not known (None: all)."""
        for number in sorted(self.dirty)[:chunks]:
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
        return at, self.key.of(chunk.numbers[self.key.tag][at], chunk.index[at] if self.key.aging else at)

    def top(self, bits: Bits, rows: RowTable, count: int) -> np.ndarray:
        """The positions of the `count` highest rows (all where there are fewer), highest first, equal ones in order."""
        self.refresh(bits, rows)
        numbers = np.fromiter(self.highest, "i8", len(self.highest))
        highest = np.fromiter(self.highest.values(), "f8", len(self.highest))
        # as each has a row, so many chunks hold the rows asked for, and nothing below the least of them is needed
        order = np.lexsort((numbers, -highest))[:count]
        least = highest[order[-1]] if len(order) == count else -np.inf
        positions, keys = np.zeros(0, "i8"), np.zeros(0)
        start, step = 0, 1
        while start < len(order):
            first = order[start]
            if len(keys) == count and (highest[first], -numbers[first] << CHUNK_BITS) < (keys[-1], -positions[-1]):
                break  # neither this chunk nor a later one holds a higher row
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

    def above(self, bits: Bits, rows: RowTable, bound: float) -> np.ndarray:
        """The positions of the rows whose key is above the bound, ascending."""
        self.refresh(bits, rows)
        parts = []
        for number in sorted(number for number, most in self.highest.items() if most > bound):
            at, keys = self._keys(bits[number], rows.chunks[number])
            parts.append(at[keys > bound] + (number << CHUNK_BITS))
        return np.concatenate(parts) if parts else np.zeros(0, "i8")


def _highest(positions: np.ndarray, keys: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` highest with their keys, highest first, equal ones by position."""
    if len(keys) > 2 * count:
        least = np.partition(keys, len(keys) - count)[len(keys) - count]
        above = np.flatnonzero(keys > least)
        equal = np.flatnonzero(keys == least)
        first = equal[np.argsort(positions[equal], kind="stable")[: count - len(above)]]
        kept = np.concatenate([above, first])
        positions, keys = positions[kept], keys[kept]
    order = np.lexsort((positions, -keys))[:count]
    return positions[order], keys[order]
