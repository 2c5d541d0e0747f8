"""What a user's data_parser is given, and whether what it returned can be put.

A data_parser turns references (URLs, paths) into content: a dict of columns in, a dict of columns out, with
the same keys, lengths and order of rows. It runs in the putting process, before the write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensor_collection

from transfer_queue.errors import InvalidArgumentError


def columns_of_row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one sample, as `encode_row` takes them, as columns of one row."""
    columns: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise InvalidArgumentError(
                f"field {name!r}: a nested tensor is not the row of one sample; pass a dense one"
            )
        columns[name] = value.unsqueeze(0) if isinstance(value, torch.Tensor) else [value]
    return columns


def parser_columns(fields: TensorDictBase | Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The columns that a data_parser is given.

    Tensors for dense columns, lists for nested and non-tensor ones, numpy arrays for arrays of objects.
    """
    items = ((name, fields.get(name)) for name in list(fields.keys()))
    return {name: _parser_column(value, rows) for name, value in items}


def _parser_column(value: Any, rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        return list(value.unbind(0)) if value.is_nested else value
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
    """What a data_parser returned, if it has the keys of what it was given and `rows` values each.

    Raises:
        InvalidArgumentError: another type, other keys or lengths, or a value that is no column.
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
                f"data_parser returned a {type(after[name]).__name__} as column {name!r}; "
                f"wanted a tensor, list or array of {rows} rows"
            )
        if found != rows:
            raise InvalidArgumentError(f"data_parser must return {rows} rows of column {name!r}, got {found}")
    return {name: after[name] for name in before}


def _length(column: Any) -> int | None:
    """The rows of a column, None where it is none."""
    if isinstance(column, torch.Tensor):
        return column.size(0) if column.dim() else None
    if isinstance(column, np.ndarray):
        return len(column) if column.ndim else None
    if isinstance(column, list | tuple):
        return len(column)
    if is_tensor_collection(column) and column.batch_dims:
        return int(column.batch_size[0])
    return None
