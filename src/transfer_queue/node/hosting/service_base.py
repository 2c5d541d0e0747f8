"""The base of the services of the controller and of units: requests, replies in frames, measures of the process."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from transfer_queue.errors import ProtocolError, with_advice
from transfer_queue.messages.base import UNREADABLE, Failure
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.reports.progress import Timing
from transfer_queue.messages.reports.unit_reports import ServerMeasures
from transfer_queue.metrics.timing import Load
from transfer_queue.net.handshake import Hello
from transfer_queue.net.server.server_loop import Outgoing, ServerLoop

logger = logging.getLogger(__name__)


class _EnvelopeHead(msgspec.Struct, array_like=True, frozen=True):
    """The part of an envelope that can be read although its request is unknown."""

    sequence: int
    acknowledged: int
    body: msgspec.Raw


class EnvelopeService(ABC):
    """The part of a `net.server.server_connection.Service` that reads requests and writes replies.

    Every request with a readable head gets a reply, also if its body cannot be read or the server itself fails.
    Anything else ends its connection.
    """

    name = "server"
    """The name of the server in errors."""

    def __init__(self) -> None:
        self.load = Load()
        """Measures of the requests that were served."""
        self._peers: dict[int, Hello] = {}
        """All open connections that were made to this server."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(RequestEnvelope).decode
        self._decode_head = msgspec.msgpack.Decoder(_EnvelopeHead).decode

    @abstractmethod
    def handle(
        self, hello: Hello, peer: int, envelope: RequestEnvelope, payload: memoryview | None, now: float
    ) -> Iterable[Outgoing] | None:
        """Serve one request. None: it is served later, and then recorded in `load`."""

    def on_connect(self, peer: int, hello: Hello) -> None:
        """See `net.server.server_connection.Service.on_connect`."""
        self._peers[peer] = hello

    def on_message(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        """See `net.server.server_connection.Service.on_message`."""
        try:
            envelope = self._decode(body)
        except UNREADABLE as error:
            return [self._unreadable(peer, body, error)]
        hello = self._peers[peer]
        try:
            outgoing = self.handle(hello, peer, envelope, payload, now)
        except Exception as error:
            outgoing = [self.answer_error(hello, peer, envelope, error)]
        if outgoing is None:
            return ()
        self.load.record_request(type(envelope.body), now, time.monotonic())
        return outgoing

    def answer_error(self, hello: Hello, peer: int, envelope: RequestEnvelope, error: Exception) -> Outgoing:
        """Log an error of the server itself, which is being handled. Return the frame that reports it."""
        request = type(envelope.body).__name__
        logger.exception("the %s failed to serve %s of client %s", self.name, request, hello.client_id)
        advice = "its log has the traceback"
        why = with_advice(error, advice) if isinstance(error, OSError) else f"{error!r}; {advice}"
        text = f"the {self.name} failed to serve {request}: {why}"
        return self.answer(peer, envelope.sequence, Failure("TransferQueueError", text))

    def answer(self, peer: int, sequence: int, reply: AnyReply, payload: Sequence[memoryview] = ()) -> Outgoing:
        """Return the frame that answers a request."""
        if type(reply) is Failure:
            self.load.record_failure(reply.kind)
        return Outgoing(peer, self._encode(ReplyEnvelope(sequence, reply)), payload)

    def demand(self, peer: int, request: AnyRequest) -> Outgoing:
        """Return the frame of a request that this server makes and that gets no reply."""
        return Outgoing(peer, self._encode(RequestEnvelope(0, 0, request)))

    def _unreadable(self, peer: int, body: bytes, error: Exception) -> Outgoing:
        self.load.malformed += 1
        try:
            head = self._decode_head(body)
        except UNREADABLE:
            raise ProtocolError(f"the {self.name} received a message that is not a request: {error}") from error
        text = f"the {self.name} received a request that it cannot read: {error}"
        return self.answer(peer, head.sequence, Failure("ProtocolError", text))


SWITCH_SECONDS = 0.0005  # the loop gets the interpreter back after this time; Python's default is 5 ms


class BackgroundThread:
    """Runs functions one after the other in a thread, which starts with the first one and ends with the process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]] = queue.SimpleQueue()
        self._started = False

    def begin(self, run: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run `run`, then call `done` in the same thread with its result or the exception that it raised."""
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


PAGE = os.sysconf("SC_PAGE_SIZE")
REASONS = {
    "rejected": "unauthenticated", "refused": "refused", "broken": "broken", "crowded": "crowded", "slow": "slow",
    "accept_errors": "descriptors", "errors": "error",
}  # fmt: skip
"""Counters of `net.server.server_loop.ServerLoop` -> their names in metrics."""

EVENTS = ("request", "tick", "work", "commit", "idle")
"""The kinds of events of a loop. The longest one is reported as 0.0 if none was notable."""


class ProcessMetrics:
    """Measures this process: its server loop and the load of its service."""

    def __init__(self, server: ServerLoop, load: Load) -> None:
        self._server = server
        self._load = load
        self._started = time.time()

    def measures(self, waits: list[Timing]) -> ServerMeasures:
        """Return all current measures."""
        rejected = {reason: self._server.counters[name] for name, reason in REASONS.items()}
        longest = self._load.longest.by_event(time.monotonic())
        return ServerMeasures(
            requests=self._load.timings(),
            waits=waits,
            failures=dict(self._load.failures),
            rejected={**rejected, "malformed": self._load.malformed},
            longest={event: longest.get(event, (0.0, ""))[0] for event in EVENTS},
            connections=self._server.connections,
            accepted=self._server.counters["accepted"],
            cpu=time.process_time(),
            resident=resident_bytes(),
            started=self._started,
        )


def resident_bytes() -> int:
    """Return the bytes of memory that this process uses; 0 if the operating system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:
        return 0
