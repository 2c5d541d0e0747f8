"""The ring of the newest timeline events, packed in memory that is allocated once."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from transfer_queue.timeline.events import EVENT, PACKING

DEFAULT_CAPACITY = 1 << 18

_SIZE = PACKING.size
_pack = PACKING.pack_into


class EventRing:
    """The newest events. An event has a position; positions ascend from 0 and are never reused.

    Args:
        capacity: The number of events that the ring keeps; 0: it keeps none. The operating system provides the memory
            page by page when events are written.
    """

    __slots__ = ("_column", "_memory", "capacity", "end")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.end = 0
        """The position behind all events."""
        column = np.empty(capacity * _SIZE, "u1")
        self._column = column.view(EVENT)
        self._memory = column.data

    @property
    def first(self) -> int:
        """The position of the oldest event that the ring has."""
        return max(0, self.end - self.capacity)

    def append(
        self,
        time: float,
        since: float,
        kind: int,
        flags: int,
        lane: int,
        partition: int,
        fields: int,
        rows: int,
        nbytes: int = 0,
        block: int = 0,
        age: float = -1.0,
        staleness: int = -1,
    ) -> None:
        """Write an event over the oldest one. For the arguments see `timeline.events.EVENT`."""
        end = self.end
        _pack(
            self._memory, end % self.capacity * _SIZE,
            time, since, kind, flags, 0, lane, partition, fields, rows, 0, nbytes, block, age, staleness,
        )  # fmt: skip
        self.end = end + 1

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
        some = self._memory[start * _SIZE : (start + count) * _SIZE]
        rest = start + count - self.capacity
        return bytes(some) if rest <= 0 else b"".join((some, self._memory[: rest * _SIZE]))
