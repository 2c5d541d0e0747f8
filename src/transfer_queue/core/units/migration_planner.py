"""Decides which blocks are moved, and when.

Blocks are moved out of extents that are mostly dead, off units that are drained, to units where replicas are missing,
and out of memory that is nearly full. Blocks that only a mirror has are copied back into memory while there is space.
The mirror of an earlier term is drained into the present one.

A plan reads all blocks, a few chunks of the table at a time, chooses some, and then sends units one order after the
other, each with at most one extent of blocks.

Blocks with few live rows are *repacked*: these rows become a block of their own, in as many units as before.

If more than a fraction `high` of a unit in memory is leased to extents with needed values, its oldest extents are moved
to units on disk until the fraction is `low`. If its writers wait for space, some are moved in any case. The age of an
extent is that of its oldest block, since blocks are numbered in the order in which they are published. Only closed
extents are moved, because open extents may receive more blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Union

import msgspec
import numpy as np

from transfer_queue.core.context import Context, observes
from transfer_queue.core.events import records as r
from transfer_queue.core.tables.blocks import CHUNK_BITS, BlockChunk
from transfer_queue.core.tables.rows import Chunk
from transfer_queue.core.units.location_checks import are_apart
from transfer_queue.core.units.mover import PlanSteps, Policy
from transfer_queue.messages.descriptors import DISK, MEMORY, BlockLocation, Blocks, NewBlock
from transfer_queue.messages.reports.unit_reports import BlocksMovedReport, Repack

SPARE = 16 << 20
"""Leased bytes below which nothing is compacted."""
ORDER_BYTES = 4 << 20
"""Bytes of one order: at most one extent, which a unit copies in a few milliseconds."""
SHORT_ORDER_BYTES = 512 << 10
"""Bytes of one order if writers wait for space."""
ORDER_BLOCKS = 4096
ORDER_REPACKS = 256
PLAN_BLOCKS = 1 << 16
"""Blocks that one plan moves or repacks; the next plan handles the rest."""
PAUSE = 0.25
"""The minimum of seconds between two plans."""
PAUSE_A_CHUNK = 0.01
"""Further seconds between two plans for each chunk of blocks."""
SPARSE = 0.75
"""A block with a smaller fraction of live rows is repacked."""

_GRANULE = 64 << 10
_UNIT = 40  # bits of the extent in a number that combines unit and extent

Place = tuple[int, int]  # unit, extent
Extents = dict[Place, float]
_OFFLOAD, _REPACK, _MOVE = range(3)  # what a plan does with blocks, in this order
_Moves = dict[tuple[int, int, int], list[np.ndarray]]
"""What is done, the unit to leave or -1, the unit of the other copy or -1 -> the numbers of blocks."""
_Stamp = tuple[int, int, int, tuple[tuple[int, int], ...]]
_Hits = tuple[np.ndarray, np.ndarray, np.ndarray, int]


class MigrationPlanner(Policy):
    """Makes and carries out one plan at a time."""

    runs_always = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.replicas = context.config.replicas
        """The number of units in which each block should be."""
        self.marks = context.config.marks
        """The fill levels at which blocks are moved to disk, if there are units on disk."""
        self.has_mirror = context.config.max_lag is not None
        """Whether each block is to be in a mirror. Then only blocks in a mirror are repacked, into blocks in a mirror.

        Otherwise values of acknowledged puts could be in a new block that no mirror has.
        """
        self._restores = True  # some blocks may be in a mirror only, so that they are copied back into memory
        self._in_mirror_only = False  # the plan has found such a block
        self._next = 0.0  # the earliest time of the next plan
        self._seen: _Stamp = (0, 0, 0, ())
        self._made = 0  # blocks that were made by repacking
        self._offloads = 0  # blocks that were moved to disk

    @observes(r.StateLoaded, r.StateMerged, r.UnitLost, r.ExtentsLost)
    def note_lost_locations(self, record: r.AnyRecord) -> None:
        """Note that blocks may have lost their location in memory, so that they are in a mirror only."""
        self._restores = True

    # ------------------------------------------------------------ times

    def is_working(self) -> bool:
        """See `CoreService.is_working`. A plan may still free space."""
        return self._steps is not None or bool(self.mover.unsent) or (self._is_urgent() and self._seen != self._stamp())

    def _is_urgent(self) -> bool:
        return bool(self.mover.short) and self.state.blocks.leased > 0

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        if self.mover.unsent or (self._steps is not None and not self.is_waiting()):
            return 0.0
        state = self.state
        wanted = state.blocks.leased > SPARE or state.draining or self.replicas > 1
        wanted = wanted or (self._restores and state.mirrors)
        if not (wanted or self.mover.short or state.disks):  # the usual case, determined after every event
            return None
        if self._steps is not None or self._seen == self._stamp() or not self.mover.units:
            return None
        if self._is_urgent():
            return 0.0
        return self._next if wanted or self._excess() else None

    def _excess(self) -> dict[int, float]:
        """Return unit in memory -> bytes to be moved off it to disk."""
        state, marks, excess = self.state, self.marks, dict[int, float]()
        if not state.disks - state.draining:  # this runs after every event
            return excess
        for number in sorted(state.units_of(MEMORY) - state.draining):
            leased, capacity = state.blocks.leased_in.get(number, 0), state.units[number].capacity
            over = leased - marks.low * capacity
            if number in self.mover.short and leased:
                excess[number] = max(over, (marks.high - marks.low) * capacity, 1.0)
            elif capacity and leased > marks.high * capacity:
                excess[number] = over
        return excess

    def _stamp(self) -> _Stamp:
        """Return a value that changes if a new plan may achieve something."""
        published = self.state.next_block - self._made if self.state.draining else 0
        leased, excess = self.state.blocks.leased_in, self._excess()
        over = tuple((unit, leased.get(unit, 0)) for unit in excess) if excess else ()
        return self.state.blocks.changes, published, self.mover.nudges, over

    # ------------------------------------------------------------ a plan

    def plan(self) -> PlanSteps[Sequence[r.AnyRecord]]:
        """See `Policy.plan`."""
        if self._seen == self._stamp():
            return []
        self._seen = self._stamp()
        blocks, stores = self.state.blocks, self.state.stores  # blocks in an external store are not moved
        before, offloads = blocks.leased, self._offloads
        live: Extents = {}
        ages: dict[Place, int] = {}
        for key in sorted(blocks.chunks):
            chunk = blocks.chunks.get(key)
            if chunk is not None:
                self._tally(key, chunk, live, ages)
            yield ()
        live = {place: size for place, size in live.items() if place[0] not in stores} if stores else live
        oldest = self._oldest_extents(ages)
        cold, victims = _as_numbers(oldest), _as_numbers(self._victims(live) - oldest)
        yield ()
        moves: _Moves = {}
        left = PLAN_BLOCKS
        restores = self._restores and self._roomiest() is not None
        self._in_mirror_only = False
        copies = self._may_copy() or restores
        for key in sorted(blocks.chunks) if len(victims) or len(cold) or copies else ():
            chunk = blocks.chunks.get(key)
            if chunk is not None and left > 0:
                left -= self._collect(key, chunk, victims, cold, moves)
            yield ()
        if restores and left > 0:
            self._restores = self._in_mirror_only
        if left <= 0:
            self.mover.nudges += 1  # the next plan handles the rest
        for (what, leaving, other), some in sorted(moves.items(), key=lambda each: each[0][0]):
            numbers = np.unique(np.concatenate(some))
            if what == _OFFLOAD:
                yield from self._offload(leaving, numbers)
            elif what == _REPACK:
                yield from self._repack(numbers)
            else:
                yield from self._move(leaving, other, numbers)
        if blocks.leased >= before and self._offloads == offloads and left > 0:
            self._seen = (blocks.changes, *self._seen[1:])  # a further plan achieves nothing before the next change
        self._next = self.context.now + PAUSE + PAUSE_A_CHUNK * len(blocks.chunks)
        return []

    def _shares(self, chunk: BlockChunk) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the needed blocks of a chunk, and the fraction of each that is alive, 0 to 1."""
        columns = chunk.columns
        at = np.flatnonzero(columns["live"])
        widths = np.array([len(schema) if schema else 1 for schema in self.state.blocks.schemas.values], "i8")
        values = columns["rows"][at] * widths[columns["schema"][at]]
        if chunk.shared:
            values = np.maximum(values, chunk.shared["values"][at])
        return at, columns["live"][at] / np.maximum(values, 1)

    def _tally(self, key: int, chunk: BlockChunk, live: Extents, ages: dict[Place, int]) -> None:
        """Add up the live bytes of each extent, and note its oldest block. The chunks come in ascending order."""
        at, share = self._shares(chunk)
        nbytes = np.maximum(chunk.columns["nbytes"][at], 64) * share
        for code in self._codes(chunk, at):
            some = code >= 0
            extents, first, which = np.unique(code[some], return_index=True, return_inverse=True)
            sums = np.bincount(which.reshape(-1), nbytes[some], len(extents))
            oldest = (at[some][first] + (key << CHUNK_BITS)).tolist()
            for extent, size, number in zip(extents.tolist(), sums.tolist(), oldest, strict=True):
                place = (extent >> _UNIT, extent & ((1 << _UNIT) - 1))
                live[place] = live.get(place, 0.0) + size
                ages.setdefault(place, number)

    @staticmethod
    def _codes(chunk: BlockChunk, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the extents of the first and of the second copies, each as one number; -1 if there is no copy."""
        columns, second = chunk.columns, chunk.second
        first = (columns["unit"][at].astype("i8") << _UNIT) + columns["extent"][at]
        if not second:
            return first, np.full(len(at), -1)
        other = (second["unit"][at].astype("i8") << _UNIT) + second["extent"][at]
        return first, np.where(second["extent"][at] > 0, other, -1)

    def _victims(self, live: Extents) -> set[Place]:
        """Return the extents to be emptied."""
        blocks, draining = self.state.blocks, self.state.draining
        leavable = draining & self.state.mirrors if self.mover.present_mirrors() else set[int]()
        leavable |= draining - self.state.mirrors if self._healthy_units() else set()
        chosen = {place for place in live if place[0] in leavable and place in blocks.extents}
        alive = sum(live.values())
        leased = blocks.leased - sum(blocks.leased_in.get(unit, 0) for unit in self.state.stores)
        over = leased - 1.25 * alive - SPARE / 2
        if leased <= 1.5 * alive + SPARE and not self.mover.short:
            return chosen
        least = 0.9 if self.mover.short else 0.5
        units = (self.mover.short or self.mover.units) & self.mover.units - draining
        candidates = []
        for place, size in live.items():
            extent = blocks.extents.get(place)
            if extent is not None and extent.closed and place[0] in units and size < least * extent.length:
                candidates.append((size / extent.length, size, extent.length, place))
        picked: dict[int, list[tuple[float, int, Place]]] = {}
        for _, size, length, place in sorted(candidates):
            if over <= 0 and not self.mover.short:
                break
            over -= length - size
            picked.setdefault(place[0], []).append((size, length, place))
        for some in picked.values():
            rest, total = sum(size for size, _, _ in some), sum(length for _, length, _ in some)
            # only if this frees enough space, since the live rest occupies whole granules
            if total - math.ceil(1.1 * rest / _GRANULE) * _GRANULE >= max(_GRANULE, total / 8):
                chosen.update(place for _, _, place in some)
        return chosen

    def _oldest_extents(self, ages: dict[Place, int]) -> set[Place]:
        """Return the extents to be moved to disk. ages: the oldest block of each extent."""
        left, chosen = self._excess(), set[Place]()
        for place in sorted(ages, key=lambda place: ages[place]):
            extent = self.state.blocks.extents.get(place)
            if extent is not None and extent.closed and left.get(place[0], 0.0) > 0:
                left[place[0]] -= extent.length
                chosen.add(place)
        return chosen

    def _healthy_units(self, tier: str = MEMORY) -> list[int]:
        """Return the units that may receive blocks, those of this tier first, the emptiest first in each tier.

        Mirrors are not among them, since they have a copy of every block in any case.
        """
        leased, first = self.state.blocks.leased_in, self.state.units_of(tier)
        units = self.mover.units - self.state.draining - self.state.mirrors
        return sorted(units, key=lambda unit: (unit not in first, leased.get(unit, 0), unit))

    def _roomiest(self) -> int | None:
        """Return the unit in memory into which blocks of mirrors are copied back; None if there is no space."""
        if not self.state.mirrors:
            return None
        leased, free = self.state.blocks.leased_in, {}
        for unit in self.state.units_of(MEMORY) & self.mover.units - self.state.draining - self.mover.short:
            capacity = self.state.units[unit].capacity
            free[unit] = self.marks.high * capacity - leased.get(unit, 0) - ORDER_BYTES if capacity else math.inf
        best = max(free, key=lambda unit: (free[unit], -unit), default=None)
        return best if best is not None and free[best] >= 0 else None

    def _may_copy(self) -> bool:
        return self.replicas > 1 and len(self.mover.units - self.state.draining) > 1

    def _collect(self, key: int, chunk: BlockChunk, victims: np.ndarray, cold: np.ndarray, moves: _Moves) -> int:
        """Collect the blocks of a chunk that leave extents or are copied. Returns their number.

        Args:
            key: The number of the chunk.
            chunk: The chunk.
            victims: The extents to be emptied.
            cold: The extents to be moved to disk.
            moves: Gets the numbers of the blocks.
        """
        at, share = self._shares(chunk)
        first, second = self._codes(chunk, at)
        no_unit = np.full(len(at), -1)
        hits = [np.isin(code, victims) for code in (first, second)]
        few = (hits[0] | hits[1]) & (share < SPARSE) & (chunk.columns["rows"][at] > 1)
        if self.has_mirror:
            few &= np.isin(np.stack([first, second]) >> _UNIT, list(self.state.mirrors)).any(axis=0)
        alone = (second < 0) & ~hits[0] & ~few
        if self._may_copy():
            alone &= ~np.isin(first >> _UNIT, list(self.state.stores))
        else:
            in_mirror = (second < 0) & np.isin(first >> _UNIT, list(self.state.mirrors))
            self._in_mirror_only |= bool(in_mirror.any())
            # a mirror of an earlier term may still be registered where no unit serves it
            alone &= np.isin(first >> _UNIT, list(self.state.mirrors & self.mover.units))
        count = 0
        for what, chosen, (leaving, other) in (
            (_OFFLOAD, np.isin(first, cold), (first, second)),
            (_OFFLOAD, np.isin(second, cold), (second, first)),
            (_REPACK, few, (no_unit, no_unit)),
            (_MOVE, hits[0] & ~few, (first, second)),
            (_MOVE, hits[1] & ~few, (second, first)),
            (_MOVE, alone, (no_unit, first)),
        ):
            pairs = np.stack([leaving[chosen] >> _UNIT, other[chosen] >> _UNIT], axis=1)
            for pair in np.unique(pairs, axis=0).tolist():
                places = at[chosen][(pairs == pair).all(axis=1)]
                # blocks that stay in their unit are moved together, wherever their other copies are
                other_unit = -1 if pair[0] >= 0 and pair[0] not in self.state.draining else pair[1]
                moves.setdefault((what, pair[0], other_unit), []).append(places + (key << CHUNK_BITS))
                count += len(places)
        return count

    # ------------------------------------------------------------ orders

    def _offload(self, leaving: int, numbers: np.ndarray) -> PlanSteps[None]:
        """Move complete blocks (ascending) from a unit in memory to one on disk that has no copy of them.

        A unit of the same node is preferred. If it has no space for the blocks of an order, halves are tried.
        """
        blocks, units = self.state.blocks, self.state.units
        home = units.get(leaving)
        if home is None:
            return
        numbers = blocks.needed_of(numbers)
        runs = split_into_runs(blocks.column("nbytes", numbers), ORDER_BYTES, ORDER_BLOCKS)
        parts = [numbers[a:b] for a, b in runs][::-1]  # the last one is the next order
        while parts:
            some = blocks.needed_of(parts.pop())  # some may have been cleared during the orders before
            first, second = blocks.units_of(some)
            others = np.where(first == leaving, second, np.where(second == leaving, first, leaving))
            distinct = np.unique(others[others != leaving]).tolist()
            if len(distinct) > 1:
                parts += [some[others == other] for other in reversed(distinct)]
                continue
            some = some[others != leaving]
            disks = [unit for unit in self._healthy_units(DISK) if unit in self.state.disks and unit not in distinct]
            to = min(disks, key=lambda unit: units[unit].node != home.node, default=None)
            if to is None or not len(some):
                continue
            brought = yield from self._bring(leaving, to, some)
            if brought is not None:
                self._offloads += brought
            elif len(some) == 1 or to not in self.mover.units:
                return
            else:
                parts += np.array_split(some, 2)[::-1]

    def _move(self, leaving: int, other: int, numbers: np.ndarray) -> PlanSteps[None]:
        """Move complete blocks off unit `leaving` (-1: copy them) to a unit that has no copy of them."""
        blocks = self.state.blocks
        numbers = blocks.needed_of(numbers)
        for a, b in split_into_runs(blocks.column("nbytes", numbers), self._size(), ORDER_BLOCKS):
            needed = blocks.needed_of(numbers[a:b])
            is_restored = leaving < 0 and other in self.state.mirrors
            to = self._roomiest() if is_restored else self._target(leaving, {other, leaving})
            if to is None or not len(needed):
                continue
            brought = yield from self._bring(leaving, to, needed)
            if brought is None:
                return
            if brought and leaving in self.state.mirrors & self.state.draining:
                self.mover.nudges += 1  # they may be in the present mirror only, so that the next plan restores them

    def _bring(self, leaving: int, to: int, numbers: np.ndarray) -> PlanSteps[int | None]:
        """Send one order and add its record. Returns the number of moved blocks; None if the unit could not do it."""
        reply = yield from self._ask(to, self.state.blocks.describe(numbers))
        if reply is None:
            return None
        offsets = np.frombuffer(reply.offsets, "<i8")
        kept = offsets >= 0
        done, to_offsets = numbers[kept].tobytes(), offsets[kept].tobytes()
        yield [r.BlocksMoved(to, reply.extent, reply.length, reply.generation, leaving, done, to_offsets)]
        return int(kept.sum())

    def _repack(self, numbers: np.ndarray) -> PlanSteps[None]:
        """Copy the live rows of these blocks into new blocks."""
        rows = SparseRows(numbers)
        for partition in list(self.state.partitions.values()):
            for key in sorted(partition.rows.chunks):
                chunk = partition.rows.chunks.get(key)
                if chunk is not None:
                    rows.scan_chunk(partition.name, chunk)
                yield ()
        for name in rows.partitions:
            sparse = rows.sparse_blocks(name)
            yield ()
            for first in range(0, len(sparse), ORDER_REPACKS):
                yield from self._repack_some(name, sparse[first : first + ORDER_REPACKS])

    def _repack_some(self, name: str, sparse: list[SparseBlock]) -> PlanSteps[None]:
        """Repack a few blocks of one partition, grouped by the units in which they are."""
        blocks = self.state.blocks
        by_units: dict[tuple[int, ...], list[SparseBlock]] = {}
        for block in self._still_needed(sparse):
            units = tuple(place.unit for place in blocks.places(block.number))
            by_units.setdefault(units, []).append(block)
        for units, group in by_units.items():
            some = self._still_needed(group)  # some may have been cleared during the orders before
            numbers = np.array([block.number for block in some], "i8")
            alive = np.array([len(block.copied) for block in some]) / np.maximum(blocks.column("rows", numbers), 1)
            for a, b in split_into_runs(blocks.column("nbytes", numbers) * alive, self._size(), ORDER_REPACKS):
                yield from self._repack_in(name, units, some[a:b])

    def _repack_in(self, name: str, units: tuple[int, ...], some: list[SparseBlock]) -> PlanSteps[None]:
        """Repack blocks that are in the same units: one order for each unit, one after the other, then one record."""
        blocks = self.state.blocks
        some = self._still_needed(some)
        to = self._target(units[0], set(units))
        if to is None or not some:
            return
        described = blocks.describe(np.array([block.number for block in some], "i8"))
        repacks = [Repack(at, block.copied.tobytes(), block.fields) for at, block in enumerate(some)]
        reply = yield from self._ask(to, described, repacks)
        if reply is None:
            return
        made, closed = list(reply.repacked), [(to, reply.extent)]
        if len(units) > 1:
            copy = self._target(units[1], {to, *units})
            written = [block for block in made if block is not None]
            second = (yield from self._ask(copy, blocks_message(written))) if copy is not None and written else None
            made = [None] * len(made) if second is None else _with_copies(made, second)
            closed += [] if second is None else [(second.unit, second.extent)]
        pairs = [(block, new) for block, new in zip(some, made, strict=True) if new is not None]
        # the mirror may have been lost, and other blocks may have been put there, since the first report
        is_mirrored = not self.has_mirror or any(unit in self.state.mirrors for unit, _ in closed)
        if not pairs or not is_mirrored or not are_apart(self.state, [new for _, new in pairs]):
            yield [r.ExtentsClosed(closed)]
            return
        repacked = r.RowsRepacked(
            name,
            self.state.next_block,
            [block.entered_in(new) for block, new in pairs],
            np.concatenate([block.rows for block, _ in pairs]).astype("<i8").tobytes(),
            np.concatenate([np.full(len(block.rows), block.number) for block, _ in pairs]).astype("<i8").tobytes(),
            np.concatenate([block.slots for block, _ in pairs]).astype("<i4").tobytes(),
        )
        self._made += len(pairs)
        yield [r.BlocksMoved(to, reply.extent, reply.length, reply.generation, -1, b"", b"", [repacked])]

    def _still_needed(self, sparse: list[SparseBlock]) -> list[SparseBlock]:
        """Return those of these blocks that a live row still needs."""
        needed = set(self.state.blocks.needed_of(np.array([block.number for block in sparse], "i8")).tolist())
        return [block for block in sparse if block.number in needed]

    def _target(self, unit: int, taken: set[int]) -> int | None:
        """Return the unit for blocks of this unit (-1: for copies): itself, or the emptiest one that is not in `taken`.

        Blocks on disk, or with a copy on disk, stay on disk if possible. Blocks in memory are moved to disk if no unit
        in memory is available.
        """
        if unit in self.mover.units and unit not in self.state.draining:
            return unit
        if unit in self.state.mirrors:  # copies on disk stay there
            return min(self.mover.present_mirrors() - taken, default=None)
        tier = DISK if self.state.disks & {unit, *taken} else MEMORY
        free = [other for other in self._healthy_units(tier) if other not in taken]
        over = self._excess()
        return next((other for other in free if other not in over), free[0] if free else None)

    def _size(self) -> int:
        return SHORT_ORDER_BYTES if self.mover.short else ORDER_BYTES

    def _ask(self, unit: int, blocks: Blocks, repacks: Sequence[Repack] = ()) -> PlanSteps[BlocksMovedReport | None]:
        """Let a unit copy blocks, and return its report; None if it has no space or is gone."""
        if not (yield from self.await_turn(unit)):
            return None
        report = yield from self.carry_out(blocks, repacks)
        return report if report is not None and report.extent else None


def _as_numbers(extents: set[Place]) -> np.ndarray:
    return np.array(sorted((unit << _UNIT) + extent for unit, extent in extents), "i8")


def _with_copies(made: list[NewBlock | None], reply: BlocksMovedReport) -> list[NewBlock | None]:
    """Add the second location to blocks that a unit has copied; None for those that it could not copy."""
    offsets, with_copies = iter(np.frombuffer(reply.offsets, "<i8").tolist()), list[Union[NewBlock, None]]()
    for block in made:
        offset = -1 if block is None else next(offsets)
        place = BlockLocation(reply.unit, reply.extent, offset, reply.generation, reply.length)
        with_copies.append(None if block is None or offset < 0 else msgspec.structs.replace(block, copies=[place]))
    return with_copies


# ------------------------------------------------------------ sparse blocks


class SparseBlock(NamedTuple):
    """A block of which only some rows are alive."""

    number: int
    rows: np.ndarray
    """The global indexes of the live rows, i8."""
    slots: np.ndarray
    """The positions of the live rows in the block, i4, ascending. Rows that share a value have the same position."""
    fields: list[str]
    """The fields that live rows have in the block."""

    @property
    def copied(self) -> np.ndarray:
        """The positions in the block that are copied, i4: each of `slots` once."""
        return np.unique(self.slots)

    def entered_in(self, made: NewBlock) -> NewBlock:
        """Return the block that contains the copies, with the slot of each live row if rows share values."""
        copied = self.copied
        if len(copied) == len(self.slots):
            return made
        return msgspec.structs.replace(made, slots=np.searchsorted(copied, self.slots).astype("<i4").tobytes())


class SparseRows:
    """Searches the rows of some blocks. numbers: the numbers of the blocks, ascending."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers
        self._fields: dict[str, int] = {}
        """The fields that were found, with their numbers in `_Hits`."""
        self._hits: dict[str, list[_Hits]] = {}

    @property
    def partitions(self) -> list[str]:
        """The names of the partitions that have such rows, in the order of the search."""
        return list(self._hits)

    def scan_chunk(self, partition: str, chunk: Chunk) -> None:
        """Note which rows of a chunk are in these blocks."""
        low, high = int(self.numbers[0]), int(self.numbers[-1])
        for name, (column, slots) in chunk.field.items():
            at = np.flatnonzero((column >= low) & (column <= high))
            if not len(at):
                continue
            which = np.searchsorted(self.numbers, column[at])
            hit = self.numbers[which] == column[at]
            if not hit.any():
                continue
            at = at[hit]
            hits = (which[hit], slots[at], chunk.index[at], self._fields.setdefault(name, len(self._fields)))
            self._hits.setdefault(partition, []).append(hits)

    def sparse_blocks(self, partition: str) -> list[SparseBlock]:
        """Return the blocks of a partition that have live rows, ascending."""
        hits_of_partition = self._hits[partition]
        which, slots, rows = (np.concatenate([hits[k] for hits in hits_of_partition]) for k in (0, 1, 2))
        fields = np.concatenate([np.full(len(hits[0]), hits[3]) for hits in hits_of_partition])
        order = np.lexsort((rows, slots, which))
        which, slots, rows, fields = which[order], slots[order], rows[order], fields[order]
        names = list(self._fields)
        edges = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), len(which)]
        out = []
        for a, b in pairwise(edges):
            first = np.ones(b - a, bool)
            first[1:] = (slots[a + 1 : b] != slots[a : b - 1]) | (rows[a + 1 : b] != rows[a : b - 1])
            block_fields = [names[k] for k in sorted(set(fields[a:b].tolist()))]
            number = int(self.numbers[which[a]])
            block_rows, block_slots = rows[a:b][first].astype("i8"), slots[a:b][first].astype("i4")
            out.append(SparseBlock(number, block_rows, block_slots, block_fields))
        return out


def split_into_runs(nbytes: np.ndarray, most_bytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide entries into runs of at most `most_bytes` bytes and `most` entries each, but at least one entry."""
    start, total = 0, 0.0
    for at, size in enumerate(nbytes.tolist()):
        if at > start and (total + size > most_bytes or at - start == most):
            yield start, at
            start, total = at, 0.0
        total += size
    if start < len(nbytes):
        yield start, len(nbytes)


def blocks_message(blocks: list[NewBlock]) -> Blocks:
    """Return the message that describes blocks which no row needs yet."""
    kinds = (("unit", "<i4"), ("offset", "<i8"), ("generation", "<i8"), ("nbytes", "<i8"), ("rows", "<i4"))
    columns = {name: np.array([getattr(block, name) for block in blocks], kind).tobytes() for name, kind in kinds}
    count = np.arange(len(blocks), dtype="<i4").tobytes()
    return Blocks(
        **columns,
        schema=count,
        dims=count,
        schemas=[list(block.schema) for block in blocks],
        dims_values=[block.dims for block in blocks],
    )
