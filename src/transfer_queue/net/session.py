"""One client of a system: its sequences, its envelopes, and when to try again. Sans-IO.

Both drivers run operation generators through a session: they get frames to send from it and give it
the bodies that came back. Calls of all threads and event loops share one counter of sequences.

    sequence      numbers the requests of this client id, over all its targets, from 1
    acknowledged  the highest s such that nobody waits any more for a reply to any request <= s;
                  servers drop the replies that they keep for retries up to there
    finished      sequences beyond it that are finished too, while an older request still waits for its reply. Each
                  is sent once, with one of the next requests, in one run with finished neighbours

A request that is sent again, because its connection broke, keeps its sequence: the server answers it
with the reply it gave before. This module knows no sockets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Union, cast

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
from transfer_queue.messages.base import UNREADABLE, Done, Failure
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.net.framing import pack_frame

if TYPE_CHECKING:
    import ssl

    from transfer_queue.net.calls import Call

Target = tuple[str, int]  # ("controller", 0) or ("unit", number)

GRACE_SECONDS = 30.0  # what a server may need beyond the time for which a request lets itself be parked
RETRY_DELAYS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)  # before each new try after a break, in seconds
LONGEST_DELAY = 1.0  # before each try after these, while the system is known to live
LEAST_WAIT = (
    0.001  # seconds that a request which is sent again after its wait asks to wait: it ends like one that waited
)
CLOCK_SLACK = 0.002  # timers may fire this much before their time
UNSENDABLE = (
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
)  # of a value in a request; msgspec's are ValueErrors
FINISHED_RUNS = 16  # an envelope names at most this many runs of finished sequences; one would be enough to keep up

NOT_MADE = Done()  # the result of a call that was not made, see `Call.turn`; compared by identity: servers send Done


def _plain(value: object) -> str | int | float:
    """Names and numbers of numpy's, and of subclasses, as the plain ones that travel."""
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enum's member is its name
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"a {type(value).__name__} is neither a name nor a number")


class Transport(Protocol):
    """What a driver keeps of connections, per session."""

    def close(self) -> None:
        """Closes everything; calls under way fail."""

    def forked(self) -> None:
        """In a forked child: closes copies of the parent's descriptors and nothing else."""


T = TypeVar("T", bound=Transport)


