"""The storage unit, with writers that live in this process."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Cancel
from transfer_queue.messages.envelopes import AnyReply, AnyRequest
from transfer_queue.messages.partitions import ListPartitions
from transfer_queue.messages.reports.unit_reports import WriterGone
from transfer_queue.messages.storage import (
    ExtentLeaseReply,
    LeaseExtent,
    OpenSlot,
    ReturnExtent,
    SlotReply,
    UnitStatus,
    UnitStatusReply,
    lease_proof,
)
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.unit.extent_pool import PREFAULT_STEP, ArenaPool
from transfer_queue.storage.unit.extent_recall import INTERVAL
from transfer_queue.storage.unit.storage_unit import PROBE_INTERVAL, RECENT_ANSWERS, Limits, StorageUnit
from transfer_queue.storage.unit.unit_effects import Effect, Report, SendReply
from transfer_queue.testing.simulated_locks import HeldSlots, SimulatedSlots

CAPACITY = 16 * GRANULE


class Writer:
    """A writer with one connection."""

    def __init__(self, unit: StorageUnit, slots: SimulatedSlots, name: str, peer: int) -> None:
        self.unit, self.slots, self.name, self.peer = unit, slots, name, peer
        self.sequence = 0
        reply = self.ask(OpenSlot(name))
        self.slot = reply.slot
        self.path = reply.lock_path

    def locked(self) -> Writer:
        self.slots.held.add(self.path)
        return self

    def send(
        self, body: AnyRequest, now: float = 0.0, sequence: int | None = None, acknowledged: int = 0
    ) -> list[Effect]:
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        effects = self.unit.handle(self.name, self.peer, sequence, body, now, None, acknowledged)
        self.unit.check()
        return effects

    def ask(self, body: AnyRequest, now: float = 0.0, acknowledged: int = 0) -> AnyReply:
        """Return the reply to this request. There must be no other effect."""
        [effect] = self.send(body, now, acknowledged=acknowledged)
        assert (effect.peer, effect.sequence) == (self.peer, self.sequence)
        return effect.reply

    def lease(self, granules: int, want: int = 0, wait: float | None = None, now: float = 0.0) -> ExtentLeaseReply:
        reply = self.ask(LeaseExtent(self.slot, granules * GRANULE, max(want, granules) * GRANULE, wait), now)
        assert isinstance(reply, ExtentLeaseReply), reply
        return reply

    def park(self, granules: int, wait: float, now: float = 0.0) -> int:
        assert self.send(LeaseExtent(self.slot, granules * GRANULE, granules * GRANULE, wait), now) == []
        return self.sequence


@pytest.fixture
def unit(tmp_path: Path, slots: SimulatedSlots) -> StorageUnit:
    return StorageUnit(
        3, ArenaPool(Arena.create(tmp_path / "arena", CAPACITY)), slots, Limits(slots=4, extents=8, parked=3)
    )


@pytest.fixture
def writer(unit: StorageUnit, slots: SimulatedSlots) -> Writer:
    return Writer(unit, slots, "w", 1).locked()


@pytest.fixture
def other(unit: StorageUnit, slots: SimulatedSlots) -> Writer:
    return Writer(unit, slots, "o", 2).locked()


def failure(reply: AnyReply | Effect, kind: str, *words: str) -> None:
    if isinstance(reply, SendReply):
        reply = reply.reply
    assert isinstance(reply, Failure), reply
    assert reply.kind == kind
    for word in words:
        assert word in reply.message


def test_a_lease_has_the_wanted_size_if_there_is_space(unit: StorageUnit, writer: Writer) -> None:
    first, second = (1, 0, 4 * GRANULE, 1), (2, 4 * GRANULE, GRANULE, 1)
    assert writer.lease(1, want=4) == ExtentLeaseReply(*first, lease_proof(b"", 3, "w", *first))
    assert writer.lease(1) == ExtentLeaseReply(*second, lease_proof(b"", 3, "w", *second))
    assert writer.ask(UnitStatus()) == UnitStatusReply(
        CAPACITY, CAPACITY, 5 * GRANULE, 11 * GRANULE, largest_free=11 * GRANULE
    )


def test_a_lease_has_the_needed_size_if_there_is_no_more_space(unit: StorageUnit, writer: Writer) -> None:
    writer.lease(12)
    assert writer.lease(2, want=5).length == 2 * GRANULE
    assert writer.lease(2, want=1000).length == 2 * GRANULE


def test_a_lack_of_space_is_an_error_with_numbers(unit: StorageUnit, writer: Writer) -> None:
    writer.lease(15)
    reply = writer.ask(LeaseExtent(writer.slot, 2 * GRANULE, 2 * GRANULE))
    failure(reply, "CapacityError", "capacity", f"{2 * GRANULE} bytes wanted", f"capacity {CAPACITY}")
    failure(reply, "CapacityError", f"held {CAPACITY}", f"leased {15 * GRANULE}", f"free {GRANULE}", "clear samples")


def test_extents_that_are_not_leased_are_skipped(unit: StorageUnit, writer: Writer) -> None:
    lease = writer.lease(1)
    unit.free([99, 0, -1, lease.extent])
    again = writer.lease(1)
    unit.free([lease.extent])
    unit.check()
    assert unit.table.get(again.extent) is not None


def test_parked_leases_are_met_in_order(unit: StorageUnit, writer: Writer, other: Writer) -> None:
    big = writer.lease(14)
    small = writer.lease(2)
    first, second = other.park(3, 10), writer.park(2, 10)
    assert unit.next_deadline() == INTERVAL  # the others are asked again for what they do not use
    effects = unit.free([small.extent])  # too small for the first, which does not delay the others
    assert [(effect.peer, effect.sequence) for effect in effects] == [(1, second)]
    effects = unit.free([big.extent])
    assert [(effect.peer, effect.sequence) for effect in effects] == [(2, first)]
    assert unit.next_deadline() is None
    unit.check()


def test_a_new_lease_does_not_overtake_a_parked_one_that_fits(unit: StorageUnit, writer: Writer, other: Writer) -> None:
    lease = writer.lease(16)
    waiting = other.park(10, 10)
    [met] = unit.free([lease.extent])
    assert (met.peer, met.sequence) == (2, waiting)
    failure(writer.ask(LeaseExtent(writer.slot, 10 * GRANULE, 10 * GRANULE)), "CapacityError")


def test_a_wait_ends_with_an_error(unit: StorageUnit, writer: Writer) -> None:
    writer.lease(16)
    first, second = writer.park(1, 5, now=1), writer.park(1, 2, now=1)
    assert unit.next_deadline() == 1 + INTERVAL
    assert unit.tick(2.9) == []
    [effect] = unit.tick(3)
    assert effect.sequence == second
    failure(effect, "CapacityError", "capacity", "after 2.0 s")
    assert [effect.sequence for effect in unit.tick(100)] == [first]
    assert unit.next_deadline() is None


def test_a_wait_without_end_never_ends(unit: StorageUnit, writer: Writer) -> None:
    lease = writer.lease(16)
    writer.park(1, math.inf)
    assert unit.next_deadline() == INTERVAL
    assert unit.tick(1e12) == []
    assert len(unit.free([lease.extent])) == 1


@pytest.mark.parametrize("wait", [None, 0.0, -3.0, -math.inf])
def test_a_lease_without_a_wait_fails_at_once(unit: StorageUnit, writer: Writer, wait: float | None) -> None:
    writer.lease(16)
    failure(writer.ask(LeaseExtent(writer.slot, 1, 1, wait)), "CapacityError")


def test_space_that_other_programs_free_is_found_at_the_deadline(
    unit: StorageUnit, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_queue.storage.arena.arena._available", lambda _: 0)
    writer.park(1, 5)
    monkeypatch.undo()
    [effect] = unit.tick(5)
    assert isinstance(effect.reply, ExtentLeaseReply)


def test_a_parked_lease_moves_to_a_new_connection(unit: StorageUnit, writer: Writer, other: Writer) -> None:
    lease = other.lease(16)
    sequence = writer.park(1, 10)
    writer.peer = 7
    assert writer.send(LeaseExtent(writer.slot, GRANULE, GRANULE, 10), 3.0, sequence) == []
    assert unit.on_disconnect(1, 4) == []
    assert unit.next_deadline() == INTERVAL
    [effect] = unit.free([lease.extent])
    assert (effect.peer, effect.sequence) == (7, sequence)


def test_a_parked_lease_can_be_cancelled(unit: StorageUnit, writer: Writer) -> None:
    lease = writer.lease(16)
    sequence = writer.park(1, 10)
    told, done = writer.send(Cancel(sequence))
    failure(told, "WaitTimeoutError", "cancelled")
    assert (told.sequence, done) == (sequence, SendReply(1, writer.sequence, Done(True)))
    assert unit.free([lease.extent]) == []


def test_a_granted_lease_that_is_cancelled_is_taken_back(unit: StorageUnit, writer: Writer) -> None:
    lease = writer.lease(16)
    assert writer.ask(Cancel(writer.sequence)) == Done(True)
    assert unit.table.leased == 0
    assert unit.pool.arena.generation(0) > lease.generation
    assert writer.ask(Cancel(2)) == Done(False)
    assert writer.ask(Cancel(77)) == Done(False)


def test_only_own_requests_can_be_cancelled(unit: StorageUnit, writer: Writer, other: Writer) -> None:
    writer.lease(1)
    assert other.ask(Cancel(writer.sequence)) == Done(False)
    assert unit.handle("nobody", 9, 1, Cancel(writer.sequence), 0.0) == [SendReply(9, 1, Done(False))]
    assert unit.table.leased == GRANULE


def test_only_the_latest_grants_are_remembered(tmp_path: Path, slots: SimulatedSlots) -> None:
    unit = StorageUnit(0, ArenaPool(Arena.create(tmp_path / "a", 4 * GRANULE)), slots)
    writer = Writer(unit, slots, "w", 1).locked()
    first = writer.lease(1)
    for acknowledged in (0, 2):
        for _ in range(RECENT_ANSWERS):
            reply = writer.ask(LeaseExtent(writer.slot, GRANULE, GRANULE), acknowledged=acknowledged)
            unit.free([reply.extent])
        repeated = writer.send(LeaseExtent(writer.slot, GRANULE, GRANULE), sequence=2)[0].reply
        assert repeated == first if acknowledged == 0 else failure(repeated, "ProtocolError", "answered before") is None
    assert writer.ask(Cancel(2)) == Done(False)
    assert unit.table.get(first.extent) is not None


@pytest.mark.parametrize("ends", ["refused", "expired", "returned", "freed", "cancelled", "drained", "acknowledged"])
def test_a_copy_that_arrives_late_on_an_abandoned_connection_leases_nothing(
    unit: StorageUnit, writer: Writer, ends: str
) -> None:
    """The writer repeats a request on a new connection; the first copy arrives when nobody waits for its reply."""
    full = writer.lease(16)
    request = LeaseExtent(writer.slot, GRANULE, GRANULE, 5.0 if ends == "expired" else None)
    if ends in ("refused", "expired"):
        effects = writer.send(request) or unit.tick(6.0)
        failure(effects[0], "CapacityError")
    sequence = writer.sequence
    if ends == "cancelled":
        sequence = writer.park(1, 5)
        writer.send(Cancel(sequence))
    elif ends == "drained":
        sequence = writer.park(1, 5)
        unit.set_draining(True)
        unit.set_draining(False)
    if ends == "returned":
        assert writer.ask(ReturnExtent(writer.slot, [full.extent])) == Done()
    else:
        unit.free([full.extent])
    if ends == "acknowledged":
        writer.ask(UnitStatus(), acknowledged=sequence + 3)
        sequence += 1
    [effect] = unit.handle(writer.name, writer.peer - 1, sequence, request, 7.0)
    assert isinstance(effect.reply, Failure)
    assert unit.table.leased == 0


def test_a_late_copy_leaves_a_parked_lease_to_the_new_connection(unit: StorageUnit, writer: Writer) -> None:
    lease = writer.lease(16)
    writer.peer = 9
    sequence = writer.park(1, 10)
    assert unit.handle(writer.name, 1, sequence, LeaseExtent(writer.slot, GRANULE, GRANULE, 10), 1.0) == []
    assert unit.on_disconnect(1, 2.0) == []
    [effect] = unit.free([lease.extent])
    assert (effect.peer, effect.sequence) == (9, sequence)


def test_a_granted_lease_is_granted_again_while_the_unit_is_drained(unit: StorageUnit, writer: Writer) -> None:
    lease = writer.lease(1)
    unit.set_draining(True)
    assert writer.send(LeaseExtent(writer.slot, GRANULE, GRANULE), 1.0, writer.sequence)[0].reply == lease


def test_a_writer_on_another_node_can_cancel_a_lease(unit: StorageUnit) -> None:
    [reply] = unit.handle("far", 5, 1, OpenSlot("far/1", remote=True), 0.0)
    unit.handle("far", 5, 2, LeaseExtent(reply.reply.slot, GRANULE, GRANULE), 0.0)
    assert unit.table.leased == GRANULE
    assert unit.handle("far", 5, 3, Cancel(2), 0.0) == [SendReply(5, 3, Done(True))]
    assert unit.table.leased == 0


def test_a_return_that_was_repeated_does_nothing(unit: StorageUnit, writer: Writer) -> None:
    lease = writer.lease(1)
    for _ in range(2):
        assert writer.ask(ReturnExtent(writer.slot, [lease.extent])) == Done()
    assert unit.table.leased == 0


def test_only_the_slots_own_extents_are_returned(unit: StorageUnit, writer: Writer, other: Writer) -> None:
    mine, foreign = writer.lease(1), other.lease(1)
    failure(writer.ask(ReturnExtent(writer.slot, [mine.extent, foreign.extent])), "ProtocolError", "leased to slot 2")
    failure(writer.ask(ReturnExtent(writer.slot, [mine.extent, 99])), "ProtocolError", "ever leased")
    failure(
        writer.ask(ReturnExtent(writer.slot, [mine.extent, mine.extent])), "InvalidArgumentError", "must be different"
    )
    assert unit.table.leased == 2 * GRANULE


@pytest.mark.parametrize(
    ("nbytes", "want", "wait", "kind"),
    [
        (0, 1, None, "InvalidArgumentError"),
        (-5, 5, None, "InvalidArgumentError"),
        (2, 1, None, "InvalidArgumentError"),
        (1, 1, math.nan, "InvalidArgumentError"),
        (CAPACITY + 1, CAPACITY + 1, None, "CapacityError"),
        (1 << 62, 1 << 62, 60.0, "CapacityError"),
    ],
)
def test_absurd_leases_are_refused_at_once(
    unit: StorageUnit, writer: Writer, nbytes: int, want: int, wait: float | None, kind: str
) -> None:
    failure(writer.ask(LeaseExtent(writer.slot, nbytes, want, wait)), kind)
    assert unit.table.held == 0


def test_unknown_and_foreign_slots_are_refused(unit: StorageUnit, writer: Writer, other: Writer) -> None:
    for body in (LeaseExtent(99, 1, 1), ReturnExtent(99, [1])):
        failure(writer.ask(body), "ProtocolError", "has no slot")
    for body in (LeaseExtent(other.slot, 1, 1), ReturnExtent(other.slot, [])):
        failure(writer.ask(body), "ProtocolError", "does not belong to 'w'")
    failure(writer.ask(OpenSlot("o")), "ProtocolError", "its own")
    failure(writer.ask(ListPartitions()), "ProtocolError", "ListPartitions", "controller")
    assert unit.table.held == 0


def test_a_failure_of_the_operating_system_is_a_reply(
    unit: StorageUnit, slots: SimulatedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int, __: str) -> str:
        raise OSError("no more files")

    monkeypatch.setattr(slots, "make", broken)
    [effect] = unit.handle("x", 5, 1, OpenSlot("x"), 0.0)
    failure(effect, "TransferQueueError", "no more files")
    unit.check()


def test_slots_extents_and_parked_leases_are_limited(
    unit: StorageUnit, slots: SimulatedSlots, writer: Writer, other: Writer
) -> None:
    leases = [writer.lease(1) for _ in range(8)]
    failure(writer.ask(LeaseExtent(writer.slot, 1, 1)), "CapacityError", "8 in storage unit 3")
    unit.free([lease.extent for lease in leases])
    writer.lease(16)
    for _ in range(3):
        other.park(1, 10)
    failure(other.ask(LeaseExtent(other.slot, 1, 1, 10)), "CapacityError", "which is the limit")
    Writer(unit, slots, "a", 3)
    Writer(unit, slots, "b", 4)
    [effect] = unit.handle("c", 5, 1, OpenSlot("c"), 0.0)
    failure(effect, "CapacityError", "another writer")


# ---------------------------------------------------------------- slots


def test_a_writer_has_one_slot(unit: StorageUnit, writer: Writer) -> None:
    assert writer.ask(OpenSlot("w")) == SlotReply(writer.slot, writer.path)


def test_a_lease_needs_the_lock(unit: StorageUnit, slots: SimulatedSlots, writer: Writer) -> None:
    careless = Writer(unit, slots, "c", 5)
    failure(careless.ask(LeaseExtent(careless.slot, 1, 1)), "ProtocolError", "does not hold the lock")
    careless.locked()
    careless.lease(1)
    slots.held.discard(careless.path)
    failure(careless.ask(LeaseExtent(careless.slot, 1, 1)), "ProtocolError", "does not hold the lock")


def test_a_slot_that_was_never_locked_is_withdrawn_without_a_report(unit: StorageUnit, slots: SimulatedSlots) -> None:
    early = Writer(unit, slots, "e", 5)
    assert unit.on_disconnect(5, 1) == []
    assert early.slot not in slots.known_slots()
    unit.check()
    assert unit.next_deadline() is None
    failure(early.ask(LeaseExtent(early.slot, 1, 1)), "ProtocolError", "has no slot")
    assert Writer(unit, slots, "e", 6).slot != early.slot


def test_a_slot_that_is_locked_but_not_used_becomes_a_suspect(unit: StorageUnit, slots: SimulatedSlots) -> None:
    early = Writer(unit, slots, "e", 5).locked()
    assert unit.on_disconnect(5, 1) == []
    assert unit.next_deadline() == 1 + PROBE_INTERVAL
    slots.held.clear()
    assert unit.tick(1 + PROBE_INTERVAL) == []
    assert early.slot not in slots.known_slots()
    unit.check()


def test_a_dead_writer_is_reported_and_keeps_its_extents(
    unit: StorageUnit, slots: SimulatedSlots, writer: Writer
) -> None:
    first, second = writer.lease(1), writer.lease(2)
    slots.held.clear()
    gone = Report(WriterGone("w", 3, [first.extent, second.extent]))
    assert unit.on_disconnect(1, 1) == [gone]
    unit.check()
    assert unit.table.leased == 3 * GRANULE
    assert unit.next_deadline() is None
    assert unit.repeat_reports() == [gone]
    unit.free([first.extent])
    assert unit.repeat_reports() == [Report(WriterGone("w", 3, [second.extent]))]
    unit.free([second.extent])
    assert unit.repeat_reports() == []
    unit.check()
    failure(writer.ask(ReturnExtent(writer.slot, [first.extent])), "ProtocolError", "has no slot")


def test_a_dead_writer_without_extents_is_reported_too(
    unit: StorageUnit, slots: SimulatedSlots, writer: Writer
) -> None:
    unit.free([writer.lease(1).extent])
    slots.held.clear()
    assert unit.on_disconnect(1, 1) == [Report(WriterGone("w", 3, []))]
    assert unit.repeat_reports() == []


def test_a_silent_writer_is_never_reclaimed(unit: StorageUnit, slots: SimulatedSlots, writer: Writer) -> None:
    writer.lease(1)
    assert unit.on_disconnect(1, 0) == []
    for hour in range(1, 1000):
        due = unit.next_deadline()
        assert unit.tick(max(due, hour * 3600.0)) == []
    assert unit.table.leased == GRANULE
    slots.held.clear()
    due = unit.next_deadline()
    assert unit.tick(due - 0.01) == []
    assert len(unit.tick(due)) == 1
    unit.check()


def test_a_writer_that_comes_back_is_trusted_again(unit: StorageUnit, slots: SimulatedSlots, writer: Writer) -> None:
    writer.lease(1)
    unit.on_disconnect(1, 0)
    writer.peer = 9
    writer.lease(1, now=5)
    assert unit.next_deadline() is None
    unit.on_disconnect(1, 6)
    assert unit.next_deadline() is None
    unit.on_disconnect(9, 7)
    assert unit.next_deadline() == 7 + PROBE_INTERVAL


def test_the_last_connection_counts(unit: StorageUnit, slots: SimulatedSlots, writer: Writer) -> None:
    writer.lease(1)
    writer.peer = 9
    writer.ask(UnitStatus())
    slots.held.clear()
    assert unit.on_disconnect(1, 1) == []
    assert len(unit.on_disconnect(9, 1)) == 1


def test_connections_without_a_slot_have_no_effect(unit: StorageUnit) -> None:
    assert isinstance(unit.handle("reader", 8, 1, UnitStatus(), 0.0)[0], SendReply)
    assert unit.on_disconnect(8, 1) == []
    assert unit.on_disconnect(12345, 1) == []
    unit.check()


# ---------------------------------------------------------------- idle moments


def test_an_idle_unit_prepares_space(tmp_path: Path, slots: SimulatedSlots) -> None:
    unit = StorageUnit(0, ArenaPool(Arena.create(tmp_path / "a", 2 * PREFAULT_STEP + GRANULE)), slots)
    while unit.work_ahead():
        unit.check()
    assert unit.pool.arena.held == unit.pool.arena.warm == unit.pool.arena.capacity
    assert not unit.work_ahead()


def test_an_idle_unit_causes_no_error_on_a_full_file_system(
    unit: StorageUnit, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_queue.storage.arena.arena._available", lambda _: 0)
    assert not unit.work_ahead()
    writer.park(1, 5)
    monkeypatch.undo()
    assert not unit.work_ahead()  # those who wait come first
    unit.check()


# ---------------------------------------------------------------- everything at once


class Unit(RuleBasedStateMachine):
    """Writers that lease, return, wait, disconnect and die, compared with the replies that they received."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="tq-test-")
        self.slots = SimulatedSlots(0, HeldSlots())
        self.unit = StorageUnit(
            0, ArenaPool(Arena.create(Path(self.folder.name) / "a", CAPACITY)), self.slots, Limits(extents=6, parked=3)
        )
        self.now = 0.0
        self.number = 0
        self.writers: list[Writer] = []
        self.leases: dict[int, tuple[str, ExtentLeaseReply]] = {}
        self.open: dict[tuple[int, int], tuple[Writer, int]] = {}
        self.dead: set[str] = set()
        self.reported: set[str] = set()

    def teardown(self) -> None:
        self.unit.pool.arena.close()
        self.folder.cleanup()

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Report):
                assert effect.body.writer in self.dead
                assert effect.body.writer not in self.reported
                self.reported.add(effect.body.writer)
                mine = [number for number, (name, _) in self.leases.items() if name == effect.body.writer]
                assert sorted(mine) == effect.body.extents
                continue
            waiting = self.open.pop((effect.peer, effect.sequence), None)
            if waiting is None:
                assert isinstance(effect.reply, Done)
                continue
            writer, nbytes = waiting
            if isinstance(effect.reply, ExtentLeaseReply):
                reply = effect.reply
                assert reply.length >= nbytes
                for _, lease in self.leases.values():
                    assert reply.offset >= lease.offset + lease.length or lease.offset >= reply.offset + reply.length
                assert reply.extent not in self.leases
                self.leases[reply.extent] = (writer.name, reply)
            else:
                failure(effect, "CapacityError", "capacity")

    @precondition(lambda self: len(self.writers) < 4)
    @rule()
    def open_slot(self) -> None:
        self.number += 1
        self.writers.append(Writer(self.unit, self.slots, f"w{self.number}", self.number).locked())

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), granules=st.integers(1, 9), more=st.integers(0, 4), wait=st.sampled_from([None, 1.0, 5.0]))
    def lease(self, data: st.DataObject, granules: int, more: int, wait: float | None) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        self.open[writer.peer, writer.sequence + 1] = (writer, granules * GRANULE)
        self.take(
            writer.send(LeaseExtent(writer.slot, granules * GRANULE, (granules + more) * GRANULE, wait), self.now)
        )

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        _, lease = self.leases.pop(number)
        effects = self.unit.free([number])
        assert self.unit.pool.arena.generation(lease.offset) > lease.generation
        self.take(effects)

    @precondition(lambda self: self.leases and self.writers)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        number = data.draw(st.sampled_from(sorted(self.leases)))
        mine = self.leases[number][0] == writer.name
        if mine:
            del self.leases[number]
            self.take(writer.send(ReturnExtent(writer.slot, [number]), self.now))
        else:
            failure(writer.ask(ReturnExtent(writer.slot, [number]), self.now), "ProtocolError")

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), dies=st.booleans())
    def disconnect(self, data: st.DataObject, dies: bool) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        self.open = {key: value for key, value in self.open.items() if value[0] is not writer}
        if dies:
            self.slots.held.discard(writer.path)
            self.dead.add(writer.name)
            self.writers.remove(writer)
        self.take(self.unit.on_disconnect(writer.peer, self.now))
        self.number += 1
        writer.peer = self.number

    @rule(seconds=st.sampled_from([0.1, 0.3, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.unit.tick(self.now))
        due = self.unit.next_deadline()
        assert due is None or due > self.now

    @invariant()
    def whole(self) -> None:
        self.unit.check()
        assert self.unit.table.leased == sum(lease.length for _, lease in self.leases.values())
        assert len(self.open) == len(self.unit._parked)
        for _, nbytes in self.open.values():
            assert nbytes > self.unit.table.tail


TestUnit = Unit.TestCase
TestUnit.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
