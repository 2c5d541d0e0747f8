"""Where a client writes, against storage units in this process."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer_queue.client.data.extent_allocator import (
    ALIGNMENT,
    DEDICATED,
    LARGEST_EXTENT,
    OPEN_EXTENTS,
    SMALLEST_EXTENT,
    ExtentAllocator,
)
from transfer_queue.errors import CapacityError, InvalidArgumentError, ProtocolError, UnitLostError, by_name
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Cancel
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.storage import ExtentLeaseReply, LeaseExtent, OpenSlot, ReturnExtent, SlotReply
from transfer_queue.net.calls import Call
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.protocols import Reserved
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.storage.unit.unit_effects import SendReply
from transfer_queue.testing.simulated_locks import HeldSlots, SimulatedSlotLock, SimulatedSlots

MIB = 1 << 20
T = TypeVar("T")


class Servers:
    """Storage units, and a driver that carries out calls on them one at a time."""

    def __init__(self, folder: Path, *capacities: int) -> None:
        self.held = HeldSlots()
        self.locks = [SimulatedSlots(number, self.held) for number in range(len(capacities))]
        self.units = [
            StorageUnit(number, ArenaPool(Arena.create(folder / str(number), capacity)), self.locks[number])
            for number, capacity in enumerate(capacities)
        ]
        self.mutex = threading.Lock()
        self.sequence = 0
        self.calls: list[Call] = []
        self.holds = 0

    def hold(self, path: Path) -> SimulatedSlotLock:
        unit, slot = map(int, path.name.split("-"))
        assert path.name not in self.held, "a slot file is opened once"
        if slot not in self.locks[unit].known_slots():
            raise ProtocolError("withdrawn")
        self.holds += 1
        return SimulatedSlotLock(self.held, path)

    def space(self, writer: str = "w") -> ExtentAllocator:
        return ExtentAllocator(writer, range(len(self.units)), self.hold)

    def answer(self, call: Call, writer: str = "w") -> AnyReply:
        with self.mutex:
            self.calls.append(call)
            self.sequence += 1
            call.sequence = self.sequence
            kind, number = call.target
            assert kind == "unit"
            unit = self.units[number]
            effects = unit.handle(writer, 1, self.sequence, call.body, 0.0)
            if not effects:
                assert isinstance(call.body, LeaseExtent)
                assert call.timeout == call.body.wait
                effects = unit.tick(1e9)
            unit.check()
            [effect] = effects
            assert isinstance(effect, SendReply)
            return effect.reply

    def run(self, operation: Generator[Call, AnyReply, T], writer: str = "w") -> T:
        try:
            call = next(operation)
            while True:
                reply = self.answer(call, writer)
                if isinstance(reply, Failure):
                    call = operation.throw(by_name(reply.kind)(reply.message))
                else:
                    call = operation.send(reply)
        except StopIteration as stop:
            return stop.value

    def leased(self) -> set[tuple[int, int]]:
        return {(unit.number, each.number) for unit in self.units for each in unit.table.leased_extents()}

    def close(self) -> None:
        for unit in self.units:
            unit.pool.arena.close()
            unit.pool.arena.remove()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path, 32 * MIB)
    yield servers
    servers.close()


@pytest.fixture
def space(servers: Servers) -> ExtentAllocator:
    return servers.space()


def put(servers: Servers, space: ExtentAllocator, nbytes: int) -> Reserved:
    """A put that succeeds; what it closes is freed, as if all of it had been cleared before."""
    reserved = servers.run(space.reserve(nbytes))
    servers.units[0].free([number for _, number in space.take_closes(reserved)])
    space.mark_published(reserved)
    return reserved


def test_small_blocks_share_an_extent(servers: Servers, space: ExtentAllocator) -> None:
    blocks = [put(servers, space, nbytes) for nbytes in (100, 1, 64, 0, 65)]
    assert [block.offset for block in blocks] == [0, 128, 192, 256, 320]
    assert {(block.unit, block.extent, block.generation) for block in blocks} == {(0, 1, 1)}
    assert [block.nbytes for block in blocks] == [100, 1, 64, 0, 65]
    assert [type(call.body) for call in servers.calls] == [OpenSlot, LeaseExtent]
    lease = servers.calls[1]
    assert (lease.target, lease.timeout) == (("unit", 0), None)
    assert lease.body == LeaseExtent(1, 128, SMALLEST_EXTENT, None, 0)


def test_extents_double_as_they_are_used_up(servers: Servers, space: ExtentAllocator) -> None:
    for _ in range(400):
        put(servers, space, GRANULE // 2)
    wants = [call.body.want for call in servers.calls if isinstance(call.body, LeaseExtent)]
    assert wants[:7] == [SMALLEST_EXTENT << i for i in range(7)]
    assert set(wants[7:]) == {LARGEST_EXTENT}


def test_a_large_block_has_an_extent_of_its_own(servers: Servers, space: ExtentAllocator) -> None:
    small = servers.run(space.reserve(10))
    large = servers.run(space.reserve(DEDICATED + 1))
    assert servers.units[0].table.get(large.extent).length == DEDICATED + GRANULE  # type: ignore[union-attr]
    after = servers.run(space.reserve(10))
    assert after.extent == small.extent != large.extent
    assert space.take_closes(large) == [(0, large.extent)]
    space.mark_published(large)
    assert space.take_closes() == []


def test_the_order_of_keep_and_abandon_does_not_matter(servers: Servers, space: ExtentAllocator) -> None:
    failed = servers.run(space.reserve(DEDICATED))
    closes = space.take_closes(failed)
    space.abandon(failed)
    space.restore_closes(closes)
    assert space.take_closes() == []
    assert space.take_returns() == [(0, failed.extent)]


def test_a_publish_of_unknown_outcome_counts_as_published(servers: Servers, space: ExtentAllocator) -> None:
    lost = servers.run(space.reserve(DEDICATED))
    space.restore_closes(space.take_closes(lost))
    space.mark_published(lost)
    assert space.take_closes() == [(0, lost.extent)]
    assert space.take_returns() == []


def test_an_abandoned_block_leaves_its_bytes_to_the_next(servers: Servers, space: ExtentAllocator) -> None:
    kept, failed = servers.run(space.reserve(100)), servers.run(space.reserve(100))
    space.mark_published(kept)
    space.abandon(failed)
    assert servers.run(space.reserve(7)).offset == failed.offset


def test_an_extent_of_others_is_closed_though_its_last_block_was_abandoned(
    servers: Servers, space: ExtentAllocator
) -> None:
    first, last = (servers.run(space.reserve(SMALLEST_EXTENT // 2)) for _ in range(2))
    space.mark_published(first)
    assert space.take_closes(last) == [(0, last.extent)]
    space.abandon(last)
    assert space.take_closes() == [(0, last.extent)]
    assert space.take_returns() == []


def test_a_gap_is_wasted_until_nothing_is_left(servers: Servers, space: ExtentAllocator) -> None:
    first, second = servers.run(space.reserve(64)), servers.run(space.reserve(64))
    space.abandon(first)
    third = servers.run(space.reserve(64))
    assert third.offset == second.offset + 64
    space.abandon(second)
    space.abandon(third)
    assert servers.run(space.reserve(64)).offset == first.offset


def test_abandoned_extents_go_back_to_their_unit(servers: Servers, space: ExtentAllocator) -> None:
    for _ in range(2):
        space.abandon(servers.run(space.reserve(DEDICATED)))
    small = servers.run(space.reserve(1))
    space.abandon(small)
    space.drain()
    servers.run(space.return_extents())
    assert servers.calls[-1].body == ReturnExtent(1, [1, 2, 3], 0)
    assert servers.leased() == set()
    servers.run(space.return_extents())
    assert space.take_returns() == []


def test_what_cannot_be_returned_stays_queued(servers: Servers, space: ExtentAllocator) -> None:
    large = servers.run(space.reserve(DEDICATED))
    space.abandon(large)
    operation = space.return_extents()
    next(operation)
    with pytest.raises(ConnectionError):
        operation.throw(ConnectionError("lost"))
    assert space.take_returns() == [(0, large.extent)]


def test_a_reservation_ends_once(servers: Servers, space: ExtentAllocator) -> None:
    reserved = servers.run(space.reserve(1))
    space.mark_published(reserved)
    for end in (space.mark_published, space.abandon, space.take_closes):
        with pytest.raises(InvalidArgumentError, match="not in flight"):
            end(reserved)
    with pytest.raises(InvalidArgumentError):
        space.mark_published(Reserved(0, 99, 0, 1, 1))


def test_nothing_is_left_of_a_lease_that_failed(servers: Servers, space: ExtentAllocator) -> None:
    with pytest.raises(CapacityError, match="capacity"):
        servers.run(space.reserve(33 * MIB))
    with pytest.raises(InvalidArgumentError):
        servers.run(space.reserve(-1))
    assert servers.leased() == set()
    held = servers.run(space.reserve(20 * MIB))
    with pytest.raises(CapacityError, match="capacity"):
        servers.run(space.reserve(20 * MIB, wait=5.0))
    assert servers.calls[-1].timeout == 5.0
    assert servers.leased() == {(0, held.extent)}


def test_a_call_that_is_given_up_leaves_the_space_whole(servers: Servers, space: ExtentAllocator) -> None:
    for steps in (1, 2):
        operation = space.reserve(10)
        call = next(operation)
        for _ in range(steps - 1):
            call = operation.send(servers.answer(call))
        operation.close()
    assert servers.run(space.reserve(10)).offset == 0


def test_threads_that_run_out_together_open_few_extents(servers: Servers, space: ExtentAllocator) -> None:
    space.mark_published(servers.run(space.reserve(0)))
    operations = [space.reserve(SMALLEST_EXTENT // 2 + 1) for _ in range(OPEN_EXTENTS + 3)]
    space.drain()
    calls = [next(operation) for operation in operations]
    for operation, call in zip(operations, calls, strict=True):
        with pytest.raises(StopIteration) as stop:
            operation.send(servers.answer(call))
        space.mark_published(stop.value.value)
    assert len(servers.leased()) == OPEN_EXTENTS + 4
    assert len(space.take_closes()) == 4  # the drained one, and what is too many


def test_a_slot_is_locked_once_however_many_ask(servers: Servers, space: ExtentAllocator) -> None:
    first, second = space.reserve(1), space.reserve(1)
    calls = [next(first), next(second)]
    assert [call.body for call in calls] == [OpenSlot("w", 0)] * 2
    leases = [operation.send(servers.answer(call)).body for operation, call in zip((first, second), calls, strict=True)]
    assert [(type(lease), lease.slot) for lease in leases] == [(LeaseExtent, 1)] * 2
    assert servers.holds == 1


def test_a_withdrawn_slot_is_asked_for_anew(servers: Servers, space: ExtentAllocator) -> None:
    operation = space.reserve(1)
    reply = servers.answer(next(operation))
    servers.units[0].on_disconnect(1, 0.0)
    call = operation.send(reply)
    assert call.body == OpenSlot("w", 0)
    call = operation.send(servers.answer(call))
    assert isinstance(call.body, LeaseExtent)
    assert call.body.slot == 2


def test_a_slot_that_is_withdrawn_again_and_again_is_an_error(servers: Servers) -> None:
    def never(_: Path) -> SimulatedSlotLock:
        raise ProtocolError("withdrawn")

    with pytest.raises(ProtocolError, match="withdrawn"):
        servers.run(ExtentAllocator("w", [0], never).reserve(1))
    assert [type(call.body) for call in servers.calls] == [OpenSlot] * 3


SLOT = SlotReply(1, "0-1")


@pytest.mark.parametrize("replies", [[Done()], [SLOT, Done()], [SLOT, ExtentLeaseReply(1, 0, 0, 1)],
                                     [SLOT, ExtentLeaseReply(1, 1, GRANULE, 1)]])  # fmt: skip
def test_strange_replies_are_refused(servers: Servers, space: ExtentAllocator, replies: list[AnyReply]) -> None:
    servers.locks[0].make(1, "w")
    operation = space.reserve(1)
    next(operation)
    with pytest.raises(ProtocolError, match="replied"):  # noqa: PT012
        for reply in replies:
            operation.send(reply)


def test_a_client_that_releases_its_slots_is_taken_for_dead(servers: Servers, space: ExtentAllocator) -> None:
    servers.run(space.reserve(1))
    assert servers.units[0].on_disconnect(1, 0.0) == []
    space.release()
    assert len(servers.units[0].tick(1e9)) == 1


def test_another_unit_is_used_where_one_is_full(tmp_path: Path) -> None:
    servers = Servers(tmp_path, 2 * MIB, 2 * MIB)
    space = servers.space()
    blocks = [servers.run(space.reserve(2 * MIB)) for _ in range(2)]
    assert [block.unit for block in blocks] == [0, 1]
    with pytest.raises(CapacityError, match="storage unit 1"):
        servers.run(space.reserve(2 * MIB))
    with pytest.raises(CapacityError, match="storage unit 0 after"):
        servers.run(space.reserve(2 * MIB, wait=1.0))
    for block in blocks:
        space.abandon(block)
    servers.run(space.return_extents())
    assert servers.leased() == set()
    with pytest.raises(InvalidArgumentError):
        ExtentAllocator("w", [])
    servers.close()


def test_threads_never_share_bytes(servers: Servers, space: ExtentAllocator) -> None:
    """Each thread fills its blocks with its own mark, and finds it there when all have written."""
    threads, rounds = 8, 60
    arena = Arena.open(servers.units[0].pool.arena.folder)
    barrier = threading.Barrier(threads)
    kept: list[list[Reserved]] = [[] for _ in range(threads)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            barrier.wait()
            for turn in range(rounds):
                nbytes = (37 * (turn + 1) * (number + 1)) % 9000 if turn % 20 else DEDICATED
                reserved = servers.run(space.reserve(nbytes))
                arena.view(reserved.offset, reserved.nbytes)[:] = number + 1
                if turn % 3 == 0:
                    space.abandon(reserved)
                    servers.run(space.return_extents())
                else:
                    space.take_closes(reserved)
                    space.mark_published(reserved)
                    kept[number].append(reserved)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    for number, blocks in enumerate(kept):
        assert len(blocks) == rounds * 2 // 3
        for block in blocks:
            assert (arena.view(block.offset, block.nbytes) == number + 1).all()
    arena.close()


class Life(RuleBasedStateMachine):
    """One client's blocks, with a controller that frees an extent when it is closed and empty."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="tq-test-")
        self.servers = Servers(Path(self.folder.name), 8 * MIB)
        self.space = self.servers.space()
        self.flying: list[Reserved] = []
        self.live: list[Reserved] = []
        self.closed: set[tuple[int, int]] = set()

    def teardown(self) -> None:
        for reserved in self.flying:
            self.space.mark_published(reserved)
            self.live.append(reserved)
        self.space.drain()
        self.closed.update(self.space.take_closes())
        self.servers.run(self.space.return_extents())
        self.live.clear()
        self.free()
        assert self.servers.leased() == set()
        assert (self.space._extents, self.space._open) == ({}, [])
        self.servers.close()
        self.folder.cleanup()

    def free(self) -> None:
        over = self.closed - {(block.unit, block.extent) for block in self.live}
        assert over <= self.servers.leased(), "an extent is closed once"
        self.servers.units[0].free([number for _, number in over])
        self.closed -= over

    @rule(nbytes=st.one_of(st.integers(0, 3000), st.integers(0, 70_000), st.integers(DEDICATED, 2 * DEDICATED)))
    def reserve(self, nbytes: int) -> None:
        try:
            reserved = self.servers.run(self.space.reserve(nbytes))
        except CapacityError:
            return
        assert (reserved.nbytes, reserved.offset % ALIGNMENT) == (nbytes, 0)
        assert reserved.generation == self.servers.units[0].pool.arena.generation(reserved.offset)
        self.flying.append(reserved)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), carries=st.booleans(), succeeds=st.booleans())
    def publish(self, data: st.DataObject, carries: bool, succeeds: bool) -> None:
        reserved = data.draw(st.sampled_from(self.flying))
        self.flying.remove(reserved)
        closes = self.space.take_closes(reserved if carries else None)
        if succeeds:
            self.space.mark_published(reserved)
            self.live.append(reserved)
            assert not self.closed & set(closes)
            self.closed.update(closes)
            assert not {(block.unit, block.extent) for block in self.flying} & set(closes)
            self.free()
        else:
            self.space.restore_closes(closes)
            self.space.abandon(reserved)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.live.remove(data.draw(st.sampled_from(self.live)))
        self.free()

    @rule()
    def give_back(self) -> None:
        self.servers.run(self.space.return_extents())

    @rule()
    def drain(self) -> None:
        self.space.drain()

    @invariant()
    def nobody_shares_bytes(self) -> None:
        leased = {
            (unit.number, extent.number): extent
            for unit in self.servers.units
            for extent in unit.table.leased_extents()
        }
        end = 0
        for block in sorted(self.flying + self.live, key=lambda block: block.offset):
            assert block.offset >= end
            end = block.offset + block.nbytes
            extent = leased[block.unit, block.extent]
            assert extent.offset <= block.offset
            assert end <= extent.offset + extent.length


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


