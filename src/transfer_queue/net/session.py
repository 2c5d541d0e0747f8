"""The state of one client: its sequences, its envelopes, its notices, and its rules for retries. Sans-IO.

Both drivers run operations through a session: they get frames to send from it and pass it the bodies of replies. The
calls of all threads and event loops share one counter of sequences.

    sequence      the number of a request among those of this client id, to all targets, from 1
    acknowledged  the highest s such that no request <= s waits for its reply any more;
                  servers drop the replies up to s, which they keep for retries
    finished      sequences beyond it that are finished, too, while an older request still waits for its reply. Each
                  is sent once, with one of the next requests, in one run with its finished neighbours

A request that is sent again after its connection broke keeps its sequence, so that the server repeats the reply to the
first one.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from itertools import islice
from numbers import Integral, Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Union

import msgspec

from transfer_queue.errors import (
    ConnectionLostError,
    FieldTypeError,
    InvalidArgumentError,
    NotInitializedError,
    ProtocolError,
    WaitTimeoutError,
    by_name,
)
from transfer_queue.messages.base import UNREADABLE, Failure
from transfer_queue.messages.claims import Claim, ReportBatches
from transfer_queue.messages.envelopes import NOTICE, AnyReply, AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.reports.timeline import ValueRead
from transfer_queue.net.calls import CONTROLLER
from transfer_queue.net.framing import pack_frame

if TYPE_CHECKING:
    import ssl

    from transfer_queue.net.calls import Call, Request


Target = tuple[str, int]  # ("controller", 0) or ("unit", number)

GRACE_SECONDS = 30.0
"""Seconds that a server may need beyond the time for which a request may be parked."""
RETRY_DELAYS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds before each new try after the connection broke."""
LONGEST_DELAY = 1.0
"""Seconds before each later try, while the system is known to run."""
MIN_WAIT = 0.001
"""Seconds that a request asks to wait if it is sent again after its wait, so that it ends like one that waited."""
CLOCK_SLACK = 0.002
"""Seconds by which a timer may fire early."""
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""The errors of encoding a request with a value that cannot be sent. Those of msgspec are ValueErrors."""
FINISHED_RUNS = 16
READS = 16  # reported in one envelope
"""An envelope names at most this many runs of finished sequences. One would be enough to keep up."""


def _plain(value: object) -> str | int | float:
    """Convert names and numbers of numpy, and of subclasses of str, int and float, to plain ones for encoding."""
    if isinstance(value, str):
        return str.__str__(value)  # str() of a member of an enum is its name
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"a {type(value).__name__} is neither a name nor a number")


@functools.cache
def reply_decoder() -> Callable[[bytes], ReplyEnvelope]:
    """Return the function that decodes a reply.

    The first call of a process takes 4 ms. Clients make it when they are imported, so that it is not a part of their
    first request; servers, which make few sessions, would need 1.5 MB more for it.
    """
    return msgspec.msgpack.Decoder(ReplyEnvelope).decode


class Transport(Protocol):
    """The connections of one driver in one session."""

    def close(self) -> None:
        """Close all connections. Calls under way fail."""

    def after_fork(self) -> None:
        """In a forked child: close only the copies of the parent's descriptors."""


T = TypeVar("T", bound=Transport)


