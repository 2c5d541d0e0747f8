"""Iterates over a loader with `async for`: waits in the event loop, without blocking it.

Requests to the system are made in the event loop. Only functions of the user, and the wait for worker processes, run in
threads. A cancelled wait loses no samples: the driver cancels the request, and the controller takes back what it has
dealt, or keeps it under the number of the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from transfer_queue.dataloader.steps import (
    NOT_RECEIVED,
    FunctionStep,
    OperationStep,
    Step,
    Steps,
    ask_in_loop,
    call_in_thread,
)

T = TypeVar("T")

_Outcome = tuple[Any, "asyncio.CancelledError | None"]  # the result of a step; a cancellation during it


class AsyncItems:
    """The items of a loader, as an asynchronous iterator. It ends with `aclose` or at the end of the stream.

    A wait for an item may be cancelled, for example by `asyncio.wait_for`; the next wait continues it.

    Args:
        prepare: A function that may block, to call before the first batch; None for none.
        take: Returns a tuple with the next item of the open batch; None if no batch is open.
        open_next: Returns the steps that open the next batch; their result is False if there is none.
        close: A function that may block, to call at the end; its argument is True if an error has ended the
            iteration. None for none.
    """

    def __init__(
        self,
        prepare: Callable[[], object] | None,
        take: Callable[[], tuple[Any] | None],
        open_next: Callable[[], Steps[bool]],
        close: Callable[[bool], object] | None = None,
    ) -> None:
        self._prepare = prepare
        self._take = take
        self._open_next = open_next
        self._close = close
        self._ended = False
        self._waiting = False

    def __aiter__(self) -> AsyncItems:
        return self

    async def __anext__(self) -> Any:
        if self._waiting:
            raise RuntimeError("another task already waits for the next item of this iterator; use one for each task")
        if self._ended:
            raise StopAsyncIteration
        self._waiting = True
        try:
            return await self._next()
        except Exception as error:
            await self._end(failed=not isinstance(error, StopAsyncIteration))
            raise
        finally:
            self._waiting = False

    async def _next(self) -> Any:
        await asyncio.sleep(0)  # so that other tasks run, and a cancellation arrives, between the items of a batch
        if self._prepare is not None:
            await run_steps_async(_call(self._prepare))
            self._prepare = None
        while (item := self._take()) is None:
            if not await run_steps_async(self._open_next()):
                raise StopAsyncIteration
        return item[0]

    async def aclose(self) -> None:
        """End the iteration. Worker processes that do not persist end, too. Further calls do nothing."""
        await self._end(failed=False)

    async def _end(self, *, failed: bool) -> None:
        self._ended = True
        close, self._close = self._close, None
        if close is not None:
            await run_steps_async(_call(partial(close, failed)))

    def __del__(self) -> None:
        close = getattr(self, "_close", None)
        if close is not None:
            close(False)


def _call(function: Callable[[], T]) -> Steps[T]:
    result: T = yield FunctionStep(function)
    return result


async def run_steps_async(steps: Steps[T]) -> T:
    """Run steps in this event loop, and return their result.

    If the task is cancelled, a function of the user still runs to its end, and the steps get its result. Then the
    cancellation is raised.
    """
    advance: Callable[[], Step] = partial(next, steps)
    cancelled = None
    try:
        while True:
            try:
                step = advance()
            except StopIteration as end:
                value: T = end.value
                return value
            try:
                result, cancelled = await _run_step(step)
            except BaseException as error:
                advance = partial(steps.throw, error)
                continue
            if cancelled is not None:
                _continue_until_next_step(steps, result)
                raise cancelled
            advance = partial(steps.send, result)
    finally:
        del advance, cancelled  # an error that refers to itself would keep the iterator until garbage is collected


def _continue_until_next_step(steps: Steps[Any], result: Any) -> None:
    """Let cancelled steps keep the result of the last one."""
    with contextlib.suppress(StopIteration, Exception):  # an error is raised again when the next iteration gets there
        steps.send(result)
    steps.close()


async def _run_step(step: Step) -> _Outcome:
    if isinstance(step, OperationStep):
        return await ask_in_loop(step.client, step.operation, *step.arguments, **step.more), None
    if isinstance(step, FunctionStep):
        return await _run_to_its_end(asyncio.wrap_future(call_in_thread(step.function)))
    arrival = asyncio.wrap_future(step.reception.begin())
    try:
        await asyncio.wait((arrival,), timeout=step.seconds)
        if not arrival.done():
            return NOT_RECEIVED, None
    finally:
        arrival.cancel()  # only this future: what arrives stays for the next caller
    return step.reception.take(), None


async def _run_to_its_end(future: asyncio.Future[Any]) -> _Outcome:
    cancelled = None
    try:
        while not future.done():
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None and future.exception() is not None:
            raise cancelled
        return future.result(), cancelled
    finally:
        del cancelled  # see above
