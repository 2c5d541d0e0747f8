"""Define what a client can do with samples and partitions: each operation once, as a generator of calls.

`tools/generate_surface.py` generates the blocking and the awaitable methods of `TransferQueueClient`, and the KV
functions of the package, from the signatures and docstrings of the operations. An operation yields `Call`s, and its
driver sends the replies into it (`net/drivers/blocking_driver.py`, `net/drivers/asyncio_driver.py`, `testing/`). Every
operation takes `timeout=`, which `TransferQueueClient` explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from transfer_queue.client.conversion import arguments, replies
from transfer_queue.client.conversion.arguments import ConsumedBy, DataParser, Tags
from transfer_queue.client.conversion.change_events import PartitionChange, partition_change
from transfer_queue.client.data.data_path import Operation
from transfer_queue.client.operations.checkpoint_operations import CheckpointOperations
from transfer_queue.client.operations.fetch_operations import FetchOperations
from transfer_queue.client.operations.kv_operations import KVOperations
from transfer_queue.client.operations.lease_operations import LeaseOperations
from transfer_queue.config.environment import get_metadata_timeout, pre_alloc_sample_num
from transfer_queue.errors import (
    InvalidArgumentError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ClaimReply, Finish, ResetConsumption
from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.partitions import (
    ClearPartition,
    CreatePartition,
    ListPartitions,
    Seal,
    SetGroupDemand,
    SetPolicyVersion,
    TakeGroupDemand,
)
from transfer_queue.messages.puts import ClearRows, Drop, Reserve
from transfer_queue.messages.queries import (
    ChangeReply,
    CheckConsumption,
    CheckProduction,
    ConsumptionStatus,
    Explain,
    ProductionStatus,
    ShowRows,
    StatusReply,
    Watch,
)
from transfer_queue.messages.system import Drain, Status, SystemStatus
from transfer_queue.metadata import BatchMeta

LEAST_WAIT = 0.001  # seconds: a fetch that may wait for none ends like one that waited, and says what is missing


class Readiness(NamedTuple):
    """The result of `await_ready`."""

    ended: bool
    """True if such a fetch can never be met."""
    version: int
    """The version of the partition, which grows with every change in it; -1 if the partition does not exist."""


class Operations(FetchOperations, KVOperations, LeaseOperations, CheckpointOperations):
    """All operations of one client."""

    # ------------------------------------------------------------ metadata interface

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
        """Return metadata of samples of a partition: fetch ready ones, reserve new ones, or look at all.

        Args:
            data_fields: The fields that the samples must have (one str for one field).
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
        yield from self._state.learn()
        fields = arguments.names(data_fields, "data_fields")
        if mode == "insert":
            wait = arguments.seconds(timeout)
            request = Reserve(partition_id, arguments.count(batch_size), None, pre_alloc_sample_num(), wait=wait)
            return self._meta(partition_id, (yield from self._ask(request, ClaimReply, None, parked=wait)))
        if mode == "force_fetch":
            shown = yield from self._ask(ShowRows(partition_id, fields), ClaimReply, timeout)
            return self._meta(partition_id, shown)
        if mode != "fetch":
            raise InvalidArgumentError(f"mode must be 'fetch', 'insert' or 'force_fetch', got {mode!r}")
        if timeout is None and not self._state.settings.polling_mode:
            timeout = get_metadata_timeout()
        if timeout is not None:
            timeout = max(arguments.seconds(timeout) or 0.0, LEAST_WAIT)
        claim = self._claim(
            partition_id, task_name, fields, arguments.count(batch_size), sampling_config, timeout, hold=hold,
            lease=lease, replicas=replicas,
        )  # fmt: skip
        return self._meta(partition_id, (yield from self._claimed(claim)), claim.lease)

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
        """Wait for the next batch of a task, as a loader does. A timeout is not an error.

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
        found = yield from self._awaited(
            data_fields, batch_size, partition_id, task_name, sampling_config, finite, hold, lease, replicas, timeout,
            ahead=ahead,
        )  # fmt: skip
        return found.meta, found.ended

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
        yield from self._state.learn()
        timeout = get_metadata_timeout() if timeout is None else timeout
        fields = arguments.names(data_fields, "data_fields")
        claim = self._claim(
            partition_id, task_name, fields, arguments.count(batch_size), sampling_config, timeout, True, finite, since
        )
        reply = yield from self._ask(claim, ClaimReply, None, parked=timeout)
        return Readiness(reply.ended, reply.version)

    def wait_for_change(
        self,
        partition_id: str,
        since: int | None = None,
        where: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Operation[PartitionChange]:
        """Wait until samples of a partition change, and return the changes.

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
            InvalidArgumentError: `validated_filter` is not a dict of tag entries, or `since` is not a version.

        Example:
            >>> put = client.kv_put("a", "train_0", tag={"status": "done"})
            >>> change = client.wait_for_change("train_0", where={"status": "done"})
            >>> change.keys, change.tags
            (['a'], [{'status': 'done'}])
            >>> bool(client.wait_for_change("train_0", change.version, timeout=0))
            False
        """
        yield from self._state.learn()
        timeout = get_metadata_timeout() if timeout is None else timeout
        allow = self._state.settings.allow_pickle
        timeout = arguments.seconds(timeout)
        watch = Watch(partition_id, arguments.version(since), arguments.validated_filter(where, allow), timeout)
        return partition_change((yield from self._ask(watch, ChangeReply, None, parked=timeout)), allow)

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
    ) -> Operation[BatchMeta]:
        """Write columns: as new samples of a partition, or as fields of existing samples.

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
            InvalidArgumentError: Sizes do not match.
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
        if metadata is not None:
            arguments.batch_meta(metadata)
        yield from self._state.learn()
        rows = len(metadata) if metadata is not None else arguments.rows_of(data)
        if metadata is None and partition_id is None:
            raise InvalidArgumentError("put needs partition_id (for new samples) or metadata (for existing ones)")
        if metadata is not None and not rows and not arguments.rows_of(data):
            return metadata
        groups = arguments.groups(group_ids, rows)
        given = arguments.tags(tags, rows)
        sent = self._tags(given)
        if metadata is None and not rows:
            arguments.partition(partition_id)
            return BatchMeta()
        columns = self._parsed(data, rows, data_parser)
        encoded = self._encode(columns, rows)
        if metadata is None:
            assert partition_id is not None
            if not encoded.schema:
                raise InvalidArgumentError("a put of new samples needs at least one field; data has none")
            reply = yield from self._publish(
                encoded, timeout, partition=partition_id, count=rows, groups=groups, tags=sent,
                pre_allocate=pre_alloc_sample_num(),
            )  # fmt: skip
            indexes = np.frombuffer(reply.rows, "<i8")
            meta = BatchMeta._from_columns(indexes, partition_id, replies.encoded_fields(encoded))
            meta._epoch = reply.epoch
            if given is not None:
                meta.update_custom_meta(given)
                meta._tags_saved()
            return meta
        if given is not None:
            metadata.update_custom_meta(given)
        changed = self._tags(metadata._changed_tags())
        parts = metadata._split_by_partition()
        # all is encoded before anything is published: a value that cannot be stored leaves nothing
        blocks = (
            [encoded] if len(parts) == 1 else [self._encode(arguments.cut(columns, rows, p), len(p)) for _, p in parts]
        )
        if encoded.schema or changed is not None or groups is not None:
            for (name, positions), block in zip(parts, blocks):
                yield from self._publish(
                    block, timeout, partition=name, count=len(positions), rows=metadata._rows()[positions].tobytes(),
                    tags=None if changed is None else [changed[p] for p in positions.tolist()],
                    groups=None if groups is None else [groups[p] for p in positions.tolist()], epoch=metadata._epoch,
                )  # fmt: skip
        if len(blocks) > 1:
            encoded.hold_as_tensors({name: kinds for block in blocks for name, kinds in block.converted.items()})
        metadata._add_columns(replies.encoded_fields(encoded), set_all_ready=bool(encoded.schema))
        metadata._tags_saved()
        return metadata

    def set_custom_meta(self, metadata: BatchMeta, *, timeout: float | None = None) -> Operation[None]:
        """Replace the tag of each sample by the metadata's custom_meta.

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
        arguments.batch_meta(metadata)
        yield from self._state.learn()
        tags = self._tags(metadata.get_all_custom_meta())
        for name, positions in metadata._split_by_partition():
            assert tags is not None
            yield from self._publish(
                None, None, timeout, partition=name, count=len(positions), rows=metadata._rows()[positions].tobytes(),
                tags=[tags[p] for p in positions.tolist()], replace_tags=True, epoch=metadata._epoch,
            )  # fmt: skip
        metadata._tags_saved()

    def clear_samples(self, metadata: BatchMeta, *, timeout: float | None = None) -> Operation[None]:
        """Remove samples with their values, keys and tags. Samples that were already cleared are ignored.

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
        arguments.batch_meta(metadata)
        for name, positions in metadata._split_by_partition():
            request = ClearRows(name, metadata._rows()[positions].tobytes(), metadata._epoch)
            yield from self._ask(request, Done, timeout)

    def clear_partition(self, partition_id: str, *, timeout: float | None = None) -> Operation[None]:
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
        yield from self._ask(ClearPartition(partition_id), Done, timeout)

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
    ) -> Operation[bool]:
        """Create a partition before its first sample, with options.

        Args:
            partition_id: The partition.
            group_size: The number of samples of each declared group. Default: groups have no declared size.
            producers: How many calls of `seal` seal the partition. Default: 1.
            free_when: `consumed_by["reward", "update"]`: a sample is cleared as soon as each of these tasks has
                consumed and finished it (see `finish`). Default: samples are cleared only by calls.
            replicas: The number of rank replicas that fetch each sample and must finish it. Default: 1.
            max_staleness: New samples are accepted while fewer than `(version + max_staleness + 1) * rows_per_version`
                were, where `set_policy_version` sets the version. A put beyond this waits, if it has a timeout, or
                raises StalenessError. `get_meta(mode="insert", timeout=...)` makes a producer wait before it generates.
                Default: no limit.
            rows_per_version: The number of samples that training consumes for each policy version. Required with
                `max_staleness`.
            keep_rows: The number of samples to keep; the oldest beyond it are dropped, whole groups together. Default:
                no limit.
            keep_bytes: The same in bytes of values. Default: no limit.
            keep_seconds: The same by age in seconds. Default: no limit.
            max_deliveries: A sample whose leases ended this often without an ack is skipped; 0 never skips. Default:
                `controller.max_deliveries`.
            timeout: See `TransferQueueClient`.

        Returns:
            True; False if the partition already existed.

        Raises:
            InvalidArgumentError: An option is not valid, or the partition exists with other options. Arguments that
                have their defaults are not compared.

        Example:
            >>> client.create_partition("train_0", group_size=8, free_when=tq.consumed_by["update"])
            True
            >>> client.create_partition("train_0", group_size=8)
            False
        """
        options = PartitionOptions(
            group_size, producers, arguments.tasks(free_when), replicas, max_staleness, rows_per_version, keep_rows,
            keep_bytes, keep_seconds, max_deliveries,
        )  # fmt: skip
        request = CreatePartition(partition_id, pre_alloc_sample_num(), arguments.partition_options(options))
        return bool((yield from self._ask(request, Done, timeout)).value)

    def drop(
        self,
        partition_id: str,
        groups: Sequence[str | int] | str | int | None = None,
        metadata: BatchMeta | None = None,
        *,
        reason: str,
        timeout: float | None = None,
    ) -> Operation[int]:
        """Remove samples that are of no use, and count them under a reason.

        Members of a dropped group that are put later are dropped, too, if the partition has a `group_size`. Unknown
        groups and cleared samples are ignored. `status` shows the counts. A warning is logged if the partition does not
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
        if groups is None and metadata is None:
            raise InvalidArgumentError("drop needs groups or metadata, got neither")
        rows = b""
        if metadata is not None:
            arguments.batch_meta(metadata)
            strange = set(metadata.partition_ids) - {partition_id}
            if strange:
                raise InvalidArgumentError(
                    f"the metadata must have samples of {partition_id!r} only, got samples of {sorted(strange)}"
                )
            rows = metadata._rows().tobytes()
        epoch = None if metadata is None else metadata._epoch
        request = Drop(partition_id, arguments.text(reason, "reason"), rows, arguments.group_names(groups), epoch)
        return int((yield from self._ask(request, Done, timeout)).value)

    def finish(self, metadata: BatchMeta, task_name: str, *, timeout: float | None = None) -> Operation[None]:
        """Declare that the task does not need these samples any more.

        This matters if the partition frees samples by itself (`create_partition(free_when=...)`). A fetch also finishes
        the samples that the same client fetched before for the same task and dp_rank, unless it is made with
        `hold=True`.

        Args:
            metadata: The samples, as they were fetched.
            task_name: The task that they were fetched for.
            timeout: See `TransferQueueClient`.

        Example:
            >>> created = client.create_partition("train_0", free_when=tq.consumed_by["update"])
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="update")
            >>> client.finish(meta, "update")
            >>> client.kv_list("train_0")
            {'train_0': {}}
        """
        arguments.batch_meta(metadata)
        holder = metadata._holder or self._state.client_id
        for name, positions in metadata._split_by_partition():
            rows = metadata._rows()[positions].tobytes()
            request = Finish(name, arguments.text(task_name, "task_name"), rows, holder, metadata._epoch)
            yield from self._ask(request, Done, timeout)

    def set_policy_version(self, partition_id: str, version: int, *, timeout: float | None = None) -> Operation[None]:
        """Report that the policy has reached a version. Staleness is counted from it, and waiting producers continue.

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
        request = SetPolicyVersion(partition_id, arguments.validated_count(version, "version"))
        yield from self._ask(request, Done, timeout)

    def want(self, partition_id: str, groups: int, task_name: str, *, timeout: float | None = None) -> Operation[None]:
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
        request = SetGroupDemand(
            partition_id, arguments.text(task_name, "task_name"), arguments.validated_count(groups, "groups")
        )
        yield from self._ask(request, Done, timeout)

    def wanted(
        self, partition_id: str, task_name: str, most: int | None = None, *, timeout: float | None = None
    ) -> Operation[int]:
        """Return how many groups a task is missing, and promise to produce some of them.

        A missing group is one of the group demand (`want`) that does not exist, is not in production, and that no
        producer has promised.

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
        wait = arguments.seconds(timeout)
        taken = None if most is None else arguments.validated_count(most, "most")
        request = TakeGroupDemand(partition_id, arguments.text(task_name, "task_name"), taken, wait)
        return int((yield from self._ask(request, Done, None, parked=wait)).value)

    def seal(self, partition_id: str, create: bool = False, *, timeout: float | None = None) -> Operation[None]:
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
        yield from self._ask(Seal(partition_id, arguments.flag(create, "create")), Done, timeout)

    def drain_unit(self, unit: int, *, undo: bool = False, timeout: float | None = None) -> Operation[None]:
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
        wait = arguments.LONGEST_TIMEOUT if timeout is None else arguments.seconds(timeout)
        drain = Drain(arguments.validated_count(unit, "unit"), arguments.flag(undo, "undo"), wait)
        yield from self._ask(drain, Done, None, parked=wait)

    # ------------------------------------------------------------ progress

    def get_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[tuple[torch.Tensor | None, torch.Tensor | None]]:
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
        fields = arguments.names(data_fields, "data_fields")
        reply = yield from self._ask(ProductionStatus(partition_id, fields), StatusReply, timeout)
        return replies.status(reply, len(fields))

    def get_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[tuple[torch.Tensor | None, torch.Tensor | None]]:
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
        request = ConsumptionStatus(partition_id, arguments.text(task_name, "task_name"))
        reply = yield from self._ask(request, StatusReply, timeout)
        return replies.status(reply, None)

    def check_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[bool]:
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
        request = CheckProduction(partition_id, arguments.names(data_fields, "data_fields"))
        return bool((yield from self._ask(request, Done, timeout)).value)

    def check_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[bool]:
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
        request = CheckConsumption(partition_id, arguments.text(task_name, "task_name"))
        return bool((yield from self._ask(request, Done, timeout)).value)

    def reset_consumption(
        self, partition_id: str, task_name: str | None = None, *, timeout: float | None = None
    ) -> Operation[bool]:
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
        request = ResetConsumption(partition_id, arguments.text_or_none(task_name, "task_name"))
        return bool((yield from self._ask(request, Done, timeout)).value)

    def get_partition_list(self, *, timeout: float | None = None) -> Operation[list[str]]:
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
        return list((yield from self._ask(ListPartitions(), Done, timeout)).value)

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
    ) -> Operation[str]:
        """Explain why a sample is not delivered: missing fields, the batch that took it, its group and so on.

        If no sample is named, describes the rows of `task` and `fields` that lack the fewest fields. With `batch_size`,
        describes why a fetch of `batch_size` samples with this `sampling_config` waits, and which ranks are ahead.

        Args:
            partition_id: The partition.
            global_index: The global index of the sample. Default: none.
            key: The key of the sample. Default: none.
            task: The task that waits for the sample. Default: all tasks.
            fields: The fields that the task needs. Default: any.
            batch_size: The batch size of the fetch to explain. Default: none.
            sampling_config: The sampling_config of the fetch to explain. Default: none.
            timeout: See `TransferQueueClient`.

        Returns:
            The explanation, one or more lines.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> "reward" in client.explain("train_0", key="a", task="update", fields=["reward"])
            True
        """
        names = None if fields is None else arguments.names(fields, "fields")
        task, key = arguments.text_or_none(task, "task"), arguments.text_or_none(key, "key")
        count = None if batch_size is None else arguments.count(batch_size)
        sampling = arguments.plain_value(sampling_config)
        index = arguments.whole(global_index, "global_index must be an int (a key is passed as key=)")
        request = Explain(partition_id, index, key, task, names, count, sampling)
        return str((yield from self._ask(request, Done, timeout)).value)

    def status(self, *, timeout: float | None = None) -> Operation[SystemStatus]:
        """Return the progress of every partition by field and task, and the counters of the controller.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            The status; `tq status` prints it.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> [partition.name for partition in client.status().partitions]
            ['train_0']
        """
        return (yield from self._ask(Status(), SystemStatus, timeout))
