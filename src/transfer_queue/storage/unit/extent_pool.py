"""What a storage unit leases its extents out of, and what is written down of that.

`ArenaPool` is an arena of this machine's memory: extents are places in it, found first fit. `storage.unit.object_pool`
has the room of an external store, whose extents are names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from transfer_queue.errors import CapacityError
from transfer_queue.messages.storage import ReadPieces, UnitStatusReply, WriteBytes
from transfer_queue.messages.unit_reports import BlocksMovedReport, Move
from transfer_queue.storage.arena.arena import SEGMENT, Arena
from transfer_queue.storage.arena.block_copier import BlockCopier
from transfer_queue.storage.arena.extent_table import GRANULE, ExtentTable, LeasedExtent, LeasedExtents, round_up
from transfer_queue.storage.arena.free_space_reclaim import FreeSpaceReclaimer
from transfer_queue.storage.arena.remote_access import read_pieces, write_bytes
from transfer_queue.storage.unit.unit_effects import Effect
from transfer_queue.wire.buffers.copies import U8

PREFAULT_STEP = 4 * 1024 * 1024
"""Bytes made resident in one idle moment: a few milliseconds."""


class BlockCopy(Protocol):
    """A move under way, see `mover.Mover`."""

    extent: LeasedExtent | None

    def step(self) -> BlocksMovedReport | None:
        """Does a little; the answer when all is done."""

    def close(self) -> None:
        """Lets go of what it uses."""


class ExtentPool(Protocol):
    """capacity: most bytes of all extents together. table: what is leased."""

    capacity: int

    @property
    def table(self) -> LeasedExtents:
        """What is leased."""

    @property
    def folder(self) -> Path:
        """Where it is written down."""

    @property
    def boot_id(self) -> str:
        """Of this room alone."""

    @property
    def next_extent(self) -> int:
        """The first number that no extent has had."""

    def take_slot(self) -> int:
        """The number of a new slot, which no other will ever have."""

    def lease(self, slot: int, nbytes: int, sequence: int) -> LeasedExtent | None:
        """An extent, written down before anybody is told; None where there is no room for it."""

    def generation(self, offset: int) -> int:
        """Of what lies at this offset, now."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes themselves, to be written into."""

    def free(self, extent: LeasedExtent) -> None:
        """Nobody needs what lies in a leased extent."""

    def cut(self, extent: LeasedExtent, keep: int) -> None:
        """Nobody needs what lies behind these bytes of a leased extent."""

    def wanting(self, nbytes: int) -> int:
        """What an extent of so many bytes takes; where that is more than another one could not have, nor can it."""

    def attach(self, serve: Callable[[], list[Effect]], lost: Callable[[list[int]], list[Effect]]) -> None:
        """Whose it is. serve: asked when there is more room; lost: told of extents that may be gone."""

    def look_for(self, numbers: list[int], then: Callable[[list[int], str], list[Effect]]) -> list[Effect]:
        """Looks whether what is in these extents is still there; `then` is given those that are gone, and when.

        At once, or after a while: its effects are carried out either way.
        """

    def read(self, request: ReadPieces) -> list[memoryview] | None:
        """What a reader on another node asks for, see `serving.read_pieces`."""

    def write(self, extent: LeasedExtent | None, request: WriteBytes, payload: memoryview | None) -> None:
        """What a writer on another node wants written, see `serving.write_bytes`."""

    def mover(
        self,
        unit: int,
        order: Move,
        lease: Callable[[int], LeasedExtent | None],
        brought: Mapping[int, U8] | None = None,
    ) -> BlockCopy:
        """Begins a move, see `mover.Mover`."""

    def status(self) -> UnitStatusReply:
        """Bytes held, leased and free."""

    def due(self) -> float | None:
        """When `turn` has something to do; None where it never has."""

    def turn(self, now: float) -> bool:
        """Begins a period, where one is due; whether what writers have not used through the last one is recalled."""

    def idle(self, short: bool) -> bool:
        """Does a few milliseconds of work ahead of time; whether there is more. short: leases wait."""

    def check(self) -> None:
        """Recounts everything; AssertionError where it contradicts itself."""


