"""Makes the columns for a user's data_parser, and checks the columns that it returns.

A data_parser replaces references (URLs, paths) by content. It takes a dict of columns and returns a dict of columns
with the same keys, lengths and order of rows. It runs in the process of the put, before the write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensor_collection

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.wire.buffers.jagged import check_lengths


def columns_of_row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of one sample, in the form for `encode_row`, as columns of one row."""
    columns: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise InvalidArgumentError(
                f"field {name!r} must have the value of one sample, got a nested tensor; pass a dense one"
            )
        columns[name] = value.unsqueeze(0) if isinstance(value, torch.Tensor) else [value]
    return columns


def parser_columns(fields: TensorDictBase | Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the columns for a data_parser.

    These are tensors for dense columns, lists for nested and non-tensor columns, and numpy arrays for arrays.
    """
    items = ((name, fields.get(name)) for name in list(fields.keys()))
    return {name: _parser_column(name, value, rows) for name, value in items}


def _parser_column(name: str, value: Any, rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            return value
        check_lengths(name, value)
        return list(value.unbind(0))
    if isinstance(value, NonTensorStack):
        return value.tolist()
    if isinstance(value, NonTensorData):
        held = value.data
        if isinstance(held, list) and len(held) == rows:
            return list(held)
        if isinstance(held, np.ndarray | torch.Tensor) and held.ndim and len(held) == rows:
            return held
        return [held] * rows
    return value


def checked_parser_result(before: Mapping[str, Any], after: Any, rows: int) -> dict[str, Any]:
    """Return the result of a data_parser as a dict in the order of its argument.

    Raises:
        InvalidArgumentError: The result has another type, other keys or lengths, or a value that is not a column.
    """
    if not isinstance(after, Mapping):
        raise InvalidArgumentError(f"data_parser must return a dict of columns, got a {type(after).__name__}")
    if set(after) != set(before):
        raise InvalidArgumentError(
            f"data_parser must return the columns it was given, {sorted(before)}, got {sorted(map(str, after))}"
        )
    for name in before:
        found = _length(after[name])
        if found is None:
            raise InvalidArgumentError(
                f"data_parser must return a tensor, list or array of {rows} rows as column {name!r}, got a "
                f"{type(after[name]).__name__}"
            )
        if found != rows:
            raise InvalidArgumentError(f"data_parser must return {rows} rows of column {name!r}, got {found}")
    return {name: after[name] for name in before}


def _length(column: Any) -> int | None:
    """Return the number of rows of a column; None if the value is not a column."""
    if isinstance(column, torch.Tensor):
        return column.size(0) if column.dim() else None
    if isinstance(column, np.ndarray):
        return len(column) if column.ndim else None
    if isinstance(column, list | tuple):
        return len(column)
    if is_tensor_collection(column) and column.batch_dims:
        return int(column.batch_size[0])
    return None
