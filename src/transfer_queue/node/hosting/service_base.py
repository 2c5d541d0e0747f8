"""What controller and unit have in common behind the servers' loop: bodies to envelopes, replies to frames."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from transfer_queue.errors import ProtocolError
from transfer_queue.messages.base import UNREADABLE, Failure
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.metrics.timing import Load
from transfer_queue.net.handshake import Hello
from transfer_queue.net.server.server_loop import Outgoing

logger = logging.getLogger(__name__)


class _EnvelopeHead(msgspec.Struct, array_like=True, frozen=True):
    """As much of an envelope as an unknown request leaves readable."""

    sequence: int
    acknowledged: int
    body: msgspec.Raw


class EnvelopeService(ABC):
    """The part of a `net.server.server_loop.Service` that reads requests and writes replies.

    Every request that can be addressed gets a reply: also one that cannot be read, or at which the server itself
    fails. What is no request at all ends its connection. load: what it measures meanwhile.
    """

    name = "server"  # for errors

    def __init__(self) -> None:
        self.load = Load()
        self._peers: dict[int, Hello] = {}  # all open connections that others have made
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(RequestEnvelope).decode
        self._decode_head = msgspec.msgpack.Decoder(_EnvelopeHead).decode

    @abstractmethod
    def handle(
        self, hello: Hello, peer: int, envelope: RequestEnvelope, payload: memoryview | None, now: float
    ) -> Iterable[Outgoing]:
        """Serves one request."""

    def opened(self, peer: int, hello: Hello) -> None:
        """See `net.server.server_loop.Service.opened`."""
        self._peers[peer] = hello

    def received(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        """See `net.server.server_loop.Service.received`."""
        try:
            envelope = self._decode(body)
        except UNREADABLE as error:
            return [self._unreadable(peer, body, error)]
        hello = self._peers[peer]
        try:
            return self.handle(hello, peer, envelope, payload, now)
        except Exception as error:
            asked = type(envelope.body).__name__
            logger.exception("the %s failed at %s of %s", self.name, asked, hello.client_id)
            text = f"the {self.name} failed at {asked}: {error!r}; its log has the traceback"
            return [self.answer(peer, envelope.sequence, Failure("TransferQueueError", text))]
        finally:
            self.load.served(type(envelope.body), now, time.monotonic())

    def answer(self, peer: int, sequence: int, reply: AnyReply, payload: Sequence[memoryview] = ()) -> Outgoing:
        """The frame that answers a request."""
        if type(reply) is Failure:
            self.load.failed(reply.kind)
        return Outgoing(peer, self._encode(ReplyEnvelope(sequence, reply)), payload)

    def demand(self, peer: int, request: AnyRequest) -> Outgoing:
        """The frame of a request of ours that wants no reply."""
        return Outgoing(peer, self._encode(RequestEnvelope(0, 0, request)))

    def _unreadable(self, peer: int, body: bytes, error: Exception) -> Outgoing:
        self.load.malformed += 1
        try:
            head = self._decode_head(body)
        except UNREADABLE:
            raise ProtocolError(f"a message that is no request: {error}") from error
        return self.answer(peer, head.sequence, Failure("ProtocolError", f"a request that cannot be read: {error}"))


SWITCH_SECONDS = 0.0005  # the loop gets the interpreter back after so long; by default only after 5 ms


class BackgroundThread:
    """Runs functions one after the other, in a thread that starts with the first of them and ends with the process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]] = queue.SimpleQueue()
        self._started = False

    def begin(self, run: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Calls `done`, in the worker's thread, with what `run()` gives or the exception that it raises."""
        self._queue.put((run, done))
        if not self._started:
            self._started = True
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
            threading.Thread(target=self._work, name="worker", daemon=True).start()

    def _work(self) -> None:
        while True:
            run, done = self._queue.get()
            try:
                outcome = run()
            except BaseException as error:  # a user's code may call sys.exit()
                outcome = error
            done(outcome)
