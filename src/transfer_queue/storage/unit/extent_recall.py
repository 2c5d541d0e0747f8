"""Which extents a unit takes back from writers that are in no put: what they have leased and do not use.

A writer offers its open extents while it is in no put there, and the unit takes them by the kernel's word
(`storage.arena.writer_locks`): what lies behind their blocks is free at once, and the controller is told that nothing
more comes into them. So a writer that is idle, or stopped between two puts, holds up no space; one that is stopped in
the middle of a put keeps all that it has there.

Where leases wait, all offers are taken, a few writers at a time. In each period of `storage.arena.free_space_reclaim`
those are taken that have not changed since the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from transfer_queue.messages.unit_reports import ExtentsRecalledReport
from transfer_queue.storage.arena.extent_table import LeasedExtent, round_up
from transfer_queue.storage.arena.writer_locks import Offer, WriterSlots
from transfer_queue.storage.unit.extent_pool import ExtentPool

INTERVAL = 0.25
"""Seconds between two rounds through all writers while leases wait."""
WRITERS = 128
"""Asked in one go: a millisecond or two."""


class Recalls:
    """Of one unit, whose number this is."""

    def __init__(self, number: int, room: ExtentPool, slots: WriterSlots) -> None:
        self._number = number
        self._room = room
        self._files = slots
        self._cut: dict[int, int] = {}
        """Extent -> its length, of all and only the leased extents that were recalled."""
        self._untold: list[int] = []
        self._round: deque[int] = deque()  # slots to be asked because leases wait
        self._at = 0.0  # when they are asked next
        self._look: deque[int] = deque()  # slots to be looked at because a period began
        self._seen: dict[int, set[Offer]] = {}  # slot -> what it offered when it was looked at last

    def due(self, short: bool) -> float:
        """When `some` has something to do; infinite where it has not. short: leases wait."""
        if self._look:
            return 0.0
        return self._at if short else float("inf")

    def look_at(self, slots: list[int]) -> None:
        """A period began: what these have not used since the last one is to be taken back."""
        self._look = deque(slots)
        self._seen = {slot: self._seen.get(slot, set()) for slot in slots}

    def some(self, short: bool, slots: Callable[[], list[int]], now: float) -> list[Offer]:
        """What is taken back now. slots: those that have extents."""
        found: list[Offer] = []
        for _ in range(min(WRITERS, len(self._look))):
            slot = self._look.popleft()
            before, self._seen[slot] = self._seen[slot], self._files.offers(slot)
            idle = before & self._seen[slot]
            if idle:
                found += self._of(slot, idle)
        if short and now >= self._at:
            self._round = self._round or deque(slots())
            found += self.of([self._round.popleft() for _ in range(min(WRITERS, len(self._round)))])
            self._at = now if self._round else now + INTERVAL
        return found

    def of(self, slots: Iterable[int]) -> list[Offer]:
        """All that these offer is taken back."""
        return [offer for slot in slots for offer in self._of(slot, None)]

    def _of(self, slot: int, among: set[Offer] | None) -> list[Offer]:
        """What is leased to this slot, was not recalled before, and is offered (among these)."""
        found = []
        for number, used in self._files.recall(slot, among):
            extent = self._room.table.get(number)
            if extent is not None and extent.slot == slot and number not in self._cut:
                found.append((number, used))
        return found

    def cut(self, extent: LeasedExtent, used: int) -> int:
        """Nothing more is written into this extent; how many bytes it keeps."""
        keep = min(round_up(used), extent.length)
        if keep < extent.length:
            self._room.cut(extent, keep)
        self._cut[extent.number] = keep
        self._untold.append(extent.number)
        return keep

    def forget(self, extent: int) -> None:
        """It is not leased any more."""
        self._cut.pop(extent, None)

    def told(self) -> list[ExtentsRecalledReport]:
        """What the controller must be told; asked for after every event."""
        fresh, self._untold = [number for number in self._untold if number in self._cut], []
        return [self._report(fresh)] if fresh else []

    def unsettled(self) -> list[ExtentsRecalledReport]:
        """What a controller with which the unit has registered must be told again."""
        self._untold = []
        return [self._report(list(self._cut))] if self._cut else []

    def _report(self, numbers: list[int]) -> ExtentsRecalledReport:
        lengths = [self._cut[number] for number in numbers]
        return ExtentsRecalledReport(
            self._number, np.array(numbers, "<i8").tobytes(), np.array(lengths, "<i8").tobytes()
        )
