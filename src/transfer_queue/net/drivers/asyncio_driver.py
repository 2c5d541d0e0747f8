"""Runs operations in asyncio, with one multiplexed connection per event loop and target.

The calls of a loop share its connection, and replies are matched by sequence. The driver uses only `add_reader`,
`add_writer` and futures of the loop, no transports. So it works with every loop (also uvloop), and a loop may be closed
without notice: the next call from another loop finds the connections of closed loops, and takes over those on which
nothing is outstanding.

When a task is cancelled, the driver sends `Cancel` for its request, so that no parked claim is left at the server. If
the request is a put, the task ends when the controller has said what became of it: with the cancellation if nothing is
left of the put; otherwise the put returns normally, because a put that raises must have left nothing. A result that is
there wins, as with `asyncio.wait_for`. A cancellation that came too late for one request of an operation ends the
operation at its next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Hashable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Cancel, Claim, ReportBatches
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.net.calls import CONTROLLER, NOT_MADE, Join, Notice, Pause, Request, Together, Work
from transfer_queue.net.drivers.admission import Admission
from transfer_queue.net.drivers.async_joins import CANCEL_SECONDS, AsyncJoins, outlast
from transfer_queue.net.drivers.blocking_driver import exchange as exchange_blocking
from transfer_queue.net.drivers.blocking_driver import write_notice as write_notice_blocking
from transfer_queue.net.drivers.connection import BUSY_SECONDS, LARGE_READ, READ_SIZE, Connection, Pool
from transfer_queue.net.handshake import HANDSHAKE_SECONDS, ClientHandshake
from transfer_queue.net.session import CLOCK_SLACK, RetryPolicy, Session, Target, raise_failure

if TYPE_CHECKING:
    from transfer_queue.net.calls import Call

T = TypeVar("T")

DONE = Done()

PUTS = (Publish, Reserve)
"""The requests whose cancellation waits until it is known whether they have an effect."""
RECONNECT_SECONDS = 0.05
"""Seconds before a cancelled put tries to connect again."""

# What a call waits for: its reply, or the error that broke the connection. An error is a result here, not an
# exception of the future, because a future whose task was cancelled meanwhile would complain about it.
_Outcome = Union[AnyReply, OSError]


async def run_async(session: Session, op: Generator[Call, AnyReply, T]) -> T:
    """Run an operation and return its result. Errors of a call are thrown into it first, at its `yield`.

    An operation has a place among those of its loop (`Admission`) until it makes a call that may take long.
    """
    links = session.transport(_Links).links_of(asyncio.get_running_loop(), session)
    return await _run_admitted(session, links, op, None)


async def run_joining(session: Session, op: Generator[Call, AnyReply, T]) -> T:
    """Do the same for an operation that asks with its first call whether it can join others.

    It has no place while it waits for them.
    """
    links = session.transport(_Links).links_of(asyncio.get_running_loop(), session)
    try:
        call = next(op)
        if isinstance(call, Join):
            try:
                reply = await links.joins.ask(call)
            except BaseException as error:
                call = op.throw(error)
            else:
                late = call.late
                call = op.send(reply)
                if late is not None:
                    call = op.throw(late)
    except StopIteration as stop:
        return cast(T, stop.value)
    return await _run_admitted(session, links, op, call)


async def _run_admitted(session: Session, links: _LoopLinks, op: Generator[Call, AnyReply, T], call: Call | None) -> T:
    """Run an operation that is to make this call, or has not begun if it is None, as soon as there is a place."""
    admission = links.admission
    if not admission.try_enter():
        try:
            await admission.enter()
        except BaseException:
            op.close()
            raise
    inside = True
    try:
        call = next(op) if call is None else call
        while True:
            if inside and _may_take_long(call):
                admission.leave()
                inside = False
            if isinstance(call, Notice):  # without a wait, in which the task could be cancelled
                links.write_notice(call.report)
                call = op.send(DONE)
                continue
            try:
                reply = await _exchange(session, links, call)
            except BaseException as error:
                call = op.throw(error)
            else:
                late = call.late
                call = op.send(reply)
                if late is not None:
                    call = op.throw(late)
    except StopIteration as stop:
        if isinstance(call, Work) and call.late is not None:
            raise call.late from None
        return cast(T, stop.value)
    finally:
        if inside:
            admission.leave()
        call = late = None  # an error that refers to itself would live until garbage is collected


def _may_take_long(call: Call) -> bool:
    """Whether a call may take longer than a round trip: it waits for an event, for a thread, or for many bytes.

    A call that waits for other operations, which need places themselves, must have no place.
    """
    if isinstance(call, Request):
        return call.timeout is not None or _has_payload(call)
    return not isinstance(call, Notice)


def _has_payload(call: Request) -> bool:
    return bool(call.into) or call.payload is not None


async def run_to_end(work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result. A cancelled coroutine first waits until `work` has ended."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled = await await_end(future)
    if cancelled is not None:
        future.exception()
        raise cancelled
    return future.result()


async def run_users_function(function: Callable[[], object]) -> asyncio.CancelledError | None:
    """Run a function in a thread of its own, see `Work.is_users`.

    Returns the cancellation of the coroutine that came meanwhile. It is raised if the function has failed.
    """
    future = asyncio.wrap_future(call_in_thread(function))
    cancelled = await await_end(future)
    error = future.exception()
    try:
        if error is not None:
            raise error if cancelled is None else cancelled
        return cancelled
    finally:
        del cancelled, error  # an error that refers to itself would live until garbage is collected


async def await_end(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until a future is done, also if the coroutine is cancelled meanwhile. Return this cancellation."""
    cancelled = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


