"""Functions that cut a batch into micro-batches, by count or by tokens, as rows or packed, data and metadata alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from transfer_queue.dataloader.batch_fetcher import Batch
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import SEPARATOR
from transfer_queue.metadata import BatchMeta
from transfer_queue.wire.blocks.gather import table_of, tensor_rows
from transfer_queue.wire.buffers.jagged import (
    JaggedOffsets,
    host_offsets,
    is_plain_jagged,
    moved_to,
    rows_follow,
    rows_of_jagged,
    rows_of_strided,
)
from transfer_queue.wire.objects.object_decoder import lone_number

LENGTH_TAG = "total_lengths"

Lengths = NDArray[np.int64]


def chunk_batch_fn(td: TensorDictBase, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Batch]:
    """Cut a batch into micro-batches, data and metadata at the same rows.

    Args:
        td: The values, batch size [rows].
        batch_meta: The metadata of the same rows.
        micro_batch_size: The number of rows in a micro-batch; the last one may be smaller. Default: 1.

    Returns:
        The micro-batches in order, (values, metadata) each. Their columns are views of the batch's columns; only rows
        that are ragged in several dimensions are copied.

    Raises:
        InvalidArgumentError: `micro_batch_size` is less than 1, or more than the rows of the batch.

    Example:
        >>> from transfer_queue.dataloader.streaming_dataset import chunk_batch_fn
        >>> data = TensorDict({"reward": torch.arange(4)}, batch_size=4)
        >>> [part["reward"].tolist() for part, _ in chunk_batch_fn(data, tq.BatchMeta(range(4), "train_0"), 2)]
        [[0, 1], [2, 3]]
    """
    return list(chunks(td, batch_meta, micro_batch_size))


def chunks(td: TensorDictBase, batch_meta: BatchMeta, micro_batch_size: int) -> Iterator[Batch]:
    """Yield the same as `chunk_batch_fn`. Each micro-batch is cut when the iterator reaches it."""
    rows = len(batch_meta)
    if micro_batch_size < 1:
        raise InvalidArgumentError(f"micro_batch_size must be 1 or more, got {micro_batch_size}")
    if micro_batch_size > rows:
        raise InvalidArgumentError(
            f"micro_batch_size ({micro_batch_size}) is more than the batch has rows ({rows}); "
            f"make it at most batch_size"
        )
    for start in range(0, rows, micro_batch_size):
        stop = min(start + micro_batch_size, rows)
        yield _rows(td, start, stop), batch_meta[start:stop]


def chunk_by_tokens(
    td: TensorDictBase,
    batch_meta: BatchMeta,
    max_tokens: int,
    *,
    max_rows: int | None = None,
    length_field: str | None = None,
) -> Iterator[Batch]:
    """Cut a batch into micro-batches of at most `max_tokens` tokens, in order, as few as this order allows.

    The length of a row is its tag "total_lengths". With `length_field` it is the length of that field's row, or its
    value if the field has one number for each row; "x::y" names a field of a nested TensorDict.

    Args:
        td: The values, batch size [rows].
        batch_meta: The metadata of the same rows.
        max_tokens: The maximum number of tokens in a micro-batch. A longer row is a micro-batch by itself.
        max_rows: The maximum number of rows in a micro-batch. Default: no limit.
        length_field: The field that gives the lengths. Default: the tag "total_lengths".

    Yields:
        The micro-batches in order, (values, metadata) each.

    Raises:
        InvalidArgumentError: A row does not have such a length.
    """
    lengths = row_lengths(td, length_field) if length_field is not None else _tagged_lengths(batch_meta)
    start = tokens = 0
    for row, length in enumerate(lengths.tolist()):
        if row > start and (tokens + length > max_tokens or row - start == max_rows):
            yield _rows(td, start, row), batch_meta[start:row]
            start, tokens = row, 0
        tokens += length
    yield _rows(td, start, len(lengths)), batch_meta[start:]


def pack(td: TensorDictBase, length_field: str) -> TensorDict:
    """Return the rows as one row of concatenated tokens, as variable-length attention takes them.

    Fields whose rows have the same lengths as those of `length_field`, [rows, j, ...], become [1, tokens, ...]
    (concatenated along their ragged dimension), also inside nested TensorDicts. Other fields keep one value for each
    row. These fields are added:

    - "cu_seqlens": int32 [rows + 1], where each row begins, and the end of the last one.
    - "position_ids": int64 [1, tokens], from 0 in each row; an existing field of this name is kept.
    - "max_seqlen": int, the length of the longest row.

    Args:
        td: The values, batch size [rows].
        length_field: A field of token rows.

    Returns:
        A TensorDict of batch size [], because its values have no dimension in common.

    Raises:
        InvalidArgumentError: `length_field` does not have token rows, or a field has one of the added names.
    """
    taken = {"cu_seqlens", "max_seqlen"} & set(td.keys())
    if taken:
        raise InvalidArgumentError(f"pack=True adds the fields {sorted(taken)}, which are in data_fields; rename them")
    if not _has_token_rows(_column(td, length_field)):
        raise InvalidArgumentError(
            f"pack=True concatenates rows of tokens, but {length_field!r} has no such rows; "
            f"name a field that has (length_field=)"
        )
    lengths = row_lengths(td, length_field)
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    out = _packed(td, lengths)
    device = _device_of(_column(td, length_field))
    out.set("cu_seqlens", moved_to(torch.from_numpy(starts.astype(np.int32)), device))
    if "position_ids" not in td.keys():  # noqa: SIM118
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        out.set("position_ids", moved_to(torch.from_numpy(positions).unsqueeze(0), device))
    out.set_non_tensor("max_seqlen", int(lengths.max(initial=0)))
    return out


def _packed(td: TensorDictBase, lengths: Lengths) -> TensorDict:
    """Return the table with all columns whose rows have these lengths concatenated, also in nested tables."""
    out = TensorDict({}, batch_size=[])
    for name in td.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
        column = td.get(name)
        if _is_table(column):
            column = _packed(column, lengths)
        elif (own_lengths := _token_lengths(column)) is not None and np.array_equal(own_lengths, lengths):
            column = _concatenated(column)
        out.set(name, column)
    return out


def token_field(td: TensorDictBase, names: Sequence[str]) -> str:
    """Return the first of these fields that has token rows, or the first such field of a nested TensorDict.

    Raises:
        InvalidArgumentError: No field has token rows.
    """
    for name in names:
        for leaf, column in _leaves(name, _column(td, name)):
            if _has_token_rows(column):
                return leaf
    raise InvalidArgumentError(f"pack=True concatenates rows of tokens, but none of the fields {list(names)} has any")


def row_lengths(td: TensorDictBase, field: str) -> Lengths:
    """Return the number of tokens in each row of a field, or the field's values if it has one number for each row.

    Raises:
        InvalidArgumentError: The field does not exist, or has neither.
    """
    column = _column(td, field)
    lengths = _token_lengths(column)
    if isinstance(column, torch.Tensor) and not column.is_nested and _is_integral(column) and column.dim() == 1:
        lengths = column.cpu().numpy().astype(np.int64)
    if lengths is None or (lengths < 0).any():
        raise InvalidArgumentError(
            f"length_field {field!r} must have token rows or one number of tokens for each row, "
            f"but {'is not among the fields ' + str(sorted(td.keys())) if column is None else 'has neither'}"
        )
    return lengths


def _token_lengths(column: Any) -> Lengths | None:
    """Return the lengths of token rows; None if the column has no token rows."""
    if not _has_token_rows(column):
        return None
    rows = tensor_rows(column)
    if rows is not None:
        return np.array([row.size(_ragged_dimension(rows)) for row in rows], np.int64)
    if not column.is_nested:
        return np.full(column.size(0), column.size(1), np.int64)
    if is_plain_jagged(column):
        return np.diff(host_offsets(column))
    return np.array([row.size(column._ragged_idx - 1) for row in column.unbind()], np.int64)


def _device_of(column: Any) -> torch.device:
    """Return the device of a field of token rows."""
    rows = tensor_rows(column)
    device: torch.device = column.device if rows is None else rows[0].device
    return device


def _tagged_lengths(meta: BatchMeta) -> Lengths:
    lengths = [lone_number(tag.get(LENGTH_TAG)) for tag in meta.custom_meta]
    for index, length in zip(meta.global_indexes, lengths):
        if type(length) is not int or length < 0:
            raise InvalidArgumentError(
                f"max_tokens needs the length of every row, but the tag {LENGTH_TAG!r} of row {index} is {length!r}; "
                f"put it with the rows, or name a field that has it (length_field=)"
            )
    return np.array(lengths, np.int64)


def _is_table(column: Any) -> TypeGuard[TensorDict]:
    """Return whether this is a nested TensorDict, of which each field is a column."""
    return isinstance(column, TensorDict) and column.batch_dims == 1


def _column(td: TensorDictBase, name: str) -> Any:
    """Return the field of this name, also in nested TensorDicts; None if it does not exist."""
    if name in td.keys():  # noqa: SIM118
        return td.get(name)
    column: Any = td
    for part in name.split(SEPARATOR):
        column = column.get(part, None) if isinstance(column, TensorDictBase) else None
    return column


def _leaves(name: str, column: Any) -> Iterator[tuple[str, Any]]:
    """Yield the field itself, or all fields of a nested TensorDict, at any depth."""
    if not _is_table(column):
        yield name, column
        return
    for inner in column.keys():  # noqa: SIM118
        yield from _leaves(f"{name}{SEPARATOR}{inner}", column.get(inner))


def _has_token_rows(column: Any) -> bool:
    rows = tensor_rows(column)
    if rows is not None:
        return rows[0].dim() >= 1 and _ragged_dimension(rows) >= 0
    if not isinstance(column, torch.Tensor):
        return False
    return column.layout == torch.jagged if column.is_nested else column.dim() >= 2


def _ragged_dimension(rows: list[torch.Tensor]) -> int:
    """Return the dimension in which rows differ, 0 if they have one shape; -1 if they differ in several."""
    shapes = {tuple(row.shape) for row in rows}
    if len({len(shape) for shape in shapes}) > 1:
        return -1
    differing = [at for at, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    return -1 if len(differing) > 1 else differing[0] if differing else 0


def _is_integral(column: torch.Tensor) -> bool:
    return not column.is_floating_point() and not column.is_complex() and column.dtype is not torch.bool


def _concatenated(column: Any) -> torch.Tensor:
    """Return [rows, ...] as one row [1, ...]; without a copy if the values are contiguous."""
    listed = tensor_rows(column)
    if listed is not None:
        return torch.cat(listed, dim=_ragged_dimension(listed)).unsqueeze(0)
    if not column.is_nested:
        return column.reshape(1, -1, *column.shape[2:])  # type: ignore[no-any-return]
    if is_plain_jagged(column):
        return column.values().unsqueeze(0)  # type: ignore[no-any-return]
    rows = [row.contiguous() for row in column.unbind()]
    return torch.cat(rows, dim=column._ragged_idx - 1).unsqueeze(0)


def _rows(td: TensorDictBase, start: int, stop: int, cuts: dict[bytes, JaggedOffsets] | None = None) -> TensorDictBase:
    """Return td[start:stop], also with nested columns."""
    if stop - start == td.batch_size[0]:
        return td.copy()  # another table over the same columns, like a slice
    columns = {name: td.get(name) for name in td.keys()}  # noqa: SIM118  (a TensorDict iterates over its rows)
    cuts = {} if cuts is None else cuts
    cut = {name: rows for name, column in columns.items() if (rows := _cut(column, start, stop, cuts)) is not None}
    if not cut:
        return td[start:stop]
    rest = td.exclude(*cut)[start:stop]
    return table_of({name: cut[name] if name in cut else rest.get(name) for name in columns}, stop - start)


def _cut(column: Any, start: int, stop: int, cuts: dict[bytes, JaggedOffsets]) -> Any:
    """Return the rows of a nested column; None for a column that torch and tensordict slice well.

    Jagged columns are cut at their offsets: torch's slicing is slower and writes logs.
    """
    if rows_follow(column):
        return rows_of_jagged(column, start, stop, cuts)
    if isinstance(column, torch.Tensor) and column.is_nested and column.layout == torch.strided:
        return rows_of_strided(column, start, stop)
    return _rows(column, start, stop, cuts) if _is_table(column) else None
