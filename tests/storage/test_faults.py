"""A storage unit whose writers are real processes that are killed, stopped and forked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from transfer_queue.messages.reports.unit_reports import WriterGone
from transfer_queue.messages.storage import ExtentLeaseReply, LeaseExtent, OpenSlot
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.writer_locks import SlotFolder
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.storage.unit.unit_effects import Report


class System:
    """A unit, and one writer process for which this process sends the messages."""

    def __init__(self, folder: Path, hold: Callable) -> None:
        self.unit = StorageUnit(0, ArenaPool(Arena.create(folder / "arena", 8 * GRANULE)), SlotFolder(folder / "slots"))
        slot = self.ask(OpenSlot("w"))
        self.slot = slot.slot
        early = self.ask(LeaseExtent(self.slot, 1, 1), sequence=99)
        assert "does not hold the lock" in early.message
        self.writer = hold(slot.lock_path, str(folder / "arena"))

    def ask(self, body: OpenSlot | LeaseExtent, writer: str = "w", peer: int = 1, sequence: int = 0) -> object:
        [effect] = self.unit.handle(writer, peer, sequence, body, 0.0)
        self.unit.check()
        return effect.reply

    def lease(self, sequence: int) -> ExtentLeaseReply:
        reply = self.ask(LeaseExtent(self.slot, GRANULE, GRANULE), sequence=sequence)
        assert isinstance(reply, ExtentLeaseReply)
        return reply

    def write(self, lease: ExtentLeaseReply, value: int) -> None:
        assert self.writer.ask(f"fill {lease.offset} {lease.length} {value}") == "done"


@pytest.fixture
def system(tmp_path: Path, hold: Callable) -> System:
    return System(tmp_path, hold)


def test_a_killed_writer_is_proven_dead(system: System) -> None:
    leases = [system.lease(1), system.lease(2)]
    system.writer.process.kill()
    system.writer.process.wait()
    effects = system.unit.on_disconnect(1, 0.0)
    assert effects == [Report(WriterGone("w", 0, [lease.extent for lease in leases]))]
    assert system.unit.table.leased == 2 * GRANULE
    system.unit.free([lease.extent for lease in leases])
    assert system.unit.table.leased == 0
    system.unit.check()


def test_a_connection_may_end_before_its_process(system: System) -> None:
    lease = system.lease(1)
    assert system.unit.on_disconnect(1, 0.0) == []
    system.writer.process.kill()
    system.writer.process.wait()
    assert system.unit.tick(1.0) == [Report(WriterGone("w", 0, [lease.extent]))]


def test_a_stopped_writer_is_never_reclaimed_and_writes_only_its_own(system: System) -> None:
    mine = system.lease(1)
    system.write(mine, 7)
    system.writer.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, system.writer.process.pid, os.WSTOPPED | os.WNOWAIT)
    assert system.unit.on_disconnect(1, 0.0) == []
    for hour in range(1, 100):
        assert system.unit.tick(hour * 3600.0) == []
    assert system.unit.table.get(mine.extent) is not None

    other = system.unit.table.lease(99, 7 * GRANULE)  # all other space belongs to another slot
    system.unit.pool.arena.view(other.offset, other.length)[:] = 5
    system.writer.process.send_signal(signal.SIGCONT)
    system.write(mine, 8)
    assert (system.unit.pool.arena.view(mine.offset, mine.length) == 8).all()
    assert (system.unit.pool.arena.view(other.offset, other.length) == 5).all()


def test_a_child_of_the_writer_ends_without_harm(system: System) -> None:
    lease = system.lease(1)
    assert system.writer.ask("fork") == "done"
    assert system.unit.on_disconnect(1, 0.0) == []
    assert system.unit.tick(1.0) == []
    system.write(lease, 3)
    system.lease(2)  # the lock is looked at, and is there


def test_a_writer_killed_before_it_locked_leaves_no_slot(tmp_path: Path) -> None:
    unit = StorageUnit(0, ArenaPool(Arena.create(tmp_path / "arena", GRANULE)), SlotFolder(tmp_path / "slots"))
    unit.handle("w", 1, 1, OpenSlot("w"), 0.0)
    assert len(list((tmp_path / "slots").iterdir())) == 1
    assert unit.on_disconnect(1, 0.0) == []
    assert list((tmp_path / "slots").iterdir()) == []
    unit.check()
