"""The part of a storage unit in moving blocks: copies the blocks of a `Move` into an extent of the unit, in steps.

No step takes longer than a few milliseconds. The bytes of a block in use never change. So a copy is valid if the block
was still there when the copy was done, which its generation then shows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Union

import numpy as np

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.descriptors import NewBlock
from transfer_queue.messages.reports.unit_reports import BlocksMovedReport, Move
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE, LeasedExtent
from transfer_queue.wire.blocks.repack import RepackedBlock, repack_block
from transfer_queue.wire.buffers.block_layout import ALIGNMENT, I8
from transfer_queue.wire.buffers.copies import U8, gather_pieces

MOVER_SLOT = 0
"""The slot of extents that the unit itself fills; it belongs to no writer."""
STEP_BYTES = 2 << 20
STEP_PIECES = 16384
STEP_LAYOUTS = 16
PIECE_COST = 64
"""Bytes that could be copied in the time that each piece costs in addition."""


Lease = Callable[[int], Union[LeasedExtent, None]]
"""Leases an extent of this many bytes in the unit's own slot, with one generation; None: no space."""
Brought = Union[Mapping[int, U8], None]
"""The bytes of blocks from other nodes, by their number in the order. Others could not be fetched."""


class BlockCopier:
    """One move in progress. Call `step` until it returns the report."""

    def __init__(
        self,
        unit: int,
        arena: Arena,
        order: Move,
        lease: Lease,
        brought: Brought = None,
        wrote: Callable[[LeasedExtent], object] = lambda extent: None,
    ) -> None:
        """Begin a move.

        Args:
            unit: The unit's number.
            arena: Its arena.
            order: The move.
            lease: Leases the space for all blocks.
            brought: Blocks from other nodes. Default: none.
            wrote: Called when the extent is filled.
        """
        self.extent: LeasedExtent | None = None
        self._unit = unit
        self._order = order
        self._lease = lease
        self._wrote = wrote
        self._arenas = {unit: arena}
        self._brought = brought or {}
        blocks = order.blocks
        self._units = np.frombuffer(blocks.unit, "<i4").tolist()
        self._offsets = np.frombuffer(blocks.offset, "<i8").tolist()
        self._generations = np.frombuffer(blocks.generation, "<i8").tolist()
        self._nbytes = np.frombuffer(blocks.nbytes, "<i8").tolist()
        self._work = self._steps()

    def step(self) -> BlocksMovedReport | None:
        """Do a step. Returns the report when all is done."""
        try:
            next(self._work)
        except StopIteration as stop:
            answer: BlocksMovedReport = stop.value
            return answer
        return None

    def _steps(self) -> Generator[None, None, BlocksMovedReport]:
        layouts = yield from self._layouts()
        whole = [at for at in range(len(self._units)) if at not in layouts]
        places: dict[int, int] = {}  # block -> offset in the extent
        end = 0
        for at in range(len(self._units)):
            layout = layouts.get(at)
            if at in layouts and layout is None:
                continue
            places[at] = end
            nbytes = self._nbytes[at] if layout is None else layout.nbytes
            end += max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        self.extent = self._lease(end) if places else None
        if self.extent is None:
            return BlocksMovedReport(self._order.number, self._unit, 0, 0, 0, b"", [])
        start = self.extent.offset
        generation = self._arenas[self._unit].generation(start)
        yield from self._copy(places, start, layouts)
        self._wrote(self.extent)
        present = {at for at in places if self._is_there(at)}
        offsets = np.array([start + places[at] if at in present else -1 for at in whole], "<i8")
        made = [
            self._new_block(at, layouts[at], start + places[at], generation) if at in present else None
            for at in sorted(layouts)
        ]
        extent = self.extent
        return BlocksMovedReport(
            self._order.number, self._unit, extent.number, extent.length, generation, offsets.tobytes(), made
        )  # fmt: skip

    def _layouts(self) -> Generator[None, None, dict[int, RepackedBlock | None]]:
        """Return the layout of each repacked block; None if its descriptor is invalid or describes a longer block."""
        out: dict[int, RepackedBlock | None] = {}
        blocks = self._order.blocks
        rows, schemas, dims = (np.frombuffer(c, "<i4").tolist() for c in (blocks.rows, blocks.schema, blocks.dims))
        for count, repack in enumerate(self._order.repacks):
            at, slots = repack.at, np.frombuffer(repack.slots, "<i4").astype("i8")
            try:
                layout = repack_block(
                    blocks.schemas[schemas[at]], blocks.dims_values[dims[at]], rows[at], slots, repack.fields
                )
            except TransferQueueError:
                layout = None
            out[at] = layout if layout is not None and _lies_within(layout, self._nbytes[at]) else None
            if count % STEP_LAYOUTS == STEP_LAYOUTS - 1:
                yield
        return out

    def _copy(self, places: dict[int, int], start: int, layouts: dict[int, RepackedBlock | None]) -> Iterator[None]:
        """Copy every block to its place in the extent, which begins at `start`."""
        into = self._arenas[self._unit]
        work = 0
        for at, place in places.items():
            memory = self._bytes_of(at)
            if memory is None:
                continue
            for target, origins, lengths in _pieces(layouts.get(at), len(memory)):
                for part in _parts(lengths):
                    data = gather_pieces(memory, origins[part], lengths[part])
                    into.write(start + place + target, data)
                    target += len(data)
                    work += PIECE_COST * (part.stop - part.start) + len(data)
                    if work >= STEP_BYTES:
                        work = 0
                        yield

    def _bytes_of(self, at: int) -> U8 | None:
        """Return the bytes of a block; None if its unit has no such place."""
        if self._units[at] in self._order.remotes:
            return self._brought.get(at)
        arena = self._arena(self._units[at])
        start, nbytes = self._offsets[at], self._nbytes[at]
        if arena is None or start < 0 or start + nbytes > len(arena.memory):
            return None
        return arena.memory[start : start + nbytes]

    def _arena(self, unit: int) -> Arena | None:
        """Return a unit's arena; None if it cannot be opened any more."""
        if unit not in self._arenas:
            folder = self._order.arenas.get(unit)
            try:
                if folder is None:
                    return None
                self._arenas[unit] = Arena.open(Path(folder))
            except TransferQueueError:
                return None
        return self._arenas[unit]

    def _is_there(self, at: int) -> bool:
        """Whether the block still has its generation. For a fetched block this was checked after the fetch."""
        if self._units[at] in self._order.remotes:
            return at in self._brought
        arena = self._arena(self._units[at])
        granule = self._offsets[at] // GRANULE
        if arena is None or not 0 <= granule < len(arena.generations):
            return False
        generation: int = int(arena.generations[granule])
        known: int = self._generations[at]
        return generation == known

    def _new_block(self, at: int, layout: RepackedBlock | None, offset: int, generation: int) -> NewBlock | None:
        assert self.extent is not None
        if layout is None:
            return None
        rows = len(layout.starts[0])
        return NewBlock(
            self._unit, self.extent.number, offset, generation, layout.nbytes, rows, layout.schema, layout.dims,
            self.extent.length,
        )  # fmt: skip

    def close(self) -> None:
        """Close the arenas of other units."""
        for unit, arena in self._arenas.items():
            if unit != self._unit:
                arena.close()


def _pieces(layout: RepackedBlock | None, nbytes: int) -> Iterator[tuple[int, I8, I8]]:
    """Yield pieces of a block: their offset in the new block, their offsets in the old one, and their lengths."""
    if layout is None:
        starts = np.arange(0, nbytes, STEP_BYTES)
        yield 0, starts, np.minimum(nbytes - starts, STEP_BYTES)
        return
    yield from zip(layout.places, layout.starts, layout.lengths, strict=True)


def _lies_within(layout: RepackedBlock, nbytes: int) -> bool:
    """Whether the repacked block fits its descriptor's length. If not, some bytes do not exist."""
    return all(int((starts + lengths).max()) <= nbytes for starts, lengths in zip(layout.starts, layout.lengths))


def _parts(lengths: I8) -> Iterator[slice]:
    """Cut pieces into parts for one step each, of at least one piece."""
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + STEP_BYTES, "right"))
        stop = min(max(stop, start + 1), start + STEP_PIECES)
        yield slice(start, stop)
        start = stop