def call_in_thread(
    function: Callable[[], T], *, name: str = "transfer_queue user function", daemon: bool = True
) -> Future[T]:
    """Call a function in a thread of its own, because long calls would fill an executor.

    The end of the process waits for the function only if `daemon` is false.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled
    context = contextvars.copy_context()

    def call() -> None:
        try:
            result = context.run(function)
        except StopIteration as error:  # an asyncio future cannot hold it; a generator raises the same instead
            failure = RuntimeError(f"a function of the user raised {error!r}")
            failure.__cause__ = error
            future.set_exception(failure)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=call, name=name, daemon=daemon).start()
    return future


async def exchange(session: Session, call: Call) -> AnyReply:
    """Make one call in the running loop and return its reply. Raises the error with which the call failed."""
    return await _exchange(session, session.transport(_Links).links_of(asyncio.get_running_loop(), session), call)


def _exchange(session: Session, links: _LoopLinks, call: Call) -> Coroutine[Any, Any, AnyReply]:
    """Return the coroutine that makes the call. It is not wrapped in another one, which would cost time and memory."""
    if isinstance(call, Join):
        return links.joins.ask(call)
    if isinstance(call, Together) or (isinstance(call, Request) and _has_payload(call)):
        # gigabytes of values would block the loop, and the connection that other calls share
        return run_to_end(partial(exchange_blocking, session, call))
    if not isinstance(call, Request):
        return _do(links, call)
    if call.turn is not None:
        return _in_turn(session, links, call)
    return _ask(session, links, call)


async def _do(links: _LoopLinks, call: Notice | Work | Pause) -> AnyReply:
    if isinstance(call, Notice):
        links.write_notice(call.report)
    elif isinstance(call, Pause):
        await _pause(call)
    elif call.is_users:
        call.late = await run_users_function(call.function)
    else:
        await run_to_end(call.function)
    return DONE


async def _pause(call: Pause) -> None:
    if call.until is None:
        await asyncio.sleep(call.seconds or 0.0)
        return
    arrival = asyncio.wrap_future(call.until)
    try:
        await asyncio.wait((arrival,), timeout=call.seconds)
    finally:
        arrival.cancel()  # only this future: what arrives stays for the next caller


async def _in_turn(session: Session, links: _LoopLinks, call: Request) -> AnyReply:
    """Return the reply to the call, or NOT_MADE if another task of this loop made one of the same turn meanwhile."""
    waiting = links.turns.get(call.turn)
    if waiting is not None:
        other: asyncio.Future[bool] = links.loop.create_future()
        waiting.append(other)
        # after a failure all waiting calls are made at once, so that their times until they fail do not add up
        return NOT_MADE if await other else await _ask(session, links, call)
    waiting, succeeded = links.turns.setdefault(call.turn, []), False
    try:
        reply = await _ask(session, links, call)
        succeeded = True
        return reply
    finally:
        del links.turns[call.turn]
        for other in waiting:
            if not other.done():
                other.set_result(succeeded)


async def _ask(session: Session, links: _LoopLinks, call: Request) -> AnyReply:
    attempts = RetryPolicy(session, call)
    sequence, frame = session.begin_request(call.body, 0, call.target, call.within)
    call.sequence = sequence
    link: _Link | None = None
    is_answered = False
    try:
        while True:
            try:
                until = min(attempts.deadline, attempts.report_at)
                link = links.working_link(call.target) or await links.connect(call.target, until)
                answer = await link.exchange(sequence, frame, attempts)
                is_answered = True
                return raise_failure(answer)
            except TransferQueueError:
                raise
            except OSError as error:
                delay = attempts.next_delay(error)
            await asyncio.sleep(delay)
            if attempts.report_at <= session.clock():
                await _run_admitted(session, links, attempts.begin_report(), None)
            frame = attempts.frame_to_retry(sequence, frame)
    except asyncio.CancelledError as error:
        if link is None or not isinstance(call.body, PUTS):
            raise
        reply = None if session.closed else await _withdraw(links, call.target, sequence, frame)
        if reply is None:
            raise
        call.late = error
        return reply
    finally:
        if isinstance(call.body, Claim) and not is_answered:
            links.withdraw(sequence)  # it may be answered yet, or was before the connection broke
        elif link is None or not link.finishes_with_cancel(sequence):
            session.finish(sequence)


async def _withdraw(links: _LoopLinks, target: Target, sequence: int, frame: bytes) -> AnyReply | None:
    """Withdraw a put whose task was cancelled, and return its reply if it has an effect all the same.

    Returns None if nothing of the put is left, or if this is not known after CANCEL_SECONDS.
    """
    deadline = time.monotonic() + CANCEL_SECONDS
    outcome = await _ask_despite_cancels(links, target, lambda link: link.cancel(sequence), deadline)
    if not isinstance(outcome, Done) or outcome.value:
        return None
    # the controller repeats the reply, or refuses the put if it had no effect
    reply = await _ask_despite_cancels(links, target, lambda link: link.send(sequence, frame), deadline)
    return None if isinstance(reply, Failure) else reply


async def _ask_despite_cancels(
    links: _LoopLinks, target: Target, send: Callable[[_Link], asyncio.Future[_Outcome]], deadline: float
) -> AnyReply | None:
    """Send a request, again if the connection breaks, and return its reply; None if there is none by the deadline.

    The task waits for it although it is cancelled. It does not wait for a task, which the end of the loop would cancel.
    """
    while time.monotonic() < deadline:
        with contextlib.suppress(asyncio.CancelledError, OSError, TransferQueueError):
            outcome = await outlast(send(links.working_link(target) or await links.connect(target, deadline)), deadline)
            if not isinstance(outcome, OSError):
                return outcome
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(RECONNECT_SECONDS)
    return None


class _Link:
    """One connection of one loop, used only in the loop's thread.

    One timer serves all deadlines, because thousands of timers would cost more than the requests.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, session: Session, target: Target, connection: Connection
    ) -> None:
        self.connection = connection
        self.target = target
        self.broken = False
        self.waiting: dict[int, asyncio.Future[_Outcome]] = {}
        """Sequence of each request without a reply -> the future of its outcome."""
        self._cancels: dict[int, tuple[int, bool]] = {}
        """Sequence of each `Cancel` without a reply -> that of its request, and whether this one is finished with it.

        A request must not be finished before, because any request that reports this might arrive first. Then the
        controller would not know any more what the request did.
        """
        self._loop = loop
        self._session = session
        self._attempts: dict[int, RetryPolicy] = {}
        """Sequence of each request that a task waits for -> its deadline, and when its wait is reported."""
        self._reports: set[asyncio.Task[None]] = set()
        """The reports under way, which the loop alone would not keep."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._arrived: deque[bytes] = deque()  # replies that are not handled yet
        self._answering = False  # whether `_go_on` is scheduled
        self._unsent = bytearray()
        """Bytes to send when the socket is writable. Not empty if and only if a writer is registered."""
        self._fd = connection.sock.fileno()
        loop.add_reader(self._fd, self._readable)

    @property
    def idle(self) -> bool:
        """Whether another loop can take over the connection: nothing is outstanding in either direction."""
        return not (self.broken or self.waiting or self._arrived or self._unsent) and self.connection.reader.clean

    async def exchange(self, sequence: int, frame: bytes, attempts: RetryPolicy) -> AnyReply:
        """Send a request and wait for its reply. Raises `OSError` if the connection breaks, or is broken."""
        if self.broken:  # the connection broke after `connect` returned it
            raise ConnectionResetError("the server closed the connection")
        future: asyncio.Future[_Outcome] = self._loop.create_future()
        self.waiting[sequence] = future
        self._send(frame)
        self._attempts[sequence] = attempts
        self._set_alarm(min(attempts.deadline, attempts.report_at))
        seen = False
        try:
            result = await future
            seen = not isinstance(result, TimeoutError)
        finally:
            self.waiting.pop(sequence, None)
            self._attempts.pop(sequence, None)
            # Cancel also if the reply has arrived in the same turn of the loop, so that leased samples are returned.
            if not seen and not (self.broken or self._session.closed):
                self.cancel(sequence)
        if isinstance(result, OSError):
            raise result
        return result

    def write_notices(self) -> None:
        """Write the notices that no request has carried yet."""
        self._send(self._session.notices.frame())

    def _set_alarm(self, due: float) -> None:
        """Let the alarm ring at this time, unless it rings before."""
        if due >= self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = due
        self._alarm = self._loop.call_later(max(0.0, due - time.monotonic()), self._expire)

    def _expire(self) -> None:
        """End the waits whose deadline has passed, begin the reports that are due, and set the alarm again."""
        self._alarm, self._alarm_at = None, math.inf
        now, due = time.monotonic() + CLOCK_SLACK, math.inf
        for sequence, attempts in list(self._attempts.items()):
            future = self.waiting.get(sequence)
            if future is None or future.done():
                continue
            if attempts.deadline <= now:
                future.set_result(TimeoutError("no reply before the deadline"))
                continue
            if attempts.report_at <= now:
                report = self._loop.create_task(run_async(self._session, attempts.begin_report()))
                self._reports.add(report)
                report.add_done_callback(self._reports.discard)
            due = min(due, attempts.deadline, attempts.report_at)
        self._set_alarm(due)

    def send(self, sequence: int, frame: bytes) -> asyncio.Future[_Outcome]:
        """Send a request, and return the future of its outcome."""
        future = self.waiting[sequence] = self._loop.create_future()
        self._send(frame)
        return future

    def cancel(self, sequence: int) -> asyncio.Future[_Outcome]:
        """Send `Cancel` for a request, unless this is done, and return the future of its outcome."""
        for cancel, (cancelled, _) in self._cancels.items():
            if cancelled == sequence:
                return self.waiting[cancel]
        cancel, frame = self._session.begin_request(Cancel(sequence))
        self._cancels[cancel] = sequence, False
        return self.send(cancel, frame)

    def finishes_with_cancel(self, sequence: int) -> bool:
        """Return whether a request is cancelled. It is then finished when the `Cancel` has its reply."""
        for cancel, (cancelled, _) in self._cancels.items():
            if cancelled == sequence:
                self._cancels[cancel] = sequence, True
                return True
        return False

    def _end_cancel(self, cancel: int) -> None:
        sequence, finishes = self._cancels.pop(cancel)
        self._session.finish(cancel)
        if finishes:
            self._session.finish(sequence)

    def _send(self, frame: bytes) -> None:
        self._push(self.connection.encrypt(frame))

    def _push(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self.connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.end(error)
            return
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        try:
            sent = self.connection.sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(error)
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        reader = self.connection.reader
        try:
            data = self.connection.sock.recv(min(READ_SIZE + reader.missing, LARGE_READ))
            if not data:
                raise ConnectionResetError("the server closed the connection")
            said, answer = self.connection.decrypt(data)
            if answer:
                self._push(answer)
            self._arrived.extend(body for body, _ in reader.feed(said))
            self._answer_one()
        except BlockingIOError:
            return
        except OSError as error:
            self.end(error)
        except TransferQueueError as error:  # the received bytes are not a valid frame or reply
            self.end(ConnectionAbortedError(str(error)))

    def _answer_one(self) -> None:
        """Wake the task that waits for the next reply. The reply after it is handled when that task has run.

        A task that gets its reply frees its objects, and then it or another task starts the next operation. If all
        tasks were woken at once, they would first free all their objects and then make new ones. Python's garbage
        collector counts how many more objects are made than freed, and would run after each batch of replies.
        """
        if self._answering or not self._arrived:
            return
        self._on_answer(self._arrived.popleft())
        if self._arrived:
            self._answering = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._answering = False
        try:
            self._answer_one()
        except TransferQueueError as error:  # the received bytes are not a valid reply
            self.end(ConnectionAbortedError(str(error)))

    def _on_answer(self, body: bytes) -> None:
        answer = self._session.decode_reply(body)
        if answer.sequence not in self.waiting:
            return  # the reply to a request that was cancelled
        future = self.waiting.pop(answer.sequence)
        if answer.sequence in self._cancels:
            self._end_cancel(answer.sequence)
        if not future.done():
            future.set_result(answer.body)

    def end(self, error: OSError) -> None:
        """Close the connection. All waiting tasks get the error.

        Call it in the loop's thread, or when the loop does not run any more.
        """
        if self.broken:
            return
        self.broken = True
        self.detach()
        with contextlib.suppress(TransferQueueError):  # the connection ends anyway
            while self._arrived:
                self._on_answer(self._arrived.popleft())
        pool = self._session.transport(Pool)
        pool.discard(self.connection)
        pool.close_idle(self.target)  # the idle connections led to the same server
        waiting, self.waiting = self.waiting, {}
        for sequence, future in waiting.items():
            if sequence in self._cancels:
                self._end_cancel(sequence)
            if not future.done() and not self._loop.is_closed():
                future.set_result(error)

    def detach(self) -> None:
        """Remove the connection from its loop, which forgets descriptors by itself only when it is closed."""
        if self._alarm is not None:
            self._alarm.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            if self._unsent:
                self._loop.remove_writer(self._fd)


class _LoopLinks:
    """The links of one loop by target, and the connects under way. Used only in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, session: Session) -> None:
        self.loop = loop
        self.links: dict[Target, _Link] = {}
        self.admission = Admission(loop)
        self.joins = AsyncJoins(loop, lambda op: _run_admitted(session, self, op, None))
        self.turns: dict[Hashable, list[asyncio.Future[bool]]] = {}
        """`Request.turn` of each such call under way -> the calls that wait for its outcome."""
        self._session = session
        self._connecting: dict[Target, asyncio.Task[_Link]] = {}

    def working_link(self, target: Target) -> _Link | None:
        """Return the working link to a target, None if there is none."""
        link = self.links.get(target)
        return None if link is None or link.broken else link

    def write_notice(self, report: ReportBatches) -> None:
        """Write a notice to the controller at once. If this fails, the next request carries it."""
        link = self.working_link(CONTROLLER)
        if link is None:
            write_notice_blocking(self._session, self._session.transport(Pool), report)
        else:
            self._session.notices.add(report)
            link.write_notices()

    def withdraw(self, sequence: int) -> None:
        """Report that nobody waits for the reply to a claim, at once or before the next request."""
        self._session.notices.add(ReportBatches(withdrawn=[sequence]))
        link = self.working_link(CONTROLLER)
        if link is not None:
            link.write_notices()

    async def connect(self, target: Target, deadline: float) -> _Link:
        """Return a new link. Calls that start meanwhile wait for the same one, also if the first one is cancelled."""
        task = self._connecting.get(target)
        if task is None:
            task = self.loop.create_task(self._connect(target))
            self._connecting[target] = task
            task.add_done_callback(lambda task: self._connected(target, task))
        await asyncio.wait((task,), timeout=max(0.0, deadline - time.monotonic()))
        if not task.done():
            raise TimeoutError("no connection before the deadline")
        return task.result()

    def _connected(self, target: Target, task: asyncio.Task[_Link]) -> None:
        self._connecting.pop(target, None)
        if not task.cancelled():
            task.exception()  # marks the error as retrieved, because all waiting calls may have been cancelled

    async def _connect(self, target: Target) -> _Link:
        pool = self._session.transport(Pool)
        connection = pool.take(target)
        if connection is None:
            connection = pool.new_connection(self._session.resolve(target))
            try:
                await asyncio.wait_for(self._authenticate(connection), HANDSHAKE_SECONDS)
            except asyncio.TimeoutError as error:
                pool.discard(connection)
                raise TimeoutError(f"no reply to the handshake within {HANDSHAKE_SECONDS:g} s") from error
            except BaseException:
                pool.discard(connection)
                raise
        link = _Link(self.loop, self._session, target, connection)
        self.links[target] = link
        return link

    async def _authenticate(self, connection: Connection) -> None:
        loop, sock, session = self.loop, connection.sock, self._session

        async def send(data: bytes) -> None:
            if data:
                await loop.sock_sendall(sock, data)

        async def receive() -> bytes:
            data = await loop.sock_recv(sock, READ_SIZE)
            if not data:
                raise ConnectionResetError("the server closed the connection during the handshake")
            said, answer = connection.decrypt(data)
            await send(answer)
            return said

        if isinstance(connection.address, str):
            while not connection.try_connect():
                await asyncio.sleep(BUSY_SECONDS)
        else:
            await loop.sock_connect(sock, connection.address)
        await send(connection.start_tls(session.tls))
        while connection.tls is not None and not connection.tls.done:
            await receive()  # returns no bytes before the client has sent its hello
        handshake = ClientHandshake(session.role, session.client_id, session.key)
        with contextlib.suppress(ConnectionError):  # the server may have sent the reason of a refusal and closed
            await send(connection.encrypt(handshake.start()))
        while not handshake.done:
            proof = handshake.receive(await receive())
            if proof:
                await send(connection.encrypt(proof))
        connection.reader.feed(handshake.leftover)

    def end(self) -> None:
        """Close all links of this loop."""
        for link in list(self.links.values()):
            link.end(ConnectionAbortedError("the client was closed"))


