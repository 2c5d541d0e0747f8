"""Runs operations that read and write files in asyncio, with their own work in a thread.

Calls are made in the event loop, as `run_async` does. The code of the operation between two calls runs in a thread of
the loop's executor, so that the loop does not wait for a disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, TypeVar, Union, cast

from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.drivers.asyncio_driver import await_end, exchange
from transfer_queue.net.session import Session

if TYPE_CHECKING:
    from transfer_queue.net.calls import Call

T = TypeVar("T")

_Advance = Callable[[], "Call"]
_Step = Union["Call", BaseException]  # the next call of the operation, or the exception with which it ended


async def run_threaded(session: Session, op: Generator[Call, AnyReply, T]) -> T:
    """Run an operation and return its result. Errors of a call are thrown into it first, at its `yield`.

    If the coroutine is cancelled, the step under way runs to its end, and then the operation gets the cancellation.
    """
    loop, advance = asyncio.get_running_loop(), cast(_Advance, partial(next, op))
    while True:
        future = loop.run_in_executor(None, _stepped, advance)
        cancelled = await await_end(future)
        step = future.result()
        if isinstance(step, StopIteration):
            if cancelled is not None:
                raise cancelled
            return cast(T, step.value)
        if isinstance(step, BaseException):
            raise step
        if cancelled is not None:
            advance = partial(op.throw, cancelled)
            continue
        try:
            reply = await exchange(session, step)
        except BaseException as error:
            advance = partial(op.throw, error)
        else:
            advance = partial(op.send, reply)


def _stepped(advance: _Advance) -> _Step:
    try:
        return advance()
    except BaseException as error:  # a future cannot hold a StopIteration
        return error
