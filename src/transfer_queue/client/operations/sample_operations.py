"""Defines the operations that write, tag, drop and clear samples, as generators of calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tensordict import TensorDictBase

from transfer_queue.client.conversion import arguments, replies
from transfer_queue.client.conversion.arguments import Columns, DataParser, Tags
from transfer_queue.client.operations.topic import Topic
from transfer_queue.client.writer import apply_parser
from transfer_queue.config.environment import pre_alloc_sample_num
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Finish
from transfer_queue.messages.puts import ClearRows, Drop, Publish
from transfer_queue.messages.tag_table import SentTags, take_tags
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.calls import Operation
from transfer_queue.wire.blocks.encode import EncodedBlock


class SampleOperations(Topic):
    """The operations of one client that write and remove samples."""

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
        if metadata is not None:
            arguments.check_batch_meta(metadata)
        yield from self.attachment.learn()
        rows = len(metadata) if metadata is not None else arguments.rows_of(data)
        if metadata is None and partition_id is None:
            raise InvalidArgumentError("put needs partition_id (for new samples) or metadata (for existing ones)")
        if metadata is not None and not rows and not arguments.rows_of(data):
            return metadata
        groups = arguments.validated_groups(group_ids, rows)
        given = arguments.validated_tags(tags, rows)
        sent = self._writer.encode_tags(given)
        if metadata is None and not rows:
            arguments.check_partition_id(partition_id)
            return BatchMeta()
        columns = apply_parser(data, rows, data_parser)
        encoded = self._writer.encode(columns, rows)
        if metadata is not None:
            return (yield from self._put_fields(encoded, columns, metadata, groups, given, timeout))
        assert partition_id is not None
        return (yield from self._put_samples(encoded, partition_id, groups, given, sent, timeout))

    def _put_samples(
        self,
        encoded: EncodedBlock,
        partition_id: str,
        groups: list[str] | None,
        tags: Tags | None,
        sent: SentTags | None,
        timeout: float | None,
    ) -> Operation[BatchMeta]:
        """Publish a block as new samples, and return their metadata. `sent` are the tags as the request has them."""
        if not encoded.schema:
            raise InvalidArgumentError("a put of new samples needs at least one field; data has none")
        put = Publish(
            partition_id, encoded.rows, tags=sent, groups=groups, pre_allocate=pre_alloc_sample_num(), wait=timeout
        )
        reply = yield from self._writer.publish(encoded, put)
        indexes = np.frombuffer(reply.rows, "<i8")
        meta = BatchMeta._from_columns(indexes, partition_id, replies.encoded_fields(encoded))
        meta._epoch = reply.epoch
        if tags is not None:
            meta.update_custom_meta(tags)
            meta._tags_saved()
        return meta

    def _put_fields(
        self,
        encoded: EncodedBlock,
        columns: Columns,
        metadata: BatchMeta,
        groups: list[str] | None,
        tags: Tags | None,
        timeout: float | None,
    ) -> Operation[BatchMeta]:
        """Publish a block as fields of existing samples, partition by partition, and add them to the metadata."""
        if tags is not None:
            metadata.update_custom_meta(tags)
        changed = self._writer.encode_tags(metadata._changed_tags())
        parts = metadata._split_by_partition()
        blocks = [encoded]
        if len(parts) != 1:
            # everything is encoded before anything is published: a value that cannot be stored leaves nothing
            blocks = [self._writer.encode(arguments.select_rows(columns, encoded.rows, p), len(p)) for _, p in parts]
        if encoded.schema or changed is not None or groups is not None:
            for (name, positions), block in zip(parts, blocks):
                put = Publish(
                    name, len(positions), metadata._rows()[positions].tobytes(),
                    tags=None if changed is None else take_tags(changed, positions),
                    groups=None if groups is None else [groups[p] for p in positions.tolist()], wait=timeout,
                    epoch=metadata._epoch,
                )  # fmt: skip
                yield from self._writer.publish(block, put)
        if len(blocks) > 1:
            encoded.hold_as_tensors({name: kinds for block in blocks for name, kinds in block.converted.items()})
        metadata._add_columns(replies.encoded_fields(encoded), set_all_ready=bool(encoded.schema))
        metadata._tags_saved()
        return metadata

    def set_custom_meta(self, metadata: BatchMeta, *, timeout: float | None = None) -> Operation[None]:
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
        arguments.check_batch_meta(metadata)
        yield from self.attachment.learn()
        tags = self._writer.encode_tags(metadata.get_all_custom_meta())
        for name, positions in metadata._split_by_partition():
            assert tags is not None
            put = Publish(
                name, len(positions), metadata._rows()[positions].tobytes(), tags=take_tags(tags, positions),
                replace_tags=True, epoch=metadata._epoch,
            )  # fmt: skip
            yield from self._writer.publish(None, put, timeout)
        metadata._tags_saved()

    def clear_samples(self, metadata: BatchMeta, *, timeout: float | None = None) -> Operation[None]:
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
        arguments.check_batch_meta(metadata)
        for name, positions in metadata._split_by_partition():
            request = ClearRows(name, metadata._rows()[positions].tobytes(), metadata._epoch)
            yield from self._ask(request, Done, timeout)

    def drop(
        self,
        partition_id: str,
        groups: Sequence[str | int] | str | int | None = None,
        metadata: BatchMeta | None = None,
        *,
        reason: str,
        timeout: float | None = None,
    ) -> Operation[int]:
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
        if groups is None and metadata is None:
            raise InvalidArgumentError("drop needs groups or metadata, got neither")
        rows = b""
        if metadata is not None:
            arguments.check_batch_meta(metadata)
            others = set(metadata.partition_ids) - {partition_id}
            if others:
                raise InvalidArgumentError(
                    f"the metadata must have samples of {partition_id!r} only, got samples of {sorted(others)}"
                )
            rows = metadata._rows().tobytes()
        epoch = None if metadata is None else metadata._epoch
        request = Drop(
            partition_id, arguments.validated_text(reason, "reason"), rows, arguments.group_names(groups), epoch
        )
        return int((yield from self._ask(request, Done, timeout)).value)

    def finish(self, metadata: BatchMeta, task_name: str, *, timeout: float | None = None) -> Operation[None]:
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
        arguments.check_batch_meta(metadata)
        holder = metadata._holder or self.attachment.client_id
        for name, positions in metadata._split_by_partition():
            rows = metadata._rows()[positions].tobytes()
            request = Finish(name, arguments.validated_text(task_name, "task_name"), rows, holder, metadata._epoch)
            yield from self._ask(request, Done, timeout)
