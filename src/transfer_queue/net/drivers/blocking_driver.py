"""Runs an operation in the calling thread, with blocking sockets.

Each call uses a connection that no other thread uses at that time, and stays in its thread. If an event loop runs in
the thread, the call blocks it. A call that ends without its reply closes its connection, because the reply may still
arrive later.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar, cast

from transfer_queue.errors import ProtocolError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.drivers.connection import Pool
from transfer_queue.net.session import RetryPolicy, Session, outcome

if TYPE_CHECKING:
    from transfer_queue.net.calls import Call

T = TypeVar("T")


def run_blocking(session: Session, op: Generator[Call, AnyReply, T]) -> T:
    """Run an operation and return its result. Errors of a call are thrown into it first, at its `yield`."""
    pool = session.transport(Pool)
    try:
        call = next(op)
        while True:
            try:
                reply = _exchange(session, pool, call)
            except BaseException as error:
                call = op.throw(error)
            else:
                call = op.send(reply)
    except StopIteration as stop:
        return cast(T, stop.value)


def exchange(session: Session, call: Call) -> AnyReply:
    """Make one call and return its reply. Raises the error with which the call failed."""
    return _exchange(session, session.transport(Pool), call)


def _exchange(session: Session, pool: Pool, call: Call) -> AnyReply:
    if call.work is not None:
        call.work()
        return Done()
    if call.together:
        from transfer_queue.net.drivers.parallel_calls import run_parallel  # which needs this module

        run_parallel(session, pool, call.together)
        return Done()
    attempts = RetryPolicy(session, call)
    sequence, frame = session.begin(call.request, 0 if call.payload is None else len(call.payload))
    call.sequence = sequence
    try:
        return retry_until_reply(session, pool, call, attempts, sequence, frame)
    finally:
        session.finish(sequence)


def retry_until_reply(
    session: Session,
    pool: Pool,
    call: Call,
    attempts: RetryPolicy,
    sequence: int,
    frame: bytes,
    broken: OSError | None = None,
) -> AnyReply:
    """Send a request until its reply arrives, and return the reply. `broken` is the error of an earlier try, if any."""
    while True:
        if broken is not None:
            delay = attempts.failed(broken)
            if delay:
                time.sleep(delay)
            frame = attempts.again(sequence, frame)
        try:
            return outcome(_try(session, pool, call, attempts.deadline, sequence, frame))
        except TransferQueueError:
            raise
        except OSError as error:
            broken = error


def _try(session: Session, pool: Pool, call: Call, deadline: float, sequence: int, frame: bytes) -> AnyReply:
    connection = pool.take(call.target) or pool.connect(session, call.target, deadline)
    try:
        if call.into:
            body = connection.exchange_into(frame, deadline, call.into)
        else:
            body = connection.exchange(frame, deadline, call.payload)
        answer = session.answer(body)
        if answer.sequence != sequence:
            raise ProtocolError(f"expected the reply to request {sequence}, got the reply to {answer.sequence}")
        pool.give(call.target, connection)
    except BaseException as error:
        pool.discard(connection)
        if isinstance(error, ConnectionError):
            pool.forget(call.target)  # the other idle connections led to the same server
        raise
    return answer.body
