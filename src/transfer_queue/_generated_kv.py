"""The KV functions of the package. tools/generate_surface.py generates them from the KV operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.attachment import current_client
from transfer_queue.client.conversion.arguments import Columns, DataParser, Fence, Tags
from transfer_queue.messages.locks import LockEntry
from transfer_queue.metadata import KVBatchMeta


def kv_put(
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
        >>> meta = tq.kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])}, {"step": 1})
        >>> meta.keys, meta.tags, meta.fields
        (['a'], [{'step': 1}], ['prompt'])
    """
    return current_client().kv_put(
        key, partition_id, fields, tag, data_parser, group_id=group_id, fence=fence, timeout=timeout
    )


async def async_kv_put(
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
        >>> meta = await tq.async_kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])}, {"step": 1})
        >>> meta.keys, meta.tags, meta.fields
        (['a'], [{'step': 1}], ['prompt'])
    """
    return await current_client().async_kv_put(
        key, partition_id, fields, tag, data_parser, group_id=group_id, fence=fence, timeout=timeout
    )


def kv_batch_put(
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
        >>> meta = tq.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
        >>> tq.kv_batch_put(["a", "b"], "train_0", tags=[{"step": 1}, {"step": 2}]).tags
        [{'step': 1}, {'step': 2}]
    """
    return current_client().kv_batch_put(
        keys, partition_id, fields, tags, data_parser, group_ids=group_ids, fence=fence, timeout=timeout
    )


async def async_kv_batch_put(
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
        >>> meta = await tq.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
        >>> (await tq.async_kv_batch_put(["a", "b"], "train_0", tags=[{"step": 1}, {"step": 2}])).tags
        [{'step': 1}, {'step': 2}]
    """
    return await current_client().async_kv_batch_put(
        keys, partition_id, fields, tags, data_parser, group_ids=group_ids, fence=fence, timeout=timeout
    )


def kv_batch_get(
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
        >>> meta = tq.kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
        >>> tq.kv_batch_get(["b", "a"], "train_0")["reward"].tolist()
        [1.0, 0.0]
    """
    return current_client().kv_batch_get(
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


async def async_kv_batch_get(
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
        >>> meta = await tq.async_kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
        >>> (await tq.async_kv_batch_get(["b", "a"], "train_0"))["reward"].tolist()
        [1.0, 0.0]
    """
    return await current_client().async_kv_batch_get(
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


def kv_batch_get_by_meta(
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
        >>> meta = tq.kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
        >>> tq.kv_batch_get_by_meta(meta)["reward"].tolist()
        [0.0, 1.0]
    """
    return current_client().kv_batch_get_by_meta(
        meta, select_fields, layout=layout, shared=shared, device=device, copy=copy, out=out, timeout=timeout
    )


async def async_kv_batch_get_by_meta(
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
        >>> meta = await tq.async_kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
        >>> (await tq.async_kv_batch_get_by_meta(meta))["reward"].tolist()
        [0.0, 1.0]
    """
    return await current_client().async_kv_batch_get_by_meta(
        meta, select_fields, layout=layout, shared=shared, device=device, copy=copy, out=out, timeout=timeout
    )


def kv_list(
    partition_id: str | None = None, *, where: Mapping[str, Any] | None = None, timeout: float | None = None
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
        >>> meta = tq.kv_batch_put(["a", "b"], "train_0", tags=[{"step": 1}, {"step": 2}])
        >>> tq.kv_list("train_0", where={"step": 2})
        {'train_0': {'b': {'step': 2}}}
    """
    return current_client().kv_list(partition_id, where=where, timeout=timeout)


async def async_kv_list(
    partition_id: str | None = None, *, where: Mapping[str, Any] | None = None, timeout: float | None = None
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
        >>> meta = await tq.async_kv_batch_put(["a", "b"], "train_0", tags=[{"step": 1}, {"step": 2}])
        >>> await tq.async_kv_list("train_0", where={"step": 2})
        {'train_0': {'b': {'step': 2}}}
    """
    return await current_client().async_kv_list(partition_id, where=where, timeout=timeout)


def kv_clear(keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None) -> None:
    """Remove the samples with these keys. Unknown keys and partitions are ignored.

    Args:
        keys: The keys (one str for one key).
        partition_id: The partition.
        timeout: See `TransferQueueClient`.

    Example:
        >>> meta = tq.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
        >>> tq.kv_clear("a", "train_0")
        >>> tq.kv_list("train_0")
        {'train_0': {'b': {}}}
    """
    return current_client().kv_clear(keys, partition_id, timeout=timeout)


async def async_kv_clear(keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None) -> None:
    """Remove the samples with these keys. Unknown keys and partitions are ignored.

    Args:
        keys: The keys (one str for one key).
        partition_id: The partition.
        timeout: See `TransferQueueClient`.

    Example:
        >>> meta = await tq.async_kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
        >>> await tq.async_kv_clear("a", "train_0")
        >>> await tq.async_kv_list("train_0")
        {'train_0': {'b': {}}}
    """
    return await current_client().async_kv_clear(keys, partition_id, timeout=timeout)


def kv_update(
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
        >>> put = tq.kv_put("steps", "train_0", {"n": 1})
        >>> tq.kv_update("steps", "train_0", "n", lambda old: {"n": old["n"] + 1})
        {'n': 2}
        >>> tq.kv_update("new", "train_0", "n", lambda old: {"n": old["n"] + 1}, empty={"n": 0})
        {'n': 1}
    """
    return current_client().kv_update(key, partition_id, fields, fn, empty=empty, tag=tag, fence=fence, timeout=timeout)


async def async_kv_update(
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
        >>> put = await tq.async_kv_put("steps", "train_0", {"n": 1})
        >>> await tq.async_kv_update("steps", "train_0", "n", lambda old: {"n": old["n"] + 1})
        {'n': 2}
        >>> await tq.async_kv_update("new", "train_0", "n", lambda old: {"n": old["n"] + 1}, empty={"n": 0})
        {'n': 1}
    """
    return await current_client().async_kv_update(
        key, partition_id, fields, fn, empty=empty, tag=tag, fence=fence, timeout=timeout
    )


def kv_lock_list(partition_id: str | None = None, *, timeout: float | None = None) -> list[LockEntry]:
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
        >>> tq.kv_lock_list()
        []
    """
    return current_client().kv_lock_list(partition_id, timeout=timeout)


async def async_kv_lock_list(partition_id: str | None = None, *, timeout: float | None = None) -> list[LockEntry]:
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
        >>> await tq.async_kv_lock_list()
        []
    """
    return await current_client().async_kv_lock_list(partition_id, timeout=timeout)
