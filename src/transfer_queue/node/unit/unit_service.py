"""A storage unit behind the servers' loop: serves writers, and is itself a peer of the controller.

When its controller goes away, a unit goes on serving its writers and connects anew: it registers with what it has
leased, and reports again what no controller has confirmed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from transfer_queue.errors import ProtocolError
from transfer_queue.messages.base import UNREADABLE, Done, Failure
from transfer_queue.messages.envelopes import AnyRequest, RequestEnvelope
from transfer_queue.messages.storage import LeaseExtent
from transfer_queue.messages.unit_reports import (
    BlocksMovedReport,
    DrainFinished,
    ExtentsFreedReport,
    Measure,
    Measured,
    Move,
    RefuseWriters,
    RegisterUnit,
    ReleaseExtents,
    UnitMeasures,  # fmt: skip
    WriterGone,
)
from transfer_queue.metrics.timing import Waits
from transfer_queue.net.handshake import Hello
from transfer_queue.net.server.server_loop import Outgoing
from transfer_queue.net.session import Session
from transfer_queue.node.hosting.process_metrics import ProcessMetrics
from transfer_queue.node.hosting.service_base import EnvelopeService
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.storage.unit.unit_effects import Effect, Fetch, Report, SendReply

logger = logging.getLogger(__name__)

_ANSWER = b"\x92"  # the first byte of an Answer, an array of two; an Envelope is a longer one


class UnitService(EnvelopeService):
    """A `net.server.server_loop.Service` that serves one storage unit.

    session: numbers what the unit tells its controller. registration: what it registers with, but for its extents.
    lost: called when the controller is gone, `connected` being expected. failed: called when the unit cannot go on.
    fetch: receives blocks from other nodes, and calls the function with the numbers of those that came, in the loop.
    meter: measures the process, for a controller that asks for it; None: nobody can.
    """

    name = "storage unit"

    def __init__(
        self,
        unit: StorageUnit,
        session: Session,
        registration: Callable[[bytes], RegisterUnit],
        lost: Callable[[], None],
        failed: Callable[[], None],
        fetch: Callable[[Fetch, Callable[[set[int]], Iterable[Outgoing]]], None],
    ) -> None:
        super().__init__()
        self._controller: int | None = None  # the peer that is the controller, while it is connected
        self._outstanding: set[int] = set()  # sequences without an answer
        self._registering = 0  # the sequence of a registration that has no answer yet
        self._unit = unit
        self._session = session
        self._registration = registration
        self._lost = lost
        self._failed = failed
        self._fetch = fetch
        self._fetching = 0  # the number of the move whose blocks are being fetched
        self.meter: ProcessMetrics | None = None
        self._waiting: dict[tuple[int, int], float] = {}  # (peer, sequence) of leases that wait -> since
        self._waits = Waits()

    def registered(self, controller: int) -> Iterable[Outgoing]:
        """The unit is registered with the controller at this peer."""
        self._controller = controller
        return self._outgoing([*self._unit.unsettled()])

    def connected(self, controller: int) -> Iterable[Outgoing]:
        """There is a connection to a controller again, which does not know this unit yet."""
        self._controller = controller
        self._registering, body = self._session.wrap(self._registration(self._unit.register()))
        self._outstanding.add(self._registering)
        return [Outgoing(controller, body)]

    def received(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        """See `net.server.server_loop.Service.received`."""
        if peer == self._controller:
            return self._told(body)
        return super().received(peer, body, payload, now)

    def handle(
        self, hello: Hello, peer: int, envelope: RequestEnvelope, payload: memoryview | None, now: float
    ) -> Iterable[Outgoing]:
        """See `EnvelopeService.handle`."""
        sequence, body = envelope.sequence, envelope.body
        effects = self._unit.handle(hello.client_id, peer, sequence, body, now, payload)
        if isinstance(body, LeaseExtent):
            answered = [(effect.peer, effect.sequence) for effect in effects if isinstance(effect, SendReply)]
            if (peer, sequence) not in answered:
                self._waiting.setdefault((peer, sequence), now)
        return self.carried_out(effects)

    def closed(self, peer: int, now: float) -> Iterable[Outgoing]:
        """See `net.server.server_loop.Service.closed`."""
        if peer == self._controller:
            logger.warning("the controller has gone away")
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
        return self.carried_out(self._unit.disconnected(peer, now))

    def next_deadline(self) -> float | None:
        """See `net.server.server_loop.Service.next_deadline`."""
        return self._unit.next_deadline()

    def ticked(self, now: float) -> Iterable[Outgoing]:
        """See `net.server.server_loop.Service.ticked`."""
        return self.carried_out(self._unit.tick(now))

    def _told(self, body: bytes) -> Iterable[Outgoing]:
        """What the controller says: extents to free, or answers to reports."""
        if body[:1] != _ANSWER:
            try:
                request = self._decode(body).body
            except UNREADABLE as error:
                raise ProtocolError(f"the controller sent what is no request: {error}") from error
            began = time.monotonic()
            outgoing = self._ordered(request, began)
            self.load.served(type(request), began, time.monotonic())
            return outgoing
        answer = self._session.answer(body)
        self._session.finish(answer.sequence)
        self._outstanding.discard(answer.sequence)
        if answer.sequence == self._registering:
            self._registering = 0
            if answer.body != Done(self._unit.number):
                logger.error("storage unit %d registered anew, and was answered %s", self._unit.number, answer.body)
                self._failed()
                return ()
            logger.info("registered anew as storage unit %d", self._unit.number)
            return self._outgoing([*self._unit.unsettled()])
        if isinstance(answer.body, Failure):
            logger.error("the controller refused a report: %s", answer.body.message)
        return ()

    def _move(self, order: Move) -> list[Outgoing]:
        if not order.remotes:
            return self.carried_out(self._unit.move(order))
        self._unit.forget_move()
        self._fetching = order.number
        wanted = {at: block for at, block in enumerate(_blocks(order)) if block[0] in order.remotes}
        memory = {at: np.empty(nbytes, np.uint8) for at, (_, _, _, nbytes) in wanted.items()}

        def come(good: set[int]) -> list[Outgoing]:
            if order.number != self._fetching:  # its controller has gone away meanwhile
                return []
            self._fetching = 0
            here = {at: memory[at] for number, at in enumerate(memory) if number in good}
            return self.carried_out(self._unit.move(order, here))

        into = [buffer.data for buffer in memory.values()]
        self._fetch(Fetch(order.number, list(wanted.values()), order.remotes, into), come)
        return []

    def _come(self, fetch: int, good: set[int]) -> list[Outgoing]:
        return self.carried_out(self._unit.came(fetch, good, time.monotonic()))

    def _ordered(self, request: AnyRequest, now: float) -> Iterable[Outgoing]:
        """Carry out an order of the controller. If a move cannot be carried out, report it as failed."""
        if isinstance(request, RefuseWriters):
            return self.carried_out(self._unit.refuse(request.words))
        if isinstance(request, Move):
            try:
                _check_columns(request)
                return self._move(request)
            except Exception as error:
                self._unit.forget_move()
                return self.carried_out([self._unit.cannot_move(request.number, error)])
        if isinstance(request, DrainFinished):
            return self.carried_out(self._unit.drained(request.draining))
        if isinstance(request, Measure):
            return list(self._measured(request.number, now))
        if not isinstance(request, ReleaseExtents):
            raise ProtocolError(f"a controller does not ask a storage unit for {type(request).__name__}")
        return self.carried_out(self._unit.free(request.extents))

    def _measured(self, number: int, now: float) -> Iterator[Outgoing]:
        if self.meter is None:
            return
        unit = self._unit
        extents, waiting = len(unit.table.leased_extents()), len(self._waiting)
        longest = now - min(self._waiting.values(), default=now)
        storage = UnitMeasures(unit.room.status(), extents, waiting, longest, unit.draining, dict(unit.counters))
        report = Measured(number, unit.number, self.meter.measures(self._waits.timings()), storage)
        yield from self._outgoing([Report(report)])

    def _met(self, answer: SendReply) -> None:
        """A request is answered; a lease may have waited for it."""
        since = self._waiting.pop((answer.peer, answer.sequence), None)
        if since is not None:
            self._waits.note("Lease", "", time.monotonic() - since)

    def idle(self) -> bool:
        """See `StorageUnit.idle`; its steps count as events of the loop."""
        began = time.monotonic()
        more = self._unit.idle()
        ended = time.monotonic()
        self.load.longest.note("idle", ended - began, ended)
        return more

    def carried_out(self, effects: list[Effect]) -> list[Outgoing]:
        """What the server is to send for these, and for what the unit has to tell besides."""
        return list(self._outgoing([*effects, *self._unit.confirmed(), *self._unit.shortage()]))

    def _outgoing(self, effects: list[Effect]) -> Iterator[Outgoing]:
        for effect in effects:
            if isinstance(effect, SendReply):
                self._met(effect)
                yield self.answer(effect.peer, effect.sequence, effect.reply, effect.payload)
            elif isinstance(effect, Fetch):
                self._fetch(effect, partial(self._come, effect.number))
            elif self._controller is not None:
                if isinstance(effect.body, WriterGone):
                    logger.info("writer %s is gone, it held %d extents", effect.body.writer, len(effect.body.extents))
                if isinstance(effect.body, (ExtentsFreedReport, BlocksMovedReport)) and effect.body.failed:
                    logger.error("an order of the controller failed: %s", effect.body.failed)
                sequence, body = self._session.wrap(effect.body)
                self._outstanding.add(sequence)
                yield Outgoing(self._controller, body)


def _blocks(order: Move) -> list[tuple[int, int, int, int]]:
    """Unit, offset, generation and length of each block of an order."""
    its = order.blocks
    units = np.frombuffer(its.unit, "<i4").tolist()
    columns = (np.frombuffer(column, "<i8").tolist() for column in (its.offset, its.generation, its.nbytes))
    return list(zip(units, *columns, strict=True))


def _check_columns(order: Move) -> None:
    """Raises ProtocolError where an order's columns do not fit together."""
    its = order.blocks
    fours = (its.unit, its.rows, its.schema, its.dims)
    eights = (its.offset, its.generation, its.nbytes)
    counts = {len(column) / 4 for column in fours} | {len(column) / 8 for column in eights}
    if len(counts) != 1 or counts.pop() % 1:
        raise ProtocolError("a controller orders a move of blocks whose columns are not of one length")
