"""Queue: a queue between processes, in a partition of the system."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from transfer_queue.client import TransferQueueClient
from transfer_queue.client.conversion.arguments import LONGEST_TIMEOUT, validated_seconds
from transfer_queue.client.operations.queue_operations import TASK, TakenItems
from transfer_queue.errors import (
    InvalidArgumentError,
    PartitionFullError,
    QueueShutDownError,
    SealedError,
    TransferQueueError,
    UnknownPartitionError,
    WaitTimeoutError,
)
from transfer_queue.messages.puts import PublishReply
from transfer_queue.messages.queries import Backlog
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.calls import Operation
from transfer_queue.queues.handle import QueueHandle, check_positive, empty_error, full_error
from transfer_queue.queues.leased_item import LeasedItem
from transfer_queue.wire.blocks.gather import UnreadableObject

logger = logging.getLogger(__name__)


class Queue(QueueHandle):
    """A first-in, first-out queue between threads, processes and nodes.

    It replaces `queue.Queue`, `multiprocessing.Queue`, `multiprocessing.JoinableQueue` and `ray.util.queue.Queue`.
    All processes that create a queue with the same name use the same queue. A queue can be pickled: it can be an
    argument of a process or of a Ray actor. Items are ordered by their arrival at the controller, over all producers.

    Every object can be an item. Tensors, arrays and containers of them are not pickled: their bytes go directly from
    their own memory into shared memory. A get returns objects that belong to the caller.

    If no system is running, the first queue starts one, as `init` does.

    Args:
        name: The name of the queue, which is the name of its partition. An int here is `maxsize`, as in
            `queue.Queue(8)`. Default: a new name.
        maxsize: The largest number of items. The controller enforces it for all producers; a put beyond it waits there.
            0 or less for no limit, or the limit of the queue if it exists. Default: 0.
        prefetch: The number of items that a get takes at once, if there are as many. The next gets of this process take
            them from its memory. They are handed over with the first of them: if the process ends after that, they are
            lost, unless they have a lease. Default: 1.
        actor_options: Ignored. `ray.util.queue.Queue` has it.

    Raises:
        InvalidArgumentError: The partition exists and is not a queue, or is a queue with another `maxsize` or order.
            Or a number is not valid.

    Example:
        >>> queue = tq.Queue("prompts", maxsize=8)
        >>> queue.put({"prompt": torch.tensor([1, 2])})
        >>> queue.qsize()
        1
        >>> queue.get()
        {'prompt': tensor([1, 2])}
    """

    def __init__(
        self,
        name: str | int | None = None,
        maxsize: int = 0,
        *,
        prefetch: int = 1,
        actor_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(None if isinstance(name, int) else name, name if isinstance(name, int) else maxsize, prefetch)

    # ------------------------------------------------------------ put

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an item at the end of the queue.

        Args:
            item: Any object.
            block: Whether to wait while the queue is full. Default: True.
            timeout: Seconds to wait. Default: no limit.

        Raises:
            QueueFullError: The queue is full (a `queue.Full`, and Ray's `Full` if Ray's queue is loaded).
            QueueShutDownError: The queue was shut down.
            UnknownPartitionError: The queue was removed with `clear_partition`.
            CapacityError: The storage units have no space for the item.
            UncarriableValueError: The item cannot be stored.

        Example:
            >>> tq.Queue("prompts").put("a")
        """
        self._put([item], _wait_of(block, timeout))

    def put_nowait(self, item: Any) -> None:
        """Put an item without waiting: `put(item, block=False)`.

        Args:
            item: Any object.

        Raises:
            QueueFullError: The queue is full.
            QueueShutDownError: The queue was shut down.

        Example:
            >>> tq.Queue("prompts").put_nowait("a")
        """
        self._put([item], None)

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an item from an event loop.

        If the task is cancelled, for example by `asyncio.wait_for`, the item is not in the queue afterwards. Only if a
        consumer has already taken it, the cancellation has come too late, and this call returns normally. If the
        controller cannot be reached within 2 seconds, the task is cancelled, and it is unknown whether the item was
        put. (Up to Python 3.11, `asyncio.wait_for` drops the result of a call if the task that waits for it is itself
        cancelled.)

        Args:
            item: See `put`.
            block: See `put`.
            timeout: See `put`.

        Raises:
            QueueFullError: See `put`.
            QueueShutDownError: See `put`.

        Example:
            >>> import asyncio
            >>> asyncio.run(tq.Queue("prompts").put_async("a"))
        """
        client = self._open_client()
        await client._run_async(self._putting(client, [item], _wait_of(block, timeout)))

    def put_many(self, items: Iterable[Any], block: bool = True, timeout: float | None = None) -> None:
        """Put several items in one round trip.

        Either all are put, one after the other, or none. Only if there are more than `maxsize`, they are put in parts.

        Args:
            items: The items.
            block: See `put`.
            timeout: Seconds to wait for space for each part. Default: no limit.

        Raises:
            QueueFullError: There was no space for all of them. The message says how many were put.
            QueueShutDownError: See `put`.

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.put_many(["a", "b"])
            >>> queue.get_many(8)
            ['a', 'b']
        """
        client = self._open_client()
        client._run(self._putting_parts(client, list(items), _wait_of(block, timeout)))

    async def put_many_async(self, items: Iterable[Any], block: bool = True, timeout: float | None = None) -> None:
        """Put several items from an event loop.

        If the task is cancelled, this call removes what it has put, or returns normally; see `put_async`. Only if there
        are more than `maxsize` items, and consumers have taken some of them, these stay taken: the CancelledError and
        a warning in the log then say how many.

        Args:
            items: See `put_many`.
            block: See `put_many`.
            timeout: See `put_many`.

        Raises:
            QueueFullError: See `put_many`.
            QueueShutDownError: See `put`.

        Example:
            >>> import asyncio
            >>> asyncio.run(tq.Queue("prompts").put_many_async(["a", "b"]))
        """
        client = self._open_client()
        await client._run_async(self._putting_parts(client, list(items), _wait_of(block, timeout)))

    def put_nowait_batch(self, items: Iterable[Any]) -> None:
        """Put all items, or none, without waiting.

        Args:
            items: The items.

        Raises:
            QueueFullError: There is no space for all of them.
            QueueShutDownError: The queue was shut down.
            TypeError: `items` is not iterable.

        Example:
            >>> tq.Queue("prompts").put_nowait_batch(["a", "b"])
        """
        if not isinstance(items, Iterable):
            raise TypeError("Argument 'items' must be an Iterable")
        self._put(list(items), None)

    def _put(self, items: list[Any], wait: float | None) -> None:
        client = self._open_client()
        client._run(self._putting(client, items, wait))

    def _putting_parts(self, client: TransferQueueClient, items: list[Any], wait: float | None) -> Operation[None]:
        """Put these items in parts of at most `maxsize`. If the task is cancelled, remove those that nobody has taken.

        Each part that is put has an effect of its own, so that consumers may have taken items of earlier parts.
        """
        size = self.maxsize or max(1, len(items))
        puts: list[PublishReply] = []
        before = 0
        try:
            for start in range(0, len(items), size):
                puts += yield from self._putting(client, items[start : start + size], wait, before)
                before = min(start + size, len(items))
        except asyncio.CancelledError as cancelled:
            outcome = "and it is unknown how many of them consumers have taken"
            try:
                taken = before - (yield from client._operations._withdraw_items(self.name, puts))
            except TransferQueueError as error:
                outcome += f", because the controller did not remove the others ({error})"
            else:
                if not taken:
                    raise cancelled
                outcome = f"and consumers have taken {taken} of them; the others were removed"
            text = f"A put of {len(items)} items into {self} was cancelled after {before} were put, {outcome}."
            logger.warning("%s", text)
            raise asyncio.CancelledError(text) from cancelled

    def _putting(
        self, client: TransferQueueClient, items: list[Any], wait: float | None, before: int = 0
    ) -> Operation[list[PublishReply]]:
        """Put these items, or raise the exceptions of a queue. before: the items that the call has already put."""
        if not items:
            return []
        if self.maxsize and len(items) > self.maxsize:
            raise full_error(f"{len(items)} items do not fit into {self}")
        try:
            return [(yield from client._operations._put_items(self.name, items, wait, self._tags(items)))]
        except PartitionFullError:
            waited = f", and no place became free within {wait:g} s" if wait else ""
            advice = "Consumers make space: they take items, and acknowledge those that they have under a lease"
            put = f"only the first {before} items were put" if before else "nothing was put"
            raise full_error(f"{self} is full{waited}; {put}. {advice}") from None
        except SealedError:
            raise QueueShutDownError(f"{self} was shut down and accepts no items; put into another queue") from None
        except UnknownPartitionError:
            raise UnknownPartitionError(
                f"{self} does not exist, and nothing was put. It was removed (clear_partition), or this process is "
                f"attached to another system than the one in which it was made. Make it again: {self!r}"
            ) from None

    def _tags(self, items: Sequence[Any]) -> list[dict[str, Any] | None] | None:
        """Return the tags of items by which the partition orders them; None if it orders them by arrival."""
        return None

    # ------------------------------------------------------------ get

    def get(self, block: bool = True, timeout: float | None = None, *, lease: float | None = None) -> Any:
        """Take the first item out of the queue.

        Args:
            block: Whether to wait while the queue is empty. Default: True.
            timeout: Seconds to wait. Default: no limit.
            lease: The duration of a lease in seconds, which is renewed while this process runs. The result is then a
                `LeasedItem`. If the process ends before it acknowledges the item, another consumer gets it, up to
                `controller.max_deliveries` times. A leased item counts for `maxsize` until its ack. Default: the item
                is consumed at once, and is lost with a process that ends before it has processed it.

        Returns:
            The item, or a `LeasedItem` with it.

        Raises:
            QueueEmptyError: The queue is empty (a `queue.Empty`, and Ray's `Empty` if Ray's queue is loaded).
            QueueShutDownError: The queue was shut down, and no item is left.

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.put("a")
            >>> queue.get(timeout=5)
            'a'
        """
        wait = _wait_of(block, timeout)
        client = self._open_client()
        if self.prefetch == 1:
            return client._run(self._taking(client, 1, 1, wait, lease))[0]
        return self._buffer.get(
            lease, wait, lambda left: client._run(self._taking(client, self.prefetch, 1, left, lease))
        )

    def get_nowait(self) -> Any:
        """Take the first item without waiting: `get(block=False)`.

        Returns:
            The item.

        Raises:
            QueueEmptyError: The queue is empty.
            QueueShutDownError: The queue was shut down, and no item is left.

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.put("a")
            >>> queue.get_nowait()
            'a'
        """
        return self.get(block=False)

    async def get_async(self, block: bool = True, timeout: float | None = None, *, lease: float | None = None) -> Any:
        """Take the first item from an event loop.

        If the task is cancelled, the item stays in the queue, also if it was on its way to this task.

        Args:
            block: See `get`.
            timeout: See `get`.
            lease: See `get`.

        Returns:
            See `get`.

        Raises:
            QueueEmptyError: See `get`.
            QueueShutDownError: See `get`.

        Example:
            >>> import asyncio
            >>> queue = tq.Queue("prompts")
            >>> queue.put("a")
            >>> asyncio.run(queue.get_async())
            'a'
        """
        wait = _wait_of(block, timeout)
        client = self._open_client()
        if self.prefetch == 1:
            return (await client._run_async(self._taking(client, 1, 1, wait, lease)))[0]
        return await self._buffer.get_async(
            lease, wait, lambda left: client._run_async(self._taking(client, self.prefetch, 1, left, lease))
        )

    def get_many(
        self, max_items: int, block: bool = True, timeout: float | None = None, *, lease: float | None = None
    ) -> list[Any]:
        """Take the first items in one round trip: at least one, and as many as there are.

        Args:
            max_items: The largest number of items.
            block: Whether to wait while the queue is empty. Default: True.
            timeout: Seconds to wait for the first item. Default: no limit.
            lease: See `get`.

        Returns:
            The items, in order, without those that cannot be loaded in this process: these are logged.

        Raises:
            QueueEmptyError: The queue is empty.
            QueueShutDownError: The queue was shut down, and no item is left.

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.put_many(["a", "b"])
            >>> queue.get_many(8)
            ['a', 'b']
        """
        check_positive(max_items, "max_items")
        client = self._open_client()
        return client._run(self._taking(client, max_items, 1, _wait_of(block, timeout), lease))

    async def get_many_async(
        self, max_items: int, block: bool = True, timeout: float | None = None, *, lease: float | None = None
    ) -> list[Any]:
        """Take the first items from an event loop. For cancelled tasks see `get_async`.

        Args:
            max_items: See `get_many`.
            block: See `get_many`.
            timeout: See `get_many`.
            lease: See `get`.

        Returns:
            See `get_many`.

        Raises:
            QueueEmptyError: See `get_many`.
            QueueShutDownError: See `get_many`.

        Example:
            >>> import asyncio
            >>> queue = tq.Queue("prompts")
            >>> queue.put_many(["a", "b"])
            >>> asyncio.run(queue.get_many_async(8))
            ['a', 'b']
        """
        check_positive(max_items, "max_items")
        client = self._open_client()
        return await client._run_async(self._taking(client, max_items, 1, _wait_of(block, timeout), lease))

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        """Take this number of items, or none, without waiting.

        Args:
            num_items: The number of items.

        Returns:
            The items, in order.

        Raises:
            QueueEmptyError: The queue has fewer items.
            TypeError: `num_items` is not an int.
            InvalidArgumentError: `num_items` is negative (a ValueError).

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.put_many(["a", "b"])
            >>> queue.get_nowait_batch(2)
            ['a', 'b']
        """
        if not isinstance(num_items, int):
            raise TypeError("Argument 'num_items' must be an int")
        if num_items < 0:
            raise InvalidArgumentError("'num_items' must be nonnegative")
        client = self._open_client()
        return client._run(self._taking(client, num_items, num_items, None, None)) if num_items else []

    def _taking(
        self, client: TransferQueueClient, count: int, least: int, wait: float | None, lease: float | None
    ) -> Operation[list[Any]]:
        """Take from `least` to `count` items, or raise the exceptions of a queue."""
        taken = yield from client._operations._take_items(self.name, count, least, wait, lease)
        if not taken.items:
            if taken.ended and least == 1:
                raise QueueShutDownError(f"{self} was shut down, and no item is left; get from another queue")
            few = "is empty" if least == 1 else f"has fewer than {least} items"
            raise empty_error(f"{self} {few}" + (f", and no item came within {wait:g} s" if wait else ""))
        if any(type(item) is UnreadableObject for item in taken.items):
            yield from self._refuse_unreadable(client, taken)
        meta = taken.meta
        if meta is None:
            return [item for item in taken.items if type(item) is not UnreadableObject]
        return [
            LeasedItem(item, meta.select_samples([at]), client)
            for at, item in enumerate(taken.items)
            if type(item) is not UnreadableObject
        ]

    def _refuse_unreadable(self, client: TransferQueueClient, taken: TakenItems) -> Operation[None]:
        """Return the items that this process cannot load if they have a lease, otherwise report them as done.

        Raises the error of the first one if no other item was taken.
        """
        where = [at for at, item in enumerate(taken.items) if type(item) is UnreadableObject]
        error = taken.items[where[0]].error
        if taken.meta is not None:
            yield from client._operations.nack(taken.meta.select_samples(where))
        elif len(where) < len(taken.items):
            yield from client._operations.report_done(self.name, len(where))
        if len(where) == len(taken.items):
            raise error
        outcome = "lost" if taken.meta is None else "returned to the queue"
        logger.error(
            "%d of %d items that were taken from %s are %s: %s", len(where), len(taken.items), self, outcome, error
        )

    # ------------------------------------------------------------ the number of items

    def qsize(self) -> int:
        """Return the number of items, including those that this process has prefetched, without leased ones.

        Other producers and consumers may change it at any time.

        Returns:
            The number.

        Example:
            >>> tq.Queue("prompts").qsize()
            0
        """
        return self._backlog().waiting + len(self._buffer)

    def size(self) -> int:
        """Return the same as `qsize`, under the name that Ray uses.

        Returns:
            The number of items.

        Example:
            >>> tq.Queue("prompts").size()
            0
        """
        return self.qsize()

    def __len__(self) -> int:
        return self.qsize()

    def __bool__(self) -> bool:
        return True  # like a `queue.Queue`, which has no length

    def empty(self) -> bool:
        """Return whether `qsize` is 0.

        Returns:
            Whether the queue is empty.

        Example:
            >>> tq.Queue("prompts").empty()
            True
        """
        return not self.qsize()

    def full(self) -> bool:
        """Return whether the queue has `maxsize` items, with those that are leased.

        Returns:
            Whether a put would have to wait.

        Example:
            >>> tq.Queue("prompts").full()
            False
        """
        if not self.maxsize:
            return False
        backlog = self._backlog()
        return backlog.waiting + backlog.claimed >= self.maxsize

    def _backlog(self) -> Backlog:
        return self._client().get_backlog(self.name, TASK)

    # ------------------------------------------------------------ work

    @property
    def unfinished_tasks(self) -> int:
        """The number of items that were put and not reported with `task_done`.

        Example:
            >>> tq.Queue("prompts").unfinished_tasks
            0
        """
        return self._backlog().undone

    def task_done(self, count: int = 1) -> None:
        """Report that an item that was taken before is processed. See `join`.

        Args:
            count: The number of items. Default: 1.

        Raises:
            InvalidArgumentError: More items were reported than were put (a ValueError).

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.put("a")
            >>> item = queue.get()
            >>> queue.task_done()
        """
        self._client().report_done(self.name, count)

    async def task_done_async(self, count: int = 1) -> None:
        """Report from an event loop that an item is processed.

        Args:
            count: See `task_done`.

        Raises:
            InvalidArgumentError: See `task_done`.

        Example:
            >>> import asyncio
            >>> queue = tq.Queue("prompts")
            >>> queue.put("a")
            >>> asyncio.run(queue.task_done_async())
        """
        await self._client().async_report_done(self.name, count)

    def join(self, timeout: float | None = None) -> None:
        """Wait until every item that was put was reported with `task_done`.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Raises:
            WaitTimeoutError: Items were left after the timeout.

        Example:
            >>> tq.Queue("prompts").join()
        """
        if not self._client().await_done(self.name, timeout=timeout):
            raise self._unfinished_error(timeout)

    async def join_async(self, timeout: float | None = None) -> None:
        """Wait in an event loop until every item was reported with `task_done`.

        Args:
            timeout: See `join`.

        Raises:
            WaitTimeoutError: See `join`.

        Example:
            >>> import asyncio
            >>> asyncio.run(tq.Queue("prompts").join_async())
        """
        if not await self._client().async_await_done(self.name, timeout=timeout):
            raise self._unfinished_error(timeout)

    def _unfinished_error(self, timeout: float | None) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"Timeout: items of {self} were not reported with task_done within {timeout:g} s; call task_done() for "
            f"each item, or raise the timeout"
        )

    def ack(self, items: LeasedItem | Iterable[LeasedItem]) -> bool:
        """Acknowledge items that were got with a lease.

        Args:
            items: An item, or several.

        Returns:
            False if a lease had ended, so that another consumer may have its item.

        Raises:
            InvalidArgumentError: Something else than an item with a lease was passed.

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.put("a")
            >>> queue.ack(queue.get(lease=60))
            True
        """
        listed = [items] if isinstance(items, LeasedItem) else list(items)
        for item in listed:
            if not isinstance(item, LeasedItem):
                raise InvalidArgumentError(
                    f"ack needs what get(lease=...) returned, a LeasedItem or several; got {item!r}"
                )
        return not listed or self._open_client().ack(BatchMeta.concat([item._meta for item in listed], validate=False))

    # ------------------------------------------------------------ the end

    @property
    def is_shutdown(self) -> bool:
        """Whether the queue was shut down.

        Example:
            >>> tq.Queue("prompts").is_shutdown
            False
        """
        return self._backlog().sealed

    def shutdown(self, immediate: bool = False, grace_period_s: float | None = None, *, force: bool = False) -> None:
        """Shut the queue down: from now on, puts raise QueueShutDownError, and so do gets of an empty queue.

        Calls that are waiting end in the same way. The remaining items can still be taken. The partition remains, so
        that every process learns that the queue was shut down; `get_client().clear_partition(queue.name)` removes it.

        Args:
            immediate: Whether to discard the items that are left; `join` does not wait for them. Default: False.
            grace_period_s: Seconds to wait for consumers to take the items that are left, which are then discarded.
                Default: do not wait.
            force: The same as `immediate`, under the name that Ray uses. Default: False.

        Example:
            >>> queue = tq.Queue("prompts")
            >>> queue.shutdown()
            >>> try:
            ...     queue.put("a")
            ... except tq.QueueShutDownError as error:
            ...     print("the queue was shut down")
            the queue was shut down
        """
        client = self._client()
        self._open(client)  # a seal alone would create an ordinary partition if the queue was removed
        client.seal(self.name)
        if not (immediate or force):
            if grace_period_s is None:
                return
            self._await_empty(client, grace_period_s)
        client._run(client._operations._discard_items(self.name))

    def _await_empty(self, client: TransferQueueClient, seconds: float) -> None:
        """Wait until no item is left."""
        deadline = time.monotonic() + seconds
        since: int | None = None
        while client.get_backlog(self.name, TASK).waiting if since is not None else True:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            since = client.wait_for_change(self.name, since, timeout=left).version

    def close(self) -> None:
        """Declare that this process does not use this object any more, as with `multiprocessing.Queue`.

        Other processes can still use the queue.
        Later puts and gets of this object raise a ValueError. Items are already in the queue, so that nothing is lost.

        Example:
            >>> tq.Queue("prompts").close()
        """
        self._closed = True

    def join_thread(self) -> None:
        """Do nothing. `multiprocessing.Queue` waits here for its thread, which this class does not have.

        Example:
            >>> tq.Queue("prompts").join_thread()
        """

    def cancel_join_thread(self) -> None:
        """Do nothing. See `join_thread`.

        Example:
            >>> tq.Queue("prompts").cancel_join_thread()
        """

    def _open_client(self) -> TransferQueueClient:
        if self._closed:
            raise InvalidArgumentError(f"{self} was closed in this process; make a new one with the same name")
        return self._client()


def _wait_of(block: bool, timeout: float | None) -> float | None:
    """Return the seconds to wait; None for not at all."""
    if not block:
        return None
    if timeout is None:
        return LONGEST_TIMEOUT
    seconds = validated_seconds(timeout)
    if seconds is None or seconds < 0:
        raise InvalidArgumentError(f"'timeout' must be a non-negative number of seconds, got {timeout!r}")
    return seconds
