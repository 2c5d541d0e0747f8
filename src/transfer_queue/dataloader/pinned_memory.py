"""Copies items into page-locked memory, from which a device copies asynchronously.

Torch pins the types that it supports. Jagged and nested columns inside a TensorDict are pinned here, part by part, and
metadata is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.wire.blocks.gather import stack_of, tensor_rows


def pin(item: Any) -> Any:
    """Return the item with its tensors pinned, also inside tuples, lists and mappings. Pinned tensors are not copied.

    TensorDicts, tuples, lists and mappings are new objects.
    """
    if isinstance(item, torch.Tensor):
        return _pinned_tensor(item)
    if isinstance(item, BatchMeta | KVBatchMeta | str | bytes):
        return item
    if is_non_tensor(item):
        return _pinned_stack(item)
    if isinstance(item, TensorDictBase):
        columns = {name: pin(item.get(name)) for name in item.keys()}  # noqa: SIM118
        return TensorDict(columns, batch_size=item.batch_size)
    if isinstance(item, tuple):
        parts = [pin(part) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    if isinstance(item, list):
        return [pin(part) for part in item]
    if isinstance(item, Mapping):
        return {name: pin(part) for name, part in item.items()}
    return item.pin_memory() if hasattr(item, "pin_memory") else item


def _pinned_stack(column: Any) -> Any:
    """Return a column of one value for each row, with its tensors pinned. Rows that are one tensor remain one."""
    rows = tensor_rows(column)
    if rows is None:
        return column
    pinned = {id(row): row for row in rows}
    pinned = {key: _pinned_tensor(row) for key, row in pinned.items()}
    return stack_of([pinned[id(row)] for row in rows], len(rows))


def _pinned_tensor(tensor: Any) -> torch.Tensor:
    if not tensor.is_nested:
        return tensor.pin_memory()  # type: ignore[no-any-return]
    if tensor.layout == torch.jagged:
        return _pinned_jagged(tensor)
    return torch._nested_view_from_buffer(
        tensor.values().pin_memory(), tensor._nested_tensor_size(), tensor._nested_tensor_strides(),
        tensor._nested_tensor_storage_offsets(),
    )  # fmt: skip


def _pinned_jagged(tensor: Any) -> torch.Tensor:
    lengths = tensor.lengths()
    return torch.nested.nested_tensor_from_jagged(
        tensor.values().pin_memory(), tensor.offsets().pin_memory(), None if lengths is None else lengths.pin_memory(),
        jagged_dim=tensor._ragged_idx, min_seqlen=tensor._maybe_min_seqlen, max_seqlen=tensor._maybe_max_seqlen,
    )  # fmt: skip
