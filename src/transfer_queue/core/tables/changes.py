"""What has changed in a partition since a version, and which values were lost with their storage.

Changes are not queued for clients. Every row has the version at which its tags or fields last changed, so a reply is
computed from the state and contains the newest state of each row once. Cleared rows have no state: the table remembers
a limited number of the latest ones. A client that asks about an earlier time learns that the reply is incomplete.

A row does not have a value that was lost: it is not dealt for the field, and a lookup of the field fails. The value
is remembered as lost, so that every client that asks gets the reason, until it is published again or its row is
removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.core.columns.schema import Count, Persisted, counter, deque_of, map_of
from transfer_queue.core.tables.rows import CHUNK_BITS, Chunk, RowsOfChunk, RowTable, ValueColumns
from transfer_queue.messages.queries import Watch

MAX_CLEARED = 65536  # cleared rows that are remembered of one partition

Keys = list[Any]  # of str | None
Cleared = tuple[int, bytes, Keys | None]  # version, i8 global indexes, their keys (None: none has one)


class ChangeFeed(Persisted):
    """When the rows of a partition last changed, and which rows were cleared."""

    newest: dict[int, int] = map_of(Count, Count)
    """Chunk number -> an upper bound of the versions in `Chunk.changed`; the most recently changed chunk is last."""
    cleared: deque[Cleared] = deque_of(Count, bytes, list[str | None] | None)
    """The latest cleared rows, without rows that had never changed."""
    forgotten: int = counter()
    """Clears up to this version may be missing."""
    made: int = counter()
    """The version at which the partition was made."""
    sealed: int = counter()
    """The version at which the partition was sealed; 0 if it is not."""

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self.rows = rows
        self.count = 0
        """The number of rows in `cleared`."""

    def mark_changed(self, version: int, positions: np.ndarray) -> None:
        """Record that these rows changed."""
        self.mark_rows_changed(version, self.rows.split(positions))

    def versions_of(self, positions: np.ndarray) -> np.ndarray:
        """Return the version at which each of these rows last changed (i8), which is never 0 for a row with a key."""
        out = np.zeros(len(positions), "i8")
        for _, chunk, at, where in self.rows.split(positions):
            out[where] = chunk.changed[at]
        return out

    def mark_rows_changed(self, version: int, rows: Sequence[RowsOfChunk]) -> None:
        """Record that these rows changed."""
        for key, chunk, at, _ in rows:
            chunk.changed[at] = version
            self.newest.pop(key, None)
            self.newest[key] = version

    def clear(self, version: int, chunk: Chunk, at: np.ndarray) -> None:
        """Record that these rows of a chunk are cleared. Rows that never changed were not reported: omit them."""
        reported = at[chunk.changed[at] > 0]
        chunk.changed[at] = 0
        if not len(reported):
            return
        keys = None if chunk.keys is None else keys_or_none([chunk.keys[a] for a in reported.tolist()])
        self.cleared.append((version, chunk.index[reported].tobytes(), keys))
        self.count += len(reported)
        while self.count > MAX_CLEARED:
            self.forgotten, indexes, _ = self.cleared.popleft()
            self.count -= len(indexes) // 8

    def forget_chunk(self, key: int) -> None:
        """Forget a chunk that is removed."""
        self.newest.pop(key, None)

    def changed_since(self, version: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the rows that changed after a version, and their versions, in order of change.

        The cost depends on the chunks that changed; other chunks are not read.
        """
        positions, versions = [np.zeros(0, "i8")], [np.zeros(0, "i8")]
        for key in reversed(self.newest):
            if self.newest[key] <= version:
                break
            changed = self.rows.chunks[key].changed
            at = np.flatnonzero(changed > version)
            positions.append(at + (key << CHUNK_BITS))
            versions.append(changed[at])
        when = np.concatenate(versions)
        where = np.concatenate(positions)
        order = np.lexsort((where, when))
        return where[order], when[order]

    def cleared_since(self, version: int) -> list[Cleared]:
        """Return the remembered clears after a version, in order."""
        return [*takewhile(lambda entry: entry[0] > version, reversed(self.cleared))][::-1]

    def derive(self) -> None:
        """Count the cleared rows."""
        self.count = sum(len(indexes) // 8 for _, indexes, _ in self.cleared)


def is_first_watch(request: Watch) -> bool:
    """Return whether the client of a watch has not received any state yet."""
    return request.since is None or request.since < 1


def keys_or_none(keys: Keys) -> Keys | None:
    """Return the keys; None if no row has one."""
    return None if keys.count(None) == len(keys) else keys


class ValuesOfChunk(NamedTuple):
    """Values of one field in rows of one chunk."""

    number: int
    """The number of the chunk."""
    chunk: Chunk
    field: str
    columns: ValueColumns
    """The columns of the field."""
    places: np.ndarray
    """The places of the rows in the chunk."""


class LossEvent(NamedTuple):
    """The loss of a storage unit, or of extents of it, with which values were lost."""

    unit: Count
    """The number of the storage unit."""
    when: str
    """The time as text, by the clock of the process that noticed the loss."""
    version: Count
    """The version of the partition."""

    def describe(self) -> str:
        """Return the text for messages."""
        return f"lost with storage unit {self.unit}" + (f" ({self.when})" if self.when else "")


class LostValues(Persisted):
    """The lost values of one partition."""

    events: dict[int, LossEvent] = map_of(Count, LossEvent)
    """The events that lost values which are still lost, by number."""
    counts: dict[str, int] = map_of(str, Count)
    """Field -> number of lost values."""

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self._rows = rows

    def mark(self, chunk: Chunk, name: str, at: np.ndarray, number: int) -> None:
        """Record that these values, which existed, are lost by event `number`."""
        chunk.lost.setdefault(name, np.zeros(chunk.capacity, "i4"))[at] = number
        self.counts[name] = self.counts.get(name, 0) + len(at)

    def forget(self, chunk: Chunk, name: str, at: np.ndarray) -> None:
        """Record that these values were published again, or that their rows were removed."""
        column = chunk.lost.get(name)
        count = 0 if column is None else int(np.count_nonzero(column[at]))
        if column is None or not count:
            return
        column[at] = 0
        self.counts[name] -= count
        if not self.counts[name]:
            del self.counts[name]
        if not self.counts:
            self.events.clear()

    def events_of(self, name: str, positions: np.ndarray) -> np.ndarray:
        """Return for each row the number of the event that lost its value of the field; 0 if the value is not lost."""
        out = np.zeros(len(positions), "i4")
        if name in self.counts:
            for _, chunk, at, where in self._rows.split(positions):
                if name in chunk.lost:
                    out[where] = chunk.lost[name][at]
        return out

    def lost_since(self, version: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the positions of rows that lost values after a version, ascending, and for each field which ones."""
        recent = [number for number, loss in self.events.items() if loss.version > version]
        parts = [np.zeros(0, "i8")]
        if recent:
            for key, chunk in self._rows.chunks.items():
                for column in chunk.lost.values():
                    parts.append(np.flatnonzero(np.isin(column[: chunk.size], recent)) + (key << CHUNK_BITS))
        positions = np.unique(np.concatenate(parts))
        fields = {name: np.isin(self.events_of(name, positions), recent) for name in sorted(self.counts)}
        return positions, {name: lost for name, lost in fields.items() if lost.any()}

    def describe(self, names: list[str], positions: np.ndarray) -> str:
        """Return the message that values of these fields were lost; "" if none was."""
        for name in names:
            numbers = self.events_of(name, positions)
            lost = np.flatnonzero(numbers)
            if len(lost):
                rows = self._rows.indexes_of(positions[lost])
                return (
                    f"field {name!r} of {len(lost)} samples was {self.events[int(numbers[lost[0]])].describe()}, among "
                    f"them global indexes {rows[:5].tolist()}; put the field again, or clear these samples"
                )
        return ""


def values_in_blocks(rows: RowTable, blocks: np.ndarray) -> Iterator[ValuesOfChunk]:
    """Iterate over the values of live rows that are in these blocks."""
    for key, chunk in rows.chunks.items():
        for name, columns in chunk.field.items():
            at = np.flatnonzero(np.isin(columns[0][: chunk.size], blocks))
            if len(at):
                yield ValuesOfChunk(key, chunk, name, columns, at)
