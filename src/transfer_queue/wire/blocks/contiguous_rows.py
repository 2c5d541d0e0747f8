"""Locates rows that have a regular place: one after the other in one block, or of equal shapes in blocks of one layout.

An operation on an array of one element takes several times as long as one on a number, so the general way of
`row_addressing`, which is made for thousands of blocks, is slow for a single block.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import Blocks, FieldSpec, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.row_addressing import FieldRows, Memory, column_fits, with_dtype
from transfer_queue.wire.buffers.block_layout import MIXED_RANK, columns
from transfer_queue.wire.buffers.copies import U8, gather_equal

I8 = NDArray[np.int64]

_I4, _I8 = struct.Struct("<i"), struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows of one field that are one after the other in an arena."""

    type: FieldType
    unit: int
    start: int
    """The start of the first row in the arena of the unit."""
    nbytes: int
    """The length of all rows in bytes."""
    count: int
    shape: tuple[int, ...] | None
    """The shape of each row; None if rows differ."""
    starts: I8 | None = None
    """If rows differ: the start of each row, [count]."""
    shapes: I8 | None = None
    """If rows differ: the shape of each row, [count, ndim]."""
    lengths: I8 | None = None
    """If rows differ: the length of each row in bytes, [count]."""

    def places(self) -> Iterable[tuple[int, int, int]]:
        """Return the unit, the start and the length of each row."""
        return [(self.unit, self.start, self.nbytes)] if self.count == 1 else self.field_rows().places()

    def field_rows(self) -> FieldRows:
        """Return the rows one by one."""
        units = np.full(self.count, self.unit, np.int32)
        if self.starts is not None and self.shapes is not None and self.lengths is not None:
            return FieldRows(self.type, units, self.starts, self.lengths, self.shapes)
        shape = self.shape or ()
        length = self.nbytes // self.count
        starts = self.start + np.arange(self.count) * length
        shapes = np.empty((self.count, len(shape)), np.int64)
        shapes[:] = shape
        return FieldRows(self.type, units, starts, np.full(self.count, length), shapes)


def row_runs(reply: LookupReply, memory: Memory) -> Mapping[str, RowRun] | None:
    """Return the rows of each field if all of them are runs; None otherwise, and if the reply is not consistent."""
    found = some_row_runs(reply, memory, every=True)
    return found if found and len(found) == len(reply.types) else None


def some_row_runs(reply: LookupReply, memory: Memory, every: bool = False) -> Mapping[str, RowRun]:
    """Return the rows of the fields that are runs; none if the reply is not consistent.

    every: Whether the result is of use only if it has every field, so that the search may end before.
    """
    try:
        return _found(reply, memory, every) if reply.count else {}
    except (InvalidArgumentError, ValueError, KeyError, IndexError, struct.error):
        return {}  # the general way reports what is wrong


def _found(reply: LookupReply, memory: Memory, every: bool) -> Mapping[str, RowRun]:
    types = {field.name: field for field in reply.types}
    found: dict[str, RowRun] = {}
    for placement in reply.placements:
        first = _first_of(placement, reply.count)
        block = None if first is None else _RunBlock(reply.blocks, *first, reply.count, memory)
        for name in placement.fields if block is not None and block.good else ():
            field = types.get(name)
            run = None if block is None or field is None else block.run(field)
            if run is not None:
                found[name] = run
            elif every:
                return {}
        if every and (block is None or not block.good):
            return {}
    return found


def _first_of(placement: Placement, count: int) -> tuple[int, int] | None:
    """Return the block and the first slot of rows that are one after the other in one block; None if they are not."""
    block, slots = placement.block, placement.slot
    if len(block) != 4 * count or len(slots) != 4 * count or block != block[:4] * count:
        return None
    first: int = _I4.unpack_from(slots)[0]
    if count > 1 and slots != following_numbers(first, count):
        return None
    return _I4.unpack_from(block)[0], first


