"""Defines the operations on samples that were fetched under a lease and on locks of keys, as generators of calls."""

from __future__ import annotations

from collections.abc import Sequence

from transfer_queue.client.attachment import Attachment
from transfer_queue.client.conversion import arguments
from transfer_queue.client.data.lease_renewal import LockLease
from transfer_queue.client.joiners import AckJoiner
from transfer_queue.client.operations.topic import Topic
from transfer_queue.client.writer import Writer
from transfer_queue.messages import locks
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Ack, Nack, RankGone, Renew, ReportBatches
from transfer_queue.messages.locks import LockEntry
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.batch_columns import BatchLease
from transfer_queue.net.calls import NOT_MADE, Notice, Operation


class LeaseOperations(Topic):
    """The operations of one client on leases."""

    def __init__(self, attachment: Attachment, writer: Writer | None = None) -> None:
        super().__init__(attachment, writer)
        self._acks = AckJoiner(lambda request: self._ask(request, Done, None))

    def ack(self, metadata: BatchMeta, *, timeout: float | None = None) -> Operation[bool]:
        """Acknowledge samples that were fetched with `lease=`: the task has consumed them. Without lease: `finish`.

        Args:
            metadata: The samples: what was fetched, or a part of it (with a group sampler: complete groups). It may
                come from another process.
            timeout: See `TransferQueueClient`.

        Returns:
            True if all samples count as acknowledged. False if a lease had ended, so that others may have these
            samples, if the ack of another rank replica already completed them, or if there is no lease.

        Raises:
            InvalidArgumentError: The samples are parts of groups.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = client.get_meta("prompt", 2, "train_0", task_name="update", lease=60)
            >>> client.ack(meta)
            True
        """
        arguments.check_batch_meta(metadata)
        counts = bool(metadata._leases)
        for lease, rows in metadata._leased():
            counts &= yield from self._ack(Ack(lease.partition, lease.token, rows.tobytes()), timeout)
            if len(rows) == len(lease.rows):
                self.attachment.renewals.forget(lease.token)
        return counts

    def nack(self, metadata: BatchMeta, *, delivered: bool = True, timeout: float | None = None) -> Operation[bool]:
        """Return samples that were fetched under a lease, so that they are delivered again.

        Args:
            metadata: See `ack`.
            delivered: False if nobody has worked on the samples: this delivery does not count towards `max_deliveries`.
                Default: True.
            timeout: See `TransferQueueClient`.

        Returns:
            True if the lease was still valid for all samples; see `ack`.

        Raises:
            InvalidArgumentError: The samples are parts of groups.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = client.get_meta("prompt", 2, "train_0", task_name="update", lease=60)
            >>> client.nack(meta)
            True
            >>> client.get_meta("prompt", 2, "train_0", task_name="update", lease=60).deliveries
            [2, 2]
        """
        arguments.check_batch_meta(metadata)
        counts = bool(metadata._leases)
        for lease, rows in metadata._leased():
            request = Nack(lease.partition, lease.token, rows.tobytes(), bool(delivered))
            counts &= bool((yield from self._ask(request, Done, timeout)).value)
            if len(rows) == len(lease.rows):
                self.attachment.renewals.forget(lease.token)
        return counts

    def _report_batches(self, report: ReportBatches) -> Operation[None]:
        """Report at once what becomes of batches. Awaits no reply."""
        yield Notice(report)

    def _renewed(self, leases: Sequence[BatchLease]) -> Operation[list[BatchLease]]:
        """Renew leases, also those of another process, and return those that are still in force."""
        request = Renew([(lease.partition, lease.token) for lease in leases])
        alive = (yield from self._ask(request, Done, None)).value
        return [lease for lease, is_alive in zip(leases, alive, strict=True) if is_alive]

    def _ack(self, ack: Ack, timeout: float | None) -> Operation[bool]:
        """Acknowledge rows of one lease, alone or with others, and return whether this counts."""
        call = self._acks.call_for(ack, timeout)
        if call is not None:
            joined = yield call
            if isinstance(joined, Done) and joined is not NOT_MADE:
                return bool(joined.value)
        try:
            return bool((yield from self._ask(ack, Done, timeout)).value)
        finally:
            if call is not None and call.ended is not None:
                call.ended()

    def declare_rank_gone(
        self, partition_id: str, task_name: str, dp_rank: int, *, timeout: float | None = None
    ) -> Operation[int]:
        """Declare that a rank will not return, so that samples that it has not acknowledged become ready for others.

        This concerns batches of a rank-consistent sampler that were dealt under a lease, which no other rank receives
        before. Later acks of the rank have no effect.

        Args:
            partition_id: The partition.
            task_name: The task.
            dp_rank: The rank.
            timeout: See `TransferQueueClient`.

        Returns:
            The number of samples that became ready again.

        Raises:
            UnknownPartitionError: The partition does not exist.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.declare_rank_gone("train_0", "update", dp_rank=3)
            0
        """
        request = RankGone(
            partition_id,
            arguments.validated_text(task_name, "task_name"),
            arguments.validated_count(dp_rank, "dp_rank"),
        )
        return int((yield from self._ask(request, Done, timeout)).value)


class LockOperations(Topic):
    """The operations of one client on locks of keys."""

    def kv_lock_list(
        self, partition_id: str | None = None, *, timeout: float | None = None
    ) -> Operation[list[LockEntry]]:
        """Return the locks of keys, and the requests that wait for a lock.

        Each entry names the client, and how long it has held the lock or waited. A long list is fetched in pages; locks
        that are taken or released meanwhile may or may not be in it.

        Args:
            partition_id: The partition. Default: all partitions.
            timeout: See `TransferQueueClient`.

        Returns:
            First the locks, in the order in which they were granted, then the requests that wait for one, in the order
            in which they arrived (`LockEntry.held` is False).

        Example:
            >>> client.kv_lock_list()
            []
        """
        if partition_id is not None:
            arguments.check_partition_id(partition_id)
        named = None if partition_id is None else [partition_id]
        listed: list[LockEntry] = []
        start: int | None = 0
        while start is not None:
            page = yield from self._ask(locks.ListLocks(named, start), locks.LocksReply, timeout)
            listed += page.locks
            start = page.following
        return listed

    def _take_lock(
        self, keys: Sequence[str], partition_id: str, timeout: float | None, lease: float
    ) -> Operation[LockLease]:
        """Lock these keys, and renew the lock while the result is referred to."""
        yield from self.attachment.learn()
        wait = self.attachment.settings.call_timeout if timeout is None else timeout
        request = locks.TakeLock(partition_id, list(keys), lease, wait)
        reply = yield from self._ask(request, locks.LockReply, None, wait)
        held = LockLease(partition_id, reply.token, lease)
        self.attachment.renewals.add(held)
        return held

    def _release_lock(self, held: LockLease) -> Operation[bool]:
        """Release a lock. Returns whether it was in force."""
        self.attachment.renewals.forget(held.token)  # if the request fails, the lock ends with its lease
        return bool((yield from self._ask(locks.ReleaseLock(held.partition, held.token), Done, None)).value)
