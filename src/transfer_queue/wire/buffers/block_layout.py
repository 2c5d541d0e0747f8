"""The layout of a block: the place of each value as a pure function of (schema, dims, rows).

A block is contiguous bytes, little-endian. Its columns are in the order of the schema, each at a multiple of 64 bytes,
and the length of the block is rounded up to 64. The rows of a column are one after the other without padding: rows of
tensors in C order, rows of objects as their encoded bytes (`wire.objects.object_values`; without alignment, because a
decoder copies the buffers). So every value of a block with one row starts at a multiple of 64 if the block does, and
scattered rows can be gathered in cells.

`dims` has i8 numbers for each field in the order of the schema:
- `ragged` False: one row shape (`ndim` numbers) for all rows;
- `ragged` True: the row shapes of all rows, rows x `ndim` numbers;
- `ndim` MIXED_RANK (only with `ragged` and at least two rows): for each row its rank, then its sizes.
Objects have `ndim` 1: their size is the number of encoded bytes. Nested fields, too, but their rows have no bytes.

The controller uses this module on descriptors from clients, so every value that is inconsistent, negative or too large
raises `InvalidArgumentError`. This module does not depend on torch or arenas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import NESTED, FieldSpec

ALIGNMENT = 64
MIXED_RANK = -1
MAX_NDIM = 64
MAX_BYTES = 2**48
"""The limit of a block in bytes, and of a single size, so that every product and sum in this module fits 64 bits."""

ITEM_SIZES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "bits8"), 1),
    **dict.fromkeys((f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    "object": 1,
}

I8 = NDArray[np.int64]


def align(nbytes: int) -> int:
    """Return nbytes rounded up to a multiple of ALIGNMENT."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """The layout of one field in n blocks of the same schema and number of rows.

    In the shapes below, r is the number of rows if the field is ragged, otherwise 1.
    """

    spec: FieldSpec
    rows: int
    offsets: I8
    """The start of the column in its block, [n]."""
    nbytes: I8
    """The length of the column in bytes, [n]."""
    shapes: I8
    """The row shapes, [n, r, ndim]; for mixed rank [n, rows, highest rank], filled with -1."""
    ranks: I8 | None
    """The rank of each row, [n, rows]; None unless the rank is mixed."""
    lengths: I8
    """The length of a row in bytes, [n, r]."""
    starts: I8 | None
    """The start of each row in its column, [n, rows]; None if row k starts at k * lengths[:, 0]."""

    def locate(self, blocks: I8 | int, slots: I8) -> tuple[I8, I8]:
        """Return the offset from the block's start and the length in bytes of row slots[i] of block blocks[i]."""
        if self.starts is None:
            lengths = np.empty(slots.shape, np.int64)
            lengths[:] = self.lengths[blocks, 0]
            return self.offsets[blocks] + slots * lengths, lengths
        return self.offsets[blocks] + self.starts[blocks, slots], self.lengths[blocks, slots]

    def row_shapes(self, blocks: I8 | int, slots: I8) -> I8:
        """Return the shapes [k, ndim] of row slots[i] of block blocks[i], filled with -1 if the rank is mixed."""
        if self.starts is None:
            shapes = np.empty((len(slots), self.shapes.shape[2]), np.int64)
            shapes[:] = self.shapes[blocks, 0]
            return shapes
        ragged: I8 = self.shapes[blocks, slots]
        return ragged


def columns(schema: Sequence[FieldSpec], dims: I8, rows: int) -> list[ColumnLayout]:
    """Return the layout of one block: one column for each field, with n = 1."""
    return columns_of_many(schema, dims.reshape(1, -1), rows)


def columns_of_many(schema: Sequence[FieldSpec], dims: I8, rows: int) -> list[ColumnLayout]:
    """Return the layouts of n blocks with the same schema and number of rows.

    Blocks with a field of mixed rank must be laid out one at a time (n = 1).

    Args:
        schema: The fields.
        dims: The dims of each block, [n, numbers of a block].
        rows: The number of rows of each block.
    """
    _check_rows(schema, rows)
    n, numbers = dims.shape
    ends = np.zeros(n, np.int64)
    result: list[ColumnLayout] = []
    position = 0
    for spec in schema:
        item_size = _item_size(spec)
        if spec.ndim == MIXED_RANK:
            shapes, ranks, used = _mixed_shapes(spec, dims, position, rows)
        else:
            count = rows if _is_ragged(spec) else 1
            used = count * spec.ndim
            if position + used > numbers:
                raise _too_few(spec, numbers)
            shapes = dims[:, position : position + used].reshape(n, count, spec.ndim)
            ranks = None
        position += used
        column = _column(spec, rows, item_size, shapes, ranks, ends)
        ends = (column.offsets + column.nbytes + (ALIGNMENT - 1)) & -ALIGNMENT
        if n and int(ends.max()) > MAX_BYTES:
            raise _too_large(spec)
        result.append(column)
    if position != numbers:
        raise InvalidArgumentError(f"a block must have {position} dims for its schema, got {numbers}")
    return result


