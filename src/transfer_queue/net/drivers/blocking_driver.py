"""Runs an operation in the calling thread, with blocking sockets.

Each call uses a connection that no other thread uses at that time, and stays in its thread. If an event loop runs in
the thread, the call blocks it. A call that ends without its reply closes its connection, because the reply may still
arrive later.
"""

from __future__ import annotations

import contextlib
import math
import select
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from types import FrameType
from typing import TypeVar

from transfer_queue.config.environment import max_streams
from transfer_queue.errors import ProtocolError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim, ReportBatches
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import CONTROLLER, NOT_MADE, Call, Join, Notice, Pause, Request, Work
from transfer_queue.net.drivers.connection import LONGEST_POLL, Connection, Pool, ReplyReader
from transfer_queue.net.session import RetryPolicy, Session, raise_failure
from transfer_queue.utils.logging_utils import get_logger

T = TypeVar("T")


def run_blocking(session: Session, op: Generator[Call, AnyReply, T]) -> T:
    """Run an operation and return its result. Errors of a call are thrown into it first, at its `yield`.

    Warns if all its calls together block an event loop for long.
    """
    pool, begun = session.transport(Pool), time.monotonic()
    try:
        call = next(op)
        while True:
            try:
                reply = _exchange(session, pool, call)
            except BaseException as error:
                call = op.throw(error)
            else:
                call = op.send(reply)
            if time.monotonic() - begun >= BLOCKED_SECONDS and blocks_loop():
                warn_of_blocked_loop()
    except StopIteration as stop:
        result: T = stop.value
        return result


def exchange(session: Session, call: Call) -> AnyReply:
    """Make one call and return its reply. Raises the error with which the call failed."""
    return _exchange(session, session.transport(Pool), call)


def _exchange(session: Session, pool: Pool, call: Call) -> AnyReply:
    if isinstance(call, Request):
        return _ask(session, pool, call)
    if isinstance(call, Join):
        return NOT_MADE  # to hand an operation to another thread costs as much as its request
    if isinstance(call, Notice):
        write_notice(session, pool, call.report)
    elif isinstance(call, Work):
        call.function()
    elif isinstance(call, Pause):
        pause(call)
    else:
        run_parallel(session, pool, call.calls)
    return Done()


def pause(call: Pause) -> None:
    """Let time pass in this thread. If this blocks an event loop for long, warn."""
    seconds, until, begun = call.seconds, call.until, time.monotonic()
    if until is None:
        time.sleep(seconds or 0.0)
        return
    may_block = (seconds is None or seconds > BLOCKED_SECONDS) and blocks_loop()
    if may_block and not wait((until,), BLOCKED_SECONDS).done:
        warn_of_blocked_loop()
    wait((until,), None if seconds is None else begun + seconds - time.monotonic())


def _ask(session: Session, pool: Pool, call: Request) -> AnyReply:
    attempts = RetryPolicy(session, call)
    attempts.warn_at = attempts.begun + BLOCKED_SECONDS
    payload = 0 if call.payload is None else len(call.payload)
    call.sequence, frame = session.begin_request(call.body, payload, call.target, call.within)
    try:
        reply = retry_until_reply(session, pool, call, attempts, frame, report=_report_wait)
    except BaseException:
        if isinstance(call.body, Claim):  # it may be answered yet, and nobody would get its rows
            write_notice(session, pool, ReportBatches(withdrawn=[call.sequence]))
        else:
            session.finish(call.sequence)
        raise
    session.finish(call.sequence)
    return raise_failure(reply)


def _report_wait(session: Session, attempts: RetryPolicy) -> None:
    """Report the wait of a call, and warn if it blocks an event loop, each if it is due."""
    now = session.clock()
    if attempts.warn_at <= now:
        attempts.warn_at = math.inf
        if blocks_loop():
            warn_of_blocked_loop()
    if attempts.report_at <= now:
        run_blocking(session, attempts.begin_report())


