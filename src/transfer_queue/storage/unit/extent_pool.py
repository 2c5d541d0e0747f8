"""The pools from which a storage unit leases its extents, and their record of what is leased.

`ArenaPool` is an arena of this machine: extents are places in it, found first fit. `DiskPool` is one on disk,
`MirrorPool` has copies of the blocks in memory, and `RetiredPool` is the mirror of an earlier term, which is only read.
`storage.unit.object_pool` is a pool in an external store, whose extents are names.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from transfer_queue.errors import AttachError, CapacityError
from transfer_queue.messages.descriptors import MIRROR
from transfer_queue.messages.reports.unit_reports import BlockMissing, BlocksMovedReport, Move
from transfer_queue.messages.storage import ReadHold, ReadPieces, UnitStatusReply, WriteBytes
from transfer_queue.storage.arena.arena import SEGMENT, Arena
from transfer_queue.storage.arena.block_copier import BlockCopier, Brought, Lease
from transfer_queue.storage.arena.extent_table import GRANULE, ExtentTable, LeasedExtent, LeasedExtents, round_up
from transfer_queue.storage.arena.free_space_reclaim import FreeSpaceReclaimer
from transfer_queue.storage.arena.remote_access import read_pieces, write_bytes
from transfer_queue.storage.unit.unit_effects import Begin, Effect

PREFAULT_STEP = 4 * 1024 * 1024
"""Bytes made resident in one idle moment: a few milliseconds."""


class BlockCopy(Protocol):
    """A move in progress, see `block_copier.BlockCopier`."""

    extent: LeasedExtent | None

    def step(self) -> BlocksMovedReport | None:
        """Do a step. Returns the report when all is done."""

    def close(self) -> None:
        """Release what the move uses."""


Looked = Callable[[list[int], str, str], list[Effect]]
"""Gets the extents that are gone, the time as text, and why it is not known of the others; "" if it is known."""


class ExtentPool(Protocol):
    """Leases extents, and records what is leased."""

    capacity: int
    """The largest total length of all extents in bytes."""

    table: LeasedExtents
    """The leased extents."""
    folder: Path
    """The folder of the record."""
    boot_id: str
    """Identifies this pool."""

    @property
    def next_extent(self) -> int:
        """The first number that no extent has had."""

    def take_slot(self) -> int:
        """Return the number of a new slot, which is never used again."""

    def lease(self, slot: int, nbytes: int, sequence: int) -> LeasedExtent | None:
        """Return a new extent, which is recorded before this returns; None if there is no space for it."""

    def generation(self, offset: int) -> int:
        """Return the current generation of the space at this offset."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes themselves, to write into them."""

    def free(self, extent: LeasedExtent) -> bool:
        """Free a leased extent, whose content no reader finds from now on.

        Returns False if readers have views of it: it stays leased until `free_unheld` frees it.
        """

    def free_unheld(self) -> list[LeasedExtent]:
        """Free and return the extents that were to be freed, and of which no reader has a view any more."""
        return []

    def cut(self, extent: LeasedExtent, keep: int) -> None:
        """Free the part of a leased extent behind its first `keep` bytes."""

    def space_for(self, nbytes: int) -> int:
        """Return the space that an extent of this size takes.

        If a lease of some space has failed, leases that take as much or more fail, too.
        """

    def attach(
        self,
        serve: Callable[[], list[Effect]],
        lost: Callable[[list[int]], list[Effect]],
        changed: Callable[[], object],
    ) -> None:
        """Set the functions to call.

        Args:
            serve: Called when space was freed.
            lost: Called with extents that may be gone.
            changed: Called when any extent may be gone.

        By default none is called.
        """
        return

    def check_content(self, numbers: list[int], then: Looked, report: BlockMissing | None = None) -> list[Effect]:
        """Check whether the content of these extents still exists.

        Args:
            numbers: The extents.
            then: Called at once or later. Its effects are carried out in both cases.
            report: The report of a reader that misses the content. Default: None, there is no such reader.

        By default the content always exists, as in an arena.
        """
        return then([], "", "")

    def read(self, request: ReadPieces) -> list[memoryview] | None:
        """Read for a reader on another node, see `remote_access.read_pieces`."""

    def write(self, extent: LeasedExtent | None, request: WriteBytes, payload: memoryview | None) -> None:
        """Write for a writer on another node, see `remote_access.write_bytes`."""

    def begin_move(self, unit: int, order: Move, lease: Lease, brought: Brought = None) -> BlockCopy:
        """Begin a move, see `block_copier.BlockCopier`."""

    def settle(self, then: Callable[[str], list[Effect]]) -> list[Effect]:
        """Make sure that what was copied survives what this pool is to survive; then call `then`, at once or later.

        `then` gets the reason if this is not possible, else "". Its effects are carried out in both cases. By default
        what was copied survives every process that uses it.
        """
        return then("")

    def status(self) -> UnitStatusReply:
        """Return the bytes that are held, leased and free."""

    def read_holds(self) -> list[ReadHold]:
        """Return the clients that have views."""
        return []

    def next_deadline(self) -> float | None:
        """Return when `begin_period` must be called next; None if it need not be called."""

    def begin_period(self, now: float) -> bool:
        """Do periodic work. Returns whether to recall extents that writers have not used for the last period."""

    def work_ahead(self, short: bool) -> bool:
        """Do a few milliseconds of work in advance. Returns whether there is more. `short`: leases are waiting."""
        return False

    def check(self) -> None:
        """Recount everything. Raises AssertionError if the pool contradicts itself."""


