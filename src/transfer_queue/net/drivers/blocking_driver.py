"""Runs an operation in the calling thread, with blocking sockets.

Each call uses a connection that no other thread uses at that time, and stays in its thread. If an event loop runs in
the thread, the call blocks it. A call that ends without its reply closes its connection, because the reply may still
arrive later.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.drivers.connection import Pool
from transfer_queue.net.drivers.parallel_calls import retry_until_reply, run_parallel
from transfer_queue.net.drivers.thread_joins import ThreadJoins
from transfer_queue.net.session import RetryPolicy, Session

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
    if call.join is not None:
        return session.transport(ThreadJoins).ask(call, partial(run_blocking, session))
    if call.work is not None:
        call.work()
        return Done()
    if call.pause is not None:
        time.sleep(call.pause)
        return Done()
    if call.together:
        run_parallel(session, pool, call.together)
        return Done()
    attempts = RetryPolicy(session, call)
    payload = 0 if call.payload is None else len(call.payload)
    sequence, frame = session.begin_request(call.request, payload, call.target)
    call.sequence = sequence
    try:
        return retry_until_reply(session, pool, call, attempts, sequence, frame)
    finally:
        session.finish(sequence)
