"""What a client can do with samples under keys: operations like those of `operations.py`, one by one or in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.client import arguments, replies
from transfer_queue.client.arguments import Columns, DataParser, Tags
from transfer_queue.client.transfers import Operation, Transfers
from transfer_queue.config import pre_alloc_sample_num
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages import (
    AnyRequest,
    ClaimReply,
    ClearKeys,
    Done,
    KeysReply,
    ListKeys,
    Lookup,
    LookupReply,
    Reserve,
    RetrieveKeys,
    RetrieveMeta,
)
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.wire.encode import EncodedBlock, encode_row


class KVOperations(Transfers):
    """The operations of one client that name samples by their keys."""

    def kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False, *, timeout: float | None = None
    ) -> Operation[BatchMeta]:
        """The metadata of the samples of these keys, in their order, with the fields that all of them have.

        Unknown keys are left out, or made (create=True).
        """
        wanted = arguments.keys(keys)
        request: AnyRequest = RetrieveMeta(partition_id, wanted)
        if create:
            request = Reserve(partition_id, len(wanted), wanted, pre_alloc_sample_num())
        return self._meta(partition_id, (yield from self._ask(request, ClaimReply, timeout)))

    def kv_retrieve_keys(
        self, global_indexes: Sequence[int] | int, partition_id: str, *, timeout: float | None = None
    ) -> Operation[list[str | None]]:
        """The key of each of these samples, None for one without; UnknownPartitionError for an unknown partition."""
        rows = arguments.indexes(global_indexes)
        return list((yield from self._ask(RetrieveKeys(partition_id, rows.tobytes()), Done, timeout)).value)

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
    ) -> Operation[KVBatchMeta]:
        """Puts one sample under a key: adds or replaces just these fields, and merges the tag.

        fields: a dict (a tensor is the sample's row, anything else an object; if the field holds tensors, arrays
        and numbers become tensors) or a TensorDict of batch size 1.
        tag: entries to merge; `tq.DELETE` as a value removes an entry. group_id: the prompt it is a sample of.
        timeout: seconds to wait for space; None: no longer than freed space takes to come (0.25 s).

        Raises:
            InvalidArgumentError: neither fields nor tag, or fields of another kind or size; FieldTypeError,
            CapacityError, SealedError, UncarriableValueError as `kv_batch_put`.
        """
        yield from self._state.learn()
        key = arguments.text(key, "key")
        encoded = None
        if isinstance(fields, TensorDictBase) or (fields is not None and data_parser is not None):
            encoded = self._encode(self._parsed(arguments.one_row(fields), 1, data_parser), 1)
        elif fields is not None:
            if not isinstance(fields, Mapping):
                raise InvalidArgumentError(f"fields must be a dict or a TensorDict, not a {type(fields).__name__}")
            encoded = encode_row(dict(fields), allow_pickle=self._state.settings.allow_pickle)
        groups = None if group_id is None else [str(group_id)]
        tags = None if tag is None else [tag]
        return (yield from self._put_keys([key], partition_id, encoded, tags, groups, timeout))

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
    ) -> Operation[KVBatchMeta]:
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
        yield from self._state.learn()
        names = arguments.keys(keys)
        encoded = None
        if not names and fields is not None and arguments.has_no_rows(fields):
            arguments.tags(tags, 0, "keys")
            arguments.groups(group_ids, 0)
            arguments.partition(partition_id)
            return KVBatchMeta(partition_id=partition_id, fields=[])
        if fields is not None:
            encoded = self._encode(self._parsed(fields, len(names), data_parser), len(names))
        groups = arguments.groups(group_ids, len(names))
        return (yield from self._put_keys(names, partition_id, encoded, tags, groups, timeout))

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
    ) -> Operation[TensorDict]:
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
        place = arguments.device(device)
        if missing not in ("drop", "error"):
            raise InvalidArgumentError(f"missing must be 'drop' or 'error', got {missing!r}")
        yield from self._state.learn()
        wanted = arguments.keys(keys)
        fields = None if select_fields is None else arguments.names(select_fields, "select_fields", least=0)
        request = Lookup(partition_id, None, wanted, fields)

        def look() -> Operation[LookupReply]:
            reply = yield from self._look_up(request, timeout)
            if not reply.count:
                raise InvalidArgumentError(
                    f"keys {arguments.shown(wanted)} were not found in partition {partition_id!r}; kv_list() shows "
                    f"what is there"
                )
            if reply.count > 0 and not reply.types:
                raise InvalidArgumentError(
                    f"keys {arguments.shown(wanted)} of partition {partition_id!r} are not ready: they share no field "
                    f"yet; client.explain(partition_id, key=...) says what each of them has"
                )
            if reply.unknown or reply.lacking:
                words = _left_out(partition_id, reply)
                if missing == "error":
                    raise InvalidArgumentError(
                        f"kv_batch_get: {words}. Put what is missing first, or pass missing='drop' to leave it out."
                    )
                self._state.warn(f"kv_batch_get left out: {words}. Pass missing='error' to get an error instead.")
            return reply

        return (yield from self._read(look, layout, place))

    def kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | str | None = None,
        *,
        layout: str = "jagged",
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> Operation[TensorDict]:
        """The values of the samples that a KVBatchMeta names, its fields or some of them; see `kv_batch_get`.

        Raises:
            InvalidArgumentError: meta has no partition_id, no fields, or not the selected ones.
        """
        if not isinstance(meta, KVBatchMeta):
            raise InvalidArgumentError(f"meta must be a KVBatchMeta, as a put returns it, not a {type(meta).__name__}")
        if meta.partition_id is None:
            raise InvalidArgumentError("the KVBatchMeta has no partition_id; a put returns one that has")
        there = meta.fields
        if there is None:
            raise InvalidArgumentError(
                f"select_fields {select_fields} not found in the KVBatchMeta, whose fields are None: set meta.fields, "
                f"as a put returns them, or ask kv_batch_get"
            )
        fields = there if select_fields is None else arguments.names(select_fields, "select_fields", least=0)
        absent = [name for name in fields if name not in there]
        if absent:
            raise InvalidArgumentError(f"select_fields {absent} not found in the KVBatchMeta, whose fields are {there}")
        return (
            yield from self.kv_batch_get(
                meta.keys, meta.partition_id, fields, layout=layout, device=device, timeout=timeout
            )
        )

    def kv_list(
        self,
        partition_id: str | None = None,
        *,
        where: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Operation[dict[str, dict[str, dict[str, Any]]]]:
        """Partition -> key -> tag, keys in order of creation; of one partition ({} if unknown) or of all.

        where: only keys whose tags have these entries, with equal values; see `wait_for_change`. A long list comes in
        pages, so that it delays nobody: what is put or cleared meanwhile may be in it or not.
        """
        yield from self._state.learn()
        allow = self._state.settings.allow_pickle
        if partition_id is not None:
            arguments.partition(partition_id)
        request = ListKeys(None if partition_id is None else [partition_id], arguments.where(where, allow))
        listed: dict[str, dict[str, dict[str, Any]]] = {}
        while True:
            page = yield from self._ask(request, KeysReply, timeout)
            for name, keys in page.value.items():
                replies.tags(list(keys.values()), allow)
                listed.setdefault(name, {}).update(keys)
            if not page.left:
                return listed
            request = ListKeys(page.left, request.where, page.made, page.start)

    def kv_clear(
        self, keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[None]:
        """Drops the samples of these keys; unknown keys and partitions are fine."""
        yield from self._ask(ClearKeys(partition_id, arguments.keys(keys)), Done, timeout)

    # ------------------------------------------------------------ shared

    def _put_keys(
        self,
        keys: list[str],
        partition_id: str,
        encoded: EncodedBlock | None,
        tags: Tags | None,
        groups: list[str] | None,
        timeout: float | None,
    ) -> Operation[KVBatchMeta]:
        tags = arguments.tags(tags, len(keys), "keys")
        if (encoded is None or not encoded.schema) and tags is None:
            raise InvalidArgumentError("a put needs fields or tags; it has neither")
        if not keys:
            return KVBatchMeta(partition_id=partition_id, fields=[])
        sent = self._tags(tags)
        reply = yield from self._publish(
            encoded, timeout, partition=partition_id, count=len(keys), keys=keys,
            tags=sent, groups=groups, pre_allocate=pre_alloc_sample_num(),
        )  # fmt: skip
        fields, merged = reply.fields, reply.tags
        if fields is None:  # none of the keys was known: what they have is what was put
            fields = [] if encoded is None else sorted(spec.name for spec in encoded.schema)
            merged = None if sent is None else replies.tags_of_new(sent)
        merged = replies.tags(merged, self._state.settings.allow_pickle)
        return KVBatchMeta._made(keys, [{} for _ in keys] if merged is None else merged, partition_id, fields)


def _left_out(partition_id: str, reply: LookupReply) -> str:
    """Return a phrase that names the keys and fields that a lookup by keys left out."""
    parts = []
    if reply.unknown:
        parts.append(f"keys {arguments.shown(reply.unknown)}, which were not found in partition {partition_id!r}")
    if reply.lacking:
        found = abs(reply.count)
        parts += [
            f"field {name!r}, which is missing in {count} of {found} rows" for name, count in reply.lacking.items()
        ]
    return "; ".join(parts)