class Session:
    """The state that all calls of one client id share.

    resolve: where a target listens, as a path of a UNIX socket or (host, port); asked at each connect.
    log_of: where a target writes its log, for error messages; "" where it has left none. grace: see GRACE_SECONDS.
    alive: whether a server that is gone will come back, as its system runs; None, also where there is no such function:
    nobody knows, and it counts as gone when all RETRY_DELAYS are through. tls: what connections to a (host, port) use.
    Safe to use from several threads.
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
        self.clock: Callable[[], float] = time.monotonic  # of deadlines; the simulation has its own
        self.closed = False
        self._lock = threading.Lock()
        self._next = 1
        self._acknowledged = 0
        self._unfinished: set[int] = set()
        self._run_ends: dict[int, int] = {}  # first -> last of each run of finished sequences beyond `_acknowledged`
        self._run_starts: dict[int, int] = {}  # the same, last -> first
        self._news: dict[int, None] = {}  # the first sequences of runs that have grown since an envelope named them
        self._transports: dict[type[Any], Transport] = {}
        self._encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
        self._decode = msgspec.msgpack.Decoder(ReplyEnvelope).decode

    def begin(self, request: AnyRequest, payload: int = 0) -> tuple[int, bytes]:
        """A sequence for the request, and the frame to send; `finish` must follow. payload: bytes that will follow."""
        sequence, body = self.wrap(request)
        return sequence, pack_frame(body, payload)

    def wrap(self, request: AnyRequest) -> tuple[int, bytes]:
        """Like `begin`, with the body of the frame alone."""
        with self._lock:
            sequence = self._next
            self._next += 1
            self._unfinished.add(sequence)
            acknowledged, finished = self._acknowledged, self._take_news()
        if self.closed:
            self.finish(sequence)
            raise NotInitializedError("this client was closed; call transfer_queue.init() or get a new client")
        try:
            return sequence, self._encode(RequestEnvelope(sequence, acknowledged, request, finished))
        except BaseException as error:
            self.finish(sequence)
            if not isinstance(error, UNSENDABLE):
                raise
            raise InvalidArgumentError(
                f"an argument of {type(request).__name__} cannot be sent ({error}): an int must fit into 64 "
                f"bits, a str must be valid Unicode, and all else be of a type that the documentation states"
            ) from error

    def again(self, sequence: int, request: AnyRequest) -> bytes:
        """The body of a request that was begun before, to be sent once more."""
        return self._encode(RequestEnvelope(sequence, min(self._acknowledged, sequence - 1), request))

    def finish(self, sequence: int) -> None:
        """Mark a request as finished: its reply has arrived, or no caller waits for it any more. Idempotent.

        The cost does not depend on how many others are unfinished.
        """
        with self._lock:
            if sequence not in self._unfinished:
                return
            self._unfinished.remove(sequence)
            first = self._run_starts.pop(sequence - 1, sequence)
            last = self._run_ends.pop(sequence + 1, sequence)
            self._news.pop(sequence + 1, None)
            if sequence == self._acknowledged + 1:
                self._run_starts.pop(last, None)
                self._acknowledged = last
            else:
                self._run_ends[first], self._run_starts[last] = last, first
                self._news[first] = None

    def _take_news(self) -> list[tuple[int, int]]:
        """Return runs of finished sequences that have grown since an envelope named them, at most FINISHED_RUNS."""
        firsts = list(islice(self._news, FINISHED_RUNS)) if self._news else []
        for first in firsts:
            del self._news[first]
        return [(first, self._run_ends[first]) for first in firsts]

    def answer(self, body: bytes) -> ReplyEnvelope:
        """The answer in a body; ProtocolError if it is none."""
        try:
            return self._decode(body)
        except UNREADABLE as error:
            raise ProtocolError(f"a server sent a reply that cannot be read: {error}") from error

    def transport(self, kind: type[T]) -> T:
        """The one transport of this kind, made at its first use."""
        found = self._transports.get(kind)
        if found is None:
            with self._lock:
                found = self._transports.setdefault(kind, kind())
        return cast(T, found)

    def close(self) -> None:
        """Closes all connections. Calls under way, and later ones, raise NotInitializedError. Idempotent."""
        self.closed = True
        for transport in list(self._transports.values()):
            transport.close()

    def forked(self) -> None:
        """To be called in a forked child, once: closes the inherited descriptors and forgets everything.

        The parent's connections stay as they are. The child needs a new session with a new client id.
        """
        self.closed = True
        for transport in list(self._transports.values()):
            transport.forked()
        self._transports.clear()

    def __del__(self) -> None:
        # a session that nobody holds any more has no call under way; its sockets must not outlive it
        if not getattr(self, "closed", True):
            self.close()


def outcome(reply: AnyReply) -> AnyReply:
    """The reply itself, or the exception that a Failure stands for."""
    if type(reply) is Failure:
        error = by_name(reply.kind)(reply.message)
        if isinstance(error, FieldTypeError):
            error.tensors = reply.tensors
        raise error
    return reply


class RetryPolicy:
    """When one call may be tried again, and how it ends when it may not.

    deadline: a reading of the session's clock after which no reply is waited for: the time that the request may
    stay parked, plus the session's grace, or what the call itself says.
    """

    __slots__ = ("_begun", "_call", "_lost_at", "_seconds", "_session", "_tries", "deadline")

    def __init__(self, session: Session, call: Call) -> None:
        self._seconds = (call.timeout or 0.0) + session.grace if call.within is None else call.within
        self._begun = session.clock()
        self.deadline = self._begun + self._seconds
        self._session = session
        self._call = call
        self._tries = 0
        self._lost_at: float | None = None  # wall clock of the first break

    def failed(self, error: OSError) -> float:
        """Seconds to wait before the next try after this error; raises when there is to be none."""
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

    def again(self, sequence: int, frame: bytes) -> bytes:
        """The frame to send anew: a request that waits asks only for what is left of its wait."""
        request: Any = self._call.request
        wait: float | None = getattr(request, "wait", None)
        if wait is None or wait <= 0:
            return frame
        left = max(self._begun + wait - self._session.clock(), LEAST_WAIT)
        return pack_frame(self._session.again(sequence, msgspec.structs.replace(request, wait=left)))

    def _server(self) -> str:
        kind, number = self._call.target
        name = kind if kind == "controller" else f"storage {kind} {number}"
        address = self._session.resolve(self._call.target)
        return f"the {name} at {address if isinstance(address, str) else ':'.join(map(str, address))}"

    def _log(self) -> str:
        log = "" if self._session.log_of is None else self._session.log_of(self._call.target)
        return log and f"; its log: {log}"

    def _timed_out(self) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"Timeout: {self._server()} gave no reply to {type(self._call.request).__name__} within "
            f"{self._seconds:g} s; it "
            f"is overloaded or stopped{self._log()}"
        )

    def _lost(self, error: OSError) -> ConnectionLostError:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._lost_at))
        return ConnectionLostError(
            f"{self._server()} has not been reachable since {since} ({error}), tried {self._tries} times for "
            f"{type(self._call.request).__name__}; its system was closed or has crashed{self._log()}"
        )
