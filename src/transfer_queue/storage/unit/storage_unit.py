"""The storage unit: leases extents of its pool to writers, and takes back those that are certainly unused.

Its pool (`storage.unit.extent_pool`) is an arena or an external store. The unit owns the slots and the table of what is
leased. It does not know the content of an extent or its readers; the controller does, and calls `free` when a closed
extent contains no live block any more.
No sockets and no clock: requests and the time come in, effects go out (`storage.unit.unit_effects`).

The states of a slot:

    opening    OpenSlot was answered. The writer may not have locked the slot file yet, so a free lock proves nothing.
               The first lease ends this state, and is refused unless the lock is held.
               If the last connection ends in this state and the lock is free, the slot is withdrawn without a report.
    in use     The writer holds the lock, which every lease checks.
    suspect    Its last connection ended and the lock is still held. It is checked again every PROBE_INTERVAL;
               any request of the writer makes it in use again. The slot of a writer that is stopped forever stays so.
    gone       The unit was granted the lock. The controller gets WriterGone, and the extents stay leased until it has
               freed them.

A lease that cannot be met and may wait is parked. Parked leases are met in order of arrival, except that one that needs
too much space at the moment does not delay those behind it. For parked leases, the unit recalls the unused extents of
other writers (`storage.unit.extent_recall`).

A client numbers its requests over all its connections, and repeats a request with the same number after a connection
broke: a parked lease then waits for the new connection, and a lease that was answered gets the same reply again. The
copy on the abandoned connection may also arrive after the other one was answered. No copy leases space once more, since
nobody would use or return it.

The unit records what it grants in the files of its pool and slots before it replies. So after it was killed, the next
unit begins with the same extents, and with all slots as suspects.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from transfer_queue.errors import (
    CapacityError,
    InvalidArgumentError,
    ProtocolError,
    TransferQueueError,
    UnitLostError,
    with_advice,
)
from transfer_queue.messages import storage
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Cancel
from transfer_queue.messages.descriptors import MOVER, STORE
from transfer_queue.messages.envelopes import AnyRequest
from transfer_queue.messages.reports import store_reports, unit_reports
from transfer_queue.messages.storage import lease_proof
from transfer_queue.storage.arena.block_copier import MOVER_SLOT
from transfer_queue.storage.arena.extent_table import LeasedExtent
from transfer_queue.storage.arena.writer_locks import Offer, WriterSlots
from transfer_queue.storage.unit.extent_pool import BlockCopy, ExtentPool
from transfer_queue.storage.unit.extent_recall import Recalls
from transfer_queue.storage.unit.remote_block_cache import RemoteBlockCache
from transfer_queue.storage.unit.unit_effects import (
    Effect,
    Report,
    SendReply,
    cancelled_failure,
    draining_message,
    no_capacity,
)
from transfer_queue.wire.buffers.copies import U8

PROBE_INTERVAL = 0.25
"""Seconds between two checks of the locks of suspects."""
VIEWS_INTERVAL = 0.25
"""Seconds between two checks whether readers still have views of freed extents."""
SHORT_VIEWS_INTERVAL = 0.02
"""The same in seconds while leases wait for space."""
RECENT_ANSWERS = 64
"""Answers of one slot that are kept although the writer has acknowledged them: it may still cancel their requests."""
MAX_ANSWERS = 4096
"""The largest number of answers of one slot that are kept, also of those that the writer has not acknowledged."""
NAMING_A_UNIT = (
    storage.LeaseExtent, storage.OpenSlot, storage.ReturnExtent, storage.ReadPieces, storage.WriteBytes,
    unit_reports.BlockMissing,
)  # fmt: skip
"""The requests that name the unit for which they are."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a unit."""

    slots: int = 4096
    """Writers that are registered and not known to be gone."""
    extents: int = 1 << 20
    """Extents of one slot."""
    parked: int = 4096
    """Parked leases of all writers."""


