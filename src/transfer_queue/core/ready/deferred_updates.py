"""What was published and not every ready set has looked at: a put does not touch the sets of tasks that do not wait."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transfer_queue.core.ready.ready_sets import ReadySet
from transfer_queue.core.tables.group_table import GroupTable
from transfer_queue.core.tables.row_table import Chunk, RowTable
from transfer_queue.core.tables.wide_columns import MANY_FIELDS

MOST_ENTRIES = 256
MOST_ROWS = 4096

Fields = frozenset[str]


class DeferredUpdate:
    """Rows of a chunk that got values of these fields, a run of them or an array. number: ascending from 1."""

    __slots__ = ("at", "chunk", "fields", "first", "key", "last", "number")

    def __init__(self, number: int, fields: Fields, key: int, chunk: Chunk) -> None:
        self.number = number
        self.fields = fields
        self.key = key
        self.chunk = chunk
        self.first = self.last = 0
        self.at: np.ndarray | None = None

    def where(self) -> np.ndarray:
        """Where these rows are in their chunk."""
        return np.arange(self.first, self.last) if self.at is None else self.at


class DeferredUpdates:
    """The latest publishes of a partition, for its ready sets. Derived.

    A set knows by `ReadySet.seen` how far it has looked. To look twice at a row does no harm: what it is now counts.
    """

    def __init__(self, rows: RowTable, groups: GroupTable) -> None:
        self._rows = rows
        self._groups = groups
        self._entries: list[DeferredUpdate] = []
        self._shown = 0  # no set has looked further
        self._size = 0  # rows in all entries
        self.newest = 0  # number of the newest entry so far

    def run(self, fields: Fields, key: int, chunk: Chunk, first: int, last: int) -> None:
        """Neighbours were published. Where those before them were, and nobody has looked since, they are one run."""
        self._size += last - first
        entry = self._entries[-1] if self._entries else None
        if (
            entry is None
            or entry.number <= self._shown
            or (entry.key, entry.last, entry.at) != (key, first, None)
            or not (entry.fields is fields or (len(fields) < MANY_FIELDS and entry.fields == fields))
        ):
            entry = self._entered(fields, key, chunk)
            entry.first = first
        entry.last = last

    def rows(self, fields: Fields, key: int, chunk: Chunk, at: np.ndarray) -> None:
        """Any rows of a chunk were published."""
        self._size += len(at)
        self._entered(fields, key, chunk).at = at

    def _entered(self, fields: Fields, key: int, chunk: Chunk) -> DeferredUpdate:
        self.newest += 1
        entry = DeferredUpdate(self.newest, fields, key, chunk)
        self._entries.append(entry)
        return entry

    def show(self, ready: ReadySet) -> bool:
        """A set looks at what is new to it; True if rows became ready."""
        fresh = []
        for entry in reversed(self._entries):
            if entry.number <= ready.seen:
                break
            if not entry.fields.isdisjoint(ready.fields):
                fresh.append(entry)
        self.looked(ready)
        if len(fresh) > 1:
            fresh = _merged(fresh)
        gained = False
        for entry in fresh:
            if self._rows.chunks.get(entry.key) is entry.chunk:  # else all of its rows have ended
                gained |= ready.update(entry.key, entry.chunk, entry.where(), self._groups)
        return gained

    def looked(self, ready: ReadySet) -> None:
        """A set knows of everything so far: it was just built, or shown."""
        ready.seen = self._shown = self.newest

    def trim(self, sets: Collection[ReadySet]) -> None:
        """Where much has come, all sets look, and it is forgotten."""
        if self._size > MOST_ROWS or len(self._entries) > MOST_ENTRIES:
            self._entries = sorted(_merged(self._entries), key=lambda entry: entry.number)
            for ready in sets:
                self.show(ready)
            self.forget()

    def forget(self) -> None:
        """All sets have looked, or there are none."""
        self._entries.clear()
        self._size = 0


def _merged(entries: list[DeferredUpdate]) -> list[DeferredUpdate]:
    """The same rows, one entry for each chunk and fields, with the number of the newest of them."""
    together: dict[tuple[int, Fields], list[DeferredUpdate]] = {}
    for entry in entries:
        together.setdefault((entry.key, entry.fields), []).append(entry)
    merged = []
    for (key, fields), some in together.items():
        if len(some) > 1:
            one = DeferredUpdate(max(entry.number for entry in some), fields, key, some[0].chunk)
            one.at = np.unique(np.concatenate([entry.where() for entry in some]))
            some = [one]
        merged += some
    return merged
