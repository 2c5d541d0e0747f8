"""Decides which blocks are moved, and when.

Blocks are moved out of extents that hold little, off units that are drained, to units where replicas are missing, and
out of memory that is nearly full (`core.units.tiering_policy`).

A plan looks at all blocks, a few chunks of the table at a time, chooses, and then gives one order after the other to
units, each for what one extent takes. A unit copies the blocks and reports where the copies lie (`messages.Moved`),
which becomes a record. Values that ended or were replaced meanwhile do not exist any more when it is applied.

Blocks of which few rows live are *repacked*: those rows become a block of their own, in as many units as before.

Nothing here is part of the state: a plan under way is forgotten with its process, and units are told to free what they
copied for it (`ExtentsClosed` of extents in which nothing lies).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Protocol

import msgspec
import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.block_table import CHUNK_BITS, BlockChunk
from transfer_queue.core.units import tiering_policy
from transfer_queue.core.units.compaction_candidates import SparseBlock, SparseRows, batches, blocks_message
from transfer_queue.core.units.location_checks import are_apart, check_moved, close_new
from transfer_queue.core.units.tiering_policy import DEFAULTS, Watermarks
from transfer_queue.messages.descriptors import DISK, MEMORY, BlockLocation, Blocks, NewBlock
from transfer_queue.messages.unit_reports import BlocksMovedReport, DrainFinished, Move, Repack

SPARE = 16 << 20
"""Leased bytes that are never worth a move."""
ORDER_BYTES = 4 << 20
"""Of one order: what one extent takes, and what a unit copies in a few milliseconds."""
SHORT_ORDER_BYTES = 512 << 10
"""Of one order where space is short."""
ORDER_BLOCKS = 4096
ORDER_REPACKS = 256
PLAN_BLOCKS = 1 << 16
"""Blocks moved whole, and blocks repacked, in one plan; the next one takes the rest."""
PAUSE = 0.25
"""Seconds between two plans, at least."""
PAUSE_A_CHUNK = 0.01
SLICES = 4
"""Chunks looked at in one go."""
SPARSE = 0.75
"""A block of which less is alive is repacked."""

_GRANULE = 64 << 10
_UNIT = 40  # bits of an extent's number beside its unit, where both are one number

Extents = dict[tuple[int, int], float]
_Stamp = tuple[int, int, int, tuple[tuple[int, int], ...]]


class HasState(Protocol):
    """Whose moves they are."""

    state: State


class MigrationPlanner:
    """The plan under way, if any, and what it has to be told.

    units: the connected ones. short: units whose writers wait for space. replicas: units that each block shall lie in.
    marks: when blocks are moved to disk, where there are units there.
    """

    def __init__(self, core: HasState, replicas: int = 1, marks: Watermarks = DEFAULTS) -> None:
        self._core = core
        self.replicas = replicas
        self.marks = marks
        self.units: set[int] = set()
        self.short: set[int] = set()
        self._plan: Iterator[bool] | None = None
        self._records: list[r.AnyRecord] = []
        self._orders: list[tuple[int, Move | DrainFinished]] = []
        self._job: tuple[int, int] | None = None  # number and unit of the order under way
        self._asked: Move | None = None  # the order under way, or the last one
        self._reply: BlocksMovedReport | None = None
        self._number = 0
        self._now = 0.0
        self._next = 0.0  # when the next plan may begin
        self._seen: _Stamp = (0, 0, 0, ())
        self._nudges = 0
        self._made = 0  # blocks of rows that were repacked
        self._offloads = 0  # blocks that were moved to disk

    @property
    def state(self) -> State:
        """The state as it is now."""
        return self._core.state

    # ------------------------------------------------------------ events

    def arrived(self, unit: int) -> None:
        """A unit is connected."""
        self.units.add(unit)
        self._nudges += 1
        if unit in self.state.draining:
            self._orders.append((unit, DrainFinished(True)))

    def gone(self, unit: int) -> None:
        """A unit is not connected any more; what it was to do will not be done."""
        self.units.discard(unit)
        self.short.discard(unit)
        self._orders = [order for order in self._orders if order[0] != unit]
        if self._job is not None and self._job[1] == unit:
            self._job = None

    def forget(self) -> None:
        """The blocks are others from now on: what was planned is about none of them."""
        self._plan = self._job = self._reply = None
        self._orders = [order for order in self._orders if isinstance(order[1], DrainFinished)]
        self._records.clear()
        self._nudges += 1

    def waits(self, unit: int, writers: bool) -> None:
        """Whether writers wait for space in a unit."""
        if writers and unit in self.units:
            self.short.add(unit)
        else:
            self.short.discard(unit)

    def drain(self, unit: int, draining: bool) -> None:
        """A unit is to be drained, or no longer."""
        self._nudges += 1
        self._orders.append((unit, DrainFinished(draining)))

    def answered(self, reply: BlocksMovedReport, now: float) -> list[r.AnyRecord]:
        """Take a unit's report of an order; return the records.

        Raises ProtocolError if the report cannot be right; the plan then goes on as if the unit had had no room.
        """
        if self._job != (reply.move, reply.unit):  # of a plan that is forgotten
            return close_new(self.state, reply.unit, [reply.extent]) if reply.extent else []
        self._job, self._reply, self._now = None, None, now
        if reply.extent:
            check_moved(self.state, self._asked, reply)
        self._reply = reply
        self._run(now)
        return self._taken()

    @property
    def active(self) -> bool:
        """Whether space may yet come free by a plan."""
        return self._plan is not None or bool(self._orders) or (self._hurry() and self._seen != self._stamp())

    def _hurry(self) -> bool:
        return bool(self.short) and self.state.blocks.leased > 0

    def due(self) -> float | None:
        """When `step` has something to do, None where it has not."""
        if self._orders or (self._plan is not None and self._job is None):
            return 0.0
        if self._plan is not None or self._seen == self._stamp() or not self.units:
            return None
        if self._hurry():
            return 0.0
        wanted = self.state.blocks.leased > SPARE or self.state.draining or self.replicas > 1
        return self._next if wanted or self._excess() else None

    def _excess(self) -> dict[int, float]:
        # asked after every event, so that it must cost nothing where there is no disk
        return tiering_policy.bytes_to_offload(self.state, self.marks, self.short) if self.state.disks else {}

    def step(self, now: float) -> tuple[list[r.AnyRecord], list[tuple[int, Move | DrainFinished]]]:
        """A little of a plan; records to apply at once, and orders to units."""
        self._now = now
        due = self.due()
        if due is not None and due <= now and not (self._plan is not None and self._job is not None):
            if self._plan is None and self._seen != self._stamp():
                self._seen = self._stamp()
                self._plan = self._planned()
            self._run(now)
        orders, self._orders = self._orders, []
        return self._taken(), orders

    def _taken(self) -> list[r.AnyRecord]:
        records, self._records = self._records, []
        return records

    def _stamp(self) -> _Stamp:
        """Changes with whatever may make a plan worth while."""
        published = self.state.next_block - self._made if self.state.draining else 0
        leased, excess = self.state.blocks.leased_in, self._excess()
        over = tuple((unit, leased.get(unit, 0)) for unit in excess) if excess else ()
        return self.state.blocks.changes, published, self._nudges, over

    def _run(self, now: float) -> None:
        if self._plan is None:
            return
        plan = self._plan
        for _ in range(SLICES):
            more = next(plan, None)
            if more is None:
                self._plan = None
                self._next = now + PAUSE + PAUSE_A_CHUNK * len(self.state.blocks.chunks)
            if not more or self._records:
                return

    # ------------------------------------------------------------ a plan

    def _planned(self) -> Iterator[bool]:
        """Yields after each slice of work: True where it can go on at once, False where it waits for a unit."""
        blocks = self.state.blocks
        before, offloads = blocks.leased, self._offloads
        live: Extents = {}
        ages: dict[tuple[int, int], int] = {}
        for key in sorted(blocks.chunks):
            chunk = blocks.chunks.get(key)
            if chunk is not None:
                self._tally(key, chunk, live, ages)
            yield True
        cold = tiering_policy.oldest_extents(blocks, self._excess(), ages)
        victims = _as_numbers(self._victims(live) - cold)
        leaving_memory = _as_numbers(cold)
        yield True
        whole: dict[tuple[int, int], list[np.ndarray]] = {}  # (unit to leave or -1, unit of the other place or -1)
        sparse: list[np.ndarray] = []
        to_disk: dict[int, list[np.ndarray]] = {}  # unit to leave
        left = PLAN_BLOCKS
        for key in sorted(blocks.chunks) if len(victims) or cold or self._may_copy() else ():
            chunk = blocks.chunks.get(key)
            if chunk is not None and left > 0:
                left -= self._collect_cold(key, chunk, leaving_memory, to_disk)
                left -= self._collect(key, chunk, victims, whole, sparse)
            yield True
        if left <= 0:
            self._nudges += 1  # the rest is for the next plan
        for leaving, found in to_disk.items():
            yield from self._offload(leaving, np.unique(np.concatenate(found)))
        if sparse:
            yield from self._repack(np.unique(np.concatenate(sparse)))
        for (leaving, other), found in whole.items():
            yield from self._move(leaving, other, np.unique(np.concatenate(found)))
        if blocks.leased >= before and self._offloads == offloads and left > 0:
            self._seen = (blocks.changes, *self._seen[1:])  # nothing was gained, nor is it before something happens

    def _shares(self, chunk: BlockChunk) -> tuple[np.ndarray, np.ndarray]:
        """Where the needed blocks of a chunk are, and how much of each is alive, 0 to 1."""
        columns = chunk.columns
        at = np.flatnonzero(columns["live"])
        widths = np.array([len(schema) if schema else 1 for schema in self.state.blocks.schemas.values], "i8")
        return at, columns["live"][at] / np.maximum(columns["rows"][at] * widths[columns["schema"][at]], 1)

    def _tally(self, key: int, chunk: BlockChunk, live: Extents, ages: dict[tuple[int, int], int]) -> None:
        """Adds up how many bytes are alive in each extent, and notes the oldest block in it. Chunks come in order."""
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
    def _codes(chunk: BlockChunk, at: np.ndarray) -> list[np.ndarray]:
        """The extents of the first and the second places, each as one number; -1 where there is none."""
        columns, second = chunk.columns, chunk.second
        codes = [(columns["unit"][at].astype("i8") << _UNIT) + columns["extent"][at]]
        if second:
            other = (second["unit"][at].astype("i8") << _UNIT) + second["extent"][at]
            codes.append(np.where(second["extent"][at] > 0, other, -1))
        return codes

    def _victims(self, live: Extents) -> set[tuple[int, int]]:
        """The extents that are to be emptied."""
        blocks, draining = self.state.blocks, self.state.draining
        chosen = {place for place in live if place[0] in draining and place in blocks.extents and self._healthy()}
        alive = sum(live.values())
        over = blocks.leased - 1.25 * alive - SPARE / 2
        if blocks.leased <= 1.5 * alive + SPARE and not self.short:
            return chosen
        least = 0.9 if self.short else 0.5
        units = (self.short or self.units) & self.units - draining
        candidates = []
        for place, size in live.items():
            extent = blocks.extents.get(place)
            if extent is not None and extent.closed and place[0] in units and size < least * extent.length:
                candidates.append((size / extent.length, size, extent.length, place))
        won: dict[int, list[float]] = {}
        picked: dict[int, list[tuple[int, int]]] = {}
        for _, size, length, place in sorted(candidates):
            if over <= 0 and not self.short:
                break
            over -= length - size
            sums = won.setdefault(place[0], [0.0, 0.0])
            sums[0] += length
            sums[1] += size
            picked.setdefault(place[0], []).append(place)
        for unit, (total, rest) in won.items():
            # only where it pays: what is left takes whole granules
            if total - math.ceil(1.1 * rest / _GRANULE) * _GRANULE >= max(_GRANULE, total / 8):
                chosen.update(picked[unit])
        return chosen

    def _healthy(self, tier: str = MEMORY) -> list[int]:
        """Units to which blocks may be brought, first of this tier and then of others, the emptiest first."""
        leased, first = self.state.blocks.leased_in, self.state.units_of(tier)
        return sorted(self.units - self.state.draining, key=lambda unit: (unit not in first, leased.get(unit, 0), unit))

    def _may_copy(self) -> bool:
        return self.replicas > 1 and len(self.units - self.state.draining) > 1

    def _collect(
        self,
        key: int,
        chunk: BlockChunk,
        victims: np.ndarray,
        whole: dict[tuple[int, int], list[np.ndarray]],
        sparse: list[np.ndarray],
    ) -> int:
        """Adds the blocks of a chunk that are to be moved; how many."""
        at, share = self._shares(chunk)
        codes = self._codes(chunk, at)
        first = codes[0]
        second = codes[1] if len(codes) > 1 else np.full(len(at), -1)
        hits = [np.isin(code, victims) for code in (first, second)]
        few = (hits[0] | hits[1]) & (share < SPARSE) & (chunk.columns["rows"][at] > 1)
        count = int(few.sum())
        if count:
            sparse.append(at[few] + (key << CHUNK_BITS))
        moves = [(hits[0] & ~few, first, second), (hits[1] & ~few, second, first)]
        if self._may_copy():
            moves.append(((second < 0) & ~hits[0] & ~few, np.full(len(at), -1), first))
        for chosen, leaving, other in moves:
            if not chosen.any():
                continue
            pairs = np.stack([leaving[chosen] >> _UNIT, other[chosen] >> _UNIT], axis=1)
            for pair in np.unique(pairs, axis=0).tolist():
                mine = at[chosen][(pairs == pair).all(axis=1)]
                # what stays in its unit goes together, wherever its other places are
                other_unit = -1 if pair[0] >= 0 and pair[0] not in self.state.draining else pair[1]
                whole.setdefault((pair[0], other_unit), []).append(mine + (key << CHUNK_BITS))
                count += len(mine)
        return count

    @staticmethod
    def _collect_cold(key: int, chunk: BlockChunk, cold: np.ndarray, to_disk: dict[int, list[np.ndarray]]) -> int:
        """Adds the blocks of a chunk that are to be moved to disk; how many."""
        if not len(cold):
            return 0
        at, count = np.flatnonzero(chunk.columns["live"]), 0
        for code in MigrationPlanner._codes(chunk, at):
            hits = np.isin(code, cold)
            for unit in np.unique(code[hits] >> _UNIT).tolist():
                mine = at[hits & (code >> _UNIT == unit)]
                to_disk.setdefault(unit, []).append(mine + (key << CHUNK_BITS))
                count += len(mine)
        return count

    # ------------------------------------------------------------ orders

    def _offload(self, leaving: int, numbers: np.ndarray) -> Generator[bool, None, None]:
        """Brings blocks (ascending) whole from a unit in memory to one on disk where their other place is not.

        One of the same node comes first.
        """
        blocks = self.state.blocks
        numbers = blocks.needed(numbers)
        for a, b in batches(blocks.column("nbytes", numbers), ORDER_BYTES, ORDER_BLOCKS):
            if not (yield from self._offload_some(leaving, numbers[a:b])):
                return

    def _offload_some(self, leaving: int, numbers: np.ndarray) -> Generator[bool, None, bool]:
        """The same for what one order takes; fewer at a time where that has no room. False: there is none."""
        blocks, home = self.state.blocks, self.state.units.get(leaving)
        if home is None:
            return False
        there, others = blocks.elsewhere(blocks.needed(numbers), leaving)
        for other in np.unique(others).tolist():
            disks = [unit for unit in self._healthy(DISK) if self._tier(unit) == DISK and unit != other]
            disks.sort(key=lambda unit: self.state.units[unit].node != home.node)
            some = blocks.needed(there[others == other])  # the orders before took their time
            if not disks or not len(some):
                continue
            to = disks[0]
            brought = yield from self._bring(leaving, to, some)
            if brought is not None:
                self._offloads += brought
                continue
            if len(some) == 1 or to not in self.units:
                return False
            for part in np.array_split(some, 2):
                if not (yield from self._offload_some(leaving, part)):
                    return False
        return True

    def _move(self, leaving: int, other: int, numbers: np.ndarray) -> Generator[bool, None, None]:
        """Brings blocks whole from unit `leaving` (-1: copies them) to where their other place is not."""
        blocks = self.state.blocks
        numbers = blocks.needed(numbers)
        for a, b in batches(blocks.column("nbytes", numbers), self._size(), ORDER_BLOCKS):
            there = blocks.needed(numbers[a:b])
            to = self._target(leaving, {other, leaving})
            if to is None or not len(there):
                continue
            if (yield from self._bring(leaving, to, there)) is None:
                return

    def _bring(self, leaving: int, to: int, numbers: np.ndarray) -> Generator[bool, None, int | None]:
        """One order, and its record; how many blocks were there still, None where the unit had no room or is gone."""
        reply = yield from self._ask(to, self.state.blocks.describe(numbers), [])
        if reply is None:
            return None
        offsets = np.frombuffer(reply.offsets, "<i8")
        kept = offsets >= 0
        self._records.append(
            r.BlocksMoved(
                to, reply.extent, reply.length, reply.generation, leaving, numbers[kept].tobytes(),
                offsets[kept].tobytes(),
            )
        )  # fmt: skip
        yield True
        return int(kept.sum())

    def _repack(self, numbers: np.ndarray) -> Generator[bool, None, None]:
        """Gives the rows that live in these blocks blocks of their own."""
        rows = SparseRows(numbers)
        for partition in list(self.state.partitions.values()):
            for key in sorted(partition.rows.chunks):
                chunk = partition.rows.chunks.get(key)
                if chunk is not None:
                    rows.look(partition.name, chunk)
                yield True
        for name in rows.partitions:
            found = rows.of(name)
            yield True
            for first in range(0, len(found), ORDER_REPACKS):
                yield from self._repack_some(name, found[first : first + ORDER_REPACKS])

    def _repack_some(self, name: str, found: list[SparseBlock]) -> Generator[bool, None, None]:
        """The same for a few blocks of one partition, by the units that they lie in."""
        blocks = self.state.blocks
        by_units: dict[tuple[int, ...], list[SparseBlock]] = {}
        for block in self._still(found):
            units = tuple(place.unit for place in blocks.places(block.number))
            by_units.setdefault(units, []).append(block)
        for units, group in by_units.items():
            some = self._still(group)  # orders for the units before took their time
            numbers = np.array([block.number for block in some], "i8")
            alive = np.array([len(block.slots) for block in some]) / np.maximum(blocks.column("rows", numbers), 1)
            for a, b in batches(blocks.column("nbytes", numbers) * alive, self._size(), ORDER_REPACKS):
                yield from self._repack_in(name, units, some[a:b])

    def _repack_in(self, name: str, units: tuple[int, ...], some: list[SparseBlock]) -> Generator[bool, None, None]:
        """One order for each of the units, one after the other, then one record."""
        blocks = self.state.blocks
        some = self._still(some)
        to = self._target(units[0], set(units))
        if to is None or not some:
            return
        described = blocks.describe(np.array([block.number for block in some], "i8"))
        repacks = [Repack(at, block.slots.tobytes(), block.fields) for at, block in enumerate(some)]
        reply = yield from self._ask(to, described, repacks)
        if reply is None:
            return
        made, closed = list(reply.repacked), [(to, reply.extent)]
        if len(units) > 1:
            copy = self._target(units[1], {to, *units})
            found = [block for block in made if block is not None]
            second = (yield from self._ask(copy, blocks_message(found), [])) if copy is not None and found else None
            made = [None] * len(made) if second is None else _with_copies(made, second)
            closed += [] if second is None else [(second.unit, second.extent)]
        pairs = [(block, new) for block, new in zip(some, made, strict=True) if new is not None]
        if not are_apart(self.state, [new for _, new in pairs]):  # something happened there since the first answer
            return
        if not pairs:
            self._records.append(r.ExtentsClosed(closed))
            yield True
            return
        repacked = r.RowsRepacked(
            name,
            self.state.next_block,
            [new for _, new in pairs],
            np.concatenate([block.rows for block, _ in pairs]).astype("<i8").tobytes(),
            np.concatenate([np.full(len(block.rows), block.number) for block, _ in pairs]).astype("<i8").tobytes(),
            np.concatenate([block.slots for block, _ in pairs]).astype("<i4").tobytes(),
        )
        self._made += len(pairs)
        self._records.append(r.BlocksMoved(to, reply.extent, reply.length, reply.generation, -1, b"", b"", [repacked]))
        yield True

    def _still(self, found: list[SparseBlock]) -> list[SparseBlock]:
        """Those that some live row needs."""
        there = set(self.state.blocks.needed(np.array([block.number for block in found], "i8")).tolist())
        return [block for block in found if block.number in there]

    def _target(self, unit: int, taken: set[int]) -> int | None:
        """Where blocks of this unit (-1: copies) are brought: to itself, or to the emptiest that is not taken.

        What is on disk, or whose other place is, stays there where it can; what is in memory goes to disk where no
        memory is left.
        """
        if unit in self.units and unit not in self.state.draining:
            return unit
        tier = DISK if any(self._tier(other) == DISK for other in {unit, *taken}) else MEMORY
        free = [other for other in self._healthy(tier) if other not in taken]
        over = self._excess()
        return next((other for other in free if other not in over), free[0] if free else None)

    def _tier(self, unit: int) -> str:
        known = self.state.units.get(unit)
        return MEMORY if known is None else known.tier

    def _size(self) -> int:
        return SHORT_ORDER_BYTES if self.short else ORDER_BYTES

    def _ask(self, unit: int, blocks: Blocks, repacks: list[Repack]) -> Generator[bool, None, BlocksMovedReport | None]:
        """Has a unit copy blocks; its answer, None where it had no room or is gone."""
        if unit not in self.units:
            return None
        self._number = max(self._number, int(self._now * 1e6)) + 1  # no number of a controller before this one
        self._job, self._reply = (self._number, unit), None
        lie_in = set(np.frombuffer(blocks.unit, "<i4").tolist())
        node = self.state.units[unit].node
        lie_in_units = [info for number, info in self.state.units.items() if number in lie_in]
        arenas = {info.unit: info.arena for info in lie_in_units if info.node == node}
        remotes = {info.unit: info.remote for info in lie_in_units if info.node != node}
        self._asked = Move(self._number, blocks, arenas, repacks, remotes)
        self._orders.append((unit, self._asked))
        while self._job is not None:
            yield False
        reply = self._reply
        return reply if reply is not None and reply.extent else None


def _as_numbers(extents: set[tuple[int, int]]) -> np.ndarray:
    return np.array(sorted((unit << _UNIT) + extent for unit, extent in extents), "i8")


def _with_copies(made: list[NewBlock | None], reply: BlocksMovedReport) -> list[NewBlock | None]:
    """Blocks with a second place, where a unit has copied them; None for those that it could not."""
    offsets = iter(np.frombuffer(reply.offsets, "<i8").tolist())
    out: list[NewBlock | None] = []
    for block in made:
        offset = -1 if block is None else next(offsets)
        if block is None or offset < 0:
            out.append(None)
            continue
        place = BlockLocation(reply.unit, reply.extent, offset, reply.generation, reply.length)
        out.append(msgspec.structs.replace(block, copies=[place]))
    return out
