"""The methods of TransferQueueClient. tools/generate_surface.py generates them from the operations."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.client.checkpoint.checkpoint_data import CheckpointReport, CheckpointSave
from transfer_queue.client.conversion.arguments import Columns, ConsumedBy, DataParser, Fence, Tags
from transfer_queue.client.conversion.change_events import PartitionChange
from transfer_queue.client.operations.fetch_operations import Readiness
from transfer_queue.client.operations.operations import Operations
from transfer_queue.messages.locks import LockEntry
from transfer_queue.messages.queries import Backlog
from transfer_queue.messages.reports.samples import SampleReport, StuckReport
from transfer_queue.messages.reports.timeline import Verdict
from transfer_queue.messages.system import SystemStatus
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.net.calls import Operation

T = TypeVar("T")


class GeneratedMethods(ABC):
    """Each operation as a blocking method, and as an awaitable one with the prefix `async_`."""

    @property
    @abstractmethod
    def _operations(self) -> Operations:
        """The operations of this process's client."""

    @abstractmethod
    def _run(self, operation: Operation[T]) -> T:
        """Run an operation in this thread."""

    @abstractmethod
    async def _run_async(self, operation: Operation[T]) -> T:
        """Run an operation in this event loop."""

    def _run_aside(self, operation: Operation[T]) -> Future[T]:
        """Run an operation in a thread of its own; at once if this client has no threads."""
        future: Future[T] = Future()
        future.set_result(self._run(operation))
        return future

    async def _run_joining(self, operation: Operation[T]) -> T:
        """Run an operation that may travel together with others of this event loop."""
        return await self._run_async(operation)

    async def _run_threaded(self, operation: Operation[T]) -> T:
        """Run an operation that reads or writes files: its calls in this event loop, its own work in a thread."""
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
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> await client.async_get_meta(["prompt"], 2, "train_0", task_name="update")
            BatchMeta(size=2, partitions=['train_0'], fields=['prompt'], produced=2)
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
            >>> await client.async_seal("train_0", create=True)
            >>> await client.async_await_batch(["prompt"], 2, "train_0", "update", timeout=5)
            (BatchMeta(size=0, partitions=[], fields=[], produced=0), True)
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
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> (await client.async_await_ready(["prompt"], 2, "train_0", "update")).ended
            False
        """
        return await self._run_async(
            self._operations.await_ready(
                data_fields, batch_size, partition_id, task_name, sampling_config, finite, since, timeout=timeout
            )
        )

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
    ) -> TensorDict:
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
        return self._run(
            self._operations.get_data(
                metadata, layout=layout, shared=shared, device=device, copy=copy, out=out, timeout=timeout
            )
        )

    async def async_get_data(
        self,
        metadata: BatchMeta,
        *,
        layout: str = "jagged",
        shared: bool = False,
        device: torch.device | str | None = None,
        copy: bool = True,
        out: TensorDictBase | Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
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
            >>> meta = await client.async_put(prompts, partition_id="train_0")
            >>> (await client.async_get_data(meta, layout="dense"))["prompt"].tolist()
            [[1, 2], [3, 4]]
            >>> view = (await client.async_get_data(meta, layout="dense", copy=False))["prompt"]
            >>> tq.is_view(view), view.tolist()
            (True, [[1, 2], [3, 4]])
        """
        return await self._run_async(
            self._operations.get_data(
                metadata, layout=layout, shared=shared, device=device, copy=copy, out=out, timeout=timeout
            )
        )

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
    ) -> tuple[TensorDict | None, BatchMeta, bool]:
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
                shared=shared,
                device=device,
                copy=copy,
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
        shared: bool = False,
        device: torch.device | str | None = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> tuple[TensorDict | None, BatchMeta, bool]:
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
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"reward": torch.ones(2)})
            >>> values, meta, ended = await client.async_await_data("reward", 2, "train_0", "update")
            >>> values["reward"].tolist(), ended
            ([1.0, 1.0], False)
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
                shared=shared,
                device=device,
                copy=copy,
                timeout=timeout,
            )
        )

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
        """Write columns: as new samples of a partition, or as fields of existing ones. `kv_batch_put` uses keys.

        The values, tags and groups of a put become visible together. If the put fails, it left nothing, with one
        exception: a put into samples of several partitions is published partition by partition, and the partitions
        before the one that fails keep their values.

        Args:
            data: The columns, one row for each sample. docs/guides/values.md lists the types that a column can have.
            metadata: The samples that get the fields, in the order of the rows. Tag entries that were changed since the
                metadata was fetched are merged in, too. Default: the rows are new samples.
            partition_id: The partition of new samples. Required without `metadata`.
            data_parser: A function that maps a dict of columns to one with the same keys, lengths and order, for
                example to replace URLs by their content. It runs in this process before the write. Default: none.
            group_ids: One entry for each row: the group of the sample, usually the id of its prompt. Default: no
                groups.
            tags: One dict for each row, merged into the tag of the sample. Default: none.
            timeout: Seconds to wait for space. Default: 0.25 s, the time in which freed space becomes available.

        Returns:
            The given metadata with the fields added, or the metadata of the new samples. A put of no rows does nothing
            and returns empty metadata.

        Raises:
            InvalidArgumentError: Sizes do not match, or the partition would have more than 4,096 fields.
            FieldTypeError: The values do not match the live values of a field (a ValueError).
            CapacityError: There is no space.
            SealedError: The partition is sealed and accepts no new samples.
            StorageKeyNotFoundError: One of the samples was cleared.
            StaleMetadataError: The metadata is older than a checkpoint that was loaded.
            UncarriableValueError: A value cannot be stored.

        Example:
            >>> prompts = TensorDict({"prompt": torch.zeros(2, 3)}, batch_size=2)
            >>> meta = client.put(prompts, partition_id="train_0")
            >>> rewards = TensorDict({"reward": torch.ones(2)}, batch_size=2)
            >>> client.put(rewards, meta).field_names
            ['prompt', 'reward']
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
        """Write columns: as new samples of a partition, or as fields of existing ones. `kv_batch_put` uses keys.

        The values, tags and groups of a put become visible together. If the put fails, it left nothing, with one
        exception: a put into samples of several partitions is published partition by partition, and the partitions
        before the one that fails keep their values.

        Args:
            data: The columns, one row for each sample. docs/guides/values.md lists the types that a column can have.
            metadata: The samples that get the fields, in the order of the rows. Tag entries that were changed since the
                metadata was fetched are merged in, too. Default: the rows are new samples.
            partition_id: The partition of new samples. Required without `metadata`.
            data_parser: A function that maps a dict of columns to one with the same keys, lengths and order, for
                example to replace URLs by their content. It runs in this process before the write. Default: none.
            group_ids: One entry for each row: the group of the sample, usually the id of its prompt. Default: no
                groups.
            tags: One dict for each row, merged into the tag of the sample. Default: none.
            timeout: Seconds to wait for space. Default: 0.25 s, the time in which freed space becomes available.

        Returns:
            The given metadata with the fields added, or the metadata of the new samples. A put of no rows does nothing
            and returns empty metadata.

        Raises:
            InvalidArgumentError: Sizes do not match, or the partition would have more than 4,096 fields.
            FieldTypeError: The values do not match the live values of a field (a ValueError).
            CapacityError: There is no space.
            SealedError: The partition is sealed and accepts no new samples.
            StorageKeyNotFoundError: One of the samples was cleared.
            StaleMetadataError: The metadata is older than a checkpoint that was loaded.
            UncarriableValueError: A value cannot be stored.

        Example:
            >>> prompts = TensorDict({"prompt": torch.zeros(2, 3)}, batch_size=2)
            >>> meta = await client.async_put(prompts, partition_id="train_0")
            >>> rewards = TensorDict({"reward": torch.ones(2)}, batch_size=2)
            >>> (await client.async_put(rewards, meta)).field_names
            ['prompt', 'reward']
        """
        return await self._run_async(
            self._operations.put(
                data, metadata, partition_id, data_parser, group_ids=group_ids, tags=tags, timeout=timeout
            )
        )

    def set_custom_meta(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Replace the tag of each sample by the metadata's custom_meta. `put` and `kv_put` merge tags instead.

        Args:
            metadata: The samples with their new tags.
            timeout: See `TransferQueueClient`.

        Raises:
            StorageKeyNotFoundError: One of the samples was cleared.

        Example:
            >>> meta = client.get_meta("prompt", 1, "train_0", mode="insert")
            >>> meta.custom_meta = [{"status": "running"}]
            >>> client.set_custom_meta(meta)
        """
        return self._run(self._operations.set_custom_meta(metadata, timeout=timeout))

    async def async_set_custom_meta(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Replace the tag of each sample by the metadata's custom_meta. `put` and `kv_put` merge tags instead.

        Args:
            metadata: The samples with their new tags.
            timeout: See `TransferQueueClient`.

        Raises:
            StorageKeyNotFoundError: One of the samples was cleared.

        Example:
            >>> meta = await client.async_get_meta("prompt", 1, "train_0", mode="insert")
            >>> meta.custom_meta = [{"status": "running"}]
            >>> await client.async_set_custom_meta(meta)
        """
        return await self._run_async(self._operations.set_custom_meta(metadata, timeout=timeout))

    def clear_samples(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Remove samples of a BatchMeta with their values, keys and tags. `kv_clear` uses keys, `drop` also counts.

        Samples that were already cleared are ignored.

        Args:
            metadata: The samples.
            timeout: See `TransferQueueClient`.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = client.kv_retrieve_meta("a", "train_0")
            >>> client.clear_samples(meta)
            >>> client.kv_list("train_0")
            {'train_0': {'b': {}}}
        """
        return self._run(self._operations.clear_samples(metadata, timeout=timeout))

    async def async_clear_samples(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Remove samples of a BatchMeta with their values, keys and tags. `kv_clear` uses keys, `drop` also counts.

        Samples that were already cleared are ignored.

        Args:
            metadata: The samples.
            timeout: See `TransferQueueClient`.

        Example:
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = await client.async_kv_retrieve_meta("a", "train_0")
            >>> await client.async_clear_samples(meta)
            >>> await client.async_kv_list("train_0")
            {'train_0': {'b': {}}}
        """
        return await self._run_async(self._operations.clear_samples(metadata, timeout=timeout))

    def drop(
        self,
        partition_id: str,
        groups: Sequence[str | int] | str | int | None = None,
        metadata: BatchMeta | None = None,
        *,
        reason: str,
        timeout: float | None = None,
    ) -> int:
        """Remove samples or groups that are of no use, and count them under a reason; `clear_samples` does not count.

        A dropped group is over. If the partition has a `group_size`, members that are put later are dropped, too, and a
        put of all members of a group in one call begins a new group, also under the same id. Unknown groups and cleared
        samples are ignored. `status` shows the counts. A warning is logged if the partition does not
        exist.

        Args:
            partition_id: The partition.
            groups: The ids of the groups to drop as a whole. Default: none.
            metadata: The samples to drop. Default: none.
            reason: The reason to count them under, for example "no advantage".
            timeout: See `TransferQueueClient`.

        Returns:
            The number of samples that were dropped.

        Raises:
            InvalidArgumentError: Neither `groups` nor `metadata` is given, or the metadata has samples of another
                partition.

        Example:
            >>> rows = {"prompt": torch.zeros(2, 3)}
            >>> put = client.kv_batch_put(["a", "b"], "train_0", rows, group_ids=["p0", "p0"])
            >>> client.drop("train_0", "p0", reason="no advantage")
            2
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
        """Remove samples or groups that are of no use, and count them under a reason; `clear_samples` does not count.

        A dropped group is over. If the partition has a `group_size`, members that are put later are dropped, too, and a
        put of all members of a group in one call begins a new group, also under the same id. Unknown groups and cleared
        samples are ignored. `status` shows the counts. A warning is logged if the partition does not
        exist.

        Args:
            partition_id: The partition.
            groups: The ids of the groups to drop as a whole. Default: none.
            metadata: The samples to drop. Default: none.
            reason: The reason to count them under, for example "no advantage".
            timeout: See `TransferQueueClient`.

        Returns:
            The number of samples that were dropped.

        Raises:
            InvalidArgumentError: Neither `groups` nor `metadata` is given, or the metadata has samples of another
                partition.

        Example:
            >>> rows = {"prompt": torch.zeros(2, 3)}
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", rows, group_ids=["p0", "p0"])
            >>> await client.async_drop("train_0", "p0", reason="no advantage")
            2
        """
        return await self._run_async(
            self._operations.drop(partition_id, groups, metadata, reason=reason, timeout=timeout)
        )

    def finish(self, metadata: BatchMeta, task_name: str, *, timeout: float | None = None) -> None:
        """Let go of samples that were fetched, so that `free_when` can clear them. A lease is ended by `ack` instead.

        This matters if the partition frees samples by itself (`create_partition(free_when=...)`). A fetch also finishes
        the samples that the same client fetched before for the same task and dp_rank, unless it is made with
        `hold=True`.

        Args:
            metadata: The samples, as they were fetched.
            task_name: The task that they were fetched for.
            timeout: See `TransferQueueClient`.

        Example:
            >>> created = client.create_partition("train_0", free_when=["update"])
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="update")
            >>> client.finish(meta, "update")
            >>> client.kv_list("train_0")
            {'train_0': {}}
        """
        return self._run(self._operations.finish(metadata, task_name, timeout=timeout))

    async def async_finish(self, metadata: BatchMeta, task_name: str, *, timeout: float | None = None) -> None:
        """Let go of samples that were fetched, so that `free_when` can clear them. A lease is ended by `ack` instead.

        This matters if the partition frees samples by itself (`create_partition(free_when=...)`). A fetch also finishes
        the samples that the same client fetched before for the same task and dp_rank, unless it is made with
        `hold=True`.

        Args:
            metadata: The samples, as they were fetched.
            task_name: The task that they were fetched for.
            timeout: See `TransferQueueClient`.

        Example:
            >>> created = await client.async_create_partition("train_0", free_when=["update"])
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> meta = await client.async_get_meta("prompt", 1, "train_0", task_name="update")
            >>> await client.async_finish(meta, "update")
            >>> await client.async_kv_list("train_0")
            {'train_0': {}}
        """
        return await self._run_async(self._operations.finish(metadata, task_name, timeout=timeout))

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
        trained_by: str | None = None,
        policy_version: int = 0,
        keep_rows: int | None = None,
        keep_bytes: int | None = None,
        keep_seconds: float | None = None,
        max_deliveries: int | None = None,
        max_rows: int | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Create a partition before its first sample, with options.

        Args:
            partition_id: The partition.
            group_size: The number of samples of each declared group. Default: groups have no declared size.
            producers: How many calls of `seal` seal the partition. Default: 1.
            free_when: Names of tasks, for example ["reward", "update"]: a sample is cleared as soon as each of them has
                consumed and finished it (see `finish`). Default: samples are cleared only by calls.
            replicas: The number of rank replicas that fetch each sample and must finish it. Default: 1.
            max_staleness: No fetch returns a sample whose tag `policy_version`, the version of the policy that
                generated it, is more than this number behind the version of the partition (`set_policy_version`) at
                the time of the fetch. Older samples are skipped, in whole groups if the sampler deals groups. To keep
                the number of skipped samples small, at most `(max_staleness + 1) * rows_per_version` samples are
                accepted at a version that were not finished before this version was set (see `trained_by`). Samples
                that are skipped or dropped, or cleared before they were finished, do not count. A put beyond this
                waits, if it has a timeout, or raises StalenessError. `get_meta([], n, mode="insert", timeout=...)`
                makes a producer wait before it generates. Samples without the tag are limited only at the put. A
                trainer that fetches n steps ahead trains on samples that are n versions older: set the limit n lower.
                Default: no limit.
            rows_per_version: The number of samples that training consumes for each policy version. Required with
                `max_staleness`.
            trained_by: The task that trains. A sample is finished, for `max_staleness`, when this task has consumed
                it: at the fetch, or with a lease at the ack. Default: all tasks of `free_when`; without `free_when` all
                tasks that have fetched samples of the partition, so name it if other tasks fetch them, too.
            policy_version: The version of the policy at which the partition begins, for example that of the checkpoint
                from which the training continues. If the partition exists, its version does not change. Default: 0.
            keep_rows: The number of samples to keep; the oldest beyond it are dropped, whole groups together. Default:
                no limit.
            keep_bytes: The same in bytes of values. Default: no limit.
            keep_seconds: The same by age in seconds. Default: no limit.
            max_deliveries: A sample whose leases ended this often without an ack is skipped; 0 never skips. Default:
                `controller.max_deliveries`.
            max_rows: New samples are accepted while fewer than this number wait for the tasks of `free_when`, or exist
                if there is no `free_when`. A put beyond this waits, if it has a timeout, or raises PartitionFullError.
                Default: no limit.
            order: The order in which every task gets the samples, in place of the system's sampler: "fifo" (by
                arrival), "lifo" (the newest first), or "priority" (the highest number in the tag "priority" first).
                Default: the system's sampler deals them.
            timeout: See `TransferQueueClient`.

        Returns:
            True; False if the partition already existed.

        Raises:
            InvalidArgumentError: An option is not valid, or the partition exists with other options. Arguments that
                have their defaults are not compared.

        Example:
            >>> client.create_partition("train_0", group_size=8, free_when=["update"])
            True
            >>> client.create_partition("train_0", group_size=8)
            False
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
                trained_by=trained_by,
                policy_version=policy_version,
                keep_rows=keep_rows,
                keep_bytes=keep_bytes,
                keep_seconds=keep_seconds,
                max_deliveries=max_deliveries,
                max_rows=max_rows,
                order=order,
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
        trained_by: str | None = None,
        policy_version: int = 0,
        keep_rows: int | None = None,
        keep_bytes: int | None = None,
        keep_seconds: float | None = None,
        max_deliveries: int | None = None,
        max_rows: int | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Create a partition before its first sample, with options.

        Args:
            partition_id: The partition.
            group_size: The number of samples of each declared group. Default: groups have no declared size.
            producers: How many calls of `seal` seal the partition. Default: 1.
            free_when: Names of tasks, for example ["reward", "update"]: a sample is cleared as soon as each of them has
                consumed and finished it (see `finish`). Default: samples are cleared only by calls.
            replicas: The number of rank replicas that fetch each sample and must finish it. Default: 1.
            max_staleness: No fetch returns a sample whose tag `policy_version`, the version of the policy that
                generated it, is more than this number behind the version of the partition (`set_policy_version`) at
                the time of the fetch. Older samples are skipped, in whole groups if the sampler deals groups. To keep
                the number of skipped samples small, at most `(max_staleness + 1) * rows_per_version` samples are
                accepted at a version that were not finished before this version was set (see `trained_by`). Samples
                that are skipped or dropped, or cleared before they were finished, do not count. A put beyond this
                waits, if it has a timeout, or raises StalenessError. `get_meta([], n, mode="insert", timeout=...)`
                makes a producer wait before it generates. Samples without the tag are limited only at the put. A
                trainer that fetches n steps ahead trains on samples that are n versions older: set the limit n lower.
                Default: no limit.
            rows_per_version: The number of samples that training consumes for each policy version. Required with
                `max_staleness`.
            trained_by: The task that trains. A sample is finished, for `max_staleness`, when this task has consumed
                it: at the fetch, or with a lease at the ack. Default: all tasks of `free_when`; without `free_when` all
                tasks that have fetched samples of the partition, so name it if other tasks fetch them, too.
            policy_version: The version of the policy at which the partition begins, for example that of the checkpoint
                from which the training continues. If the partition exists, its version does not change. Default: 0.
            keep_rows: The number of samples to keep; the oldest beyond it are dropped, whole groups together. Default:
                no limit.
            keep_bytes: The same in bytes of values. Default: no limit.
            keep_seconds: The same by age in seconds. Default: no limit.
            max_deliveries: A sample whose leases ended this often without an ack is skipped; 0 never skips. Default:
                `controller.max_deliveries`.
            max_rows: New samples are accepted while fewer than this number wait for the tasks of `free_when`, or exist
                if there is no `free_when`. A put beyond this waits, if it has a timeout, or raises PartitionFullError.
                Default: no limit.
            order: The order in which every task gets the samples, in place of the system's sampler: "fifo" (by
                arrival), "lifo" (the newest first), or "priority" (the highest number in the tag "priority" first).
                Default: the system's sampler deals them.
            timeout: See `TransferQueueClient`.

        Returns:
            True; False if the partition already existed.

        Raises:
            InvalidArgumentError: An option is not valid, or the partition exists with other options. Arguments that
                have their defaults are not compared.

        Example:
            >>> await client.async_create_partition("train_0", group_size=8, free_when=["update"])
            True
            >>> await client.async_create_partition("train_0", group_size=8)
            False
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
                trained_by=trained_by,
                policy_version=policy_version,
                keep_rows=keep_rows,
                keep_bytes=keep_bytes,
                keep_seconds=keep_seconds,
                max_deliveries=max_deliveries,
                max_rows=max_rows,
                order=order,
                timeout=timeout,
            )
        )

    def seal(self, partition_id: str, create: bool = False, *, timeout: float | None = None) -> None:
        """Declare that this producer puts no new samples, so that loaders end. It may still add fields to samples.

        If the partition does not exist, it is created and sealed, so that consumers do not wait for its samples. Unless
        `create` is set, a warning names it and the nearest partitions that exist.

        Args:
            partition_id: The partition.
            create: True to suppress the warning if the partition does not exist. Default: False.
            timeout: See `TransferQueueClient`.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.seal("train_0")
            >>> meta, ended = client.await_batch("prompt", 1, "train_0", "update")
            >>> meta, ended = client.await_batch("prompt", 1, "train_0", "update")
            >>> ended
            True
        """
        return self._run(self._operations.seal(partition_id, create, timeout=timeout))

    async def async_seal(self, partition_id: str, create: bool = False, *, timeout: float | None = None) -> None:
        """Declare that this producer puts no new samples, so that loaders end. It may still add fields to samples.

        If the partition does not exist, it is created and sealed, so that consumers do not wait for its samples. Unless
        `create` is set, a warning names it and the nearest partitions that exist.

        Args:
            partition_id: The partition.
            create: True to suppress the warning if the partition does not exist. Default: False.
            timeout: See `TransferQueueClient`.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> await client.async_seal("train_0")
            >>> meta, ended = await client.async_await_batch("prompt", 1, "train_0", "update")
            >>> meta, ended = await client.async_await_batch("prompt", 1, "train_0", "update")
            >>> ended
            True
        """
        return await self._run_async(self._operations.seal(partition_id, create, timeout=timeout))

    def clear_partition(self, partition_id: str, *, timeout: float | None = None) -> None:
        """Remove a partition with all its samples. A partition that does not exist is ignored.

        Args:
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.clear_partition("train_0")
            >>> client.get_partition_list()
            []
        """
        return self._run(self._operations.clear_partition(partition_id, timeout=timeout))

    async def async_clear_partition(self, partition_id: str, *, timeout: float | None = None) -> None:
        """Remove a partition with all its samples. A partition that does not exist is ignored.

        Args:
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> await client.async_clear_partition("train_0")
            >>> await client.async_get_partition_list()
            []
        """
        return await self._run_async(self._operations.clear_partition(partition_id, timeout=timeout))

    def get_partition_list(self, *, timeout: float | None = None) -> list[str]:
        """Return the names of all partitions, in order of creation.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            The names.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.get_partition_list()
            ['train_0']
        """
        return self._run(self._operations.get_partition_list(timeout=timeout))

    async def async_get_partition_list(self, *, timeout: float | None = None) -> list[str]:
        """Return the names of all partitions, in order of creation.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            The names.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> await client.async_get_partition_list()
            ['train_0']
        """
        return await self._run_async(self._operations.get_partition_list(timeout=timeout))

    def set_policy_version(self, partition_id: str, version: int, *, timeout: float | None = None) -> None:
        """Report that the policy has reached a version. Staleness is counted from it, and waiting producers continue.

        The trainer calls it when its own version rises, after it has fetched the samples that it has trained on: they
        make space for as many new ones. With a lease, it acknowledges them first (`ack`); this includes a loader with
        `delivery="at_least_once"`, which otherwise does so too late. Producers may get the weights of that version
        earlier. The version may begin with any number and skip numbers.

        Args:
            partition_id: The partition.
            version: The version, which may not decrease.
            timeout: See `TransferQueueClient`.

        Raises:
            InvalidArgumentError: The version is lower than the present one.
            UnknownPartitionError: The partition does not exist. Create it first.

        Example:
            >>> created = client.create_partition("train_0", max_staleness=1, rows_per_version=64)
            >>> client.set_policy_version("train_0", 1)
        """
        return self._run(self._operations.set_policy_version(partition_id, version, timeout=timeout))

    async def async_set_policy_version(self, partition_id: str, version: int, *, timeout: float | None = None) -> None:
        """Report that the policy has reached a version. Staleness is counted from it, and waiting producers continue.

        The trainer calls it when its own version rises, after it has fetched the samples that it has trained on: they
        make space for as many new ones. With a lease, it acknowledges them first (`ack`); this includes a loader with
        `delivery="at_least_once"`, which otherwise does so too late. Producers may get the weights of that version
        earlier. The version may begin with any number and skip numbers.

        Args:
            partition_id: The partition.
            version: The version, which may not decrease.
            timeout: See `TransferQueueClient`.

        Raises:
            InvalidArgumentError: The version is lower than the present one.
            UnknownPartitionError: The partition does not exist. Create it first.

        Example:
            >>> created = await client.async_create_partition("train_0", max_staleness=1, rows_per_version=64)
            >>> await client.async_set_policy_version("train_0", 1)
        """
        return await self._run_async(self._operations.set_policy_version(partition_id, version, timeout=timeout))

    def get_policy_version(self, partition_id: str, *, timeout: float | None = None) -> int:
        """Return the version of the policy that a partition has reached.

        Args:
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The version that `set_policy_version` has set last, or with which the partition was created.

        Raises:
            UnknownPartitionError: The partition does not exist.

        Example:
            >>> created = client.create_partition("train_0", policy_version=500)
            >>> client.get_policy_version("train_0")
            500
        """
        return self._run(self._operations.get_policy_version(partition_id, timeout=timeout))

    async def async_get_policy_version(self, partition_id: str, *, timeout: float | None = None) -> int:
        """Return the version of the policy that a partition has reached.

        Args:
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The version that `set_policy_version` has set last, or with which the partition was created.

        Raises:
            UnknownPartitionError: The partition does not exist.

        Example:
            >>> created = await client.async_create_partition("train_0", policy_version=500)
            >>> await client.async_get_policy_version("train_0")
            500
        """
        return await self._run_async(self._operations.get_policy_version(partition_id, timeout=timeout))

    def report_done(self, partition_id: str, count: int = 1, *, timeout: float | None = None) -> None:
        """Count samples as processed, which `await_done` waits for. It changes no sample, unlike `ack` and `finish`.

        The controller counts the samples that were added and those that are done. See `await_done`.

        Args:
            partition_id: The partition.
            count: The number of samples. Default: 1.
            timeout: See `TransferQueueClient`.

        Raises:
            InvalidArgumentError: More samples were reported as done than were added.
            UnknownPartitionError: The partition does not exist.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.report_done("train_0")
            >>> client.await_done("train_0")
            True
        """
        return self._run(self._operations.report_done(partition_id, count, timeout=timeout))

    async def async_report_done(self, partition_id: str, count: int = 1, *, timeout: float | None = None) -> None:
        """Count samples as processed, which `await_done` waits for. It changes no sample, unlike `ack` and `finish`.

        The controller counts the samples that were added and those that are done. See `await_done`.

        Args:
            partition_id: The partition.
            count: The number of samples. Default: 1.
            timeout: See `TransferQueueClient`.

        Raises:
            InvalidArgumentError: More samples were reported as done than were added.
            UnknownPartitionError: The partition does not exist.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> await client.async_report_done("train_0")
            >>> await client.async_await_done("train_0")
            True
        """
        return await self._run_async(self._operations.report_done(partition_id, count, timeout=timeout))

    def await_done(self, partition_id: str, *, timeout: float | None = None) -> bool:
        """Wait until all samples that were added to a partition, without dropped ones, were reported as done.

        Args:
            partition_id: The partition.
            timeout: Seconds to wait; 0 does not wait. Default: no limit.

        Returns:
            Whether all samples are done; False if the timeout ended first.

        Raises:
            UnknownPartitionError: The partition does not exist, or was removed meanwhile.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.await_done("train_0", timeout=0)
            False
        """
        return self._run(self._operations.await_done(partition_id, timeout=timeout))

    async def async_await_done(self, partition_id: str, *, timeout: float | None = None) -> bool:
        """Wait until all samples that were added to a partition, without dropped ones, were reported as done.

        Args:
            partition_id: The partition.
            timeout: Seconds to wait; 0 does not wait. Default: no limit.

        Returns:
            Whether all samples are done; False if the timeout ended first.

        Raises:
            UnknownPartitionError: The partition does not exist, or was removed meanwhile.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> await client.async_await_done("train_0", timeout=0)
            False
        """
        return await self._run_async(self._operations.await_done(partition_id, timeout=timeout))

    def get_backlog(self, partition_id: str, task_name: str, *, timeout: float | None = None) -> Backlog:
        """Return how many samples of a partition wait for a task, and how many are not done.

        Args:
            partition_id: The partition.
            task_name: The task.
            timeout: See `TransferQueueClient`.

        Returns:
            The numbers; zeros if the partition does not exist.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="update", lease=60)
            >>> client.get_backlog("train_0", "update")
            Backlog(waiting=1, claimed=1, undone=2, sealed=False, max_rows=None)
        """
        return self._run(self._operations.get_backlog(partition_id, task_name, timeout=timeout))

    async def async_get_backlog(self, partition_id: str, task_name: str, *, timeout: float | None = None) -> Backlog:
        """Return how many samples of a partition wait for a task, and how many are not done.

        Args:
            partition_id: The partition.
            task_name: The task.
            timeout: See `TransferQueueClient`.

        Returns:
            The numbers; zeros if the partition does not exist.

        Example:
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = await client.async_get_meta("prompt", 1, "train_0", task_name="update", lease=60)
            >>> await client.async_get_backlog("train_0", "update")
            Backlog(waiting=1, claimed=1, undone=2, sealed=False, max_rows=None)
        """
        return await self._run_async(self._operations.get_backlog(partition_id, task_name, timeout=timeout))

    def want(self, partition_id: str, groups: int, task_name: str, *, timeout: float | None = None) -> None:
        """Set the group demand of a task: the number of complete groups that should exist or be in production.

        The demand stays until it is changed. When the task consumes groups, or groups are dropped, `wanted` reports the
        same number of new ones to producers.

        Args:
            partition_id: The partition.
            groups: The number of groups; 0 removes the demand.
            task_name: The task.
            timeout: See `TransferQueueClient`.

        Example:
            >>> created = client.create_partition("train_0", group_size=8)
            >>> client.want("train_0", 4, "update")
            >>> client.wanted("train_0", "update")
            4
        """
        return self._run(self._operations.want(partition_id, groups, task_name, timeout=timeout))

    async def async_want(self, partition_id: str, groups: int, task_name: str, *, timeout: float | None = None) -> None:
        """Set the group demand of a task: the number of complete groups that should exist or be in production.

        The demand stays until it is changed. When the task consumes groups, or groups are dropped, `wanted` reports the
        same number of new ones to producers.

        Args:
            partition_id: The partition.
            groups: The number of groups; 0 removes the demand.
            task_name: The task.
            timeout: See `TransferQueueClient`.

        Example:
            >>> created = await client.async_create_partition("train_0", group_size=8)
            >>> await client.async_want("train_0", 4, "update")
            >>> await client.async_wanted("train_0", "update")
            4
        """
        return await self._run_async(self._operations.want(partition_id, groups, task_name, timeout=timeout))

    def wanted(
        self, partition_id: str, task_name: str, most: int | None = None, *, timeout: float | None = None
    ) -> int:
        """Return how many groups a task is missing, and promise to produce some of them.

        A missing group is one of the group demand (`want`) that does not exist, is not in production, and that no
        producer has promised. With `max_staleness`, there are never more than the partition accepts at its version.

        Args:
            partition_id: The partition.
            task_name: The task.
            most: The maximum number of groups that this producer promises to produce. Other producers do not get these.
                The promise ends when the samples are put (or reserved), or when this client is gone. Default: promise
                none.
            timeout: Seconds to wait while no group is missing. Default: do not wait.

        Returns:
            The number of missing groups; with `most`, the number that this producer promised.

        Example:
            >>> created = client.create_partition("train_0", group_size=8)
            >>> client.want("train_0", 4, "update")
            >>> client.wanted("train_0", "update", most=3)
            3
            >>> client.wanted("train_0", "update", most=3)
            1
        """
        return self._run(self._operations.wanted(partition_id, task_name, most, timeout=timeout))

    async def async_wanted(
        self, partition_id: str, task_name: str, most: int | None = None, *, timeout: float | None = None
    ) -> int:
        """Return how many groups a task is missing, and promise to produce some of them.

        A missing group is one of the group demand (`want`) that does not exist, is not in production, and that no
        producer has promised. With `max_staleness`, there are never more than the partition accepts at its version.

        Args:
            partition_id: The partition.
            task_name: The task.
            most: The maximum number of groups that this producer promises to produce. Other producers do not get these.
                The promise ends when the samples are put (or reserved), or when this client is gone. Default: promise
                none.
            timeout: Seconds to wait while no group is missing. Default: do not wait.

        Returns:
            The number of missing groups; with `most`, the number that this producer promised.

        Example:
            >>> created = await client.async_create_partition("train_0", group_size=8)
            >>> await client.async_want("train_0", 4, "update")
            >>> await client.async_wanted("train_0", "update", most=3)
            3
            >>> await client.async_wanted("train_0", "update", most=3)
            1
        """
        return await self._run_async(self._operations.wanted(partition_id, task_name, most, timeout=timeout))

    def register_task_sampler(self, task_name: str, sampler: Any, *, timeout: float | None = None) -> None:
        """Use a built-in sampler for a task, in all partitions, for as long as the system exists.

        `StreamingDataset(sampler=)` calls this. Batches that were dealt before stay; claims that wait are decided with
        the new sampler. To register the sampler that the task has changes nothing.

        Args:
            task_name: The task.
            sampler: The name, the class or an instance of a built-in sampler, or a mapping with the keys `sampler` and
                `sampler_args`. A sampler of your own is named in `controller.task_samplers` where the system starts.
            timeout: See `TransferQueueClient`.

        Raises:
            InvalidArgumentError: The task has another sampler of its own, or the sampler is not built in.

        Example:
            >>> client.register_task_sampler("judge", tq.RankAwareSampler(dp_size=1))
            >>> client.register_task_sampler("judge", "SequentialSampler")
            Traceback (most recent call last):
            transfer_queue.errors.InvalidArgumentError: task 'judge' has the sampler RankAwareSampler(dp_size=1) (...
        """
        return self._run(self._operations.register_task_sampler(task_name, sampler, timeout=timeout))

    async def async_register_task_sampler(self, task_name: str, sampler: Any, *, timeout: float | None = None) -> None:
        """Use a built-in sampler for a task, in all partitions, for as long as the system exists.

        `StreamingDataset(sampler=)` calls this. Batches that were dealt before stay; claims that wait are decided with
        the new sampler. To register the sampler that the task has changes nothing.

        Args:
            task_name: The task.
            sampler: The name, the class or an instance of a built-in sampler, or a mapping with the keys `sampler` and
                `sampler_args`. A sampler of your own is named in `controller.task_samplers` where the system starts.
            timeout: See `TransferQueueClient`.

        Raises:
            InvalidArgumentError: The task has another sampler of its own, or the sampler is not built in.

        Example:
            >>> await client.async_register_task_sampler("judge", tq.RankAwareSampler(dp_size=1))
            >>> await client.async_register_task_sampler("judge", "SequentialSampler")
            Traceback (most recent call last):
            transfer_queue.errors.InvalidArgumentError: task 'judge' has the sampler RankAwareSampler(dp_size=1) (...
        """
        return await self._run_async(self._operations.register_task_sampler(task_name, sampler, timeout=timeout))

    def get_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return which samples have which fields.

        Args:
            data_fields: The fields.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The global indexes of all samples, reserved ones included, int64 [rows], ascending; and int8 [rows, fields],
            1 where a sample has a field, columns in the order of `data_fields`. (None, None) if the partition or a
            field does not exist.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> put = client.kv_put("a", "train_0", {"reward": torch.tensor(1.0)})
            >>> indexes, produced = client.get_production_status(["prompt", "reward"], "train_0")
            >>> produced.tolist()
            [[1, 1], [1, 0]]
        """
        return self._run(self._operations.get_production_status(data_fields, partition_id, timeout=timeout))

    async def async_get_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return which samples have which fields.

        Args:
            data_fields: The fields.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The global indexes of all samples, reserved ones included, int64 [rows], ascending; and int8 [rows, fields],
            1 where a sample has a field, columns in the order of `data_fields`. (None, None) if the partition or a
            field does not exist.

        Example:
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> put = await client.async_kv_put("a", "train_0", {"reward": torch.tensor(1.0)})
            >>> indexes, produced = await client.async_get_production_status(["prompt", "reward"], "train_0")
            >>> produced.tolist()
            [[1, 1], [1, 0]]
        """
        return await self._run_async(self._operations.get_production_status(data_fields, partition_id, timeout=timeout))

    def get_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return which samples a task has consumed.

        Args:
            task_name: The task.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The global indexes of all samples, reserved ones included, int64 [rows], ascending; and int8 [rows], 1 where
            the task has consumed the sample. (None, None) if the partition does not exist.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="update")
            >>> indexes, consumed = client.get_consumption_status("update", "train_0")
            >>> consumed.tolist()
            [1, 0]
        """
        return self._run(self._operations.get_consumption_status(task_name, partition_id, timeout=timeout))

    async def async_get_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return which samples a task has consumed.

        Args:
            task_name: The task.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The global indexes of all samples, reserved ones included, int64 [rows], ascending; and int8 [rows], 1 where
            the task has consumed the sample. (None, None) if the partition does not exist.

        Example:
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = await client.async_get_meta("prompt", 1, "train_0", task_name="update")
            >>> indexes, consumed = await client.async_get_consumption_status("update", "train_0")
            >>> consumed.tolist()
            [1, 0]
        """
        return await self._run_async(self._operations.get_consumption_status(task_name, partition_id, timeout=timeout))

    def check_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Return whether every sample has all of these fields.

        Args:
            data_fields: The fields.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            True if every sample has every field; False if the partition or a field does not exist.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.check_production_status(["prompt"], "train_0")
            True
        """
        return self._run(self._operations.check_production_status(data_fields, partition_id, timeout=timeout))

    async def async_check_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Return whether every sample has all of these fields.

        Args:
            data_fields: The fields.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            True if every sample has every field; False if the partition or a field does not exist.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> await client.async_check_production_status(["prompt"], "train_0")
            True
        """
        return await self._run_async(
            self._operations.check_production_status(data_fields, partition_id, timeout=timeout)
        )

    def check_consumption_status(self, task_name: str, partition_id: str, *, timeout: float | None = None) -> bool:
        """Return whether a task has consumed every sample.

        Args:
            task_name: The task.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            True if the task has consumed every sample, including samples that were cleared since; False if the
            partition does not exist.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.check_consumption_status("update", "train_0")
            False
        """
        return self._run(self._operations.check_consumption_status(task_name, partition_id, timeout=timeout))

    async def async_check_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Return whether a task has consumed every sample.

        Args:
            task_name: The task.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            True if the task has consumed every sample, including samples that were cleared since; False if the
            partition does not exist.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> await client.async_check_consumption_status("update", "train_0")
            False
        """
        return await self._run_async(
            self._operations.check_consumption_status(task_name, partition_id, timeout=timeout)
        )

    def reset_consumption(
        self, partition_id: str, task_name: str | None = None, *, timeout: float | None = None
    ) -> bool:
        """Let a task consume the partition again from the beginning.

        The dealt batches of the task are forgotten, and its leases end. A warning is logged if the partition does not
        exist.

        Args:
            partition_id: The partition.
            task_name: The task. Default: every task.
            timeout: See `TransferQueueClient`.

        Returns:
            True.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="update")
            >>> client.reset_consumption("train_0", "update")
            True
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="update")
        """
        return self._run(self._operations.reset_consumption(partition_id, task_name, timeout=timeout))

    async def async_reset_consumption(
        self, partition_id: str, task_name: str | None = None, *, timeout: float | None = None
    ) -> bool:
        """Let a task consume the partition again from the beginning.

        The dealt batches of the task are forgotten, and its leases end. A warning is logged if the partition does not
        exist.

        Args:
            partition_id: The partition.
            task_name: The task. Default: every task.
            timeout: See `TransferQueueClient`.

        Returns:
            True.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> meta = await client.async_get_meta("prompt", 1, "train_0", task_name="update")
            >>> await client.async_reset_consumption("train_0", "update")
            True
            >>> meta = await client.async_get_meta("prompt", 1, "train_0", task_name="update")
        """
        return await self._run_async(self._operations.reset_consumption(partition_id, task_name, timeout=timeout))

    def wait_for_change(
        self,
        partition_id: str,
        since: int | None = None,
        where: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> PartitionChange:
        """Wait until samples of a partition change, and return the changes. `subscribe` repeats this.

        A sample changes when it gets a field, a tag or a key. The result describes the state now: of several changes of
        a sample the last, and no sample is omitted however late the call is. It also names the samples that were
        cleared. The wait ends when the partition is sealed or dropped. If the partition does not exist, the call waits
        for it.

        Args:
            partition_id: The partition.
            since: The version that an earlier call returned. Default: return all samples that exist, and wait only if
                there are none.
            where: Tag entries that a sample must have, with equal values. Numbers are compared by value (1 equals 1.0,
                True does not equal 1), other Python objects by their encoded bytes. Default: every sample.
            timeout: Seconds to wait; 0 does not wait. Default: TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s).

        Returns:
            The changes; falsy if there were none.

        Raises:
            InvalidArgumentError: `where` is not a dict of tag entries, or `since` is not a version.

        Example:
            >>> put = client.kv_put("a", "train_0", tag={"status": "done"})
            >>> change = client.wait_for_change("train_0", where={"status": "done"})
            >>> change.keys, change.tags
            (['a'], [{'status': 'done'}])
            >>> bool(client.wait_for_change("train_0", change.version, timeout=0))
            False
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
        """Wait until samples of a partition change, and return the changes. `subscribe` repeats this.

        A sample changes when it gets a field, a tag or a key. The result describes the state now: of several changes of
        a sample the last, and no sample is omitted however late the call is. It also names the samples that were
        cleared. The wait ends when the partition is sealed or dropped. If the partition does not exist, the call waits
        for it.

        Args:
            partition_id: The partition.
            since: The version that an earlier call returned. Default: return all samples that exist, and wait only if
                there are none.
            where: Tag entries that a sample must have, with equal values. Numbers are compared by value (1 equals 1.0,
                True does not equal 1), other Python objects by their encoded bytes. Default: every sample.
            timeout: Seconds to wait; 0 does not wait. Default: TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s).

        Returns:
            The changes; falsy if there were none.

        Raises:
            InvalidArgumentError: `where` is not a dict of tag entries, or `since` is not a version.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", tag={"status": "done"})
            >>> change = await client.async_wait_for_change("train_0", where={"status": "done"})
            >>> change.keys, change.tags
            (['a'], [{'status': 'done'}])
            >>> bool(await client.async_wait_for_change("train_0", change.version, timeout=0))
            False
        """
        return await self._run_async(self._operations.wait_for_change(partition_id, since, where, timeout=timeout))

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
        verdict: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Explain why a sample is not delivered: missing fields, the batch that took it, its group and so on.

        If no sample is named, describes the rows that lack the fewest of the fields for `task`. With `batch_size`,
        describes why a fetch of `batch_size` samples with this `sampling_config` waits, and which ranks are ahead.

        Args:
            partition_id: The partition.
            global_index: The global index of the sample. Default: none.
            key: The key of the sample. Default: none.
            task: The task that waits for the sample. Default: all tasks.
            fields: The fields that the task needs. Default: those of a claim of the task that waits; of a sample: any.
            batch_size: The batch size of the fetch to explain. Default: none.
            sampling_config: The sampling_config of the fetch to explain. Default: none.
            verdict: True to add the verdict about the whole system as the last line. Default: False.
            timeout: See `TransferQueueClient`.

        Returns:
            The explanation, one or more lines.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> "reward" in client.explain("train_0", key="a", task="update", fields=["reward"])
            True
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
                verdict=verdict,
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
        verdict: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Explain why a sample is not delivered: missing fields, the batch that took it, its group and so on.

        If no sample is named, describes the rows that lack the fewest of the fields for `task`. With `batch_size`,
        describes why a fetch of `batch_size` samples with this `sampling_config` waits, and which ranks are ahead.

        Args:
            partition_id: The partition.
            global_index: The global index of the sample. Default: none.
            key: The key of the sample. Default: none.
            task: The task that waits for the sample. Default: all tasks.
            fields: The fields that the task needs. Default: those of a claim of the task that waits; of a sample: any.
            batch_size: The batch size of the fetch to explain. Default: none.
            sampling_config: The sampling_config of the fetch to explain. Default: none.
            verdict: True to add the verdict about the whole system as the last line. Default: False.
            timeout: See `TransferQueueClient`.

        Returns:
            The explanation, one or more lines.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> "reward" in (await client.async_explain("train_0", key="a", task="update", fields=["reward"]))
            True
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
                verdict=verdict,
                timeout=timeout,
            )
        )

    def describe_sample(
        self,
        partition_id: str,
        global_index: int | None = None,
        key: str | None = None,
        *,
        timeout: float | None = None,
    ) -> SampleReport:
        """Return everything that the controller knows of one sample: where its values are, and what happened to it.

        The history has at most 32 events. The controller keeps them only as long as its timeline does: by default the
        last 262,144 events about 1,048,576 samples in all, since its last start.

        Args:
            partition_id: The partition.
            global_index: The global index of the sample. Default: none.
            key: The key of the sample. Default: none. Pass either a global index or a key.
            timeout: See `TransferQueueClient`; for each of the requests of the call.

        Returns:
            The report. Its `state` is "cleared" or "unknown" if the sample does not exist any more, or never did.

        Raises:
            InvalidArgumentError: Neither a global index nor a key is given, or both.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)}, tag={"length": 3})
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="reward")
            >>> report = client.describe_sample("train_0", key="a")
            >>> [(field.name, field.shape, field.nbytes) for field in report.fields], report.tags
            ([('prompt', [3], 12)], {'length': 3})
            >>> [event.kind for event in report.history], report.history[-1].task
            (['put', 'claimed'], 'reward')
        """
        return self._run(self._operations.describe_sample(partition_id, global_index, key, timeout=timeout))

    async def async_describe_sample(
        self,
        partition_id: str,
        global_index: int | None = None,
        key: str | None = None,
        *,
        timeout: float | None = None,
    ) -> SampleReport:
        """Return everything that the controller knows of one sample: where its values are, and what happened to it.

        The history has at most 32 events. The controller keeps them only as long as its timeline does: by default the
        last 262,144 events about 1,048,576 samples in all, since its last start.

        Args:
            partition_id: The partition.
            global_index: The global index of the sample. Default: none.
            key: The key of the sample. Default: none. Pass either a global index or a key.
            timeout: See `TransferQueueClient`; for each of the requests of the call.

        Returns:
            The report. Its `state` is "cleared" or "unknown" if the sample does not exist any more, or never did.

        Raises:
            InvalidArgumentError: Neither a global index nor a key is given, or both.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)}, tag={"length": 3})
            >>> meta = await client.async_get_meta("prompt", 1, "train_0", task_name="reward")
            >>> report = await client.async_describe_sample("train_0", key="a")
            >>> [(field.name, field.shape, field.nbytes) for field in report.fields], report.tags
            ([('prompt', [3], 12)], {'length': 3})
            >>> [event.kind for event in report.history], report.history[-1].task
            (['put', 'claimed'], 'reward')
        """
        return await self._run_async(self._operations.describe_sample(partition_id, global_index, key, timeout=timeout))

    def find_stuck(
        self,
        partition_id: str | None = None,
        older_than: float = 60.0,
        limit: int = 20,
        *,
        timeout: float | None = None,
    ) -> StuckReport:
        """Return the samples that are not finished and whose fields and tags have not changed for some time.

        A sample is finished if every task that takes samples of its partition has consumed it, and if it has every
        field that other samples of the partition have.

        Args:
            partition_id: The partition. Default: all partitions.
            older_than: The seconds for which a sample has not changed. Samples that changed before the controller was
                started count from its start.
            limit: The number of samples to describe, those that changed first. The others are only counted.
            timeout: See `TransferQueueClient`; for each of the requests of the call.

        Returns:
            The samples by prompt, the oldest first, with the client that changed each of them last.

        Raises:
            InvalidArgumentError: `older_than` or `limit` is negative, or not a number.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> put = client.kv_put("b", "train_0", {"prompt": torch.zeros(3), "answer": torch.zeros(3)})
            >>> stuck = client.find_stuck("train_0", older_than=0)
            >>> [(sample.key, sample.missing) for sample in stuck.samples]
            [('a', ['answer'])]
        """
        return self._run(self._operations.find_stuck(partition_id, older_than, limit, timeout=timeout))

    async def async_find_stuck(
        self,
        partition_id: str | None = None,
        older_than: float = 60.0,
        limit: int = 20,
        *,
        timeout: float | None = None,
    ) -> StuckReport:
        """Return the samples that are not finished and whose fields and tags have not changed for some time.

        A sample is finished if every task that takes samples of its partition has consumed it, and if it has every
        field that other samples of the partition have.

        Args:
            partition_id: The partition. Default: all partitions.
            older_than: The seconds for which a sample has not changed. Samples that changed before the controller was
                started count from its start.
            limit: The number of samples to describe, those that changed first. The others are only counted.
            timeout: See `TransferQueueClient`; for each of the requests of the call.

        Returns:
            The samples by prompt, the oldest first, with the client that changed each of them last.

        Raises:
            InvalidArgumentError: `older_than` or `limit` is negative, or not a number.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> put = await client.async_kv_put("b", "train_0", {"prompt": torch.zeros(3), "answer": torch.zeros(3)})
            >>> stuck = await client.async_find_stuck("train_0", older_than=0)
            >>> [(sample.key, sample.missing) for sample in stuck.samples]
            [('a', ['answer'])]
        """
        return await self._run_async(self._operations.find_stuck(partition_id, older_than, limit, timeout=timeout))

    def status(self, *, timeout: float | None = None) -> SystemStatus:
        """Return what `tq status` shows: the verdict, the progress of each partition by field and task, and counters.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            The status; `tq status` prints it. Its `verdict` is at most a second old. The `views` of its `units` say
            which clients hold values with `copy=False`, of which process, since when and how many bytes.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> [partition.name for partition in client.status().partitions]
            ['train_0']
        """
        return self._run(self._operations.status(timeout=timeout))

    async def async_status(self, *, timeout: float | None = None) -> SystemStatus:
        """Return what `tq status` shows: the verdict, the progress of each partition by field and task, and counters.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            The status; `tq status` prints it. Its `verdict` is at most a second old. The `views` of its `units` say
            which clients hold values with `copy=False`, of which process, since when and how many bytes.

        Example:
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> [partition.name for partition in (await client.async_status()).partitions]
            ['train_0']
        """
        return await self._run_async(self._operations.status(timeout=timeout))

    def verdict(self, *, timeout: float | None = None) -> Verdict:
        """Return what slows the training down: the slowest stage, who waits for it, and since when.

        The verdict is about the last minute, or about the last four steps of the slowest task if these take longer.
        Producers have names in it if they call `tq.init(task=...)` or claim samples themselves.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            The verdict. `text` is a sentence for people; `stage` is None if nothing slows the training down.

        Example:
            >>> client.verdict().stage is None
            True
        """
        return self._run(self._operations.verdict(timeout=timeout))

    async def async_verdict(self, *, timeout: float | None = None) -> Verdict:
        """Return what slows the training down: the slowest stage, who waits for it, and since when.

        The verdict is about the last minute, or about the last four steps of the slowest task if these take longer.
        Producers have names in it if they call `tq.init(task=...)` or claim samples themselves.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            The verdict. `text` is a sentence for people; `stage` is None if nothing slows the training down.

        Example:
            >>> (await client.async_verdict()).stage is None
            True
        """
        return await self._run_async(self._operations.verdict(timeout=timeout))

    def stats(self, *, timeout: float | None = None) -> dict[str, float]:
        """Return flat figures for a logger: shares of waiting, rates, queues and staleness of each task.

        The figures are about the time since the previous call of this client, at most the last five minutes; those of
        the first call are about the last minute. Names stay the same during a run, for the first 16 tasks.
        `tq.SummaryLogger` writes these figures to TensorBoard and others.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            Figures by name, for example `tq/train/wait_share`. The page "Metrics and traces" lists all names. A
            figure that is not known, such as the staleness of a task that claimed nothing, is left out.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = client.get_meta("prompt", 2, "train_0", task_name="train")
            >>> stats = client.stats()
            >>> stats["tq/rows"], stats["tq/train/queue_rows"]
            (2.0, 0.0)
        """
        return self._run(self._operations.stats(timeout=timeout))

    async def async_stats(self, *, timeout: float | None = None) -> dict[str, float]:
        """Return flat figures for a logger: shares of waiting, rates, queues and staleness of each task.

        The figures are about the time since the previous call of this client, at most the last five minutes; those of
        the first call are about the last minute. Names stay the same during a run, for the first 16 tasks.
        `tq.SummaryLogger` writes these figures to TensorBoard and others.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            Figures by name, for example `tq/train/wait_share`. The page "Metrics and traces" lists all names. A
            figure that is not known, such as the staleness of a task that claimed nothing, is left out.

        Example:
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = await client.async_get_meta("prompt", 2, "train_0", task_name="train")
            >>> stats = await client.async_stats()
            >>> stats["tq/rows"], stats["tq/train/queue_rows"]
            (2.0, 0.0)
        """
        return await self._run_async(self._operations.stats(timeout=timeout))

    def drain_unit(self, unit: int, *, undo: bool = False, timeout: float | None = None) -> None:
        """Move everything off a storage unit, and return when it stores nothing. It receives nothing new from now on.

        Args:
            unit: The number of the unit, from 0.
            undo: True to let the unit receive values again. Default: False.
            timeout: Seconds to wait; moving continues after that. Default: no limit.

        Raises:
            InvalidArgumentError: The unit does not exist, or too few other units would be left to write to.
            WaitTimeoutError: The unit still stores values.

        Example:
            >>> client.drain_unit(0, undo=True)
        """
        return self._run(self._operations.drain_unit(unit, undo=undo, timeout=timeout))

    async def async_drain_unit(self, unit: int, *, undo: bool = False, timeout: float | None = None) -> None:
        """Move everything off a storage unit, and return when it stores nothing. It receives nothing new from now on.

        Args:
            unit: The number of the unit, from 0.
            undo: True to let the unit receive values again. Default: False.
            timeout: Seconds to wait; moving continues after that. Default: no limit.

        Raises:
            InvalidArgumentError: The unit does not exist, or too few other units would be left to write to.
            WaitTimeoutError: The unit still stores values.

        Example:
            >>> await client.async_drain_unit(0, undo=True)
        """
        return await self._run_async(self._operations.drain_unit(unit, undo=undo, timeout=timeout))

    def kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False, *, timeout: float | None = None
    ) -> BatchMeta:
        """Return the metadata of the samples with these keys, with the fields that all of them have.

        Args:
            keys: The keys (one str for one key).
            partition_id: The partition.
            create: True to reserve a sample for each unknown key. Default: unknown keys are omitted.
            timeout: See `TransferQueueClient`.

        Returns:
            The metadata, in the order of the keys.

        Raises:
            SealedError: A sample would be reserved in a sealed partition.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> client.kv_retrieve_meta(["b", "unknown"], "train_0")
            BatchMeta(size=1, partitions=['train_0'], fields=['prompt'], produced=1)
        """
        return self._run(self._operations.kv_retrieve_meta(keys, partition_id, create, timeout=timeout))

    async def async_kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False, *, timeout: float | None = None
    ) -> BatchMeta:
        """Return the metadata of the samples with these keys, with the fields that all of them have.

        Args:
            keys: The keys (one str for one key).
            partition_id: The partition.
            create: True to reserve a sample for each unknown key. Default: unknown keys are omitted.
            timeout: See `TransferQueueClient`.

        Returns:
            The metadata, in the order of the keys.

        Raises:
            SealedError: A sample would be reserved in a sealed partition.

        Example:
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> await client.async_kv_retrieve_meta(["b", "unknown"], "train_0")
            BatchMeta(size=1, partitions=['train_0'], fields=['prompt'], produced=1)
        """
        return await self._run_async(self._operations.kv_retrieve_meta(keys, partition_id, create, timeout=timeout))

    def kv_retrieve_keys(
        self, global_indexes: Sequence[int] | int, partition_id: str, *, timeout: float | None = None
    ) -> list[str | None]:
        """Return the keys of samples.

        Args:
            global_indexes: The global indexes of the samples (an int for one sample).
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The key of each sample; None for one without a key.

        Raises:
            UnknownPartitionError: The partition does not exist.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = client.kv_retrieve_meta(["b"], "train_0")
            >>> client.kv_retrieve_keys(meta.global_indexes, "train_0")
            ['b']
        """
        return self._run(self._operations.kv_retrieve_keys(global_indexes, partition_id, timeout=timeout))

    async def async_kv_retrieve_keys(
        self, global_indexes: Sequence[int] | int, partition_id: str, *, timeout: float | None = None
    ) -> list[str | None]:
        """Return the keys of samples.

        Args:
            global_indexes: The global indexes of the samples (an int for one sample).
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The key of each sample; None for one without a key.

        Raises:
            UnknownPartitionError: The partition does not exist.

        Example:
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = await client.async_kv_retrieve_meta(["b"], "train_0")
            >>> await client.async_kv_retrieve_keys(meta.global_indexes, "train_0")
            ['b']
        """
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
        fence: Fence | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Put one sample under a key: add or replace only these fields, and merge the tag.

        Args:
            key: The key.
            partition_id: The partition.
            fields: A dict of the sample's values: a tensor is the row of this sample, anything else is an object (if
                the field holds tensors, arrays and numbers become tensors). Or a TensorDict of batch size 1. Default:
                write the tag alone.
            tag: Entries to merge into the tag; `tq.DELETE` as a value removes an entry. Default: none.
            data_parser: See `put`.
            group_id: The group of the sample, usually the id of its prompt. Default: no group.
            fence: See `kv_batch_put`.
            timeout: Seconds to wait for space. Default: 0.25 s, the time in which freed space becomes available.

        Returns:
            The key, the merged tag, and the fields that the sample has after the put.

        Raises:
            InvalidArgumentError: Neither `fields` nor `tag` is given, a field is of another size, or the partition
                would have more than 4,096 fields.
            FieldTypeError: See `kv_batch_put`.
            CapacityError: See `kv_batch_put`.
            SealedError: See `kv_batch_put`.
            LockLostError: See `kv_batch_put`.
            UncarriableValueError: See `kv_batch_put`.

        Example:
            >>> meta = client.kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])}, {"step": 1})
            >>> meta.keys, meta.tags, meta.fields
            (['a'], [{'step': 1}], ['prompt'])
        """
        return self._run(
            self._operations.kv_put(
                key, partition_id, fields, tag, data_parser, group_id=group_id, fence=fence, timeout=timeout
            )
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
        fence: Fence | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Put one sample under a key: add or replace only these fields, and merge the tag.

        Args:
            key: The key.
            partition_id: The partition.
            fields: A dict of the sample's values: a tensor is the row of this sample, anything else is an object (if
                the field holds tensors, arrays and numbers become tensors). Or a TensorDict of batch size 1. Default:
                write the tag alone.
            tag: Entries to merge into the tag; `tq.DELETE` as a value removes an entry. Default: none.
            data_parser: See `put`.
            group_id: The group of the sample, usually the id of its prompt. Default: no group.
            fence: See `kv_batch_put`.
            timeout: Seconds to wait for space. Default: 0.25 s, the time in which freed space becomes available.

        Returns:
            The key, the merged tag, and the fields that the sample has after the put.

        Raises:
            InvalidArgumentError: Neither `fields` nor `tag` is given, a field is of another size, or the partition
                would have more than 4,096 fields.
            FieldTypeError: See `kv_batch_put`.
            CapacityError: See `kv_batch_put`.
            SealedError: See `kv_batch_put`.
            LockLostError: See `kv_batch_put`.
            UncarriableValueError: See `kv_batch_put`.

        Example:
            >>> meta = await client.async_kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])}, {"step": 1})
            >>> meta.keys, meta.tags, meta.fields
            (['a'], [{'step': 1}], ['prompt'])
        """
        return await self._run_joining(
            self._operations.kv_put(
                key, partition_id, fields, tag, data_parser, group_id=group_id, fence=fence, timeout=timeout
            )
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
        fence: Fence | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Put samples under keys: add or replace only these fields, and merge the tags.

        If the put fails, it left nothing.

        Args:
            keys: The keys, without repetitions (one str for one key).
            partition_id: The partition.
            fields: The columns, one row for each key. Default: write the tags alone.
            tags: One dict for each key, merged into its tag; `tq.DELETE` as a value removes an entry. Default: none.
            data_parser: See `put`.
            group_ids: One entry for each key: the group of the sample, usually the id of its prompt. Default: no
                groups.
            fence: A lock (`kv_lock`), or its token: nothing is put unless the lock is in force. Default: no condition.
            timeout: Seconds to wait for space. Default: 0.25 s, the time in which freed space becomes available.

        Returns:
            The keys, the merged tags, and the fields that every one of these keys has after the put. A put of no keys
            does nothing and returns empty metadata.

        Raises:
            InvalidArgumentError: Lengths differ, keys are repeated, neither `fields` nor `tags` is given, or the
                partition would have more than 4,096 fields.
            FieldTypeError: The values do not match the live values of a field (a ValueError).
            CapacityError: There is no space.
            SealedError: The partition is sealed and accepts no new samples.
            LockLostError: The lock of `fence` is not in force any more.
            UncarriableValueError: A value cannot be stored.

        Example:
            >>> meta = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> client.kv_batch_put(["a", "b"], "train_0", tags=[{"step": 1}, {"step": 2}]).tags
            [{'step': 1}, {'step': 2}]
        """
        return self._run(
            self._operations.kv_batch_put(
                keys, partition_id, fields, tags, data_parser, group_ids=group_ids, fence=fence, timeout=timeout
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
        fence: Fence | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Put samples under keys: add or replace only these fields, and merge the tags.

        If the put fails, it left nothing.

        Args:
            keys: The keys, without repetitions (one str for one key).
            partition_id: The partition.
            fields: The columns, one row for each key. Default: write the tags alone.
            tags: One dict for each key, merged into its tag; `tq.DELETE` as a value removes an entry. Default: none.
            data_parser: See `put`.
            group_ids: One entry for each key: the group of the sample, usually the id of its prompt. Default: no
                groups.
            fence: A lock (`kv_lock`), or its token: nothing is put unless the lock is in force. Default: no condition.
            timeout: Seconds to wait for space. Default: 0.25 s, the time in which freed space becomes available.

        Returns:
            The keys, the merged tags, and the fields that every one of these keys has after the put. A put of no keys
            does nothing and returns empty metadata.

        Raises:
            InvalidArgumentError: Lengths differ, keys are repeated, neither `fields` nor `tags` is given, or the
                partition would have more than 4,096 fields.
            FieldTypeError: The values do not match the live values of a field (a ValueError).
            CapacityError: There is no space.
            SealedError: The partition is sealed and accepts no new samples.
            LockLostError: The lock of `fence` is not in force any more.
            UncarriableValueError: A value cannot be stored.

        Example:
            >>> meta = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> (await client.async_kv_batch_put(["a", "b"], "train_0", tags=[{"step": 1}, {"step": 2}])).tags
            [{'step': 1}, {'step': 2}]
        """
        return await self._run_async(
            self._operations.kv_batch_put(
                keys, partition_id, fields, tags, data_parser, group_ids=group_ids, fence=fence, timeout=timeout
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
        shared: bool = False,
        device: torch.device | str | None = None,
        copy: bool = True,
        out: TensorDictBase | Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """Return the values of the samples with these keys. Consumes nothing. `get_data` takes a BatchMeta instead.

        Unknown keys are omitted, and so are fields that not all of the found keys have. One warning names what was
        omitted.

        Args:
            keys: The keys (one str for one key). Repeated keys are repeated in the result.
            partition_id: The partition.
            select_fields: The fields to return. Default: all fields that every found key has.
            missing: "drop" omits what is missing, "error" raises an error instead. Default: "drop".
            layout: See `get_data`.
            shared: See `get_data`.
            device: See `get_data`.
            copy: See `get_data`.
            out: See `get_data`.
            timeout: See `TransferQueueClient`.

        Returns:
            The values, one row for each found key, in the order of the keys.

        Raises:
            InvalidArgumentError: No key was given or found ("not found"), the found keys share no field ("not ready"),
                or anything is missing and `missing` is "error".

        Example:
            >>> meta = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
            >>> client.kv_batch_get(["b", "a"], "train_0")["reward"].tolist()
            [1.0, 0.0]
        """
        return self._run(
            self._operations.kv_batch_get(
                keys,
                partition_id,
                select_fields,
                missing=missing,
                layout=layout,
                shared=shared,
                device=device,
                copy=copy,
                out=out,
                timeout=timeout,
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
        shared: bool = False,
        device: torch.device | str | None = None,
        copy: bool = True,
        out: TensorDictBase | Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """Return the values of the samples with these keys. Consumes nothing. `get_data` takes a BatchMeta instead.

        Unknown keys are omitted, and so are fields that not all of the found keys have. One warning names what was
        omitted.

        Args:
            keys: The keys (one str for one key). Repeated keys are repeated in the result.
            partition_id: The partition.
            select_fields: The fields to return. Default: all fields that every found key has.
            missing: "drop" omits what is missing, "error" raises an error instead. Default: "drop".
            layout: See `get_data`.
            shared: See `get_data`.
            device: See `get_data`.
            copy: See `get_data`.
            out: See `get_data`.
            timeout: See `TransferQueueClient`.

        Returns:
            The values, one row for each found key, in the order of the keys.

        Raises:
            InvalidArgumentError: No key was given or found ("not found"), the found keys share no field ("not ready"),
                or anything is missing and `missing` is "error".

        Example:
            >>> meta = await client.async_kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
            >>> (await client.async_kv_batch_get(["b", "a"], "train_0"))["reward"].tolist()
            [1.0, 0.0]
        """
        return await self._run_joining(
            self._operations.kv_batch_get(
                keys,
                partition_id,
                select_fields,
                missing=missing,
                layout=layout,
                shared=shared,
                device=device,
                copy=copy,
                out=out,
                timeout=timeout,
            )
        )

    def kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | str | None = None,
        *,
        layout: str = "jagged",
        shared: bool = False,
        device: torch.device | str | None = None,
        copy: bool = True,
        out: TensorDictBase | Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """Return the values of the samples that a KVBatchMeta names: `kv_batch_get` with its keys. Consumes nothing.

        Args:
            meta: The samples, as a put returned them.
            select_fields: The fields to return, out of `meta.fields`. Default: all of `meta.fields`.
            layout: See `get_data`.
            shared: See `get_data`.
            device: See `get_data`.
            copy: See `get_data`.
            out: See `get_data`.
            timeout: See `TransferQueueClient`.

        Returns:
            The values, one row for each key, in the order of the keys.

        Raises:
            InvalidArgumentError: `meta` has no partition_id, no fields, or not the selected ones. Or see
                `kv_batch_get`.

        Example:
            >>> meta = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
            >>> client.kv_batch_get_by_meta(meta)["reward"].tolist()
            [0.0, 1.0]
        """
        return self._run(
            self._operations.kv_batch_get_by_meta(
                meta, select_fields, layout=layout, shared=shared, device=device, copy=copy, out=out, timeout=timeout
            )
        )

    async def async_kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | str | None = None,
        *,
        layout: str = "jagged",
        shared: bool = False,
        device: torch.device | str | None = None,
        copy: bool = True,
        out: TensorDictBase | Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """Return the values of the samples that a KVBatchMeta names: `kv_batch_get` with its keys. Consumes nothing.

        Args:
            meta: The samples, as a put returned them.
            select_fields: The fields to return, out of `meta.fields`. Default: all of `meta.fields`.
            layout: See `get_data`.
            shared: See `get_data`.
            device: See `get_data`.
            copy: See `get_data`.
            out: See `get_data`.
            timeout: See `TransferQueueClient`.

        Returns:
            The values, one row for each key, in the order of the keys.

        Raises:
            InvalidArgumentError: `meta` has no partition_id, no fields, or not the selected ones. Or see
                `kv_batch_get`.

        Example:
            >>> meta = await client.async_kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
            >>> (await client.async_kv_batch_get_by_meta(meta))["reward"].tolist()
            [0.0, 1.0]
        """
        return await self._run_joining(
            self._operations.kv_batch_get_by_meta(
                meta, select_fields, layout=layout, shared=shared, device=device, copy=copy, out=out, timeout=timeout
            )
        )

    def kv_list(
        self, partition_id: str | None = None, *, where: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the keys and tags of one partition or of all.

        A long list is fetched in pages, so that it does not delay other requests. What is put or cleared meanwhile may
        or may not be in it.

        Args:
            partition_id: The partition. Default: all partitions.
            where: Tag entries that a key must have, with equal values; see `wait_for_change`. Default: every key.
            timeout: See `TransferQueueClient`.

        Returns:
            Partition -> key -> tag, keys in order of creation; {} for a partition that does not exist.

        Example:
            >>> meta = client.kv_batch_put(["a", "b"], "train_0", tags=[{"step": 1}, {"step": 2}])
            >>> client.kv_list("train_0", where={"step": 2})
            {'train_0': {'b': {'step': 2}}}
        """
        return self._run(self._operations.kv_list(partition_id, where=where, timeout=timeout))

    async def async_kv_list(
        self, partition_id: str | None = None, *, where: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the keys and tags of one partition or of all.

        A long list is fetched in pages, so that it does not delay other requests. What is put or cleared meanwhile may
        or may not be in it.

        Args:
            partition_id: The partition. Default: all partitions.
            where: Tag entries that a key must have, with equal values; see `wait_for_change`. Default: every key.
            timeout: See `TransferQueueClient`.

        Returns:
            Partition -> key -> tag, keys in order of creation; {} for a partition that does not exist.

        Example:
            >>> meta = await client.async_kv_batch_put(["a", "b"], "train_0", tags=[{"step": 1}, {"step": 2}])
            >>> await client.async_kv_list("train_0", where={"step": 2})
            {'train_0': {'b': {'step': 2}}}
        """
        return await self._run_async(self._operations.kv_list(partition_id, where=where, timeout=timeout))

    def kv_clear(self, keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None) -> None:
        """Remove the samples with these keys. Unknown keys and partitions are ignored.

        Args:
            keys: The keys (one str for one key).
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Example:
            >>> meta = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> client.kv_clear("a", "train_0")
            >>> client.kv_list("train_0")
            {'train_0': {'b': {}}}
        """
        return self._run(self._operations.kv_clear(keys, partition_id, timeout=timeout))

    async def async_kv_clear(
        self, keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> None:
        """Remove the samples with these keys. Unknown keys and partitions are ignored.

        Args:
            keys: The keys (one str for one key).
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Example:
            >>> meta = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> await client.async_kv_clear("a", "train_0")
            >>> await client.async_kv_list("train_0")
            {'train_0': {'b': {}}}
        """
        return await self._run_async(self._operations.kv_clear(keys, partition_id, timeout=timeout))

    def kv_update(
        self,
        key: str,
        partition_id: str,
        fields: Sequence[str] | str,
        fn: Callable[[dict[str, Any]], Mapping[str, Any] | None],
        *,
        empty: Mapping[str, Any] | None = None,
        tag: Mapping[str, Any] | None = None,
        fence: Fence | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any] | None:
        """Read fields of one sample, let a function change them, and write the result, as one atomic step.

        No other put to this key happens between the read and the write: if there was one, the update reads the sample
        again and calls `fn` again. Several updates of one key never overwrite each other's results. `fn` runs in this
        process; it should be fast, and have no side effects, because it may run several times.

        If the reply to the write is lost (ConnectionLostError, WaitTimeoutError), the update happened once or not at
        all, as with every put.

        Args:
            key: The key.
            partition_id: The partition.
            fields: The fields that `fn` gets (one str for one field); [] for none.
            fn: A function of a dict with the values of these fields, in the form in which `kv_put` takes them: a tensor
                is the row of this sample. It returns a dict of the fields to write, which may be other fields than
                those it got, or None to write nothing.
            empty: The values that `fn` gets for fields that have no value, because the key is new or was put without
                them; one entry for each of `fields`. The key is created if it does not exist. Default: such a key is an
                error.
            tag: Entries to merge into the tag together with the write, as in `kv_put`. Default: none.
            fence: See `kv_batch_put`.
            timeout: Seconds in which an attempt must succeed. Default: the setting `timeouts.call` (60 s).

        Returns:
            What `fn` returned: the fields that were written; None if nothing was written.

        Raises:
            InvalidArgumentError: The key does not exist or lacks a field, and there is no `empty`; or `fn` returned
                something other than a dict or None.
            WaitTimeoutError: Other clients changed the sample in each attempt: nothing was written, and `__cause__` is
                a VersionConflictError. Or a server did not reply in time.
            LockLostError: The lock of `fence` is not in force any more.
            FieldTypeError: See `kv_batch_put`.
            CapacityError: See `kv_batch_put`.
            SealedError: See `kv_batch_put`.
            UncarriableValueError: See `kv_batch_put`.

        Example:
            >>> put = client.kv_put("steps", "train_0", {"n": 1})
            >>> client.kv_update("steps", "train_0", "n", lambda old: {"n": old["n"] + 1})
            {'n': 2}
            >>> client.kv_update("new", "train_0", "n", lambda old: {"n": old["n"] + 1}, empty={"n": 0})
            {'n': 1}
        """
        return self._run(
            self._operations.kv_update(
                key, partition_id, fields, fn, empty=empty, tag=tag, fence=fence, timeout=timeout
            )
        )

    async def async_kv_update(
        self,
        key: str,
        partition_id: str,
        fields: Sequence[str] | str,
        fn: Callable[[dict[str, Any]], Mapping[str, Any] | None],
        *,
        empty: Mapping[str, Any] | None = None,
        tag: Mapping[str, Any] | None = None,
        fence: Fence | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any] | None:
        """Read fields of one sample, let a function change them, and write the result, as one atomic step.

        No other put to this key happens between the read and the write: if there was one, the update reads the sample
        again and calls `fn` again. Several updates of one key never overwrite each other's results. `fn` runs in this
        process; it should be fast, and have no side effects, because it may run several times.

        If the reply to the write is lost (ConnectionLostError, WaitTimeoutError), the update happened once or not at
        all, as with every put.

        Args:
            key: The key.
            partition_id: The partition.
            fields: The fields that `fn` gets (one str for one field); [] for none.
            fn: A function of a dict with the values of these fields, in the form in which `kv_put` takes them: a tensor
                is the row of this sample. It returns a dict of the fields to write, which may be other fields than
                those it got, or None to write nothing.
            empty: The values that `fn` gets for fields that have no value, because the key is new or was put without
                them; one entry for each of `fields`. The key is created if it does not exist. Default: such a key is an
                error.
            tag: Entries to merge into the tag together with the write, as in `kv_put`. Default: none.
            fence: See `kv_batch_put`.
            timeout: Seconds in which an attempt must succeed. Default: the setting `timeouts.call` (60 s).

        Returns:
            What `fn` returned: the fields that were written; None if nothing was written.

        Raises:
            InvalidArgumentError: The key does not exist or lacks a field, and there is no `empty`; or `fn` returned
                something other than a dict or None.
            WaitTimeoutError: Other clients changed the sample in each attempt: nothing was written, and `__cause__` is
                a VersionConflictError. Or a server did not reply in time.
            LockLostError: The lock of `fence` is not in force any more.
            FieldTypeError: See `kv_batch_put`.
            CapacityError: See `kv_batch_put`.
            SealedError: See `kv_batch_put`.
            UncarriableValueError: See `kv_batch_put`.

        Example:
            >>> put = await client.async_kv_put("steps", "train_0", {"n": 1})
            >>> await client.async_kv_update("steps", "train_0", "n", lambda old: {"n": old["n"] + 1})
            {'n': 2}
            >>> await client.async_kv_update("new", "train_0", "n", lambda old: {"n": old["n"] + 1}, empty={"n": 0})
            {'n': 1}
        """
        return await self._run_async(
            self._operations.kv_update(
                key, partition_id, fields, fn, empty=empty, tag=tag, fence=fence, timeout=timeout
            )
        )

    def ack(self, metadata: BatchMeta, *, timeout: float | None = None) -> bool:
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
        return self._run(self._operations.ack(metadata, timeout=timeout))

    async def async_ack(self, metadata: BatchMeta, *, timeout: float | None = None) -> bool:
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
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = await client.async_get_meta("prompt", 2, "train_0", task_name="update", lease=60)
            >>> await client.async_ack(meta)
            True
        """
        return await self._run_joining(self._operations.ack(metadata, timeout=timeout))

    def nack(self, metadata: BatchMeta, *, delivered: bool = True, timeout: float | None = None) -> bool:
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
        return self._run(self._operations.nack(metadata, delivered=delivered, timeout=timeout))

    async def async_nack(self, metadata: BatchMeta, *, delivered: bool = True, timeout: float | None = None) -> bool:
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
            >>> put = await client.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = await client.async_get_meta("prompt", 2, "train_0", task_name="update", lease=60)
            >>> await client.async_nack(meta)
            True
            >>> (await client.async_get_meta("prompt", 2, "train_0", task_name="update", lease=60)).deliveries
            [2, 2]
        """
        return await self._run_async(self._operations.nack(metadata, delivered=delivered, timeout=timeout))

    def declare_rank_gone(
        self, partition_id: str, task_name: str, dp_rank: int, *, timeout: float | None = None
    ) -> int:
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
        return self._run(self._operations.declare_rank_gone(partition_id, task_name, dp_rank, timeout=timeout))

    async def async_declare_rank_gone(
        self, partition_id: str, task_name: str, dp_rank: int, *, timeout: float | None = None
    ) -> int:
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
            >>> put = await client.async_kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> await client.async_declare_rank_gone("train_0", "update", dp_rank=3)
            0
        """
        return await self._run_async(
            self._operations.declare_rank_gone(partition_id, task_name, dp_rank, timeout=timeout)
        )

    def kv_lock_list(self, partition_id: str | None = None, *, timeout: float | None = None) -> list[LockEntry]:
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
        return self._run(self._operations.kv_lock_list(partition_id, timeout=timeout))

    async def async_kv_lock_list(
        self, partition_id: str | None = None, *, timeout: float | None = None
    ) -> list[LockEntry]:
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
            >>> await client.async_kv_lock_list()
            []
        """
        return await self._run_async(self._operations.kv_lock_list(partition_id, timeout=timeout))

    def begin_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        previous: str | os.PathLike[str] | None = None,
        *,
        partitions: str | Sequence[str] | None = None,
        keys: str | Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> CheckpointSave:
        """Fix the present state of the system, so that several calls can save it. `end_checkpoint` must follow.

        The system continues meanwhile, but does not reuse the space of the saved samples. Most programs call
        `tq.save_checkpoint` instead.

        Args:
            checkpoint_dir: A folder: until `end_checkpoint`, saves of this client into it use this pending save, and
                `previous`, without further arguments. Default: none.
            previous: The older checkpoint whose files may be linked to. Default: the one in `checkpoint_dir`.
            partitions: See `tq.save_checkpoint`.
            keys: See `tq.save_checkpoint`.
            timeout: See `TransferQueueClient`.

        Returns:
            The pending save.

        Raises:
            InvalidArgumentError: `partitions` or `keys` is not valid.
            UnknownPartitionError: There is no such partition.
            StorageKeyNotFoundError: The partition has no sample with such a key.
            UnitLostError: A storage unit was lost at this moment. Call again to save the remaining samples.
            CheckpointError: The controller could not write its state.

        Example:
            >>> pending = client.begin_checkpoint()
            >>> client.save_controller_checkpoint("state.pkl", cut=pending)
            >>> client.end_checkpoint(pending)
            True
        """
        return self._run(
            self._operations.begin_checkpoint(
                checkpoint_dir, previous, partitions=partitions, keys=keys, timeout=timeout
            )
        )

    async def async_begin_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        previous: str | os.PathLike[str] | None = None,
        *,
        partitions: str | Sequence[str] | None = None,
        keys: str | Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> CheckpointSave:
        """Fix the present state of the system, so that several calls can save it. `end_checkpoint` must follow.

        The system continues meanwhile, but does not reuse the space of the saved samples. Most programs call
        `tq.save_checkpoint` instead.

        Args:
            checkpoint_dir: A folder: until `end_checkpoint`, saves of this client into it use this pending save, and
                `previous`, without further arguments. Default: none.
            previous: The older checkpoint whose files may be linked to. Default: the one in `checkpoint_dir`.
            partitions: See `tq.save_checkpoint`.
            keys: See `tq.save_checkpoint`.
            timeout: See `TransferQueueClient`.

        Returns:
            The pending save.

        Raises:
            InvalidArgumentError: `partitions` or `keys` is not valid.
            UnknownPartitionError: There is no such partition.
            StorageKeyNotFoundError: The partition has no sample with such a key.
            UnitLostError: A storage unit was lost at this moment. Call again to save the remaining samples.
            CheckpointError: The controller could not write its state.

        Example:
            >>> pending = await client.async_begin_checkpoint()
            >>> await client.async_save_controller_checkpoint("state.pkl", cut=pending)
            >>> await client.async_end_checkpoint(pending)
            True
        """
        return await self._run_threaded(
            self._operations.begin_checkpoint(
                checkpoint_dir, previous, partitions=partitions, keys=keys, timeout=timeout
            )
        )

    def end_checkpoint(self, cut: CheckpointSave, *, timeout: float | None = None) -> bool:
        """End a pending save and release its samples.

        Args:
            cut: The pending save of `begin_checkpoint`.
            timeout: See `TransferQueueClient`.

        Returns:
            True if the samples were kept until now, so that all copies are complete.

        Raises:
            UnitLostError: A storage unit with samples of the save was lost meanwhile, so it is not known whether the
                copies are complete.

        Example:
            >>> pending = client.begin_checkpoint()
            >>> client.end_checkpoint(pending)
            True
        """
        return self._run(self._operations.end_checkpoint(cut, timeout=timeout))

    async def async_end_checkpoint(self, cut: CheckpointSave, *, timeout: float | None = None) -> bool:
        """End a pending save and release its samples.

        Args:
            cut: The pending save of `begin_checkpoint`.
            timeout: See `TransferQueueClient`.

        Returns:
            True if the samples were kept until now, so that all copies are complete.

        Raises:
            UnitLostError: A storage unit with samples of the save was lost meanwhile, so it is not known whether the
                copies are complete.

        Example:
            >>> pending = await client.async_begin_checkpoint()
            >>> await client.async_end_checkpoint(pending)
            True
        """
        return await self._run_threaded(self._operations.end_checkpoint(cut, timeout=timeout))

    def save_controller_checkpoint(
        self, path: str | os.PathLike[str], *, cut: CheckpointSave | None = None, timeout: float | None = None
    ) -> None:
        """Write the controller's state, without the values of samples, into a file. `tq.save_checkpoint` saves both.

        Args:
            path: The file. It is replaced in one step; missing parents are created.
            cut: The pending save to write. Default: the present state.
            timeout: See `TransferQueueClient`.

        Raises:
            CheckpointError: The controller could not write its state, or was restarted meanwhile.
            UnitLostError: See `begin_checkpoint`.

        Example:
            >>> client.save_controller_checkpoint("state.pkl")
        """
        return self._run(self._operations.save_controller_checkpoint(path, cut=cut, timeout=timeout))

    async def async_save_controller_checkpoint(
        self, path: str | os.PathLike[str], *, cut: CheckpointSave | None = None, timeout: float | None = None
    ) -> None:
        """Write the controller's state, without the values of samples, into a file. `tq.save_checkpoint` saves both.

        Args:
            path: The file. It is replaced in one step; missing parents are created.
            cut: The pending save to write. Default: the present state.
            timeout: See `TransferQueueClient`.

        Raises:
            CheckpointError: The controller could not write its state, or was restarted meanwhile.
            UnitLostError: See `begin_checkpoint`.

        Example:
            >>> await client.async_save_controller_checkpoint("state.pkl")
        """
        return await self._run_threaded(self._operations.save_controller_checkpoint(path, cut=cut, timeout=timeout))

    def save_storage_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        cut: CheckpointSave | None = None,
        previous: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Write the values of all samples into `simple_storage` of a folder. `tq.save_checkpoint` saves all.

        Args:
            checkpoint_dir: The folder. Its `simple_storage` is replaced in one step.
            cut: The pending save to write. Default: the present samples.
            previous: An older checkpoint: files of it that contain enough of the saved bytes are linked to and not
                written again. Default: the one in `checkpoint_dir`.
            timeout: See `TransferQueueClient`.

        Raises:
            UnitLostError: A storage unit was lost meanwhile; `tq.save_checkpoint` saves the remaining samples.
            CheckpointError: A server was restarted meanwhile, or another client is saving into the folder.
            OSError: The disk is full or cannot be written to.

        Example:
            >>> client.save_storage_checkpoint("checkpoint")
        """
        return self._run(
            self._operations.save_storage_checkpoint(checkpoint_dir, cut=cut, previous=previous, timeout=timeout)
        )

    async def async_save_storage_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        cut: CheckpointSave | None = None,
        previous: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Write the values of all samples into `simple_storage` of a folder. `tq.save_checkpoint` saves all.

        Args:
            checkpoint_dir: The folder. Its `simple_storage` is replaced in one step.
            cut: The pending save to write. Default: the present samples.
            previous: An older checkpoint: files of it that contain enough of the saved bytes are linked to and not
                written again. Default: the one in `checkpoint_dir`.
            timeout: See `TransferQueueClient`.

        Raises:
            UnitLostError: A storage unit was lost meanwhile; `tq.save_checkpoint` saves the remaining samples.
            CheckpointError: A server was restarted meanwhile, or another client is saving into the folder.
            OSError: The disk is full or cannot be written to.

        Example:
            >>> await client.async_save_storage_checkpoint("checkpoint")
        """
        return await self._run_threaded(
            self._operations.save_storage_checkpoint(checkpoint_dir, cut=cut, previous=previous, timeout=timeout)
        )

    def load_storage_checkpoint(
        self, checkpoint_dir: str | os.PathLike[str], *, allow_pickle: bool = True, timeout: float | None = None
    ) -> None:
        """Write the bytes of a checkpoint's samples into storage. `load_controller_checkpoint` then makes them visible.

        If the folder also contains the controller's state, only the bytes that this state needs are written.

        Args:
            checkpoint_dir: The folder that `save_storage_checkpoint` wrote into.
            allow_pickle: See `tq.load_checkpoint`. With False the folder must contain the controller's state, too.
                Default: True.
            timeout: See `TransferQueueClient`.

        Raises:
            CheckpointNotFoundError: The folder has no manifest.
            CheckpointError: The manifest does not match its files, or a file is damaged.
            CapacityError: There is no space for the samples in addition to the present ones.

        Example:
            >>> tq.save_checkpoint("checkpoint")
            >>> client.load_storage_checkpoint("checkpoint")
            >>> client.load_controller_checkpoint("checkpoint/controller_state.pkl")
        """
        return self._run(
            self._operations.load_storage_checkpoint(checkpoint_dir, allow_pickle=allow_pickle, timeout=timeout)
        )

    async def async_load_storage_checkpoint(
        self, checkpoint_dir: str | os.PathLike[str], *, allow_pickle: bool = True, timeout: float | None = None
    ) -> None:
        """Write the bytes of a checkpoint's samples into storage. `load_controller_checkpoint` then makes them visible.

        If the folder also contains the controller's state, only the bytes that this state needs are written.

        Args:
            checkpoint_dir: The folder that `save_storage_checkpoint` wrote into.
            allow_pickle: See `tq.load_checkpoint`. With False the folder must contain the controller's state, too.
                Default: True.
            timeout: See `TransferQueueClient`.

        Raises:
            CheckpointNotFoundError: The folder has no manifest.
            CheckpointError: The manifest does not match its files, or a file is damaged.
            CapacityError: There is no space for the samples in addition to the present ones.

        Example:
            >>> tq.save_checkpoint("checkpoint")
            >>> await client.async_load_storage_checkpoint("checkpoint")
            >>> await client.async_load_controller_checkpoint("checkpoint/controller_state.pkl")
        """
        return await self._run_threaded(
            self._operations.load_storage_checkpoint(checkpoint_dir, allow_pickle=allow_pickle, timeout=timeout)
        )

    def load_controller_checkpoint(
        self, path: str | os.PathLike[str], *, allow_pickle: bool = True, timeout: float | None = None
    ) -> None:
        """Replace the system's state by the one in a file, after `load_storage_checkpoint` has written its samples.

        The previous samples are gone, and their metadata is refused. New global indexes continue after the higher of
        both counters.

        Args:
            path: The file that `save_controller_checkpoint` wrote.
            allow_pickle: The same as for `load_storage_checkpoint`. With False, tags that need pickle are refused, too.
                Default: True.
            timeout: See `TransferQueueClient`.

        Raises:
            CheckpointNotFoundError: The file does not exist.
            CheckpointError: The file is not a saved state, or its samples were not loaded.

        Example:
            >>> tq.save_checkpoint("checkpoint")
            >>> client.load_storage_checkpoint("checkpoint")
            >>> client.load_controller_checkpoint("checkpoint/controller_state.pkl")
        """
        return self._run(self._operations.load_controller_checkpoint(path, allow_pickle=allow_pickle, timeout=timeout))

    async def async_load_controller_checkpoint(
        self, path: str | os.PathLike[str], *, allow_pickle: bool = True, timeout: float | None = None
    ) -> None:
        """Replace the system's state by the one in a file, after `load_storage_checkpoint` has written its samples.

        The previous samples are gone, and their metadata is refused. New global indexes continue after the higher of
        both counters.

        Args:
            path: The file that `save_controller_checkpoint` wrote.
            allow_pickle: The same as for `load_storage_checkpoint`. With False, tags that need pickle are refused, too.
                Default: True.
            timeout: See `TransferQueueClient`.

        Raises:
            CheckpointNotFoundError: The file does not exist.
            CheckpointError: The file is not a saved state, or its samples were not loaded.

        Example:
            >>> tq.save_checkpoint("checkpoint")
            >>> await client.async_load_storage_checkpoint("checkpoint")
            >>> await client.async_load_controller_checkpoint("checkpoint/controller_state.pkl")
        """
        return await self._run_threaded(
            self._operations.load_controller_checkpoint(path, allow_pickle=allow_pickle, timeout=timeout)
        )

    def load_samples(
        self,
        checkpoint_dir: str | os.PathLike[str],
        partitions: str | Sequence[str],
        *,
        keys: str | Sequence[str] | None = None,
        allow_pickle: bool = True,
        timeout: float | None = None,
    ) -> CheckpointReport:
        """Add partitions of a checkpoint to the running system, as `tq.load_checkpoint(..., partitions=...)` does.

        Args:
            checkpoint_dir: The folder that `tq.save_checkpoint` wrote.
            partitions: The partitions to load.
            keys: The keys of the samples to load. Default: all samples.
            allow_pickle: See `tq.load_checkpoint`. Default: True.
            timeout: See `TransferQueueClient`.

        Returns:
            The numbers of loaded samples, and the lost values.

        Raises:
            InvalidArgumentError: See `tq.load_checkpoint`.
            UnknownPartitionError: The checkpoint has no such partition.
            StorageKeyNotFoundError: The partition of the checkpoint has no sample with such a key.
            SealedError: A partition of that name is sealed in the running system.
            CheckpointNotFoundError: The folder or a part of the checkpoint does not exist.
            CheckpointError: The checkpoint is damaged.
            CapacityError: There is no space for the samples.

        Example:
            >>> meta = tq.kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])})
            >>> tq.save_checkpoint("checkpoint")
            >>> client.clear_partition("train_0")
            >>> client.load_samples("checkpoint", "train_0").samples
            {'train_0': 1}
        """
        return self._run(
            self._operations.load_samples(
                checkpoint_dir, partitions, keys=keys, allow_pickle=allow_pickle, timeout=timeout
            )
        )

    async def async_load_samples(
        self,
        checkpoint_dir: str | os.PathLike[str],
        partitions: str | Sequence[str],
        *,
        keys: str | Sequence[str] | None = None,
        allow_pickle: bool = True,
        timeout: float | None = None,
    ) -> CheckpointReport:
        """Add partitions of a checkpoint to the running system, as `tq.load_checkpoint(..., partitions=...)` does.

        Args:
            checkpoint_dir: The folder that `tq.save_checkpoint` wrote.
            partitions: The partitions to load.
            keys: The keys of the samples to load. Default: all samples.
            allow_pickle: See `tq.load_checkpoint`. Default: True.
            timeout: See `TransferQueueClient`.

        Returns:
            The numbers of loaded samples, and the lost values.

        Raises:
            InvalidArgumentError: See `tq.load_checkpoint`.
            UnknownPartitionError: The checkpoint has no such partition.
            StorageKeyNotFoundError: The partition of the checkpoint has no sample with such a key.
            SealedError: A partition of that name is sealed in the running system.
            CheckpointNotFoundError: The folder or a part of the checkpoint does not exist.
            CheckpointError: The checkpoint is damaged.
            CapacityError: There is no space for the samples.

        Example:
            >>> meta = tq.kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])})
            >>> tq.save_checkpoint("checkpoint")
            >>> await client.async_clear_partition("train_0")
            >>> (await client.async_load_samples("checkpoint", "train_0")).samples
            {'train_0': 1}
        """
        return await self._run_threaded(
            self._operations.load_samples(
                checkpoint_dir, partitions, keys=keys, allow_pickle=allow_pickle, timeout=timeout
            )
        )