def _check_rows(schema: Sequence[FieldSpec], rows: int) -> None:
    if not 0 <= rows < 2**31:
        raise InvalidArgumentError(f"a block must have 0 to 2**31 - 1 rows, got {rows}")
    if len({spec.name for spec in schema}) != len(schema):
        raise InvalidArgumentError(f"a block must have each field once, got {[spec.name for spec in schema]}")
    for spec in schema:
        if spec.ndim == MIXED_RANK and (not spec.ragged or rows < 2):
            raise InvalidArgumentError(f"field {spec.name!r} of mixed rank must be ragged and have at least two rows")


def _is_ragged(spec: FieldSpec) -> bool:
    """Whether the block has a shape for each row. Rows without dimensions all have the same shape."""
    return spec.ragged and spec.ndim != 0


def _item_size(spec: FieldSpec) -> int:
    item_size = ITEM_SIZES.get(spec.dtype)
    if item_size is None or (spec.kind == "tensor") is (spec.dtype == "object"):
        raise InvalidArgumentError(f"field {spec.name!r} has unknown kind {spec.kind!r} or dtype {spec.dtype!r}")
    if spec.kind not in ("tensor", "object", NESTED) or (spec.kind != "tensor" and spec.ndim != 1):
        raise InvalidArgumentError(f"field {spec.name!r} has kind {spec.kind!r} with ndim {spec.ndim}")
    if not MIXED_RANK <= spec.ndim <= MAX_NDIM:
        raise InvalidArgumentError(f"field {spec.name!r} must have ndim 0 to {MAX_NDIM}, got {spec.ndim}")
    return item_size


def _mixed_shapes(spec: FieldSpec, dims: I8, position: int, rows: int) -> tuple[I8, I8, int]:
    """Return shapes [1, rows, highest rank], ranks [1, rows] and the numbers that a field of mixed rank uses."""
    if len(dims) != 1:
        raise InvalidArgumentError(f"field {spec.name!r}: blocks of mixed rank must be laid out one at a time")
    numbers = dims[0, position:].tolist()
    shapes: list[list[int]] = []
    used = 0
    for _ in range(rows):
        if used >= len(numbers):
            raise _too_few(spec, dims.shape[1])
        rank = numbers[used]
        if not 0 <= rank <= MAX_NDIM:
            raise InvalidArgumentError(f"field {spec.name!r} must have rows of rank 0 to {MAX_NDIM}, got {rank}")
        shape = numbers[used + 1 : used + 1 + rank]
        if len(shape) < rank:
            raise _too_few(spec, dims.shape[1])
        if any(size < 0 for size in shape):
            raise _bad_size(spec)
        shapes.append(shape)
        used += 1 + rank
    ranks = np.array([[len(shape) for shape in shapes]], np.int64)
    padded = np.full((1, rows, int(ranks.max())), -1, np.int64)
    for row, shape in enumerate(shapes):
        padded[0, row, : len(shape)] = shape
    return padded, ranks, used


def _column(spec: FieldSpec, rows: int, item_size: int, shapes: I8, ranks: I8 | None, offsets: I8) -> ColumnLayout:
    sizes = shapes if ranks is None else np.where(shapes < 0, 1, shapes)
    if sizes.size and (int(sizes.min()) < 0 or int(sizes.max()) > MAX_BYTES):
        raise _bad_size(spec)
    # products are checked in floating point first, because 64-bit integers would overflow silently
    if sizes.shape[2] > 1 and sizes.size and sizes.prod(axis=2, dtype=np.float64).max() * item_size > MAX_BYTES:
        raise _too_large(spec)
    lengths = sizes.prod(axis=2, dtype=np.int64) * item_size if sizes.shape[2] != 1 else sizes[:, :, 0] * item_size
    starts: I8 | None = None
    if _is_ragged(spec):
        if lengths.size and lengths.sum(axis=1, dtype=np.float64).max() > MAX_BYTES:
            raise _too_large(spec)
        ends = np.cumsum(lengths, axis=1)
        starts = ends - lengths
        nbytes = ends[:, -1] if rows else np.zeros(len(lengths), np.int64)
    else:
        if lengths.size and float(lengths.max()) * rows > MAX_BYTES:
            raise _too_large(spec)
        nbytes = lengths[:, 0] * rows
    return ColumnLayout(spec, rows, offsets, nbytes, shapes, ranks, lengths, starts)


def _too_few(spec: FieldSpec, numbers: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"field {spec.name!r}: {numbers} dims are too few for the schema and rows of the block")


def _bad_size(spec: FieldSpec) -> InvalidArgumentError:
    return InvalidArgumentError(f"field {spec.name!r} has a row size that is negative or above {MAX_BYTES}")


def _too_large(spec: FieldSpec) -> InvalidArgumentError:
    return InvalidArgumentError(f"field {spec.name!r} makes the block longer than {MAX_BYTES} bytes")