class ArenaPool(ExtentPool):
    """The extent pool of an arena that this process owns."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.capacity, self.folder, self.boot_id = arena.capacity, arena.folder, arena.boot_id
        leased = arena.extents.read(arena.folder, arena.boot_id)
        self.table: ExtentTable = ExtentTable.from_extents(arena.held, leased, arena.extents.next_extent)
        self.trimmer = FreeSpaceReclaimer(arena, self.table)
        self._viewed: dict[int, LeasedExtent] = {}
        """Number -> extent, for the leased extents that are freed when no reader has a view of them any more."""

    @property
    def next_extent(self) -> int:
        """See `ExtentPool.next_extent`."""
        return self.arena.extents.next_extent

    def take_slot(self) -> int:
        """See `ExtentPool.take_slot`."""
        return self.arena.extents.take_slot()

    def lease(self, slot: int, nbytes: int, sequence: int) -> LeasedExtent | None:
        """See `ExtentPool.lease`. Takes held space first; then the arena grows."""
        extent = self.trimmer.lease(slot, nbytes, sequence)
        more = round_up(nbytes) - self.table.tail
        if extent is None and more > 0 and self.grow(more):  # else there is free space that could not be filled
            extent = self.trimmer.lease(slot, nbytes, sequence)
        if extent is not None:
            self.arena.set_generation(extent.offset, extent.length)
            self.arena.extents.lease(extent)
        return extent

    def grow(self, least: int) -> bool:
        """Grow the arena by at least this many bytes. Returns whether that was possible."""
        try:
            grown = self.arena.grow(least)
        except CapacityError:
            return False
        self.table.grow(grown // GRANULE)
        return True

    def generation(self, offset: int) -> int:
        """See `ExtentPool.generation`."""
        return self.arena.generation(offset)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """See `ExtentPool.view`."""
        return self.arena.view(offset, nbytes).data

    def free(self, extent: LeasedExtent) -> bool:
        """See `ExtentPool.free`. Generations change first: readers must notice before another writer writes there.

        Readers also notice before this looks for their views (`storage.arena.read_holds`).
        """
        if extent.number not in self._viewed:
            self.arena.bump(extent.offset, extent.length)
        if self._is_viewed(extent):
            self._viewed[extent.number] = extent
            return False
        self._free_now(extent)
        return True

    def free_unheld(self) -> list[LeasedExtent]:
        """See `ExtentPool.free_unheld`."""
        unheld = [extent for extent in self._viewed.values() if not self._is_viewed(extent)]
        for extent in unheld:
            self._free_now(extent)
        return unheld

    def _is_viewed(self, extent: LeasedExtent) -> bool:
        holds = self.arena.holds
        return holds is not None and holds.is_held(extent.offset, extent.length)

    def _free_now(self, extent: LeasedExtent) -> None:
        self._viewed.pop(extent.number, None)
        self.arena.extents.free(extent)
        self.table.free(extent.number)
        self.trimmer.note_freed(extent.offset, extent.length)

    def cut(self, extent: LeasedExtent, keep: int) -> None:
        """See `ExtentPool.cut`. Generations change first."""
        self.arena.bump(extent.offset + keep, extent.length - keep)
        self.arena.extents.cut(extent, keep)
        self.table.cut(extent.number, keep)
        self.trimmer.note_freed(extent.offset + keep, extent.length - keep)

    def space_for(self, nbytes: int) -> int:
        """See `ExtentPool.space_for`."""
        return round_up(nbytes)

    def read(self, request: ReadPieces) -> list[memoryview] | None:
        """See `ExtentPool.read`."""
        return read_pieces(self.arena, request)

    def write(self, extent: LeasedExtent | None, request: WriteBytes, payload: memoryview | None) -> None:
        """See `ExtentPool.write`."""
        write_bytes(self.arena, extent, request, payload)

    def begin_move(self, unit: int, order: Move, lease: Lease, brought: Brought = None) -> BlockCopier:
        """See `ExtentPool.begin_move`."""
        return BlockCopier(unit, self.arena, order, lease, brought, self._note_written)

    def _note_written(self, extent: LeasedExtent) -> None:
        """Note that a move has filled an extent."""

    def status(self) -> UnitStatusReply:
        """See `ExtentPool.status`."""
        table, holes = self.table, self.arena.hole_bytes
        free, tier = table.free_bytes - holes, self.arena.tier
        viewed = sum(extent.length for extent in self._viewed.values())
        return UnitStatusReply(self.capacity, table.held - holes, table.leased, free, tier, table.largest_free, viewed)

    def read_holds(self) -> list[ReadHold]:
        """See `ExtentPool.read_holds`."""
        return [] if self.arena.holds is None else self.arena.holds.holders()

    def next_deadline(self) -> float | None:
        """See `ExtentPool.next_deadline`."""
        return self.trimmer.next_deadline()

    def begin_period(self, now: float) -> bool:
        """See `ExtentPool.begin_period`."""
        return self.trimmer.begin_period(now)

    def work_ahead(self, short: bool) -> bool:
        """See `ExtentPool.work_ahead`."""
        if self.arena.prefault_some(PREFAULT_STEP) or self.trimmer.trim_some():
            return True
        if short or self.trimmer.resident >= SEGMENT // 2:
            return False
        more = self.capacity - self.arena.held
        return self.trimmer.fill_some(SEGMENT // 2) or (bool(more) and self.grow(min(SEGMENT // 4, more)))

    def check(self) -> None:
        """See `ExtentPool.check`."""
        table, arena = self.table, self.arena
        table.check()
        leased = arena.extents.read(arena.folder, arena.boot_id)
        assert leased == table.leased_extents(), "the file of extents"
        assert all(table.get(number) == extent for number, extent in self._viewed.items()), "viewed extents"
        assert table.held == arena.held, "held bytes of table and arena"
        assert arena.hole_bytes == np.count_nonzero(arena.holes) * GRANULE, "bytes of holes"
        for extent in leased:
            granules = slice(extent.offset // GRANULE, (extent.offset + extent.length) // GRANULE)
            assert not arena.holes[granules].any(), f"{extent} was returned to the file system"


# ---------------------------------------------------------------- arenas on disk
# Values on disk must not take memory as well until they are read. After a write the unit calls `Arena.drop_pages` at
# once, so that the kernel starts to write the pages. It calls it again when that should be done, so that the kernel
# drops the pages, and once more in case the disk was slow. Pages of readers are not touched: the kernel drops them if
# it needs memory.


DROP_PAUSES = (1.0, 5.0)
"""Seconds between the calls of `Arena.drop_pages` for one extent."""
DROPS_A_TURN = 64
"""The most calls for each pause in one turn of the unit."""


class DiskPool(ArenaPool):
    """The extent pool of an arena on disk, which lets go of the pages of what it has written."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._fresh: list[LeasedExtent] = []
        self._rounds: list[deque[tuple[float, LeasedExtent]]] = [deque() for _ in DROP_PAUSES]
        """For each pause, the written extents with the time of their next call."""

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
        self._rounds[0].extend((now + DROP_PAUSES[0], extent) for extent in self._fresh)
        self._fresh.clear()
        for number, round_ in enumerate(self._rounds):
            for _ in range(DROPS_A_TURN):
                if not round_ or round_[0][0] > now:
                    break
                _, extent = round_.popleft()
                self.arena.drop_pages(extent.offset, extent.length)
                if number + 1 < len(DROP_PAUSES):
                    self._rounds[number + 1].append((now + DROP_PAUSES[number + 1], extent))
        return super().begin_period(now)


