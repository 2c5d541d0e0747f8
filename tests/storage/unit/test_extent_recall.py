"""Unused space of writers is recalled: with stand-ins for their slots, then with locks of the kernel."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_unit import Writer

from transfer_queue.messages.base import Done
from transfer_queue.messages.reports.unit_reports import ExtentsRecalledReport
from transfer_queue.messages.storage import ReturnExtent
from transfer_queue.storage.arena import free_space_reclaim
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.free_space_reclaim import PERIOD
from transfer_queue.storage.arena.writer_locks import SlotFolder, hold_slot
from transfer_queue.storage.unit import extent_recall
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.extent_recall import INTERVAL
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.testing.simulated_locks import SimulatedSlots

CAPACITY = 16 * GRANULE


@pytest.fixture
def unit(tmp_path: Path, slots: SimulatedSlots) -> StorageUnit:
    return StorageUnit(0, ArenaPool(Arena.create(tmp_path / "arena", CAPACITY)), slots)


@pytest.fixture
def idle(unit: StorageUnit, slots: SimulatedSlots) -> Writer:
    return Writer(unit, slots, "idle", 1).locked()


@pytest.fixture
def short(unit: StorageUnit, slots: SimulatedSlots) -> Writer:
    return Writer(unit, slots, "short", 2).locked()


def offer(slots: SimulatedSlots, writer: Writer, extent: int, used: int, place: int = 0) -> None:
    slots.held.board.begin(writer.path, place)
    slots.held.board.leave(writer.path, place, extent, used)


def told(unit: StorageUnit) -> list[tuple[list[int], list[int]]]:
    """Return extents and lengths of the recalls that the unit reports to the controller."""
    bodies = [report.body for report in unit.take_reports()]
    return [
        (np.frombuffer(body.extents, "<i8").tolist(), np.frombuffer(body.lengths, "<i8").tolist())
        for body in bodies
        if isinstance(body, ExtentsRecalledReport)
    ]


def test_unused_space_goes_to_a_waiting_writer(
    unit: StorageUnit, slots: SimulatedSlots, idle: Writer, short: Writer
) -> None:
    lease = idle.lease(16)
    offer(slots, idle, lease.extent, GRANULE + 64)
    before = unit.pool.arena.generations[:].copy()
    met = short.lease(14)
    assert met.offset == lease.offset + 2 * GRANULE
    assert not slots.held.board.take(idle.path, 0)
    assert told(unit) == [([lease.extent], [2 * GRANULE])]
    assert told(unit) == []
    assert (unit.pool.arena.generations[:2] == before[:2]).all()
    assert (unit.pool.arena.generations[2:16] > before[2:16]).all()
    unit.check()
    assert unit.register() == np.array([lease.extent, met.extent], "<i8").tobytes()
    assert [type(report.body) for report in unit.repeat_reports()] == [ExtentsRecalledReport]


def test_an_extent_without_blocks_is_freed(
    unit: StorageUnit, slots: SimulatedSlots, idle: Writer, short: Writer
) -> None:
    lease = idle.lease(16)
    offer(slots, idle, lease.extent, 0)
    assert short.lease(16).offset == 0
    assert unit.table.get(lease.extent) is None
    assert told(unit) == []
    assert idle.ask(ReturnExtent(idle.slot, [lease.extent])) == Done()  # the writer finds it recalled, and returns it
    unit.check()


def test_a_writer_in_a_put_keeps_its_extent(
    unit: StorageUnit, slots: SimulatedSlots, idle: Writer, short: Writer
) -> None:
    lease = idle.lease(16)
    offer(slots, idle, lease.extent, 64)
    assert slots.held.board.take(idle.path, 0)
    short.park(4, 3600.0)
    for second in range(1, 100):
        assert unit.tick(float(second)) == []
    slots.held.board.leave(idle.path, 0, lease.extent, 128)
    due = unit.next_deadline()
    assert due == 99.0 + INTERVAL
    [met] = unit.tick(due)
    assert met.peer == short.peer
    unit.check()


def test_a_writer_that_died_in_a_put_keeps_its_extent(
    unit: StorageUnit, slots: SimulatedSlots, idle: Writer, short: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its locks have ended, and the block of its last put may be published beyond what it has offered."""
    lease = idle.lease(16)
    offer(slots, idle, lease.extent, 64)
    assert slots.held.board.take(idle.path, 0)
    slots.held.board.release(idle.path)
    monkeypatch.setattr(slots, "is_dead", lambda slot: slot == idle.slot)
    assert unit._recalls.recall_all([idle.slot, short.slot]) == []
    monkeypatch.setattr(slots, "is_dead", lambda slot: False)
    assert unit._recalls.recall_all([idle.slot, short.slot]) == [(lease.extent, 64)]


