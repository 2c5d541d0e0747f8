"""TransferQueueClient's methods. Made by tools/generate_surface.py out of the client's operations."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.client.arguments import Columns, DataParser, Tags
from transfer_queue.client.changes import PartitionChange
from transfer_queue.client.checkpoint_data import Cut
from transfer_queue.client.operations import Operations, Readiness
from transfer_queue.client.transfers import Operation
from transfer_queue.conditions import ConsumedBy
from transfer_queue.messages import SystemStatus
from transfer_queue.metadata import BatchMeta, KVBatchMeta

T = TypeVar("T")


class Surface(ABC):
    """Each operation twice: blocking, and awaitable as `async_...`."""

    @property
    @abstractmethod
    def _operations(self) -> Operations:
        """The operations of this process's client."""

    @abstractmethod
    def _run(self, operation: Operation[T]) -> T:
        """Runs an operation in this thread."""

    @abstractmethod
    async def _run_async(self, operation: Operation[T]) -> T:
        """Runs an operation in this event loop."""

    async def _run_threaded(self, operation: Operation[T]) -> T:
        """Runs an operation that reads or writes files: its calls in this event loop, its own work in a thread."""
        return await self._run_async(operation)

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
    ) -> BatchMeta:
        """Metadata of samples of a partition.

        mode "fetch": `batch_size` samples that have all `data_fields` and that `task_name` has not consumed, chosen
        by the sampler, which gets `sampling_config` (dp_rank, batch_index, ...); they count as consumed then.
        mode "insert": reserves `batch_size` new samples. mode "force_fetch": all samples, nothing is consumed,
        `production_status` 1 where those of the fields that exist are produced.

        timeout: seconds that a fetch waits for samples. None: with `polling_mode: true` it answers at once with an
        empty BatchMeta where it cannot be met; else it waits TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s). An insert
        waits so long for room (None: not at all).
        hold: this fetch does not say that the task is through with the batch before it (see `finish`).
        lease: seconds for which the samples are claimed instead of consumed, renewed in the background while anything
        refers to the metadata. `ack` makes them consumed, `nack` gives them back; so does the end of the lease, after
        which they are delivered again: those of a rank-consistent sampler under the same (dp_rank, batch_index),
        others to whoever asks. `metadata.deliveries` says how often. Samples delivered `max_deliveries` times without
        an ack are set aside. replicas: a rank-consistent batch is consumed when so many who fetched it acknowledged it
        (None: the partition's replicas).

        Raises:
            WaitTimeoutError: the wait ended (a TimeoutError and a RuntimeError); it names what is nearest to ready.
            InvalidArgumentError: the arguments cannot be right, or this batch was dealt with another batch_size.
            BatchGoneError: this dealt batch's rows are cleared. UnknownPartitionError: force_fetch of none.
        """
        return self._run(
            self._operations.get_meta(
                data_fields,
                batch_size,
                partition_id,
                mode,
                task_name,
                sampling_config,
                hold=hold,
                lease=lease,
                replicas=replicas,
                timeout=timeout,
            )
        )

    async def async_get_meta(
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
    ) -> BatchMeta:
        """Metadata of samples of a partition.

        mode "fetch": `batch_size` samples that have all `data_fields` and that `task_name` has not consumed, chosen
        by the sampler, which gets `sampling_config` (dp_rank, batch_index, ...); they count as consumed then.
        mode "insert": reserves `batch_size` new samples. mode "force_fetch": all samples, nothing is consumed,
        `production_status` 1 where those of the fields that exist are produced.

        timeout: seconds that a fetch waits for samples. None: with `polling_mode: true` it answers at once with an
        empty BatchMeta where it cannot be met; else it waits TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s). An insert
        waits so long for room (None: not at all).
        hold: this fetch does not say that the task is through with the batch before it (see `finish`).
        lease: seconds for which the samples are claimed instead of consumed, renewed in the background while anything
        refers to the metadata. `ack` makes them consumed, `nack` gives them back; so does the end of the lease, after
        which they are delivered again: those of a rank-consistent sampler under the same (dp_rank, batch_index),
        others to whoever asks. `metadata.deliveries` says how often. Samples delivered `max_deliveries` times without
        an ack are set aside. replicas: a rank-consistent batch is consumed when so many who fetched it acknowledged it
        (None: the partition's replicas).

        Raises:
            WaitTimeoutError: the wait ended (a TimeoutError and a RuntimeError); it names what is nearest to ready.
            InvalidArgumentError: the arguments cannot be right, or this batch was dealt with another batch_size.
            BatchGoneError: this dealt batch's rows are cleared. UnknownPartitionError: force_fetch of none.
        """
        return await self._run_async(
            self._operations.get_meta(
                data_fields,
                batch_size,
                partition_id,
                mode,
                task_name,
                sampling_config,
                hold=hold,
                lease=lease,
                replicas=replicas,
                timeout=timeout,
            )
        )

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
    ) -> tuple[BatchMeta, bool]:
        """(metadata, ended) of a fetch that waits in any mode, at most `timeout` seconds, and raises no timeout.

        The metadata is empty where nothing came. ended: nothing ever will, because the partition is sealed and
        everything is dealt, or because it is `finite` and the task has consumed it wholly. timeout: 0 asks and does
        not wait; None waits TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s). hold, lease, replicas: as in `get_meta`.
        ahead: by how many batches this one is ahead of the batch that the caller needs now, for example if the workers
        of a loader fetch ahead. If a rank-consistent sampler does not know the number of dp_ranks, it deals such a
        batch only if other ranks do not need these samples.
        """
        return self._run(
            self._operations.await_batch(
                data_fields,
                batch_size,
                partition_id,
                task_name,
                sampling_config,
                finite,
                hold=hold,
                lease=lease,
                replicas=replicas,
                ahead=ahead,
                timeout=timeout,
            )
        )

    async def async_await_batch(
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
    ) -> tuple[BatchMeta, bool]:
        """(metadata, ended) of a fetch that waits in any mode, at most `timeout` seconds, and raises no timeout.

        The metadata is empty where nothing came. ended: nothing ever will, because the partition is sealed and
        everything is dealt, or because it is `finite` and the task has consumed it wholly. timeout: 0 asks and does
        not wait; None waits TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s). hold, lease, replicas: as in `get_meta`.
        ahead: by how many batches this one is ahead of the batch that the caller needs now, for example if the workers
        of a loader fetch ahead. If a rank-consistent sampler does not know the number of dp_ranks, it deals such a
        batch only if other ranks do not need these samples.
        """
        return await self._run_async(
            self._operations.await_batch(
                data_fields,
                batch_size,
                partition_id,
                task_name,
                sampling_config,
                finite,
                hold=hold,
                lease=lease,
                replicas=replicas,
                ahead=ahead,
                timeout=timeout,
            )
        )

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
    ) -> Readiness:
        """Waits, at most `timeout` seconds, until `await_batch` with these arguments could be met; deals nothing.

        since: the version of the partition that an earlier call gave; it then waits for a change after that, too.
        timeout: as in `await_batch`.

        Returns:
            ended: such a fetch can never be met. version: of the partition, which grows with every change in it.
        """
        return self._run(
            self._operations.await_ready(
                data_fields, batch_size, partition_id, task_name, sampling_config, finite, since, timeout=timeout
            )
        )

    async def async_await_ready(
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
    ) -> Readiness:
        """Waits, at most `timeout` seconds, until `await_batch` with these arguments could be met; deals nothing.

        since: the version of the partition that an earlier call gave; it then waits for a change after that, too.
        timeout: as in `await_batch`.

        Returns:
            ended: such a fetch can never be met. version: of the partition, which grows with every change in it.
        """
        return await self._run_async(
            self._operations.await_ready(
                data_fields, batch_size, partition_id, task_name, sampling_config, finite, since, timeout=timeout
            )
        )

    def wait_for_change(
        self,
        partition_id: str,
        since: int | None = None,
        where: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> PartitionChange:
        """Waits, at most `timeout` seconds, until samples of a partition change, and tells which; false if none did.

        A sample changes when it gets a field, a tag or a key. What is told is the state now: of several changes of a
        sample the last, and no sample is left out however late the question comes. It also tells the samples that
        were cleared, and ends when the partition is sealed or dropped. A partition that does not exist is waited for.

        since: the version that an earlier call gave. None: all samples there are; it waits only where there is none.
        where: entries that a sample's tag must have for it to be told, with equal values: numbers by their value
        (1 is 1.0, True is not 1), what only Python knows (tuples, objects) by its bytes. {} or None: every sample.
        timeout: as in `await_batch`.

        Raises:
            InvalidArgumentError: where is no dict of tag entries, or since no version.
        """
        return self._run(self._operations.wait_for_change(partition_id, since, where, timeout=timeout))

    async def async_wait_for_change(
        self,
        partition_id: str,
        since: int | None = None,
        where: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> PartitionChange:
        """Waits, at most `timeout` seconds, until samples of a partition change, and tells which; false if none did.

        A sample changes when it gets a field, a tag or a key. What is told is the state now: of several changes of a
        sample the last, and no sample is left out however late the question comes. It also tells the samples that
        were cleared, and ends when the partition is sealed or dropped. A partition that does not exist is waited for.

        since: the version that an earlier call gave. None: all samples there are; it waits only where there is none.
        where: entries that a sample's tag must have for it to be told, with equal values: numbers by their value
        (1 is 1.0, True is not 1), what only Python knows (tuples, objects) by its bytes. {} or None: every sample.
        timeout: as in `await_batch`.

        Raises:
            InvalidArgumentError: where is no dict of tag entries, or since no version.
        """
        return await self._run_async(self._operations.wait_for_change(partition_id, since, where, timeout=timeout))

    def put(
        self,
        data: TensorDictBase,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
        *,
        group_ids: Sequence[str | int] | None = None,
        tags: Tags | None = None,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Writes columns: new samples of `partition_id`, or fields of the samples that `metadata` names.

        data: TensorDict [rows]. With metadata its rows are the samples in their order; tag entries changed since
        the metadata was fetched are merged in, too. data_parser: turns columns into others before the write.
        group_ids: one a row, the prompt whose sample it is. tags: one dict a row, to be merged; they become visible
        together with the values, so that no sampler sees a sample without its tag.
        timeout: seconds to wait for space; None: no longer than freed space takes to come (0.25 s).

        Returns:
            The given metadata with the fields added, or the metadata of the new samples. A put of no rows does nothing
            and returns empty metadata.

        Raises:
            InvalidArgumentError: sizes do not match, or the values do not match the field's live ones
            (FieldTypeError). CapacityError: no room. SealedError: no new rows. StorageKeyNotFoundError: a sample
            was cleared. UncarriableValueError: a value cannot be stored. The put left nothing then, with one
            exception: metadata of several partitions is published partition by partition, and what the controller
            refuses in one leaves what it took for those before it.
        """
        return self._run(
            self._operations.put(
                data, metadata, partition_id, data_parser, group_ids=group_ids, tags=tags, timeout=timeout
            )
        )

    async def async_put(
        self,
        data: TensorDictBase,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
        *,
        group_ids: Sequence[str | int] | None = None,
        tags: Tags | None = None,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Writes columns: new samples of `partition_id`, or fields of the samples that `metadata` names.

        data: TensorDict [rows]. With metadata its rows are the samples in their order; tag entries changed since
        the metadata was fetched are merged in, too. data_parser: turns columns into others before the write.
        group_ids: one a row, the prompt whose sample it is. tags: one dict a row, to be merged; they become visible
        together with the values, so that no sampler sees a sample without its tag.
        timeout: seconds to wait for space; None: no longer than freed space takes to come (0.25 s).

        Returns:
            The given metadata with the fields added, or the metadata of the new samples. A put of no rows does nothing
            and returns empty metadata.

        Raises:
            InvalidArgumentError: sizes do not match, or the values do not match the field's live ones
            (FieldTypeError). CapacityError: no room. SealedError: no new rows. StorageKeyNotFoundError: a sample
            was cleared. UncarriableValueError: a value cannot be stored. The put left nothing then, with one
            exception: metadata of several partitions is published partition by partition, and what the controller
            refuses in one leaves what it took for those before it.
        """
        return await self._run_async(
            self._operations.put(
                data, metadata, partition_id, data_parser, group_ids=group_ids, tags=tags, timeout=timeout
            )
        )

    def set_custom_meta(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Replaces the tag of each of these samples by the metadata's custom_meta."""
        return self._run(self._operations.set_custom_meta(metadata, timeout=timeout))

    async def async_set_custom_meta(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Replaces the tag of each of these samples by the metadata's custom_meta."""
        return await self._run_async(self._operations.set_custom_meta(metadata, timeout=timeout))

    def clear_samples(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Drops these samples with their values, keys and tags; those that are gone already are fine."""
        return self._run(self._operations.clear_samples(metadata, timeout=timeout))

    async def async_clear_samples(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Drops these samples with their values, keys and tags; those that are gone already are fine."""
        return await self._run_async(self._operations.clear_samples(metadata, timeout=timeout))

    def clear_partition(self, partition_id: str, *, timeout: float | None = None) -> None:
        """Drops a partition and all its samples; an unknown one is fine."""
        return self._run(self._operations.clear_partition(partition_id, timeout=timeout))

    async def async_clear_partition(self, partition_id: str, *, timeout: float | None = None) -> None:
        """Drops a partition and all its samples; an unknown one is fine."""
        return await self._run_async(self._operations.clear_partition(partition_id, timeout=timeout))

    def create_partition(
        self,
        partition_id: str,
        group_size: int | None = None,
        producers: int = 1,
        *,
        free_when: ConsumedBy | Sequence[str] | None = None,
        replicas: int = 1,
        max_staleness: int | None = None,
        rows_per_version: int | None = None,
        keep_rows: int | None = None,
        keep_bytes: int | None = None,
        keep_seconds: float | None = None,
        max_deliveries: int | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Makes a partition ahead of its first sample; False if it exists.

        Raises InvalidArgumentError, which names both settings, if the partition exists with other settings than those
        given here. Arguments that have their defaults are not compared.

        group_size: samples of each declared group. producers: how many `seal`s seal it.
        free_when: `consumed_by["reward", "update"]`: a sample is cleared by itself once each of these tasks has
        consumed it and is through with it (see `finish`); replicas: by so many readers of each sample.
        max_staleness, rows_per_version: new samples are taken in while fewer than (version + max_staleness + 1) *
        rows_per_version were; `set_policy_version` says the version. What is beyond waits, given a timeout, or is a
        StalenessError; `get_meta(mode="insert", timeout=...)` so holds back a producer before it generates.
        keep_rows, keep_bytes, keep_seconds: the oldest samples beyond these are dropped, whole groups together;
        `status` counts them.
        max_deliveries: samples whose leases ended so often without an ack are set aside (0: never; None: the system's
        controller.max_deliveries).
        """
        return self._run(
            self._operations.create_partition(
                partition_id,
                group_size,
                producers,
                free_when=free_when,
                replicas=replicas,
                max_staleness=max_staleness,
                rows_per_version=rows_per_version,
                keep_rows=keep_rows,
                keep_bytes=keep_bytes,
                keep_seconds=keep_seconds,
                max_deliveries=max_deliveries,
                timeout=timeout,
            )
        )

    async def async_create_partition(
        self,
        partition_id: str,
        group_size: int | None = None,
        producers: int = 1,
        *,
        free_when: ConsumedBy | Sequence[str] | None = None,
        replicas: int = 1,
        max_staleness: int | None = None,
        rows_per_version: int | None = None,
        keep_rows: int | None = None,
        keep_bytes: int | None = None,
        keep_seconds: float | None = None,
        max_deliveries: int | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Makes a partition ahead of its first sample; False if it exists.

        Raises InvalidArgumentError, which names both settings, if the partition exists with other settings than those
        given here. Arguments that have their defaults are not compared.

        group_size: samples of each declared group. producers: how many `seal`s seal it.
        free_when: `consumed_by["reward", "update"]`: a sample is cleared by itself once each of these tasks has
        consumed it and is through with it (see `finish`); replicas: by so many readers of each sample.
        max_staleness, rows_per_version: new samples are taken in while fewer than (version + max_staleness + 1) *
        rows_per_version were; `set_policy_version` says the version. What is beyond waits, given a timeout, or is a
        StalenessError; `get_meta(mode="insert", timeout=...)` so holds back a producer before it generates.
        keep_rows, keep_bytes, keep_seconds: the oldest samples beyond these are dropped, whole groups together;
        `status` counts them.
        max_deliveries: samples whose leases ended so often without an ack are set aside (0: never; None: the system's
        controller.max_deliveries).
        """
        return await self._run_async(
            self._operations.create_partition(
                partition_id,
                group_size,
                producers,
                free_when=free_when,
                replicas=replicas,
                max_staleness=max_staleness,
                rows_per_version=rows_per_version,
                keep_rows=keep_rows,
                keep_bytes=keep_bytes,
                keep_seconds=keep_seconds,
                max_deliveries=max_deliveries,
                timeout=timeout,
            )
        )

    def drop(
        self,
        partition_id: str,
        groups: Sequence[str | int] | str | int | None = None,
        metadata: BatchMeta | None = None,
        *,
        reason: str,
        timeout: float | None = None,
    ) -> int:
        """Drops samples, whole declared groups or those of metadata, and counts them under the reason.

        Members of a dropped group that are put later are dropped, too, where the partition has a group_size. Unknown
        groups, and samples that are gone, are fine. Logs a warning if the partition does not exist. Returns how many
        samples were dropped.
        """
        return self._run(self._operations.drop(partition_id, groups, metadata, reason=reason, timeout=timeout))

    async def async_drop(
        self,
        partition_id: str,
        groups: Sequence[str | int] | str | int | None = None,
        metadata: BatchMeta | None = None,
        *,
        reason: str,
        timeout: float | None = None,
    ) -> int:
        """Drops samples, whole declared groups or those of metadata, and counts them under the reason.

        Members of a dropped group that are put later are dropped, too, where the partition has a group_size. Unknown
        groups, and samples that are gone, are fine. Logs a warning if the partition does not exist. Returns how many
        samples were dropped.
        """
        return await self._run_async(
            self._operations.drop(partition_id, groups, metadata, reason=reason, timeout=timeout)
        )

    def finish(self, metadata: BatchMeta, task_name: str, *, timeout: float | None = None) -> None:
        """Says that the task is through with these samples, which were fetched for it.

        It counts where the partition frees samples by itself (`create_partition(free_when=...)`). A fetch says it of
        what the same client was given before for the same task and dp_rank, unless it is made with hold=True.
        """
        return self._run(self._operations.finish(metadata, task_name, timeout=timeout))

    async def async_finish(self, metadata: BatchMeta, task_name: str, *, timeout: float | None = None) -> None:
        """Says that the task is through with these samples, which were fetched for it.

        It counts where the partition frees samples by itself (`create_partition(free_when=...)`). A fetch says it of
        what the same client was given before for the same task and dp_rank, unless it is made with hold=True.
        """
        return await self._run_async(self._operations.finish(metadata, task_name, timeout=timeout))

    def set_policy_version(self, partition_id: str, version: int, *, timeout: float | None = None) -> None:
        """Says that the policy has reached this version: producers may go on, and staleness is counted from it.

        Raises:
            InvalidArgumentError: it would go back. UnknownPartitionError: create the partition first.
        """
        return self._run(self._operations.set_policy_version(partition_id, version, timeout=timeout))

    async def async_set_policy_version(self, partition_id: str, version: int, *, timeout: float | None = None) -> None:
        """Says that the policy has reached this version: producers may go on, and staleness is counted from it.

        Raises:
            InvalidArgumentError: it would go back. UnknownPartitionError: create the partition first.
        """
        return await self._run_async(self._operations.set_policy_version(partition_id, version, timeout=timeout))

    def want(self, partition_id: str, groups: int, task_name: str, *, timeout: float | None = None) -> None:
        """Says how many whole groups the task wants to be there or on their way; 0 takes it back.

        It holds until it is changed: as the task consumes groups, or groups are dropped, producers are told of as
        many new ones (`wanted`).
        """
        return self._run(self._operations.want(partition_id, groups, task_name, timeout=timeout))

    async def async_want(self, partition_id: str, groups: int, task_name: str, *, timeout: float | None = None) -> None:
        """Says how many whole groups the task wants to be there or on their way; 0 takes it back.

        It holds until it is changed: as the task consumes groups, or groups are dropped, producers are told of as
        many new ones (`wanted`).
        """
        return await self._run_async(self._operations.want(partition_id, groups, task_name, timeout=timeout))

    def wanted(
        self, partition_id: str, task_name: str, most: int | None = None, *, timeout: float | None = None
    ) -> int:
        """How many groups the task still misses, beyond those that are there, begun, or promised by a producer.

        most: this producer takes up to so many upon itself, which others are not told of then; the promise ends as
        it puts (or reserves) their samples, or when it has gone. timeout: seconds to wait while none is missing
        (None, 0: none); 0 is the answer then.
        """
        return self._run(self._operations.wanted(partition_id, task_name, most, timeout=timeout))

    async def async_wanted(
        self, partition_id: str, task_name: str, most: int | None = None, *, timeout: float | None = None
    ) -> int:
        """How many groups the task still misses, beyond those that are there, begun, or promised by a producer.

        most: this producer takes up to so many upon itself, which others are not told of then; the promise ends as
        it puts (or reserves) their samples, or when it has gone. timeout: seconds to wait while none is missing
        (None, 0: none); 0 is the answer then.
        """
        return await self._run_async(self._operations.wanted(partition_id, task_name, most, timeout=timeout))

    def seal(self, partition_id: str, create: bool = False, *, timeout: float | None = None) -> None:
        """Declare that this producer puts no new samples, so that loaders end. It may still add fields to samples.

        If the partition does not exist, it is made and sealed, so that consumers do not wait for its samples. Unless
        `create` is set, a warning names it and the nearest partitions that exist.

        Args:
            partition_id: The partition.
            create: Do not warn if the partition does not exist yet. Default: False.
            timeout: See `TransferQueueClient`.
        """
        return self._run(self._operations.seal(partition_id, create, timeout=timeout))

    async def async_seal(self, partition_id: str, create: bool = False, *, timeout: float | None = None) -> None:
        """Declare that this producer puts no new samples, so that loaders end. It may still add fields to samples.

        If the partition does not exist, it is made and sealed, so that consumers do not wait for its samples. Unless
        `create` is set, a warning names it and the nearest partitions that exist.

        Args:
            partition_id: The partition.
            create: Do not warn if the partition does not exist yet. Default: False.
            timeout: See `TransferQueueClient`.
        """
        return await self._run_async(self._operations.seal(partition_id, create, timeout=timeout))

    def drain_unit(self, unit: int, *, undo: bool = False, timeout: float | None = None) -> None:
        """Moves everything off a storage unit, which gets nothing new from now on; returns when it holds nothing.

        unit: its number, from 0 on. undo: it is written to again. timeout: seconds to wait (None: no limit); moving
        goes on when they are over.

        Raises:
            InvalidArgumentError: there is no such unit, or too few others would be left to write to.
        """
        return self._run(self._operations.drain_unit(unit, undo=undo, timeout=timeout))

    async def async_drain_unit(self, unit: int, *, undo: bool = False, timeout: float | None = None) -> None:
        """Moves everything off a storage unit, which gets nothing new from now on; returns when it holds nothing.

        unit: its number, from 0 on. undo: it is written to again. timeout: seconds to wait (None: no limit); moving
        goes on when they are over.

        Raises:
            InvalidArgumentError: there is no such unit, or too few others would be left to write to.
        """
        return await self._run_async(self._operations.drain_unit(unit, undo=undo, timeout=timeout))

    def get_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(int64 indexes [rows], int8 [rows, fields]): 1 where a sample has a field; ascending, reserved rows included.

        (None, None) for an unknown partition or field.
        """
        return self._run(self._operations.get_production_status(data_fields, partition_id, timeout=timeout))

    async def async_get_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(int64 indexes [rows], int8 [rows, fields]): 1 where a sample has a field; ascending, reserved rows included.

        (None, None) for an unknown partition or field.
        """
        return await self._run_async(self._operations.get_production_status(data_fields, partition_id, timeout=timeout))

    def get_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(int64 indexes [rows], int8 [rows]): 1 where the task has consumed a sample; (None, None) if unknown."""
        return self._run(self._operations.get_consumption_status(task_name, partition_id, timeout=timeout))

    async def async_get_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(int64 indexes [rows], int8 [rows]): 1 where the task has consumed a sample; (None, None) if unknown."""
        return await self._run_async(self._operations.get_consumption_status(task_name, partition_id, timeout=timeout))

    def check_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Whether every sample has every one of these fields; False for an unknown partition or field."""
        return self._run(self._operations.check_production_status(data_fields, partition_id, timeout=timeout))

    async def async_check_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Whether every sample has every one of these fields; False for an unknown partition or field."""
        return await self._run_async(
            self._operations.check_production_status(data_fields, partition_id, timeout=timeout)
        )

    def check_consumption_status(self, task_name: str, partition_id: str, *, timeout: float | None = None) -> bool:
        """Whether the task has consumed every sample, those cleared since too; False for an unknown partition."""
        return self._run(self._operations.check_consumption_status(task_name, partition_id, timeout=timeout))

    async def async_check_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Whether the task has consumed every sample, those cleared since too; False for an unknown partition."""
        return await self._run_async(
            self._operations.check_consumption_status(task_name, partition_id, timeout=timeout)
        )

    def reset_consumption(
        self, partition_id: str, task_name: str | None = None, *, timeout: float | None = None
    ) -> bool:
        """Let a task (None: every task) consume the partition again. Forgets its dealt batches. Returns True.

        Logs a warning if the partition does not exist.
        """
        return self._run(self._operations.reset_consumption(partition_id, task_name, timeout=timeout))

    async def async_reset_consumption(
        self, partition_id: str, task_name: str | None = None, *, timeout: float | None = None
    ) -> bool:
        """Let a task (None: every task) consume the partition again. Forgets its dealt batches. Returns True.

        Logs a warning if the partition does not exist.
        """
        return await self._run_async(self._operations.reset_consumption(partition_id, task_name, timeout=timeout))

    def get_partition_list(self, *, timeout: float | None = None) -> list[str]:
        """The names of all partitions, in order of creation."""
        return self._run(self._operations.get_partition_list(timeout=timeout))

    async def async_get_partition_list(self, *, timeout: float | None = None) -> list[str]:
        """The names of all partitions, in order of creation."""
        return await self._run_async(self._operations.get_partition_list(timeout=timeout))

    def explain(
        self,
        partition_id: str,
        global_index: int | None = None,
        key: str | None = None,
        task: str | None = None,
        fields: Sequence[str] | str | None = None,
        *,
        batch_size: int | None = None,
        sampling_config: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> str:
        """Says in words why a sample is not handed out: missing fields, the batch that took it, its group, ...

        If no sample is named, describes the rows of `task` and `fields` that lack the fewest fields. With `batch_size`,
        describes why a fetch of `batch_size` samples with this `sampling_config` waits, and which dp_ranks are ahead.
        """
        return self._run(
            self._operations.explain(
                partition_id,
                global_index,
                key,
                task,
                fields,
                batch_size=batch_size,
                sampling_config=sampling_config,
                timeout=timeout,
            )
        )

    async def async_explain(
        self,
        partition_id: str,
        global_index: int | None = None,
        key: str | None = None,
        task: str | None = None,
        fields: Sequence[str] | str | None = None,
        *,
        batch_size: int | None = None,
        sampling_config: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> str:
        """Says in words why a sample is not handed out: missing fields, the batch that took it, its group, ...

        If no sample is named, describes the rows of `task` and `fields` that lack the fewest fields. With `batch_size`,
        describes why a fetch of `batch_size` samples with this `sampling_config` waits, and which dp_ranks are ahead.
        """
        return await self._run_async(
            self._operations.explain(
                partition_id,
                global_index,
                key,
                task,
                fields,
                batch_size=batch_size,
                sampling_config=sampling_config,
                timeout=timeout,
            )
        )

    def status(self, *, timeout: float | None = None) -> SystemStatus:
        """Progress of every partition by field and task, and the controller's counters."""
        return self._run(self._operations.status(timeout=timeout))

    async def async_status(self, *, timeout: float | None = None) -> SystemStatus:
        """Progress of every partition by field and task, and the controller's counters."""
        return await self._run_async(self._operations.status(timeout=timeout))

    def get_data(
        self,
        metadata: BatchMeta,
        *,
        layout: str = "jagged",
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """The values of these samples' fields, rows in the order of the metadata, as a TensorDict [rows].

        If the metadata has no samples, returns the fields that it knows, with no rows.

        layout: how rows of one or more dimensions come: "jagged" (nested tensors), "dense" (stacked; ValueError where
        shapes differ), "padded" (with zeros), "list" (a list of tensors). device: where tensors come, straight from the
        store where that can be (docs/backends.md); None: into the host's memory, as objects always do.

        Raises:
            StorageKeyNotFoundError: a sample was cleared, or lacks a field.
        """
        return self._run(self._operations.get_data(metadata, layout=layout, device=device, timeout=timeout))

    async def async_get_data(
        self,
        metadata: BatchMeta,
        *,
        layout: str = "jagged",
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """The values of these samples' fields, rows in the order of the metadata, as a TensorDict [rows].

        If the metadata has no samples, returns the fields that it knows, with no rows.

        layout: how rows of one or more dimensions come: "jagged" (nested tensors), "dense" (stacked; ValueError where
        shapes differ), "padded" (with zeros), "list" (a list of tensors). device: where tensors come, straight from the
        store where that can be (docs/backends.md); None: into the host's memory, as objects always do.

        Raises:
            StorageKeyNotFoundError: a sample was cleared, or lacks a field.
        """
        return await self._run_async(self._operations.get_data(metadata, layout=layout, device=device, timeout=timeout))

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
    ) -> tuple[TensorDict | None, BatchMeta, bool]:
        """(values, metadata, ended): `await_batch`, and `get_data` of what came, in one round trip.

        The values are those of the moment in which the samples were dealt, or later ones; None where nothing came.

        Raises:
            StorageKeyNotFoundError: a sample of a batch that was dealt before was cleared. As `await_batch`.
        """
        return self._run(
            self._operations.await_data(
                data_fields,
                batch_size,
                partition_id,
                task_name,
                sampling_config,
                finite,
                hold=hold,
                lease=lease,
                replicas=replicas,
                layout=layout,
                device=device,
                timeout=timeout,
            )
        )

    async def async_await_data(
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
    ) -> tuple[TensorDict | None, BatchMeta, bool]:
        """(values, metadata, ended): `await_batch`, and `get_data` of what came, in one round trip.

        The values are those of the moment in which the samples were dealt, or later ones; None where nothing came.

        Raises:
            StorageKeyNotFoundError: a sample of a batch that was dealt before was cleared. As `await_batch`.
        """
        return await self._run_async(
            self._operations.await_data(
                data_fields,
                batch_size,
                partition_id,
                task_name,
                sampling_config,
                finite,
                hold=hold,
                lease=lease,
                replicas=replicas,
                layout=layout,
                device=device,
                timeout=timeout,
            )
        )

    def kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False, *, timeout: float | None = None
    ) -> BatchMeta:
        """The metadata of the samples of these keys, in their order, with the fields that all of them have.

        Unknown keys are left out, or made (create=True).
        """
        return self._run(self._operations.kv_retrieve_meta(keys, partition_id, create, timeout=timeout))

    async def async_kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False, *, timeout: float | None = None
    ) -> BatchMeta:
        """The metadata of the samples of these keys, in their order, with the fields that all of them have.

        Unknown keys are left out, or made (create=True).
        """
        return await self._run_async(self._operations.kv_retrieve_meta(keys, partition_id, create, timeout=timeout))

    def kv_retrieve_keys(
        self, global_indexes: Sequence[int] | int, partition_id: str, *, timeout: float | None = None
    ) -> list[str | None]:
        """The key of each of these samples, None for one without; UnknownPartitionError for an unknown partition."""
        return self._run(self._operations.kv_retrieve_keys(global_indexes, partition_id, timeout=timeout))

    async def async_kv_retrieve_keys(
        self, global_indexes: Sequence[int] | int, partition_id: str, *, timeout: float | None = None
    ) -> list[str | None]:
        """The key of each of these samples, None for one without; UnknownPartitionError for an unknown partition."""
        return await self._run_async(self._operations.kv_retrieve_keys(global_indexes, partition_id, timeout=timeout))

    def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: Columns | None = None,
        tag: Mapping[str, Any] | None = None,
        data_parser: DataParser | None = None,
        *,
        group_id: str | int | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Puts one sample under a key: adds or replaces just these fields, and merges the tag.

        fields: a dict (a tensor is the sample's row, anything else an object; if the field holds tensors, arrays
        and numbers become tensors) or a TensorDict of batch size 1.
        tag: entries to merge; `tq.DELETE` as a value removes an entry. group_id: the prompt it is a sample of.
        timeout: seconds to wait for space; None: no longer than freed space takes to come (0.25 s).

        Raises:
            InvalidArgumentError: neither fields nor tag, or fields of another kind or size; FieldTypeError,
            CapacityError, SealedError, UncarriableValueError as `kv_batch_put`.
        """
        return self._run(
            self._operations.kv_put(key, partition_id, fields, tag, data_parser, group_id=group_id, timeout=timeout)
        )

    async def async_kv_put(
        self,
        key: str,
        partition_id: str,
        fields: Columns | None = None,
        tag: Mapping[str, Any] | None = None,
        data_parser: DataParser | None = None,
        *,
        group_id: str | int | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Puts one sample under a key: adds or replaces just these fields, and merges the tag.

        fields: a dict (a tensor is the sample's row, anything else an object; if the field holds tensors, arrays
        and numbers become tensors) or a TensorDict of batch size 1.
        tag: entries to merge; `tq.DELETE` as a value removes an entry. group_id: the prompt it is a sample of.
        timeout: seconds to wait for space; None: no longer than freed space takes to come (0.25 s).

        Raises:
            InvalidArgumentError: neither fields nor tag, or fields of another kind or size; FieldTypeError,
            CapacityError, SealedError, UncarriableValueError as `kv_batch_put`.
        """
        return await self._run_async(
            self._operations.kv_put(key, partition_id, fields, tag, data_parser, group_id=group_id, timeout=timeout)
        )

    def kv_batch_put(
        self,
        keys: Sequence[str] | str,
        partition_id: str,
        fields: Columns | None = None,
        tags: Tags | None = None,
        data_parser: DataParser | None = None,
        *,
        group_ids: Sequence[str | int] | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Puts samples under keys: adds or replaces just these fields, and merges the tags.

        fields: columns, one row a key; None writes tags alone. tags: one dict a key; `tq.DELETE` as a value removes
        an entry. data_parser: turns columns into others before the write. group_ids: one a key, the prompt whose
        sample it is. timeout: seconds to wait for space; None: no longer than freed space takes to come (0.25 s).

        Returns:
            Keys, merged tags, and the fields that every one of these keys has after the put. A put of no keys does
            nothing and returns empty metadata.

        Raises:
            InvalidArgumentError: lengths differ, keys repeat, or neither fields nor tags are given; FieldTypeError: a
            value does not match the field's live ones. CapacityError: no room. SealedError: no new
            rows. UncarriableValueError: a value cannot be stored. The put left nothing then.
        """
        return self._run(
            self._operations.kv_batch_put(
                keys, partition_id, fields, tags, data_parser, group_ids=group_ids, timeout=timeout
            )
        )

    async def async_kv_batch_put(
        self,
        keys: Sequence[str] | str,
        partition_id: str,
        fields: Columns | None = None,
        tags: Tags | None = None,
        data_parser: DataParser | None = None,
        *,
        group_ids: Sequence[str | int] | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Puts samples under keys: adds or replaces just these fields, and merges the tags.

        fields: columns, one row a key; None writes tags alone. tags: one dict a key; `tq.DELETE` as a value removes
        an entry. data_parser: turns columns into others before the write. group_ids: one a key, the prompt whose
        sample it is. timeout: seconds to wait for space; None: no longer than freed space takes to come (0.25 s).

        Returns:
            Keys, merged tags, and the fields that every one of these keys has after the put. A put of no keys does
            nothing and returns empty metadata.

        Raises:
            InvalidArgumentError: lengths differ, keys repeat, or neither fields nor tags are given; FieldTypeError: a
            value does not match the field's live ones. CapacityError: no room. SealedError: no new
            rows. UncarriableValueError: a value cannot be stored. The put left nothing then.
        """
        return await self._run_async(
            self._operations.kv_batch_put(
                keys, partition_id, fields, tags, data_parser, group_ids=group_ids, timeout=timeout
            )
        )

    def kv_batch_get(
        self,
        keys: Sequence[str] | str,
        partition_id: str,
        select_fields: Sequence[str] | str | None = None,
        *,
        missing: str = "drop",
        layout: str = "jagged",
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """The values of these keys' samples, rows in the order of the keys; consumes nothing.

        Unknown keys are left out, and so are fields that not all of the found keys have. One warning names what was
        left out.

        Args:
            select_fields: The fields to return. Default: all that every found key has.
            missing: "drop" leaves out what is missing, "error" raises instead.
            layout: See `get_data`.
            device: See `get_data`.

        Raises:
            InvalidArgumentError: None of the keys is found ("not found"), or they share no field ("not ready"), or
                anything is missing and `missing` is "error".
        """
        return self._run(
            self._operations.kv_batch_get(
                keys, partition_id, select_fields, missing=missing, layout=layout, device=device, timeout=timeout
            )
        )

    async def async_kv_batch_get(
        self,
        keys: Sequence[str] | str,
        partition_id: str,
        select_fields: Sequence[str] | str | None = None,
        *,
        missing: str = "drop",
        layout: str = "jagged",
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """The values of these keys' samples, rows in the order of the keys; consumes nothing.

        Unknown keys are left out, and so are fields that not all of the found keys have. One warning names what was
        left out.

        Args:
            select_fields: The fields to return. Default: all that every found key has.
            missing: "drop" leaves out what is missing, "error" raises instead.
            layout: See `get_data`.
            device: See `get_data`.

        Raises:
            InvalidArgumentError: None of the keys is found ("not found"), or they share no field ("not ready"), or
                anything is missing and `missing` is "error".
        """
        return await self._run_async(
            self._operations.kv_batch_get(
                keys, partition_id, select_fields, missing=missing, layout=layout, device=device, timeout=timeout
            )
        )

    def kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | str | None = None,
        *,
        layout: str = "jagged",
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """The values of the samples that a KVBatchMeta names, its fields or some of them; see `kv_batch_get`.

        Raises:
            InvalidArgumentError: meta has no partition_id, no fields, or not the selected ones.
        """
        return self._run(
            self._operations.kv_batch_get_by_meta(meta, select_fields, layout=layout, device=device, timeout=timeout)
        )

    async def async_kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | str | None = None,
        *,
        layout: str = "jagged",
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """The values of the samples that a KVBatchMeta names, its fields or some of them; see `kv_batch_get`.

        Raises:
            InvalidArgumentError: meta has no partition_id, no fields, or not the selected ones.
        """
        return await self._run_async(
            self._operations.kv_batch_get_by_meta(meta, select_fields, layout=layout, device=device, timeout=timeout)
        )

    def kv_list(
        self, partition_id: str | None = None, *, where: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Partition -> key -> tag, keys in order of creation; of one partition ({} if unknown) or of all.

        where: only keys whose tags have these entries, with equal values; see `wait_for_change`. A long list comes in
        pages, so that it delays nobody: what is put or cleared meanwhile may be in it or not.
        """
        return self._run(self._operations.kv_list(partition_id, where=where, timeout=timeout))

    async def async_kv_list(
        self, partition_id: str | None = None, *, where: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Partition -> key -> tag, keys in order of creation; of one partition ({} if unknown) or of all.

        where: only keys whose tags have these entries, with equal values; see `wait_for_change`. A long list comes in
        pages, so that it delays nobody: what is put or cleared meanwhile may be in it or not.
        """
        return await self._run_async(self._operations.kv_list(partition_id, where=where, timeout=timeout))

    def kv_clear(self, keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None) -> None:
        """Drops the samples of these keys; unknown keys and partitions are fine."""
        return self._run(self._operations.kv_clear(keys, partition_id, timeout=timeout))

    async def async_kv_clear(
        self, keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> None:
        """Drops the samples of these keys; unknown keys and partitions are fine."""
        return await self._run_async(self._operations.kv_clear(keys, partition_id, timeout=timeout))

    def ack(self, metadata: BatchMeta, *, timeout: float | None = None) -> bool:
        """Makes these samples, which were fetched under a lease, consumed by the task they were fetched for.

        Metadata may be a part of what was fetched (of a group sampler's batch: whole groups), and may have come from
        another process. Returns whether it counts for all of it: False where a lease was over, so that others have
        these samples, or where another replica's ack has finished them; or where there is no lease. It is no error.

        Raises:
            InvalidArgumentError: these are parts of groups.
        """
        return self._run(self._operations.ack(metadata, timeout=timeout))

    async def async_ack(self, metadata: BatchMeta, *, timeout: float | None = None) -> bool:
        """Makes these samples, which were fetched under a lease, consumed by the task they were fetched for.

        Metadata may be a part of what was fetched (of a group sampler's batch: whole groups), and may have come from
        another process. Returns whether it counts for all of it: False where a lease was over, so that others have
        these samples, or where another replica's ack has finished them; or where there is no lease. It is no error.

        Raises:
            InvalidArgumentError: these are parts of groups.
        """
        return await self._run_async(self._operations.ack(metadata, timeout=timeout))

    def nack(self, metadata: BatchMeta, *, delivered: bool = True, timeout: float | None = None) -> bool:
        """Gives these samples, which were fetched under a lease, back at once, to be delivered again.

        delivered: False where nobody has worked on them; it does not count towards `max_deliveries`. Returns whether
        the lease was in force, as `ack` does.

        Raises:
            InvalidArgumentError: these are parts of groups.
        """
        return self._run(self._operations.nack(metadata, delivered=delivered, timeout=timeout))

    async def async_nack(self, metadata: BatchMeta, *, delivered: bool = True, timeout: float | None = None) -> bool:
        """Gives these samples, which were fetched under a lease, back at once, to be delivered again.

        delivered: False where nobody has worked on them; it does not count towards `max_deliveries`. Returns whether
        the lease was in force, as `ack` does.

        Raises:
            InvalidArgumentError: these are parts of groups.
        """
        return await self._run_async(self._operations.nack(metadata, delivered=delivered, timeout=timeout))

    def declare_rank_gone(
        self, partition_id: str, task_name: str, dp_rank: int, *, timeout: float | None = None
    ) -> int:
        """Says that a rank will not come back: what it has not acknowledged is ready for others.

        It is about batches of a rank-consistent sampler that were dealt to claims with a lease; nobody else gets these
        before. Late acks of the rank count for nothing. Returns how many samples are ready again.

        Raises:
            UnknownPartitionError: there is none of this name.
        """
        return self._run(self._operations.declare_rank_gone(partition_id, task_name, dp_rank, timeout=timeout))

    async def async_declare_rank_gone(
        self, partition_id: str, task_name: str, dp_rank: int, *, timeout: float | None = None
    ) -> int:
        """Says that a rank will not come back: what it has not acknowledged is ready for others.

        It is about batches of a rank-consistent sampler that were dealt to claims with a lease; nobody else gets these
        before. Late acks of the rank count for nothing. Returns how many samples are ready again.

        Raises:
            UnknownPartitionError: there is none of this name.
        """
        return await self._run_async(
            self._operations.declare_rank_gone(partition_id, task_name, dp_rank, timeout=timeout)
        )

    def begin_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        previous: str | os.PathLike[str] | None = None,
        *,
        timeout: float | None = None,
    ) -> Cut:
        """Holds on to the system as it is now, to be saved by several calls; `end_checkpoint` must follow.

        Everything goes on meanwhile, but space that the saved samples lie in is not used again.
        checkpoint_dir: until then this client's saves into this folder are of this cut, and previous, without being
        told so.

        Raises:
            UnitLostError: a storage unit was lost at this moment; call it again, to cut the remaining samples.
            CheckpointError: the controller could not write its state.
        """
        return self._run(self._operations.begin_checkpoint(checkpoint_dir, previous, timeout=timeout))

    async def async_begin_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        previous: str | os.PathLike[str] | None = None,
        *,
        timeout: float | None = None,
    ) -> Cut:
        """Holds on to the system as it is now, to be saved by several calls; `end_checkpoint` must follow.

        Everything goes on meanwhile, but space that the saved samples lie in is not used again.
        checkpoint_dir: until then this client's saves into this folder are of this cut, and previous, without being
        told so.

        Raises:
            UnitLostError: a storage unit was lost at this moment; call it again, to cut the remaining samples.
            CheckpointError: the controller could not write its state.
        """
        return await self._run_threaded(self._operations.begin_checkpoint(checkpoint_dir, previous, timeout=timeout))

    def end_checkpoint(self, cut: Cut, *, timeout: float | None = None) -> bool:
        """Release a cut. True if it was held until now, so that all copies are complete.

        Raises:
            UnitLostError: a storage unit with samples of the cut was lost meanwhile, so it is not known whether the
                copies are complete.
        """
        return self._run(self._operations.end_checkpoint(cut, timeout=timeout))

    async def async_end_checkpoint(self, cut: Cut, *, timeout: float | None = None) -> bool:
        """Release a cut. True if it was held until now, so that all copies are complete.

        Raises:
            UnitLostError: a storage unit with samples of the cut was lost meanwhile, so it is not known whether the
                copies are complete.
        """
        return await self._run_threaded(self._operations.end_checkpoint(cut, timeout=timeout))

    def save_controller_checkpoint(
        self, path: str | os.PathLike[str], *, cut: Cut | None = None, timeout: float | None = None
    ) -> None:
        """Writes the controller's state, all but the samples' bytes, into a file, which is replaced whole.

        cut: of `begin_checkpoint`, of which the bytes are saved too; by default the state of now.
        """
        return self._run(self._operations.save_controller_checkpoint(path, cut=cut, timeout=timeout))

    async def async_save_controller_checkpoint(
        self, path: str | os.PathLike[str], *, cut: Cut | None = None, timeout: float | None = None
    ) -> None:
        """Writes the controller's state, all but the samples' bytes, into a file, which is replaced whole.

        cut: of `begin_checkpoint`, of which the bytes are saved too; by default the state of now.
        """
        return await self._run_threaded(self._operations.save_controller_checkpoint(path, cut=cut, timeout=timeout))

    def save_storage_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        cut: Cut | None = None,
        previous: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Writes the bytes of all samples into the folder `simple_storage` of this one, which is replaced whole.

        cut: of `begin_checkpoint`, whose state is saved too; by default the samples of now. previous: an older
        checkpoint, by default the one there: files of it that hold enough of what is saved are linked to, not written.

        Raises:
            UnitLostError: a storage unit was lost meanwhile; `tq.save_checkpoint` then saves the remaining samples.
            CheckpointError: a server was restarted meanwhile, or another client saves there. OSError: the disk refuses.
        """
        return self._run(
            self._operations.save_storage_checkpoint(checkpoint_dir, cut=cut, previous=previous, timeout=timeout)
        )

    async def async_save_storage_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        cut: Cut | None = None,
        previous: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Writes the bytes of all samples into the folder `simple_storage` of this one, which is replaced whole.

        cut: of `begin_checkpoint`, whose state is saved too; by default the samples of now. previous: an older
        checkpoint, by default the one there: files of it that hold enough of what is saved are linked to, not written.

        Raises:
            UnitLostError: a storage unit was lost meanwhile; `tq.save_checkpoint` then saves the remaining samples.
            CheckpointError: a server was restarted meanwhile, or another client saves there. OSError: the disk refuses.
        """
        return await self._run_threaded(
            self._operations.save_storage_checkpoint(checkpoint_dir, cut=cut, previous=previous, timeout=timeout)
        )

    def load_storage_checkpoint(
        self, checkpoint_dir: str | os.PathLike[str], *, allow_pickle: bool = True, timeout: float | None = None
    ) -> None:
        """Writes the bytes of a checkpoint's samples into storage; `load_controller_checkpoint` makes them visible.

        Until then nothing changes. Where the folder holds the state, too, only what that needs is written.
        allow_pickle: see `tq.load_checkpoint`; with False the folder must contain the controller's state, too.

        Raises:
            CheckpointNotFoundError: no manifest there. CheckpointError: it does not match its files, or one is
            damaged. CapacityError: no room for the samples beside those that there are.
        """
        return self._run(
            self._operations.load_storage_checkpoint(checkpoint_dir, allow_pickle=allow_pickle, timeout=timeout)
        )

    async def async_load_storage_checkpoint(
        self, checkpoint_dir: str | os.PathLike[str], *, allow_pickle: bool = True, timeout: float | None = None
    ) -> None:
        """Writes the bytes of a checkpoint's samples into storage; `load_controller_checkpoint` makes them visible.

        Until then nothing changes. Where the folder holds the state, too, only what that needs is written.
        allow_pickle: see `tq.load_checkpoint`; with False the folder must contain the controller's state, too.

        Raises:
            CheckpointNotFoundError: no manifest there. CheckpointError: it does not match its files, or one is
            damaged. CapacityError: no room for the samples beside those that there are.
        """
        return await self._run_threaded(
            self._operations.load_storage_checkpoint(checkpoint_dir, allow_pickle=allow_pickle, timeout=timeout)
        )

    def load_controller_checkpoint(
        self, path: str | os.PathLike[str], *, allow_pickle: bool = True, timeout: float | None = None
    ) -> None:
        """Replaces the system's state by the one in a file, after `load_storage_checkpoint` has written its samples.

        What was there before is gone, and metadata of it is refused. Global indexes go on where the higher of both was.
        allow_pickle: the same as for the samples; with False tags that need pickle are refused, too.

        Raises:
            CheckpointNotFoundError: no such file. CheckpointError: it is none, or its samples were not loaded.
        """
        return self._run(self._operations.load_controller_checkpoint(path, allow_pickle=allow_pickle, timeout=timeout))

    async def async_load_controller_checkpoint(
        self, path: str | os.PathLike[str], *, allow_pickle: bool = True, timeout: float | None = None
    ) -> None:
        """Replaces the system's state by the one in a file, after `load_storage_checkpoint` has written its samples.

        What was there before is gone, and metadata of it is refused. Global indexes go on where the higher of both was.
        allow_pickle: the same as for the samples; with False tags that need pickle are refused, too.

        Raises:
            CheckpointNotFoundError: no such file. CheckpointError: it is none, or its samples were not loaded.
        """
        return await self._run_threaded(
            self._operations.load_controller_checkpoint(path, allow_pickle=allow_pickle, timeout=timeout)
        )
