"""QueueHandle: the name of a queue, the way to its system from any process, and the items taken ahead of its gets.

`empty_error` and `full_error` make the exceptions of a queue, which are also those of `ray.util.queue` if Ray is used.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from transfer_queue.attachment import client_of
from transfer_queue.client import TransferQueueClient
from transfer_queue.client.operations.queue_operations import TASK
from transfer_queue.errors import InvalidArgumentError, QueueEmptyError, QueueFullError
from transfer_queue.interface import init

_OWN: dict[str, type[Exception]] = {"Empty": QueueEmptyError, "Full": QueueFullError}


def empty_error(message: str) -> Exception:
    """Return the exception for a queue that has no item."""
    return _make("Empty", message)


def full_error(message: str) -> Exception:
    """Return the exception for a queue that has no space."""
    return _make("Full", message)


def _make(name: str, message: str) -> Exception:
    # Ray is never imported here: code that catches Ray's exceptions has imported them.
    other = getattr(sys.modules.get("ray.util.queue"), name, None)
    return (_OWN[name] if other is None else _combined(name, other))(message)


@lru_cache
def _combined(name: str, other: type[Exception]) -> type[Exception]:
    """Return a class that is the exception of this package and that of Ray."""
    own = _OWN[name]

    def reduce(error: Exception) -> tuple[Any, ...]:
        """Pickle by name, because a process that loads the exception may not have Ray's."""
        return _make, (name, *error.args)

    return type(own.__name__, (own, other), {"__module__": own.__module__, "__reduce__": reduce})


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
            has_item, item = self._pop(lease)
            return item if has_item else self._keep(lease, fetch(None))
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
        has_item, item = self._pop(lease)
        if has_item:
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
            has_item, item = self._pop(lease)
            return item if has_item else self._keep(lease, await fetch(max(0.0, deadline - time.monotonic())))
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


_handles: weakref.WeakSet[QueueHandle] = weakref.WeakSet()


class QueueHandle:
    """A reference to a queue. It can be pickled, and attaches the process that unpickles it to the system."""

    order = "fifo"
    """The order of the partition, see `create_partition`."""

    name: str
    """The name of the queue, which is the name of its partition."""
    maxsize: int
    """The largest number of items that the controller admits; 0 for no limit."""
    prefetch: int
    """The number of items that a get takes at once."""

    def __init__(self, name: str | None, maxsize: int, prefetch: int) -> None:
        self.name = f"queue-{uuid.uuid4().hex[:12]}" if name is None else name
        if isinstance(maxsize, bool) or not isinstance(maxsize, int):
            raise InvalidArgumentError(f"maxsize must be an integer, got {maxsize!r}")
        check_positive(prefetch, "prefetch")
        self.maxsize, self.prefetch = max(0, maxsize), prefetch
        self._begin(None)
        self._config = {"system": {"folder": init().system.folder}}
        client = self._client()
        if not self._open(client) and not self.maxsize:
            self.maxsize = client.get_backlog(self.name, TASK).max_rows or 0

    def _begin(self, config: Any) -> None:
        self._config = config
        self._closed = False
        self._buffer = PrefetchBuffer()
        _handles.add(self)

    def _client(self) -> TransferQueueClient:
        """Return the client of this process, connected."""
        client = client_of(self._config)
        client._connect()
        return client

    def _open(self, client: TransferQueueClient) -> bool:
        """Create the partition of this queue. Return False if it exists."""
        return client._run(client._operations._open_queue(self.name, self.maxsize, self.order))

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "maxsize": self.maxsize, "prefetch": self.prefetch, "config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name, self.maxsize, self.prefetch = state["name"], state["maxsize"], state["prefetch"]
        self._begin(state["config"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, maxsize={self.maxsize})"


def check_positive(value: int, what: str) -> None:
    """Raise InvalidArgumentError unless this is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{what} must be a positive integer, got {value!r}")


def _after_fork() -> None:
    """Forget the prefetched items in a forked child: they belong to the parent."""
    for handle in list(_handles):
        handle._buffer = PrefetchBuffer()


os.register_at_fork(after_in_child=_after_fork)
