"""Sends recorded requests of every kind to a controller again, with one field changed; the state stays sound.

A run draws an honest life of clients and storage units. Before an honest request one that was recorded may be sent
with a field changed: a number near it or at an edge, another extent, another row, a list shorter or longer. What
comes of it is a reply or an error of the tree; afterwards the state agrees with a recount, and what is saved of it
can be loaded.
"""

from __future__ import annotations

import random
import tempfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hostile import INTS, NAMES
from replay import check_replay

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.core.events.effects import (
    ComputeDeal,
    Effect,
    ReadState,
    RemoveState,
    Send,
    SendToUnit,
    WriteState,
)
from transfer_queue.core.events.registry import HANDLERS, READS
from transfer_queue.core.puts import limits
from transfer_queue.core.state.serialization import load_untrusted, save_state
from transfer_queue.core.state.state import State
from transfer_queue.core.units import migration_planner
from transfer_queue.errors import ProtocolError
from transfer_queue.journal import state_file
from transfer_queue.messages.base import Failure
from transfer_queue.messages.checkpoints import BeginCheckpoint, EndCheckpoint, LoadState
from transfer_queue.messages.claims import (
    Ack,
    AckMany,
    Cancel,
    Claim,
    ClaimReply,
    Finish,
    Nack,
    RankGone,
    Renew,
    ReportBatches,
    ResetConsumption,
)
from transfer_queue.messages.descriptors import DIGEST, BlockLocation, EqualField, FieldSpec, NewBlock, PartitionOptions
from transfer_queue.messages.envelopes import AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.locks import ListLocks, LockReply, ReleaseLock, TakeLock
from transfer_queue.messages.partitions import (
    AwaitDone,
    ClearPartition,
    CreatePartition,
    ListPartitions,
    ReportDone,
    Seal,
    SetGroupDemand,
    SetPolicyVersion,
    TakeGroupDemand,
)
from transfer_queue.messages.puts import ClearKeys, ClearRows, CloseExtents, Drop, Publish, Reserve
from transfer_queue.messages.queries import (
    Explain,
    FindEqual,
    ListKeys,
    Lookup,
    ReadBacklog,
    ShowRows,
    TakeSnapshot,
    Watch,
)
from transfer_queue.messages.reports.overview import CountColumns, ReadProgress
from transfer_queue.messages.reports.store_reports import AwaitFirstStoreServer, ReportStoreServer, StoreChanged
from transfer_queue.messages.reports.timeline import Introduce, ReadTimeline
from transfer_queue.messages.reports.unit_reports import (
    BlocksMovedReport,
    ExtentsFreedReport,
    ExtentsGone,
    ExtentsRecalledReport,
    Move,
    RefuseWriters,
    RegisterUnit,
    ReleaseExtents,
    SpaceShortReport,
    WriterGone,
)
from transfer_queue.messages.storage import lease_proof
from transfer_queue.messages.system import Drain, NodeGone, RegisterSampler, Status
from transfer_queue.node.controller.controller_service import FROM_UNITS
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SequentialSampler
from transfer_queue.testing.state_recount import check_invariants
from transfer_queue.wire.objects.tag_rows import table_of_tags

UNITS = 3
LENGTH = 1 << 20
BYTES = 4096
CAPACITY = 1 << 30
MAX_ROWS = 64  # a request for more is refused here, so that a run stays small
PARTITIONS = ("p", "q")
TASKS = ("t", "u")
SAMPLERS: tuple[Callable[[], Any], ...] = (
    SequentialSampler,
    lambda: GRPOGroupNSampler(2),
    RankAwareSampler,
)

_encode = msgspec.msgpack.Encoder().encode
_envelope = msgspec.msgpack.Decoder(RequestEnvelope).decode


def column(rows: typing.Iterable[int]) -> bytes:
    """Numbers as a message carries them."""
    return np.array(list(rows), "<i8").tobytes()


# ---------------------------------------------------------------- one field changed