# ---------------------------------------------------------------- interrupted leases, lost units


def interrupted(servers: Servers, space: ExtentAllocator, arrives: bool, later: bool = False) -> Call:
    """A put that is interrupted while it waits for its lease, which the unit gets now, never, or later."""
    operation = space.reserve(1)
    call = next(operation)
    while not isinstance(call.body, LeaseExtent):
        call = operation.send(servers.answer(call))
    servers.sequence += 1
    call.sequence = servers.sequence
    if arrives:
        servers.units[0].handle("w", 1, call.sequence, call.body, 0.0)
    with pytest.raises(KeyboardInterrupt):
        operation.throw(KeyboardInterrupt())
    return call


@pytest.mark.parametrize("arrives", [False, True])
def test_a_lease_whose_put_was_interrupted_is_taken_back(
    servers: Servers, space: ExtentAllocator, arrives: bool
) -> None:
    call = interrupted(servers, space, arrives)
    assert len(servers.leased()) == arrives
    reserved = servers.run(space.reserve(1))
    assert servers.leased() == {(0, reserved.extent)}
    # what comes late, on a connection that was given up, is not granted
    servers.units[0].handle("w", 1, call.sequence, call.body, 0.0)
    assert servers.leased() == {(0, reserved.extent)}


def test_a_client_that_ends_takes_its_interrupted_leases_back(servers: Servers, space: ExtentAllocator) -> None:
    interrupted(servers, space, arrives=True)
    interrupted(servers, space, arrives=True)
    space.drain()
    servers.run(space.return_extents())
    assert servers.leased() == set()


