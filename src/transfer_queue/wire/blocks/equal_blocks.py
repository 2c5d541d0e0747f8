"""Locates rows of equal shapes in blocks that are laid out alike, such as those of rows that were put one by one.

The layout of such blocks is computed once, so that a field needs three operations on an array of its rows, where the
general way of `row_addressing` needs a dozen.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import Blocks, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.contiguous_rows import RunColumn, following_numbers, run_columns
from transfer_queue.wire.blocks.row_addressing import Memory, column_fits, with_dtype
from transfer_queue.wire.buffers.copies import U8, gather_equal

I8 = NDArray[np.int64]

_I4 = struct.Struct("<i")


@dataclass(frozen=True, slots=True)
class EqualRows:
    """Rows of one field that have one shape and are anywhere in one arena."""

    type: FieldType
    unit: int
    starts: I8
    """The start of each row in the arena of the unit, [count]."""
    row: int
    """The length of each row in bytes, not 0."""
    count: int
    shape: tuple[int, ...]
    """The shape of each row."""

    def gather_bytes(self, memory: Memory) -> U8:
        """Return all rows, one after the other, in new memory."""
        return gather_equal(memory(self.unit), self.starts, self.row)


def equal_rows(reply: LookupReply, memory: Memory) -> Mapping[str, EqualRows] | None:
    """Return the rows of each field if all blocks are laid out alike and all rows of a field have one shape.

    Returns None otherwise, and if the reply is not consistent: the general way reports what is wrong.
    """
    if not reply.count or any(field.kind != "tensor" for field in reply.types):
        return None
    try:
        return _found(reply, memory)
    except (InvalidArgumentError, ValueError, KeyError, IndexError, struct.error):
        return None


def _found(reply: LookupReply, memory: Memory) -> Mapping[str, EqualRows] | None:
    blocks = reply.blocks
    number = len(blocks.unit) // 4
    unit, schema, dims, rows = (
        _only_value(column, number) for column in (blocks.unit, blocks.schema, blocks.dims, blocks.rows)
    )
    if unit is None or schema is None or dims is None or rows is None or min(schema, dims, rows - 1) < 0:
        return None
    columns, end = run_columns(tuple(blocks.schemas[schema]), blocks.dims_values[dims], rows)
    offsets = _checked_offsets(blocks, number, end, len(memory(unit)))
    if offsets is None:
        return None
    types = {field.name: field for field in reply.types}
    found: dict[str, EqualRows] = {}
    for placement in reply.placements:
        places = _places(placement, reply.count, offsets, rows)
        for name in placement.fields if places is not None else ():
            field, column = types.get(name), columns.get(name)
            if field is None or column is None or not _is_equal(column, field) or places is None:
                return None
            starts, slots = places
            starts = starts + column.offset if slots is None else starts + (slots * column.row + column.offset)
            typed = with_dtype(field, column.spec.dtype)
            found[name] = EqualRows(typed, unit, starts, column.row, reply.count, column.shape)
    return found if len(found) == len(types) else None


def _only_value(column: bytes, number: int) -> int | None:
    """Return the value that all `number` entries of a column have; None if they differ."""
    first = column[:4]
    value: int | None = _I4.unpack(first)[0] if number and column == first * number else None
    return value


def _checked_offsets(blocks: Blocks, number: int, end: int, length: int) -> I8 | None:
    """Return the start of each block; None if one is shorter than its columns, or outside the arena."""
    offsets: I8 = np.frombuffer(blocks.offset, "<i8")
    nbytes: I8 = np.frombuffer(blocks.nbytes, "<i8")
    if len(offsets) != number or len(nbytes) != number or int(nbytes.min()) < end or int(offsets.min()) < 0:
        return None
    return None if (offsets > length - nbytes).any() else offsets


def _places(placement: Placement, count: int, offsets: I8, rows: int) -> tuple[I8, I8 | None] | None:
    """Return the start of each row's block and the slot of each row (None: 0); None if they are not valid."""
    if len(placement.block) != 4 * count or len(placement.slot) != 4 * count:
        return None
    starts = offsets
    if count != len(offsets) or placement.block != following_numbers(0, count):
        block = np.frombuffer(placement.block, "<i4")
        if int(block.min()) < 0:
            return None
        starts = offsets[block]
    if placement.slot == bytes(4 * count):
        return starts, None
    slots = np.frombuffer(placement.slot, "<i4").astype(np.int64)
    return (starts, slots) if int(slots.min()) >= 0 and int(slots.max()) < rows else None


def _is_equal(column: RunColumn, field: FieldType) -> bool:
    """Whether the rows of a column of a block have one shape and some bytes, and fit the type of the field."""
    return column.starts is None and column.row > 0 and column_fits(column.spec, field)
