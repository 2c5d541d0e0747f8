"""The ring of the newest timeline events, packed in memory that is allocated once."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from transfer_queue.timeline.events import EVENT, NO_FIELDS, PACKING

DEFAULT_CAPACITY = 1 << 18

SIZE = PACKING.size
"""The bytes of an event."""

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
        self._column = column.view(EVENT)
        self.memory = column.data
        """The bytes of the events. An event is written at its position modulo `capacity`."""

    @property
    def first(self) -> int:
        """The position of the oldest event that the ring has."""
        return max(0, self.end - self.capacity)

    def append(self, time: float, since: float, kind: int, flags: int, lane: int, partition: int, rows: int) -> None:
        """Write an event without fields over the oldest one. See `timeline.events.EVENT`."""
        PACKING.pack_into(
            self.memory, self.end % self.capacity * SIZE,
            time, since, kind, flags, 0, lane, partition, NO_FIELDS, rows, 0, 0, 0, -1.0, -1,
        )  # fmt: skip
        self.end += 1

    def numbers_in(self, column: str) -> set[int]:
        """Return the distinct numbers in a column of all events."""
        numbers = self._column[column][: self.end]
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
        times = self._column["time"]
        found = range(self.first, self.end)
        return self.first + bisect_left(found, time, key=lambda position: times[position % self.capacity])

    def read(self, position: int, count: int) -> bytes:
        """Return the events from a position on, at most `count`. The ring must have the first of them."""
        count = min(count, self.end - position)
        if count <= 0:
            return b""
        start = position % self.capacity
        some = self.memory[start * SIZE : (start + count) * SIZE]
        rest = start + count - self.capacity
        return bytes(some) if rest <= 0 else b"".join((some, self.memory[: rest * SIZE]))