def test_an_interrupted_cancel_is_repeated(servers: Servers, space: ExtentAllocator) -> None:
    interrupted(servers, space, arrives=True)
    operation = space.reserve(1)
    assert isinstance(next(operation).body, Cancel)
    with pytest.raises(KeyboardInterrupt):
        operation.throw(KeyboardInterrupt())
    servers.run(space.return_extents())
    assert servers.leased() == set()


def test_what_a_lost_unit_held_is_forgotten(tmp_path: Path) -> None:
    servers = Servers(tmp_path, 8 * MIB, 8 * MIB)
    space = servers.space()
    published, small, large = (servers.run(space.reserve(nbytes)) for nbytes in (10, 10, DEDICATED))
    closed, returned = servers.run(space.reserve(DEDICATED)), servers.run(space.reserve(DEDICATED))
    space.mark_published(closed)
    space.abandon(returned)
    assert {reserved.unit for reserved in (small, large, closed, returned)} == {0}
    space.set_units([1])
    # puts that were under way end, whatever became of them
    space.mark_published(published)
    space.abandon(small)
    closes = space.take_closes(large)
    space.restore_closes(closes)
    space.abandon(large)
    assert (space.take_closes(), space.take_returns(), space._extents) == ([], [], {})
    assert servers.run(space.reserve(10)).unit == 1
    assert servers.held == {"1-1"}
    servers.close()


def test_a_unit_that_is_another_now_grants_and_frees_nothing(servers: Servers, space: ExtentAllocator) -> None:
    reserved = servers.run(space.reserve(10))
    servers.units[0].number = 1
    with pytest.raises(UnitLostError, match="storage unit 0 is lost; storage unit 1 has replaced it"):
        servers.run(space.reserve(DEDICATED))
    space.abandon(reserved)
    space.drain()
    with pytest.raises(UnitLostError):
        servers.run(space.return_extents())
    assert servers.leased() == {(1, reserved.extent)}
    space.set_units([1])
    servers.run(space.return_extents())  # nothing is left to return, so the unit, which would refuse, is not asked
    assert servers.leased() == {(1, reserved.extent)}
    servers.units[0].number = 0
