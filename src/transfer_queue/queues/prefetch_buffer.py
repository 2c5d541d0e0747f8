"""PrefetchBuffer: the items that a process has taken from a queue ahead of its gets."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from transfer_queue.queues.exceptions import empty_error

Fetch = Callable[["float | None"], "list[Any]"]
AsyncFetch = Callable[["float | None"], "Awaitable[list[Any]]"]


class PrefetchBuffer:
    """The items that were taken ahead, separately for each lease time of the gets.

    One thread, or one task of each event loop, fetches at a time and the others wait for the items that it fetches:
    otherwise they would wait at the controller for further items while items are here.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: dict[float | None, deque[Any]] = {}
        self._fetching: set[float | None] = set()
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._items.values()))

    def get(self, lease: float | None, wait: float | None, fetch: Fetch) -> Any:
        """Return the next item.

        Args:
            lease: The lease time of the get.
            wait: Seconds to wait; None does not wait.
            fetch: Returns one or more items, and waits for them for the given seconds.
        """
        if wait is None:
            found, item = self._pop(lease)
            return item if found else self._keep(lease, fetch(None))
        deadline = time.monotonic() + wait
        with self._changed:
            while not self._items.get(lease) and lease in self._fetching:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise empty_error(f"no item came within {wait:g} s")
            if self._items.get(lease):
                return self._items[lease].popleft()
            self._fetching.add(lease)
        try:
            return self._keep(lease, fetch(max(0.0, deadline - time.monotonic())))
        finally:
            with self._changed:
                self._fetching.discard(lease)
                self._changed.notify_all()

    async def get_async(self, lease: float | None, wait: float | None, fetch: AsyncFetch) -> Any:
        """Return the next item in an event loop. See `get`."""
        found, item = self._pop(lease)
        if found:
            return item
        if wait is None:
            return self._keep(lease, await fetch(None))
        deadline = time.monotonic() + wait
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        try:
            await asyncio.wait_for(turn.acquire(), wait)
        except asyncio.TimeoutError:
            raise empty_error(f"no item came within {wait:g} s") from None
        try:
            found, item = self._pop(lease)
            return item if found else self._keep(lease, await fetch(max(0.0, deadline - time.monotonic())))
        finally:
            turn.release()

    def _pop(self, lease: float | None) -> tuple[bool, Any]:
        with self._changed:
            items = self._items.get(lease)
            return (True, items.popleft()) if items else (False, None)

    def _keep(self, lease: float | None, items: list[Any]) -> Any:
        """Return the first of these items, and keep the others."""
        with self._changed:
            self._items.setdefault(lease, deque()).extend(items[1:])
            self._changed.notify_all()
        return items[0]
