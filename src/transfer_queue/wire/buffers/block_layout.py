"""Where each value of a block lies: a pure function of (schema, dims, rows).

A block is contiguous bytes, little-endian. Its columns follow in schema order, each starting at a multiple of
64 bytes; the block's length is rounded up to 64. Within a column the rows follow one another without
padding: tensor rows at their natural size in C order, object rows as their encoded bytes
(`wire.objects.object_values`; no alignment, a decoder copies buffers out). A block of one row thus starts every value
at a multiple of 64 (if the block does), so that scattered rows can be gathered by cells.

`dims` holds i8 numbers, for each field in schema order:
- `ragged` False: one row shape (`ndim` numbers) for all rows;
- `ragged` True: the row shapes of all rows, rows x `ndim` numbers;
- `ndim` MIXED_RANK (only with `ragged` and at least two rows): for each row its rank, then so many sizes.
Objects have `ndim` 1: their one size is the number of encoded bytes. So do nested fields, whose rows have no bytes.

Used by the controller on descriptors from clients, so whatever is inconsistent, negative or too large raises
InvalidArgumentError. Knows nothing of torch or arenas.
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
MAX_BYTES = 2**48  # of one block, and of any single size: keeps every product and sum below within 64 bits

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


def aligned(nbytes: int) -> int:
    """Return nbytes rounded up to a multiple of ALIGNMENT."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Where one field lies in n blocks of the same schema and row count.

    offsets, nbytes: [n], the column's start in its block and its length. shapes: [n, r, ndim] with r = rows
    where ragged, else 1; of mixed rank [n, rows, highest rank], filled up with -1. ranks: [n, rows] of mixed
    rank, else None. lengths: [n, r], bytes of a row. starts: [n, rows], a row's start in its column; None
    where rows are uniform (row k starts at k * lengths[:, 0]).
    """

    spec: FieldSpec
    rows: int
    item_size: int
    offsets: I8
    nbytes: I8
    shapes: I8
    ranks: I8 | None
    lengths: I8
    starts: I8 | None

    def locate(self, blocks: I8 | int, slots: I8) -> tuple[I8, I8]:
        """Offsets from the block's start, and lengths in bytes, of row slots[i] of block blocks[i]."""
        if self.starts is None:
            lengths = np.empty(slots.shape, np.int64)
            lengths[:] = self.lengths[blocks, 0]
            return self.offsets[blocks] + slots * lengths, lengths
        return self.offsets[blocks] + self.starts[blocks, slots], self.lengths[blocks, slots]

    def row_shapes(self, blocks: I8 | int, slots: I8) -> I8:
        """Shapes [k, ndim] of row slots[i] of block blocks[i]; of mixed rank filled up with -1."""
        if self.starts is None:
            shapes = np.empty((len(slots), self.shapes.shape[2]), np.int64)
            shapes[:] = self.shapes[blocks, 0]
            return shapes
        ragged: I8 = self.shapes[blocks, slots]
        return ragged


def columns(schema: Sequence[FieldSpec], dims: I8, rows: int) -> list[ColumnLayout]:
    """The layout of one block, a column a field (with n = 1)."""
    return columns_of_many(schema, dims.reshape(1, -1), rows)


