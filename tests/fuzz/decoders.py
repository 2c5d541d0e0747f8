"""Everything that reads what others wrote, as functions of bytes that raise only where something is wrong with us.

Each takes any bytes. What a decoder may do with them is an error of the tree, an error reply or a dropped connection;
any other exception is a bug, and so is a broken invariant, or a service that does not serve the next request.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hostile import REPLIES, REQUESTS, Hostile
from replay import check_replay

from transfer_queue.config.settings import Settings
from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.core.puts import limits
from transfer_queue.errors import ProtocolError, TransferQueueError
from transfer_queue.live import snapshot as snapshots
from transfer_queue.live.payload import LiveView
from transfer_queue.live.snapshot import (
    SnapshotAnswers,
    SnapshotSource,
    decode_snapshot,
    encode_snapshot,
    file_name,
    take_snapshot,
)
from transfer_queue.messages.base import Failure
from transfer_queue.messages.descriptors import Blocks, FieldType, Placement
from transfer_queue.messages.envelopes import ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.queries import LookupReply
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.messages.storage import LeaseExtent, OpenSlot, ReturnExtent, UnitStatus
from transfer_queue.messages.system import Status
from transfer_queue.net.framing import FrameReader, pack_frame
from transfer_queue.net.handshake import ClientHandshake, Hello, ServerHandshake
from transfer_queue.net.session import Session
from transfer_queue.node.controller.controller_service import ControllerService
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.node.hosting.service_base import EnvelopeService
from transfer_queue.node.system import launcher_protocol
from transfer_queue.node.unit.unit_service import UnitService
from transfer_queue.sampler import (
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)
from transfer_queue.sampler.factory import sampler_objects
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.system_folder.paths import Description, SystemFolder
from transfer_queue.testing.simulated_locks import HeldSlots, SimulatedSlots
from transfer_queue.testing.state_recount import check_invariants
from transfer_queue.wire.objects.object_values import decode_tag_value, encode_object

KEY = bytes(range(32))
LIVE_EXAMPLE = Path(__file__).parent.parent / "live" / "example.json"
NOWHERE = Path("/nonexistent/states")  # a folder of state files in which nothing can be read or written
MAX_ROWS = 64  # a request for more is refused here, so that a run stays small
SAMPLERS: tuple[Callable[[], Any], ...] = (
    SequentialSampler,
    RankAwareSampler,
    lambda: FreshnessSampler(SequentialSampler(), 1, "version"),
    lambda: GRPOGroupNSampler(2),
    lambda: PrioritySampler("priority", aging=0.5),
    lambda: TokenBudgetSampler(8, tag="length"),
    lambda: SeqlenBalancedSampler(dp_size=2),
)

encode = msgspec.msgpack.Encoder().encode


class Bug(AssertionError):
    """A server failed at a message, instead of refusing it."""


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """What may happen to a client: an error of the tree."""
    with contextlib.suppress(TransferQueueError):
        yield


def pieces(data: bytes) -> Iterator[bytes]:
    """The bytes in pieces whose sizes they say themselves."""
    size = (data[0] if data else 0) % 40 + 1
    for at in range(0, len(data), size):
        yield data[at : at + size]


def frames_of(data: bytes) -> list[bytes]:
    """The bodies of a corpus entry that is a stream of frames; what is no whole frame is left out."""
    try:
        return [body for body, _ in FrameReader(1 << 20, 0).feed(data)]
    except ProtocolError:
        return []


# ---------------------------------------------------------------- the transport


def frames(data: bytes) -> None:
    """A stream gives the same frames however it is cut, and never keeps more than was sent."""

    def read(cuts: Iterator[bytes]) -> tuple[list[Any], bool]:
        reader, found = FrameReader(1 << 16, 1 << 16), []
        for cut in cuts:
            try:
                found += reader.feed(cut)
            except ProtocolError:
                return [], True
            assert reader.held <= len(data)
        return [(body, payload and bytes(payload)) for body, payload in found], False

    whole, cut = read(iter([data])), read(pieces(data))
    assert whole == cut


def server_handshake(data: bytes) -> None:
    """Nobody is let in by bytes that were made without the key, and no exception comes out."""
    server = ServerHandshake(KEY)
    for piece in pieces(data):
        assert len(server.receive(piece)) < 400
        if server.failed is not None:
            assert isinstance(server.failed, TransferQueueError)
            return
    assert not server.done


def client_handshake(data: bytes) -> None:
    """No server is believed that has not the key."""
    client = ClientHandshake("client", "c", KEY)
    with refused():
        for piece in pieces(data):
            client.receive(piece)
    assert not client.done


def answers(data: bytes) -> None:
    """A body that a server sent, read as the answer to a request of each kind of operation."""
    from transfer_queue.client.conversion import replies

    session = Session("c", KEY, lambda target: "nowhere")
    with refused():
        answer = session.decode_reply(data)
        for kind in (replies.batch_meta, replies.status):
            with refused():
                if kind is replies.batch_meta and hasattr(answer.body, "produced"):
                    kind("p", answer.body, False)
                elif kind is replies.status and hasattr(answer.body, "matrix"):
                    kind(answer.body, 1)


# ---------------------------------------------------------------- the services


@contextlib.contextmanager
def watched(service: EnvelopeService) -> Iterator[None]:
    """Raises what the service would write into its log as its own failure."""
    from transfer_queue.node.hosting import service_base as module

    def fail(*_: object) -> None:
        error = sys.exc_info()[1]
        raise Bug(f"{type(error).__name__}: {error}") from error

    before = module.logger.exception
    module.logger.exception = fail  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        module.logger.exception = before  # type: ignore[method-assign]


def _feed(service: EnvelopeService, check: Callable[[], None], data: bytes) -> None:
    """Bodies of several connections, each with the number of its connection before it."""
    for at, body in enumerate(frames_of(data)):
        peer = 1 + (body[0] if body else 0) % 3
        with contextlib.suppress(ProtocolError):  # costs the connection
            list(service.on_message(peer, body[1:], None, float(at)))
        if at % 3 == 2 and isinstance(service, ControllerService):
            service.serve_puts()  # up to three messages arrive in one turn
        if at % 8 == 7:
            list(service.on_deadline(float(at)))
        check()


def controller(data: bytes) -> None:
    """Requests to a controller. data: the number of a sampler, then frames (see `_feed`)."""
    core = Controller(CoreConfig(SAMPLERS[(data[0] if data else 0) % len(SAMPLERS)](), capacity=200))
    service = ControllerService(core, StateFiles(NOWHERE))
    service.serves_one = lambda: False
    later: list[Callable[[], Any]] = []
    service.attach(later.append)
    for peer, hello in enumerate((Hello("unit", "unit-0"), Hello("client", "writer"), Hello("client", "other")), 1):
        service.on_connect(peer, hello)
    records: list[Any] = []
    core.take_records = lambda: records.extend(taken(core)) or []  # type: ignore[method-assign]
    before, limits.MAX_RESERVED = limits.MAX_RESERVED, MAX_ROWS
    try:
        with watched(service):
            list(service.on_message(1, encode(RequestEnvelope(1, 0, RegisterUnit("unit.sock", "/arena"))), None, 0.0))
            _feed(service, lambda: check_invariants(core.state), data[1:])
            service.serve_puts()
            service.on_connect(9, Hello("client", "honest"))
            (reply,) = service.on_message(9, encode(RequestEnvelope(1, 0, Status())), None, 1e6)
            core.take_records()
    finally:
        limits.MAX_RESERVED = before
    assert not isinstance(msgspec.msgpack.decode(reply.body, type=ReplyEnvelope).body, Failure)
    check_replay(records, core.state)


def taken(core: Controller) -> list[Any]:
    """The records since the last call."""
    return core.context.log.take()


def unit(data: bytes) -> None:
    """Requests to a storage unit, and words of a controller: frames whose first byte is the number of the peer."""
    with tempfile.TemporaryDirectory(prefix="tq-fuzz-") as folder:
        storage = StorageUnit(
            0, ArenaPool(Arena.create(Path(folder) / "arena", 1 << 20)), SimulatedSlots(0, HeldSlots())
        )
        session = Session("unit", KEY, lambda target: "nowhere", role="unit")
        service = UnitService(
            storage, session, lambda live: RegisterUnit("u", "a"), lambda: None, lambda: None, lambda order: None
        )
        service.on_registered(3)
        for peer in (1, 2, 9):
            service.on_connect(peer, Hello("client", f"writer-{peer}"))
        with watched(service):
            _feed(service, lambda: None, data)
            (reply,) = (
                out
                for out in service.on_message(9, encode(RequestEnvelope(1, 0, UnitStatus())), None, 1e6)
                if out.peer == 9
            )
        status = msgspec.msgpack.decode(reply.body, type=ReplyEnvelope).body
        assert status.held == status.leased + status.free
        assert 0 <= status.leased <= status.capacity


# ---------------------------------------------------------------- values


def objects(data: bytes) -> None:
    """Stored bytes of an object, at a reader without pickle."""
    from transfer_queue.wire.objects.object_decoder import decode_object

    with refused():
        decode_object(data, allow_pickle=False)


def tags(data: bytes) -> None:
    """The value of a tag, at a reader without pickle."""
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    with refused():
        decode_tag_value(value, allow_pickle=False)


def columns(data: bytes) -> None:
    """A lookup's reply, gathered out of a small arena in every layout, and joined with itself."""
    from transfer_queue.client.conversion.replies import merge_lookups
    from transfer_queue.wire.blocks.gather import gather

    try:
        reply = msgspec.msgpack.decode(data, type=LookupReply)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    memory = np.arange(4096, dtype=np.uint8)

    def of_unit(number: int) -> Any:
        if number not in (0, 1):
            raise ProtocolError(f"there is no unit {number}")
        return memory

    for layout in ("jagged", "dense", "padded", "list"):
        with refused():
            gather(reply, of_unit, layout, allow_pickle=False)
    if 0 <= reply.count < 1000:
        with refused():
            merge_lookups([reply, reply], [np.arange(reply.count), np.arange(reply.count)])