@functools.lru_cache(maxsize=16)
def following_numbers(first: int, count: int) -> bytes:
    """Return the numbers from `first` on (i4)."""
    return np.arange(first, first + count, dtype="<i4").tobytes()


class _RunBlock:
    """One block of a reply, and `count` rows in it from `first` on."""

    def __init__(self, blocks: Blocks, number: int, first: int, count: int, memory: Memory) -> None:
        self.good = False
        """Whether the rows are inside the block, and the block inside its arena."""
        if number < 0 or 4 * number >= len(blocks.unit) or first < 0:
            return
        self.unit: int = _I4.unpack_from(blocks.unit, 4 * number)[0]
        self._offset: int = _I8.unpack_from(blocks.offset, 8 * number)[0]
        self._first, self._count = first, count
        nbytes: int = _I8.unpack_from(blocks.nbytes, 8 * number)[0]
        rows: int = _I4.unpack_from(blocks.rows, 4 * number)[0]
        schema: int = _I4.unpack_from(blocks.schema, 4 * number)[0]
        dims: int = _I4.unpack_from(blocks.dims, 4 * number)[0]
        self._columns, end = run_columns(tuple(blocks.schemas[schema]), blocks.dims_values[dims], rows)
        self.good = (
            first + count <= rows and self._offset >= 0 and end <= nbytes <= len(memory(self.unit)) - self._offset
        )

    def run(self, field: FieldType) -> RowRun | None:
        """Return the rows of one field; None if the column of the block does not fit the type of the field."""
        column = self._columns.get(field.name)
        if column is None or not column_fits(column.spec, field):
            return None
        field = with_dtype(field, column.spec.dtype)
        first, count = self._first, self._count
        at = self._offset + column.offset
        if column.starts is None or column.shapes is None or column.lengths is None:
            return RowRun(field, self.unit, at + first * column.row, count * column.row, count, column.shape)
        if column.spec.ndim == MIXED_RANK:
            return None
        part = slice(first, first + count)
        starts, lengths = column.starts[part], column.lengths[part]
        nbytes = int(starts[-1] + lengths[-1] - starts[0])
        return RowRun(
            field, self.unit, at + int(starts[0]), nbytes, count, None, at + starts, column.shapes[part], lengths
        )


@dataclass(frozen=True, slots=True)
class RunColumn:
    """The layout of a field in a block."""

    spec: FieldSpec
    offset: int
    """The start of the column in the block."""
    row: int
    """The length of a row in bytes; 0 if rows differ."""
    shape: tuple[int, ...]
    """The shape of a row; () if rows differ."""
    starts: I8 | None
    """If rows differ: the start of each row in the column."""
    shapes: I8 | None
    """If rows differ: the shape of each row."""
    lengths: I8 | None
    """If rows differ: the length of each row in bytes."""


@functools.lru_cache(maxsize=64)
def run_columns(schema: tuple[FieldSpec, ...], dims: bytes, rows: int) -> tuple[dict[str, RunColumn], int]:
    """Return the columns of a block by name and the end of the last one, cached because readers read few kinds."""
    found, end = {}, 0
    for column in columns(schema, np.frombuffer(dims, "<i8"), rows):
        offset, end = int(column.offsets[0]), int(column.offsets[0] + column.nbytes[0])
        if column.starts is None:
            shape = tuple(column.shapes[0, 0].tolist())
            alone = RunColumn(column.spec, offset, int(column.lengths[0, 0]), shape, None, None, None)
        else:
            alone = RunColumn(column.spec, offset, 0, (), column.starts[0], column.shapes[0], column.lengths[0])
        found[column.spec.name] = alone
    return found, end


# ---------------------------------------------------------------- rows of equal shapes in blocks of one layout
# The layout of such blocks is computed once, so that a field needs three operations on an array of its rows, where the
# general way of `row_addressing` needs a dozen.


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
        return _found_equal(reply, memory)
    except (InvalidArgumentError, ValueError, KeyError, IndexError, struct.error):
        return None


def _found_equal(reply: LookupReply, memory: Memory) -> Mapping[str, EqualRows] | None:
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
