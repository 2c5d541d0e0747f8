"""Converts replies to the results of operations, merges lookups of partitions, makes the columns of empty batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from msgspec.msgpack import Ext

from transfer_queue.core.tables.fields import mixed_shapes
from transfer_queue.errors import FieldTypeError, ProtocolError
from transfer_queue.messages.base import DELETE_CODE
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.descriptors import NESTED, Blocks, FieldType, Placement
from transfer_queue.messages.puts import PublishReply
from transfer_queue.messages.queries import LookupReply, StatusReply
from transfer_queue.messages.tag_table import SentTags, StoredTags, TagTable
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.field_columns import TABLE, FieldColumn, promote_dtypes
from transfer_queue.wire.blocks.encode import EncodedBlock
from transfer_queue.wire.blocks.gather import stack_of
from transfer_queue.wire.blocks.row_addressing import LOOKUP_REPLY, SERVER_REPLY
from transfer_queue.wire.buffers.block_layout import columns
from transfer_queue.wire.buffers.jagged import offsets_of_lengths
from transfer_queue.wire.buffers.tensors import DTYPES
from transfer_queue.wire.objects.object_values import decode_tag_value
from transfer_queue.wire.objects.tag_rows import TagRows


@SERVER_REPLY
def batch_meta(partition_id: str, reply: ClaimReply, allow_pickle: bool) -> BatchMeta:
    """Return the BatchMeta of the rows of a reply; if it has no rows, an empty BatchMeta with the known fields."""
    rows = np.frombuffer(reply.rows, "<i8")
    if not len(rows):
        return BatchMeta._from_columns(rows, partition_id, [_column_of_no_rows(field) for field in reply.fields])
    produced = None if reply.produced is None else np.frombuffer(reply.produced, "i1")
    fields = [_column(field, reply, len(rows)) for field in reply.fields]
    stored = None if reply.tags is None else tags(reply.tags, len(rows), allow_pickle)
    meta = BatchMeta._from_columns(rows, partition_id, fields, produced, stored)
    meta._epoch = reply.epoch
    return meta


def _column_of_no_rows(field: FieldType) -> FieldColumn:
    if field.kind != "tensor":
        return _without_dtype(field.name, field.kind)
    dtype = promote_dtypes([getattr(torch, name) for name in field.dtypes or [field.dtype]])
    ndim = None if field.mixed_rank else field.ndim
    shape = None if field.shape is None else tuple(field.shape)
    return FieldColumn(field.name, dtype, ndim, shape, is_nested=field.differs != 0)


def _column(field: FieldType, reply: ClaimReply, rows: int) -> FieldColumn:
    if field.kind != "tensor":
        return FieldColumn(field.name, None, is_non_tensor=True)
    dtype, dtypes = getattr(torch, field.dtype), None
    if field.dtypes:
        all_of_it = [getattr(torch, name) for name in field.dtypes]
        by_row = reply.dtypes.get(field.name)
        dtypes = [all_of_it[code] for code in by_row] if by_row is not None and len(by_row) == rows else None
        dtype = promote_dtypes(all_of_it)
    if field.shape is not None:
        return FieldColumn(field.name, dtype, field.ndim, tuple(field.shape), is_nested=False, dtypes=dtypes)
    listed = reply.shapes.get(field.name)
    if listed is None:
        return FieldColumn(field.name, dtype, dtypes=dtypes)
    row_shapes = np.frombuffer(listed, "<i8").reshape(-1, field.ndim)
    return FieldColumn(field.name, dtype, field.ndim, None, row_shapes, dtypes=dtypes)


def _without_dtype(name: str, kind: str) -> FieldColumn:
    nested = kind == NESTED
    return FieldColumn(name, None, is_non_tensor=not nested, extra={TABLE: True} if nested else None)


def encoded_fields(encoded: EncodedBlock) -> list[FieldColumn]:
    """Return the fields of a put, for its BatchMeta."""
    columns = []
    for column in encoded.columns:
        spec, dims = column.spec, np.frombuffer(column.dims, "<i8")
        if spec.kind != "tensor":
            columns.append(_without_dtype(spec.name, spec.kind))
        elif spec.ragged:
            shapes = list(map(tuple, mixed_shapes(dims))) if spec.ndim < 0 else dims.reshape(-1, spec.ndim)
            if column.slots is not None:
                at = column.slots
                shapes = [shapes[slot] for slot in at.tolist()] if isinstance(shapes, list) else shapes[at]
            columns.append(FieldColumn.from_shapes(spec.name, DTYPES[spec.dtype], shapes))
        else:
            shape = tuple(dims.tolist())
            columns.append(FieldColumn(spec.name, DTYPES[spec.dtype], spec.ndim, shape, is_nested=False))
    return columns


def merged_tags(reply: PublishReply, sent: SentTags | None) -> StoredTags | None:
    """Return the tags that the rows of a put have after it; None if all are empty. sent: those of the put."""
    if sent is not None and (reply.fields is None or reply.tags_as_sent):
        # the rows are new, so they have the tags that were sent, without entries to remove
        if isinstance(sent, TagTable):
            return sent.without_deletes()
        return [
            {name: value for name, value in (tag or {}).items() if type(value) is not Ext or value.code != DELETE_CODE}
            for tag in sent
        ]
    return reply.tags


@SERVER_REPLY
def tags(stored: StoredTags, rows: int, allow_pickle: bool) -> list[dict[str, Any]] | TagRows:
    """Return the tags of a reply, decoded. If they are a list, they are decoded in place.

    Raises:
        ProtocolError: The reply has not one tag for each row, or a value cannot be decoded.
        UncarriableValueError: A value was pickled, and `allow_pickle` is false.
    """
    if len(stored) != rows:
        raise ProtocolError(f"a reply about {rows} rows has {len(stored)} tags")
    if isinstance(stored, TagTable):
        return TagRows.checked(stored, allow_pickle)
    for tag in stored:
        decode_tag_value(tag, allow_pickle=allow_pickle)
    return stored


def tag_list(stored: StoredTags | None, rows: int, allow_pickle: bool) -> list[dict[str, Any]]:
    """Return the tag of each row of a reply."""
    if stored is None:
        return [{} for _ in range(rows)]
    decoded = tags(stored, rows, allow_pickle)
    return decoded.to_list() if isinstance(decoded, TagRows) else decoded


@SERVER_REPLY
def status(reply: StatusReply, fields: int | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (int64 indexes, int8 matrix [rows, fields]); (None, None) if the partition or a field is unknown.

    If `fields` is None, the matrix has the shape [rows].
    """
    if not reply.known:
        return None, None
    rows = torch.from_numpy(np.frombuffer(reply.rows, "<i8").copy())
    matrix = torch.from_numpy(np.frombuffer(reply.matrix, "i1").copy())
    return rows, matrix if fields is None else matrix.reshape(len(rows), fields)


