"""Define the operations that fetch samples together with their values, in the manner of `operations.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from tensordict import TensorDict

from transfer_queue.client.conversion import arguments
from transfer_queue.client.conversion.empty_columns import column_of_no_rows
from transfer_queue.client.data.data_path import DataPath, Operation
from transfer_queue.client.operations.long_waits import report
from transfer_queue.client.operations.merge_lookups import merge_lookups
from transfer_queue.config.environment import get_metadata_timeout
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.queries import Explain, Lookup, LookupReply
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.field_columns import TABLE
from transfer_queue.wire.blocks.gather import nested, table_of


class _Awaited(NamedTuple):
    """What a fetch that waits found. places: where its values lay when it was met, if that is known."""

    meta: BatchMeta
    ended: bool
    places: LookupReply | None = None


class FetchOperations(DataPath):
    """The operations of one client that read values, and what fetches share."""

    def get_data(
        self,
        metadata: BatchMeta,
        *,
        layout: str = "jagged",
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> Operation[TensorDict]:
        """Return the values of samples.

        Args:
            metadata: The samples and their fields. If it has no samples, the fields that it knows are returned, with no
                rows.
            layout: The form of rows of one or more dimensions: "jagged" (nested tensors), "dense" (stacked; requires
                equal shapes), "padded" (with zeros) or "list" (a list of tensors). Default: "jagged".
            device: The device of the returned tensors. They go there directly from the store if the backend supports it
                (docs/backends.md). Objects always go to the memory of the host. Default: the memory of the host.
            timeout: See `TransferQueueClient`.

        Returns:
            The values, batch size [rows], in the order of the metadata. They are writable and independent of the store.

        Raises:
            StorageKeyNotFoundError: A sample was cleared, or does not have a field.
            InvalidArgumentError: `layout` is "dense" and shapes differ, or `device` cannot be used.

        Example:
            >>> prompts = TensorDict({"prompt": torch.tensor([[1, 2], [3, 4]])}, batch_size=2)
            >>> meta = client.put(prompts, partition_id="train_0")
            >>> client.get_data(meta, layout="dense")["prompt"].tolist()
            [[1, 2], [3, 4]]
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
        """Wait for the next batch of a task and return its values, in one round trip: `await_batch` with `get_data`.

        The values are those of the moment at which the samples were dealt, or later ones.

        Args:
            data_fields: See `await_batch`.
            batch_size: See `await_batch`.
            partition_id: See `await_batch`.
            task_name: See `await_batch`.
            sampling_config: See `await_batch`.
            finite: See `await_batch`.
            hold: See `get_meta`.
            lease: See `get_meta`.
            replicas: See `get_meta`.
            layout: See `get_data`.
            device: See `get_data`.
            timeout: See `await_batch`.

        Returns:
            The values (None if nothing became ready), the metadata, and whether the task has reached its end.

        Raises:
            StorageKeyNotFoundError: A sample of a batch that was dealt before was cleared.
            InvalidArgumentError: See `get_meta`.
            BatchGoneError: See `get_meta`.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.ones(2)})
            >>> values, meta, ended = client.await_data("reward", 2, "train_0", "update")
            >>> values["reward"].tolist(), ended
            ([1.0, 1.0], False)
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
            return found[0] if len(found) == 1 else merge_lookups(found, [positions for _, positions in parts])

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
                msgspec.structs.replace(claim, quiet=True, ahead=arguments.validated_count(ahead, "ahead"))
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
        sampling = arguments.plain_value(sampling_config)
        task = task_name if task_name is not None else sampling.get("task_name")
        if task is None:
            raise InvalidArgumentError("a fetch needs task_name: the name of the task that consumes the samples")
        task = arguments.text(task, "task_name")
        lease = None if lease is None else float(arguments.seconds(lease, "lease"))  # type: ignore[arg-type]
        replicas = None if replicas is None else arguments.validated_count(replicas, "replicas")
        wait, since = arguments.seconds(wait), arguments.version(since)
        finite, hold = arguments.flag(finite, "finite"), arguments.flag(hold, "hold")
        return Claim(
            partition_id, task, fields, count, sampling, wait, probe, finite, since, hold, lease, replicas, places
        )
