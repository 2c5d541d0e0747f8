"""What a client can do to get samples and their values at once: operations like those of `operations.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from tensordict import TensorDict

from transfer_queue.client import arguments
from transfer_queue.client.long_waits import report
from transfer_queue.client.lookups import joined
from transfer_queue.client.no_rows import column_of_no_rows
from transfer_queue.client.transfers import Operation, Transfers
from transfer_queue.config import get_metadata_timeout
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.field_columns import TABLE
from transfer_queue.messages import Claim, ClaimReply, Done, Explain, Lookup, LookupReply
from transfer_queue.metadata import BatchMeta
from transfer_queue.wire.gather import nested, table_of


class _Awaited(NamedTuple):
    """What a fetch that waits found. places: where its values lay when it was met, if that is known."""

    meta: BatchMeta
    ended: bool
    places: LookupReply | None = None


class FetchOperations(Transfers):
    """The operations of one client that read values, and what fetches share."""

    def get_data(
        self,
        metadata: BatchMeta,
        *,
        layout: str = "jagged",
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> Operation[TensorDict]:
        """The values of these samples' fields, rows in the order of the metadata, as a TensorDict [rows].

        If the metadata has no samples, returns the fields that it knows, with no rows.

        layout: how rows of one or more dimensions come: "jagged" (nested tensors), "dense" (stacked; ValueError where
        shapes differ), "padded" (with zeros), "list" (a list of tensors). device: where tensors come, straight from the
        store where that can be (docs/backends.md); None: into the host's memory, as objects always do.

        Raises:
            StorageKeyNotFoundError: a sample was cleared, or lacks a field.
        """
        arguments.batch_meta(metadata)
        place = arguments.device(device)
        yield from self._state.learn()
        return (yield from self._values(metadata, layout, place, timeout))

    def await_data(
        self,
        data_fields: Sequence[str] | str,
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling_config: Mapping[str, Any] | None = None,
        finite: bool = False,
        *,
        hold: bool = False,
        lease: float | None = None,
        replicas: int | None = None,
        layout: str = "jagged",
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> Operation[tuple[TensorDict | None, BatchMeta, bool]]:
        """(values, metadata, ended): `await_batch`, and `get_data` of what came, in one round trip.

        The values are those of the moment in which the samples were dealt, or later ones; None where nothing came.

        Raises:
            StorageKeyNotFoundError: a sample of a batch that was dealt before was cleared. As `await_batch`.
        """
        place = arguments.device(device)
        found = yield from self._awaited(
            data_fields, batch_size, partition_id, task_name, sampling_config, finite, hold, lease, replicas, timeout,
            places=True,
        )  # fmt: skip
        values = None
        if len(found.meta):
            values = yield from self._values(found.meta, layout, place, None, found.places)
        return values, found.meta, found.ended

    # ------------------------------------------------------------ shared

    def _values(
        self,
        metadata: BatchMeta,
        layout: str,
        device: torch.device | None,
        timeout: float | None,
        places: LookupReply | None = None,
    ) -> Operation[TensorDict]:
        """See `get_data`. places: where the values lay a moment ago; where they do not any more, they are looked up."""
        if not len(metadata):
            fields = metadata._fields.values()
            tables = [field.name for field in fields if (field.extra or {}).get(TABLE)]
            columns = {field.name: column_of_no_rows(field, layout) for field in fields if field.name not in tables}
            none = nested(table_of(columns, 0), tables)
            return none if device is None else none.to(device)
        names = metadata.field_names
        if not names:
            return TensorDict({}, batch_size=len(metadata))
        parts = metadata._split_by_partition()
        requests = [
            Lookup(name, metadata._rows()[positions].tobytes(), None, names, metadata._epoch)
            for name, positions in parts
        ]

        def look() -> Operation[LookupReply]:
            nonlocal places
            if places is not None:
                known, places = places, None
                return known
            found = []
            for request in requests:
                found.append((yield from self._look_up(request, timeout)))
            return found[0] if len(found) == 1 else joined(found, [positions for _, positions in parts])

        return (yield from self._read(look, layout, device))

    def _awaited(
        self,
        data_fields: Sequence[str] | str,
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling_config: Mapping[str, Any] | None,
        finite: bool,
        hold: bool,
        lease: float | None,
        replicas: int | None,
        timeout: float | None,
        places: bool = False,
        ahead: int = 0,
    ) -> Operation[_Awaited]:
        yield from self._state.learn()
        timeout = get_metadata_timeout() if timeout is None else timeout
        fields = arguments.names(data_fields, "data_fields")
        claim = self._claim(
            partition_id, task_name, fields, arguments.count(batch_size), sampling_config, timeout, finite=finite,
            hold=hold, lease=lease, replicas=replicas, places=places,
        )  # fmt: skip
        try:
            reply = yield from self._claimed(
                msgspec.structs.replace(claim, quiet=True, ahead=arguments.natural(ahead, "ahead"))
            )
        except WaitTimeoutError:  # from a controller that does not know `quiet` yet, or from a call that took too long
            return _Awaited(BatchMeta(), False)
        return _Awaited(self._meta(partition_id, reply, claim.lease), reply.ended, reply.places)

    def _claimed(self, claim: Claim) -> Operation[ClaimReply]:
        """Return the reply to a claim. If the wait is long, log why the claim waits."""
        yield from self._state.learn()
        left, due = arguments.seconds(claim.wait), self._state.settings.report_wait
        while left is not None and due is not None and left > due - claim.waited:
            part = msgspec.structs.replace(claim, wait=due - claim.waited)
            try:
                reply = yield from self._ask(part, ClaimReply, None, parked=part.wait)
            except WaitTimeoutError:
                reply = ClaimReply(b"")
            if reply.rows or reply.ended:
                return reply
            left -= due - claim.waited
            claim, due = msgspec.structs.replace(claim, wait=left, waited=due), 2 * due
            report(__name__, claim.waited, (yield from self._explained(claim)))
        return (yield from self._ask(claim, ClaimReply, None, parked=left))

    def _explained(self, claim: Claim) -> Operation[str]:
        """Return why a claim waits, in words."""
        request = Explain(claim.partition, None, None, claim.task, claim.fields, claim.count, claim.sampling)
        return str((yield from self._ask(request, Done, None)).value)

    def _claim(
        self,
        partition_id: str,
        task_name: str | None,
        fields: list[str],
        count: int,
        sampling_config: Mapping[str, Any] | None,
        wait: float | None,
        probe: bool = False,
        finite: bool = False,
        since: int | None = None,
        hold: bool = False,
        lease: float | None = None,
        replicas: int | None = None,
        places: bool = False,
    ) -> Claim:
        sampling = arguments.plain(sampling_config)
        task = task_name if task_name is not None else sampling.get("task_name")
        if task is None:
            raise InvalidArgumentError("a fetch needs task_name: the name of the task that consumes the samples")
        task = arguments.text(task, "task_name")
        lease = None if lease is None else float(arguments.seconds(lease, "lease"))  # type: ignore[arg-type]
        replicas = None if replicas is None else arguments.natural(replicas, "replicas")
        wait, since = arguments.seconds(wait), arguments.version(since)
        finite, hold = arguments.flag(finite, "finite"), arguments.flag(hold, "hold")
        return Claim(
            partition_id, task, fields, count, sampling, wait, probe, finite, since, hold, lease, replicas, places
        )
