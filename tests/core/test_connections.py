"""A controller that dies after any event, and one that takes its place: everybody gets what he would have got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import schema_of

from transfer_queue.core.absent_clients import GRACE_SECONDS
from transfer_queue.core.appliers import apply_record
from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.core.events.effects import ComputeDeal, Effect, Send, SendToUnit
from transfer_queue.core.events.records import RequestParked, Unparked
from transfer_queue.core.state.state import State
from transfer_queue.journal.segment import ClockIdentity, Frames, Reading, SegmentHeader
from transfer_queue.messages.base import Failure
from transfer_queue.messages.claims import Claim, Finish, ResetConsumption
from transfer_queue.messages.descriptors import NewBlock, PartitionOptions
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition, Seal, SetGroupDemand, SetPolicyVersion, TakeGroupDemand
from transfer_queue.messages.puts import ClearKeys, Drop, Publish, Reserve
from transfer_queue.messages.queries import ChangeReply, Watch
from transfer_queue.messages.reports.unit_reports import RegisterUnit, ReleaseExtents
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SequentialSampler
from transfer_queue.testing.state_recount import check_invariants

Step = tuple[str, AnyRequest]
HEAD = SegmentHeader.new(1, ClockIdentity(b"b" * 16, 0.0))


class World:
    """A controller with a journal in memory, and clients that send again what was not answered.

    replies: what each (client, sequence) got.
    """

    def __init__(self, sampler: Any, capacity: int | None = None) -> None:
        self.sampler, self.capacity = sampler, capacity
        self.now = 100.0
        self.replies: dict[tuple[str, int], AnyReply] = {}
        self.freed: set[tuple[int, int]] = set()
        self.unanswered: dict[tuple[str, int], AnyRequest] = {}  # in the order in which they were sent
        self.sequences: dict[str, int] = {}
        self.peers: dict[str, int] = {}
        self.next_peer = 1
        self.frames = Frames(HEAD)
        self.journal = HEAD.pack()
        self.controller = Controller(CoreConfig(sampler(), capacity=capacity))

    def begin(self, client: str, request: AnyRequest) -> None:
        """A client sends a request."""
        self.sequences[client] = self.sequences.get(client, 0) + 1
        self.unanswered[client, self.sequences[client]] = request
        self.connect(client)

    def connect(self, client: str) -> None:
        if client not in self.peers:
            self.peers[client] = self.next_peer
            self.next_peer += 1
            self.controller.on_connect(client, self.peers[client])

    def deliver(self, client: str, sequence: int) -> list[Effect]:
        request = self.unanswered[client, sequence]
        first = min([s for c, s in self.unanswered if c == client])
        envelope = msgspec.msgpack.encode(RequestEnvelope(sequence, first - 1, request))
        decoded = msgspec.msgpack.decode(envelope, type=RequestEnvelope)
        return self.controller.handle(client, self.peers[client], decoded, self.now)

    def commit(self) -> None:
        records = [r for r in self.controller.take_records() if not isinstance(r, (RequestParked, Unparked))]
        if records:
            self.journal += self.frames.pack(records)

    def take(self, effects: list[Effect]) -> None:
        """What leaves after a commit."""
        for effect in effects:
            if isinstance(effect, Send):
                client = next(name for name, peer in self.peers.items() if peer == effect.peer)
                assert (client, effect.sequence) in self.unanswered, "two replies"
                del self.unanswered[client, effect.sequence]
                self.replies[client, effect.sequence] = effect.reply
            elif isinstance(effect, SendToUnit):
                assert isinstance(effect.request, ReleaseExtents)
                self.freed |= {(effect.unit, extent) for extent in effect.request.extents}
            else:
                assert not isinstance(effect, ComputeDeal)

    def recover(self) -> State:
        """The state that the journal gives."""
        state = State(self.capacity)
        for records in Reading(Path("journal"), self.journal, True).frames():
            for record in records:
                apply_record(state, record)
        return state

    def crash(self) -> None:
        """The controller dies; another one begins with the journal, and all clients come back."""
        state = self.recover()
        check_invariants(state)
        self.controller = Controller(CoreConfig(self.sampler(), capacity=self.capacity), restored=state, now=self.now)
        known = list(self.peers)
        self.peers.clear()
        if "unit-0" in self.sequences:  # a unit registers with each controller
            self.sequences["unit-0"] += 1
            left = {waiter: request for waiter, request in self.unanswered.items() if waiter[0] != "unit-0"}
            self.unanswered = {("unit-0", self.sequences["unit-0"]): UNIT[1], **left}
        for client in known:
            self.connect(client)
        for client, sequence in list(self.unanswered):
            effects = self.deliver(client, sequence)
            self.commit()
            self.take(effects)

    def run(self, script: list[Step], crash: tuple[int, str] | None = None) -> None:
        for at, (client, request) in enumerate(script):
            self.begin(client, request)
            effects = self.deliver(client, self.sequences[client])
            if crash == (at, "before its commit"):
                self.crash()
                continue
            self.commit()
            if crash == (at, "before its replies"):
                self.crash()
                continue
            self.take(effects)
            if crash == (at, "after its replies"):
                self.crash()
        check_invariants(self.controller.state)


CRASHES = ("before its commit", "before its replies", "after its replies")


def block(rows: int, extent: int, fields: tuple[str, ...] = ("x",)) -> NewBlock:
    schema, dims = schema_of(fields, rows)
    return NewBlock(0, extent, extent << 16, 1, 640, rows, schema, dims)


def put(rows: int, extent: int, partition: str = "p", **more: Any) -> Publish:
    return Publish(partition, rows, block=block(rows, extent), closes=[(0, extent)], **{"pre_allocate": 0, **more})


def claim(count: int, task: str = "t", partition: str = "p", wait: float | None = 50.0, **sampling: Any) -> Claim:
    return Claim(partition, task, ["x"], count, sampling, wait)


def column(*rows: int) -> bytes:
    return np.array(rows, "<i8").tobytes()


UNIT: Step = ("unit-0", RegisterUnit("unit.sock", "/arena"))
SCRIPTS: dict[str, tuple[Any, int | None, list[Step]]] = {
    "keys, tags and parked claims": (SequentialSampler, None, [
        UNIT,
        ("a", claim(2)),
        ("b", claim(1)),
        ("c", Watch("p", None, {}, 50.0)),
        ("w", put(1, 1, keys=["k0"], tags=[{"n": 1}])),
        ("w", put(2, 2, keys=["k1", "k2"], tags=[{"n": 1}, None])),
        ("w", put(1, 3, keys=["k1"], tags=[{"m": [1, b"x"]}])),
        ("a", claim(2)),
        ("v", Reserve("p", 2, ["r0", "r1"], 0)),
        ("w", ClearKeys("p", ["k0", "nobody"])),
        ("v", put(1, 4, keys=["r0"])),
        ("v", put(1, 5, keys=["r1"])),
        ("b", ResetConsumption("p", "t")),
        ("b", claim(3)),
        ("w", Seal("p")),
        ("b", claim(3)),
        ("c", Drop("p", "bad", column(1))),
    ]),
    "space, holds and demand": (SequentialSampler, 4, [
        UNIT,
        ("w", CreatePartition("p", 0, PartitionOptions(free_when=["t"]))),
        ("a", SetGroupDemand("p", "t", 3)),
        ("w", TakeGroupDemand("p", "t", 5)),
        ("w", put(3, 1)),
        ("v", put(2, 2, wait=50.0)),
        ("v", put(1, 3, wait=50.0)),
        ("a", claim(2, dp_rank=0)),
        ("b", claim(1, dp_rank=1)),
        ("a", Finish("p", "t", column(0, 1), "a")),
        ("a", claim(2, dp_rank=0)),
        ("b", claim(1, dp_rank=1)),
        ("a", Finish("p", "t", column(3, 4), "a")),
    ]),
    "staleness": (SequentialSampler, None, [
        UNIT,
        ("w", CreatePartition("p", 0, PartitionOptions(max_staleness=1, rows_per_version=2))),
        ("w", put(4, 1)),
        ("w", put(2, 2, wait=50.0)),
        ("t", SetPolicyVersion("p", 1)),
        ("a", claim(6)),
    ]),
    "groups": (lambda: GRPOGroupNSampler(2), None, [
        UNIT,
        ("a", claim(2, dp_rank=0, batch_index=0)),
        ("b", claim(2, dp_rank=1, batch_index=0)),
        ("w", put(3, 1, groups=["g", "h", "h"])),
        ("w", put(1, 2, groups=["g"])),
        ("a", claim(2, dp_rank=0, batch_index=0)),
        ("w", put(4, 3, groups=["i", "i", "j", "k"])),
        ("a", claim(2, dp_rank=0, batch_index=1)),
        ("w", Drop("p", "even", b"", ["j"])),
        ("w", Seal("p")),
        ("b", claim(2, dp_rank=1, batch_index=1)),
    ]),
    "ranks": (RankAwareSampler, None, [
        UNIT,
        ("w", put(4, 1)),
        ("a", claim(2, dp_rank=0, batch_index=0)),
        ("b", claim(2, dp_rank=1, batch_index=0)),
        ("c", claim(2, dp_rank=0, batch_index=0)),
        ("a", claim(2, dp_rank=0, batch_index=1)),
        ("w", put(3, 2)),
    ]),
}  # fmt: skip


def outcomes(world: World) -> dict[tuple[str, int], object]:
    """What the clients got; of changes which rows, as an answer that is given later is of a newer version."""
    told = {waiter: reply for waiter, reply in world.replies.items() if waiter[0] != "unit-0"}
    return {waiter: reply.rows if isinstance(reply, ChangeReply) else reply for waiter, reply in told.items()}


def without_unit(world: World) -> dict[str, Any]:
    """The state, but for replies to the unit, and for when those who wait began to."""
    state = world.controller.state.snapshot()
    clients = {client: kept for client, kept in dict(state["clients"]).items() if client != "unit-0"}  # type: ignore[call-overload]
    return {**state, "clients": clients, "waiting": None}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_crash_after_any_event_changes_nothing(script: str) -> None:
    sampler, capacity, steps = SCRIPTS[script]
    undisturbed = World(sampler, capacity)
    undisturbed.run(steps)
    assert not [reply for reply in undisturbed.replies.values() if isinstance(reply, Failure)]
    for at in range(len(steps)):
        for crash in CRASHES:
            world = World(sampler, capacity)
            world.run(steps, (at, crash))
            assert outcomes(world) == outcomes(undisturbed), (at, crash)
            assert list(world.unanswered) == list(undisturbed.unanswered), (at, crash)
            assert world.freed >= undisturbed.freed, (at, crash)
            assert without_unit(world) == without_unit(undisturbed), (at, crash)


def test_crash_after_crash() -> None:
    """A controller that dies again and again gets on all the same."""
    sampler, capacity, steps = SCRIPTS["keys, tags and parked claims"]
    undisturbed, world = World(sampler, capacity), World(sampler, capacity)
    undisturbed.run(steps)
    for client, request in steps:
        world.begin(client, request)
        world.crash()
        world.crash()
    assert outcomes(world) == outcomes(undisturbed)


# ---------------------------------------------------------------- who comes back


def holding(now: float = 100.0) -> World:
    """Client "a" holds two of four rows; "w" has reserved two that it has not put."""
    world = World(SequentialSampler)
    world.now = now
    world.run([
        UNIT,
        ("w", CreatePartition("p", 0, PartitionOptions(free_when=["t"]))),
        ("w", put(4, 1)),
        ("w", Reserve("p", 2, None, 0)),
        ("a", claim(2)),
    ])  # fmt: skip
    return world


def restarted(world: World, **more: Any) -> Controller:
    """The controller in its place, to which nobody has come back."""
    return Controller(CoreConfig(SequentialSampler(), **more), restored=world.recover(), now=world.now)


def test_who_does_not_come_back_is_gone_after_the_grace() -> None:
    world = holding()
    core = restarted(world)
    partition = core.state.partitions["p"]
    assert core.next_deadline() == world.now + GRACE_SECONDS
    core.tick(world.now + GRACE_SECONDS - 0.1)
    assert (partition.row_count, list(core.context.connections.departed)) == (6, [])
    core.tick(world.now + GRACE_SECONDS)
    assert partition.row_count == 4, "what the client held is finished, and freed"
    assert set(core.context.connections.departed) == {"a", "w", "unit-0"}
    assert core.context.connections.peers == {}
    assert core.next_deadline() is None


def test_who_comes_back_keeps_what_he_holds() -> None:
    world = holding()
    core = restarted(world)
    core.on_connect("a", 1)
    core.tick(world.now + GRACE_SECONDS)
    assert core.state.partitions["p"].row_count == 6
    assert set(core.context.connections.peers) == {"a"}
    core.on_disconnect("a", 1, world.now + 20.0)
    assert core.state.partitions["p"].row_count == 4


def test_who_is_known_to_live_is_awaited_on() -> None:
    world = holding()
    living = {"a"}
    core = restarted(world, lives=lambda client: client in living)
    core.tick(world.now + GRACE_SECONDS)
    assert core.state.partitions["p"].row_count == 6
    living.clear()
    assert core.next_deadline() == world.now + 2 * GRACE_SECONDS
    core.tick(world.now + 2 * GRACE_SECONDS)
    assert core.state.partitions["p"].row_count == 4


def test_a_seal_in_the_grace_spares_rows_of_those_awaited() -> None:
    """What a client has reserved and not put is dropped only when it is gone."""
    world = holding()
    core = restarted(world)
    core.on_connect("x", 1)
    core.handle("x", 1, RequestEnvelope(1, 0, Seal("p")), world.now)
    assert core.state.partitions["p"].row_count == 6
    core.on_connect("a", 2)
    core.tick(world.now + GRACE_SECONDS)
    assert core.state.partitions["p"].row_count == 4, "the two that were never put"


def test_no_deadlock_is_called_over_who_has_not_come_back() -> None:
    """A client that was clearing rows before the restart may go on to clear some."""
    world = World(SequentialSampler, capacity=2)
    world.run([UNIT, ("w", put(2, 1)), ("c", ClearKeys("p", ["none"]))])
    core = World(SequentialSampler, capacity=2)
    core.journal = world.journal
    core.crash()
    for client, request in (("w", put(1, 2, wait=50.0)), ("a", claim(3))):
        core.sequences[client] = 10
        core.begin(client, request)
        core.take(core.deliver(client, core.sequences[client]))
    assert not core.replies, "both wait"
    effects = core.controller.tick(core.now + GRACE_SECONDS)
    (told,) = [effect for effect in effects if isinstance(effect, Send)]
    assert isinstance(told.reply, Failure)
    assert told.reply.kind == "DeadlockError", "now nobody is left"


def test_rows_age_on() -> None:
    world = World(SequentialSampler)
    world.run([UNIT, ("w", CreatePartition("p", 0, PartitionOptions(keep_seconds=10.0))), ("w", put(2, 1))])
    core = restarted(world)
    core.tick(world.now + 9.0)
    assert core.state.partitions["p"].row_count == 2
    core.tick(world.now + 11.0)
    assert core.state.partitions["p"].row_count == 0
