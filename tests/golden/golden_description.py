"""What a client can see of a system, as values of JSON: two systems are compared by comparing their descriptions.

Only methods of the public client are used, so that the description that one release gave can be compared with the
description that a later release gives. Texts for people, such as explanations, are not part of it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

WHOLE_BYTES = 64  # bytes of a value up to which it is described by its bytes, and beyond by their hash
MAX_FIELDS = 100  # fields of a partition up to which all are described, and beyond the first and the last three


def described(client: Any) -> dict[str, Any]:
    """Describe all partitions, their samples, the keys and the storage units."""
    status = client.status(timeout=60)
    return {
        "partitions": {each.name: _partition(client, each) for each in sorted(status.partitions, key=lambda p: p.name)},
        "keys": {name: list(keys) for name, keys in sorted(client.kv_list().items())},
        "units": [[unit.unit, unit.tier, unit.drained] for unit in status.units],
    }


def _partition(client: Any, progress: Any) -> dict[str, Any]:
    name = progress.name
    fields = sorted(field.name for field in progress.fields)
    if len(fields) > MAX_FIELDS:
        fields = [*fields[:3], *fields[-3:]]
    tasks = sorted(task.name for task in progress.tasks)
    policy = progress.policy
    found = {
        "rows": progress.rows,
        "reserved": progress.reserved,
        "sealed": progress.sealed,
        "group_size": progress.group_size,
        "nbytes": progress.nbytes,
        "field_count": len(progress.fields),
        "fields": {
            field.name: [field.produced, field.produced_ever, field.lost]
            for field in progress.fields
            if field.name in fields
        },
        "tasks": {task.name: [task.consumed, task.consumed_ever, task.claimed] for task in progress.tasks},
        "orphaned_groups": progress.orphaned_groups,
        "dropped": dict(sorted(progress.dropped.items())),
        "freed": progress.freed,
        "policy": None if policy is None else [policy.version, policy.admitted, policy.limit],
        "wanted": {task: list(numbers) for task, numbers in sorted(progress.wanted.items())},
        "passed": {task: dict(sorted(reasons.items())) for task, reasons in sorted(progress.passed.items())},
    }
    return found | {"samples": _samples(client, name, fields, tasks)}


def _samples(client: Any, name: str, fields: list[str], tasks: list[str]) -> dict[str, Any]:
    """Describe global indexes, keys, tags, production, consumption, schema and values."""
    if not fields:
        return {}
    meta = client.get_meta(fields, None, name, mode="force_fetch")
    indexes = meta.global_indexes
    found: dict[str, Any] = {
        "indexes": indexes,
        "keys": client.kv_retrieve_keys(indexes, name) if indexes else [],
        "tags": [encoded(tag) for tag in meta.custom_meta],
        "consumed": {task: _digits(client.get_consumption_status(task, name), indexes) for task in tasks},
        "produced": {field: _digits(client.get_production_status([field], name), indexes) for field in fields},
    }
    found["schema"] = {field: _schema(meta.field_schema[field]) for field in fields if field in meta.field_schema}
    found["values"] = {field: values(client, name, field) for field in fields}
    return found


def _digits(status: tuple[Any, Any], indexes: list[int]) -> str:
    """The status of each of these samples as a digit."""
    known, column = _column(status) or ([], [])
    assert set(known) >= set(indexes)
    of = dict(zip(known, column, strict=True))
    return "".join(str(of[index]) for index in indexes)


def _column(status: tuple[Any, Any]) -> list[list[int]] | None:
    indexes, column = status
    return None if indexes is None else [indexes.tolist(), column.flatten().tolist()]


def _schema(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: str(entry[key]) for key in ("dtype", "shape", "is_nested", "is_non_tensor")}


def values(client: Any, partition: str, field: str) -> dict[str, Any]:
    """Global index -> value, of the samples that have the field."""
    produced = _column(client.get_production_status([field], partition))
    there = {index for index, has in zip(*produced, strict=True) if has} if produced else set()
    meta = client.get_meta([field], None, partition, mode="force_fetch")
    meta = meta.select_samples([at for at, index in enumerate(meta.global_indexes) if index in there])
    if not len(meta):
        return {}
    column = client.get_data(meta.select_fields([field]), layout="list").get(field)
    return {str(index): encoded(value) for index, value in zip(meta.global_indexes, _rows(column), strict=True)}


def _rows(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        return list(column.unbind(0))
    return list(column.tolist() if hasattr(column, "tolist") else column)


def encoded(value: Any) -> Any:
    """A value in the form of JSON. Only equal values have equal forms."""
    if isinstance(value, torch.Tensor):
        shape = list(value.shape)
        return {str(value.dtype): shape, "bytes": _bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy())}
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OV":
        return {f"numpy {value.dtype.str}": list(value.shape), "bytes": _bytes(value)}
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(entry)] for key, entry in value.items()]} if value else {}
    if isinstance(value, list):
        return [encoded(entry) for entry in value]
    if value is None or type(value) in (bool, int, str):
        return value
    return {type(value).__name__: repr(value)}  # complete for floats, bytes, tuples and complex numbers


def _bytes(array: np.ndarray) -> str:
    content = array.tobytes()
    return content.hex() if len(content) <= WHOLE_BYTES else f"sha256 {hashlib.sha256(content).hexdigest()}"


def batch(answer: tuple[Any, bool]) -> dict[str, Any]:
    """Describe a result of `await_batch`."""
    meta, ended = answer
    return {"rows": meta.global_indexes, "ended": ended, "deliveries": [int(each) for each in meta.deliveries]}


def change(found: Any) -> dict[str, Any]:
    """Describe a result of `wait_for_change`."""
    return {
        "changed": found.changed,
        "version": found.version,
        "samples": [
            list(each)
            for each in zip(found.global_indexes, found.keys, found.versions, map(encoded, found.tags), strict=True)
        ],
        "cleared": [
            list(each) for each in zip(found.cleared_indexes, found.cleared_keys, found.cleared_versions, strict=True)
        ],
        "sealed": found.sealed,
        "dropped": found.dropped,
        "complete": found.complete,
        "lost": [[each.key, each.global_index, sorted(each.fields)] for each in found.lost],
    }