def columns_of_many(schema: Sequence[FieldSpec], dims: I8, rows: int) -> list[ColumnLayout]:
    """The layouts of n blocks that share schema and row count; dims: [n, numbers a block].

    Blocks with a field of mixed rank are laid out one at a time (n = 1).
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
        raise InvalidArgumentError(f"a block's schema takes {position} dims, but {numbers} are there")
    return result


def block_nbytes(schema: Sequence[FieldSpec], dims: I8, rows: int) -> int:
    """The length of a block in bytes, a multiple of ALIGNMENT; checks the descriptor as `columns` does."""
    if any(spec.ragged for spec in schema):
        layouts = columns(schema, dims, rows)
        return aligned(int(layouts[-1].offsets[0] + layouts[-1].nbytes[0]))
    # without ragged fields plain integers are several times faster than arrays
    _check_rows(schema, rows)
    sizes = dims.tolist()
    end = position = 0
    for spec in schema:
        nbytes = rows * _item_size(spec)
        shape = sizes[position : position + spec.ndim]
        if len(shape) < spec.ndim:
            raise _too_few(spec, len(sizes))
        for size in shape:
            if not 0 <= size <= MAX_BYTES:
                raise _bad_size(spec)
            nbytes *= size
        position += spec.ndim
        end = aligned(end + nbytes)
        if end > MAX_BYTES:
            raise _too_large(spec)
    if position != len(sizes):
        raise InvalidArgumentError(f"a block's schema takes {position} dims, but {len(sizes)} are there")
    return end


def _check_rows(schema: Sequence[FieldSpec], rows: int) -> None:
    if not 0 <= rows < 2**31:
        raise InvalidArgumentError(f"a block of {rows} rows: wanted 0 to 2**31 - 1")
    if len({spec.name for spec in schema}) != len(schema):
        raise InvalidArgumentError(f"a block names a field twice: {[spec.name for spec in schema]}")
    for spec in schema:
        if spec.ndim == MIXED_RANK and (not spec.ragged or rows < 2):
            raise InvalidArgumentError(f"field {spec.name!r}: mixed rank needs ragged rows and at least two of them")


def _is_ragged(spec: FieldSpec) -> bool:
    """Whether the block has a shape for each row. Rows without dimensions all have the same one, whatever it says."""
    return spec.ragged and spec.ndim != 0


def _item_size(spec: FieldSpec) -> int:
    item_size = ITEM_SIZES.get(spec.dtype)
    if item_size is None or (spec.kind == "tensor") is (spec.dtype == "object"):
        raise InvalidArgumentError(f"field {spec.name!r}: unknown kind {spec.kind!r} of dtype {spec.dtype!r}")
    if spec.kind not in ("tensor", "object", NESTED) or (spec.kind != "tensor" and spec.ndim != 1):
        raise InvalidArgumentError(f"field {spec.name!r}: kind {spec.kind!r} with ndim {spec.ndim}")
    if not MIXED_RANK <= spec.ndim <= MAX_NDIM:
        raise InvalidArgumentError(f"field {spec.name!r}: ndim {spec.ndim} is not within 0 to {MAX_NDIM}")
    return item_size


def _mixed_shapes(spec: FieldSpec, dims: I8, position: int, rows: int) -> tuple[I8, I8, int]:
    """Shapes [1, rows, highest rank], ranks [1, rows] and numbers used by a field of mixed rank."""
    if len(dims) != 1:
        raise InvalidArgumentError(f"field {spec.name!r}: blocks of mixed rank are laid out one at a time")
    numbers = dims[0, position:].tolist()
    shapes: list[list[int]] = []
    used = 0
    for _ in range(rows):
        if used >= len(numbers):
            raise _too_few(spec, dims.shape[1])
        rank = numbers[used]
        if not 0 <= rank <= MAX_NDIM:
            raise InvalidArgumentError(f"field {spec.name!r}: rank {rank} is not within 0 to {MAX_NDIM}")
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
    # products are bounded in floating point first: 64-bit integers would wrap around silently
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
    return ColumnLayout(spec, rows, item_size, offsets, nbytes, shapes, ranks, lengths, starts)


def _too_few(spec: FieldSpec, numbers: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"field {spec.name!r}: {numbers} dims are too few for the block's schema and rows")


def _bad_size(spec: FieldSpec) -> InvalidArgumentError:
    return InvalidArgumentError(f"field {spec.name!r}: a row size is negative or above {MAX_BYTES}")


def _too_large(spec: FieldSpec) -> InvalidArgumentError:
    return InvalidArgumentError(f"field {spec.name!r}: the block would be longer than {MAX_BYTES} bytes")
