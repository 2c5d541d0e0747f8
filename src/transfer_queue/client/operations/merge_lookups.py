"""Merges lookups of several partitions, so that one gather reads them all."""

from __future__ import annotations

import numpy as np

from transfer_queue.errors import FieldTypeError
from transfer_queue.messages.descriptors import Blocks, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.row_addressing import LOOKUP_REPLY
from transfer_queue.wire.buffers.block_layout import columns


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
    schemas = [schema for part in parts for schema in part.schemas]
    dims = [value for part in parts for value in part.dims_values]
    schema_at, dims_at = [], []
    schema_first = dims_first = 0
    for part in parts:
        schema_at.append(np.frombuffer(part.schema, "<i4") + schema_first)
        dims_at.append(np.frombuffer(part.dims, "<i4") + dims_first)
        schema_first += len(part.schemas)
        dims_first += len(part.dims_values)
    return Blocks(
        unit=b"".join(part.unit for part in parts),
        offset=b"".join(part.offset for part in parts),
        generation=b"".join(part.generation for part in parts),
        nbytes=b"".join(part.nbytes for part in parts),
        rows=b"".join(part.rows for part in parts),
        schema=np.concatenate(schema_at).astype("<i4").tobytes(),
        dims=np.concatenate(dims_at).astype("<i4").tobytes(),
        schemas=schemas,
        dims_values=dims,
    )


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
    for d in range(first.ndim):
        if any(shape[d] != shapes[0][d] for shape in shapes):
            differs |= 1 << d
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
