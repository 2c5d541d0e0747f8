"""LeasedItem: an item that a consumer holds under a lease until it acknowledges it."""

from __future__ import annotations

from typing import Any, NoReturn

from transfer_queue.client import TransferQueueClient
from transfer_queue.errors import UncarriableValueError
from transfer_queue.metadata import BatchMeta


class LeasedItem:
    """An item that was got with `Queue.get(lease=...)`.

    The lease is renewed in the background while this object exists in the process. If the process ends before `ack`,
    another consumer gets the item. As a context manager, in a `with` or an `async with` block, it acknowledges the item
    at the end, and returns it to the queue if the block raises an exception.

    Args:
        item: The item.
        meta: The metadata of its sample, with the lease.
        client: The client that has the lease.

    Example:
        >>> queue = tq.Queue("prompts")
        >>> queue.put("What is 6 times 7?")
        >>> with queue.get(lease=60) as leased:
        ...     print(leased.item)
        What is 6 times 7?
    """

    __slots__ = ("_client", "_meta", "item")

    def __init__(self, item: Any, meta: BatchMeta, client: TransferQueueClient) -> None:
        self.item = item
        """The item."""
        self._meta = meta
        self._client = client

    @property
    def deliveries(self) -> int:
        """How often this item was delivered, this time included.

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.put("a")
            >>> queue.get(lease=60).deliveries
            1
        """
        return self._meta.deliveries[0]

    def ack(self) -> bool:
        """Declare that the item is processed, so that no consumer gets it again.

        Returns:
            False if the lease had ended, so that another consumer may have the item.

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.put("a")
            >>> queue.get(lease=60).ack()
            True
        """
        return self._client.ack(self._meta)

    async def ack_async(self) -> bool:
        """Acknowledge the item in an event loop.

        Returns:
            See `ack`.

        Example:
            >>> async def work(queue):
            ...     leased = await queue.get_async(lease=60)
            ...     return await leased.ack_async()
            >>> queue = tq.Queue("prompts")
            >>> queue.put("a")
            >>> import asyncio
            >>> asyncio.run(work(queue))
            True
        """
        return await self._client.async_ack(self._meta)

    def nack(self) -> bool:
        """Return the item to its place in the queue, so that a consumer gets it again at once.

        Returns:
            False if the lease had ended.

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.put("a")
            >>> queue.get(lease=60).nack()
            True
            >>> queue.get()
            'a'
        """
        return self._client.nack(self._meta)

    def __enter__(self) -> LeasedItem:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.ack()
        else:
            self.nack()

    async def __aenter__(self) -> LeasedItem:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._client.async_ack(self._meta)
        else:
            await self._client.async_nack(self._meta)

    def __reduce__(self) -> NoReturn:
        raise UncarriableValueError(
            "a LeasedItem cannot be pickled, because its lease belongs to this process: pass leased.item to the other "
            "process, and acknowledge it here"
        )

    def __repr__(self) -> str:
        return f"LeasedItem({self.item!r})"
