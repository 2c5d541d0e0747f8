"""Decides which free space of an arena is kept, and which is returned to the file system.

Each returned page costs its next user a first touch (2.7 us for 4 KiB), so the space that a steady workload reuses must
be kept: space is returned only after it was free and unused for one whole period, and RESERVE bytes of free space are
always kept. These are the ones with the lowest addresses, which are leased first. The rest is returned from the highest
address down, in steps, while the unit has nothing else to do.
"""

from __future__ import annotations

import math

import numpy as np

from transfer_queue.storage.arena.arena import Arena, stretches
from transfer_queue.storage.arena.extent_table import GRANULE, ExtentTable, LeasedExtent

PERIOD = 30.0
"""Seconds. Freed space is kept for at least one to two periods."""
RESERVE = 48 * 1024 * 1024
"""Bytes of free space that are always kept."""
LITTLE = 16 * 1024 * 1024
"""With fewer leased bytes than this, a period does not ask writers to return unused space."""
STEP = 4 * 1024 * 1024
"""Bytes returned at once, which takes about a millisecond."""

_FRESH, _LEASED = 0, 1  # marks of granules; a mark of 2 or more is the period in which the granule was seen to be free


class FreeSpaceReclaimer:
    """Reclaims free space of one unit's arena. All space is leased through it, and freed space is reported to it."""

    def __init__(self, arena: Arena, table: ExtentTable) -> None:
        self._arena = arena
        self._table = table
        self._marks = np.zeros(arena.capacity // GRANULE, "u4")
        self._period = 2
        self._next = -math.inf
        """When the next period begins."""
        self._surplus: list[int] = []
        """The granules to be returned, ascending, as chosen at the beginning of the period."""
        for extent in table.leased_extents():
            self._lease(extent)

    @property
    def resident(self) -> int:
        """Bytes of free space that are not holes."""
        return self._table.free_bytes - self._arena.hole_bytes

    def lease(self, slot: int, nbytes: int, sequence: int) -> LeasedExtent | None:
        """Lease free space, see `ExtentTable.lease`. It takes holes only if there is no other space."""
        extent = self._table.lease(slot, nbytes, sequence)
        if extent is not None and self._arena.hole_bytes and self._has_holes(extent):
            self._table.free(extent.number)
            extent = self._table.lease(slot, nbytes, sequence, self._arena.holes)
            extent = extent or self._table.lease(slot, nbytes, sequence)
        if extent is None:
            return None
        if not self._arena.fill(extent.offset, extent.length):
            self._table.free(extent.number)
            return None
        self._lease(extent)
        return extent

    def _has_holes(self, extent: LeasedExtent) -> bool:
        first = extent.offset // GRANULE
        return bool(self._arena.holes[first : first + extent.length // GRANULE].any())

    def _lease(self, extent: LeasedExtent) -> None:
        self._marks[extent.offset // GRANULE : (extent.offset + extent.length) // GRANULE] = _LEASED

    def note_freed(self, offset: int, length: int) -> None:
        """Note that this space is free, and was used until now."""
        self._marks[offset // GRANULE : (offset + length) // GRANULE] = _FRESH

    def next_deadline(self) -> float | None:
        """Return when `begin_period` must be called next; None if it need not be called."""
        return self._next if self.resident > RESERVE or self._table.leased > LITTLE else None

    def begin_period(self, now: float) -> bool:
        """Begin a period if the last one has ended. Returns whether it did, and writers have more than LITTLE."""
        if now < self._next:
            return False
        self._next = now + PERIOD
        self._period += 1
        marks = self._marks[: self._table.held // GRANULE]
        marks[marks == _FRESH] = self._period
        old = np.flatnonzero((marks > _LEASED) & (marks < self._period - 1) & ~self._arena.holes[: len(marks)])
        surplus = (self.resident - RESERVE) // GRANULE
        self._surplus = old[-surplus:].tolist() if surplus > 0 else []
        return self._table.leased > LITTLE

    def trim_some(self) -> bool:
        """Return a step of the surplus. Returns whether there is more. Call it when the unit is idle."""
        if not self._surplus:
            return False
        self._surplus, some = self._surplus[: -STEP // GRANULE], self._surplus[-STEP // GRANULE :]
        marks = self._marks[some]
        unused = np.array(some)[(marks > _LEASED) & (marks < self._period - 1)]  # without what was leased meanwhile
        holds = self._arena.holds
        for first, end in stretches(unused):
            if holds is not None and holds.is_registered(first * GRANULE, (end - first) * GRANULE):
                continue
            if not self._arena.punch(first * GRANULE, (end - first) * GRANULE):
                self._surplus = []
        return bool(self._surplus)

    def fill_some(self, wanted: int) -> bool:
        """Fill a step of the lowest holes if fewer free bytes than this are resident. Returns whether it did."""
        if not self._arena.hole_bytes or self.resident >= wanted:
            return False
        holes = np.flatnonzero(self._arena.holes[: self._table.held // GRANULE])[: STEP // GRANULE]
        for first, end in stretches(holes):
            if not self._arena.warm_up(first * GRANULE, (end - first) * GRANULE):
                return False
        self._marks[holes] = _FRESH
        return True