class Session:
    """The state that all calls of one client id share. It is thread-safe.

    Args:
        client_id: The client id.
        key: The system's key.
        resolve: Returns where a target listens: the path of a UNIX socket, or (host, port). Called at each connect.
        log_of: Returns the path of a target's log for error messages; "" if there is none.
        alive: Returns whether a server that is gone will return, because its system runs; None if this is not known.
            It then counts as gone after all RETRY_DELAYS. Default: None, never known.
        role: "client" or "unit".
        grace: See GRACE_SECONDS.
        tls: The TLS context of connections to a (host, port).
    """

    def __init__(
        self,
        client_id: str,
        key: bytes,
        resolve: Callable[[Target], Union[str, tuple[str, int]]],
        *,
        log_of: Callable[[Target], str] | None = None,
        alive: Callable[[Target], bool | None] | None = None,
        role: str = "client",
        grace: float = GRACE_SECONDS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.client_id = client_id
        self.key = key
        self.resolve = resolve
        self.log_of = log_of
        self.alive = alive
        self.role = role
        self.grace = grace
        self.tls = tls
        self.clock: Callable[[], float] = time.monotonic
        """The clock of deadlines. The simulation replaces it."""
        self.closed = False
        self._lock = threading.Lock()
        self._next = 1
        self._acknowledged = 0
        self._unfinished: set[int] = set()
        self._run_ends: dict[int, int] = {}  # first -> last of each run of finished sequences beyond `_acknowledged`
        self._run_starts: dict[int, int] = {}  # last -> first of the same runs
        self._news: dict[int, None] = {}  # the first sequences of runs that have grown since an envelope named them
        self._transports: dict[type[Any], Any] = {}
        self._reads: deque[tuple[float, ValueRead]] = deque(maxlen=4 * READS)
        """The gets that are not reported yet, the newest ones, each with the reading of `clock` when it ended."""
        self._encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
        self.report_wait: float | None = None
        """Seconds after which a call that waits is reported, and again each time the wait has doubled; None: never."""
        self.report: Callable[[Request, float], Generator[Call, AnyReply, None]] | None = None
        """Returns the operation that logs what a call waits for. It gets the seconds for which the call has waited."""
        self.notices = Notices(self._encode)
        """The notices that the controller may not have read."""
        self._decode = reply_decoder()

    def begin_request(
        self, request: AnyRequest, payload: int = 0, target: Target | None = None, within: float | None = None
    ) -> tuple[int, bytes]:
        """Return a new sequence for the request and the frame to send. The caller must call `finish` later.

        Args:
            request: The request.
            payload: The number of bytes of payload that the caller sends after the frame.
            target: Where it is sent. Requests to the controller report the gets that `note_read` has noted.
            within: See `RequestEnvelope`.
        """
        sequence, body = self.encode_request(request, target, within)
        return sequence, pack_frame(body, payload)

    def encode_request(
        self, request: AnyRequest, target: Target | None = None, within: float | None = None
    ) -> tuple[int, bytes]:
        """Like `begin_request`, but return only the body of the frame."""
        if self.closed:
            raise NotInitializedError("this client was closed; call transfer_queue.init() or get a new client")
        with self._lock:
            sequence = self._next
            self._next += 1
            self._unfinished.add(sequence)
            acknowledged, finished = self._acknowledged, self._take_news() if self._news else []
        try:
            if target != CONTROLLER:
                return sequence, self._encode(RequestEnvelope(sequence, acknowledged, request, finished))
            reads = self._take_reads() if self._reads else []
            report = self.notices.take(sequence) if self.notices.waiting else None
            return sequence, self._encode(
                RequestEnvelope(sequence, acknowledged, request, finished, reads, report, within)
            )
        except BaseException as error:
            self.finish(sequence)
            if not isinstance(error, UNSENDABLE):
                raise
            raise InvalidArgumentError(
                f"an argument of {type(request).__name__} cannot be sent ({error}): an int must fit into 64 bits, a "
                "str must be valid Unicode, and other values must have a type that the documentation names"
            ) from error

    def encode_again(self, sequence: int, request: AnyRequest, within: float | None = None) -> bytes:
        """Return the body of a request to send it once more. `within`: see `RequestEnvelope`."""
        acknowledged, report = min(self._acknowledged, sequence - 1), self.notices.carried.get(sequence)
        return self._encode(RequestEnvelope(sequence, acknowledged, request, report=report, within=within))

    def finish(self, sequence: int) -> None:
        """Mark a request as finished: its reply has arrived, or no caller waits for it any more. Idempotent.

        The cost does not depend on how many others are unfinished.
        """
        if self.notices.carried:
            self.notices.fail(sequence)
        with self._lock:
            if sequence not in self._unfinished:
                return
            self._unfinished.remove(sequence)
            if sequence == self._acknowledged + 1 and not self._run_ends:  # the usual case: no other request waits
                self._acknowledged = sequence
                return
            first = self._run_starts.pop(sequence - 1, sequence)
            last = self._run_ends.pop(sequence + 1, sequence)
            self._news.pop(sequence + 1, None)
            if sequence == self._acknowledged + 1:
                self._run_starts.pop(last, None)
                self._acknowledged = last
            else:
                self._run_ends[first], self._run_starts[last] = last, first
                self._news[first] = None

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for its reply."""
        return bool(self._unfinished)

    def note_read(self, began: float, partition: str, fields: list[str], rows: int, nbytes: int) -> None:
        """Note a get that has just ended, so that the next request reports it.

        Args:
            began: When it began, on `clock`.
            partition: See `ValueRead`.
            fields: See `ValueRead`.
            rows: See `ValueRead`.
            nbytes: See `ValueRead`.
        """
        ended = self.clock()
        self._reads.append((ended, ValueRead(0.0, ended - began, partition, fields, rows, nbytes)))

    def _take_reads(self) -> list[ValueRead]:
        now = self.clock()
        reads: list[ValueRead] = []
        while self._reads and len(reads) < READS:
            try:
                ended, read = self._reads.popleft()
            except IndexError:  # another thread may take them as well
                break
            reads.append(msgspec.structs.replace(read, ago=now - ended))
        return reads

    def _take_news(self) -> list[tuple[int, int]]:
        """Return runs of finished sequences that have grown since an envelope named them, at most FINISHED_RUNS."""
        firsts = list(islice(self._news, FINISHED_RUNS))
        for first in firsts:
            del self._news[first]
        return [(first, self._run_ends[first]) for first in firsts]

    def decode_reply(self, body: bytes) -> ReplyEnvelope:
        """Return the reply in a body. Raises `ProtocolError` if the body is not a reply."""
        try:
            answer = self._decode(body)
        except UNREADABLE as error:
            raise ProtocolError(f"a server sent a reply that cannot be read: {error}") from error
        if self.notices.carried:
            report = self.notices.carried.pop(answer.sequence, None)
            for withdrawn in () if report is None else report.withdrawn:
                self.finish(withdrawn)
        return answer

    def transport(self, kind: type[T]) -> T:
        """Return the transport of this kind, made at its first use."""
        found: T | None = self._transports.get(kind)
        if found is None:
            with self._lock:
                found = self._transports.setdefault(kind, kind())
        return found

    def close(self) -> None:
        """Close all connections. Calls under way and later calls raise `NotInitializedError`. Idempotent."""
        self.closed = True
        for transport in list(self._transports.values()):
            transport.close()

    def after_fork(self) -> None:
        """In a forked child, once: close the inherited descriptors and forget everything.

        The parent's connections do not change. The child needs a new session with a new client id.
        """
        self.closed = True
        for transport in list(self._transports.values()):
            transport.after_fork()
        self._transports.clear()

    def __del__(self) -> None:
        # a session without references has no call under way; its sockets must be closed with it
        if not getattr(self, "closed", True):
            self.close()


def raise_failure(reply: AnyReply) -> AnyReply:
    """Return the reply. Raises the exception that a `Failure` names."""
    if type(reply) is Failure:
        error = by_name(reply.kind)(reply.message)
        if isinstance(error, FieldTypeError):
            error.tensors, error.field = reply.tensors, reply.field
        raise error
    return reply


class RetryPolicy:
    """Decides when a call is tried again, which error it raises otherwise, and when its wait is reported."""

    report_at = math.inf
    """The reading of the clock at which the wait must be reported; infinite for a call that waits for less."""
    warn_at = math.inf
    """The reading of the clock at which the driver looks if the call blocks an event loop; it sets this."""
    _tries = 0
    _lost_at: float | None = None  # wall clock of the first break

    def __init__(self, session: Session, call: Request) -> None:
        self._session = session
        self._call = call
        self.begun = begun = session.clock()
        """The reading of the session's clock at which the call began."""
        self.deadline = begun + ((call.timeout or 0.0) + session.grace if call.within is None else call.within)
        """The reading of the session's clock until which the call waits for the reply.

        The limit is `Request.within`, or the time for which the request may be parked plus the session's grace.
        """
        if call.timeout is not None and session.report_wait is not None and call.timeout > session.report_wait:
            self.report_at = begun + session.report_wait

    @property
    def next_report(self) -> float:
        """The reading of the clock at which the wait must be reported, or the driver must warn of it."""
        return min(self.report_at, self.warn_at)

    def begin_report(self) -> Generator[Call, AnyReply, None]:
        """Return the operation that reports the wait, which is due. The next report is due when the wait has doubled.

        It ends early, but it may raise an error, if the servers cannot be reached.
        """
        assert self._session.report is not None
        waited = self._session.clock() - self.begun
        self.report_at = self.begun + 2 * waited
        return self._session.report(self._call, waited)

    def next_delay(self, error: OSError) -> float:
        """Return the seconds to wait before the next try after this error. Raises an error if there is none."""
        if self._session.closed:
            raise NotInitializedError("this client was closed during the call") from error
        if self._session.clock() >= self.deadline - CLOCK_SLACK:
            raise self._timed_out() from error
        if self._lost_at is None:
            self._lost_at = time.time()
        delay = RETRY_DELAYS[self._tries] if self._tries < len(RETRY_DELAYS) else None
        self._tries += 1
        alive = None if self._session.alive is None else self._session.alive(self._call.target)
        if delay is None if alive is None else not alive:
            raise self._lost(error) from error
        return LONGEST_DELAY if delay is None else delay

    def frame_to_retry(self, sequence: int, frame: bytes) -> bytes:
        """Return the frame to send again. A request that waits asks only for the rest of its wait."""
        request: Any = self._call.body
        wait: float | None = getattr(request, "wait", None)
        if wait is None or wait <= 0:
            return frame
        waited = self._session.clock() - self.begun
        changed = {"wait": max(wait - waited, MIN_WAIT)}
        if isinstance(request, Claim):
            changed["waited"] = waited
        request = msgspec.structs.replace(request, **changed)
        return pack_frame(self._session.encode_again(sequence, request, self._call.within))

    def _server(self) -> str:
        kind, number = self._call.target
        name = kind if kind == "controller" else f"storage {kind} {number}"
        address = self._session.resolve(self._call.target)
        return f"the {name} at {address if isinstance(address, str) else ':'.join(map(str, address))}"

    def _log(self) -> str:
        log = "" if self._session.log_of is None else self._session.log_of(self._call.target)
        return log and f"; its log: {log}"

    def _timed_out(self) -> WaitTimeoutError:
        why = "is overloaded or stopped"
        if self._lost_at is not None:
            why = (
                f"has not been reachable since {self._lost_since()}; if all processes of its system were killed, start "
                f"the system again"
            )
        return WaitTimeoutError(
            f"Timeout: {self._server()} gave no reply to {type(self._call.body).__name__} within "
            f"{self.deadline - self.begun:g} s; it {why}{self._log()}"
        )

    def _lost_since(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._lost_at))

    def _lost(self, error: OSError) -> ConnectionLostError:
        return ConnectionLostError(
            f"{self._server()} has not been reachable since {self._lost_since()} ({error}; attempts of "
            f"{type(self._call.body).__name__}: {self._tries}); its system was closed or has crashed{self._log()}. "
            f"Start it again, then attach to it with tq.close() and tq.init()"
        )