def write_notice(session: Session, pool: Pool, report: ReportBatches) -> None:
    """Write a notice to the controller. If this fails, the next request carries it."""
    session.notices.add(report)
    with contextlib.suppress(OSError, TransferQueueError):
        deadline = time.monotonic() + NOTICE_SECONDS
        connection = pool.take(CONTROLLER) or pool.connect(session, CONTROLLER, deadline)
        try:
            connection.send(session.notices.frame(), deadline)
        except BaseException:
            pool.discard(connection)
            raise
        pool.give_back(CONTROLLER, connection)


NOTICE_SECONDS = 2.0
"""Seconds in which a notice can be written at once."""

# ---------------------------------------------------------------- blocked event loops
# Warns of blocking calls that stop an event loop for long, and names their asynchronous forms.

BLOCKED_SECONDS = 1.0
"""Seconds that a call blocks an event loop before it is logged."""
PACKAGE = "transfer_queue"
CO_GENERATOR = 0x20
"""The flag of the code of a generator, `inspect.CO_GENERATOR`, which servers do not import."""

_warned: set[str] = set()
"""The messages that this process has logged."""


def blocks_loop() -> bool:
    """Return whether a blocking call in this thread stops an event loop now.

    The loop of IPython and Jupyter, in which cells run that may block it, does not count.
    """
    # a process without asyncio runs no loop; servers do not load it
    running = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)
    if running is None or running() is None:
        return False
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is None or shell() is None


def warn_of_blocked_loop() -> None:
    """Log once for each method that the call in this thread has blocked an event loop, and what to use instead."""
    blocking, instead = _outermost_call(sys._getframe(1))
    text = (
        f"{blocking} has blocked the event loop of this thread for {BLOCKED_SECONDS:g} s, so that none of its other "
        f"tasks can run. In a coroutine, use {instead}."
    )
    if text not in _warned:
        _warned.add(text)
        get_logger(__name__).warning("%s", text)


def _outermost_call(frame: FrameType | None) -> tuple[str, str]:
    """Return the outermost call of this package that has an asynchronous form, and that form."""
    found = "A blocking call", "the asynchronous form of the call, or asyncio.to_thread"
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] == PACKAGE:
        found = _asynchronous_form(frame) or found
        frame = frame.f_back
    return found


