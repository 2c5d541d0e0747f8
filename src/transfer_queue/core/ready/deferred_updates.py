"""Publications that ready sets process later, so that a put does not update the sets of tasks that do not wait."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transfer_queue.core.ready.ready_sets import ReadySet
from transfer_queue.core.tables.group_table import GroupTable
from transfer_queue.core.tables.row_table import Chunk, Indexer, RowTable

MOST_ENTRIES = 256
MOST_ROWS = 4096

Fields = frozenset[str]


class DeferredUpdate:
    """Rows of one chunk that got values of these fields: a range of rows, or an array."""

    __slots__ = ("at", "chunk", "fields", "first", "key", "last", "number")

    def __init__(self, number: int, fields: Fields, key: int, chunk: Chunk, at: Indexer) -> None:
        self.number = number
        """Ascends from 1."""
        self.fields = fields
        self.key = key
        self.chunk = chunk
        self.first: int = 0
        self.last: int = 0
        """The range of the rows, without `last`; not used if `at` is set."""
        self.at: np.ndarray | None = None
        if isinstance(at, slice):
            self.first, self.last = at.start, at.stop
        else:
            self.at = at

    def positions(self) -> np.ndarray:
        """Return where these rows are in their chunk."""
        return np.arange(self.first, self.last) if self.at is None else self.at


class DeferredUpdates:
    """The latest publications of a partition, for its ready sets. Derived.

    `ReadySet.seen` says which of them a set has processed. To process a row twice does no harm: its present
    state counts.
    """

    def __init__(self, rows: RowTable, groups: GroupTable) -> None:
        self._rows = rows
        self._groups = groups
        self._entries: list[DeferredUpdate] = []
        self._shown = 0  # the highest number that a set has processed
        self._size = 0  # the number of rows in all entries
        self.newest = 0
        """The number of the newest entry so far."""

    def add(self, fields: Fields, key: int, chunk: Chunk, at: Indexer) -> None:
        """Add rows of a chunk. A run joins the newest entry if it follows its rows and no set has processed that."""
        is_run = isinstance(at, slice)
        self._size += at.stop - at.start if is_run else len(at)
        newest = self._entries[-1] if self._entries else None
        if (
            is_run
            and newest is not None
            and newest.number > self._shown
            and (newest.key, newest.last, newest.at, newest.fields) == (key, at.start, None, fields)
        ):
            newest.last = at.stop
            return
        self.newest += 1
        self._entries.append(DeferredUpdate(self.newest, fields, key, chunk, at))

    def apply_to(self, ready: ReadySet) -> bool:
        """Let a set process the entries that are new to it. Return whether rows became ready."""
        fresh = []
        for entry in reversed(self._entries):
            if entry.number <= ready.seen:
                break
            if not entry.fields.isdisjoint(ready.fields):
                fresh.append(entry)
        self.mark_processed(ready)
        if len(fresh) > 1:
            fresh = _merge_entries(fresh)
        gained = False
        for entry in fresh:
            if self._rows.chunks.get(entry.key) is entry.chunk:  # otherwise all its rows were removed
                gained |= ready.update(entry.key, entry.chunk, entry.positions(), self._groups)
        return gained

    def mark_processed(self, ready: ReadySet) -> None:
        """Record that a set has processed every entry: it was just built or updated."""
        ready.seen = self._shown = self.newest

    def trim(self, sets: Collection[ReadySet]) -> None:
        """Let all sets process the entries and then remove these, if there are many."""
        if self._size > MOST_ROWS or len(self._entries) > MOST_ENTRIES:
            self._entries = sorted(_merge_entries(self._entries), key=lambda entry: entry.number)
            for ready in sets:
                self.apply_to(ready)
            self.clear()

    def clear(self) -> None:
        """Remove the entries. All sets have processed them, or there are no sets."""
        self._entries.clear()
        self._size = 0


def _merge_entries(entries: list[DeferredUpdate]) -> list[DeferredUpdate]:
    """Return the same rows with one entry for each chunk and fields, numbered like the newest of its entries."""
    together: dict[tuple[int, Fields], list[DeferredUpdate]] = {}
    for entry in entries:
        together.setdefault((entry.key, entry.fields), []).append(entry)
    merged = []
    for (key, fields), some in together.items():
        if len(some) > 1:
            at = np.unique(np.concatenate([entry.positions() for entry in some]))
            some = [DeferredUpdate(max(entry.number for entry in some), fields, key, some[0].chunk, at)]
        merged += some
    return merged