# ---------------------------------------------------------------- mirrors
# What a move has copied is reported only when the disk has it. The unit waits for the disk in another thread, so it
# serves readers meanwhile. One order has the blocks of many puts (`core.units.mirror_writer`), so that many puts need
# one `fsync`.


MAX_SPARED = 256 << 20
MIN_SPARED = 12 << 20  # while the journal begins a new file, it has reserved space in two


class MirrorPool(DiskPool):
    """The extent pool of an arena on disk that survives the failure of the machine.

    It leaves a tenth of its file system free, from MIN_SPARED to MAX_SPARED bytes. If the disk is full, the journal
    there can still be written, so that samples can be cleared and the mirror gets space again.
    """

    def __init__(self, arena: Arena, begin: Begin) -> None:
        super().__init__(arena)
        disk = os.statvfs(arena.folder)
        arena.spared = min(MAX_SPARED, max(MIN_SPARED, disk.f_blocks * disk.f_frsize // 10))
        self._begin = begin

    def settle(self, then: Callable[[str], list[Effect]]) -> list[Effect]:
        """See `ExtentPool.settle`. Waits until the disk has what was copied."""

        def done(outcome: Any) -> list[Effect]:
            failed = isinstance(outcome, Exception)
            return then(f"the disk cannot write: {outcome}" if failed else "")

        self._begin(self.arena.sync, done)
        return []


# ---------------------------------------------------------------- mirrors of earlier terms
# The unit of the earlier term may only be frozen or cut off, and may continue at any moment with what it was doing:
# copy blocks into space that it has leased, or free extents. So this pool changes nothing in the files of the arena,
# and no space of it is used again. What the former unit still does concerns only extents that no journal names, and
# extents that no row needs. The arena is removed as a whole when no block in it is needed any more.


REOPEN_ATTEMPTS = 5
REOPEN_PAUSE = 0.05  # seconds between two attempts to read the table of extents


class RetiredPool(ArenaPool):
    """The extent pool of an arena that is only read. What is freed is forgotten in this process."""

    @classmethod
    def open(cls, folder: Path) -> RetiredPool:
        """Open the arena in a folder. Raises AttachError, with the reason, if this is not possible."""
        attempt = 1
        while True:
            try:
                return cls(Arena.reopen(folder, MIRROR))
            except AttachError:  # the former unit may have changed the table of extents while it was read
                if attempt == REOPEN_ATTEMPTS:
                    raise
            attempt += 1
            time.sleep(REOPEN_PAUSE)

    def take_slot(self) -> int:
        """See `ExtentPool.take_slot`. Raises CapacityError, because there are no writers."""
        raise CapacityError("no capacity for writers in the mirror of an earlier controller, which is only read")

    def lease(self, slot: int, nbytes: int, sequence: int) -> LeasedExtent | None:
        """See `ExtentPool.lease`. There is no space."""
        return None

    def free(self, extent: LeasedExtent) -> bool:
        """See `ExtentPool.free`. The space stays as it is, so views of readers do not matter."""
        self.table.free(extent.number)
        return True

    def cut(self, extent: LeasedExtent, keep: int) -> None:
        """See `ExtentPool.cut`. Keeps the whole extent."""

    def next_deadline(self) -> float | None:
        """See `ExtentPool.next_deadline`."""
        return None

    def begin_period(self, now: float) -> bool:
        """See `ExtentPool.begin_period`."""
        return False

    def work_ahead(self, short: bool) -> bool:
        """See `ExtentPool.work_ahead`."""
        return False

    def check(self) -> None:
        """See `ExtentPool.check`."""
        self.table.check()

    def remove(self) -> None:
        """Remove the arena, and its folder and that of the mirror if they are empty then."""
        self.arena.remove()
        for folder in (self.folder, self.folder.parent):
            try:
                folder.rmdir()
            except OSError:  # on network storage, a file that a reader still has open
                return