def column_of_no_rows(field: FieldColumn, layout: str) -> Any:
    """Return a field without rows, in the container of a layout (see `get_data`).

    A field whose dtype is not known counts as a field of objects. The size of a row dimension that is not known is 0.
    """
    if field.is_non_tensor or field.dtype is None or field.ndim is None or layout == "list":
        return stack_of([], 0)
    shape = list(field.shape or [0] * field.ndim)
    if field.ndim and layout == "jagged":
        none = np.zeros(0, "i8").tobytes()
        return offsets_of_lengths(none).make_jagged(torch.empty([0, *shape[1:]], dtype=field.dtype), 1)
    return torch.empty([0, *shape], dtype=field.dtype)


@LOOKUP_REPLY
def merge_lookups(replies: list[LookupReply], positions: list[np.ndarray]) -> LookupReply:
    """Return one lookup whose row positions[i][j] is row j of replies[i]. All must have the same fields."""
    count = sum(reply.count for reply in replies)
    names = [t.name for t in replies[0].types]
    firsts = np.cumsum([0, *(len(reply.blocks.rows) // 4 for reply in replies)])
    placements = []
    for name in names:
        block, slot = np.empty(count, "<i4"), np.empty(count, "<i4")
        for reply, where, first in zip(replies, positions, firsts):
            placed = next(p for p in reply.placements if name in p.fields)
            block[where] = np.frombuffer(placed.block, "<i4") + first
            slot[where] = np.frombuffer(placed.slot, "<i4")
        placements.append(Placement([name], block.tobytes(), slot.tobytes()))
    return LookupReply(count, [_type(name, replies) for name in names], _blocks(replies), placements)


def _blocks(replies: list[LookupReply]) -> Blocks:
    parts = [reply.blocks for reply in replies]
    columns = ("unit", "offset", "generation", "nbytes", "rows")
    return Blocks(
        **{name: b"".join(getattr(part, name) for part in parts) for name in columns},
        schema=_positions([part.schema for part in parts], [len(part.schemas) for part in parts]),
        dims=_positions([part.dims for part in parts], [len(part.dims_values) for part in parts]),
        schemas=[schema for part in parts for schema in part.schemas],
        dims_values=[dims for part in parts for dims in part.dims_values],
    )


def _positions(columns: list[bytes], counts: list[int]) -> bytes:
    """Return columns of positions (i4) in lists of these lengths as one column of positions in the joined list."""
    firsts = np.cumsum([0, *counts[:-1]])
    shifted = [np.frombuffer(column, "<i4") + first for column, first in zip(columns, firsts)]
    return np.concatenate(shifted).astype("<i4").tobytes()


def _type(name: str, replies: list[LookupReply]) -> FieldType:
    types = [next(t for t in reply.types if t.name == name) for reply in replies]
    first = types[0]
    differs, mixed = 0, False
    for other in types:
        if other.kind != first.kind:
            raise FieldTypeError(
                f"field {name!r} has {first.kind}s in one partition and {other.kind}s in another; fetch the "
                f"partitions one by one (metadata.chunk_by_partition())"
            )
        differs |= other.differs
        mixed |= other.mixed_rank or other.ndim != first.ndim
    listed = list(dict.fromkeys(dtype for each in types for dtype in (each.dtype, *each.dtypes)))
    dtypes = listed if len(listed) > 1 else []
    if first.kind != "tensor" or mixed:
        return FieldType(name, first.kind, first.dtype, first.ndim, None, differs, mixed, dtypes)
    # if a dimension never differed within any partition, one row of each partition shows its size
    shapes = [_one_shape(name, known, reply) for known, reply in zip(types, replies)]
    differs |= sum(1 << d for d, sizes in enumerate(zip(*shapes)) if len(set(sizes)) > 1)
    shape = None if differs else first.shape
    return FieldType(name, first.kind, first.dtype, first.ndim, shape, differs, False, dtypes)


def _one_shape(name: str, known: FieldType, reply: LookupReply) -> list[int]:
    """Return the shape of the field's first row in a lookup."""
    if known.shape is not None:
        return known.shape
    placed = next(p for p in reply.placements if name in p.fields)
    block, slot = (int(np.frombuffer(column, "<i4")[0]) for column in (placed.block, placed.slot))
    blocks = reply.blocks
    schema = blocks.schemas[int(np.frombuffer(blocks.schema, "<i4")[block])]
    dims = np.frombuffer(blocks.dims_values[int(np.frombuffer(blocks.dims, "<i4")[block])], "<i8")
    layouts = columns(schema, dims, int(np.frombuffer(blocks.rows, "<i4")[block]))
    layout = next(layout for layout in layouts if layout.spec.name == name)
    shape: list[int] = layout.row_shapes(0, np.array([slot]))[0].tolist()
    return shape
