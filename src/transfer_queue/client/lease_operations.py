"""What a client can do with samples that it fetched under a lease: operations like those of `operations.py`."""

from __future__ import annotations

from transfer_queue.client import arguments
from transfer_queue.client.transfers import Operation, Transfers
from transfer_queue.messages import Ack, Done, Nack, RankGone
from transfer_queue.metadata import BatchMeta


class LeaseOperations(Transfers):
    """The operations of one client about leases."""

    def ack(self, metadata: BatchMeta, *, timeout: float | None = None) -> Operation[bool]:
        """Makes these samples, which were fetched under a lease, consumed by the task they were fetched for.

        Metadata may be a part of what was fetched (of a group sampler's batch: whole groups), and may have come from
        another process. Returns whether it counts for all of it: False where a lease was over, so that others have
        these samples, or where another replica's ack has finished them; or where there is no lease. It is no error.

        Raises:
            InvalidArgumentError: these are parts of groups.
        """
        arguments.batch_meta(metadata)
        counts = bool(metadata._leases)
        for lease, rows in metadata._leased():
            reply = yield from self._ask(Ack(lease.partition, lease.token, rows.tobytes()), Done, timeout)
            counts &= bool(reply.value)
            if len(rows) == len(lease.rows):
                self._state.renewals.forget(lease.token)
        return counts

    def nack(self, metadata: BatchMeta, *, delivered: bool = True, timeout: float | None = None) -> Operation[bool]:
        """Gives these samples, which were fetched under a lease, back at once, to be delivered again.

        delivered: False where nobody has worked on them; it does not count towards `max_deliveries`. Returns whether
        the lease was in force, as `ack` does.

        Raises:
            InvalidArgumentError: these are parts of groups.
        """
        arguments.batch_meta(metadata)
        counts = bool(metadata._leases)
        for lease, rows in metadata._leased():
            request = Nack(lease.partition, lease.token, rows.tobytes(), bool(delivered))
            counts &= bool((yield from self._ask(request, Done, timeout)).value)
            if len(rows) == len(lease.rows):
                self._state.renewals.forget(lease.token)
        return counts

    def declare_rank_gone(
        self, partition_id: str, task_name: str, dp_rank: int, *, timeout: float | None = None
    ) -> Operation[int]:
        """Says that a rank will not come back: what it has not acknowledged is ready for others.

        It is about batches of a rank-consistent sampler that were dealt to claims with a lease; nobody else gets these
        before. Late acks of the rank count for nothing. Returns how many samples are ready again.

        Raises:
            UnknownPartitionError: there is none of this name.
        """
        request = RankGone(
            partition_id, arguments.text(task_name, "task_name"), arguments.natural(dp_rank, "dp_rank")
        )  # fmt: skip
        return int((yield from self._ask(request, Done, timeout)).value)
