"""Delivery at least once: what was fetched under leases, and which process says that it is through with it.

Who fetched a batch renews its lease until it is over; the process that iterates does so, too, from when it has it. That
process alone acknowledges: batch k when it asks for the first item after it. What a worker has fetched and was never
given is handed back when the workers go elsewhere or end.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.errors import BatchGoneError, InvalidArgumentError, TransferQueueError
from transfer_queue.metadata import BatchMeta

DELIVERIES = ("at_most_once", "at_least_once")
BACK_SECONDS = 2.0  # what a process that ends takes to hand back what it was never given


def lease_of(delivery: str, seconds: float) -> float | None:
    """The lease of each fetch. Raises InvalidArgumentError for another kind of delivery."""
    if delivery not in DELIVERIES:
        raise InvalidArgumentError(f"delivery must be {' or '.join(map(repr, DELIVERIES))}, got {delivery!r}")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InvalidArgumentError(f"lease_seconds must be a number of seconds above 0, got {seconds!r}")
    return float(seconds) if delivery == "at_least_once" else None


def digest(meta: BatchMeta) -> int:
    """Tells one batch from another that was dealt under the same number."""
    return zlib.crc32(meta._rows().tobytes())


def adopt_lease(client: GeneratedMethods, meta: BatchMeta, *, keep: bool = False) -> None:
    """This process renews the batch's leases. keep: until they are over, whether or not it still has the batch."""
    for lease in meta._leases:
        client._operations.renewals.add(lease, keep=keep)


def hand_back(client: GeneratedMethods, metas: Iterable[BatchMeta]) -> None:
    """Gives back batches on which nobody has worked to the end. Where that fails, their leases run out."""
    for meta in metas:
        if meta._leases:
            with contextlib.suppress(TransferQueueError):
                client.nack(meta, delivered=False, timeout=BACK_SECONDS)


def acknowledge_again(client: GeneratedMethods, wanted: Mapping[str, Any], lease: float, rows: int) -> None:
    """Acknowledges a batch with which a process was through that ended before it could say so.

    wanted: the arguments of the fetch. rows: its digest. A sampler that keeps no batches gives others; they go back.
    """
    try:
        meta, _ = client.await_batch(**wanted, lease=lease, timeout=0)
    except BatchGoneError:
        return
    if digest(meta) == rows:
        client.ack(meta)
    else:
        hand_back(client, [meta])


class PrefetchedBatch:
    """The batches that a worker has fetched, by number, as far as nobody knows whether they were given."""

    def __init__(self, client: GeneratedMethods) -> None:
        self._client = client
        self._metas: dict[int, BatchMeta] = {}

    def add(self, number: int, meta: BatchMeta) -> None:
        """One more, whose leases are renewed until they are over."""
        if meta._leases:
            adopt_lease(self._client, meta, keep=True)
            renewed = self._client._operations.renewals
            self._metas = {n: m for n, m in self._metas.items() if any(map(renewed.renews, m._leases))}
            self._metas[number] = meta.select_fields([])

    def end(self, given: int | None) -> None:
        """Hands back those from this number on; None: it is not known which were given."""
        metas, self._metas = self._metas, {}
        if given is not None:
            hand_back(self._client, [meta for number, meta in metas.items() if number >= given])
