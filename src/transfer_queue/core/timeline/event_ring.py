"""The ring of the newest timeline events, packed in memory that is allocated once."""

from __future__ import annotations

import struct
from bisect import bisect_left

import numpy as np

from transfer_queue.timeline.events import EVENT, NO_FIELDS

PACKING = struct.Struct("<ddBBHIIIIIQQfiqqq")
"""How an event and its rows are packed together."""
SIZE = PACKING.size
"""The bytes of both."""
_ENTRY = np.dtype([("event", EVENT), ("first", "<i8"), ("last", "<i8"), ("before", "<i8")])
"""The event, and which rows it is about: see `EventRing.rows_of`."""

assert _ENTRY.itemsize == SIZE

_WIDE = 1 << 22


class EventRing:
    """The newest events. An event has a position; positions ascend from 0 and are never reused.

    Args:
        capacity: The number of events that the ring keeps; 0: it keeps none. The operating system provides the memory
            page by page when events are written.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.end = 0
        """The position behind all events."""
        column = np.empty(capacity * SIZE, "u1")
        self._entries = column.view(_ENTRY)
        self.memory = column.data
        """The bytes of the entries. An event is written at its position modulo `capacity`."""

    @property
    def first(self) -> int:
        """The position of the oldest event that the ring has."""
        return max(0, self.end - self.capacity)

    def append(
        self, time: float, since: float, kind: int, flags: int, lane: int, partition: int, rows: int,
        first: int = 1, last: int = 0, before: int = 0,
    ) -> None:  # fmt: skip
        """Write an event without fields over the oldest one. See `timeline.events.EVENT` and `rows_of`."""
        PACKING.pack_into(
            self.memory, self.end % self.capacity * SIZE,
            time, since, kind, flags, 0, lane, partition, NO_FIELDS, rows, 0, 0, 0, -1.0, -1, first, last, before,
        )  # fmt: skip
        self.end += 1

    def rows_of(self, position: int, count: int = 1) -> np.ndarray:
        """Return which rows events are about, from a position on, up to the end of the array at most.

        The columns "first" and "last" have the first and the last global index of an event with a range of rows,
        otherwise 1 and 0. "before" has the number of global indexes that were listed before those of the event.
        """
        start = position % self.capacity
        return self._entries[start : start + count]

    def numbers_in(self, column: str) -> set[int]:
        """Return the distinct numbers in a column of all events."""
        numbers = self._entries["event"][column][: self.end]
        if not len(numbers):
            return set()
        low, high = int(numbers.min()), int(numbers.max())
        if high - low > _WIDE:
            return set(np.unique(numbers).tolist())  # this takes ten times as long
        found = np.zeros(high - low + 1, bool)
        found[numbers - low] = True
        return set((np.flatnonzero(found) + low).tolist())

    def position_at(self, time: float) -> int:
        """Return the position of the first event at or after this time."""
        times = self._entries["event"]["time"]
        found = range(self.first, self.end)
        return self.first + bisect_left(found, time, key=lambda position: times[position % self.capacity])

    def read(self, position: int, count: int) -> bytes:
        """Return the events from a position on, at most `count`. The ring must have the first of them."""
        count = min(count, self.end - position)
        if count <= 0:
            return b""
        start = position % self.capacity
        some = self._entries["event"][start : start + count].tobytes()
        rest = start + count - self.capacity
        return some if rest <= 0 else some + self._entries["event"][:rest].tobytes()