def _asynchronous_form(frame: FrameType) -> tuple[str, str] | None:
    """Return the name of a call, and what a coroutine uses instead; None if nothing does the same there."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if owner is None:
        form = f"async_{name}"
        return (f"{name}()", f"`await {form}(...)`") if form in frame.f_globals else None
    kind = type(owner).__name__
    if name == "__enter__" and hasattr(owner, "__aenter__"):
        return f"`with` of a {kind}", "`async with`"
    if frame.f_code.co_flags & CO_GENERATOR and hasattr(owner, "__aiter__"):
        return f"`for` over a {kind}", "`async for`"
    for form in (f"async_{name}", f"{name}_async"):
        if not name.startswith("_") and hasattr(type(owner), form):
            return f"{kind}.{name}", f"`await {kind}.{form}(...)`"
    return None


# ---------------------------------------------------------------- calls in parallel
# Calls of one thread over the pooled connections of a session: one until it has its reply, or several at once.
#
# Several requests are all sent, then the replies are received in any order. Each call has its own connection, deadline
# and outcome. Requests with large payloads are divided among threads, if the process may use several streams. When all
# calls have ended, those whose connection broke are tried again one after the other, like single calls.

Report = Callable[[Session, RetryPolicy], None]
"""Reports the wait of a call, and warns if it blocks an event loop, each if it is due."""


def run_parallel(session: Session, pool: Pool, calls: Sequence[Request | Work | Pause]) -> None:
    """Make these calls and set the `outcome` of each: the reply, or the error with which the call failed."""
    tries: list[_Try] = []
    try:
        for call in calls:
            try:
                if isinstance(call, Request):
                    tries.append(_Try(session, pool, call))
                else:
                    call.outcome = _exchange(session, pool, call)
            except TransferQueueError as error:
                call.outcome = error
        for each in tries:
            each.step(_Try.connect)
        _transfer_in_threads(tries)
        for each in tries:
            each.end()
    finally:
        for each in tries:
            each.stop_waiting()


LARGE_TRANSFER = 1 << 20
"""Bytes of payload from which a request may have a thread of its own."""


def _transfer_in_threads(tries: Sequence[_Try]) -> None:
    """Send all requests and receive their replies, in this thread and others if several have large payloads."""
    large = sum(each.payload_bytes >= LARGE_TRANSFER for each in tries)
    count = min(large, max_streams()) if large > 1 else 1
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []

    def transfer(lane: Sequence[_Try]) -> None:
        try:
            _transfer(lane)
        except BaseException as error:  # raised again below, in the caller's thread
            failures.append(error)

    try:
        with contextlib.suppress(RuntimeError):  # no thread can be started, so this one does its work
            for first in range(1, count):
                thread = threading.Thread(target=transfer, args=(tries[first::count],), name="transfer", daemon=True)
                thread.start()
                threads.append(thread)
        for first in (0, *range(len(threads) + 1, count)):
            _transfer(tries[first::count])
        for thread in threads:
            thread.join()
    except BaseException:
        for each in tries:
            each.interrupt()
        for thread in threads:
            thread.join()
        raise
    if failures:
        raise failures[0]


def _transfer(tries: Sequence[_Try]) -> None:
    """Send requests, then receive their replies."""
    for each in tries:
        each.step(_Try.send)
    _receive([each for each in tries if each.incoming is not None])


def _receive(tries: Sequence[_Try]) -> None:
    """Receive until each call has its reply or has failed."""
    poll = select.poll()
    waiting: dict[int, _Try] = {}
    for each in tries:
        assert each.connection is not None
        waiting[each.connection.sock.fileno()] = each
        poll.register(each.connection.sock, select.POLLIN)
    while waiting:
        now = time.monotonic()
        left = min(each.attempts.deadline for each in waiting.values()) - now
        ready = {number for number, _ in poll.poll(max(0.0, min(left, LONGEST_POLL)) * 1000)}
        for number, each in list(waiting.items()):
            each.step(_Try.receive if number in ready else _Try.wait)
            if each.is_finished:
                poll.unregister(number)
                del waiting[number]


class _Try:
    """The first try of a call."""

    def __init__(self, session: Session, pool: Pool, call: Request) -> None:
        self._session = session
        self._pool = pool
        self._call = call
        self.attempts = RetryPolicy(session, call)
        self.connection: Connection | None = None
        self.incoming: ReplyReader | None = None
        self._broken: OSError | TransferQueueError | None = None
        """The error with which the try failed, if it did."""
        call.sequence, self._frame = session.begin_request(
            call.body, 0 if call.payload is None else len(call.payload), call.target, call.within
        )

    @property
    def payload_bytes(self) -> int:
        """The bytes of payload of the request and of its reply."""
        return len(self._call.payload or b"") + sum(map(len, self._call.into))

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is to be received."""
        return self._broken is not None or (self.incoming is not None and self.incoming.whole)

    def step(self, step: Callable[[_Try], None]) -> None:
        """Run a step, unless the try has failed."""
        if self._broken is None:
            try:
                step(self)
            except (OSError, TransferQueueError) as error:
                self._broken, self.incoming = error, None
                self._discard()
                if isinstance(error, ConnectionError):
                    self._pool.close_idle(self._call.target)  # the other idle connections led to the same server

    def connect(self) -> None:
        """Take an idle connection, or make one."""
        target = self._call.target
        self.connection = self._pool.take(target) or self._pool.connect(self._session, target, self.attempts.deadline)

    def send(self) -> None:
        """Send the request."""
        assert self.connection is not None
        self.connection.send(self._frame, self.attempts.deadline, self._call.payload)
        self.incoming = ReplyReader(self.connection, self._call.into, self.attempts.deadline)

    def receive(self) -> None:
        """Read the bytes of the reply that have arrived."""
        assert self.incoming is not None
        self.incoming.receive()

    def wait(self) -> None:
        """Raise `TimeoutError` if the deadline has passed. Called when no bytes have arrived."""
        if time.monotonic() > self.attempts.deadline:
            raise TimeoutError("no reply before the deadline")

    def end(self) -> None:
        """Set the outcome of the call. If the connection broke, try again first."""
        self.step(_Try._take)
        try:
            if isinstance(self._broken, TransferQueueError):
                raise self._broken
            if self._broken is not None:
                args = self._session, self._pool, self._call, self.attempts, self._frame, self._broken
                self._call.outcome = raise_failure(retry_until_reply(*args))
        except TransferQueueError as error:
            self._call.outcome = error

    def _take(self) -> None:
        assert self.incoming is not None
        assert self.incoming.body is not None
        assert self.connection is not None
        sequence = self._call.sequence
        answer = self._session.decode_reply(self.incoming.body)
        if answer.sequence != sequence:
            raise ProtocolError(f"expected the reply to request {sequence}, got the reply to {answer.sequence}")
        self._pool.give_back(self._call.target, self.connection)
        self.connection = None
        self._call.outcome = raise_failure(answer.body)

    def interrupt(self) -> None:
        """Break the connection, so that the thread that uses it gets an error."""
        if (connection := self.connection) is not None:
            connection.wake()

    def _discard(self) -> None:
        if self.connection is not None:
            self._pool.discard(self.connection)
            self.connection = None

    def stop_waiting(self) -> None:
        """Stop waiting for the reply. If it has not arrived, its connection is closed."""
        self._discard()
        self._session.finish(self._call.sequence)


