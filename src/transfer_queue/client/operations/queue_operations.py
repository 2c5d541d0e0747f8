"""Defines the operations of `queues.Queue`: a queue is a partition with one field, whose samples one task consumes.

A get without a lease is one round trip. A notice says that the value was read: then the controller removes the row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.client.conversion import arguments
from transfer_queue.client.operations.topic import Topic
from transfer_queue.errors import InvalidArgumentError, StorageKeyNotFoundError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim, ClaimReply, Finish, ReportBatches
from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.partitions import CreatePartition, ReportDone
from transfer_queue.messages.puts import Drop, Publish, PublishReply
from transfer_queue.messages.queries import Lookup, LookupReply
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.calls import Notice, Operation
from transfer_queue.wire.blocks.encode import encode_objects

FIELD = "item"
"""The field of an item."""
TASK = "get"
"""The task that consumes the items."""
DISCARDED = 4096
"""Items that are discarded at once."""
LARGE = 64 << 10
"""Bytes of values from which a get reports at once that it has read them, so that their space becomes free."""

WITHDRAW_SECONDS = 2.0
"""Seconds in which the items of a cancelled put are removed."""


class TakenItems(NamedTuple):
    """The items of one get."""

    items: list[Any]
    meta: BatchMeta | None
    """Their metadata if they are under a lease."""
    ended: bool
    """Whether no item will come any more."""


class QueueOperations(Topic):
    """The operations of one client on queues."""

    def _open_queue(self, name: str, maxsize: int, order: str) -> Operation[bool]:
        """Create the partition of a queue. Return False if it exists.

        Raises:
            InvalidArgumentError: The partition exists with other options.
        """
        options = PartitionOptions(free_when=[TASK], max_rows=maxsize or None, order=order)
        return bool((yield from self._ask(CreatePartition(name, 0, options), Done, None)).value)

    def _put_items(
        self, name: str, items: Sequence[Any], wait: float | None, tags: list[dict[str, Any] | None] | None = None
    ) -> Operation[PublishReply]:
        """Put all these items, in this order, or none. `wait`: seconds to wait for space; None does not wait.

        Raises:
            UnknownPartitionError: The queue does not exist. The put does not create it, because it has options.
        """
        yield from self.attachment.learn()
        encoded = encode_objects(FIELD, items, allow_pickle=self.attachment.settings.allow_pickle)
        put = Publish(name, len(items), tags=tags, pre_allocate=0, wait=wait, create=False)
        return (yield from self._writer.publish(encoded, put))

    def _withdraw_items(self, name: str, puts: Sequence[PublishReply]) -> Operation[int]:
        """Remove the items of these puts that nobody has taken, as if they had not been put. Return their number."""
        rows = b"".join(put.rows for put in puts)
        if not rows:
            return 0
        request = Drop(name, "put cancelled", rows, epoch=puts[0].epoch, withdraws=True)
        return int((yield from self._ask(request, Done, WITHDRAW_SECONDS)).value)

    def _take_items(
        self, name: str, count: int, least: int, wait: float | None, lease: float | None = None
    ) -> Operation[TakenItems]:
        """Take from `least` to `count` items; none if there are fewer within `wait` seconds.

        Args:
            name: The queue.
            count: The largest number of items.
            least: The smallest number of items.
            wait: Seconds to wait; None does not wait.
            lease: Seconds of the lease; None consumes the items.
        """
        wait, lease = arguments.validated_seconds(wait), arguments.validated_seconds(lease, "lease")
        yield from self.attachment.learn()
        claim = Claim(
            name, TASK, [FIELD], count, {}, wait, lease=lease, places=True, quiet=True, least=least,
            hand_over=lease is None,
        )  # fmt: skip
        reply = yield from self.claims.make(claim)
        if not reply.rows:
            return TakenItems([], None, reply.ended)
        meta = None if lease is None else self.claims.meta(name, reply, lease)
        items, nbytes = yield from self.claims.hand_over(claim, reply, self._items_of(name, reply), read=True)
        if nbytes >= LARGE and lease is None:
            yield Notice(ReportBatches(finished=[(name, reply.token)]))
        return TakenItems(items, meta, False)

    def _discard_items(self, name: str) -> Operation[None]:
        """Take all items that are left without reading them, and report them as done."""
        yield from self.attachment.learn()
        while True:
            claim = Claim(name, TASK, [FIELD], DISCARDED, quiet=True, least=1)
            reply = yield from self._ask(claim, ClaimReply, None)
            if not reply.rows:
                return
            yield from self._ask(Finish(name, TASK, reply.rows, self.attachment.client_id, reply.epoch), Done, None)
            with contextlib.suppress(InvalidArgumentError):  # more items were reported than were put
                yield from self._ask(ReportDone(name, len(reply.rows) // 8), Done, None)

    def _items_of(self, name: str, reply: ClaimReply) -> Operation[tuple[list[Any], int]]:
        """Return the items of a claim, and the number of their bytes."""
        places = reply.places

        def look() -> Operation[LookupReply]:
            nonlocal places
            if places is not None:
                known, places = places, None
                return known
            located = yield from self.attachment.look_up(Lookup(name, reply.rows, None, [FIELD], reply.epoch), None)
            if not located.types:
                rows = np.frombuffer(reply.rows, "<i8").tolist()
                raise StorageKeyNotFoundError(
                    f"the items {rows[:5]} of queue {name!r} were cleared before they were read"
                )
            return located

        return (yield from self._reader.read_objects(look, name, FIELD))
