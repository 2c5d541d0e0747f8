"""Several calls of one thread at once: all are sent, then their answers are received as they come.

Each has a connection, a deadline and an outcome of its own. What breaks is tried again when the others have ended, one
after the other, as if it had been made alone.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from transfer_queue.errors import ProtocolError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.drivers.blocking_driver import retry_until_reply
from transfer_queue.net.drivers.connection import LONGEST_POLL, Connection, Pool
from transfer_queue.net.drivers.reply_reader import ReplyReader
from transfer_queue.net.session import RetryPolicy, Session, outcome

if TYPE_CHECKING:
    from transfer_queue.net.calls import Call


def run_parallel(session: Session, pool: Pool, calls: Sequence[Call]) -> None:
    """Makes these calls; each then has its `outcome`, the reply or the error with which it has failed."""
    tries: list[_Try] = []
    try:
        for call in calls:
            try:
                if call.work is None:
                    tries.append(_Try(session, pool, call))
                else:
                    call.work()
                    call.outcome = Done()
            except TransferQueueError as error:
                call.outcome = error
        for step in (_Try.connect, _Try.send):
            for each in tries:
                each.step(step)
        _receive([each for each in tries if each.incoming is not None])
        for each in tries:
            each.end()
    finally:
        for each in tries:
            each.forget()


def _receive(tries: Sequence[_Try]) -> None:
    """Until each has its answer, or has failed."""
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
            if each.over:
                poll.unregister(number)
                del waiting[number]


class _Try:
    """The first try of a call. broken: how it has failed."""

    def __init__(self, session: Session, pool: Pool, call: Call) -> None:
        self._session = session
        self._pool = pool
        self._call = call
        self.attempts = RetryPolicy(session, call)
        self.connection: Connection | None = None
        self.incoming: ReplyReader | None = None
        self._broken: OSError | TransferQueueError | None = None
        self._sequence, self._frame = session.begin(call.request, 0 if call.payload is None else len(call.payload))
        call.sequence = self._sequence

    @property
    def over(self) -> bool:
        """Nothing more is to be received."""
        return self._broken is not None or (self.incoming is not None and self.incoming.whole)

    def step(self, step: Callable[[_Try], None]) -> None:
        """Goes a step further, unless it has failed."""
        if self._broken is None:
            try:
                step(self)
            except (OSError, TransferQueueError) as error:
                self._broken, self.incoming = error, None
                self._discard()
                if isinstance(error, ConnectionError):
                    self._pool.forget(self._call.target)  # the other idle ones led to the same server

    def connect(self) -> None:
        """Gets a connection."""
        target = self._call.target
        self.connection = self._pool.take(target) or self._pool.connect(self._session, target, self.attempts.deadline)

    def send(self) -> None:
        """Sends the request."""
        assert self.connection is not None
        self.connection.send(self._frame, self.attempts.deadline, self._call.payload)
        self.incoming = ReplyReader(self.connection, self._call.into, self.attempts.deadline)

    def receive(self) -> None:
        """Takes in what is there of the answer."""
        assert self.incoming is not None
        self.incoming.receive()

    def wait(self) -> None:
        """Nothing is there."""
        if time.monotonic() > self.attempts.deadline:
            raise TimeoutError("no answer before the deadline")

    def end(self) -> None:
        """Sets the outcome of the call, after further tries where the first has failed."""
        self.step(_Try._take)
        try:
            if isinstance(self._broken, TransferQueueError):
                raise self._broken
            if self._broken is not None:
                args = self._session, self._pool, self._call, self.attempts, self._sequence, self._frame
                self._call.outcome = retry_until_reply(*args, self._broken)
        except TransferQueueError as error:
            self._call.outcome = error

    def _take(self) -> None:
        assert self.incoming is not None
        assert self.incoming.body is not None
        assert self.connection is not None
        answer = self._session.answer(self.incoming.body)
        if answer.sequence != self._sequence:
            raise ProtocolError(f"a server answered request {answer.sequence} where {self._sequence} was asked")
        self._pool.give(self._call.target, self.connection)
        self.connection = None
        self._call.outcome = _reply_or_error(answer.body)

    def _discard(self) -> None:
        if self.connection is not None:
            self._pool.discard(self.connection)
            self.connection = None

    def forget(self) -> None:
        """Nobody waits for the reply any more; one that is under way closes its connection."""
        self._discard()
        self._session.finish(self._sequence)


def _reply_or_error(reply: AnyReply) -> AnyReply | TransferQueueError:
    try:
        return outcome(reply)
    except TransferQueueError as error:
        return error
