"""Units that are killed between any two stores, and continue where they were."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer_queue.errors import AttachError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Cancel
from transfer_queue.messages.envelopes import AnyReply, AnyRequest
from transfer_queue.messages.reports.unit_reports import WriterGone as Gone
from transfer_queue.messages.storage import ExtentLeaseReply, LeaseExtent, OpenSlot, ReturnExtent
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_file import ExtentFile
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.writer_locks import SlotFolder
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.storage_unit import Limits, StorageUnit
from transfer_queue.storage.unit.unit_effects import Effect, Report, SendReply
from transfer_queue.testing.simulated_locks import HeldSlots, SimulatedSlots

CAPACITY = 16 * GRANULE


class Killed(BaseException):
    """Stands for SIGKILL: no code of the unit runs after it."""


@contextmanager
def killed_after(stores: int | None) -> Iterator[list[int]]:
    """Raise Killed after this many stores into the arena's files (None: never). Returns how many there were."""
    done = [0]

    def store() -> None:
        done[0] += 1
        if done[0] == stores:
            raise Killed

    real = ExtentFile._store

    def stored(self: ExtentFile, numbers: Any, place: int, value: int) -> None:
        real(self, numbers, place, value)
        store()

    def bump(self: Arena, offset: int, length: int) -> None:
        for granule in range(offset // GRANULE, (offset + length) // GRANULE):
            self.generations[granule] += 1
            store()

    def settle(self: Arena, offset: int, length: int) -> None:
        granules = self.generations[offset // GRANULE : (offset + length) // GRANULE]
        value = max(1, int(granules.max()))
        for at in range(len(granules)):
            granules[at] = value
            store()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExtentFile, "_store", stored)
        patch.setattr(Arena, "bump", bump)
        patch.setattr(Arena, "set_generation", settle)
        yield done


def reopened(unit: StorageUnit, slots: Any) -> StorageUnit:
    again = StorageUnit(
        unit.number, ArenaPool(Arena.reopen(unit.pool.arena.folder)), slots, Limits(extents=6, parked=3)
    )
    again.check()
    return again


class System:
    """A unit with real files, writers in this process, and what these know for certain."""

    def __init__(self, folder: Path) -> None:
        self.slots = SimulatedSlots(0, HeldSlots())
        self.unit = StorageUnit(0, ArenaPool(Arena.create(folder, CAPACITY)), self.slots, Limits(extents=6, parked=3))
        self.folder = folder
        self.starts = 1
        self.sequence = 0
        self.slot: dict[str, int] = {}
        self.leases: dict[int, tuple[str, ExtentLeaseReply]] = {}
        self.freed: set[int] = set()
        self.most = 0  # the highest number of an extent that any writer received

    def restart(self) -> None:
        self.unit = reopened(self.unit, self.slots)
        self.starts += 1

    def peer(self, writer: str) -> int:
        """Return its connection to the current unit."""
        return int.from_bytes(writer.encode(), "big") * 1000 + self.starts

    def ask(self, writer: str, body: AnyRequest, stores: int | None = None) -> AnyReply:
        """Return the reply. The unit is killed after this many stores, and then gets the same sequence again."""
        self.sequence += 1
        try:
            with killed_after(stores):
                effects = self.unit.handle(writer, self.peer(writer), self.sequence, body, 0.0)
        except Killed:
            self.restart()
            effects = self.unit.handle(writer, self.peer(writer), self.sequence, body, 0.0)
        self.unit.check()
        [effect] = effects
        return effect.reply

    def open(self, writer: str, stores: int | None = None) -> None:
        reply = self.ask(writer, OpenSlot(writer), stores)
        assert reply.slot not in self.slot.values()
        self.slot[writer] = reply.slot
        self.slots.held.add(reply.lock_path)

    def lease(self, writer: str, granules: int, stores: int | None = None) -> ExtentLeaseReply | None:
        reply = self.ask(writer, LeaseExtent(self.slot[writer], granules * GRANULE, granules * GRANULE), stores)
        if not isinstance(reply, ExtentLeaseReply):
            return None
        assert reply.extent > self.most, "a number is used again"
        self.most = reply.extent
        granule = reply.offset // GRANULE
        assert (self.unit.pool.arena.generations[granule : granule + granules] == reply.generation).all()
        for _, other in self.leases.values():
            assert reply.offset >= other.offset + other.length or other.offset >= reply.offset + reply.length
        self.leases[reply.extent] = writer, reply
        return reply

    def give_back(self, number: int, stores: int | None = None) -> None:
        writer, lease = self.leases.pop(number)
        assert self.ask(writer, ReturnExtent(self.slot[writer], [number]), stores) == Done()
        self.was_freed(lease)

    def free(self, number: int, stores: int | None = None) -> None:
        _, lease = self.leases.pop(number)
        try:
            with killed_after(stores):
                self.unit.free([number])
        except Killed:
            self.restart()
            self.unit.free([number])
        self.was_freed(lease)

    def was_freed(self, lease: ExtentLeaseReply) -> None:
        granule = lease.offset // GRANULE
        there = self.unit.pool.arena.generations[granule : granule + lease.length // GRANULE]
        assert (there > lease.generation).all(), "who reads there does not see that it was freed"

    def check(self) -> None:
        self.unit.check()
        for number, (writer, lease) in self.leases.items():
            extent = self.unit.table.get(number)
            assert (extent.offset, extent.length, extent.slot) == (lease.offset, lease.length, self.slot[writer])
            assert self.unit.pool.arena.generation(lease.offset) == lease.generation


def script(system: System, at: str, stores: int | None) -> None:
    """Do some of each operation. The unit is killed in operation number `at`."""

    def when(name: str) -> int | None:
        return stores if name == at else None

    system.open("w", when("open"))
    first = system.lease("w", 3, when("lease"))
    system.lease("w", 2)
    system.give_back(first.extent, when("return"))
    system.check()
    again = system.lease("w", 4, when("lease over freed space"))
    system.free(again.extent, when("free"))
    system.lease("w", 5)
    system.check()


@pytest.mark.parametrize("at", ["open", "lease", "return", "lease over freed space", "free"])
def test_a_kill_after_any_store_leaves_a_valid_table(tmp_path: Path, at: str) -> None:
    stores = 0
    while True:
        stores += 1
        system = System(tmp_path / str(stores))
        with killed_after(None):
            restarts = system.starts
            script(system, at, stores)
        system.restart()
        system.check()
        if system.starts == restarts + 1:
            break  # there were not so many stores
    assert stores > 1


def test_a_lease_that_is_repeated_after_a_restart_gets_the_same_extent(tmp_path: Path) -> None:
    system = System(tmp_path / "a")
    system.open("w")
    lease = system.lease("w", 2)
    system.restart()
    [effect] = system.unit.handle("w", 9, system.sequence, LeaseExtent(system.slot["w"], 2 * GRANULE, 2 * GRANULE), 0.0)
    assert effect == SendReply(9, system.sequence, lease)
    [effect] = system.unit.handle("w", 9, 100, Cancel(system.sequence), 0.0)
    assert effect == SendReply(9, 100, Done(True))
    assert system.unit.table.leased == 0


def test_slots_are_suspects_until_their_writers_make_a_request(tmp_path: Path) -> None:
    system = System(tmp_path / "a")
    for writer in ("lives", "died", "only opened"):
        system.open(writer)
    lease = system.lease("died", 1)
    system.lease("lives", 1)
    system.slots.held &= {system.slots.path(system.slot["lives"])}
    system.restart()
    assert system.unit.next_deadline() == 0.0
    assert system.unit.tick(5.0) == [Report(Gone("died", 0, [lease.extent]))]
    assert set(system.slots.known_slots()) == {system.slot["lives"], system.slot["died"]}, (
        "who had nothing goes without a word"
    )
    system.leases.pop(lease.extent)
    assert system.lease("lives", 2) is not None
    assert system.unit.next_deadline() is None
    # killed again before the controller has freed what the dead one had
    system.restart()
    assert system.unit.repeat_reports() == [Report(Gone("died", 0, [lease.extent]))]
    system.unit.free([lease.extent])
    assert system.unit.repeat_reports() == []
    system.restart()
    assert system.unit.repeat_reports() == []
    system.check()


def test_slots_in_files(tmp_path: Path) -> None:
    folder = SlotFolder(tmp_path / "slots")
    folder.make(1, "first")
    folder.make(2, "second")
    (tmp_path / "slots" / "3.lock").write_bytes(b"half a na")
    assert folder.withdraw(2)
    assert {slot: tuple(known) for slot, known in SlotFolder(tmp_path / "slots").known_slots().items()} == {
        1: ("first", False),
        2: ("second", True),
    }
    assert not (tmp_path / "slots" / "3.lock").exists()
    # killed between the two files of a withdrawal
    folder.make(2, "second")
    assert SlotFolder(tmp_path / "slots").known_slots()[2] == ("second", False)
    assert folder.withdraw(2)
    folder.forget(2)
    assert list(SlotFolder(tmp_path / "slots").known_slots()) == [1]


def broken(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        (folder / name).unlink()

    return remove


def shortened(folder: Path) -> None:
    with open(folder / "extents", "r+b") as file:
        file.truncate(100)


def of_another(folder: Path) -> None:
    Arena.create(folder.with_name("other"), CAPACITY)
    (folder / "extents").write_bytes((folder.with_name("other") / "extents").read_bytes())


def overwritten(place: int, value: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        with open(folder / "extents", "r+b") as file:
            file.seek(place)
            file.write(value.to_bytes(8, "little"))

    return write


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (broken("arena"), "No such file"),
        (broken("header"), "No such file"),
        (broken("extents"), "No such file"),
        (shortened, "100 bytes"),
        (of_another, "does not belong to arena"),
        (overwritten(16, GRANULE + 1), "are allocated of"),
        (overwritten(4096 + 8, GRANULE + 1), "overlaps"),
        (overwritten(4096 + 8, 100 * GRANULE), "overlaps"),
        (overwritten(4096, 77), "not assigned yet"),
        (overwritten(4096 + 16, 77), "not assigned yet"),
        (overwritten(4096 + 3 * 32, 1), "the same number"),
    ],
)
def test_an_incomplete_or_damaged_arena_is_not_reopened(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    system = System(tmp_path / "a")
    system.open("w")
    system.lease("w", 3)
    system.lease("w", 1)
    damage(tmp_path / "a")
    with pytest.raises(AttachError, match=words):
        Arena.reopen(tmp_path / "a")


class Restarts(RuleBasedStateMachine):
    """Leases, returns and frees. In each of them the unit may be killed after any store."""

    kills = st.one_of(st.none(), st.integers(1, 12))

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="tq-test-")
        self.system = System(Path(self.folder.name) / "a")
        self.writers = 0
        self.now = 0.0

    def teardown(self) -> None:
        self.system.unit.pool.arena.close()
        self.folder.cleanup()

    @precondition(lambda self: len(self.system.slot) < 3)
    @rule(stores=kills)
    def open_slot(self, stores: int | None) -> None:
        self.writers += 1
        self.system.open(f"w{self.writers}", stores)

    @precondition(lambda self: self.system.slot)
    @rule(data=st.data(), granules=st.integers(1, 6), stores=kills)
    def lease(self, data: st.DataObject, granules: int, stores: int | None) -> None:
        self.system.lease(data.draw(st.sampled_from(sorted(self.system.slot))), granules, stores)

    @precondition(lambda self: self.system.leases)
    @rule(data=st.data(), stores=kills, returned=st.booleans())
    def end(self, data: st.DataObject, stores: int | None, returned: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.system.leases)))
        self.system.give_back(number, stores) if returned else self.system.free(number, stores)

    @precondition(lambda self: self.system.slot)
    @rule(data=st.data(), restarts=st.booleans())
    def die(self, data: st.DataObject, restarts: bool) -> None:
        writer = data.draw(st.sampled_from(sorted(self.system.slot)))
        system = self.system
        mine = sorted(number for number, (name, _) in system.leases.items() if name == writer)
        system.slots.held.discard(system.slots.path(system.slot.pop(writer)))
        if restarts:
            system.restart()
        effects: list[Effect] = system.unit.on_disconnect(system.peer(writer), 0.0)
        self.now += 10.0
        effects += system.unit.tick(self.now)
        told = [e.body for e in effects if isinstance(e, Report)]
        assert [(gone.writer, gone.extents) for gone in told if isinstance(gone, Gone) and gone.extents] == (
            [(writer, mine)] if mine else []
        )
        for number in mine:
            del system.leases[number]
        system.unit.free(mine)

    @invariant()
    def whole(self) -> None:
        self.system.check()
        assert self.system.unit.table.leased == sum(lease.length for _, lease in self.system.leases.values())


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
