"""A storage unit behind the servers' loop: serves writers, and is itself a peer of the controller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from transfer_queue.errors import ProtocolError
from transfer_queue.messages import Envelope, Failure, Free, Refuse, WriterGone
from transfer_queue.net.handshake import Hello
from transfer_queue.net.server import Outgoing
from transfer_queue.net.session import Session
from transfer_queue.node.service import EnvelopeService
from transfer_queue.storage.effects import Answer, Effect
from transfer_queue.storage.simple import StorageUnit

logger = logging.getLogger(__name__)

_ANSWER = b"\x92"  # the first byte of an Answer, an array of two; an Envelope is a longer one


class UnitService(EnvelopeService):
    """A `net.server.Service` that serves one storage unit.

    controller: the peer that is the controller, once it is connected. session: numbers what the unit tells it.
    lost: called when it is gone.
    """

    name = "storage unit"

    def __init__(self, unit: StorageUnit, session: Session, lost: Callable[[], None]) -> None:
        super().__init__()
        self.controller: int | None = None
        self._unit = unit
        self._session = session
        self._lost = lost

    def received(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        """See `net.server.Service.received`."""
        if peer == self.controller:
            return self._told(body)
        return super().received(peer, body, payload, now)

    def handle(self, hello: Hello, peer: int, envelope: Envelope, now: float) -> Iterable[Outgoing]:
        """See `EnvelopeService.handle`."""
        return self._carried_out(self._unit.handle(hello.client_id, peer, envelope.sequence, envelope.body, now))

    def closed(self, peer: int, now: float) -> Iterable[Outgoing]:
        """See `net.server.Service.closed`."""
        if peer == self.controller:
            self.controller = None
            self._lost()
            return ()
        del self._peers[peer]
        return self._carried_out(self._unit.disconnected(peer, now))

    def next_deadline(self) -> float | None:
        """See `net.server.Service.next_deadline`."""
        return self._unit.next_deadline()

    def ticked(self, now: float) -> Iterable[Outgoing]:
        """See `net.server.Service.ticked`."""
        return self._carried_out(self._unit.tick(now))

    def _told(self, body: bytes) -> Iterable[Outgoing]:
        """What the controller says: extents to free, or answers to reports."""
        if body[:1] != _ANSWER:
            request = self._decode(body).body
            if isinstance(request, Refuse):
                return self._carried_out(self._unit.refuse(request.words))
            if not isinstance(request, Free):
                raise ProtocolError(f"a controller does not ask a storage unit for {type(request).__name__}")
            return self._carried_out(self._unit.free(request.extents))
        answer = self._session.answer(body)
        self._session.finish(answer.sequence)
        if isinstance(answer.body, Failure):
            logger.error("the controller refused a report: %s", answer.body.message)
        return ()

    def _carried_out(self, effects: list[Effect]) -> list[Outgoing]:
        return list(self._outgoing([*effects, *self._unit.shortage()]))

    def _outgoing(self, effects: list[Effect]) -> Iterator[Outgoing]:
        for effect in effects:
            if isinstance(effect, Answer):
                yield self.answer(effect.peer, effect.sequence, effect.reply)
            elif self.controller is not None:
                if isinstance(effect.body, WriterGone):
                    logger.info("writer %s is gone, it held %d extents", effect.body.writer, len(effect.body.extents))
                yield Outgoing(self.controller, self._session.wrap(effect.body)[1])
