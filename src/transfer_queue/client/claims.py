"""The batches that a client claims: their metadata, and how they are handed over to the caller or returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from transfer_queue.client.attachment import Attachment
from transfer_queue.client.conversion import arguments, replies
from transfer_queue.client.tracing import trace_claim
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.messages.claims import Claim, ClaimReply, ReportBatches
from transfer_queue.messages.queries import ShowRows
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.batch_columns import BatchLease
from transfer_queue.net.calls import Notice, Operation

T = TypeVar("T")

HELD_SECONDS = 30.0
"""Seconds for which a batch is held without contact to the controller, until it is handed over."""
_VALIDATORS: dict[str, Callable[[Any], Any]] = {
    "ahead": partial(arguments.validated_count, what="ahead"),
    "finite": partial(arguments.validated_bool, what="finite"),
    "hold": partial(arguments.validated_bool, what="hold"),
    "lease": partial(arguments.validated_seconds, what="lease"),
    "replicas": partial(arguments.validated_count, what="replicas"),
    "since": arguments.validated_version,
}
"""Option of a fetch -> the function that validates it."""
_OPTIONAL = {"lease", "replicas", "since"}
"""The options of a fetch that may be None."""


class KnownRows:
    """Rows that take the place of the next claims, which return them in this order and claim nothing."""

    def __init__(self, rows: Mapping[str, np.ndarray]) -> None:
        self._left = dict(rows)

    def take(self, partition_id: str, count: int) -> np.ndarray:
        """Return the next rows of a partition, at most `count`."""
        left = self._left.get(partition_id, np.zeros(0, "<i8"))
        self._left[partition_id] = left[count:]
        return left[:count]


class Claims:
    """The claims of one client.

    Args:
        attachment: The attachment of the client.
        again: Whether they return only batches that were dealt before (`Claim.again`).
        known: Rows that they return instead, without a claim.
        held: Where the batches are listed if the user of this list hands them over. Default: each call hands its batch
            over when it returns.
    """

    def __init__(
        self,
        attachment: Attachment,
        *,
        again: bool = False,
        known: KnownRows | None = None,
        held: list[BatchLease] | None = None,
    ) -> None:
        self._attachment = attachment
        self.again = again
        self.known = known
        self.held = held

    def prepare(
        self,
        partition_id: str,
        task_name: str | None,
        data_fields: Sequence[str] | str,
        batch_size: int | None,
        sampling_config: Mapping[str, Any] | None,
        wait: float | None,
        **options: Any,
    ) -> Claim:
        """Return the claim of a fetch. `options` are further attributes of `Claim`, as the caller has given them."""
        fields = arguments.validated_names(data_fields, "data_fields")
        count = arguments.validated_count(batch_size, "batch_size")
        sampling = arguments.encoded_sampling_config(sampling_config)
        task = task_name if task_name is not None else sampling.get("task_name")
        if task is None:
            raise InvalidArgumentError("a fetch needs task_name: the name of the task that consumes the samples")
        task = arguments.validated_text(task, "task_name")
        for name, value in options.items():
            if name in _VALIDATORS and (value is not None or name not in _OPTIONAL):
                options[name] = _VALIDATORS[name](value)
        hands_over = options.get("lease") is None and not options.get("probe") and self.known is None
        return Claim(
            partition_id, task, fields, count, sampling, wait, hand_over=hands_over, again=self.again, **options
        )

    def make(self, claim: Claim) -> Operation[ClaimReply]:
        """Return the reply to a claim, which may have a span."""
        if self.known is None:
            operation = self._attachment.ask(claim, ClaimReply, None, parked=claim.wait)
        else:
            operation = self._show_known(claim, self.known)
        tracer = self._attachment.tracer()
        return operation if tracer is None else trace_claim(tracer, operation, claim)

    def _show_known(self, claim: Claim, known: KnownRows) -> Operation[ClaimReply]:
        """Return known rows instead of the reply to a claim."""
        rows = known.take(claim.partition, claim.count)
        if not len(rows):
            raise WaitTimeoutError("the batch that is read again has no further samples")
        request = ShowRows(claim.partition, claim.fields, rows.tobytes())
        return (yield from self._attachment.ask(request, ClaimReply, None))

    def meta(self, partition_id: str, reply: ClaimReply, lease: float | None = None) -> BatchMeta:
        """Return the metadata of a batch, with its lease if it has one."""
        meta = replies.batch_meta(partition_id, reply, self._attachment.settings.allow_pickle)
        meta._holder = self._attachment.client_id if reply.held else None
        if reply.token and self.held is not None and lease is None:
            meta._leases = (BatchLease(partition_id, reply.token, HELD_SECONDS, meta._rows(), None, is_unseen=True),)
            self.held += meta._leases
        elif reply.token and lease is not None:
            deliveries = None if reply.deliveries is None else np.frombuffer(reply.deliveries, "<i4")
            held = BatchLease(partition_id, reply.token, lease, meta._rows(), deliveries)
            meta._leases = (held,)
            self._attachment.renewals.add(held)
        return meta

    def take(self, claim: Claim) -> Operation[tuple[BatchMeta, bool]]:
        """Make a claim. Return the metadata of its batch, which is handed over, and whether the task is at its end."""
        reply = yield from self.make(claim)
        try:
            meta = self.meta(claim.partition, reply, claim.lease)
        except Exception:  # a tag that this process cannot read
            if reply.token:
                yield Notice(ReportBatches(returned=[(claim.partition, reply.token)]))
            raise
        yield from self._hand_over(claim, reply)
        return meta, reply.ended

    def hand_over(self, claim: Claim, reply: ClaimReply, work: Operation[T], *, read: bool = False) -> Operation[T]:
        """Run what is left of a call whose claim was answered, and hand its batch over with the result.

        If it fails or is cancelled, the rows become ready again.

        Args:
            claim: The claim.
            reply: The reply to the claim.
            work: What is left of the call.
            read: Whether the rows may be removed afterwards (`create_partition(free_when=...)`). Default: False.
        """
        try:
            result = yield from work
        except GeneratorExit:
            raise
        except BaseException:
            if reply.token:
                yield Notice(ReportBatches(returned=[(claim.partition, reply.token)]))
            raise
        yield from self._hand_over(claim, reply, read)
        return result

    def _hand_over(self, claim: Claim, reply: ClaimReply, read: bool = False) -> Operation[None]:
        """Note that the batch of a claim is handed over, or report it at once if that cannot wait."""
        if reply.token and self.held is None and claim.lease is None:
            batch = [(claim.partition, reply.token)]
            report = ReportBatches(finished=batch) if read else ReportBatches(handed_over=batch)
            if not self._attachment.note_handed_over(report):
                yield Notice(report)
