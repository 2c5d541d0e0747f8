"""Defines the operations on samples under keys, one by one or in batches, as generators of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.client.attachment import Attachment
from transfer_queue.client.conversion import arguments, replies
from transfer_queue.client.conversion.arguments import Columns, DataParser, Fence, Tags
from transfer_queue.client.joiners import GetJoiner, PutJoiner, PutPart
from transfer_queue.client.operations.topic import Topic
from transfer_queue.client.reader import FetchOptions
from transfer_queue.client.writer import Writer, apply_parser
from transfer_queue.config.environment import pre_alloc_sample_num
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages import queries
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.envelopes import AnyRequest
from transfer_queue.messages.puts import ClearKeys, Publish, Reserve
from transfer_queue.messages.queries import LookupReply
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.net.calls import NOT_MADE, Join, Operation
from transfer_queue.wire.blocks.encode import EncodedBlock, encode_row
from transfer_queue.wire.objects.tag_rows import empty_tags


class KVOperations(Topic):
    """The operations of one client that name samples by their keys."""

    def __init__(self, attachment: Attachment, writer: Writer | None = None) -> None:
        super().__init__(attachment, writer)
        self._puts = PutJoiner(attachment, self._writer)
        """Joins puts of one sample each."""
        self._gets = GetJoiner(attachment.look_up, self._reader.read_each)
        """Joins gets of few samples each."""

    def kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False, *, timeout: float | None = None
    ) -> Operation[BatchMeta]:
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
        wanted = arguments.validated_keys(keys)
        request: AnyRequest = queries.RetrieveMeta(partition_id, wanted)
        if create:
            request = Reserve(partition_id, len(wanted), wanted, pre_alloc_sample_num())
        return self.claims.meta(partition_id, (yield from self._ask(request, ClaimReply, timeout)))

    def kv_retrieve_keys(
        self, global_indexes: Sequence[int] | int, partition_id: str, *, timeout: float | None = None
    ) -> Operation[list[str | None]]:
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
        rows = arguments.validated_indexes(global_indexes)
        return list((yield from self._ask(queries.RetrieveKeys(partition_id, rows.tobytes()), Done, timeout)).value)

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
    ) -> Operation[KVBatchMeta]:
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
        yield from self.attachment.learn()
        key = arguments.validated_text(key, "key")
        group = None if group_id is None else str(group_id)
        together = None
        joins = data_parser is None and fence is None and (fields is not None or tag is not None)
        if joins and self.attachment.session.is_busy:  # otherwise there is nothing to travel with
            together = self._puts.key_of(partition_id, fields, group)
        if together is None:
            return (yield from self._put_one(key, partition_id, fields, tag, data_parser, group, fence, timeout))
        call = Join(together, PutPart(key, fields, tag, group))
        reply = yield call
        if isinstance(reply, Done) and reply is not NOT_MADE:
            names, merged = reply.value
            return KVBatchMeta._make([key], [merged], partition_id, names)
        try:
            return (yield from self._put_one(key, partition_id, fields, tag, None, group, None, timeout))
        finally:
            if call.ended is not None:
                call.ended()

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
    ) -> Operation[KVBatchMeta]:
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
        yield from self.attachment.learn()
        names = arguments.validated_keys(keys)
        encoded = None
        if not names and fields is not None:
            if not arguments.has_no_rows(fields):
                raise InvalidArgumentError(
                    f"no keys were given for the {arguments.rows_of(fields)} rows of fields; pass one key for each row"
                )
            arguments.validated_tags(tags, 0, "keys")
            arguments.validated_groups(group_ids, 0)
            arguments.check_partition_id(partition_id)
            return KVBatchMeta(partition_id=partition_id, fields=[])
        if fields is not None:
            encoded = self._writer.encode(apply_parser(fields, len(names), data_parser), len(names))
        groups = arguments.validated_groups(group_ids, len(names))
        listed = arguments.validated_tags(tags, len(names), "keys")
        return (yield from self._put_keys(names, partition_id, encoded, listed, groups, fence, timeout))

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
    ) -> Operation[TensorDict]:
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
        options = FetchOptions.of(layout, shared, device, copy, out)
        if missing not in ("drop", "error"):
            raise InvalidArgumentError(f"missing must be 'drop' or 'error', got {missing!r}")
        yield from self.attachment.learn()
        wanted = arguments.validated_keys(keys)
        if not wanted:
            raise InvalidArgumentError(
                f"no keys were given, so samples were not found in partition {partition_id!r}; pass at least one key "
                f"(kv_list() returns the keys of a partition)"
            )
        fields = None if select_fields is None else arguments.validated_names(select_fields, "select_fields", least=0)
        request = queries.Lookup(partition_id, None, wanted, fields)
        joined_call = self._gets.call_for(request, options, timeout)
        asks = joined_call is not None

        def look() -> Operation[LookupReply | Done]:
            nonlocal asks
            if asks and joined_call is not None:
                asks = False  # if the values are replaced meanwhile, this get looks them up alone
                joined = yield joined_call
                if isinstance(joined, LookupReply | Done) and joined is not NOT_MADE:
                    return joined
            reply = yield from self.attachment.look_up(request, timeout)
            if not reply.count:
                why = yield from self._ask(queries.Explain(partition_id, key=wanted[0]), Done, timeout)
                raise InvalidArgumentError(
                    f"keys {arguments.describe(wanted)} were not found in partition {partition_id!r}; kv_list() returns"
                    f" its keys. {why.value}"
                )
            if reply.count > 0 and not reply.types:
                raise InvalidArgumentError(
                    f"keys {arguments.describe(wanted)} of partition {partition_id!r} are not ready: they share no "
                    f"field yet; client.explain(partition_id, key=...) says what each of them has"
                )
            if reply.unknown or reply.lacking:
                omitted = _left_out(partition_id, reply)
                if missing == "error":
                    raise InvalidArgumentError(
                        f"kv_batch_get: {omitted}. Put what is missing first, or pass missing='drop' to leave it out."
                    )
                self.attachment.warn(f"kv_batch_get left out: {omitted}. Pass missing='error' to get an error instead.")
            return reply

        try:
            return (yield from self._reader.read(look, options, partition_id))
        finally:
            if joined_call is not None and joined_call.ended is not None:
                joined_call.ended()

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
    ) -> Operation[TensorDict]:
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
        if not isinstance(meta, KVBatchMeta):
            raise InvalidArgumentError(f"meta must be a KVBatchMeta, as a put returns it, got a {type(meta).__name__}")
        if meta.partition_id is None:
            raise InvalidArgumentError(
                "the KVBatchMeta has no partition_id; set it, or use the KVBatchMeta that a put returned"
            )
        known = meta.fields
        if known is None:
            raise InvalidArgumentError(
                f"select_fields {select_fields} not found in the KVBatchMeta, whose fields are None: set meta.fields, "
                f"as a put returns them, or call kv_batch_get"
            )
        fields = known if select_fields is None else arguments.validated_names(select_fields, "select_fields", least=0)
        absent = [name for name in fields if name not in known]
        if absent:
            raise InvalidArgumentError(f"select_fields {absent} not found in the KVBatchMeta, whose fields are {known}")
        return (
            yield from self.kv_batch_get(
                meta.keys,
                meta.partition_id,
                fields,
                layout=layout,
                shared=shared,
                device=device,
                copy=copy,
                out=out,
                timeout=timeout,
            )
        )

    def kv_list(
        self,
        partition_id: str | None = None,
        *,
        where: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Operation[dict[str, dict[str, dict[str, Any]]]]:
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
        yield from self.attachment.learn()
        allow = self.attachment.settings.allow_pickle
        if partition_id is not None:
            arguments.check_partition_id(partition_id)
        request = queries.ListKeys(
            None if partition_id is None else [partition_id], arguments.validated_filter(where, allow)
        )
        listed: dict[str, dict[str, dict[str, Any]]] = {}
        while True:
            page = yield from self._ask(request, queries.KeysReply, timeout)
            for name, keys in page.keys.items():
                tags = replies.tag_list(page.tags.get(name), len(keys), allow)
                listed.setdefault(name, {}).update(zip(keys, tags, strict=True))
            if not page.left:
                return listed
            request = queries.ListKeys(page.left, request.where, page.made, page.start)

    def kv_clear(
        self, keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[None]:
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
        yield from self._ask(ClearKeys(partition_id, arguments.validated_keys(keys)), Done, timeout)

    # ------------------------------------------------------------ shared

    def _put_one(
        self,
        key: str,
        partition_id: str,
        fields: Columns | None,
        tag: Mapping[str, Any] | None,
        data_parser: DataParser | None,
        group: str | None,
        fence: Fence | None,
        timeout: float | None,
    ) -> Operation[KVBatchMeta]:
        encoded = None
        if isinstance(fields, TensorDictBase) or (fields is not None and data_parser is not None):
            encoded = self._writer.encode(apply_parser(arguments.one_row(fields), 1, data_parser), 1)
        elif fields is not None:
            if not isinstance(fields, Mapping):
                raise InvalidArgumentError(f"fields must be a dict or a TensorDict, got a {type(fields).__name__}")
            encoded = encode_row(dict(fields), allow_pickle=self.attachment.settings.allow_pickle)
        groups = None if group is None else [group]
        tags = None if tag is None else [tag]
        return self._put_keys([key], partition_id, encoded, tags, groups, fence, timeout)

    def _put_keys(
        self,
        keys: list[str],
        partition_id: str,
        encoded: EncodedBlock | None,
        tags: list[Any] | None,
        groups: list[str] | None,
        fence: Fence | None,
        timeout: float | None,
    ) -> Operation[KVBatchMeta]:
        token = arguments.validated_fence(fence)
        if (encoded is None or not encoded.schema) and tags is None:
            raise InvalidArgumentError("a put needs fields or tags, got neither")
        if not keys:
            return KVBatchMeta(partition_id=partition_id, fields=[])
        sent = self._writer.encode_tags(tags)
        put = Publish(
            partition_id, len(keys), keys=keys, tags=sent, groups=groups, pre_allocate=pre_alloc_sample_num(),
            wait=timeout, fence=token,
        )  # fmt: skip
        reply = yield from self._writer.publish(encoded, put)
        fields = reply.fields
        if fields is None:  # all keys are new, so their samples have the fields of this put
            fields = [] if encoded is None else sorted(map(attrgetter("name"), encoded.schema))
        stored = replies.merged_tags(reply, sent)
        allow_pickle = self.attachment.settings.allow_pickle
        merged = empty_tags(len(keys)) if stored is None else replies.tags(stored, len(keys), allow_pickle)
        return KVBatchMeta._make(keys, merged, partition_id, fields)


def _left_out(partition_id: str, reply: LookupReply) -> str:
    """Return a phrase that names the keys and fields that a lookup by keys left out."""
    parts = []
    if reply.unknown:
        parts.append(f"keys {arguments.describe(reply.unknown)}, which were not found in partition {partition_id!r}")
    if reply.lacking:
        row_count = abs(reply.count)
        parts += [
            f"field {name!r}, which is missing in {count} of {row_count} rows" for name, count in reply.lacking.items()
        ]
    return "; ".join(parts)
