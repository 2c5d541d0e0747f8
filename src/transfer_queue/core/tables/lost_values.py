"""Values that were lost with their storage.

A row does not have a value that was lost: it is not dealt for the field, and a lookup of the field fails. The value
is remembered as lost, so that every client that asks gets the reason, until it is published again or its row is
removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from transfer_queue.core.columns.schema import Count, Persisted, map_of, map_of_values
from transfer_queue.core.tables.row_table import CHUNK_BITS, Chunk, RowTable, ValueColumns

Found = tuple[int, Chunk, str, ValueColumns, np.ndarray]
"""The number of a chunk, the chunk, a field, its columns, and rows in the chunk."""


class LossEvent(NamedTuple):
    """The loss of a storage unit, or of extents of it, with which values were lost."""

    unit: int
    """The number of the storage unit."""
    when: str
    """The time as text, by the clock of the process that noticed the loss."""
    version: int
    """The version of the partition."""

    def describe(self) -> str:
        """Return the text for messages."""
        return f"lost with storage unit {self.unit}" + (f" ({self.when})" if self.when else "")


class LostValues(Persisted):
    """The lost values of one partition."""

    events: dict[int, LossEvent] = map_of_values(
        Count, tuple[Count, str, Count], tuple, lambda entry: LossEvent(*entry)
    )
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
        found = [np.zeros(0, "i8")]
        if recent:
            for key, chunk in self._rows.chunks.items():
                for column in chunk.lost.values():
                    found.append(np.flatnonzero(np.isin(column[: chunk.size], recent)) + (key << CHUNK_BITS))
        positions = np.unique(np.concatenate(found))
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


def values_in_blocks(rows: RowTable, blocks: np.ndarray) -> Iterator[Found]:
    """Iterate over the values of live rows that are in these blocks."""
    for key, chunk in rows.chunks.items():
        for name, columns in chunk.field.items():
            at = np.flatnonzero(np.isin(columns[0][: chunk.size], blocks))
            if len(at):
                yield key, chunk, name, columns, at
