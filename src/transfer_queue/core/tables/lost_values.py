"""Values that were lost with the storage that held them.

A lost value is one that its row does not have: nobody is dealt the row for it, a lookup of it fails. It is remembered
as lost, so that all who ask are told, until it is published again or its row ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from transfer_queue.core.columns.schema import Count, Persisted, map_of, map_of_values
from transfer_queue.core.tables.row_table import CHUNK_BITS, Chunk, RowTable

Found = tuple[int, Chunk, str, np.ndarray]  # chunk number, chunk, field, where in the chunk


class LossEvent(NamedTuple):
    """What took values with it. unit: the storage unit's number. when: in words, by the clock of who noticed it.

    version: of the partition.
    """

    unit: int
    when: str
    version: int

    def words(self) -> str:
        """How it is told."""
        return f"lost with storage unit {self.unit}" + (f" ({self.when})" if self.when else "")


class LostValues(Persisted):
    """Of one partition. events: what took values that are still lost, by number. counts: field -> lost values."""

    events: dict[int, LossEvent] = map_of_values(
        Count, tuple[Count, str, Count], tuple, lambda entry: LossEvent(*entry)
    )
    counts: dict[str, int] = map_of(str, Count)

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self._rows = rows

    def mark(self, chunk: Chunk, name: str, at: np.ndarray, number: int) -> None:
        """These values, which were there, are lost by event `number`."""
        chunk.lost.setdefault(name, np.zeros(chunk.capacity, "i4"))[at] = number
        self.counts[name] = self.counts.get(name, 0) + len(at)

    def forget(self, chunk: Chunk, name: str, at: np.ndarray) -> None:
        """These values were published anew, or their rows end."""
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

    def of(self, name: str, positions: np.ndarray) -> np.ndarray:
        """By which event the field's value of each row was lost; 0 where it was not."""
        out = np.zeros(len(positions), "i4")
        if name in self.counts:
            for _, chunk, at, where in self._rows.split(positions):
                if name in chunk.lost:
                    out[where] = chunk.lost[name][at]
        return out

    def since(self, version: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Positions of the rows that lost values after a version, ascending; for each field, which of them lost it."""
        recent = [number for number, loss in self.events.items() if loss.version > version]
        found = [np.zeros(0, "i8")]
        if recent:
            for key, chunk in self._rows.chunks.items():
                for column in chunk.lost.values():
                    found.append(np.flatnonzero(np.isin(column[: chunk.size], recent)) + (key << CHUNK_BITS))
        positions = np.unique(np.concatenate(found))
        fields = {name: np.isin(self.of(name, positions), recent) for name in sorted(self.counts)}
        return positions, {name: lost for name, lost in fields.items() if lost.any()}

    def words(self, names: list[str], positions: np.ndarray) -> str:
        """How it is told that values of these fields were lost; "" where none was."""
        for name in names:
            numbers = self.of(name, positions)
            lost = np.flatnonzero(numbers)
            if len(lost):
                rows = self._rows.indexes_of(positions[lost])
                return (
                    f"field {name!r} of {len(lost)} samples was {self.events[int(numbers[lost[0]])].words()}, among "
                    f"them global indexes {rows[:5].tolist()}; put it again, or clear them"
                )
        return ""


def holding(rows: RowTable, blocks: np.ndarray) -> Iterator[Found]:
    """Where live rows have values in these blocks."""
    for key, chunk in rows.chunks.items():
        for name, (column, _) in chunk.field.items():
            at = np.flatnonzero(np.isin(column[: chunk.size], blocks))
            if len(at):
                yield key, chunk, name, at
