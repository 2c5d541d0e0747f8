"""Joins the operations of one event loop, see `join_queues`. Used only in the loop's thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from transfer_queue.errors import ConnectionLostError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import NOT_MADE, Outcome
from transfer_queue.net.drivers.join_queues import AT_ONCE, LONGEST_WAIT, MAX_AT_ONCE, JoinQueue

if TYPE_CHECKING:
    from transfer_queue.net.calls import Call, Join, JoinKey

CANCEL_SECONDS = 2.0
"""Seconds for which a cancelled put waits for the controller. Then it is unknown whether it has an effect."""

T = TypeVar("T")

Run = Callable[[Generator["Call", AnyReply, None]], Coroutine[Any, Any, None]]
"""Runs an operation in the loop."""


async def outlast(future: asyncio.Future[T], deadline: float) -> T | None:
    """Wait for a future although the task is cancelled, and return its result; None if there is none by the deadline.

    deadline: by `time.monotonic`.
    """
    while not future.done() and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((future,), timeout=left)
    return future.result() if future.done() else None


class _WaitingTask:
    __slots__ = ("call", "flies", "future")

    def __init__(self, call: Join, future: asyncio.Future[Outcome]) -> None:
        self.call = call
        self.future = future
        self.flies = False
        """Whether its flight has begun."""

    @property
    def left(self) -> bool:
        return self.future.done()  # its task was cancelled


class _LoopQueue(JoinQueue[_WaitingTask]):
    """A queue, and what is planned for it in the loop."""

    __slots__ = ("alarm", "planned")

    def __init__(self, key: JoinKey) -> None:
        super().__init__(key)
        self.planned = False
        """Whether flights begin at the end of this turn of the loop."""
        self.alarm: asyncio.TimerHandle | None = None
        """Begins a further flight although AT_ONCE are under way."""


class AsyncJoins:
    """The operations of one event loop that are joined.

    Args:
        loop: The loop.
        run: Runs an operation.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, run: Run) -> None:
        self._loop = loop
        self._run = run
        self._queues: dict[JoinKey, _LoopQueue] = {}
        """Key -> its queue, while an operation with it is under way or waits."""
        self._flights: set[asyncio.Task[None]] = set()

    async def ask(self, call: Join) -> AnyReply:
        """Let an operation go alone, or carry it out with others, and return its reply. Raises its error.

        A task that is cancelled before its flight begins takes its operation along. Afterwards the operation is carried
        out with the others: the task waits for CANCEL_SECONDS at most, and is cancelled if its operation was not
        carried out.
        """
        queue = self._queues.get(call.key)
        if queue is None:
            queue = self._queues[call.key] = _LoopQueue(call.key)
            queue.flights = 1
            call.ended = partial(self._end_flight, queue)
            return NOT_MADE
        future: asyncio.Future[Outcome] = self._loop.create_future()
        waiter = _WaitingTask(call, future)
        queue.waiting.append(waiter)
        self._plan(queue)
        try:
            outcome = await future
        except asyncio.CancelledError as error:
            late = await self._outcome_of_cancelled(waiter) if waiter.flies else None
            if late is None or late is NOT_MADE or isinstance(late, Exception):
                raise
            call.late = error
            return late
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _outcome_of_cancelled(self, waiter: _WaitingTask) -> Outcome | None:
        """Return what became of the operation of a cancelled task; None if this is not known in time."""
        if waiter.call.outcome is not None:
            return waiter.call.outcome
        waiter.future = self._loop.create_future()
        return await outlast(waiter.future, time.monotonic() + CANCEL_SECONDS)

    def _plan(self, queue: _LoopQueue) -> None:
        """Begin flights at the end of this turn, when all tasks that run in it have asked; or set the alarm."""
        if queue.flights < AT_ONCE:
            if not queue.planned:
                queue.planned = True
                self._loop.call_soon(self._begin, queue)
        elif queue.alarm is None and queue.flights < MAX_AT_ONCE:
            queue.alarm = self._loop.call_later(LONGEST_WAIT, self._begin_late, queue)

    def _begin(self, queue: _LoopQueue, most_at_once: int = AT_ONCE) -> None:
        queue.planned = False
        while taken := queue.take(most_at_once):
            for waiter in taken:
                waiter.flies = True
            flight = self._loop.create_task(self._fly(queue, taken))
            self._flights.add(flight)
            flight.add_done_callback(self._flights.discard)
        if queue.waiting:
            self._plan(queue)
        elif queue.idle:  # all that waited were cancelled
            self._queues.pop(queue.key, None)

    def _begin_late(self, queue: _LoopQueue) -> None:
        queue.alarm = None
        if queue.waiting:
            self._begin(queue, min(queue.flights + 1, MAX_AT_ONCE))

    async def _fly(self, queue: _LoopQueue, waiters: list[_WaitingTask]) -> None:
        calls = [waiter.call for waiter in waiters]
        error: Exception = ConnectionLostError(
            "the task that sent joined operations was cancelled, so it is unknown whether they were carried out"
        )
        try:
            await self._run(queue.key[0].run(calls))
        except Exception as failure:
            error = failure
        finally:
            for waiter in waiters:
                if not waiter.future.done():
                    outcome = waiter.call.outcome
                    waiter.future.set_result(error if outcome is None else outcome)  # type: ignore[arg-type]
            self._end_flight(queue)

    def _end_flight(self, queue: _LoopQueue) -> None:
        queue.flights -= 1
        if queue.waiting:
            self._plan(queue)
            return
        if queue.alarm is not None:
            queue.alarm.cancel()
            queue.alarm = None
        if not queue.flights and not queue.planned:
            del self._queues[queue.key]
