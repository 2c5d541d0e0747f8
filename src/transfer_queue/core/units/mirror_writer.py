"""Copies every published block to the mirror, the oldest first, and delays the replies to puts that are too far ahead.

A *mirror* is a storage unit on disk (`messages.descriptors.MIRROR`) that has a copy of every block. A put writes into
memory and is published as without a mirror. The blocks that the mirror does not have yet are *behind*. One order at a
time names the oldest of them; the unit copies them into one extent, waits until the disk has them, and reports them
(`messages.reports.unit_reports.BlocksMovedReport`). The report becomes a record, so a location in the mirror means that
the bytes are on disk.

The reply to a put is held while its blocks are behind and `MaxLag` is exceeded. Thus what was acknowledged is never
further behind than that, and a mirror that is slow or full makes puts wait. With `MaxLag(-1, 0)` every put waits for
its own blocks; those of all puts that wait are copied and written through by the same order.

Under Ray each term of the controller (`journal.terms`) has a mirror of its own. Those of earlier terms are *retired*:
what is in them is on disk, and thus not behind, but nothing is written there any more. They are drained
(`core.units.migration_planner`) into the mirror of this term, and then removed.

Nothing here is part of the state. What is behind follows from the locations of the blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from transfer_queue.core.context import Context, observes
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.state.wait_queues import RequestKey
from transfer_queue.core.tables.blocks import CHUNK, CHUNK_BITS
from transfer_queue.core.units.location_checks import close_reported_extents
from transfer_queue.core.units.mover import PlanSteps, Policy
from transfer_queue.messages.reports.progress import MirrorProgress

ORDER_BYTES = 32 << 20
"""Bytes of one order, which the unit writes one after the other and then writes through at once."""
ORDER_BLOCKS = 4096
GATHER_SECONDS = 1.0
"""Seconds for which blocks are collected for an order if no reply is held; a quarter of `MaxLag.seconds` if less."""
PAUSE = 0.25
"""Seconds until the next order after one that copied nothing."""


@dataclass(slots=True)
class _HeldReply:
    """A reply that waits for the mirror."""

    block: int
    """The newest block of the put."""
    send: Send | None
    """None if its connection has ended."""


class MirrorWriter(Policy):
    """Knows what the mirror does not have yet, makes the orders for it, and holds replies."""

    def __init__(self, context: Context) -> None:
        """Begin with what the state has in no mirror."""
        super().__init__(context)
        lag = context.config.max_lag
        assert lag is not None
        self.lag = lag
        self.behind_bytes = 0
        """The bytes of the blocks that no mirror has."""
        self.copied_bytes = 0
        """The bytes that were copied since the controller started."""
        self.is_full = False
        """Whether the mirror had no space for the last order."""
        self._behind: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """Number -> (bytes, time of publication) of the blocks that no mirror has, ascending.

        Blocks that no row needs any more leave it when it is their turn, or with `_prune`.
        """
        self.held: OrderedDict[RequestKey, _HeldReply] = OrderedDict()
        """Replies to puts that the mirror is too far behind to confirm."""
        self._limit = ORDER_BYTES
        """Bytes of the next order. It is reduced while the mirror has little space."""
        self._retry = 0.0
        """The earliest time of the next order."""
        self._pruned = -1, 0.0
        """`BlockTable.changes` and the time at the last `_prune`."""
        self._before_start = 0
        """The newest block that an earlier controller has published."""
        self._next = 1
        """The first block that `note_new_blocks` has not seen."""
        self.rescan()

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return context.config.max_lag is not None

    # ------------------------------------------------------------ what is behind

    @observes(r.SamplesPut, r.BlocksMoved)
    def note_new_blocks(self, record: r.AnyRecord) -> None:
        """Note the blocks that were made since the last call."""
        now = self.context.now
        for number in range(self._next, self.state.next_block):
            chunk, at = self.state.blocks.chunks.get(number >> CHUNK_BITS), number & (CHUNK - 1)
            if chunk is None or at >= chunk.capacity or not chunk.columns["live"][at]:
                continue  # all its values were replaced or cleared at once
            if not any(place.unit in self.state.mirrors for place in chunk.places(at)):
                nbytes = int(chunk.columns["nbytes"][at])
                self._behind[number] = nbytes, now
                self.behind_bytes += nbytes
        self._next = self.state.next_block

    @observes(r.StateLoaded, r.StateMerged, r.UnitLost, r.ExtentsLost)
    def rescan(self, record: r.AnyRecord | None = None) -> None:
        """Find again which blocks no mirror has, because locations were lost, or another state was loaded."""
        if record is None or type(record) is r.StateLoaded:  # the blocks of this controller stay in a merged state
            self._before_start = self.state.next_block - 1
        before, now = self._behind, self.context.now
        self._behind = OrderedDict(
            (number, (nbytes, before.get(number, (0, now))[1])) for number, nbytes in self._find_behind()
        )
        self.behind_bytes = sum(nbytes for nbytes, _ in self._behind.values())
        self._next = self.state.next_block

    def _find_behind(self) -> Iterator[tuple[int, int]]:
        """Iterate over the number and the bytes of each needed block that no mirror has, in ascending order."""
        blocks = self.state.blocks
        for key in sorted(blocks.chunks):
            numbers = self._in_no_mirror(np.flatnonzero(blocks.chunks[key].columns["live"]) + (key << CHUNK_BITS))
            yield from zip(numbers.tolist(), blocks.column("nbytes", numbers).tolist(), strict=True)

    def lag_seconds(self) -> float:
        """Return for how long the oldest block that no mirror has is published; 0.0 if there is none."""
        return max(0.0, self.context.now - next(iter(self._behind.values()))[1]) if self._behind else 0.0

    @observes(r.BlocksMoved)
    def note_moved(self, record: r.BlocksMoved) -> None:
        """Note that blocks have been copied, if it was into a mirror."""
        if record.unit in self.state.mirrors:
            before = self.behind_bytes
            self._still_behind(np.frombuffer(record.blocks, "<i8"))
            self.copied_bytes += before - self.behind_bytes

    def _in_no_mirror(self, numbers: np.ndarray) -> np.ndarray:
        """Return those of these needed blocks that no mirror has."""
        units = np.stack(self.state.blocks.units_of(numbers))
        return numbers[~np.isin(units, list(self.state.mirrors)).any(axis=0)]

    def _still_behind(self, numbers: np.ndarray) -> np.ndarray:
        """Return those of these blocks that are behind, and forget the others.

        Only the locations decide: that the mirror has carried out an order does not mean that they were entered.
        """
        behind = self._in_no_mirror(self.state.blocks.needed_of(numbers))
        for number in np.setdiff1d(numbers, behind).tolist():
            nbytes, _ = self._behind.pop(number, (0, 0.0))
            self.behind_bytes -= nbytes
        return behind

    def _prune(self) -> None:
        """Forget blocks that no row needs any more, since replies are held that they should not delay."""
        changes, before, now = self.state.blocks.changes, self._pruned, self.context.now
        if changes == before[0] or (before[0] >= 0 and now < before[1] + PAUSE / 2):
            return
        self._pruned = changes, now
        self._still_behind(np.fromiter(self._behind, "i8", len(self._behind)))

    def check(self) -> None:
        """Find again what is behind. Raises AssertionError if this object differs."""
        behind = {number for number, _ in self._find_behind()}
        missing = behind - self._behind.keys()
        assert not missing, f"blocks {sorted(missing)} are in no mirror, and not known to be behind"
        assert self.behind_bytes == sum(nbytes for nbytes, _ in self._behind.values()), "bytes behind"
        assert list(self._behind) == sorted(self._behind), "order of the blocks that are behind"
        needed = self.state.blocks.needed_of(np.fromiter(self._behind, "i8", len(self._behind))).tolist()
        assert set(needed) == behind, "blocks of mirrors that are said to be behind"

    # ------------------------------------------------------------ replies

    def is_covered(self, block: int) -> bool:
        """Whether the reply to a put with blocks up to this number may be sent."""
        lag = self.lag
        if not self._behind or next(iter(self._behind)) > block:
            return True
        return self.behind_bytes <= lag.nbytes and self.lag_seconds() <= lag.seconds

    def holds_reply(self, client: str, send: Send, again: bool) -> bool:
        """See `CoreService.holds_reply`.

        After a restart of the controller it is not known to which put a reply belongs, so it waits for all puts before
        the restart.
        """
        held = self.held.get((client, send.sequence))
        if held is not None:
            held.send = send
            return True
        block = self._before_start if again else self.state.next_block - 1
        if self.is_covered(block):
            return False
        self.held[client, send.sequence] = _HeldReply(block, send)
        return True

    def on_connection_ended(self, client: str, peer: int) -> None:
        """See `CoreService.on_connection_ended`. Its replies stay held, for a client that asks again."""
        for held in self.held.values():
            if held.send is not None and held.send.peer == peer:
                held.send = None

    def after_event(self) -> list[Effect]:
        """Return the held replies that may be sent now."""
        if not self.held:
            return []
        self._prune()
        ready = [key for key, held in self.held.items() if self.is_covered(held.block)]
        sent = [self.held.pop(key).send for key in ready]
        return [send for send in sent if send is not None]

    def progress(self) -> MirrorProgress:
        """Return what status shows."""
        mirrors, blocks = self.state.mirrors, self.state.blocks
        in_unit = Counter[int]()
        for stored in blocks.stored.values():
            in_unit.update(stored)
        return MirrorProgress(
            stored=sum(in_unit[unit] for unit in mirrors),
            leased=sum(blocks.leased_in.get(unit, 0) for unit in mirrors),
            behind_bytes=self.behind_bytes,
            behind_seconds=self.lag_seconds(),
            most_bytes=self.lag.nbytes,
            most_seconds=self.lag.seconds,
            waiting=len(self.held),
            full=self.is_full,
            connected=bool(self.mover.present_mirrors()),
            retired=sum(in_unit[unit] for unit in mirrors & self.state.draining),
        )

    # ------------------------------------------------------------ orders

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        if self._steps is not None:
            return None if self.is_waiting() else 0.0
        if not self._behind or not self.mover.present_mirrors():
            return None
        oldest = next(iter(self._behind.values()))[1]
        gather = min(GATHER_SECONDS, self.lag.seconds / 4)
        wait = 0.0 if self.held or self.behind_bytes >= self._limit else oldest + gather
        return max(self._retry, wait)

    def plan(self) -> PlanSteps[Sequence[r.AnyRecord]]:
        """See `Policy.plan`. A plan has one order. If the report is not valid, the blocks are ordered again."""
        mirror = min(self.mover.present_mirrors(), default=-1)
        if not (yield from self.await_turn(mirror)):
            return []
        numbers = self._oldest()
        if not len(numbers):
            self.leave()
            return []
        blocks = self.state.blocks.describe(numbers)
        report = yield from self.carry_out(blocks)
        if report is None:
            return []
        now = self.context.now
        self._retry = now + PAUSE  # until the report has shown that blocks were copied
        if not report.extent:
            self.is_full = not report.failed
            self.mover.set_waiting_writers(mirror, self.is_full)  # its mostly dead extents are compacted meanwhile
            if self.is_full and len(numbers) > 1:
                self._limit, self._retry = int(np.frombuffer(blocks.nbytes, "<i8").sum()) // 2, now
            return []
        offsets = np.frombuffer(report.offsets, "<i8")
        if (offsets < 0).all():
            return close_reported_extents(self.state, mirror, [report.extent])
        self.mover.set_waiting_writers(mirror, False)
        self.is_full, self._limit, self._retry = False, ORDER_BYTES, now
        needed = self.state.blocks.needed_of(numbers[offsets >= 0])
        _, second = self.state.blocks.units_of(needed)
        # a block has two locations at most, so the mirror takes the place of a second one; the others are ordered again
        left = int(second[0]) if len(second) else -1
        done = np.setdiff1d(numbers[offsets >= 0], needed[second != left])
        to = offsets[np.searchsorted(numbers, done)].tobytes()
        return [r.BlocksMoved(mirror, report.extent, report.length, report.generation, left, done.tobytes(), to)]

    def _oldest(self) -> np.ndarray:
        """Return the oldest blocks that are behind, for one order."""
        numbers, total = list[int](), 0
        for number, (nbytes, _) in self._behind.items():
            if numbers and (total + nbytes > self._limit or len(numbers) == ORDER_BLOCKS):
                break
            numbers.append(number)
            total += nbytes
        return self._still_behind(np.array(numbers, "i8"))