class _Links:
    """The links of all loops of a session."""

    def __init__(self) -> None:
        self._loops: dict[asyncio.AbstractEventLoop, _LoopLinks] = {}

    def links_of(self, loop: asyncio.AbstractEventLoop, session: Session) -> _LoopLinks:
        """Return the links of this loop. A loop without links gets the idle connections of closed loops."""
        found = self._loops.get(loop)
        if found is None:
            self._collect(session)
            found = self._loops[loop] = _LoopLinks(loop, session)
        return found

    def _collect(self, session: Session) -> None:
        pool = session.transport(Pool)
        for loop in [loop for loop in list(self._loops) if loop.is_closed()]:
            left = self._loops.pop(loop, None)  # if two threads collect at once, one of them gets it
            for link in [] if left is None else left.links.values():
                if link.idle:
                    pool.give_back(link.target, link.connection)
                else:
                    link.end(ConnectionAbortedError("the event loop was closed"))

    def close(self) -> None:
        """End the links of every loop, in the loop's thread if it is running."""
        for loop in list(self._loops):
            links = self._loops.pop(loop, None)
            if links is None:
                continue
            if loop.is_running() and asyncio._get_running_loop() is not loop:
                try:
                    loop.call_soon_threadsafe(links.end)
                    continue
                except RuntimeError:
                    pass  # the loop was closed this moment, so that its links are not in use
            links.end()

    def after_fork(self) -> None:
        """In a forked child: forget all links. The pool closes the descriptors.

        The loops are not changed, because they share their epoll descriptors with the parent.
        """
        self._loops.clear()
