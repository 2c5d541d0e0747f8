"""Which free space of an arena stays with it, and which is given back to the file system.

A page that is given back costs its next user a first touch (2.7 us for 4 KiB), so what a steady workload uses in turn
must stay: nothing is given back before it was free, untouched, through one whole period, and RESERVE bytes of free
space stay anyhow, those of the lowest addresses, which are leased first. What remains is given back from the highest
address down, a step at a time, while the unit has nothing else to do.
"""

from __future__ import annotations

import math

import numpy as np

from transfer_queue.storage.arena.arena import Arena, stretches
from transfer_queue.storage.arena.extent_table import GRANULE, ExtentTable, LeasedExtent

PERIOD = 30.0
"""Seconds. What was freed stays for one to two of them at least."""
RESERVE = 48 * 1024 * 1024
"""Bytes of free space that stay."""
LITTLE = 16 * 1024 * 1024
"""Leased bytes of which it does not matter who uses them."""
STEP = 4 * 1024 * 1024
"""Bytes given back at once: about a millisecond."""

_FRESH, _LEASED = 0, 1  # marks of granules; from 2 on: the period in which one was seen to be free


class FreeSpaceReclaimer:
    """Of one unit's arena and table; all space is leased through it, and it is told of what is freed."""

    def __init__(self, arena: Arena, table: ExtentTable) -> None:
        self._arena = arena
        self._table = table
        self._marks = np.zeros(arena.capacity // GRANULE, "u4")
        self._period = 2
        self._next = -math.inf  # when the next period begins
        self._surplus: list[int] = []  # granules to be given back, ascending, as chosen when the period began
        for extent in table.leased_extents():
            self._lease(extent)

    @property
    def resident(self) -> int:
        """Bytes of free space that the arena has of its file system."""
        return self._table.free_bytes - self._arena.hole_bytes

    def lease(self, slot: int, nbytes: int, sequence: int) -> LeasedExtent | None:
        """Leases free space, see `ExtentTable.lease`; such that was given back only where there is no other."""
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

    def freed(self, offset: int, length: int) -> None:
        """It is free, but was used until now."""
        self._marks[offset // GRANULE : (offset + length) // GRANULE] = _FRESH

    def due(self) -> float | None:
        """When `turn` has something to do."""
        return self._next if self.resident > RESERVE or self._table.leased > LITTLE else None

    def turn(self, now: float) -> bool:
        """Begins a period if the last one is over; whether it did, and writers have more than a little."""
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
        """Gives a step of the surplus back; whether there is more. Call it when there is nothing to do."""
        if not self._surplus:
            return False
        self._surplus, some = self._surplus[: -STEP // GRANULE], self._surplus[-STEP // GRANULE :]
        marks = self._marks[some]
        unused = np.array(some)[(marks > _LEASED) & (marks < self._period - 1)]  # what was leased meanwhile is not
        for first, end in stretches(unused):
            if not self._arena.punch(first * GRANULE, (end - first) * GRANULE):
                self._surplus = []
        return bool(self._surplus)

    def fill_some(self, wanted: int) -> bool:
        """Fills a step of the lowest holes while less free space than this is resident; whether there is more."""
        if not self._arena.hole_bytes or self.resident >= wanted:
            return False
        holes = np.flatnonzero(self._arena.holes[: self._table.held // GRANULE])[: STEP // GRANULE]
        for first, end in stretches(holes):
            if not self._arena.warm_up(first * GRANULE, (end - first) * GRANULE):
                return False
        self._marks[holes] = _FRESH
        return True
