"""Delivery at least once: renews the leases of fetched batches, and acknowledges or returns the batches.

The process that fetched a batch renews its lease until the lease ends, and so does the process that iterates, as soon
as it has the batch. Only that process acknowledges: batch k when it asks for the first item after it. Batches that a
worker has fetched and not delivered are returned when the workers change their position or end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.errors import InvalidArgumentError, TransferQueueError
from transfer_queue.messages.claims import ReportBatches
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.batch_columns import BatchLease

DELIVERIES = ("at_most_once", "at_least_once")
BACK_SECONDS = 2.0  # timeout for returning a batch when a process ends


def lease_of(delivery: str, seconds: float) -> float | None:
    """Return the lease of each fetch in seconds; None without leases.

    Raises:
        InvalidArgumentError: The kind of delivery is unknown, or the seconds are not a number above 0.
    """
    if delivery not in DELIVERIES:
        raise InvalidArgumentError(f"delivery must be {' or '.join(map(repr, DELIVERIES))}, got {delivery!r}")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InvalidArgumentError(f"lease_seconds must be a number of seconds above 0, got {seconds!r}")
    return float(seconds) if delivery == "at_least_once" else None


def take_unseen(meta: BatchMeta) -> tuple[BatchLease, ...]:
    """Remove the leases that last until a batch is handed over from its metadata, and return them."""
    unseen = tuple(lease for lease in meta._leases if lease.is_unseen)
    if unseen:
        meta._leases = tuple(lease for lease in meta._leases if not lease.is_unseen)
    return unseen


def hand_over(client: GeneratedMethods, unseen: Iterable[BatchLease]) -> None:
    """Report that the consumer gets a batch now. Awaits no reply."""
    batches = [(lease.partition, lease.token) for lease in unseen]
    report = ReportBatches(handed_over=batches)
    if batches and not client._operations.attachment.note_handed_over(report):
        client._run(client._operations._report_batches(report))


def give_back(client: GeneratedMethods, unseen: Iterable[BatchLease]) -> None:
    """Report that no consumer gets a batch, so that its samples are ready again. Awaits no reply."""
    batches = [(lease.partition, lease.token) for lease in unseen]
    if batches:
        with contextlib.suppress(TransferQueueError):
            client._run(client._operations._report_batches(ReportBatches(returned=batches)))


def adopt_lease(client: GeneratedMethods, meta: BatchMeta, *, keep: bool = False) -> None:
    """Renew the batch's leases in this process. keep: until the leases end, even if this process drops the batch."""
    for lease in meta._leases:
        client._operations.attachment.renewals.add(lease, keep=keep)


def return_batches(client: GeneratedMethods, metas: Iterable[BatchMeta]) -> None:
    """Return batches that were not processed to the end. If a request fails, the lease of that batch expires."""
    for meta in metas:
        if meta._leases:
            with contextlib.suppress(TransferQueueError):
                client.nack(meta, delivered=False, timeout=BACK_SECONDS)


class PrefetchedBatch:
    """The batches that a worker has fetched, by number, as long as it does not know whether they were delivered."""

    def __init__(self, client: GeneratedMethods) -> None:
        self._client = client
        self._metas: dict[int, BatchMeta] = {}

    def add(self, number: int, meta: BatchMeta) -> None:
        """Add a batch. Its leases are renewed until they end."""
        if meta._leases:
            adopt_lease(self._client, meta, keep=True)
            renewed = self._client._operations.attachment.renewals
            self._metas = {n: m for n, m in self._metas.items() if any(map(renewed.is_renewed, m._leases))}
            self._metas[number] = meta.select_fields([])

    def end(self, given: int | None) -> None:
        """Return the batches from this number on to the controller; None: none, because the number is not known."""
        metas, self._metas = self._metas, {}
        if given is not None:
            return_batches(self._client, [meta for number, meta in metas.items() if number >= given])
