"""BufferedPuts: puts of single samples that a blocking program makes row by row, sent many at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from transfer_queue.client.conversion import arguments
from transfer_queue.client.joiners import PutPart
from transfer_queue.client.operations.operations import Operations
from transfer_queue.errors import InvalidArgumentError, TransferQueueError
from transfer_queue.net.calls import NOT_MADE, Join, JoinKey, Operation
from transfer_queue.net.drivers.join_queues import MAX_JOINED
from transfer_queue.utils.logging_utils import get_logger

SampleName = tuple[str, str]
"""The partition and the key of a sample."""
MAX_ROWS = 256
MAX_DELAY = 0.05
SHOWN = 5  # keys that an error names


class BufferedPuts:
    """A buffer of puts of single samples. `TransferQueueClient.buffered` makes it.

    Threads may share it. A forked child must not use it.

    Args:
        operations: Returns the operations of the client.
        run: Runs an operation in this thread.
        max_rows: See `TransferQueueClient.buffered`.
        max_delay: See `TransferQueueClient.buffered`.

    Example:
        >>> with client.buffered() as puts:
        ...     for number in range(1000):
        ...         puts.kv_put(f"row-{number}", "train_0", {"reward": torch.tensor(float(number))}, {"n": number})
        >>> len(client.kv_list("train_0")["train_0"])
        1000
    """

    def __init__(
        self,
        operations: Callable[[], Operations],
        run: Callable[[Operation[None]], None],
        max_rows: int,
        max_delay: float | None,
    ) -> None:
        self._operations = operations
        self._run = run
        self._max_rows = arguments.validated_count(max_rows, "max_rows")
        self._max_delay = arguments.validated_seconds(max_delay, "max_delay")
        if not self._max_rows:
            raise InvalidArgumentError("max_rows must be at least 1, got 0")
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.RLock())
        self._rows: dict[SampleName, PutPart] = {}
        """The puts that are not published, in order."""
        self._due = 0.0
        """When the oldest of them is to be published."""
        self._failed: dict[SampleName, TransferQueueError] = {}
        """The errors of the puts that failed and were not reported yet."""
        self._ended = False
        self._timer: threading.Thread | None = None

    def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: Mapping[str, Any] | None = None,
        tag: Mapping[str, Any] | None = None,
        *,
        group_id: str | int | None = None,
    ) -> None:
        """Put one sample under a key, as `TransferQueueClient.kv_put` does, when the buffer is published.

        The values must not be changed until then.

        Args:
            key: The key. If a put of the same sample is in the buffer, the buffer is published first.
            partition_id: The partition.
            fields: See `TransferQueueClient.kv_put`. Default: write the tag alone.
            tag: See `TransferQueueClient.kv_put`. Default: none.
            group_id: See `TransferQueueClient.kv_put`. Default: no group.

        Raises:
            InvalidArgumentError: An argument is not valid, or the block of the buffer has ended.
            CapacityError: There was no space for puts in the buffer; see `flush`.
            FieldTypeError: Values of puts in the buffer do not match live values; see `flush`.
            SealedError: Puts in the buffer add samples to a sealed partition; see `flush`.
            UncarriableValueError: A value in the buffer cannot be stored; see `flush`.

        Example:
            >>> with client.buffered() as puts:
            ...     puts.kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])}, {"step": 1})
        """
        arguments.check_partition_id(partition_id)
        part = PutPart(
            arguments.validated_text(key, "key"),
            fields if fields is None or type(fields) is dict else dict(fields),
            tag if tag is None else dict(tag),
            None if group_id is None else str(group_id),
        )
        if not part.fields and tag is None:
            raise InvalidArgumentError("a put needs fields or tags, got neither")
        with self._changed:
            self._check_usable()
            name = partition_id, part.key
            if name in self._rows or self._failed:
                self.flush()
            if not self._rows:
                self._begin_delay()
            self._rows[name] = part
            if len(self._rows) >= self._max_rows:
                self.flush()

    def flush(self) -> None:
        """Publish the puts in the buffer.

        Raises:
            TransferQueueError: Some of the puts failed, since the last call or of those that the buffer has published
                by itself. The error has the class of the first failure, and names the keys; the other puts are
                published.

        Example:
            >>> with client.buffered(max_delay=None) as puts:
            ...     puts.kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])})
            ...     puts.flush()
            ...     client.kv_list("train_0")
            {'train_0': {'a': {}}}
        """
        with self._changed:
            self._check_usable()
            self._publish()
            failed, self._failed = self._failed, {}
        if failed:
            raise _error_of(failed)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgumentError("a buffer of puts belongs to the process that made it; make one in this process")
        if self._ended:
            raise InvalidArgumentError("the block of this buffer has ended; call client.buffered() for another one")

    def _publish(self) -> None:
        """Publish the puts in the buffer and note those that fail. Those that an interrupt left stay in the buffer."""
        if not self._rows:
            return
        operations, rows = self._operations(), self._rows
        self._rows = {}
        try:
            self._run(self._put_all(operations, rows))
        finally:
            self._rows = rows | self._rows

    def _put_all(self, operations: Operations, rows: dict[SampleName, PutPart]) -> Operation[None]:
        """Publish puts, and note those that fail. Remove from `rows` those that have ended."""
        joined: dict[JoinKey, list[Join]] = {}
        yield from operations.attachment.learn()
        for (partition, _), part in rows.items():
            join_key = operations._puts.key_of(partition, part.fields, part.group)
            if join_key is not None:
                joined.setdefault(join_key, []).append(Join(join_key, part))
        for (joiner, shape), calls in joined.items():
            for start in range(0, len(calls), MAX_JOINED):
                flight = calls[start : start + MAX_JOINED]
                yield from joiner.run(flight)
                for call in flight:
                    name = shape[0], call.part.key
                    if isinstance(call.outcome, TransferQueueError):
                        self._failed[name] = call.outcome
                    elif call.outcome is NOT_MADE:
                        continue
                    del rows[name]
        for (partition, key), part in list(rows.items()):
            try:
                yield from operations._put_one(key, partition, part.fields, part.tag, None, part.group, None, None)
            except TransferQueueError as error:
                self._failed[partition, key] = error
            del rows[partition, key]

    # ------------------------------------------------------------ the delay

    def _begin_delay(self) -> None:
        if self._max_delay is None:
            return
        self._due = time.monotonic() + self._max_delay
        if self._timer is None:
            self._timer = threading.Thread(target=self._watch, name="tq-buffer", daemon=True)
            self._timer.start()
        else:
            self._changed.notify()

    def _watch(self) -> None:
        """Publish the buffer whenever its oldest put is due."""
        with self._changed:
            while not self._ended:
                left = self._due - time.monotonic() if self._rows else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                try:
                    self._publish()
                except TransferQueueError:  # the client was closed; the next call raises the same error
                    self._timer = None
                    return

    def __enter__(self) -> BufferedPuts:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if os.getpid() != self._pid:
            return
        try:
            self.flush()
        except TransferQueueError as failure:
            if kind is None:
                raise
            get_logger(__name__).warning("%s", failure)  # the error that ends the block is more important
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()


def _error_of(failed: Mapping[SampleName, TransferQueueError]) -> TransferQueueError:
    """Return one error for all puts that failed."""
    names = list(failed)
    first = failed[names[0]]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    shown = ", ".join(f"{key!r} of partition {partition!r}" for partition, key in names[:SHOWN])
    made = type(first)(f"{len(names)} of the buffered puts failed: {shown}{more}. The first one: {first}")
    made.__cause__ = first
    return made