@dataclass(slots=True)
class _UnitSlot:
    number: int
    writer: str
    path: str
    is_opening: bool = True
    remote: bool = False
    """The writer is on another node and holds no lock: it is gone when its last connection ends."""
    peers: set[int] = field(default_factory=set)
    """All open connections on which this writer has made a request."""
    acknowledged: int = 0
    """The writer does not need the replies to requests up to this sequence any more."""
    answers: OrderedDict[int, int | Failure] = field(default_factory=OrderedDict)
    """Sequence -> the extent that was granted, or the refusal, of the latest requests for a lease.

    Their replies may be lost, their requests cancelled, and copies of them may still arrive.
    """

    def note(self, sequence: int, answer: int | Failure) -> None:
        """Note the answer to a request for a lease."""
        self.answers[sequence] = answer
        while len(self.answers) > RECENT_ANSWERS:
            if len(self.answers) <= MAX_ANSWERS and next(iter(self.answers)) > self.acknowledged:
                return
            self.answers.popitem(last=False)


@dataclass(slots=True)
class _WaitingLease:
    slot: _UnitSlot
    peer: int
    sequence: int
    nbytes: int
    want: int
    since: float
    deadline: float


class StorageUnit:
    """One storage unit. `number` is its number in the system, and `key` the system's key, which proves its leases."""

    def __init__(
        self, number: int, pool: ExtentPool, slots: WriterSlots, limits: Limits = Limits(), key: bytes = b""
    ) -> None:
        self.number = number
        self.pool = pool
        self.table = pool.table
        self.counters = defaultdict[str, float](float)
        """Name -> what the unit counted, for `metrics.samples.counter_of_units`."""
        self._files = slots
        self._limits = limits
        self._key = key
        self._slots: dict[int, _UnitSlot] = {}
        """Number -> slot, for exactly the slots that are opening, in use or suspect."""
        self._writers: dict[str, _UnitSlot] = {}
        """Writer -> its slot; exactly the values of `_slots`."""
        self._remote: dict[str, _UnitSlot] = {}
        """Client id -> the slot of a writer on another node."""
        self._peers: dict[int, _UnitSlot] = {}
        """Connection -> the slot whose `peers` it is in."""
        self._suspects: dict[int, _UnitSlot] = {}
        """The slots whose last connection ended and whose lock was held at the last check."""
        self._probe_at = math.inf
        """When suspects are checked next; infinity if there are none."""
        self._dead: dict[int, str] = {}
        """Slot -> writer, for the dead writers whose extents are not all freed."""
        self._parked: dict[tuple[int, int], _WaitingLease] = {}
        """(slot, sequence) -> parked leases in order of arrival. None of them can be met at the moment."""
        self._recalls = Recalls(number, pool, slots)
        self._kept = RemoteBlockCache(pool, self._lease_own, self._release_all)
        self.draining = False
        self._moving: BlockCopy | None = None
        self._freed = 0
        """How often the controller has freed extents."""
        self._viewed: set[int] = set()
        """The leased extents that are free when no reader has a view of them any more."""
        self._views_checked = 0.0
        """When the extents of `_viewed` were checked last."""
        self._confirm: list[int] = []
        """Extents that were freed on the controller's order, and are not confirmed to it yet."""
        self._not_freed = ""
        """Why extents could not be freed that the controller ordered to free; "" if all were freed."""
        self._move_number = 0
        """The number of the current move."""
        self._reported: tuple[list[str], int] = [], 0
        """The waiting writers, and `_freed`, as last reported to the controller."""
        self._has_store_changed = False
        """The store may have lost blocks, and this is not reported yet."""
        pool.attach(self._serve, self._find_missing, self.note_store_change)
        self._take_up()

    def _take_up(self) -> None:
        """Restore the slots and grants of the unit before this one, if there was one."""
        for number, known in self._files.known_slots().items():
            count = self.table.count(number)
            if known.is_dead:
                if count:
                    self._dead[number] = known.writer
                else:
                    self._files.forget(number)
                continue
            slot = _UnitSlot(number, known.writer, self._files.path(number), is_opening=not count)
            for extent in map(self.table.get, self.table.extents_of_slot(number)[-RECENT_ANSWERS:]):
                if extent is not None:
                    slot.note(extent.sequence, extent.number)
            self._slots[number] = self._writers[known.writer] = self._suspects[number] = slot
        if self._suspects:
            self._probe_at = 0.0

    # ------------------------------------------------------------ events

    def handle(
        self,
        writer: str,
        peer: int,
        sequence: int,
        body: AnyRequest,
        now: float,
        payload: memoryview | None = None,
        acknowledged: int = 0,
    ) -> list[Effect]:
        """Handle a request of `writer`, which the connection `peer` has authenticated. Never raises for any request.

        For `sequence` and `acknowledged` see `RequestEnvelope`. The numbers of connections ascend.
        """
        slot = self._note_connection(writer, peer)
        if slot is not None:
            slot.acknowledged = max(slot.acknowledged, acknowledged)
        try:
            self._check_unit(body)
            if isinstance(body, storage.LeaseExtent):
                return self._lease(writer, peer, sequence, body, now)
            if isinstance(body, storage.ReturnExtent):
                return self._return(writer, peer, sequence, body)
            if isinstance(body, Cancel):
                return self._cancel(writer, peer, sequence, body)
            if isinstance(body, storage.OpenSlot):
                return [SendReply(peer, sequence, self._open(writer, peer, body))]
            if isinstance(body, storage.ReadPieces):
                views = self.pool.read(body)
                return [SendReply(peer, sequence, Done(views is not None), views or ())]
            if isinstance(body, storage.WriteBytes):
                slot = self._remote.get(writer)
                is_own = slot is not None and slot.number == body.slot
                self.pool.write(self.pool.table.get(body.extent) if is_own else None, body, payload)
                return [SendReply(peer, sequence, Done())]
            if isinstance(body, unit_reports.BlockMissing):
                if len(body.extents) % 8:
                    raise ProtocolError("the extents of a BlockMissing must be whole numbers of 8 bytes")
                return self._find_missing(np.frombuffer(body.extents, "<i8").tolist(), (peer, sequence), body)
            if isinstance(body, storage.CacheBlocks):
                return self._kept.handle_request(writer, peer, sequence, body, now)
            if isinstance(body, storage.UnitStatus):
                return [SendReply(peer, sequence, self.pool.status())]
            raise ProtocolError(f"a storage unit does not answer {type(body).__name__}; ask the controller")
        except TransferQueueError as error:
            return [SendReply(peer, sequence, Failure(type(error).__name__, str(error)))]
        except OSError as error:
            text = f"storage unit {self.number} failed to serve {type(body).__name__}: "
            return [SendReply(peer, sequence, Failure("TransferQueueError", text + with_advice(error, "see its log")))]

    def on_disconnect(self, peer: int, now: float) -> list[Effect]:
        """Drop the parked leases of a closed connection, and check a writer that has no other connection."""
        self._kept.drop_requests(peer)
        slot = self._peers.pop(peer, None)
        if slot is None:
            return []
        for key in [key for key, parked in self._parked.items() if parked.peer == peer]:
            del self._parked[key]
        slot.peers.discard(peer)
        if slot.peers:
            return []
        self._suspects[slot.number] = slot
        self._probe_at = min(self._probe_at, now + PROBE_INTERVAL)
        return self._probe(slot)

    def free(self, extents: Sequence[int]) -> list[Effect]:
        """Free these extents, which contain nothing live according to the controller.

        Numbers that are not leased are skipped: they were freed before, or are a client's mistake.
        """
        self._freed += 1
        for number in extents:
            try:
                self._release_all([number])
                if number not in self._viewed:
                    self._confirm.append(number)
            except Exception as error:  # continue with the others, and do not try this one again
                self._not_freed = f"extent {number} could not be freed: {error!r}"
        return self._serve()

    def take_reports(self) -> list[Report]:
        """Return reports on extents that were freed or recalled, and on the store. Call it after every event."""
        reports = [Report(recalled) for recalled in self._recalls.take_reports()]
        if self._has_store_changed:
            self._has_store_changed = False
            reports.append(Report(store_reports.StoreChanged(self.number, self.pool.next_extent)))
        if self._confirm or self._not_freed:
            extents, self._confirm = self._confirm, []
            reason, self._not_freed = self._not_freed, ""
            reports.append(
                Report(unit_reports.ExtentsFreedReport(self.number, np.array(extents, "<i8").tobytes(), reason))
            )
        return reports

    def move(self, order: unit_reports.Move, brought: Mapping[int, U8] | None = None) -> list[Effect]:
        """Copy blocks here on the controller's order. A new order replaces the one before; `tick` does the work.

        `brought` has the bytes of blocks on other nodes, see `block_copier.BlockCopier`.
        """
        self.forget_move()
        self._move_number = order.number
        self._moving = self.pool.begin_move(self.number, order, self._lease_own, brought)
        return []

    def end_fetch(self, fetch: int, good: set[int], now: float) -> list[Effect]:
        """End a fetch. `good` has the numbers of the blocks that were fetched."""
        return [*self._kept.end_fetch(fetch, good, now), *self._serve()]

    def failed_move_report(self, number: int, reason: str) -> Report:
        """Return the report of a move that cannot be carried out."""
        return Report(unit_reports.BlocksMovedReport(number, self.number, 0, 0, 0, b"", [], reason))

    def forget_move(self) -> None:
        """Drop the current move, because its controller is gone, and free its extent."""
        if self._moving is not None:
            self._moving.close()
            if self._moving.extent is not None:
                self._release_all([self._moving.extent.number])
        self._moving = None

    def set_draining(self, draining: bool) -> list[Effect]:
        """Set whether the controller drains this unit. While it does, writers get no space."""
        self.draining = draining
        return self._refuse_all(Failure("CapacityError", draining_message(self.number))) if draining else []

    def _lease_own(self, nbytes: int) -> LeasedExtent | None:
        """Lease space for copies that the unit itself makes."""
        return self.pool.lease(MOVER_SLOT, nbytes, 0)

    def _continue_move(self) -> list[Effect]:
        """Do a step of the current move."""
        assert self._moving is not None
        try:
            answer = self._moving.step()
        except Exception as error:
            self.forget_move()
            return [self.failed_move_report(self._move_number, repr(error))]
        if answer is None:
            return []
        self._moving.close()
        self._moving = None
        return self.pool.settle(lambda failed: self._end_move(answer, failed)) if answer.extent else [Report(answer)]

    def _end_move(self, answer: unit_reports.BlocksMovedReport, failed: str) -> list[Effect]:
        if not failed:
            return [Report(answer)]
        self._release_all([answer.extent])
        return [self.failed_move_report(answer.move, failed)]

    def refuse(self, message: str) -> list[Effect]:
        """Refuse all waiting leases, because the controller has found a deadlock; recall unused space first."""
        served = self._give_up_extents(self._recalls.recall_all(self._with_extents()))
        return [*served, *self._refuse_all(Failure("DeadlockError", message))]

    def _refuse_all(self, failure: Failure) -> list[Effect]:
        refused: list[Effect] = [self._refuse(parked, failure) for parked in self._parked.values()]
        self._parked.clear()
        return refused

    def take_shortage_report(self) -> list[Effect]:
        """Return a report on the writers that wait for space, if it has changed. Call it after every event."""
        writers = list(dict.fromkeys(parked.slot.writer for parked in self._parked.values()))
        if (not writers and not self._reported[0]) or self._reported == (writers, self._freed):
            return []
        self._reported = writers, self._freed
        return [Report(unit_reports.SpaceShortReport(self.number, writers, self._freed))]

    def next_deadline(self) -> float | None:
        """Return when `tick` must be called next; None if it need not be called."""
        if self._moving is not None:
            return 0.0
        due = min((parked.deadline for parked in self._parked.values()), default=math.inf)
        due = min(due, self._probe_at, self._recalls.next_deadline(bool(self._parked)))
        if self._viewed:
            due = min(due, self._views_checked + (SHORT_VIEWS_INTERVAL if self._parked else VIEWS_INTERVAL))
        for other in (self.pool.next_deadline(), self._kept.next_deadline()):
            due = due if other is None else min(due, other)
        return None if due == math.inf else due

    def tick(self, now: float) -> list[Effect]:
        """End expired waits, check suspects that are due, and continue with the current move."""
        effects: list[Effect] = [] if self._moving is None else self._continue_move()
        if self.pool.begin_period(now):
            self._recalls.begin_period(self._with_extents())
        self._kept.free_idle(now)
        effects += self._free_unheld(now, SHORT_VIEWS_INTERVAL if self._parked else VIEWS_INTERVAL)
        effects += self._recall(now)
        if any(parked.deadline <= now for parked in self._parked.values()):
            effects += self._serve()  # other programs of this machine may have freed space in the file system
        for key, parked in list(self._parked.items()):
            if parked.deadline <= now:
                del self._parked[key]
                effects.append(self._refusal(parked, now))
        if self._probe_at <= now:
            self._probe_at = now + PROBE_INTERVAL
            for slot in list(self._suspects.values()):
                effects += self._probe(slot)
        return effects

    def work_ahead(self) -> bool:
        """Do a few milliseconds of work in advance. Returns whether there is more. Call it when the unit is idle."""
        return self.pool.work_ahead(bool(self._parked))

    def register(self) -> bytes:
        """Prepare to register with a controller that knows none of the earlier reports.

        Returns the leased extents (i8). Once it is registered, send `repeat_reports`.
        """
        self._freed, self._reported, self._confirm = 0, ([], 0), []
        return np.array([extent.number for extent in self.table.leased_extents()], "<i8").tobytes()

    def repeat_reports(self) -> list[Report]:
        """Return the reports that a controller needs after the unit has registered with it."""
        own = [self._report(MOVER_SLOT, MOVER)] if self.table.count(MOVER_SLOT) else []
        dead = [self._report(number, writer) for number, writer in self._dead.items()]
        if self.pool.status().tier == STORE and self.table.leased:
            self.note_store_change()  # while it was not registered, the store may have lost blocks unnoticed
        return [*own, *map(Report, self._recalls.repeat_reports()), *dead]

    def check(self) -> None:
        """Recount everything. Raises AssertionError if the unit contradicts itself."""
        self.pool.check()
        assert {slot.writer: slot.number for slot in self._slots.values()} == {
            writer: slot.number for writer, slot in self._writers.items()
        }, "index of writers"
        assert {peer: slot.number for slot in self._slots.values() for peer in slot.peers} == {
            peer: slot.number for peer, slot in self._peers.items()
        }, "index of connections"
        assert set(self._suspects) == {slot.number for slot in self._slots.values() if not slot.peers}, "suspects"
        assert (self._probe_at == math.inf) == (not self._suspects), "time of the next probe"
        assert not set(self._dead) & set(self._slots), "slots both gone and in use"
        assert all(self.table.count(number) for number in self._dead), "gone without extents"
        assert all(parked.slot.number in self._slots for parked in self._parked.values()), "parked for a gone slot"
        assert len(self._parked) <= self._limits.parked, "parked leases"
        assert all(self.table.get(number) for number in self._viewed), "viewed extents that are not leased"

    # ------------------------------------------------------------ requests

    def _check_unit(self, body: AnyRequest) -> None:
        """Raise if the request is for the previous unit at this address, whose arena is lost."""
        meant = body.unit if isinstance(body, NAMING_A_UNIT) else -1
        if meant not in (-1, self.number):
            raise UnitLostError(f"storage unit {meant} is lost; storage unit {self.number} has replaced it")

    def _open(self, writer: str, peer: int, body: storage.OpenSlot) -> storage.SlotReply:
        if body.writer != writer and not (body.remote and body.writer.startswith(f"{writer}/")):
            raise ProtocolError(
                f"{writer!r} requested a slot for {body.writer!r}; a writer may only request its own slot"
            )
        slot = self._writers.get(body.writer)
        if slot is None:
            if len(self._slots) >= self._limits.slots:
                raise CapacityError(f"no capacity for another writer: storage unit {self.number} has "
                                    f"{len(self._slots)} writers; end some clients")  # fmt: skip
            number = self.pool.take_slot()
            slot = _UnitSlot(number, body.writer, self._files.make(number, body.writer), remote=body.remote)
            self._slots[slot.number] = self._writers[body.writer] = slot
            if body.remote:
                self._remote[writer] = slot
            self._note_connection(writer, peer)
        return storage.SlotReply(slot.number, "" if slot.remote else slot.path)

    def _lease(self, writer: str, peer: int, sequence: int, body: storage.LeaseExtent, now: float) -> list[Effect]:
        slot = self._slot(writer, body.slot)
        parked = self._parked.get((slot.number, sequence))
        if parked is not None:
            parked.peer = max(parked.peer, peer)
            return []
        answer = self._answer_before(slot, sequence)
        if answer is not None:
            return [SendReply(peer, sequence, answer)]
        try:
            return self._lease_new(slot, writer, peer, sequence, body, now)
        except TransferQueueError as error:
            slot.note(sequence, Failure(type(error).__name__, str(error)))
            raise

    def _lease_new(
        self, slot: _UnitSlot, writer: str, peer: int, sequence: int, body: storage.LeaseExtent, now: float
    ) -> list[Effect]:
        """Grant, park or refuse a lease whose request has not arrived before."""
        if self.draining:
            raise CapacityError(draining_message(self.number))
        if body.nbytes <= 0 or body.want < body.nbytes:
            raise InvalidArgumentError(f"nbytes of a lease must be at least 1 and at most want, got nbytes "
                                       f"{body.nbytes} and want {body.want}")  # fmt: skip
        if body.wait is not None and math.isnan(body.wait):
            raise InvalidArgumentError("wait of a lease must be a number of seconds or None, got nan")
        want = min(body.want, self.pool.capacity)
        waits = max(0.0, body.wait or 0.0)
        parked = _WaitingLease(slot, peer, sequence, body.nbytes, want, now, now + waits)
        if self.pool.space_for(body.nbytes) > self.pool.capacity:
            return [self._refusal(parked, now)]
        if self.table.count(slot.number) >= self._limits.extents:
            raise CapacityError(f"no capacity for another extent: {writer!r} has {self._limits.extents} in storage "
                                f"unit {self.number}; clear samples, or write larger batches")  # fmt: skip
        if not slot.remote and self._files.is_dead(slot.number):
            raise ProtocolError(f"{writer!r} does not hold the lock of slot {slot.number} ({slot.path}); a writer must "
                                f"lock it first, and no other code of its process may open it")  # fmt: skip
        slot.is_opening = False
        # The new lease is queued like all others: an earlier one that can be met now goes first.
        key = (slot.number, sequence)
        self._parked[key] = parked
        effects = [*self._serve(), *self._free_unheld(now, 0.0), *self._recall(now)]
        if key in self._parked and (waits == 0.0 or len(self._parked) > self._limits.parked):
            del self._parked[key]
            effects.append(self._refusal(parked, now))
        return effects

    def _return(self, writer: str, peer: int, sequence: int, body: storage.ReturnExtent) -> list[Effect]:
        slot = self._slot(writer, body.slot)
        if len(set(body.extents)) != len(body.extents):
            raise InvalidArgumentError(f"the extents of a ReturnExtent must be different, got {body.extents}")
        for number in body.extents:
            extent = self.table.get(number)
            if extent is None and self.table.was_leased(number):
                continue  # it was returned before, and the reply was lost
            if extent is None or extent.slot != slot.number:
                raise ProtocolError(f"extent {number} of unit {self.number} cannot be returned by {writer!r}: "
                                    f"{self.table.describe(number)}")  # fmt: skip
        self._release_all(body.extents)
        return [SendReply(peer, sequence, Done()), *self._serve()]

    def _find_missing(
        self,
        numbers: Sequence[int],
        request: tuple[int, int] | None = None,
        report: unit_reports.BlockMissing | None = None,
    ) -> list[Effect]:
        """Check whether the blocks of these extents are gone; then answer the `report`, and the `request` if any."""

        def looked(missing: list[int], when: str, unknown: str) -> list[Effect]:
            missing = self._leased_of(missing)
            effects: list[Effect] = []
            if missing:
                effects.append(Report(unit_reports.ExtentsGone(self.number, np.array(missing, "<i8").tobytes(), when)))
                self._release_all(missing)
            if request is not None:
                effects.append(SendReply(*request, Done(unknown or len(self._leased_of(numbers)) < len(numbers))))
            return [*effects, *self._serve()]

        leased = self._leased_of(numbers)
        return self.pool.check_content(leased, looked, report) if leased else looked([], "", "")

    def _leased_of(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if self.table.get(number) is not None]

    def note_store_change(self) -> list[Effect]:
        """Note that the store may have lost blocks. The controller, which knows the published ones, orders a check."""
        self._has_store_changed = True
        return []

    def check_extents(self, order: store_reports.CheckExtents) -> list[Effect]:
        """Check on the controller's order whether the store has the blocks of these extents."""
        if len(order.extents) % 8:
            raise ProtocolError("the extents of a CheckExtents must be whole numbers of 8 bytes")
        return self._find_missing(np.frombuffer(order.extents, "<i8").tolist())

    def _cancel(self, writer: str, peer: int, sequence: int, body: Cancel) -> list[Effect]:
        """Drop a parked lease, or take back one that was just granted, because its writer will ignore the reply."""
        slot = self._slot_of(writer)
        if slot is None:
            return [SendReply(peer, sequence, Done(False))]
        cancelled = cancelled_failure(body.sequence)
        parked = self._parked.pop((slot.number, body.sequence), None)
        if parked is not None:
            return [self._refuse(parked, cancelled), SendReply(peer, sequence, Done(True))]
        granted = self._find_granted(slot, body.sequence)
        slot.note(body.sequence, cancelled)  # the lease may still arrive on a connection that was given up
        if granted is None:
            return [SendReply(peer, sequence, Done(False))]
        self._release_all([granted.number])
        return [SendReply(peer, sequence, Done(True)), *self._serve()]

    # ------------------------------------------------------------ slots

    def _slot(self, writer: str, number: int) -> _UnitSlot:
        slot = self._slots.get(number)
        if slot is None:
            raise ProtocolError(f"storage unit {self.number} has no slot {number}; request one with OpenSlot")
        if slot.writer != writer and self._remote.get(writer) is not slot:
            raise ProtocolError(f"slot {number} does not belong to {writer!r}; a writer must use its own slot")
        return slot

    def _slot_of(self, writer: str) -> _UnitSlot | None:
        """Return the slot of a writer on this node or on another one; None if it has none."""
        return self._writers.get(writer) or self._remote.get(writer)

    def _note_connection(self, writer: str, peer: int) -> _UnitSlot | None:
        """Note that this connection belongs to the writer, and return its slot. It makes a suspect in use again."""
        slot = self._slot_of(writer)
        if slot is not None and peer not in slot.peers:
            slot.peers.add(peer)
            self._peers[peer] = slot
            self._trust(slot)
        return slot

    def _trust(self, slot: _UnitSlot) -> None:
        self._suspects.pop(slot.number, None)
        if not self._suspects:
            self._probe_at = math.inf

    def _probe(self, slot: _UnitSlot) -> list[Effect]:
        """End a suspect's slot if the kernel proves that no process holds its lock."""
        if not self._files.withdraw(slot.number):
            return []
        del self._slots[slot.number], self._writers[slot.writer]
        self._remote = {client: remote for client, remote in self._remote.items() if remote is not slot}
        self._trust(slot)
        if self.table.count(slot.number):
            self._dead[slot.number] = slot.writer
        else:
            self._files.forget(slot.number)
        if slot.is_opening:
            return []
        return [self._report(slot.number, slot.writer)]

    def _report(self, slot: int, writer: str) -> Report:
        return Report(unit_reports.WriterGone(writer, self.number, self.table.extents_of_slot(slot)))

    # ------------------------------------------------------------ space

    def _free_unheld(self, now: float, after: float) -> list[Effect]:
        """Free the extents of `_viewed` of which no reader has a view now, `after` seconds after the last check."""
        if not self._viewed or now < self._views_checked + after:
            return []
        self._views_checked = now
        freed = self.pool.free_unheld()
        for extent in freed:
            self._viewed.discard(extent.number)
            self._forget_dead(extent.slot)
        self._confirm += [extent.number for extent in freed]
        return self._serve() if freed else []

    def _recall(self, now: float) -> list[Effect]:
        """If leases are waiting, free copies and recall all offers; otherwise recall what was unused for a period."""
        if self._parked and self._kept.free_copies():
            return [*self._serve(), *self._recall(now)]
        return self._give_up_extents(self._recalls.recall_some(bool(self._parked), self._with_extents, now))

    def _give_up_extents(self, offers: list[Offer]) -> list[Effect]:
        """Free what was recalled of these extents, and grant parked leases if this freed any space."""
        freed = [self._free_recalled(number, used) for number, used in offers]
        return self._serve() if any(freed) else []

    def _free_recalled(self, number: int, used: int) -> bool:
        extent = self.table.get(number)
        if extent is None or number in self._viewed:
            return False
        if not used:
            self._release_all([number])
            return number not in self._viewed
        return self._recalls.cut(extent, used) < extent.length

    def _with_extents(self) -> list[int]:
        """Return the slots, not known to be gone, that have extents."""
        return [number for number in self._slots if self.table.count(number)]

    def _release_all(self, extents: Sequence[int]) -> None:
        """Free those of these extents that are leased; later, if readers have views of them."""
        for number in extents:
            extent = self.table.get(number)
            if extent is None or self._kept.is_filling(number):
                continue
            self._kept.forget(number)
            self._recalls.forget(number)
            if not self.pool.free(extent):
                self._viewed.add(number)
                continue
            self._viewed.discard(number)
            self._forget_dead(extent.slot)

    def _forget_dead(self, slot: int) -> None:
        """Forget a slot whose writer is dead if it has no extents any more."""
        if slot in self._dead and not self.table.count(slot):
            del self._dead[slot]
            self._files.forget(slot)

    def _serve(self) -> list[Effect]:
        """Grant the parked leases that can be met, in order of arrival."""
        effects: list[Effect] = []
        too_much = math.inf  # a lease of this space failed, so leases that take as much need not be tried
        for key, parked in list(self._parked.items()):
            if self.pool.space_for(parked.nbytes) >= too_much:
                continue
            slot = parked.slot.number
            take = self.pool.lease
            extent = take(slot, parked.want, parked.sequence) or take(slot, parked.nbytes, parked.sequence)
            if extent is None:
                too_much = self.pool.space_for(parked.nbytes)
                continue
            del self._parked[key]
            parked.slot.note(parked.sequence, extent.number)
            effects.append(SendReply(parked.peer, parked.sequence, self._describe(parked.slot, extent)))
        return effects

    def _answer_before(self, slot: _UnitSlot, sequence: int) -> storage.ExtentLeaseReply | Failure | None:
        """Return the reply to a request for a lease that was answered before; None if it is new."""
        answer = slot.answers.get(sequence)
        if isinstance(answer, Failure):
            return answer
        granted = self._find_granted(slot, sequence)
        if granted is not None:
            return self._describe(slot, granted)
        if answer is None and sequence > slot.acknowledged:
            return None
        return Failure("ProtocolError", f"request {sequence} was answered before; send a new request for a lease")

    def _find_granted(self, slot: _UnitSlot, sequence: int) -> LeasedExtent | None:
        """Return the extent that was granted to this request, if that is known and it is still leased."""
        number = slot.answers.get(sequence)
        return self.table.get(number) if isinstance(number, int) and number not in self._viewed else None

    def _describe(self, slot: _UnitSlot, extent: LeasedExtent) -> storage.ExtentLeaseReply:
        lease = extent.number, extent.offset, extent.length, self.pool.generation(extent.offset)
        return storage.ExtentLeaseReply(*lease, lease_proof(self._key, self.number, slot.writer, *lease))

    def _refusal(self, parked: _WaitingLease, now: float) -> SendReply:
        crowd = len(self._parked) if len(self._parked) >= self._limits.parked else 0
        status, waited = self.pool.status(), now - parked.since
        return self._refuse(parked, no_capacity(self.number, status, self.pool.folder, parked.nbytes, waited, crowd))

    def _refuse(self, parked: _WaitingLease, failure: Failure) -> SendReply:
        parked.slot.note(parked.sequence, failure)
        return SendReply(parked.peer, parked.sequence, failure)