# ---------------------------------------------------------------- files and starts


def description(data: bytes) -> None:
    """system.json."""
    with tempfile.TemporaryDirectory(prefix="tq-fuzz-") as folder:
        system = SystemFolder(Path(folder))
        system.description.write_bytes(data)
        system.description.chmod(0o600)
        with refused():
            system.read_description()


def arena_header(data: bytes) -> None:
    """The header file of an arena."""
    with tempfile.TemporaryDirectory(prefix="tq-fuzz-") as folder:
        Arena.create(Path(folder) / "arena", 1 << 16)
        (Path(folder) / "arena" / "header").write_bytes(data)
        with refused():
            Arena.open(Path(folder) / "arena")


def start_message(data: bytes) -> None:
    """What a supervisor reads from its pipe."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data[:60_000])
        ours.close()
        with contextlib.suppress(EOFError), refused():
            launcher_protocol.receive(theirs, launcher_protocol.StartRequest, 5.0)


def settings(data: bytes) -> None:
    """A configuration that a program read from somewhere, as JSON."""
    try:
        conf = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(conf, dict):
        with refused():
            sampler_objects(Settings.from_config(conf), conf)


def live_snapshot(data: bytes) -> None:
    """A snapshot of the live page. One that is accepted can be shown, and saved again."""
    with refused():
        snapshot = decode_snapshot(data, "f")
        source, replies = SnapshotSource(snapshot), SnapshotAnswers(snapshot)
        now, parts = source.make()
        saved = take_snapshot(LiveView(0, now, **parts), replies)  # type: ignore[arg-type]
        decode_snapshot(encode_snapshot(saved), file_name(saved))
        for each in snapshot.samples:
            replies.sample(each.partition, each.index, None)


DECODERS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (
        frames, server_handshake, client_handshake, answers, controller, unit, objects, tags, columns, description,
        arena_header, start_message, settings, live_snapshot,
    )
}  # fmt: skip


# ---------------------------------------------------------------- inputs near what is valid


def _stream(hostile: Hostile, kinds: tuple[type, ...], most: int) -> bytes:
    stream, sequence = b"", 1
    for _ in range(hostile.rng.randrange(1, most)):
        sequence += 1
        number = sequence if hostile.chance(95) else hostile.int()
        acknowledged = hostile.int() if hostile.chance(5) else 0
        finished = hostile.value(list[tuple[int, int]]) if hostile.chance(5) else []
        envelope = RequestEnvelope(number, acknowledged, hostile.struct(hostile.one(kinds)), finished)
        stream += pack_frame(bytes([hostile.one((1, 1, 1, 2, 0))]) + hostile.body(envelope))
    return stream


def _of_controller(hostile: Hostile) -> bytes:
    return bytes([hostile.rng.randrange(len(SAMPLERS))]) + _stream(hostile, FREQUENT + REQUESTS, 25)


def _of_unit(hostile: Hostile) -> bytes:
    return _stream(hostile, (OpenSlot, LeaseExtent, LeaseExtent, ReturnExtent, UnitStatus, *REQUESTS), 25)


def _of_frames(hostile: Hostile) -> bytes:
    parts = []
    for _ in range(hostile.rng.randrange(4)):
        body = bytes(hostile.rng.randrange(50))
        lying = hostile.one((0, 0, 0, 5, 1 << 17, 1 << 63))
        parts.append(pack_frame(body, lying) + bytes(lying if lying < 9 else 0))
    return hostile.twisted(b"".join(parts)) if hostile.chance(50) else b"".join(parts)


def _of_server_handshake(hostile: Hostile) -> bytes:
    return hostile.twisted(ClientHandshake("client", "c", KEY).start()) + hostile.bytes() * 3


def _of_client_handshake(hostile: Hostile) -> bytes:
    return hostile.twisted(ServerHandshake(KEY).receive(ClientHandshake("client", "c", KEY).start()))


def _of_answers(hostile: Hostile) -> bytes:
    return hostile.body(ReplyEnvelope(hostile.int(), hostile.struct(hostile.one(REPLIES))))


def _of_objects(hostile: Hostile) -> bytes:
    import torch

    value = hostile.one(
        (
            {"a": [1, 2.5, None, "x", b"y", (1, {2})]}, 1 << 80, "\ud800", complex(1, 2), np.arange(12).reshape(3, 4),
            np.array(["a", "bc"]), np.array([None, 1], dtype=object), np.float32(3), np.datetime64("2020-01-01"),
            torch.arange(6).reshape(2, 3), torch.zeros(0, 3), torch.ones(3, dtype=torch.bfloat16),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)]), bytes(70_000), object, frozenset({1}),
            [torch.ones(20_000), {"x": torch.zeros(3)}],
        )
    )  # fmt: skip
    data = encode_object(value)
    if hostile.chance(10):
        data = data[:2000] + data[-2000:]
    return hostile.twisted(data)


def _of_tags(hostile: Hostile) -> bytes:
    value = hostile.any()
    if hostile.chance(50):
        code = hostile.one((64, 65, 65, 65, 66))
        value = {"a": msgspec.msgpack.Ext(code, _of_objects(hostile))}
    return hostile.body(value)


def _of_columns(hostile: Hostile) -> bytes:
    """A reply about one or two blocks, with lies in it."""

    def i4(*numbers: int) -> bytes:
        return np.array([n if hostile.chance(97) else hostile.rng.randrange(-3, 9) for n in numbers], "<i4").tobytes()

    def i8(*numbers: int) -> bytes:
        lies = [n if hostile.chance(95) else hostile.int() % 2**64 for n in numbers]
        return np.array(lies, "<u8").tobytes()  # the bytes of numbers with a sign, also of those above 2**63

    blocks = [hostile.block(hostile.rng.randrange(1, 4)) for _ in range(hostile.rng.randrange(1, 3))]
    if hostile.chance(50):
        blocks = [blocks[0]] * len(blocks)
    n = len(blocks)
    count = hostile.rng.randrange(4)
    names = [spec.name for spec in blocks[0].schema]
    types = []
    for spec in blocks[0].schema:
        shape = hostile.value(list[int]) if hostile.chance(30) else None
        ndim = spec.ndim if hostile.chance(90) else hostile.int()
        types.append(
            FieldType(spec.name, spec.kind, spec.dtype, ndim, shape, hostile.rng.randrange(5), hostile.chance(20))
        )
    reply = LookupReply(
        count if hostile.chance(95) else hostile.int(), types,
        Blocks(i4(*[0] * n), i8(*[64 * i for i in range(n)]), i8(*[1] * n), i8(*[2048] * n),
               i4(*[b.rows % 2**31 for b in blocks]), i4(*range(n)), i4(*range(n)), [b.schema for b in blocks],
               [b.dims for b in blocks]),
        [Placement(names, i4(*[hostile.rng.randrange(n) for _ in range(count)]), i4(*[0] * count))],
    )  # fmt: skip
    return hostile.body(reply)


def _of_description(hostile: Hostile) -> bytes:
    return hostile.twisted(msgspec.json.encode(hostile.struct(Description)))


def _of_arena_header(hostile: Hostile) -> bytes:
    header = {
        "magic": "transfer_queue arena", "version": hostile.one((1, 1, 2)), "granule": 65536,
        "capacity": hostile.one((65536, 1 << 20, 0, -65536, 1 << 62)), "boot_id": hostile.str(),
    }  # fmt: skip
    data = json.dumps(header).encode()
    return hostile.twisted(data) if hostile.chance(50) else data


def _of_start_message(hostile: Hostile) -> bytes:
    body = hostile.body(hostile.struct(launcher_protocol.StartRequest))
    length = len(body) if hostile.chance(80) else hostile.one((0, 1, 1 << 62, (1 << 64) - 1))
    return length.to_bytes(8, "little") + body


def _of_live_snapshot(hostile: Hostile) -> bytes:
    """A snapshot in which some values are others, or some bytes."""
    parts = json.loads(LIVE_EXAMPLE.read_bytes())
    document = {
        "kind": snapshots.KIND, "format": hostile.one((1, 1, 1, 1, 2, 0, "1")), "version": hostile.str(), "saved": 1.0,
        "view": parts["full"], "matrices": [parts["matrix"]], "samples": [parts["sample"]],
    }  # fmt: skip
    for _ in range(hostile.rng.randrange(4)):
        at: Any = document
        while True:
            key = hostile.one(tuple(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], (dict, list)) or not at[key] or hostile.chance(20):
                break
            at = at[key]
        at[key] = hostile.one((None, -1, 10**18, 1e300, "", "\u202e", [], {}, hostile.str(), hostile.float()))
        if hostile.chance(20):
            del at[key]
    text = json.dumps(document, default=str).encode()
    packed = gzip.compress(hostile.twisted(text) if hostile.chance(20) else text, 1)
    return hostile.twisted(packed) if hostile.chance(20) else packed


def _of_settings(hostile: Hostile) -> bytes:
    sections = {
        "controller": ("sampler", "sampler_args", "polling_mode"), "security": ("allow_pickle",), "timeouts": ("call",),
        "backend": ("storage_backend", "SimpleStorage"), "system": ("name",), "metrics": ("enabled", "port", "host"),
    }  # fmt: skip

    def value() -> Any:
        return hostile.one(
            (None, True, -1, 1e300, 10**30, "", "x" * 300, "os:system", "json:JSONDecoder", "PrioritySampler", [],
             [1], {}, {"a": {"b": 1}}, {"total_storage_size": hostile.int(), "arena_bytes": hostile.float()}, "${x}",
             "${oc.env:HOME}", "???", "TokenBudgetSampler", {"inner": {"sampler": "PrioritySampler"}},
             {"max_tokens": hostile.int()})
        )  # fmt: skip

    conf: dict[str, Any] = {}
    for section in hostile.rng.sample(list(sections), 2):
        conf[section] = (
            {key: value() for key in sections[section] if hostile.chance(60)} if hostile.chance(85) else value()
        )
    return json.dumps(conf).encode()


FREQUENT: tuple[type, ...] = (
    tuple(kind for kind in REQUESTS if kind.__name__ in {"Publish", "Claim", "Lookup", "Reserve", "ClearRows", "Watch"})
    * 6
)

GENERATORS: dict[str, Callable[[Hostile], bytes]] = {name: globals()[f"_of_{name}"] for name in DECODERS}


def generate(name: str, rng: random.Random) -> bytes:
    """An input for this decoder; one in ten is noise."""
    hostile = Hostile(rng)
    if hostile.chance(10):
        return bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
    return GENERATORS[name](hostile)
