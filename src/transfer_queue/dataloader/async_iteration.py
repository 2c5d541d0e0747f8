"""Iterates over a loader with `async for`: waits in the event loop, without blocking it.

Requests to the system are made in the event loop. Only functions of the user, and the wait for worker processes, run in
threads. A cancelled wait loses no samples: the driver cancels the request, and the controller takes back what it has
dealt, or keeps it under the number of the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from transfer_queue.net.drivers.asyncio_driver import run_users_function


class AsyncItems:
    """The items of a loader, as an asynchronous iterator. It ends with `aclose` or at the end of the stream.

    A wait for an item may be cancelled, for example by `asyncio.wait_for`; the next wait continues it.

    Args:
        take: Returns a tuple with the next item of the open batch; None if no batch is open.
        open_next: Opens the next batch; its result is False if there is none.
        close: A function that may block, to call at the end; its argument is True if an error has ended the
            iteration. None for none.
    """

    def __init__(
        self,
        take: Callable[[], tuple[Any] | None],
        open_next: Callable[[], Awaitable[bool]],
        close: Callable[[bool], object] | None = None,
    ) -> None:
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
            item = await self._next()
            if item is None:
                await self._end(failed=False)
        except Exception as error:
            await self._end(failed=True)
            if isinstance(error, StopAsyncIteration):  # the loop would end as at the end of the stream
                raise RuntimeError(f"a function of the user raised {error!r}") from error
            raise
        finally:
            self._waiting = False
        if item is None:
            raise StopAsyncIteration
        return item[0]

    async def _next(self) -> tuple[Any] | None:
        """Return a tuple with the next item; None at the end."""
        await asyncio.sleep(0)  # so that other tasks run, and a cancellation arrives, between the items of a batch
        while (item := self._take()) is None:
            if not await self._open_next():
                return None
        return item

    async def aclose(self) -> None:
        """End the iteration. Worker processes that do not persist end, too. Further calls do nothing."""
        await self._end(failed=False)

    async def _end(self, *, failed: bool) -> None:
        self._ended = True
        close, self._close = self._close, None
        if close is not None:
            cancelled = await run_users_function(partial(close, failed))
            try:
                if cancelled is not None:
                    raise cancelled
            finally:
                del cancelled  # an error that refers to itself would keep the iterator until garbage is collected

    def __del__(self) -> None:
        close = getattr(self, "_close", None)
        if close is not None:
            close(False)
