"""The KV functions of the package. Made by tools/generate_surface.py out of client/kv_operations.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from transfer_queue.client.arguments import Columns, DataParser, Tags
from transfer_queue.current import current_client
from transfer_queue.metadata import KVBatchMeta


def kv_put(
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
    return current_client().kv_put(key, partition_id, fields, tag, data_parser, group_id=group_id, timeout=timeout)


async def async_kv_put(
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
    return await current_client().async_kv_put(
        key, partition_id, fields, tag, data_parser, group_id=group_id, timeout=timeout
    )


def kv_batch_put(
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
    return current_client().kv_batch_put(
        keys, partition_id, fields, tags, data_parser, group_ids=group_ids, timeout=timeout
    )


async def async_kv_batch_put(
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
    return await current_client().async_kv_batch_put(
        keys, partition_id, fields, tags, data_parser, group_ids=group_ids, timeout=timeout
    )


def kv_batch_get(
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
    return current_client().kv_batch_get(
        keys, partition_id, select_fields, missing=missing, layout=layout, device=device, timeout=timeout
    )


async def async_kv_batch_get(
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
    return await current_client().async_kv_batch_get(
        keys, partition_id, select_fields, missing=missing, layout=layout, device=device, timeout=timeout
    )


def kv_batch_get_by_meta(
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
    return current_client().kv_batch_get_by_meta(meta, select_fields, layout=layout, device=device, timeout=timeout)


async def async_kv_batch_get_by_meta(
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
    return await current_client().async_kv_batch_get_by_meta(
        meta, select_fields, layout=layout, device=device, timeout=timeout
    )


def kv_list(
    partition_id: str | None = None, *, where: Mapping[str, Any] | None = None, timeout: float | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Partition -> key -> tag, keys in order of creation; of one partition ({} if unknown) or of all.

    where: only keys whose tags have these entries, with equal values; see `wait_for_change`. A long list comes in
    pages, so that it delays nobody: what is put or cleared meanwhile may be in it or not.
    """
    return current_client().kv_list(partition_id, where=where, timeout=timeout)


async def async_kv_list(
    partition_id: str | None = None, *, where: Mapping[str, Any] | None = None, timeout: float | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Partition -> key -> tag, keys in order of creation; of one partition ({} if unknown) or of all.

    where: only keys whose tags have these entries, with equal values; see `wait_for_change`. A long list comes in
    pages, so that it delays nobody: what is put or cleared meanwhile may be in it or not.
    """
    return await current_client().async_kv_list(partition_id, where=where, timeout=timeout)


def kv_clear(keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None) -> None:
    """Drops the samples of these keys; unknown keys and partitions are fine."""
    return current_client().kv_clear(keys, partition_id, timeout=timeout)


async def async_kv_clear(keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None) -> None:
    """Drops the samples of these keys; unknown keys and partitions are fine."""
    return await current_client().async_kv_clear(keys, partition_id, timeout=timeout)
