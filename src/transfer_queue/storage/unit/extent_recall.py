"""Recalls unused parts of extents from writers that are not in a put.

A writer offers its open extents while it is in no put, and locks of the kernel show the unit that this is so
(`storage.arena.writer_locks`). The part behind the blocks is then free at once, and the unit reports to the controller
that no block will be added to the extent. So a writer that is idle, or stopped between two puts, does not block any
space; a writer that is stopped during a put keeps its whole extent.

If leases are waiting, all offers are taken, from a few writers at a time. Otherwise, in each period of
`storage.arena.free_space_reclaim`, those offers are taken that have not changed since the last period.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from transfer_queue.messages.reports.unit_reports import ExtentsRecalledReport
from transfer_queue.storage.arena.extent_table import LeasedExtent, round_up
from transfer_queue.storage.arena.writer_locks import Offer, WriterSlots
from transfer_queue.storage.unit.extent_pool import ExtentPool

INTERVAL = 0.25
"""Seconds between two rounds through all writers while leases are waiting."""
WRITERS = 128
"""Writers asked in one turn, which takes a millisecond or two."""


class Recalls:
    """The recalls of the unit with this number."""

    def __init__(self, number: int, pool: ExtentPool, slots: WriterSlots) -> None:
        self._number = number
        self._pool = pool
        self._files = slots
        self._cut: dict[int, int] = {}
        """Extent -> its length, for exactly the leased extents that were recalled."""
        self._unreported: list[int] = []
        """Recalled extents that are not reported yet."""
        self._round: deque[int] = deque()
        """Slots to be asked because leases are waiting."""
        self._at = 0.0
        """When they are asked next."""
        self._look: deque[int] = deque()
        """Slots to be checked because a period began."""
        self._seen: dict[int, set[Offer]] = {}
        """Slot -> what it offered at the last check."""

    def next_deadline(self, short: bool) -> float:
        """Return when `recall_some` must be called next; infinity if it need not be. `short`: leases are waiting."""
        if self._look:
            return 0.0
        return self._at if short else float("inf")

    def begin_period(self, slots: list[int]) -> None:
        """Begin a period: recall what these slots have not used since the last one."""
        self._look = deque(slots)
        self._seen = {slot: self._seen.get(slot, set()) for slot in slots}

    def recall_some(self, short: bool, slots: Callable[[], list[int]], now: float) -> list[Offer]:
        """Recall now. `slots` returns the slots that have extents."""
        offers: list[Offer] = []
        for _ in range(min(WRITERS, len(self._look))):
            slot = self._look.popleft()
            before, self._seen[slot] = self._seen[slot], self._files.offers(slot)
            idle = before & self._seen[slot]
            if idle:
                offers += self._recall_slot(slot, idle)
        if short and now >= self._at:
            self._round = self._round or deque(slots())
            offers += self.recall_all([self._round.popleft() for _ in range(min(WRITERS, len(self._round)))])
            self._at = now if self._round else now + INTERVAL
        return offers

    def recall_all(self, slots: Iterable[int]) -> list[Offer]:
        """Recall everything that these slots offer."""
        return [offer for slot in slots for offer in self._recall_slot(slot, None)]

    def _recall_slot(self, slot: int, among: set[Offer] | None) -> list[Offer]:
        """Recall what is leased to this slot, offered (in `among`, unless it is None), and was not recalled before."""
        recalled = []
        offers = self._files.recall(slot, among)
        if offers and self._files.is_dead(slot):
            # it may have died in a put that had taken the offer, and whose block may be published; an offer of a writer
            # that lives after the recall was not taken
            return []
        for number, used in offers:
            extent = self._pool.table.get(number)
            if extent is not None and extent.slot == slot and number not in self._cut:
                recalled.append((number, used))
        return recalled

    def cut(self, extent: LeasedExtent, used: int) -> int:
        """Record that nothing more is written into this extent. Returns the bytes that it keeps."""
        keep = min(round_up(used), extent.length)
        if keep < extent.length:
            self._pool.cut(extent, keep)
        self._cut[extent.number] = keep
        self._unreported.append(extent.number)
        return keep

    def forget(self, extent: int) -> None:
        """Forget an extent that is not leased any more."""
        self._cut.pop(extent, None)

    def take_reports(self) -> list[ExtentsRecalledReport]:
        """Return new reports for the controller. Call it after every event."""
        fresh, self._unreported = [number for number in self._unreported if number in self._cut], []
        return [self._report(fresh)] if fresh else []

    def repeat_reports(self) -> list[ExtentsRecalledReport]:
        """Return the reports that a controller needs after the unit has registered with it."""
        self._unreported = []
        return [self._report(list(self._cut))] if self._cut else []

    def _report(self, numbers: list[int]) -> ExtentsRecalledReport:
        lengths = [self._cut[number] for number in numbers]
        return ExtentsRecalledReport(
            self._number, np.array(numbers, "<i8").tobytes(), np.array(lengths, "<i8").tobytes()
        )
