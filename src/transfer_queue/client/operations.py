"""What a client can do: each operation once, as a generator of calls.

`tools/generate_surface.py` makes the blocking and the awaitable methods of `TransferQueueClient`, and the KV
functions of the package, out of the signatures and docstrings here, in `kv_operations.py` and in
`checkpoint_operations.py`. An operation yields `Call`s and is sent the replies (`net/blocking.py`,
`net/asynchronous.py`, `testing/`).

Every operation takes `timeout=`; what it means stands at `TransferQueueClient`. In fetches and puts it is how long
they wait, and their docstrings say what they do without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from transfer_queue.client import arguments, replies
from transfer_queue.client.arguments import DataParser, Tags
from transfer_queue.client.changes import PartitionChange, partition_change
from transfer_queue.client.checkpoint_operations import CheckpointOperations
from transfer_queue.client.fetch_operations import FetchOperations
from transfer_queue.client.kv_operations import KVOperations
from transfer_queue.client.lease_operations import LeaseOperations
from transfer_queue.client.transfers import Operation
from transfer_queue.conditions import ConsumedBy
from transfer_queue.config import get_metadata_timeout, pre_alloc_sample_num
from transfer_queue.errors import (
    InvalidArgumentError,
)
from transfer_queue.messages import (
    ChangeReply,
    CheckConsumption,
    CheckProduction,
    ClaimReply,
    ClearPartition,
    ClearRows,
    ConsumptionStatus,
    CreatePartition,
    Done,
    Drain,
    Drop,
    Explain,
    Finish,
    ListPartitions,
    PartitionOptions,
    ProductionStatus,
    Reserve,
    ResetConsumption,
    Seal,
    SetPolicyVersion,
    Show,
    Status,
    StatusReply,
    SystemStatus,
    Want,
    Wanted,
    Watch,
)
from transfer_queue.metadata import BatchMeta

LEAST_WAIT = 0.001  # seconds: a fetch that may wait for none ends like one that waited, and says what is missing


class Readiness(NamedTuple):
    """What `await_ready` found. ended: nothing will ever come. version: of the partition; -1 where there is none."""

    ended: bool
    version: int


class Operations(FetchOperations, KVOperations, LeaseOperations, CheckpointOperations):
    """The operations of one client, over its state."""

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
        yield from self._state.learn()
        fields = arguments.names(data_fields, "data_fields")
        if mode == "insert":
            wait = arguments.seconds(timeout)
            request = Reserve(partition_id, arguments.count(batch_size), None, pre_alloc_sample_num(), wait=wait)
            return self._meta(partition_id, (yield from self._ask(request, ClaimReply, None, parked=wait)))
        if mode == "force_fetch":
            shown = yield from self._ask(Show(partition_id, fields), ClaimReply, timeout)
            return self._meta(partition_id, shown)
        if mode != "fetch":
            raise InvalidArgumentError(f"mode is {mode!r}; allowed: 'fetch', 'insert', 'force_fetch'")
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
        """(metadata, ended) of a fetch that waits in any mode, at most `timeout` seconds, and raises no timeout.

        The metadata is empty where nothing came. ended: nothing ever will, because the partition is sealed and
        everything is dealt, or because it is `finite` and the task has consumed it wholly. timeout: 0 asks and does
        not wait; None waits TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s). hold, lease, replicas: as in `get_meta`.
        ahead: by how many batches this one is ahead of the batch that the caller needs now, for example if the workers
        of a loader fetch ahead. If a rank-consistent sampler does not know the number of dp_ranks, it deals such a
        batch only if other ranks do not need these samples.
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
        """Waits, at most `timeout` seconds, until `await_batch` with these arguments could be met; deals nothing.

        since: the version of the partition that an earlier call gave; it then waits for a change after that, too.
        timeout: as in `await_batch`.

        Returns:
            ended: such a fetch can never be met. version: of the partition, which grows with every change in it.
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
        yield from self._state.learn()
        timeout = get_metadata_timeout() if timeout is None else timeout
        allow = self._state.settings.allow_pickle
        timeout = arguments.seconds(timeout)
        watch = Watch(partition_id, arguments.version(since), arguments.where(where, allow), timeout)
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
        """Replaces the tag of each of these samples by the metadata's custom_meta."""
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
        """Drops these samples with their values, keys and tags; those that are gone already are fine."""
        arguments.batch_meta(metadata)
        for name, positions in metadata._split_by_partition():
            request = ClearRows(name, metadata._rows()[positions].tobytes(), metadata._epoch)
            yield from self._ask(request, Done, timeout)

    def clear_partition(self, partition_id: str, *, timeout: float | None = None) -> Operation[None]:
        """Drops a partition and all its samples; an unknown one is fine."""
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
        """Drops samples, whole declared groups or those of metadata, and counts them under the reason.

        Members of a dropped group that are put later are dropped, too, where the partition has a group_size. Unknown
        groups, and samples that are gone, are fine. Logs a warning if the partition does not exist. Returns how many
        samples were dropped.
        """
        if groups is None and metadata is None:
            raise InvalidArgumentError("drop needs groups, or metadata of samples")
        rows = b""
        if metadata is not None:
            arguments.batch_meta(metadata)
            strange = set(metadata.partition_ids) - {partition_id}
            if strange:
                raise InvalidArgumentError(f"the metadata has samples of {sorted(strange)}, not of {partition_id!r}")
            rows = metadata._rows().tobytes()
        epoch = None if metadata is None else metadata._epoch
        request = Drop(partition_id, arguments.text(reason, "reason"), rows, arguments.group_names(groups), epoch)
        return int((yield from self._ask(request, Done, timeout)).value)

    def finish(self, metadata: BatchMeta, task_name: str, *, timeout: float | None = None) -> Operation[None]:
        """Says that the task is through with these samples, which were fetched for it.

        It counts where the partition frees samples by itself (`create_partition(free_when=...)`). A fetch says it of
        what the same client was given before for the same task and dp_rank, unless it is made with hold=True.
        """
        arguments.batch_meta(metadata)
        holder = metadata._holder or self._state.client_id
        for name, positions in metadata._split_by_partition():
            rows = metadata._rows()[positions].tobytes()
            request = Finish(name, arguments.text(task_name, "task_name"), rows, holder, metadata._epoch)
            yield from self._ask(request, Done, timeout)

    def set_policy_version(self, partition_id: str, version: int, *, timeout: float | None = None) -> Operation[None]:
        """Says that the policy has reached this version: producers may go on, and staleness is counted from it.

        Raises:
            InvalidArgumentError: it would go back. UnknownPartitionError: create the partition first.
        """
        request = SetPolicyVersion(partition_id, arguments.natural(version, "version"))
        yield from self._ask(request, Done, timeout)

    def want(self, partition_id: str, groups: int, task_name: str, *, timeout: float | None = None) -> Operation[None]:
        """Says how many whole groups the task wants to be there or on their way; 0 takes it back.

        It holds until it is changed: as the task consumes groups, or groups are dropped, producers are told of as
        many new ones (`wanted`).
        """
        request = Want(partition_id, arguments.text(task_name, "task_name"), arguments.natural(groups, "groups"))
        yield from self._ask(request, Done, timeout)

    def wanted(
        self, partition_id: str, task_name: str, most: int | None = None, *, timeout: float | None = None
    ) -> Operation[int]:
        """How many groups the task still misses, beyond those that are there, begun, or promised by a producer.

        most: this producer takes up to so many upon itself, which others are not told of then; the promise ends as
        it puts (or reserves) their samples, or when it has gone. timeout: seconds to wait while none is missing
        (None, 0: none); 0 is the answer then.
        """
        wait = arguments.seconds(timeout)
        taken = None if most is None else arguments.natural(most, "most")
        request = Wanted(partition_id, arguments.text(task_name, "task_name"), taken, wait)
        return int((yield from self._ask(request, Done, None, parked=wait)).value)

    def seal(self, partition_id: str, create: bool = False, *, timeout: float | None = None) -> Operation[None]:
        """Declare that this producer puts no new samples, so that loaders end. It may still add fields to samples.

        If the partition does not exist, it is made and sealed, so that consumers do not wait for its samples. Unless
        `create` is set, a warning names it and the nearest partitions that exist.

        Args:
            partition_id: The partition.
            create: Do not warn if the partition does not exist yet. Default: False.
            timeout: See `TransferQueueClient`.
        """
        yield from self._ask(Seal(partition_id, arguments.flag(create, "create")), Done, timeout)

    def drain_unit(self, unit: int, *, undo: bool = False, timeout: float | None = None) -> Operation[None]:
        """Moves everything off a storage unit, which gets nothing new from now on; returns when it holds nothing.

        unit: its number, from 0 on. undo: it is written to again. timeout: seconds to wait (None: no limit); moving
        goes on when they are over.

        Raises:
            InvalidArgumentError: there is no such unit, or too few others would be left to write to.
        """
        wait = arguments.LONGEST_TIMEOUT if timeout is None else arguments.seconds(timeout)
        drain = Drain(arguments.natural(unit, "unit"), arguments.flag(undo, "undo"), wait)
        yield from self._ask(drain, Done, None, parked=wait)

    # ------------------------------------------------------------ progress

    def get_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """(int64 indexes [rows], int8 [rows, fields]): 1 where a sample has a field; ascending, reserved rows included.

        (None, None) for an unknown partition or field.
        """
        fields = arguments.names(data_fields, "data_fields")
        reply = yield from self._ask(ProductionStatus(partition_id, fields), StatusReply, timeout)
        return replies.status(reply, len(fields))

    def get_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """(int64 indexes [rows], int8 [rows]): 1 where the task has consumed a sample; (None, None) if unknown."""
        request = ConsumptionStatus(partition_id, arguments.text(task_name, "task_name"))
        reply = yield from self._ask(request, StatusReply, timeout)
        return replies.status(reply, None)

    def check_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[bool]:
        """Whether every sample has every one of these fields; False for an unknown partition or field."""
        request = CheckProduction(partition_id, arguments.names(data_fields, "data_fields"))
        return bool((yield from self._ask(request, Done, timeout)).value)

    def check_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[bool]:
        """Whether the task has consumed every sample, those cleared since too; False for an unknown partition."""
        request = CheckConsumption(partition_id, arguments.text(task_name, "task_name"))
        return bool((yield from self._ask(request, Done, timeout)).value)

    def reset_consumption(
        self, partition_id: str, task_name: str | None = None, *, timeout: float | None = None
    ) -> Operation[bool]:
        """Let a task (None: every task) consume the partition again. Forgets its dealt batches. Returns True.

        Logs a warning if the partition does not exist.
        """
        request = ResetConsumption(partition_id, arguments.text_or_none(task_name, "task_name"))
        return bool((yield from self._ask(request, Done, timeout)).value)

    def get_partition_list(self, *, timeout: float | None = None) -> Operation[list[str]]:
        """The names of all partitions, in order of creation."""
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
        """Says in words why a sample is not handed out: missing fields, the batch that took it, its group, ...

        If no sample is named, describes the rows of `task` and `fields` that lack the fewest fields. With `batch_size`,
        describes why a fetch of `batch_size` samples with this `sampling_config` waits, and which dp_ranks are ahead.
        """
        names = None if fields is None else arguments.names(fields, "fields")
        task, key = arguments.text_or_none(task, "task"), arguments.text_or_none(key, "key")
        count = None if batch_size is None else arguments.count(batch_size)
        sampling = arguments.plain(sampling_config)
        index = arguments.whole(global_index, "global_index must be an int (a key is passed as key=)")
        request = Explain(partition_id, index, key, task, names, count, sampling)
        return str((yield from self._ask(request, Done, timeout)).value)

    def status(self, *, timeout: float | None = None) -> Operation[SystemStatus]:
        """Progress of every partition by field and task, and the controller's counters."""
        return (yield from self._ask(Status(), SystemStatus, timeout))
