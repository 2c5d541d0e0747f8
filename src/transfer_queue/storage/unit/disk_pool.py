"""The extent pool of an arena on disk: values that a unit writes there do not stay in memory.

Values on disk must not take memory as well until they are read. After a write the unit calls `Arena.drop_pages` at
once, so that the kernel starts to write the pages. It calls it again when that should be done, so that the kernel
drops the pages, and once more in case the disk was slow. Pages of readers are not touched: the kernel drops them if it
needs memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from transfer_queue.messages.reports.unit_reports import Move
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.block_copier import BlockCopier
from transfer_queue.storage.arena.extent_table import LeasedExtent
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.wire.buffers.copies import U8

PAUSES = (1.0, 5.0)
"""Seconds between the calls."""
A_TURN = 64


class DiskPool(ArenaPool):
    """The extent pool of an arena on disk. It differs from one in memory only in this."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._fresh: list[LeasedExtent] = []
        self._rounds: list[deque[tuple[float, LeasedExtent]]] = [deque() for _ in PAUSES]
        """For each pause, the written extents with the time of their next call."""

    def begin_move(
        self,
        unit: int,
        order: Move,
        lease: Callable[[int], LeasedExtent | None],
        brought: Mapping[int, U8] | None = None,
    ) -> BlockCopier:
        """See `ExtentPool.begin_move`."""
        return BlockCopier(unit, self.arena, order, lease, brought, self._note_written)

    def _note_written(self, extent: LeasedExtent) -> None:
        self.arena.drop_pages(extent.offset, extent.length)
        self._fresh.append(extent)

    def next_deadline(self) -> float | None:
        """See `ExtentPool.next_deadline`."""
        if self._fresh:
            return 0.0
        times = [round_[0][0] for round_ in self._rounds if round_]
        trims = super().next_deadline()
        return min(times if trims is None else [*times, trims], default=None)

    def begin_period(self, now: float) -> bool:
        """See `ExtentPool.begin_period`. Lets go of the pages that are due."""
        self._rounds[0].extend((now + PAUSES[0], extent) for extent in self._fresh)
        self._fresh.clear()
        for number, round_ in enumerate(self._rounds):
            for _ in range(A_TURN):
                if not round_ or round_[0][0] > now:
                    break
                _, extent = round_.popleft()
                self.arena.drop_pages(extent.offset, extent.length)
                if number + 1 < len(PAUSES):
                    self._rounds[number + 1].append((now + PAUSES[number + 1], extent))
        return super().begin_period(now)
