"""QueueHandle: the name of a queue, and the way to its system from any process."""

from __future__ import annotations

import os
import uuid
import weakref
from typing import Any

from transfer_queue.attachment import client_of
from transfer_queue.client import TransferQueueClient
from transfer_queue.client.operations.queue_operations import TASK
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.interface import init
from transfer_queue.queues.prefetch_buffer import PrefetchBuffer

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
        self.maxsize = max(0, _validated_int(maxsize, "maxsize"))
        self.prefetch = _validated_int(prefetch, "prefetch")
        if self.prefetch < 1:
            raise InvalidArgumentError(f"prefetch must be a positive integer, got {prefetch}")
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


def _validated_int(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{what} must be an integer, got {value!r}")
    return value


def _after_fork() -> None:
    """Forget the prefetched items in a forked child: they belong to the parent."""
    for handle in list(_handles):
        handle._buffer = PrefetchBuffer()


os.register_at_fork(after_in_child=_after_fork)
