"""Drives a `Controller` as a server and its clients would, checking the whole state after every event.

Blocks are fabricated: schema, dims and place are valid, no bytes exist. At the end `replay` proves that the records
alone give the state that live operation had, and `check_saving` that the state comes back whole out of a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import sameness

from transfer_queue.core import checkpoints
from transfer_queue.core.appliers import apply_record
from transfer_queue.core.claims.plan import Plans
from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.core.events.effects import (
    AskSampler,
    ComputeDeal,
    Effect,
    ReadState,
    Release,
    RemoveMirror,
    Send,
    SendToUnit,
    WriteState,
)
from transfer_queue.core.events.records import RequestParked, Unparked
from transfer_queue.core.jobs import Jobs
from transfer_queue.core.samplers.calls import AnySampler, HostedRunner, UserSampler, copy_containers
from transfer_queue.core.state import serialization
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.rows import Chunk
from transfer_queue.errors import TransferQueueError, by_name
from transfer_queue.journal import state_file
from transfer_queue.journal.segment import JournalRecord
from transfer_queue.messages.base import DELETE_CODE, Done, Failure
from transfer_queue.messages.checkpoints import LoadState
from transfer_queue.messages.claims import Ack, Claim, ClaimReply, Nack, ReportBatches
from transfer_queue.messages.descriptors import FieldSpec, NewBlock, PartitionOptions
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.messages.puts import ClearRows, Publish, PublishReply
from transfer_queue.messages.queries import Lookup, LookupReply
from transfer_queue.messages.reports.unit_reports import (
    DrainFinished,
    Move,
    RefuseWriters,
    RegisterUnit,
    ReleaseExtents,
)
from transfer_queue.sampler import BaseSampler, SequentialSampler
from transfer_queue.sampler.calls.call_messages import Question, ViewReply
from transfer_queue.sampler.calls.sampler_calls import (
    CALLS,
    RemotePartition,
    RemoteReady,
    RowsChanged,
    answer,
    describe,
)
from transfer_queue.sampler.sampler_wrapper import built_in
from transfer_queue.testing.state_recount import check_invariants

DELETE = msgspec.msgpack.Ext(DELETE_CODE, b"")
BLOCKS_AN_EXTENT = 3  # after so many blocks the extent is closed with the publish of the last
BYTES = 640
EXTENT = 64 << 10

Fields = Sequence[str] | dict[str, Any]
T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode
envelope_of = msgspec.msgpack.Decoder(RequestEnvelope).decode

made: list[Harness] = []  # those of the running test; `conftest` replays each at its end


def tensor(dtype: str = "float32", shape: Sequence[Any] = (4,)) -> tuple[str, Any]:
    """Values of one row shape; or, with a list of shapes, one a row."""
    return dtype, shape


OBJECT = ("object", None)


def schema_of(fields: Fields, rows: int) -> tuple[list[FieldSpec], bytes]:
    """Schema and dims of a block with these fields."""
    if not isinstance(fields, dict):
        fields = {name: tensor() for name in fields}
    schema, dims = [], []
    for name, (dtype, shape) in fields.items():
        if dtype == "object":
            schema.append(FieldSpec(name, "object", "object", 1, True))
            dims += [9] * rows
        elif isinstance(shape, list) and len({len(s) for s in shape}) > 1:
            schema.append(FieldSpec(name, "tensor", dtype, -1, True))
            for one in shape:
                dims += [len(one), *one]
        elif isinstance(shape, list):
            assert len(shape) == rows
            schema.append(FieldSpec(name, "tensor", dtype, len(shape[0]), True))
            for one in shape:
                dims += one
        else:
            schema.append(FieldSpec(name, "tensor", dtype, len(shape), False))
            dims += shape
    return schema, np.array(dims, "<i8").tobytes()


def column(rows: Iterable[int]) -> bytes:
    """Global indexes as a message carries them."""
    return np.array(list(rows), "<i8").tobytes()


def rows_of(reply: AnyReply | None) -> list[int]:
    """The global indexes in a reply."""
    assert isinstance(reply, (PublishReply, ClaimReply)), reply
    return np.frombuffer(reply.rows, "<i8").tolist()


class Client:
    """One client: its connection, its sequences, its open extent, all blocks that it published."""

    def __init__(self, name: str, peer: int) -> None:
        self.name = name
        self.peer = peer
        self.sequence = 0
        self.acknowledged = 0
        self.finished: list[tuple[int, int]] = []
        self.extent = 0
        self.blocks = 0


class Harness:
    """now: the clock. replies: what each (peer, sequence) got. freed: (unit, extent) in order. records: all so far.

    told: of these, what units were told since one registered: it is told again of what it has not confirmed.
    refused: (unit, words) of leases to be refused. unit: where blocks are put.
    """

    isolated = False
    """Whether a user's sampler is called as if it were in a process of its own: through effects and messages."""

    def __init__(
        self,
        sampler: BaseSampler | None = None,
        capacity: int | None = None,
        task_samplers: Mapping[str, BaseSampler] | None = None,
        **core: Any,
    ) -> None:
        self.core = {"capacity": capacity, **core}  # of each `CoreConfig`
        self.users = {"": sampler or SequentialSampler(), **(task_samplers or {})}  # by the pattern of tasks
        self.samplers: dict[str, AnySampler] = {**self.users}
        for pattern, each in self.users.items():
            if self.isolated and not built_in(each):
                self.samplers[pattern] = UserSampler(HostedRunner(describe(each), pattern))
        self.asks: list[AskSampler] = []  # emitted and not answered; one at a time for each sampler
        self.asks_wait = False  # until `answer` is called
        self.controller = self._make_controller()
        self.now = 0.0
        self.replies: dict[tuple[int, int], AnyReply] = {}
        self.freed: list[tuple[int, int]] = []
        self.told: set[tuple[int, int]] = set()
        self.works: list[ComputeDeal] = []  # given away and not done, oldest first
        self.orders: list[tuple[int, Move | DrainFinished]] = []  # to units, oldest first
        self.refused: list[tuple[int, str]] = []
        self.writes: list[WriteState] = []  # files of checkpoints to be written, oldest first
        self.removed: list[int] = []  # connections of retired mirrors that are to remove their arenas
        self.records: list[Any] = []
        self.clients: dict[str, Client] = {}
        self.peers = 0
        self.extents = 0
        self.unit = 0
        made.append(self)
        self.ask(RegisterUnit("unit.sock", "/arena"), "unit-0")

    def _make_controller(self, restored: State | None = None) -> Controller:
        of_tasks = {pattern: sampler for pattern, sampler in self.samplers.items() if pattern}
        config = CoreConfig(self.samplers[""], task_samplers=of_tasks, **self.core)
        return Controller(config, restored, 0.0 if restored is None else self.now)

    @property
    def state(self) -> State:
        return self.controller.state

    # ------------------------------------------------------------ events

    def take(self, effects: list[Effect]) -> None:
        """What the server would do with effects; then the state is checked."""
        for effect in effects:
            if isinstance(effect, Send):
                answered = (effect.peer, effect.sequence)
                assert answered not in self.replies, f"two replies to {answered}"
                encode(ReplyEnvelope(effect.sequence, effect.reply))
                self.replies[answered] = effect.reply
            elif isinstance(effect, ComputeDeal):
                self.works.append(effect)
            elif isinstance(effect, AskSampler):
                self.asks.append(effect)
            elif isinstance(effect, WriteState):
                self.writes.append(effect)
            elif isinstance(effect, SendToUnit) and isinstance(effect.request, RefuseWriters):
                self.refused.append((effect.unit, effect.request.message))
            elif isinstance(effect, SendToUnit) and not isinstance(effect.request, ReleaseExtents):
                encode(RequestEnvelope(0, 0, effect.request))
                self.orders.append((effect.unit, effect.request))
            elif isinstance(effect, RemoveMirror):
                self.removed.append(effect.peer)
            elif not isinstance(effect, Release):
                assert isinstance(effect, SendToUnit)
                assert isinstance(effect.request, ReleaseExtents)
                for extent in effect.request.extents:
                    place = effect.unit, extent
                    assert place not in self.told, f"extent {extent} was freed twice"
                    self.told.add(place)
                    if place not in self.freed:
                        self.freed.append(place)
        self.records += self.controller.take_records()
        check_invariants(self.state)
        self.controller.context.services[Plans].check(self.state.partitions)
        if self.asks and not self.asks_wait:
            self.answer()

    def answer(self) -> None:
        """Answer the first of the current calls, as the process of the sampler does."""
        ask = msgspec.msgpack.decode(encode(self.asks.pop(0)), type=AskSampler)
        sampler = self.users[ask.sampler]

        def reads(question: Question) -> ViewReply:
            asked = msgspec.msgpack.decode(encode(question), type=Question)
            reply = self.controller.answer_sampler_read(ask.number, asked)
            return msgspec.msgpack.decode(encode(reply), type=ViewReply)

        view = RemotePartition(ask.shown, reads, copy_containers)
        outcome: Any
        try:
            found = answer(sampler, describe(sampler), ask.call, RemoteReady(ask.shown, reads, view), view)
            outcome = msgspec.msgpack.decode(encode(found), type=CALLS[ask.call.kind][1])
        except RowsChanged:
            outcome = None
        except TransferQueueError as error:
            outcome = by_name(type(error).__name__)(str(error))
        self.take(self.controller.on_sampler_answer(ask.number, outcome, self.now))

    def client(self, name: str) -> Client:
        """The client of this name, connected."""
        found = self.clients.get(name)
        if found is None:
            found = self.clients[name] = Client(name, 0)
            self.connect(name)
        return found

    def connect(self, name: str) -> int:
        """A further connection of a client; it uses it from now on."""
        self.peers += 1
        self.clients[name].peer = self.peers
        self.controller.on_connect(name, self.peers)
        return self.peers

    def disconnect(self, name: str, peer: int | None = None) -> None:
        """A connection of the client ends."""
        self.take(self.controller.on_disconnect(name, self.clients[name].peer if peer is None else peer, self.now))

    def send(self, request: AnyRequest, name: str = "w", sequence: int | None = None) -> int:
        """Sends a request on the client's connection; gives its sequence. With `sequence` it is sent again."""
        client = self.client(name)
        if sequence is None:
            client.sequence += 1
            sequence = client.sequence
        if isinstance(request, RegisterUnit):
            self.told.clear()
        sent = encode(RequestEnvelope(sequence, client.acknowledged, request, client.finished))
        self.replies.pop((client.peer, sequence), None)
        try:
            envelope = msgspec.msgpack.decode(sent, type=RequestEnvelope)
        except msgspec.ValidationError as error:  # `node.hosting.service_base` does not pass it to the controller
            self.replies[client.peer, sequence] = Failure("ProtocolError", str(error))
            return sequence
        self.take(self.controller.handle(name, client.peer, envelope, self.now))
        return sequence

    def send_together(self, puts: Sequence[tuple[str, Publish]]) -> list[int]:
        """Sends puts of different clients, which arrive in one turn; gives their sequences."""
        arrived = []
        for name, request in puts:
            client = self.client(name)
            client.sequence += 1
            sent = encode(RequestEnvelope(client.sequence, client.acknowledged, request, client.finished))
            arrived.append((name, client.peer, msgspec.msgpack.decode(sent, type=RequestEnvelope)))
        self.take(self.controller.handle_puts(arrived, self.now))
        return [envelope.sequence for _, _, envelope in arrived]

    def reply(self, sequence: int, name: str = "w") -> AnyReply | None:
        """The reply to a request on the client's present connection, None while there is none."""
        return self.replies.get((self.clients[name].peer, sequence))

    def result(self, sequence: int, name: str = "w") -> Any:
        """The reply, or its error raised."""
        reply = self.reply(sequence, name)
        if isinstance(reply, Failure):
            raise by_name(reply.kind)(reply.message)
        return reply

    def ask(self, request: AnyRequest, name: str = "w") -> Any:
        """Sends a request, has long clears done, and gives its reply (None: parked); raises what it failed with."""
        sequence = self.send(request, name)
        while (name, sequence) in self.jobs:
            self.tick(self.now)
        return self.result(sequence, name)

    @property
    def jobs(self) -> Jobs:
        """The jobs that are under way."""
        return self.controller.context.services[Jobs]

    def look(self, request: AnyRequest) -> Any:
        """The reply to a request that changes nothing, without the check of the whole state that follows events."""
        client = self.client("onlooker")
        client.sequence += 1
        (effect,) = self.controller.handle(
            "onlooker", client.peer, RequestEnvelope(client.sequence, 0, request), self.now
        )
        assert isinstance(effect, Send)
        assert not self.controller.context.log.records
        return effect.reply

    def finish_jobs(self) -> int:
        """Lets time pass until no job is under way; the number of turns that this took."""
        turns = 0
        while self.jobs.is_working():
            assert self.controller.next_deadline() == self.now, "there is always something to do"
            self.tick(self.now)
            turns += 1
        return turns

    def work(self) -> None:
        """The oldest work that the controller gave away is done."""
        work = self.works.pop(0)
        try:
            outcome = work.run()
        except Exception as error:
            outcome = error
        self.take(self.controller.on_outcome(work.number, outcome, self.now))

    def tick(self, now: float) -> None:
        """Time passes."""
        self.now = now
        self.take(self.controller.tick(now))

    def restart(self, back: Iterable[str] | None = None, *, replays: bool = False) -> None:
        """A new controller continues from the saved state: connections end, and with them the requests that wait.

        back: the clients that connect again (default: all). replays: whether the state comes from the records, as after
        a crash, instead of a file.
        """
        self.records += self.controller.take_records()
        state = self._replayed() if replays else through_file(self.state)
        self.records += [Unparked(*waiter) for waiter in self.state.waiting.by_waiter]
        self.works.clear()
        self.asks.clear()
        self.controller = self._make_controller(state)
        for name in list(self.clients) if back is None else back:
            self.connect(name)
        check_invariants(state)

    def _replayed(self) -> State:
        """The state that a journal of all records gives; it has no requests that wait."""
        state = State(self.state.capacity)
        state.watched = self.state.watched
        for record in msgspec.msgpack.decode(encode(self.records), type=list[JournalRecord]):
            if not isinstance(record, (RequestParked, Unparked)):
                apply_record(state, record)
        return state

    # ------------------------------------------------------------ usual requests

    def block(self, rows: int, fields: Fields, name: str = "w") -> tuple[NewBlock, list[tuple[int, int]]]:
        """A block that the client has just written, and the extents that its publish closes."""
        client = self.client(name)
        if client.blocks % BLOCKS_AN_EXTENT == 0:
            self.extents += 1
            client.extent = self.extents
        client.blocks += 1
        schema, dims = schema_of(fields, rows)
        offset = EXTENT * client.extent + BYTES * ((client.blocks - 1) % BLOCKS_AN_EXTENT)
        block = NewBlock(self.unit, client.extent, offset, 1, BYTES, rows, schema, dims)
        full = client.blocks % BLOCKS_AN_EXTENT == 0
        return block, [(self.unit, client.extent)] if full else []

    def publish(
        self,
        count: int,
        fields: Fields | None = ("x",),
        partition: str = "p",
        name: str = "w",
        *,
        rows: Iterable[int] | None = None,
        **more: Any,
    ) -> Publish:
        """A put of `count` rows, without pre-allocation unless asked for."""
        block, closes = self.block(count, fields, name) if fields is not None else (None, [])
        target = None if rows is None else column(rows)
        return Publish(
            partition, count, target, block=block, closes=closes, **{"pre_allocate": 0, **more}
        )  # fmt: skip

    def publish_blocks(
        self, count: int, *blocks: tuple[Fields, Sequence[int] | None], name: str = "w", **more: Any
    ) -> Publish:
        """A put of several blocks, each given by its fields and its slots (None: a row for each target)."""
        made, closes = [], []
        client = self.client(name)
        if client.blocks % BLOCKS_AN_EXTENT and client.blocks % BLOCKS_AN_EXTENT + len(blocks) > BLOCKS_AN_EXTENT:
            closes.append((self.unit, client.extent))  # the blocks of a put are in one extent
            client.blocks = 0
        for fields, slots in blocks:
            block, over = self.block(count if slots is None else max(slots) + 1, fields, name)
            packed = None if slots is None else np.array(slots, "<i4").tobytes()
            made.append(msgspec.structs.replace(block, slots=packed))
            closes += over
        first, *further = made
        return Publish("p", count, block=first, further=further, closes=closes, **{"pre_allocate": 0, **more})

    def put(
        self, count: int, fields: Fields | None = ("x",), partition: str = "p", name: str = "w", **more: Any
    ) -> list[int]:
        """Puts rows; gives their global indexes."""
        return rows_of(self.ask(self.publish(count, fields, partition, name, **more), name))

    def claim(
        self,
        count: int,
        task: str = "t",
        fields: Sequence[str] = ("x",),
        partition: str = "p",
        name: str = "r",
        *,
        wait: float | None = None,
        probe: bool = False,
        finite: bool = False,
        hold: bool = False,
        lease: float | None = None,
        replicas: int | None = None,
        ahead: int = 0,
        hand_over: bool = False,
        **sampling: Any,
    ) -> int:
        """Sends a claim of client `name`; gives its sequence."""
        request = Claim(
            partition, task, list(fields), count, sampling, wait, probe, finite, None, hold, lease, replicas,
            ahead=ahead, hand_over=hand_over,
        )  # fmt: skip
        return self.send(request, name)

    def lease(self, count: int, *args: Any, name: str = "r", lease: float = 10.0, **more: Any) -> ClaimReply:
        """Claims under a lease; the reply, which must have come."""
        reply = self.result(self.claim(count, *args, name=name, lease=lease, **more), name)
        assert isinstance(reply, ClaimReply), reply
        return reply

    def unseen(self, count: int, *args: Any, name: str = "r", **more: Any) -> ClaimReply:
        """Claims rows that stay with the client until it has handed them over; the reply, which must have come."""
        reply = self.result(self.claim(count, *args, name=name, hand_over=True, **more), name)
        assert isinstance(reply, ClaimReply), reply
        return reply

    def notify(self, name: str = "r", **batches: Any) -> None:
        """Sends a notice of a client, which gets no reply. batches: see `ReportBatches`."""
        client = self.client(name)
        sent = encode(RequestEnvelope(0, client.acknowledged, ReportBatches(**batches), client.finished))
        self.take(self.controller.handle(name, client.peer, envelope_of(sent), self.now))
        assert (client.peer, 0) not in self.replies

    def ack(self, reply: ClaimReply, rows: Iterable[int] | None = None, partition: str = "p", name: str = "r") -> bool:
        """Acknowledges what a claim got, or these rows of it; whether it counts."""
        named = reply.rows if rows is None else column(rows)
        return bool(self.ask(Ack(partition, reply.token, named), name).value)

    def nack(
        self,
        reply: ClaimReply,
        rows: Iterable[int] | None = None,
        partition: str = "p",
        name: str = "r",
        *,
        delivered: bool = True,
    ) -> bool:
        """Gives back what a claim got, or these rows of it; whether it counts."""
        named = reply.rows if rows is None else column(rows)
        return bool(self.ask(Nack(partition, reply.token, named, delivered), name).value)

    def dealt(self, count: int, *args: Any, name: str = "r", **more: Any) -> list[int] | None:
        """Claims and gives the rows: [] for nothing now, None for the end."""
        return self.got(self.claim(count, *args, name=name, **more), name)

    def got(self, sequence: int, name: str = "r") -> list[int] | None:
        """The rows that a claim got: [] for nothing now, None for the end. It must be answered."""
        reply = self.result(sequence, name)
        assert reply is not None, "the claim is still parked"
        return None if reply.ended else rows_of(reply)

    def parked(self, sequence: int, name: str = "r") -> bool:
        """Whether the request still waits."""
        return (name, sequence) in self.state.waiting.by_waiter

    def clear(self, rows: Iterable[int], partition: str = "p") -> None:
        self.ask(ClearRows(partition, column(rows)))

    def create(self, partition: str = "p", **more: Any) -> bool:
        pre_allocate = more.pop("pre_allocate", 0)
        done = self.ask(CreatePartition(partition, pre_allocate, PartitionOptions(**more)))
        assert isinstance(done, Done)
        return bool(done.value)

    def lookup(self, rows: Iterable[int], fields: list[str] | None, partition: str = "p") -> list[dict[str, Any]]:
        """For each row field -> (offset of its block, row in the block)."""
        return places(self.ask(Lookup(partition, column(rows), fields=fields)))

    def live(self, partition: str = "p") -> list[int]:
        """The global indexes of the live rows."""
        rows = self.state.partitions[partition].rows
        return rows.indexes_of(rows.live_positions()).tolist()

    @contextmanager
    def refuses(self, error: type[Exception] | tuple[type[Exception], ...], words: str | None = None) -> Iterator[None]:
        """What the block requests is refused with this error, and changes nothing."""
        before = self.state.snapshot()
        with pytest.raises(error, match=words):
            yield
        assert self.state.snapshot() == before

    # ------------------------------------------------------------ the end

    def replay(self) -> None:
        """Replays all records at once, and half of them on a state that then gets the rest; both must agree."""
        self.records += self.controller.take_records()
        live = self.state.snapshot()
        records = msgspec.msgpack.decode(encode(self.records), type=list[JournalRecord])
        whole = State(self.state.capacity)
        for record in records:
            apply_record(whole, record)
        assert whole.snapshot() == live, "replay gives another state"
        halves = State(self.state.capacity)
        for record in records[: len(records) // 2]:
            apply_record(halves, record)
        check_invariants(halves)
        for partition in halves.partitions.values():  # ready sets that are built here must follow the rest
            partition.ready_set("t", ("x",)).whole_groups(2, partition.groups)
        for record in records[len(records) // 2 :]:
            apply_record(halves, record)
        check_invariants(halves)
        assert halves.snapshot() == live, "replay of a prefix and then of the rest gives another state"

    def check_saving(self) -> None:
        """Everything in the state comes back out of a file, but for what is left out on purpose (see `sameness`)."""
        again = through_file(self.state)
        check_invariants(again)
        found = sameness.differences(self.state, again)
        assert not found, f"saved and restored, the state is another: {found}"
        assert {**again.snapshot(), "waiting": []} == {**self.state.snapshot(), "waiting": []}


def through_file(state: State) -> State:
    """The state as it comes back out of a file."""
    return serialization.load_state(tree_through_file(serialization.save_state(state)), state.capacity, state.watched)


def tree_through_file(tree: Any) -> Any:
    """A tree of plain values and columns as it comes back out of a file."""
    with tempfile.TemporaryDirectory() as folder:
        state_file.write(Path(folder) / "f", tree, sync=False)
        return state_file.read(Path(folder) / "f")


def places(reply: AnyReply | None) -> list[dict[str, Any]]:
    """For each row of a lookup field -> (offset of its block, row in the block)."""
    assert isinstance(reply, LookupReply), reply
    offsets = np.frombuffer(reply.blocks.offset, "<i8")
    out: list[dict[str, Any]] = [{} for _ in range(reply.count)]
    for placement in reply.placements:
        blocks, slots = np.frombuffer(placement.block, "<i4"), np.frombuffer(placement.slot, "<i4")
        for name in placement.fields:
            for row, (block, slot) in enumerate(zip(blocks.tolist(), slots.tolist(), strict=True)):
                out[row][name] = (int(offsets[block]), slot)
    return out


def _slots(chunk: Chunk, name: str) -> list[int]:
    columns = chunk.field.get(name)
    assert columns is not None
    return columns[1].tolist()


def content_of(h: Harness) -> dict[str, Any]:
    """Return everything about the partition and its ready rows, except when it changed."""
    partition = h.state.partitions["p"]
    state = partition.to_comparable()
    for name in ("version", "changes"):  # versions and blocks have other numbers
        del state[name]
    for chunk in state["rows"]["chunks"].values():
        del chunk["changed"], chunk["field"]
    chunks = partition.rows.chunks.values()
    return state | {
        "slots": {name: [_slots(chunk, name) for chunk in chunks] for name in partition.fields},
        "ready": {key: ready.page(0, ready.total)[0].tolist() for key, ready in partition.ready.items()},
        "whole": {
            key: {n: w.first_groups(len(w)) for n, w in ready.whole.items()} for key, ready in partition.ready.items()
        },
        "changed": partition.changes.changed_since(h.state.changes - 1)[0].tolist(),
    }


def load_state(h: Harness, saved: dict[str, Any], merge: bool = False) -> None:
    """Let the new client "loader" load this file, with the sequence 1. A replay of its records would need the file."""
    h.client("loader")
    request = RequestEnvelope(1, 0, LoadState("0" * 32, merge))
    (read,) = h.controller.handle("loader", h.clients["loader"].peer, request, h.now)
    assert isinstance(read, ReadState)
    h.take(h.controller.on_outcome(read.number, checkpoints.build_saved_state(saved), h.now))
    made.remove(h)


def saved_of(h: Harness, sampler: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what a save of this state writes. sampler: the state of the system's sampler."""
    state = serialization.save_checked(h.state)
    return {"format": 1, "time": 0.0, "sampler": sampler, "origin": "o", "state": state}


def finished(steps: Generator[None, None, T]) -> T:
    """Return the result of something that is done in steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
