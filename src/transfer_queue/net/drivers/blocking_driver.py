"""Runs an operation in the calling thread, with blocking sockets.

Each call uses a connection that no other thread uses at that time, and stays in its thread. If an event loop runs in
the thread, the call blocks it. A call that ends without its reply closes its connection, because the reply may still
arrive later.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Generator
from functools import partial
from types import FrameType
from typing import TypeVar, cast

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim, ReportBatches
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import CONTROLLER, Call
from transfer_queue.net.drivers.connection import Pool
from transfer_queue.net.drivers.parallel_calls import retry_until_reply, run_parallel
from transfer_queue.net.drivers.thread_joins import ThreadJoins
from transfer_queue.net.session import RetryPolicy, Session, raise_failure
from transfer_queue.utils.logging_utils import get_logger

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
    if call.is_notice:
        write_notice(session, pool, call)
        return Done()
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
    attempts.warn_at = attempts.begun + BLOCKED_SECONDS
    payload = 0 if call.payload is None else len(call.payload)
    sequence, frame = session.begin_request(call.request, payload, call.target, call.within)
    call.sequence = sequence
    try:
        reply = retry_until_reply(session, pool, call, attempts, sequence, frame, report=_report_wait)
    except BaseException:
        if isinstance(call.request, Claim):  # it may be answered yet, and nobody would get its rows
            write_notice(session, pool, Call(CONTROLLER, ReportBatches(withdrawn=[sequence]), is_notice=True))
        else:
            session.finish(sequence)
        raise
    session.finish(sequence)
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


def write_notice(session: Session, pool: Pool, call: Call) -> None:
    """Write a notice to the controller. If this fails, the next request carries it."""
    session.notices.add(cast(ReportBatches, call.request))
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