def retry_until_reply(
    session: Session,
    pool: Pool,
    call: Request,
    attempts: RetryPolicy,
    frame: bytes,
    broken: OSError | None = None,
    report: Report | None = None,
) -> AnyReply:
    """Send a request until its reply arrives, and return the reply.

    Args:
        session: The session.
        pool: Its connections.
        call: The call.
        attempts: When it is tried again and reported.
        frame: The request.
        broken: The error of an earlier try, if any.
        report: Called when a report is due; None if the call does not wait for long.
    """
    target, sequence = call.target, call.sequence
    while True:
        if broken is not None:
            delay = attempts.next_delay(broken)
            if delay:
                time.sleep(delay)
            frame = attempts.frame_to_retry(sequence, frame)
            if report is not None and attempts.next_report <= session.clock():
                report(session, attempts)
        connection: Connection | None = None
        try:
            until = attempts.deadline if report is None else min(attempts.deadline, attempts.report_at)
            connection = pool.take(target) or pool.connect(session, target, until)
            if call.into:
                body = connection.exchange_into(frame, attempts.deadline, call.into)
            else:
                connection.send(frame, attempts.deadline, call.payload)
                body = _receive_reply(session, connection, attempts, report)
            answer = session.decode_reply(body)
            if answer.sequence != sequence:
                raise ProtocolError(f"expected the reply to request {sequence}, got the reply to {answer.sequence}")
            pool.give_back(target, connection)
            return answer.body
        except BaseException as error:
            if connection is not None:
                pool.discard(connection)
                if isinstance(error, ConnectionError):
                    pool.close_idle(target)  # the other idle connections led to the same server
            if not isinstance(error, OSError) or isinstance(error, TransferQueueError):
                raise
            broken = error


def _receive_reply(session: Session, connection: Connection, attempts: RetryPolicy, report: Report | None) -> bytes:
    deadline = attempts.deadline
    while report is not None and (due := attempts.next_report) < deadline:
        try:
            return connection.receive_reply(due, deadline)
        except TimeoutError:
            report(session, attempts)
    return connection.receive_reply(deadline, deadline)
