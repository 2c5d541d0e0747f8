"""Defines the operations that fetch samples and read their values, as generators of calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.client.claims import Claims, KnownRows
from transfer_queue.client.conversion import arguments
from transfer_queue.client.conversion.replies import column_of_no_rows, merge_lookups
from transfer_queue.client.operations.topic import Topic
from transfer_queue.client.reader import FetchOptions
from transfer_queue.config.environment import get_metadata_timeout, pre_alloc_sample_num
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.puts import Reserve
from transfer_queue.messages.queries import Lookup, LookupReply, ShowRows
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.field_columns import TABLE
from transfer_queue.net.calls import Operation
from transfer_queue.wire.blocks.gather import nest_tables, table_of

OperationsT = TypeVar("OperationsT", bound="FetchOperations")

MIN_WAIT = 0.001
"""Seconds of a fetch that may not wait: it ends like one that waited, with an error that says what is missing."""


class Readiness(NamedTuple):
    """The result of `await_ready`."""

    ended: bool
    """True if such a fetch can never be met."""
    version: int
    """The version of the partition, which grows with every change in it; -1 if the partition does not exist."""


class FetchOperations(Topic):
    """The operations of one client that fetch samples and read values."""

    def _claiming(self: OperationsT, *, again: bool = False, known: KnownRows | None = None) -> OperationsT:
        """Return operations of the same client with other claims, which hand nothing over.

        Args:
            again: Whether the claims return only batches that were dealt before.
            known: Rows that they return instead.
        """
        view = copy.copy(self)
        held = [] if self.claims.held is None else self.claims.held
        view.claims = Claims(self.attachment, again=again, known=known, held=held)
        return view

    def _meta_of_rows(
        self, partition_id: str, data_fields: Sequence[str], task_name: str, rows: np.ndarray
    ) -> Operation[BatchMeta]:
        """Return the metadata of those of these rows that exist and that the task does not skip. Claims nothing."""
        request = ShowRows(partition_id, list(data_fields), rows.astype("<i8").tobytes(), task_name)
        return self.claims.meta(partition_id, (yield from self._ask(request, ClaimReply, None)))

    def get_meta(
        self,
        data_fields: Sequence[str] | str,
        batch_size: int | None,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
        *,
        hold: bool = False,
        lease: float | None = None,
        replicas: int | None = None,
        timeout: float | None = None,
    ) -> Operation[BatchMeta]:
        """Return metadata of samples: fetch ready ones, reserve new ones, or look at all. A timeout is an error.

        Args:
            data_fields: The fields that the samples must have (one str for one field). An insert needs none: [].
            batch_size: The number of samples. Ignored if `mode` is "force_fetch".
            partition_id: The partition.
            mode: "fetch": samples that have all `data_fields` and that `task_name` has not consumed. The sampler
                chooses them, and they are then consumed. "insert": reserves new samples. "force_fetch": all samples,
                without sampling or consuming; `production_status` is 1 if all requested fields that exist are produced.
                Default: "fetch".
            task_name: The task that consumes the samples. Required for "fetch", unless `sampling_config` contains it.
            sampling_config: Arguments of the sampler, for example dp_rank and batch_index. Default: none.
            hold: True if this fetch must not finish the previous batch of the task (see `finish`). Default: False.
            lease: Seconds for which the samples are claimed instead of consumed. The client renews the lease in the
                background while anything refers to the metadata. `ack` makes the samples consumed. A `nack` or the end
                of the lease makes them ready again: samples of a rank-consistent sampler under the same (dp_rank,
                batch_index), others for any consumer. `metadata.deliveries` counts deliveries; after `max_deliveries`
                without an ack the task skips the sample. Default: no lease.
            replicas: The number of rank replicas that must acknowledge a rank-consistent batch before it is consumed.
                Default: the `replicas` of the partition.
            timeout: Seconds that a fetch waits for samples, or an insert for space. Default for a fetch:
                TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s); with `polling_mode: true` it does not wait, and returns empty
                metadata if it cannot be met. Default for an insert: do not wait.

        Returns:
            The metadata of the samples.

        Raises:
            WaitTimeoutError: The wait ended (also a TimeoutError and a RuntimeError). The message says which samples
                are nearest to ready.
            InvalidArgumentError: An argument is not valid, or this batch was dealt with another batch_size.
            BatchGoneError: The rows of this dealt batch were cleared.
            UnknownPartitionError: "force_fetch" of a partition that does not exist.
            SamplerError: A user's sampler failed.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> client.get_meta(["prompt"], 2, "train_0", task_name="update")
            BatchMeta(size=2, partitions=['train_0'], fields=['prompt'], produced=2)
        """
        yield from self.attachment.learn()
        if mode == "insert":
            arguments.validated_names(data_fields, "data_fields", least=0)
            wait = arguments.validated_seconds(timeout)
            count = arguments.validated_count(batch_size, "batch_size")
            request = Reserve(partition_id, count, None, pre_alloc_sample_num(), wait=wait)
            return self.claims.meta(partition_id, (yield from self._ask(request, ClaimReply, None, parked=wait)))
        if mode == "force_fetch":
            fields = arguments.validated_names(data_fields, "data_fields")
            shown = yield from self._ask(ShowRows(partition_id, fields), ClaimReply, timeout)
            return self.claims.meta(partition_id, shown)
        if mode != "fetch":
            raise InvalidArgumentError(f"mode must be 'fetch', 'insert' or 'force_fetch', got {mode!r}")
        if timeout is None and not self.attachment.settings.polling_mode:
            timeout = get_metadata_timeout()
        if timeout is not None:
            timeout = max(arguments.validated_seconds(timeout) or 0.0, MIN_WAIT)
        claim = self.claims.prepare(
            partition_id, task_name, data_fields, batch_size, sampling_config, timeout, hold=hold, lease=lease,
            replicas=replicas,
        )  # fmt: skip
        return (yield from self.claims.take(claim))[0]

    def await_batch(
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
        ahead: int = 0,
        timeout: float | None = None,
    ) -> Operation[tuple[BatchMeta, bool]]:
        """Wait for the metadata of a task's next batch. Unlike in `get_meta`, a timeout or the end is not an error.

        Args:
            data_fields: The fields that the samples must have.
            batch_size: The number of samples.
            partition_id: The partition.
            task_name: The task that consumes the samples.
            sampling_config: Arguments of the sampler, for example dp_rank and batch_index. Default: none.
            finite: True to end as soon as the task has consumed every sample of the partition. Default: False, which
                ends only if the partition is sealed and everything is dealt.
            hold: See `get_meta`.
            lease: See `get_meta`.
            replicas: See `get_meta`.
            ahead: By how many batches this one is ahead of the batch that the caller needs now, for example if the
                workers of a loader fetch ahead. If a rank-consistent sampler does not know the number of ranks, it
                deals such a batch only if other ranks do not need these samples. Default: 0.
            timeout: Seconds to wait; 0 does not wait. Default: TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s), in any
                polling mode.

        Returns:
            The metadata, which is empty if nothing became ready, and whether the task has reached its end.

        Raises:
            InvalidArgumentError: See `get_meta`.
            BatchGoneError: See `get_meta`.

        Example:
            >>> client.seal("train_0", create=True)
            >>> client.await_batch(["prompt"], 2, "train_0", "update", timeout=5)
            (BatchMeta(size=0, partitions=[], fields=[], produced=0), True)
        """
        yield from self.attachment.learn()
        claim = self.claims.prepare(
            partition_id, task_name, data_fields, batch_size, sampling_config, _wait_of(timeout), quiet=True,
            finite=finite, hold=hold, lease=lease, replicas=replicas, ahead=ahead,
        )  # fmt: skip
        try:
            return (yield from self.claims.take(claim))
        except WaitTimeoutError:  # a call that took too long
            return BatchMeta(), False

    def await_ready(
        self,
        data_fields: Sequence[str] | str,
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling_config: Mapping[str, Any] | None = None,
        finite: bool = False,
        since: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Operation[Readiness]:
        """Wait until `await_batch` with the same arguments could be met. Deals nothing.

        Args:
            data_fields: See `await_batch`.
            batch_size: See `await_batch`.
            partition_id: See `await_batch`.
            task_name: See `await_batch`.
            sampling_config: See `await_batch`.
            finite: See `await_batch`.
            since: The partition version that an earlier call returned, to wait for a change after it. Default: none.
            timeout: Seconds to wait; 0 does not wait. Default: TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s).

        Returns:
            Whether such a fetch can never be met, and the version of the partition.

        Raises:
            InvalidArgumentError: An argument is not valid.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> client.await_ready(["prompt"], 2, "train_0", "update").ended
            False
        """
        yield from self.attachment.learn()
        claim = self.claims.prepare(
            partition_id, task_name, data_fields, batch_size, sampling_config, _wait_of(timeout), probe=True,
            finite=finite, since=since,
        )  # fmt: skip
        reply = yield from self._ask(claim, ClaimReply, None, parked=claim.wait)
        return Readiness(reply.ended, reply.version)

    def get_data(
        self,
        metadata: BatchMeta,
        *,
        layout: str = "jagged",
        shared: bool = False,
        device: torch.device | str | None = None,
        copy: bool = True,
        out: TensorDictBase | Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Operation[TensorDict]:
        """Return the values of the samples of a BatchMeta. `kv_batch_get` takes keys instead.

        Args:
            metadata: The samples and their fields. If it has no samples, the fields that it knows are returned, with no
                rows.
            layout: The form of rows of one or more dimensions: "jagged" (nested tensors), "dense" (stacked; requires
                equal shapes), "padded" (with zeros) or "list" (a list of tensors). Default: "jagged".
            shared: True: rows whose value is stored once share memory in the result, so that each such value is copied
                once. A field with such rows is returned in the form of `layout="list"`, whatever `layout` says. An
                in-place change of one of these rows changes the others in the result, and nothing in the store.
                Default: False, every row has memory of its own.
            device: The device of the returned tensors. They go there directly from the store if the backend supports it
                (docs/backends.md). Objects always go to the memory of the host. Default: the memory of the host.
            copy: False: a field of tensors whose rows are one after the other in one block of an arena of this node is
                returned as a view of the arena, for which nothing is copied. What is written to a view changes it in
                this process only. The space of cleared samples is in use until the last view of them ends
                ("Values without a copy" in docs/guides/values.md). Other fields are copied; `tq.is_view` says what a
                tensor is. Default: True, every field is copied.
            out: Tensors for the values of some fields, by field: a TensorDict or a dict. They must be contiguous, have
                the dtype and the shape [rows, ...] of the field, and may be pinned or on a device. They are filled and
                are in the result; if an error is raised, their content is undefined. Default: new tensors.
            timeout: See `TransferQueueClient`.

        Returns:
            The values, batch size [rows], in the order of the metadata. They are writable, and what is written to them
            does not change the store.

        Raises:
            StorageKeyNotFoundError: A sample was cleared, or does not have a field.
            InvalidArgumentError: `layout` is "dense" and shapes differ, `device` cannot be used, or a tensor of `out`
                does not fit.

        Example:
            >>> prompts = TensorDict({"prompt": torch.tensor([[1, 2], [3, 4]])}, batch_size=2)
            >>> meta = client.put(prompts, partition_id="train_0")
            >>> client.get_data(meta, layout="dense")["prompt"].tolist()
            [[1, 2], [3, 4]]
            >>> view = client.get_data(meta, layout="dense", copy=False)["prompt"]
            >>> tq.is_view(view), view.tolist()
            (True, [[1, 2], [3, 4]])
        """
        arguments.check_batch_meta(metadata)
        options = FetchOptions.of(layout, shared, device, copy, out)
        yield from self.attachment.learn()
        return (yield from self._values(metadata, options, timeout))

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
        shared: bool = False,
        device: torch.device | str | None = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Operation[tuple[TensorDict | None, BatchMeta, bool]]:
        """Wait for a task's next batch with its values: `await_batch` and `get_data` in one round trip.

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
            shared: See `get_data`.
            device: See `get_data`.
            copy: See `get_data`.
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
        options = FetchOptions.of(layout, shared, device, copy)
        yield from self.attachment.learn()
        claim = self.claims.prepare(
            partition_id, task_name, data_fields, batch_size, sampling_config, _wait_of(timeout), quiet=True,
            finite=finite, hold=hold, lease=lease, replicas=replicas, places=True,
        )  # fmt: skip
        try:
            reply = yield from self.claims.make(claim)
        except WaitTimeoutError:  # a call that took too long
            return None, BatchMeta(), False
        if not reply.rows:
            return None, self.claims.meta(partition_id, reply), reply.ended

        def read() -> Operation[tuple[TensorDict | None, BatchMeta, bool]]:
            meta = self.claims.meta(partition_id, reply, claim.lease)
            values = yield from self._values(meta, options, None, reply.places, task_name)
            return values, meta, reply.ended

        return (yield from self.claims.hand_over(claim, reply, read()))

    # ------------------------------------------------------------ shared

    def _values(
        self,
        metadata: BatchMeta,
        options: FetchOptions,
        timeout: float | None,
        places: LookupReply | None = None,
        task: str | None = None,
    ) -> Operation[TensorDict]:
        """See `get_data`. `places` has the known locations of the values; if they changed, they are looked up again."""
        if not len(metadata):
            fields = metadata._fields.values()
            tables = [field.name for field in fields if (field.extra or {}).get(TABLE)]
            columns = {
                field.name: column_of_no_rows(field, options.layout) for field in fields if field.name not in tables
            }
            none = nest_tables(table_of(columns, 0), tables)
            return none if options.device is None else none.to(options.device)
        names = metadata.field_names
        if not names:
            return TensorDict({}, batch_size=len(metadata))
        parts = metadata._split_by_partition()

        def look() -> Operation[LookupReply]:
            nonlocal places
            if places is not None:
                known, places = places, None
                return known
            replies = []
            for name, positions in parts:
                request = Lookup(name, metadata._rows()[positions].tobytes(), None, names, metadata._epoch)
                replies.append((yield from self.attachment.look_up(request, timeout)))
            return replies[0] if len(replies) == 1 else merge_lookups(replies, [positions for _, positions in parts])

        partitions = ", ".join(map(itemgetter(0), parts))
        return (yield from self._reader.read(look, options, partitions, task))


def _wait_of(timeout: float | None) -> float | None:
    """Return the wait of a fetch whose timeout is not an error."""
    return arguments.validated_seconds(get_metadata_timeout() if timeout is None else timeout)
