"""Numbers at the limits of the encoding, in every field of every request: an error reply or a dropped connection.

A controller and a storage unit are wired together, so that an order of one which the other cannot carry out would be
seen to go round.
"""

from __future__ import annotations

import sys
import typing
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from request_variants import array, bodies
from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.errors import ProtocolError
from transfer_queue.messages.base import Done, Failure, RequestBody
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.descriptors import Blocks, FieldSpec, NewBlock
from transfer_queue.messages.envelopes import AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.puts import CloseExtents, Publish, PublishReply
from transfer_queue.messages.queries import Lookup
from transfer_queue.messages.reports.unit_reports import Move, RegisterUnit, ReleaseExtents
from transfer_queue.messages.storage import LeaseExtent, OpenSlot, UnitStatus, UnitStatusReply
from transfer_queue.messages.system import Status, SystemStatus
from transfer_queue.net.handshake import Hello
from transfer_queue.net.session import Session
from transfer_queue.node.controller.controller_service import ControllerService
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.node.unit.unit_service import UnitService
from transfer_queue.sampler import RankAwareSampler
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.testing.simulated_locks import HeldSlots, SimulatedSlots
from transfer_queue.testing.state_recount import check_invariants

sys.path.append(str(Path(__file__).parent.parent / "storage"))

REQUESTS: tuple[type[RequestBody], ...] = typing.get_args(AnyRequest)
UNIT, CONTROLLER, CLIENT, OTHER = 1, 2, 3, 4  # peers
MAX_MESSAGES = 50  # that one request may cause between controller and unit

encode = msgspec.msgpack.Encoder().encode


class System:
    """A controller, a unit and a client "writer" that has an extent with a block of two rows of partition "p"."""

    def __init__(self, folder: Path) -> None:
        self.core = Controller(CoreConfig(RankAwareSampler(), capacity=200))
        self.controller = ControllerService(self.core, StateFiles(folder / "states"))
        self.controller.attach(lambda function: None)
        slots = SimulatedSlots(0, HeldSlots())
        self.storage = StorageUnit(0, ArenaPool(Arena.create(folder / "arena", 1 << 20)), slots)
        self.session = Session("unit", bytes(32), lambda target: "nowhere", role="unit")
        self.unit = UnitService(
            self.storage, self.session, lambda live: RegisterUnit("u", "a", extents=live), lambda: None, lambda: None,
            lambda *_: None,
        )  # fmt: skip
        self.now = 0.0
        self.messages = 0
        self.answers: dict[int, list[Any]] = {CLIENT: [], OTHER: []}
        self.controller.on_connect(UNIT, Hello("unit", "unit"))
        for service in (self.controller, self.unit):
            service.on_connect(CLIENT, Hello("client", "writer"))
            service.on_connect(OTHER, Hello("client", "honest"))
        self.sequence = 0
        self._from_unit(self.unit.on_reconnect(CONTROLLER))
        slot = self.ask(self.unit, OpenSlot("writer")).slot
        slots.held.add(slots.path(slot))
        self.lease = self.ask(self.unit, LeaseExtent(slot, 1 << 16, 1 << 16))
        put = Publish("p", 2, block=self.block())
        assert isinstance(self.ask(self.controller, put), PublishReply)
        self.examples = {kind: array(example) for kind, example in ((NewBlock, put.block), (Publish, put))}

    def block(self) -> NewBlock:
        schema = [FieldSpec("x", "tensor", "float32", 1, False)]
        lies = self.lease
        dims = np.array([4], "<i8").tobytes()
        return NewBlock(0, lies.extent, lies.offset, lies.generation, 32, 2, schema, dims, lies.length)

    def ask(self, service: Any, request: Any, peer: int = CLIENT) -> Any:
        """Return the answer to a request; None if the connection is dropped, or the request waits."""
        self.sequence += 1
        before = len(self.answers[peer])
        self.messages = 0
        self.send(service, peer, encode(RequestEnvelope(self.sequence, 0, request)))
        return self.answers[peer][before] if len(self.answers[peer]) > before else None

    def send(self, service: Any, peer: int, body: bytes) -> None:
        self.now += 1.0
        forward = self._from_controller if service is self.controller else self._from_unit
        try:
            forward(service.on_message(peer, body, None, self.now))
        except ProtocolError:
            return
        for _ in range(8):
            for each, way in ((self.controller, self._from_controller), (self.unit, self._from_unit)):
                due = each.next_deadline()
                if due is not None and due <= self.now:
                    way(each.on_deadline(self.now))

    def _from_controller(self, outgoing: Iterable[Any]) -> None:
        self._pass((UNIT, each) for each in outgoing)

    def _from_unit(self, outgoing: Iterable[Any]) -> None:
        self._pass((CONTROLLER, each) for each in outgoing)

    def _pass(self, outgoing: Iterator[tuple[int, Any]]) -> None:
        """Carry messages until there are none left. `way` is the peer number of the other server."""
        left = deque(outgoing)
        while left:
            way, (peer, body, _) = left.popleft()
            if peer != way:
                self.answers[peer].append(msgspec.msgpack.decode(body, type=ReplyEnvelope).body)
                continue
            self.messages += 1
            assert self.messages < MAX_MESSAGES, "controller and unit do not come to an end"
            if way == UNIT:
                left.extend((CONTROLLER, each) for each in self.unit.on_message(CONTROLLER, body, None, self.now))
            else:
                left.extend((UNIT, each) for each in self.controller.on_message(UNIT, body, None, self.now))
        self.core.take_records()

    def check(self) -> None:
        """Check that both servers still serve, and that their states are sound."""
        assert isinstance(self.ask(self.controller, Status(), OTHER), SystemStatus)
        assert isinstance(self.ask(self.unit, UnitStatus(), OTHER), UnitStatusReply)
        check_invariants(self.core.state)
        self.storage.check()


