"""Runs an operation in the calling thread, with blocking sockets.

A call uses a connection of its own: nothing is shared between threads while it is in use, no call
crosses a thread, and a running event loop is merely blocked. A call that ends by anything but its
reply closes its connection, since the reply may still come.
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
    """What the operation returns. Errors of a call are thrown into it first, at its `yield`."""
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
    """The reply to one call; raises as it failed."""
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
    """The reply to a call that was begun. broken: how it has failed, where it was tried before."""
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
            raise ProtocolError(f"a server answered request {answer.sequence} where {sequence} was asked")
        pool.give(call.target, connection)
    except BaseException as error:
        pool.discard(connection)
        if isinstance(error, ConnectionError):
            pool.forget(call.target)  # the other idle ones led to the same server
        raise
    return answer.body