def test_offers_of_extents_of_other_writers_are_ignored(
    unit: StorageUnit, slots: SimulatedSlots, idle: Writer, short: Writer
) -> None:
    mine, other = idle.lease(8), short.lease(8)
    for place, (extent, used) in enumerate([(other.extent, 0), (99, 64), (mine.extent, 100 * GRANULE)]):
        offer(slots, idle, extent, used, place)
    short.park(1, 10.0)
    assert unit.table.leased == CAPACITY
    unit.check()


def test_unused_space_is_recalled_before_a_deadlock_is_reported(
    unit: StorageUnit, slots: SimulatedSlots, idle: Writer, short: Writer
) -> None:
    lease = idle.lease(16)
    waiting = [short.park(15, 10.0), short.park(2, 10.0)]
    offer(slots, idle, lease.extent, 64)
    met, refused = unit.refuse("nobody moves")
    assert [met.sequence, refused.sequence] == waiting
    unit.check()


def test_the_writers_asked_in_one_turn_are_limited(
    unit: StorageUnit, slots: SimulatedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extent_recall, "WRITERS", 3)
    writers = [Writer(unit, slots, f"w{n}", n + 1).locked() for n in range(8)]
    for writer in writers:
        offer(slots, writer, writer.lease(2).extent, 0)
    writers[0].park(7, 10.0, now=1.0)
    assert unit.next_deadline() == 1.0
    [met] = unit.tick(1.0)
    assert met.peer == 1
    assert unit.table.free_bytes == (6 * 2 - 7) * GRANULE
    unit.check()


def test_space_unused_for_two_periods_is_recalled_without_waiting_leases(
    unit: StorageUnit, slots: SimulatedSlots, idle: Writer, short: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_space_reclaim, "LITTLE", 7 * GRANULE)
    still, busy = idle.lease(4), short.lease(4)
    offer(slots, idle, still.extent, 64)
    for period in range(3):
        offer(slots, short, busy.extent, 64 * (period + 1))
        unit.tick(period * PERIOD)
    assert unit.table.leased == 5 * GRANULE
    assert told(unit) == [([still.extent], [GRANULE])]
    assert unit.next_deadline() is None  # there is little left
    unit.check()


# ------------------------------------------------------------ with the kernel's locks


def test_places_in_the_slot_file(folder: SlotFolder, holder: Any) -> None:
    assert folder.offers(1) == set()
    assert folder.recall(1) == []
    assert holder.ask("begin 0") == holder.ask("begin 1") == "True"
    assert holder.ask("leave 0 7 640") == holder.ask("leave 1 8 0") == "None"
    assert folder.offers(1) == {(7, 640), (8, 0)}
    assert holder.ask("take 1") == "True"
    assert folder.recall(1) == [(7, 640)]
    assert folder.recall(1) == [(7, 640)]  # until its writer has noticed
    assert holder.ask("take 0") == "False"
    assert holder.ask("leave 1 8 64") == "None"
    assert folder.recall(1, among={(8, 0)}) == []
    assert holder.ask("take 1") == "True"
    assert holder.ask("leave 1 8 64") == "None"
    assert folder.recall(1, among={(8, 64)}) == [(8, 64)]
    assert holder.ask("leave 0") == holder.ask("leave 1") == "None"
    assert folder.offers(1) == set()
    assert not folder.is_dead(1)  # asking about places leaves the slot's lock alone
    assert {known.writer for known in folder.known_slots().values()} == {"w"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the state of a process from /proc")
def test_a_stopped_writer_keeps_the_extent_of_its_put_and_finds_its_offers_recalled(
    folder: SlotFolder, holder: Any
) -> None:
    """It keeps the extent that it is writing to; it finds that its offers were recalled."""
    for line in ("begin 0", "leave 0 7 640", "begin 1", "leave 1 8 64", "take 1"):
        holder.ask(line)
    holder.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.process.pid, os.WSTOPPED)
    assert [folder.recall(1) for _ in range(3)] == [[(7, 640)]] * 3
    holder.process.send_signal(signal.SIGCONT)
    assert holder.ask("take 0") == "False"
    assert holder.ask("leave 1 8 128") == "None"
    assert holder.ask("take 1") == "True"


def test_a_slot_that_does_not_exist_offers_nothing(folder: SlotFolder) -> None:
    assert folder.offers(5) == set()
    assert folder.recall(5) == []


def test_a_released_lock_takes_and_offers_nothing(folder: SlotFolder) -> None:
    lock = hold_slot(Path(folder.make(1, "w")))
    assert lock.begin(0)
    lock.release()
    assert not lock.begin(1)
    assert not lock.take(0)
    lock.leave(0, 3, 64)
    assert folder.offers(1) == set()
