"""A storage unit behind the server loop: serves writers, and is itself a peer of the controller and of other units.

If its controller is gone, a unit continues to serve its writers and connects again: it registers with the extents that
it has leased, and reports again what no controller has confirmed.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from transfer_queue.errors import ProtocolError, TransferQueueError
from transfer_queue.messages.base import UNREADABLE, Done, Failure
from transfer_queue.messages.envelopes import AnyRequest, RequestEnvelope
from transfer_queue.messages.reports import store_reports, unit_reports
from transfer_queue.messages.storage import LeaseExtent, ReadPieces
from transfer_queue.metrics.timing import Waits
from transfer_queue.net.calls import Request
from transfer_queue.net.drivers.blocking_driver import exchange
from transfer_queue.net.handshake import Hello
from transfer_queue.net.server.server_loop import Outgoing
from transfer_queue.net.session import Session
from transfer_queue.node.hosting.service_base import EnvelopeService, ProcessMetrics
from transfer_queue.storage.unit.extent_pool import RetiredPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.storage.unit.unit_effects import Effect, Fetch, RemoteBlock, Report, SendReply
from transfer_queue.system_folder.paths import host_and_port

if TYPE_CHECKING:
    import ssl


logger = logging.getLogger(__name__)

_ANSWER = b"\x92"  # the first byte of a ReplyEnvelope, an array of two; a RequestEnvelope is a longer one


class UnitService(EnvelopeService):
    """A `net.server.server_connection.Service` that serves one storage unit."""

    name = "storage unit"

    def __init__(
        self,
        unit: StorageUnit,
        session: Session,
        registration: Callable[[bytes], unit_reports.RegisterUnit],
        lost: Callable[[], None],
        end: Callable[[], None],
        fetch: Callable[[Fetch, Callable[[set[int]], Iterable[Outgoing]]], None],
    ) -> None:
        """Make the service of a unit.

        Args:
            unit: The storage unit.
            session: Numbers the unit's messages to its controller.
            registration: Makes the registration from the numbers of the leased extents.
            lost: Called when the controller is gone. A call of `on_reconnect` must follow.
            end: Called when the unit cannot continue, or is not needed any more.
            fetch: Fetches blocks from other nodes, then calls the function in the loop with the numbers of those that
                were fetched.
        """
        super().__init__()
        self._controller: int | None = None
        """The peer that is the controller, while it is connected."""
        self._outstanding: set[int] = set()
        """Sequences without a reply."""
        self._registering = 0
        """The sequence of a registration that has no reply yet."""
        self._unit = unit
        self._session = session
        self._registration = registration
        self._lost = lost
        self._end = end
        self._fetch = fetch
        self._fetching = 0
        """The number of the move whose blocks are being fetched."""
        self.meter: ProcessMetrics | None = None
        """Measures the process for the controller; None: measures cannot be requested."""
        self._waiting: dict[tuple[int, int], float] = {}
        """(peer, sequence) of each waiting request for an extent -> since when."""
        self._waits = Waits()

    def on_registered(self, controller: int) -> Iterable[Outgoing]:
        """The unit is registered with the controller at this peer: report what is not confirmed."""
        self._controller = controller
        return self._outgoing([*self._unit.repeat_reports()])

    def on_reconnect(self, controller: int) -> Iterable[Outgoing]:
        """Register with the controller at this new connection."""
        self._controller = controller
        self._registering, body = self._session.encode_request(self._registration(self._unit.register()))
        self._outstanding.add(self._registering)
        return [Outgoing(controller, body)]

    def on_message(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        """See `net.server.server_connection.Service.on_message`."""
        if peer == self._controller:
            return self._handle_controller_message(body)
        return super().on_message(peer, body, payload, now)

    def handle(
        self, hello: Hello, peer: int, envelope: RequestEnvelope, payload: memoryview | None, now: float
    ) -> Iterable[Outgoing]:
        """See `EnvelopeService.handle`."""
        sequence, body = envelope.sequence, envelope.body
        effects = self._unit.handle(hello.client_id, peer, sequence, body, now, payload, envelope.acknowledged)
        if isinstance(body, LeaseExtent):
            answered = [(effect.peer, effect.sequence) for effect in effects if isinstance(effect, SendReply)]
            if (peer, sequence) not in answered:
                self._waiting.setdefault((peer, sequence), now)
        return self.carry_out(effects)

    def on_disconnect(self, peer: int, now: float) -> Iterable[Outgoing]:
        """See `net.server.server_connection.Service.on_disconnect`."""
        if peer == self._controller:
            logger.warning("storage unit %d lost the connection to its controller", self._unit.number)
            self._controller = None
            for sequence in self._outstanding:
                self._session.finish(sequence)
            self._outstanding.clear()
            self._unit.forget_move()
            self._fetching = 0
            self._lost()
            return ()
        del self._peers[peer]
        self._waiting = {waiter: since for waiter, since in self._waiting.items() if waiter[0] != peer}
        return self.carry_out(self._unit.on_disconnect(peer, now))

    def next_deadline(self) -> float | None:
        """See `net.server.server_connection.Service.next_deadline`."""
        return self._unit.next_deadline()

    def on_deadline(self, now: float) -> Iterable[Outgoing]:
        """See `net.server.server_connection.Service.on_deadline`."""
        return self.carry_out(self._unit.tick(now))

    def _handle_controller_message(self, body: bytes) -> Iterable[Outgoing]:
        """Handle a message of the controller: an order, or the reply to a report."""
        if body[:1] != _ANSWER:
            try:
                request = self._decode(body).body
            except UNREADABLE as error:
                raise ProtocolError(f"the controller sent a message that is not a request: {error}") from error
            began = time.monotonic()
            outgoing = self._carry_out_order(request, began)
            self.load.record_request(type(request), began, time.monotonic())
            return outgoing
        answer = self._session.decode_reply(body)
        self._session.finish(answer.sequence)
        self._outstanding.discard(answer.sequence)
        if answer.sequence == self._registering:
            self._registering = 0
            if answer.body != Done(self._unit.number):
                logger.error(
                    "storage unit %d registered again and stops, because the controller answered %s",
                    self._unit.number,
                    answer.body,
                )
                self._end()
                return ()
            logger.info("storage unit %d registered again", self._unit.number)
            return self._outgoing([*self._unit.repeat_reports()])
        if isinstance(answer.body, Failure):
            logger.error("storage unit %d: the controller refused a report: %s", self._unit.number, answer.body.message)
        return ()

    def _move(self, order: unit_reports.Move) -> list[Outgoing]:
        if not order.remotes:
            return self.carry_out(handle_order(self._unit, order))
        self._unit.forget_move()
        self._fetching = order.number
        wanted = {at: block for at, block in enumerate(_blocks(order)) if block.unit in order.remotes}
        memory = {at: np.empty(block.nbytes, np.uint8) for at, block in wanted.items()}

        def come(good: set[int]) -> list[Outgoing]:
            if order.number != self._fetching:  # the controller that gave the order is gone
                return []
            self._fetching = 0
            here = {at: memory[at] for number, at in enumerate(memory) if number in good}
            return self.carry_out(self._unit.move(order, here))

        into = [buffer.data for buffer in memory.values()]
        self._fetch(Fetch(order.number, list(wanted.values()), order.remotes, into), come)
        return []

    def _end_fetch(self, fetch: int, good: set[int]) -> list[Outgoing]:
        return self.carry_out(self._unit.end_fetch(fetch, good, time.monotonic()))

    def _carry_out_order(self, request: AnyRequest, now: float) -> Iterable[Outgoing]:
        """Carry out an order of the controller. If a move cannot be carried out, report it as failed."""
        if isinstance(request, unit_reports.Move):
            try:
                _check_columns(request)
                return self._move(request)
            except Exception as error:
                self._unit.forget_move()
                return self.carry_out([self._unit.failed_move_report(request.number, repr(error))])
        if isinstance(request, unit_reports.Measure):
            return list(self._send_measures(request.number, now))
        if isinstance(request, unit_reports.RemoveArena) and isinstance(self._unit.pool, RetiredPool):
            logger.info("storage unit %d has nothing that is needed any more, and removes its arena", self._unit.number)
            self._unit.pool.remove()
            self._end()
            return ()
        return self.carry_out(handle_order(self._unit, request))

    def _send_measures(self, number: int, now: float) -> Iterator[Outgoing]:
        if self.meter is None:
            return
        unit = self._unit
        extents, waiting = len(unit.table.leased_extents()), len(self._waiting)
        longest = now - min(self._waiting.values(), default=now)
        storage = unit_reports.UnitMeasures(
            unit.pool.status(), extents, waiting, longest, unit.draining, dict(unit.counters), unit.pool.read_holds()
        )
        report = unit_reports.Measured(number, unit.number, self.meter.measures(self._waits.timings()), storage)
        yield from self._outgoing([Report(report)])

    def work_ahead(self) -> bool:
        """See `StorageUnit.work_ahead`. Each step counts as an event of the loop."""
        began = time.monotonic()
        more = self._unit.work_ahead()
        ended = time.monotonic()
        self.load.longest.record("idle", ended - began, ended)
        return more

    def carry_out(self, effects: list[Effect]) -> list[Outgoing]:
        """Return what the server sends for these effects, with what the unit has to report in addition."""
        return list(self._outgoing([*effects, *self._unit.take_reports(), *self._unit.take_shortage_report()]))

    def _outgoing(self, effects: list[Effect]) -> Iterator[Outgoing]:
        for effect in effects:
            if isinstance(effect, SendReply):
                since = self._waiting.pop((effect.peer, effect.sequence), None)
                if since is not None:  # it has asked for an extent
                    self._waits.record("Lease", "", time.monotonic() - since)
                yield self.answer(effect.peer, effect.sequence, effect.reply, effect.payload)
            elif isinstance(effect, Fetch):
                self._fetch(effect, partial(self._end_fetch, effect.number))
            elif self._controller is not None:
                if isinstance(effect.body, unit_reports.WriterGone):
                    logger.info("writer %s is gone; it had %d extents", effect.body.writer, len(effect.body.extents))
                if (
                    isinstance(effect.body, (unit_reports.ExtentsFreedReport, unit_reports.BlocksMovedReport))
                    and effect.body.failed
                ):
                    logger.error(
                        "storage unit %d could not carry out an order of its controller: %s",
                        self._unit.number,
                        effect.body.failed,
                    )
                sequence, body = self._session.encode_request(effect.body)
                self._outstanding.add(sequence)
                yield Outgoing(self._controller, body)


def handle_order(unit: StorageUnit, request: AnyRequest) -> list[Effect]:
    """Handle an order of the controller that concerns the unit alone, and not its process or other nodes.

    Raises ProtocolError if it is not such an order.
    """
    if isinstance(request, unit_reports.ReleaseExtents):
        return unit.free(request.extents)
    if isinstance(request, unit_reports.RefuseWriters):
        return unit.refuse(request.message)
    if isinstance(request, unit_reports.Move):
        return unit.move(request)
    if isinstance(request, unit_reports.DrainFinished):
        return unit.set_draining(request.draining)
    if isinstance(request, store_reports.CheckStore):
        return unit.note_store_change()
    if isinstance(request, store_reports.CheckExtents):
        return unit.check_extents(request)
    raise ProtocolError(f"a storage unit does not accept {type(request).__name__} from its controller")


def _blocks(order: unit_reports.Move) -> list[RemoteBlock]:
    """Return the blocks of an order."""
    blocks = order.blocks
    units = np.frombuffer(blocks.unit, "<i4").tolist()
    columns = (np.frombuffer(column, "<i8").tolist() for column in (blocks.offset, blocks.generation, blocks.nbytes))
    return [RemoteBlock(*block) for block in zip(units, *columns, strict=True)]


def _check_columns(order: unit_reports.Move) -> None:
    """Raise ProtocolError if the columns of an order differ in length."""
    blocks = order.blocks
    fours = (blocks.unit, blocks.rows, blocks.schema, blocks.dims)
    eights = (blocks.offset, blocks.generation, blocks.nbytes)
    counts = {len(column) / 4 for column in fours} | {len(column) / 8 for column in eights}
    if len(counts) != 1 or counts.pop() % 1:
        raise ProtocolError("the controller ordered a move whose columns of blocks differ in length")


# ---------------------------------------------------------------- blocks of units on other nodes
# Fetches blocks from units on other nodes, several units at once. Blocking: a unit runs it in a thread.


CALL_SECONDS = 30.0  # for one reply of another unit
AT_ONCE = 256 << 20  # bytes of one reply
MAX_LANES = 8  # units from which blocks are fetched at once


def fetch_blocks(order: Fetch, key: bytes, tls: ssl.SSLContext | None = None) -> set[int]:
    """Fetch the blocks of an order, with the key and TLS context of the system. Returns the numbers of those fetched.

    Blocks that were freed before they were copied, and blocks whose unit cannot be reached, are not among them.
    """
    units = list(dict.fromkeys(block.unit for block in order.wanted))
    good: list[int] = []

    def receive(lane: list[int]) -> None:
        for unit in lane:
            wanted = [at for at, block in enumerate(order.wanted) if block.unit == unit]
            try:
                good.extend(_fetch_from_unit(unit, host_and_port(order.remotes[unit]), key, tls, order, wanted))
            except (OSError, KeyError, TransferQueueError) as error:
                logger.warning("%d blocks cannot be fetched from storage unit %d: %s", len(wanted), unit, error)

    lanes = [units[first::MAX_LANES] for first in range(min(MAX_LANES, len(units)))]
    threads = [threading.Thread(target=receive, args=(lane,), name="fetch blocks", daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return set(good)


def _fetch_from_unit(
    unit: int, address: tuple[str, int], key: bytes, tls: ssl.SSLContext | None, order: Fetch, wanted: list[int]
) -> list[int]:
    session = Session(f"fetch-{uuid.uuid4().hex}", key, lambda target: address, role="unit", tls=tls)
    try:
        return [at for at in wanted if _receive(session, order.wanted[at], order.into[at])]
    finally:
        session.close()


def _receive(session: Session, block: RemoteBlock, into: memoryview) -> bool:
    """Whether the block was fetched, and still had its generation after that."""
    unit, offset, generation, nbytes = block
    place = _packed(offset), _packed(generation)
    for begin in range(0, nbytes, AT_ONCE):
        part = into[begin : min(nbytes, begin + AT_ONCE)]
        request = ReadPieces(unit, _packed(offset + begin), _packed(len(part)), *place)
        if not _read(session, request, [part]):
            return False
    return _read(session, ReadPieces(unit, b"", b"", *place), ())


def _packed(number: int) -> bytes:
    return np.array([number], "<i8").tobytes()


def _read(session: Session, request: ReadPieces, into: Sequence[memoryview]) -> bool:
    """Read pieces of a block into these parts. Returns whether the unit still had the block."""
    reply = exchange(session, Request(("unit", request.unit), request, within=CALL_SECONDS, into=into))
    return isinstance(reply, Done) and bool(reply.value)