@pytest.fixture
def system(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[System]:
    made = System(tmp_path)
    yield made
    failed = [record.getMessage() for record in caplog.records if record.exc_info]
    assert not failed, failed


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_a_number_at_a_limit_in_any_field_causes_at_most_an_error(kind: type[RequestBody], system: System) -> None:
    for body in bodies(kind, system.examples):
        for service, peers in ((system.controller, (UNIT, CLIENT)), (system.unit, (CONTROLLER, CLIENT))):
            for peer in peers:
                system.sequence += 1
                system.messages = 0
                system.send(service, peer, encode([system.sequence, 0, body]))
    system.check()


@pytest.mark.parametrize("number", [2**40, 2**63 - 1, 2**64 - 1])
def test_an_extent_that_no_unit_can_have_is_not_closed(system: System, number: int) -> None:
    reply = system.ask(system.controller, CloseExtents([(0, number)]))
    assert reply.kind == "ProtocolError"
    assert system.messages == 0  # the unit is not ordered to free it
    system.check()


def test_an_extent_that_was_never_leased_is_not_freed(system: System) -> None:
    assert system.ask(system.controller, CloseExtents([(0, 2**40 - 1)])) == Done([[0, 2**40 - 1]])
    assert not system.core.state.blocks.freed
    assert system.messages == 0
    system.check()


def test_a_value_can_be_read_after_all_extreme_requests(system: System) -> None:
    for body in bodies(CloseExtents, system.examples):
        system.send(system.controller, OTHER, encode([1, 0, body]))
    assert not isinstance(system.ask(system.controller, Lookup("p", rows=bytes(8) * 0, fields=["x"])), Failure)
    assert system.core.state.row_count == 2
    assert not isinstance(
        system.ask(system.controller, Claim("p", "t", ["x"], 1, {"dp_rank": 0, "batch_index": 0})), Failure
    )


def test_a_move_that_cannot_be_carried_out_is_answered_as_failed(system: System) -> None:
    wrong = Blocks(bytes(4), bytes(8), bytes(8), bytes(8), bytes(4), bytes(4), bytes(3), [], [])
    out = list(system.unit.on_message(CONTROLLER, encode(RequestEnvelope(0, 0, Move(7, wrong, {}))), None, 0.0))
    (answer,) = [msgspec.msgpack.decode(each.body, type=RequestEnvelope).body for each in out]
    assert (answer.move, answer.extent) == (7, 0)
    assert answer.failed


def test_an_order_to_free_continues_after_an_extent_that_fails(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    release = type(system.storage)._release_all

    def failing(unit: StorageUnit, extents: list[int]) -> None:
        if system.lease.extent in extents:
            raise OSError("no")
        release(unit, extents)

    monkeypatch.setattr(type(system.storage), "_release_all", failing)
    order = encode(RequestEnvelope(0, 0, ReleaseExtents([system.lease.extent, 999])))
    out = list(system.unit.on_message(CONTROLLER, order, None, 0.0))
    (answer,) = [msgspec.msgpack.decode(each.body, type=RequestEnvelope).body for each in out]
    assert np.frombuffer(answer.extents, "<i8").tolist() == [999]
    assert f"extent {system.lease.extent}" in answer.failed
    assert system.storage.table.get(system.lease.extent) is not None


def test_every_number_of_a_request_has_a_range() -> None:
    free = []
    for kind in (RequestEnvelope, *REQUESTS):
        for name, hint in numbers(kind):
            if hint in (int, float):
                free.append(f"{kind.__name__}.{name}")
    assert not free


def numbers(kind: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Return all numbers in a type, with their annotations."""
    if kind in (int, float):
        yield name, kind
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field, hint in typing.get_type_hints(kind, include_extras=True).items():
            if field != "body":
                yield from numbers(hint, f"{name}.{field}")
    elif typing.get_origin(kind) is not typing.Annotated:
        for inside in typing.get_args(kind):
            yield from numbers(inside, name)