def mutated(rng: random.Random, request: AnyRequest, numbers: list[int]) -> AnyRequest | None:
    """Return the request with one of its fields changed; None if the result is not a valid message.

    numbers: that mean something in the run: of extents, rows, units, offsets.
    """
    tree = msgspec.msgpack.decode(_encode(RequestEnvelope(1, 0, request)))
    leaves = list(_leaves(tree[2], (2,)))
    path = leaves[rng.randrange(len(leaves))] if leaves else (2,)
    inside = tree
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = _changed(rng, inside[path[-1]], numbers)
    try:
        return _envelope(_encode(tree)).body
    except (msgspec.MsgspecError, OverflowError, ValueError):
        return None


def _leaves(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a message, but for its tag."""
    if isinstance(tree, (list, dict)):
        if len(path) > 1:
            yield path
        inside = tree.items() if isinstance(tree, dict) else list(enumerate(tree))[len(path) == 1 :]
        for key, value in inside:
            yield from _leaves(value, (*path, key))
    else:
        yield path


def _changed(rng: random.Random, value: Any, numbers: list[int]) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return _number(rng, value, numbers)
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), value + 1))
    if isinstance(value, str):
        return rng.choice((*NAMES, *PARTITIONS, *TASKS, "w0", "w1"))
    if isinstance(value, bytes):
        return _bytes(rng, value, numbers)
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        return rng.choice((value[:at] + value[at + 1 :], [*value, value[at]], [*value[:at], value[at], *value[at:]]))
    if isinstance(value, dict):
        return {**value, rng.choice(NAMES): rng.choice(INTS)}
    return rng.choice((None, 0, 1, -1, "p", [], {}, b"", 1.0, column([0, 1]), rng.choice(INTS)))


def _number(rng: random.Random, value: int, numbers: list[int]) -> int:
    near = (value - 1, value + 1, value - 64, value + 64, value * 2, -value, 0)
    return rng.choice((rng.choice(near), rng.choice(INTS), rng.choice(numbers or [0]), rng.randrange(6)))


def _bytes(rng: random.Random, value: bytes, numbers: list[int]) -> bytes:
    if not value or rng.randrange(4) == 0:
        return value[: rng.randrange(len(value) + 1)] + rng.choice((b"", b"\0", column([rng.choice(numbers or [1])])))
    if len(value) % 8 == 0:
        column_ = np.frombuffer(value, "<i8").copy()
        at = rng.randrange(len(column_))
        changed = _number(rng, int(column_[at]), numbers)
        column_[at] = max(min(changed, 2**63 - 1), -(2**63))
        return column_.tobytes()
    data = bytearray(value)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


# ---------------------------------------------------------------- a life


class Life:
    """Clients and storage units of a controller. share: the share of requests before which a changed one is sent.

    key: The units prove their leases with this key. A client that has leased nothing then sends the changed requests,
    and no place that an honest client names is refused.
    """

    def __init__(self, rng: random.Random, share: float = 0.5, key: bytes | None = None) -> None:
        self.rng = rng
        self.share = share
        self.key = key
        self.now = 0.0
        self.controller = Controller(
            CoreConfig(rng.choice(SAMPLERS)(), capacity=300, replicas=rng.choice((1, 2)), lease_key=key)
        )
        self.sequences: dict[str, int] = {}
        self.peers: dict[str, int] = {}
        self.replies: dict[tuple[str, int], Any] = {}
        self.recorded: dict[type, list[tuple[str, AnyRequest]]] = {}
        self.records: list[Any] = []
        self.orders: list[tuple[int, Any]] = []
        self.works: list[ComputeDeal] = []
        self.told: list[tuple[int, int]] = []
        self.next_extent = 1
        self.open: dict[tuple[str, int], tuple[int, int]] = {}  # of (client, unit): extent, blocks in it
        self.leases: list[tuple[str, str, int, bytes]] = []
        self.unseen: list[tuple[str, str, int]] = []
        self.locks: list[tuple[str, str, int]] = []
        self.cuts: list[str] = []
        self.kinds: set[type] = set()
        for unit in range(UNITS):
            self.ask(self.registration(unit), f"unit-{unit}")

    @property
    def state(self) -> State:
        return self.controller.state

    # ------------------------------------------------------------ requests

    def ask(self, request: AnyRequest, client: str) -> Any:
        """Return the reply to a request. A request with a changed field may be sent before it."""
        self.recorded.setdefault(type(request), []).append((client, request))
        if self.rng.random() < self.share:
            of_kind = self.recorded[self.rng.choice(list(self.recorded))]
            whose, like = self.rng.choice(of_kind[-8:])
            changed = mutated(self.rng, like, self.numbers())
            if changed is not None and self.key is None:
                self.send(changed, whose)
            elif changed is not None and not isinstance(changed, FROM_UNITS):  # which a client cannot send
                self.send(changed, "liar")
        reply = self.send(request, client)
        if self.key is not None and isinstance(request, (Publish, CloseExtents)) and isinstance(reply, Failure):
            assert reply.kind != "ProtocolError", reply.message
        return reply

    def send(self, request: AnyRequest, client: str) -> Any:
        """Send a request, then recount the state. Returns the reply; None while it waits."""
        self.kinds.add(type(request))
        if client not in self.peers:
            self.peers[client] = len(self.peers) + 1
            self.controller.on_connect(client, self.peers[client])
        sequence = self.sequences[client] = self.sequences.get(client, 0) + 1
        if isinstance(request, ReportBatches) and self.rng.random() < 0.7:
            sequence = 0  # a notice
        envelope = _envelope(_encode(RequestEnvelope(sequence, max(0, sequence - 40), request)))
        self.take(self.controller.handle(client, self.peers[client], envelope, self.now))
        return self.replies.get((client, sequence))

    def take(self, effects: list[Effect]) -> None:
        """Carry out effects as the server does, then recount the state."""
        waits = list(effects)
        names = {peer: client for client, peer in self.peers.items()}
        while waits:
            effect = waits.pop(0)
            if isinstance(effect, Send):
                _encode(ReplyEnvelope(effect.sequence, effect.reply))
                self.replies[names[effect.peer], effect.sequence] = effect.reply
            elif isinstance(effect, WriteState):
                load_untrusted(_copied(effect.tree())["state"])
                waits += self.controller.on_outcome(effect.number, None, self.now)
            elif isinstance(effect, ReadState):
                tree = ProtocolError("there is no such file")
                waits += self.controller.on_outcome(effect.number, tree, self.now)
            elif isinstance(effect, SendToUnit):
                if isinstance(effect.request, ReleaseExtents):
                    self.told += [(effect.unit, extent) for extent in effect.request.extents]
                elif not isinstance(effect.request, RefuseWriters):
                    self.orders.append((effect.unit, effect.request))
            elif isinstance(effect, ComputeDeal):
                self.works.append(effect)
            else:
                assert isinstance(effect, RemoveState)
        self.records += self.controller.take_records()
        if self.share:  # other tests check runs without changed requests
            check_invariants(self.state)

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.take(self.controller.tick(self.now))
        while self.works:
            work = self.works.pop(0)
            self.take(self.controller.on_outcome(work.number, work.run(), self.now))

    def numbers(self) -> list[int]:
        """Return the numbers that have a meaning in this run."""
        found = [self.next_extent, self.state.next_index, self.state.next_block, BYTES, LENGTH]
        for (unit, extent), of in list(self.state.blocks.extents.items())[-6:]:
            found += [unit, extent, of.low, of.top, of.top - BYTES]
        found += [extent for _, extent in list(self.state.blocks.freed)[-3:]]
        return found

    # ------------------------------------------------------------ what clients and units do

    def step(self) -> None:
        """Do a valid step."""
        name = self.rng.choice(STEPS)
        getattr(self, name)()
        if self.rng.random() < 0.2:
            self.units_work()
        if self.rng.random() < 0.2:
            self.tick(self.rng.choice((0.01, 1.0, 20.0)))

    def registration(self, unit: int) -> RegisterUnit:
        return RegisterUnit(
            f"{unit}.sock", f"/{unit}", f"boot-{unit}", f"unit-{unit}", node=f"node-{unit % 2}", capacity=CAPACITY
        )

    def writer(self) -> str:
        return self.rng.choice(("w0", "w1"))

    def partition(self) -> str:
        return self.rng.choice(PARTITIONS)

    def rows(self, most: int = 4) -> list[int]:
        """Some live rows of `p` or `q`, in the order of their indexes."""
        partition = self.state.partitions.get(self.rng.choice(PARTITIONS))
        if partition is None or not partition.rows.count:
            return []
        live = partition.rows.indexes_of(partition.rows.live_positions()).tolist()
        return sorted(self.rng.sample(live, min(len(live), self.rng.randrange(1, most + 1))))

    def place(self, client: str, unit: int) -> tuple[BlockLocation, bool]:
        """Where a block is written, and whether it is the extent's last."""
        extent, used = self.open.get((client, unit), (0, 4))
        if used >= 4:
            extent, used = self.next_extent, 0
            self.next_extent += 1
        self.open[client, unit] = extent, used + 1
        begin = extent << 20
        proof = lease_proof(self.key or b"", unit, client, extent, begin, LENGTH, 1)
        return BlockLocation(unit, extent, begin + used * BYTES, 1, LENGTH, "", begin, proof), used == 3

    def blocks(self, client: str, rows: int) -> tuple[list[NewBlock], list[tuple[int, int]]]:
        """The blocks of a put, which lie in one extent of each unit, and the extents that are full after it."""
        units = [unit for unit in self.state.units if unit < UNITS and unit not in self.state.draining] or [0]
        chosen = self.rng.sample(units, min(len(units), self.controller.context.config.replicas))
        names = self.rng.sample(("x", "y"), self.rng.randrange(1, 3))
        split = [[name] for name in names] if self.rng.random() < 0.3 else [names]
        closes = []
        for unit in chosen:
            extent, used = self.open.get((client, unit), (0, 4))
            if used < 4 < used + len(split):
                closes.append((unit, extent))
                del self.open[client, unit]
        found = []
        for some in split:
            places = [self.place(client, unit) for unit in chosen]
            closes += [(place.unit, place.extent) for place, last in places if last]
            found.append(self.block(some, rows, [place for place, _ in places]))
        return found, closes

    def block(self, names: list[str], rows: int, places: list[BlockLocation]) -> NewBlock:
        schema = [FieldSpec(name, "tensor", "float32", 1, False) for name in names]
        first, slots, held = places[0], None, rows
        if self.rng.random() < 0.3:
            held = self.rng.randrange(1, rows + 1)
            slots = np.array([self.rng.randrange(held) for _ in range(rows)], "<i4").tobytes()
        return NewBlock(
            first.unit, first.extent, first.offset, 1, BYTES, held, schema, column([4] * len(names)),
            LENGTH, places[1:], slots=slots, begin=first.begin, proof=first.proof,
        )  # fmt: skip

    def put(self) -> None:
        client, count = self.writer(), self.rng.randrange(1, 5)
        (block, *further), closes = self.blocks(client, count)
        rows = [{"priority": at, "text": self.rng.choice("ab")} for at in range(count)]
        tags = self.rng.choice((None, rows, table_of_tags(rows, True)))
        groups = self.rng.choice((None, None, [self.rng.choice("gh") for _ in range(count)]))
        keys = None
        if self.rng.random() < 0.4:
            keys = [f"k{at}" for at in self.rng.sample(range(8), count)]
        wait = self.rng.choice((None, 5.0))
        expected = column([0] * count) if keys is not None and self.rng.random() < 0.2 else None
        fence = (
            self.rng.choice([token for _, _, token in self.locks]) if self.locks and self.rng.random() < 0.2 else None
        )
        self.ask(
            Publish(
                self.partition(), count, None, keys, block, tags, False, groups if keys is None else None, closes, 0,
                wait, expected=expected, fence=fence, create=self.rng.random() < 0.9, further=further,
                equal=self.equal(count, block), puts=[1] * count if self.rng.random() < 0.3 else [],
            ),
            client,
        )  # fmt: skip

    def equal(self, count: int, block: NewBlock) -> list[EqualField]:
        """The digests of written values of some fields of a block."""
        digests = [number.to_bytes(DIGEST, "big") for number in self.rng.sample(range(5), 2)]
        numbers = [self.rng.randrange(-1, 2) for _ in range(count)]
        packed = b"".join(digests), np.array(numbers, "<i4").tobytes(), bytes(2)
        return [EqualField(spec.name, *packed) for spec in block.schema if self.rng.random() < 0.3]

    def put_known(self) -> None:
        """A put of values that are in a partition already, unless they were freed."""
        partition, count, client = self.partition(), self.rng.randrange(1, 5), self.writer()
        digests = [number.to_bytes(DIGEST, "big") for number in range(5)]
        reply = self.ask(FindEqual(partition, [("x", b"".join(digests))]), client)
        known = [digest for digest, there in zip(digests, reply.known[0], strict=True) if there]
        if known:
            numbers = np.array([self.rng.randrange(len(known)) for _ in range(count)], "<i4").tobytes()
            field = EqualField("x", b"".join(known), numbers, b"\1" * len(known))
            keys = None
            if self.rng.random() < 0.4:
                keys = [f"k{at}" for at in self.rng.sample(range(8), count)]
            self.ask(Publish(partition, count, None, keys, pre_allocate=0, equal=[field]), client)

    def replace(self) -> None:
        rows, client = self.rows(), self.writer()
        if rows:
            (block, *further), closes = self.blocks(client, len(rows))
            put = Publish(self.partition(), len(rows), column(rows), None, block, closes=closes, further=further)
            self.ask(put, client)

    def claim(self) -> None:
        task, partition, client = self.rng.choice(TASKS), self.partition(), self.rng.choice(("r0", "r1"))
        sampling: dict[str, Any] = {}
        if isinstance(self.controller.context.samplers.default, RankAwareSampler) or self.rng.random() < 0.3:
            sampling = {"dp_rank": self.rng.randrange(2), "batch_index": self.rng.randrange(4)}
        lease = self.rng.choice((None, 10.0))
        wait = self.rng.choice((None, None, 5.0))
        fields = self.rng.choice((["x"], ["x", "y"]))
        reply = self.ask(
            Claim(partition, task, fields, 2, sampling, wait, lease=lease, hand_over=self.rng.random() < 0.6), client
        )
        if isinstance(reply, ClaimReply) and reply.token and lease is None:
            self.unseen.append((partition, client, reply.token))
        if isinstance(reply, ClaimReply) and reply.token:
            self.leases.append((partition, client, reply.token, reply.rows))

    def report_batches(self) -> None:
        """Say what became of batches that were not handed over, or of leases, and withdraw claims."""
        kinds: dict[str, list[Any]] = {"handed_over": [], "finished": [], "returned": [], "withdrawn": []}
        of_leases = [lease[:3] for lease in self.leases]
        for partition, _, token in self.rng.sample(self.unseen, min(3, len(self.unseen))) + of_leases[:1]:
            kinds[self.rng.choice(("handed_over", "finished", "returned"))].append((partition, token))
        client = self.rng.choice(("r0", "r1"))
        if self.rng.random() < 0.3:
            kinds["withdrawn"].append(max(1, self.sequences.get(client, 1) - self.rng.randrange(3)))
        self.unseen = self.unseen[-8:]
        self.ask(ReportBatches(**kinds), client)

    def acknowledge_many(self) -> None:
        """Several acknowledgements of one client in one request, some of them twice or of leases that are over."""
        if self.leases:
            client = self.rng.choice(self.leases)[1]
            mine = [lease for lease in self.leases if lease[1] == client]
            some = [self.rng.choice(mine) for _ in range(self.rng.randrange(1, 4))]
            self.ask(AckMany([Ack(partition, token, rows) for partition, _, token, rows in some]), client)
            self.leases = [lease for lease in self.leases if lease not in some or self.rng.random() < 0.3]

    def acknowledge(self) -> None:
        if self.leases:
            partition, client, token, rows = self.leases.pop(self.rng.randrange(len(self.leases)))
            kind = self.rng.choice((Ack, Nack, Renew))
            if kind is Renew:
                self.ask(Renew([(partition, token)]), client)
            else:
                self.ask(kind(partition, token, rows), client)

    def lock(self) -> None:
        partition, client = self.partition(), self.writer()
        keys = [f"k{at}" for at in self.rng.sample(range(4), self.rng.randrange(1, 3))]
        reply = self.ask(TakeLock(partition, keys, self.rng.choice((1.0, 50.0)), self.rng.choice((None, 5.0))), client)
        if isinstance(reply, LockReply):
            self.locks.append((partition, client, reply.token))

    def unlock(self) -> None:
        if self.locks:
            partition, client, token = self.locks.pop(self.rng.randrange(len(self.locks)))
            if self.rng.random() < 0.3:
                self.ask(Renew([(partition, token)]), client)
            self.ask(ReleaseLock(partition, token), client)

    def clear(self) -> None:
        kind = self.rng.randrange(5)
        rows = column(self.rows())
        if kind == 0:
            self.ask(ClearKeys(self.partition(), [f"k{self.rng.randrange(8)}"]), "w0")
        elif kind == 1:
            self.ask(Drop(self.partition(), "stale", rows, self.rng.choice(([], ["g"]))), "w0")
        elif kind == 2 and self.rng.random() < 0.2:
            self.ask(ClearPartition(self.partition()), "w0")
        else:
            self.ask(ClearRows(self.partition(), rows), "w1")

    def partitions(self) -> None:
        options = PartitionOptions(
            free_when=self.rng.choice(([], ["t"])), keep_rows=self.rng.choice((None, 30)),
            group_size=self.rng.choice((None, 2)), max_deliveries=self.rng.choice((None, 2)),
            keep_seconds=self.rng.choice((None, 100.0)), max_rows=self.rng.choice((None, 20)),
            order=self.rng.choice(("", "fifo", "lifo", "priority")),
        )  # fmt: skip
        self.ask(CreatePartition(self.partition(), self.rng.choice((0, 2)), options), self.writer())

    def progress(self) -> None:
        partition, task, rows = self.partition(), self.rng.choice(TASKS), column(self.rows())
        requests = (
            Reserve(partition, 2, self.rng.choice((None, ["k1", "k9"])), 0), SetGroupDemand(partition, task, 2),
            TakeGroupDemand(partition, task, 1), SetPolicyVersion(partition, self.rng.randrange(4)), Finish(partition,
            task, rows, "r0"), RankGone(partition, task, 1), Watch(partition), ShowRows(partition, ["x"]),
            Lookup(partition, rows, None, ["x"]), Lookup(partition, None, ["k1", "k2"], versions=True), ListKeys(),
            ListPartitions(), Explain(partition, 0, None, task),
            Status(), ListLocks(), TakeSnapshot(partition), ReadProgress([partition]),
            ReportDone(partition), AwaitDone(partition, self.rng.choice((None, 5.0))), ReadBacklog(partition, task),
            CountColumns(partition, 3, takes={"t": ["x"]}, group_task="t"),
            Cancel(max(1, self.sequences.get("r0", 1) - 1)),
            RegisterSampler(task, self.rng.choice(("GRPOGroupNSampler", "RankAwareSampler")), '{"dp_size": 2}'),
            Introduce(task, 1, "host", 7), ReadTimeline("", self.rng.choice((None, 5))),
        )  # fmt: skip
        self.ask(self.rng.choice(requests), self.rng.choice(("w0", "r0")))

    def seldom(self) -> None:
        partition = self.partition()
        if self.rng.random() < 0.5:
            unit = self.rng.randrange(UNITS)
            requests: tuple[AnyRequest, ...] = (
                Seal(partition), ResetConsumption(partition, None), Drain(unit), Drain(unit, True),
                NodeGone("node-7", "now"),
            )  # fmt: skip
            self.ask(self.rng.choice(requests), "w0")

    def checkpoint(self) -> None:
        if self.cuts:
            self.ask(EndCheckpoint(self.cuts.pop()), "w1")
        else:
            self.cuts.append(f"{self.rng.randrange(1 << 62):032x}")
            self.ask(BeginCheckpoint(self.cuts[-1]), "w1")

    def close(self) -> None:
        for client, unit in list(self.open)[:1]:
            extent, _ = self.open.pop((client, unit))
            self.ask(CloseExtents([(unit, extent)]), client)

    def recall(self) -> None:
        for client, unit in list(self.open)[-1:]:
            extent, used = self.open.pop((client, unit))
            self.ask(ExtentsRecalledReport(unit, column([extent]), column([used * BYTES])), f"unit-{unit}")

    def unit_trouble(self) -> None:
        unit = self.rng.randrange(UNITS)
        extents = [extent for of, extent in self.state.blocks.extents if of == unit]
        if not extents or self.rng.random() < 0.5:
            return
        if self.rng.random() < 0.5:
            self.ask(ExtentsGone(unit, column(extents[:1]), "now"), f"unit-{unit}")
        else:
            self.open = {place: its for place, its in self.open.items() if (place[1], its[0]) != (unit, extents[0])}
            self.ask(WriterGone(f"w{self.rng.randrange(2)}/1", unit, extents[:1]), f"unit-{unit}")
        life = f"life {self.rng.randrange(3)}"
        node = self.rng.randrange(2)
        self.ask(AwaitFirstStoreServer("MooncakeStore", life), f"unit-{unit}")
        report = ReportStoreServer("MooncakeStore", f"node {node}", "", life, 7, first=not node)
        self.ask(report, f"unit-{unit}")
        self.ask(StoreChanged(unit, extents[0]), f"unit-{unit}")

    def units_work(self) -> None:
        """Let units free the extents that they were ordered to free, and carry out other orders."""
        told, self.told = self.told, []
        for unit in sorted({unit for unit, _ in told}):
            numbers = [extent for of, extent in told if of == unit]
            self.ask(ExtentsFreedReport(unit, column(numbers)), f"unit-{unit}")
        self.ask(SpaceShortReport(0, self.rng.choice(([], ["w0"])), len(told)), "unit-0")
        orders, self.orders = self.orders, []
        for unit, order in orders:
            if isinstance(order, Move):
                self.ask(self.carried_out(unit, order), f"unit-{unit}")

    def carried_out(self, unit: int, order: Move) -> BlocksMovedReport:
        extent, end = self.next_extent, 0
        self.next_extent += 1
        count = len(order.blocks.unit) // 4
        repacks = {repack.at: repack for repack in order.repacks}
        offsets: list[int] = []
        made: list[NewBlock | None] = []
        schema_at = np.frombuffer(order.blocks.schema, "<i4").tolist()
        for at in range(count):
            offset = (extent << 20) + end
            end += BYTES
            if at not in repacks:
                offsets.append(offset)
                continue
            fields, slots = repacks[at].fields, len(repacks[at].slots) // 4
            schema = [spec for spec in order.blocks.schemas[schema_at[at]] if spec.name in fields]
            dims = column([4] * len(schema))
            made.append(NewBlock(unit, extent, offset, 1, BYTES, slots, schema, dims, LENGTH))
        return BlocksMovedReport(order.number, unit, extent, LENGTH, 1, column(offsets), made)


STEPS = (
    *["put"] * 6, *["put_known"] * 2, *["replace"] * 2, *["claim"] * 3, *["acknowledge"] * 2,
    "acknowledge_many", *["report_batches"] * 2, *["clear"] * 3, "partitions",
    "lock", "lock", "unlock", *["progress"] * 3, "seldom", "checkpoint", "close", "recall", "unit_trouble",
)  # fmt: skip


def _copied(tree: Any) -> Any:
    """A saved tree as it comes out of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        state_file.write(path, tree, sync=False)
        return state_file.read(path)


def run(seed: object, steps: int, share: float = 0.5, key: bytes | None = None) -> Life:
    """Run one life with all checks. Raises if the state becomes unsound, or the controller fails."""
    before, limits.MAX_RESERVED = limits.MAX_RESERVED, MAX_ROWS
    spare, migration_planner.SPARE = migration_planner.SPARE, 0
    try:
        life = Life(random.Random(f"{seed}"), share, key)
        for _ in range(steps):
            life.step()
        loaded = load_untrusted(_copied(save_state(life.state)))
        check_invariants(loaded)
    finally:
        limits.MAX_RESERVED, migration_planner.SPARE = before, spare
    check_replay(life.records, life.state)
    return life


KINDS = HANDLERS.keys() - READS - {NodeGone, BeginCheckpoint, EndCheckpoint, LoadState} | {Renew}