class ArenaPool(ExtentPool):
    """The room of an arena that this process owns."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.capacity = arena.capacity
        leased = arena.extents.read(arena.folder, arena.boot_id)
        self._table = ExtentTable.of(arena.held, leased, arena.extents.next_extent)
        self.trimmer = FreeSpaceReclaimer(arena, self._table)

    @property
    def table(self) -> ExtentTable:
        """See `ExtentPool.table`."""
        return self._table

    @property
    def folder(self) -> Path:
        """See `ExtentPool.folder`."""
        return self.arena.folder

    @property
    def boot_id(self) -> str:
        """See `ExtentPool.boot_id`."""
        return self.arena.boot_id

    @property
    def next_extent(self) -> int:
        """See `ExtentPool.next_extent`."""
        return self.arena.extents.next_extent

    def take_slot(self) -> int:
        """See `ExtentPool.take_slot`."""
        return self.arena.extents.take_slot()

    def lease(self, slot: int, nbytes: int, sequence: int) -> LeasedExtent | None:
        """See `ExtentPool.lease`. Space that is held comes first, then the arena grows."""
        extent = self.trimmer.lease(slot, nbytes, sequence)
        more = round_up(nbytes) - self._table.tail
        if extent is None and more > 0 and self.grow(more):  # else it is there, and could not be filled
            extent = self.trimmer.lease(slot, nbytes, sequence)
        if extent is not None:
            self.arena.settle(extent.offset, extent.length)
            self.arena.extents.lease(extent)
        return extent

    def grow(self, least: int) -> bool:
        """Makes the arena this much larger, or more; whether that could be done."""
        try:
            grown = self.arena.grow(least)
        except CapacityError:
            return False
        self._table.grow(grown // GRANULE)
        return True

    def generation(self, offset: int) -> int:
        """See `ExtentPool.generation`."""
        return self.arena.generation(offset)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """See `ExtentPool.view`."""
        return self.arena.view(offset, nbytes).data

    def free(self, extent: LeasedExtent) -> None:
        """See `ExtentPool.free`. Generations come first: who has read there must see it before anybody writes there."""
        self.arena.bump(extent.offset, extent.length)
        self.arena.extents.free(extent)
        self._table.free(extent.number)
        self.trimmer.freed(extent.offset, extent.length)

    def cut(self, extent: LeasedExtent, keep: int) -> None:
        """See `ExtentPool.cut`. Generations come first."""
        self.arena.bump(extent.offset + keep, extent.length - keep)
        self.arena.extents.cut(extent, keep)
        self._table.cut(extent.number, keep)
        self.trimmer.freed(extent.offset + keep, extent.length - keep)

    def wanting(self, nbytes: int) -> int:
        """See `ExtentPool.wanting`."""
        return round_up(nbytes)

    def attach(self, serve: Callable[[], list[Effect]], lost: Callable[[list[int]], list[Effect]]) -> None:
        """An arena does nothing by itself."""

    def look_for(self, numbers: list[int], then: Callable[[list[int], str], list[Effect]]) -> list[Effect]:
        """What is in an arena is there."""
        return then([], "")

    def read(self, request: ReadPieces) -> list[memoryview] | None:
        """See `ExtentPool.read`."""
        return read_pieces(self.arena, request)

    def write(self, extent: LeasedExtent | None, request: WriteBytes, payload: memoryview | None) -> None:
        """See `ExtentPool.write`."""
        write_bytes(self.arena, extent, request, payload)

    def mover(
        self,
        unit: int,
        order: Move,
        lease: Callable[[int], LeasedExtent | None],
        brought: Mapping[int, U8] | None = None,
    ) -> BlockCopier:
        """See `ExtentPool.mover`."""
        return BlockCopier(unit, self.arena, order, lease, brought)

    def status(self) -> UnitStatusReply:
        """See `ExtentPool.status`."""
        table, holes = self._table, self.arena.hole_bytes
        free, tier = table.free_bytes - holes, self.arena.tier
        return UnitStatusReply(self.capacity, table.held - holes, table.leased, free, tier, table.largest_free)

    def due(self) -> float | None:
        """See `ExtentPool.due`."""
        return self.trimmer.due()

    def turn(self, now: float) -> bool:
        """See `ExtentPool.turn`."""
        return self.trimmer.turn(now)

    def idle(self, short: bool) -> bool:
        """See `ExtentPool.idle`."""
        if self.arena.prefault_some(PREFAULT_STEP) or self.trimmer.trim_some():
            return True
        if short or self.trimmer.resident >= SEGMENT // 2:
            return False
        more = self.capacity - self.arena.held
        return self.trimmer.fill_some(SEGMENT // 2) or (bool(more) and self.grow(min(SEGMENT // 4, more)))

    def check(self) -> None:
        """See `ExtentPool.check`."""
        table, arena = self._table, self.arena
        table.check()
        leased = arena.extents.read(arena.folder, arena.boot_id)
        assert leased == table.leased_extents(), "the file of extents"
        assert table.held == arena.held, "held bytes of table and arena"
        assert arena.hole_bytes == np.count_nonzero(arena.holes) * GRANULE, "bytes given back"
        for extent in leased:
            granules = slice(extent.offset // GRANULE, (extent.offset + extent.length) // GRANULE)
            assert not arena.holes[granules].any(), f"{extent} was given back to the file system"