class Notices:
    """The notices of one client that the controller may not have read. Thread-safe.

    A notice needs no reply: it says that a batch was handed over or given back, or that a claim ended. Every request to
    the controller carries the notices that no request has carried before, and the controller reads them before the
    request. When its reply arrives, they are read; without a reply, the next request carries them again. A notice that
    cannot wait for a request is also written at once, as a request with the sequence NOTICE.

    Args:
        encode: Encodes an envelope.
    """

    def __init__(self, encode: Callable[[RequestEnvelope], bytes]) -> None:
        self._encode = encode
        self.waiting: deque[ReportBatches] = deque()
        """Those that no request carries."""
        self.carried: dict[int, ReportBatches] = {}
        """Sequence of a request without a reply -> the notices that it carries. The session removes them."""
        self.on_add: Callable[[], None] | None = None
        """Called when a notice was added."""

    def __bool__(self) -> bool:
        return bool(self.waiting or self.carried)

    @property
    def unread(self) -> int:
        """The number of batches that were handed over and that the controller may not know of."""
        reports = [*self.waiting, *self.carried.values()]
        return sum(len(report.handed_over) + len(report.finished) for report in reports)

    def add(self, report: ReportBatches) -> None:
        """Add the notices of a report.

        What withdrawn claims carried, which get no reply, is carried again. If the client leaves, so is everything,
        because requests under way may arrive later.
        """
        for sequence in list(self.carried) if report.left else report.withdrawn:
            self.fail(sequence)
        self.waiting.append(report)
        if self.on_add is not None:
            self.on_add()

    def take(self, sequence: int) -> ReportBatches | None:
        """Return the notices that a request carries; None if there are none."""
        report = None
        while self.waiting:
            try:
                further = self.waiting.popleft()
            except IndexError:  # another thread was faster
                break
            report = self.carried[sequence] = further if report is None else _joined([report, further])
        return report

    def fail(self, sequence: int) -> None:
        """Note that a request has ended without a reply, so that the next one carries its notices."""
        report = self.carried.pop(sequence, None)
        if report is not None:
            self.waiting.appendleft(report)

    def frame(self) -> bytes:
        """Return the frame that sends the notices at once. The next request carries them, too."""
        return pack_frame(self._encode(RequestEnvelope(NOTICE, 0, _joined(list(self.waiting)))))


def _joined(reports: list[ReportBatches]) -> ReportBatches:
    joined = ReportBatches([], [], [], [], any(map(attrgetter("left"), reports)))
    for each in reports:
        joined.handed_over.extend(each.handed_over)
        joined.finished.extend(each.finished)
        joined.returned.extend(each.returned)
        joined.withdrawn.extend(each.withdrawn)
    return joined
