"""Joins the operations of the threads of one client, see `join_queues`.

The first operations with a key run in their own threads. If ALONE_AT_ONCE are under way, the next ones wait for a
thread of the client, which carries out all that wait at that moment. So the interrupt of a thread ends only its own
operation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING

from transfer_queue.errors import ConnectionLostError, NotInitializedError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import NOT_MADE
from transfer_queue.net.drivers.join_queues import JoinQueue

if TYPE_CHECKING:
    from transfer_queue.net.calls import Call, Join, JoinKey, Outcome

ALONE_AT_ONCE = 8
"""Flights under way from which operations join. To hand one to another thread costs as much as a request."""
LONGEST_WAIT = 0.005
"""Seconds that an operation waits for a flight to begin. Threads wait longer than a round trip for the interpreter."""
IDLE_SECONDS = 5.0
"""Seconds after which the thread ends if no operation needs it."""
CLOSED = "this client was closed during the call"


class _WaitingThread:
    __slots__ = ("answered", "call", "left", "outcome", "taken")

    def __init__(self, call: Join) -> None:
        self.call = call
        self.left = False
        self.taken = False
        """Whether its flight has begun."""
        self.answered = threading.Lock()
        """Held until the outcome is set."""
        self.answered.acquire()
        self.outcome: Outcome = NOT_MADE


class ThreadJoins:
    """The operations of one session that threads make and that are joined."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[JoinKey, JoinQueue[_WaitingThread]] = {}
        """Key -> its queue, while an operation with it is under way or waits."""
        self._pending: deque[JoinQueue[_WaitingThread]] = deque()
        """The queues from which the thread takes operations next."""
        self._needed = threading.Condition(self._lock)
        self._works = False
        """Whether the thread runs."""
        self._closed = False

    def ask(self, call: Join, run: Callable[[Generator[Call, AnyReply, None]], None]) -> AnyReply:
        """Let an operation go alone, or carry it out with others, and return its reply. Raises its error.

        `run` runs an operation in its thread.
        """
        with self._lock:
            queue = self._queues.get(call.key)
            if queue is None:
                queue = self._queues[call.key] = JoinQueue(call.key)
            if not queue.waiting and queue.flights < ALONE_AT_ONCE:
                queue.flights += 1
                call.ended = partial(self._end_flight, queue)
                return NOT_MADE
        return self._join(call, run)

    def _join(self, call: Join, run: Callable[[Generator[Call, AnyReply, None]], None]) -> AnyReply:
        """Wait until a flight has carried out an operation. If none begins within LONGEST_WAIT, it goes alone."""
        waiter = _WaitingThread(call)
        with self._lock:
            if self._closed:
                return NOT_MADE  # the operation finds out why
            queue = self._queues.get(call.key)
            if queue is None:
                queue = self._queues[call.key] = JoinQueue(call.key)
            queue.waiting.append(waiter)
            if queue not in self._pending:
                self._pending.append(queue)
            if not self._works:
                self._works = True
                threading.Thread(target=self._work, args=(run,), name="tq-joined", daemon=True).start()
            self._needed.notify()
        try:
            if not waiter.answered.acquire(timeout=LONGEST_WAIT) and self._wait_longer(waiter):
                return NOT_MADE
        except BaseException:  # interrupted
            waiter.left = True
            raise
        if isinstance(waiter.outcome, Exception):
            raise waiter.outcome
        return waiter.outcome

    def _wait_longer(self, waiter: _WaitingThread) -> bool:
        """Wait for the outcome if the flight has begun. Returns whether the operation goes alone instead."""
        with self._lock:
            if not waiter.taken:
                waiter.left = True
                return True
        waiter.answered.acquire()
        return False

    def _work(self, run: Callable[[Generator[Call, AnyReply, None]], None]) -> None:
        """Carry out joined operations until no operation waits."""
        while True:
            with self._lock:
                if not self._pending and not self._closed:
                    self._needed.wait(IDLE_SECONDS)
                if not self._pending:
                    self._works = False
                    return
                queue = self._pending.popleft()
                taken = queue.take(queue.flights + 1)
                for waiter in taken:
                    waiter.taken = True
                if queue.waiting:
                    self._pending.append(queue)
                elif queue.idle:
                    self._queues.pop(queue.key, None)
            if taken:
                self._fly(queue, taken, run)

    def _fly(
        self,
        queue: JoinQueue[_WaitingThread],
        waiters: list[_WaitingThread],
        run: Callable[[Generator[Call, AnyReply, None]], None],
    ) -> None:
        error: Exception = ConnectionLostError("the thread that sent joined operations has ended")
        try:
            run(queue.key[0].run([waiter.call for waiter in waiters]))
        except Exception as failure:
            error = failure
        finally:
            for waiter in waiters:
                waiter.outcome = error if waiter.call.outcome is None else waiter.call.outcome  # type: ignore[assignment]
                waiter.answered.release()
            self._end_flight(queue)

    def _end_flight(self, queue: JoinQueue[_WaitingThread]) -> None:
        """End a flight, also that of an operation that went alone."""
        with self._lock:
            queue.flights -= 1
            if queue.idle and self._queues.get(queue.key) is queue:
                del self._queues[queue.key]

    def close(self) -> None:
        """Let the thread end. Operations that wait for a flight fail, those in a flight end with its error."""
        with self._lock:
            self._closed = True
            for queue in self._queues.values():
                for waiter in queue.waiting:
                    waiter.taken, waiter.outcome = True, NotInitializedError(CLOSED)
                    waiter.answered.release()
                queue.waiting.clear()
            self._pending.clear()
            self._needed.notify()

    def after_fork(self) -> None:
        """In a forked child: nothing. The session, and with it this object, is not used any more."""
