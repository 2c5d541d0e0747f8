"""Computes from the reply of a lookup where the value of each row and field is in the arenas.

Rows that are one after the other in one block, and rows of equal shapes in blocks of one layout, are described by a few
numbers: an operation on an array of one element takes several times as long as one on a number. For all other rows the
functions use numpy on entire columns, so that 8192 blocks need a few array operations instead of a loop. All of them
check descriptors against the length of the arena, so that no copy reads outside it.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import InvalidArgumentError, ProtocolError, TransferQueueError
from transfer_queue.messages.descriptors import Blocks, FieldSpec, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.buffers.block_layout import MAX_NDIM, MIXED_RANK, ColumnLayout, columns, columns_of_many
from transfer_queue.wire.buffers.copies import U8, Copies, copy_range, gather_equal, gather_pieces

I4 = NDArray[np.int32]
I8 = NDArray[np.int64]
Memory = Callable[[int], U8]
"""Returns all bytes of the arena of a unit."""
Place = tuple[int, int, int]
"""The unit, the start and the length of bytes in an arena."""

_I4, _I8 = struct.Struct("<i"), struct.Struct("<q")


class RowArrays(NamedTuple):
    """The place and the shape of each row."""

    units: I4
    """The unit of each row, [rows]."""
    starts: I8
    """The start of each row in its arena, [rows]."""
    lengths: I8
    """The length of each row in bytes, [rows]."""
    shapes: I8
    """The shape of each row, [rows, ndim], filled with -1 for rows of lower rank than others."""


class LocatedRows(msgspec.Struct, eq=False):
    """Where the requested rows of one field are.

    They have one of three forms: one piece of an arena, pieces of one length in one arena, or any pieces. `each` and
    `pieces` are the same in all forms.
    """

    type: FieldType
    """The type of the field, with the dtype of these rows; with the first dtype of the field if they differ."""
    memory: Memory
    """The arenas."""
    count: int
    """The number of rows."""
    shape: tuple[int, ...] | None
    """The shape of every row, if their blocks have only one; otherwise None. See `common_shape`."""
    run: Place | None = None
    """The bytes of all rows, if these are one after the other in one block; otherwise None."""
    _equal: tuple[int, int | I8, int] = (0, 0, 0)
    """If there is a shape: the unit, the start of each row (of a run: of the first one) and the length of a row."""
    _each: RowArrays | None = None
    parts: tuple[tuple[str, I8], ...] = ()
    """If rows differ in dtype: each dtype with the positions of its rows."""

    def each(self) -> RowArrays:
        """Return the place and the shape of each row."""
        if self._each is None:
            unit, starts, length = self._equal
            if not isinstance(starts, np.ndarray):
                starts = starts + np.arange(self.count) * length
            shape = self.shape or ()
            shapes = np.empty((self.count, len(shape)), np.int64)
            shapes[:] = shape
            self._each = RowArrays(np.full(self.count, unit, np.int32), starts, np.full(self.count, length), shapes)
        return self._each

    def places(self) -> Iterable[Place]:
        """Return the place of each row."""
        if self.count == 1 and self.run is not None:
            return [self.run]
        units, starts, lengths, _ = self.each()
        return zip(units.tolist(), starts.tolist(), lengths.tolist(), strict=True)

    def pieces(self) -> tuple[I4, I8, I8]:
        """Return the unit, the start and the length of pieces that have the bytes of all rows, in their order."""
        if self.run is None:
            return self.each()[:3]
        unit, start, nbytes = self.run
        return np.full(1, unit, np.int32), np.full(1, start), np.full(1, nbytes)

    def common_shape(self) -> tuple[int, ...] | None:
        """Return the shape that all rows have, or if there are no rows, that of the field; None if rows differ."""
        if self.shape is not None:
            return self.shape
        shapes = self.each().shapes
        if not len(shapes):
            return tuple(self.type.shape or [0] * max(self.type.ndim, 0))
        return tuple(size for size in shapes[0].tolist() if size >= 0) if (shapes == shapes[0]).all() else None

    def select(self, chosen: I8 | slice) -> LocatedRows:
        """Return the rows at these positions."""
        units, starts, lengths, shapes = self.each()
        each = RowArrays(units[chosen], starts[chosen], lengths[chosen], shapes[chosen])
        return of_arrays(self.type, self.memory, each)

    def split(self, counts: Sequence[int]) -> list[LocatedRows]:
        """Return the first `counts[0]` rows, the next `counts[1]` rows, and so on. All rows must have one dtype."""
        units, starts, lengths, shapes = (array.tolist() for array in self.each())
        parts, end = [], 0
        for count in counts:
            start, end = end, end + count
            if count == 1:
                place = units[start], starts[start], lengths[start]
                shape = tuple([size for size in shapes[start] if size >= 0])
                parts.append(LocatedRows(self.type, self.memory, 1, shape, place, place))
            else:
                parts.append(self.select(slice(start, end)))
        return parts

    def distinct(self) -> tuple[LocatedRows, list[int]] | None:
        """Return the rows without repeated places, and for each row its position there; None if no place is repeated.

        A place is repeated if rows share a value, or if a row was requested several times. Places without bytes do not
        count: rows of different values have them, too.
        """
        units, starts, lengths, shapes = self.each()
        if self.count == len(set(zip(units.tolist(), starts.tolist()))):
            return None
        _, firsts, slots = np.unique(
            np.column_stack((units, starts, lengths, shapes)), axis=0, return_index=True, return_inverse=True
        )
        if np.count_nonzero(lengths[firsts]) == np.count_nonzero(lengths):
            return None
        at = np.full(self.count, -1, np.int64)
        at[firsts] = np.arange(len(firsts))
        kept = self.select(firsts)
        kept.parts = tuple(
            (dtype, positions[positions >= 0]) for dtype, chosen in self.parts for positions in (at[chosen],)
        )
        return kept, slots.reshape(-1).tolist()

    def gather_bytes(self, later: Copies | None = None) -> U8:
        """Return all rows, one after the other, in new memory. For `later` see `copies.gather_pieces`."""
        if self.run is not None:
            unit, start, nbytes = self.run
            return copy_range(self.memory(unit), start, nbytes, later)
        if self.shape is not None and self._equal[2]:
            unit, starts, length = self._equal
            return gather_equal(self.memory(unit), np.asarray(starts), length)
        units, starts, lengths, _ = self.each()
        return gather(self.memory, units, starts, lengths, later)


def of_arrays(field: FieldType, memory: Memory, each: RowArrays) -> LocatedRows:
    """Return rows that may be anywhere."""
    return LocatedRows(field, memory, len(each.starts), None, _each=each)


def gather(
    memory: Memory, units: I4, starts: I8, lengths: I8, later: Copies | None = None, into: U8 | None = None
) -> U8:
    """Return pieces of several arenas one after the other. For `later` and `into` see `copies.gather_pieces`."""
    if not len(units):
        return np.empty(0, np.uint8)
    first = int(units[0])
    if len(units) == 1 or (units == first).all():
        return gather_pieces(memory(first), starts, lengths, later, into)
    # two vectorized passes: gather the pieces of each unit, then put all pieces into their order
    parts, origins, end = [], np.empty(len(units), np.int64), 0
    for unit in np.unique(units).tolist():
        chosen = np.flatnonzero(units == unit)
        counts = lengths[chosen]
        ends = np.cumsum(counts)
        origins[chosen] = end + ends - counts
        end += int(ends[-1])
        parts.append(gather_pieces(memory(unit), starts[chosen], counts))
    return gather_pieces(np.concatenate(parts), origins, lengths, into=into)


def locate_rows(reply: LookupReply, memory: Memory) -> dict[str, LocatedRows]:
    """Return the rows of each field.

    Raises:
        ProtocolError: The reply is not consistent, or refers to bytes outside an arena.
    """
    located: dict[str, LocatedRows] = {}
    blocks, count = reply.blocks, reply.count
    try:
        types = {field.name: field for field in reply.types}
        for placement in reply.placements if count else ():
            rows = _in_one_block(blocks, placement, count, memory) or _in_equal_blocks(blocks, placement, count, memory)
            if rows is not None:
                rows.locate(map(types.__getitem__, placement.fields), memory, count, located)
    except (InvalidArgumentError, ValueError, KeyError, IndexError, OverflowError, struct.error):
        pass  # `_add_scattered_rows` reports what is wrong
    if len(located) < len(reply.types):
        _add_scattered_rows(located, reply, memory)
    return located


def _type_of_rows(field: FieldType, spec: FieldSpec) -> FieldType | None:
    """Return the type of a field for rows of a column; None if the column does not belong to such a field."""
    if spec.kind != field.kind:
        return None
    if spec.dtype == field.dtype:
        return field
    return with_dtype(field, spec.dtype) if spec.dtype in field.dtypes else None


def with_dtype(field: FieldType, dtype: str) -> FieldType:
    """Return the type of rows of a field that have this dtype."""
    return field if dtype == field.dtype else msgspec.structs.replace(field, dtype=dtype)


# ---------------------------------------------------------------- rows at regular places


class _ColumnPlace(msgspec.Struct, eq=False):
    """The place of a field in a block."""

    spec: FieldSpec
    offset: int
    """The start of the column in the block."""
    row: int
    """The length of a row in bytes; 0 if rows differ."""
    shape: tuple[int, ...]
    """The shape of a row; () if rows differ."""
    ragged: tuple[I8, I8, I8] | None
    """If rows differ: the start of each row in the column, its length in bytes and its shape."""


class _RegularRows(msgspec.Struct, eq=False):
    """Rows one after the other in one block, or anywhere in blocks of one layout."""

    columns: dict[str, _ColumnPlace]
    """Field -> its place in each of the blocks."""
    unit: int
    offsets: int | I8
    """The start of the one block in its arena, or that of the block of each row."""
    slots: int | I8
    """The slot of the first row in the one block; otherwise the slot of each row, or 0 for all of them."""

    def locate(self, fields: Iterable[FieldType], memory: Memory, count: int, located: dict[str, LocatedRows]) -> None:
        """Add the rows of those of these fields whose places are regular and whose columns fit them."""
        columns, unit, slots = self.columns, self.unit, self.slots
        for field in fields:
            name = field.name
            column = columns[name]
            typed, row = _type_of_rows(field, column.spec), column.row
            if typed is None:
                continue
            at = self.offsets + (slots * row + column.offset)
            if column.ragged is None:
                run = (unit, at, count * row) if isinstance(at, int) else None
                located[name] = LocatedRows(typed, memory, count, column.shape, run, (unit, at, row))
            elif isinstance(at, int) and column.spec.ndim != MIXED_RANK:
                starts, lengths, shapes = (array[slots : slots + count] for array in column.ragged)
                run = (unit, at + int(starts[0]), int(starts[-1] + lengths[-1] - starts[0]))
                each = RowArrays(np.full(count, unit, np.int32), at + starts, lengths, shapes)
                located[name] = LocatedRows(typed, memory, count, None, run, _each=each)


def _in_one_block(blocks: Blocks, placement: Placement, count: int, memory: Memory) -> _RegularRows | None:
    """Return rows that are one after the other in one block; None if they are not, or are not valid."""
    block, slots = placement.block, placement.slot
    if len(block) != 4 * count or len(slots) != 4 * count or block != block[:4] * count:
        return None
    number: int = _I4.unpack_from(block)[0]
    first: int = _I4.unpack_from(slots)[0]
    if number < 0 or first < 0 or (count > 1 and slots != _following_numbers(first, count)):
        return None
    unit: int = _I4.unpack_from(blocks.unit, 4 * number)[0]
    offset: int = _I8.unpack_from(blocks.offset, 8 * number)[0]
    nbytes: int = _I8.unpack_from(blocks.nbytes, 8 * number)[0]
    rows: int = _I4.unpack_from(blocks.rows, 4 * number)[0]
    schema: int = _I4.unpack_from(blocks.schema, 4 * number)[0]
    dims: int = _I4.unpack_from(blocks.dims, 4 * number)[0]
    places, end = _column_places(tuple(blocks.schemas[schema]), blocks.dims_values[dims], rows)
    if first + count > rows or offset < 0 or not end <= nbytes <= len(memory(unit)) - offset:
        return None
    return _RegularRows(places, unit, offset, first)


def _in_equal_blocks(blocks: Blocks, placement: Placement, count: int, memory: Memory) -> _RegularRows | None:
    """Return rows of the blocks of a reply if all blocks have one layout; None if not, or if they are not valid."""
    number = len(blocks.unit) // 4
    unit, schema, dims, rows = (
        _only_value(column, number) for column in (blocks.unit, blocks.schema, blocks.dims, blocks.rows)
    )
    if unit is None or schema is None or dims is None or rows is None or min(schema, dims, rows - 1) < 0:
        return None
    places, end = _column_places(tuple(blocks.schemas[schema]), blocks.dims_values[dims], rows)
    offsets: I8 = np.frombuffer(blocks.offset, "<i8")
    nbytes: I8 = np.frombuffer(blocks.nbytes, "<i8")
    # compared by a difference, because a sum could overflow
    if (
        len(offsets) != number or len(nbytes) != number or int(nbytes.min()) < end or int(offsets.min()) < 0
        or (offsets > len(memory(unit)) - nbytes).any()
    ):  # fmt: skip
        return None
    if len(placement.block) != 4 * count or len(placement.slot) != 4 * count:
        return None
    if count != number or placement.block != _following_numbers(0, count):
        block = np.frombuffer(placement.block, "<i4")
        if int(block.min()) < 0:
            return None
        offsets = offsets[block]
    if placement.slot == bytes(4 * count):
        return _RegularRows(places, unit, offsets, 0)
    slots = np.frombuffer(placement.slot, "<i4").astype(np.int64)
    return _RegularRows(places, unit, offsets, slots) if int(slots.min()) >= 0 and int(slots.max()) < rows else None


def _only_value(column: bytes, number: int) -> int | None:
    """Return the value that all `number` entries of a column have; None if they differ."""
    first = column[:4]
    value: int | None = _I4.unpack(first)[0] if number and column == first * number else None
    return value


@functools.lru_cache(maxsize=16)
def _following_numbers(first: int, count: int) -> bytes:
    """Return the numbers from `first` on (i4)."""
    return np.arange(first, first + count, dtype="<i4").tobytes()


@functools.lru_cache(maxsize=64)
def _column_places(schema: tuple[FieldSpec, ...], dims: bytes, rows: int) -> tuple[dict[str, _ColumnPlace], int]:
    """Return the columns of a block by name and the end of the last one, cached because readers read few kinds."""
    places, end = {}, 0
    for column in columns(schema, np.frombuffer(dims, "<i8"), rows):
        offset, end = int(column.offsets[0]), int(column.offsets[0] + column.nbytes[0])
        if column.starts is None:
            shape = tuple(column.shapes[0, 0].tolist())
            place = _ColumnPlace(column.spec, offset, int(column.lengths[0, 0]), shape, None)
        else:
            ragged = column.starts[0], column.lengths[0], column.shapes[0]
            place = _ColumnPlace(column.spec, offset, 0, (), ragged)
        places[column.spec.name] = place
    return places, end


# ---------------------------------------------------------------- rows at any places


def _add_scattered_rows(located: dict[str, LocatedRows], reply: LookupReply, memory: Memory) -> None:
    """Add the rows of the fields that are missing."""
    try:
        blocks = _ReplyBlocks(reply, memory)
        places = {name: placement for placement in reply.placements for name in placement.fields}
        by_placement = {id(placement): _ReplyRows(blocks, placement, reply.count) for placement in reply.placements}
        for field in reply.types:
            if not MIXED_RANK <= field.ndim <= MAX_NDIM:
                raise ValueError(f"field {field.name!r:.80} has {field.ndim} dimensions")
            if field.name not in located:
                located[field.name] = by_placement[id(places[field.name])].rows_of_field(field, memory)
    except (InvalidArgumentError, ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"the reply of a lookup is not valid: {type(error).__name__}: {error}") from error


class _ReplyBlocks:
    """The blocks of a reply."""

    def __init__(self, reply: LookupReply, memory: Memory):
        given = reply.blocks
        self.units: I4 = np.frombuffer(given.unit, "<i4")
        self.offsets: I8 = np.frombuffer(given.offset, "<i8")
        self.rows: I4 = np.frombuffer(given.rows, "<i4")
        nbytes: I8 = np.frombuffer(given.nbytes, "<i8")
        self.group: I8 = np.zeros(len(self.units), np.int64)
        """The position in `groups` of the group of each block, [blocks]."""
        self.layout: I8 = np.zeros(len(self.units), np.int64)
        """The position of each block among the layouts of its group, [blocks]."""
        self.groups: list[dict[str, ColumnLayout]] = []
        """For each group of blocks with the same schema and number of rows: field -> its layout in these blocks."""
        self._check_bounds(nbytes, memory)
        schema: I4 = np.frombuffer(given.schema, "<i4")
        dims: I4 = np.frombuffer(given.dims, "<i4")
        for chosen in self._groups_of_one_layout(reply, schema, dims):
            self._add_group(reply, int(schema[chosen[0]]), dims[chosen], chosen, nbytes)

    def _check_bounds(self, nbytes: I8, memory: Memory) -> None:
        for unit in set(self.units.tolist()):
            chosen = self.units == unit
            offsets, lengths, length = self.offsets[chosen], nbytes[chosen], len(memory(unit))
            # compared by a difference, because a sum could overflow
            if int(offsets.min()) < 0 or int(lengths.min()) < 0 or (offsets > length - lengths).any():
                raise ValueError(f"a block is outside the arena of unit {unit}")

    def _groups_of_one_layout(self, reply: LookupReply, schema: I4, dims: I4) -> Iterator[I8]:
        """Yield the positions of blocks that can be laid out together."""
        if not len(schema):
            return
        if len(schema) == 1:
            yield np.zeros(1, np.int64)
            return
        numbers = np.array([len(value) for value in reply.blocks.dims_values], np.int64)[dims]
        keys = np.stack((schema, self.rows, numbers), axis=1)
        if (keys == keys[0]).all():
            groups = [np.arange(len(schema))]
        else:
            kinds, kind = np.unique(keys, axis=0, return_inverse=True)
            groups = [np.flatnonzero(kind.reshape(-1) == number) for number in range(len(kinds))]
        for chosen in groups:
            if any(spec.ndim == MIXED_RANK for spec in reply.blocks.schemas[int(schema[chosen[0]])]):
                yield from chosen.reshape(-1, 1)
            else:
                yield chosen

    def _add_group(self, reply: LookupReply, schema: int, dims: I4, chosen: I8, nbytes: I8) -> None:
        used, layout = np.unique(dims, return_inverse=True) if len(dims) > 1 else (dims, np.zeros(1, np.int64))
        joined = b"".join([reply.blocks.dims_values[number] for number in used.tolist()])
        columns = _laid_out(tuple(reply.blocks.schemas[schema]), joined, len(used), int(self.rows[chosen[0]]))
        if columns:
            ends = columns[-1].offsets + columns[-1].nbytes
            if (ends[layout] > nbytes[chosen]).any():
                raise ValueError("a block is shorter than its columns")
        self.group[chosen] = len(self.groups)
        self.layout[chosen] = layout
        self.groups.append({column.spec.name: column for column in columns})


@functools.lru_cache(maxsize=64)
def _laid_out(schema: tuple[FieldSpec, ...], dims: bytes, blocks: int, rows: int) -> list[ColumnLayout]:
    """Return the result of `columns_of_many`, cached because the readers of a task read few kinds of blocks."""
    return columns_of_many(schema, np.frombuffer(dims, "<i8").reshape(blocks, -1), rows)


class _ReplyRows:
    """The rows of one placement."""

    def __init__(self, blocks: _ReplyBlocks, placement: Placement, count: int):
        block = np.frombuffer(placement.block, "<i4").astype(np.int64)
        slots = np.frombuffer(placement.slot, "<i4").astype(np.int64)
        if len(block) != count or len(slots) != count:
            raise ValueError(f"expected {count} rows, got {len(block)} blocks and {len(slots)} slots")
        if count and (block.min() < 0 or slots.min() < 0 or (slots >= blocks.rows[block]).any()):
            raise ValueError("a row is outside its block")
        self._slots = slots
        self._units = blocks.units[block]
        self._offsets = blocks.offsets[block]
        self._layouts = blocks.layout[block]
        group = blocks.group[block]
        self._parts: list[tuple[Any, dict[str, ColumnLayout]]]
        """The positions of the rows of each group (a slice if there is one group), and the layouts of the group."""
        if count and (group == group[0]).all():
            self._parts = [(slice(None), blocks.groups[int(group[0])])]
        else:
            self._parts = [(np.flatnonzero(group == g), blocks.groups[g]) for g in np.unique(group).tolist()]

    def rows_of_field(self, field: FieldType, memory: Memory) -> LocatedRows:
        """Return the rows of one field of the placement."""
        located = [self._rows_of_group(field, memory, *part) for part in self._parts]
        if len(located) == 1:
            return located[0]
        starts, lengths = np.empty_like(self._slots), np.empty_like(self._slots)
        ndim = max((rows.each().shapes.shape[1] for rows in located), default=max(field.ndim, 0))
        shapes = np.full((len(self._slots), ndim), -1, np.int64)
        dtypes: dict[str, list[I8]] = {}
        for (chosen, _), rows in zip(self._parts, located, strict=True):
            _, starts[chosen], lengths[chosen], part = rows.each()
            shapes[chosen, : part.shape[1]] = part
            dtypes.setdefault(rows.type.dtype, []).append(chosen)
        rows = of_arrays(field, memory, RowArrays(self._units, starts, lengths, shapes))
        if len(dtypes) == 1:
            rows.type = with_dtype(field, next(iter(dtypes)))
        else:
            rows.parts = tuple((dtype, np.concatenate(chosen)) for dtype, chosen in dtypes.items())
        return rows

    def _rows_of_group(
        self, field: FieldType, memory: Memory, chosen: Any, group: dict[str, ColumnLayout]
    ) -> LocatedRows:
        column = group[field.name]
        typed = _type_of_rows(field, column.spec)
        if typed is None:
            raise ValueError(f"field {field.name!r} has dtype {field.dtype}, but {column.spec.dtype} in a block")
        which: I8 | int = 0 if len(column.offsets) == 1 else self._layouts[chosen]
        slots = self._slots[chosen]
        starts, lengths = column.locate(which, slots)
        shapes = column.row_shapes(which, slots)
        if column.spec.ndim == MIXED_RANK:
            shapes = _highest_rank(shapes)
        return of_arrays(typed, memory, RowArrays(self._units[chosen], self._offsets[chosen] + starts, lengths, shapes))


def _highest_rank(shapes: I8) -> I8:
    """Return shapes filled with -1 without the last columns that have nothing else: other rows of a block use them."""
    while shapes.shape[1] and len(shapes) and (shapes[:, -1] < 0).all():
        shapes = shapes[:, :-1]
    return shapes


_DECODING_ERRORS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, StopIteration, TypeError, ValueError,
)  # fmt: skip


P = ParamSpec("P")
T = TypeVar("T")


class DecodeGuard:
    """Converts errors that data which is not valid causes to `ProtocolError`.

    It guards the body of a `with` statement, or as a decorator a function.

    Args:
        what: The data, for the message.
        kinds: The errors that it converts. Default: all that such data may cause.
    """

    # a class, because a generator with contextlib.contextmanager takes ten times as long

    def __init__(self, what: str, kinds: tuple[type[Exception], ...] = _DECODING_ERRORS) -> None:
        self._what = what
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._kinds) and not isinstance(error, TransferQueueError):
            raise ProtocolError(f"{self._what} is not valid: {type(error).__name__}: {error}") from error

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return the guarded function. A call costs less than with `contextlib.ContextDecorator`."""

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except self._kinds as error:
                self.__exit__(type(error), error, None)
                raise

        return guarded


LOOKUP_REPLY = DecodeGuard("the reply of a lookup")
ON_DEVICE = DecodeGuard("the reply of a lookup", (ArithmeticError, AttributeError, LookupError, TypeError, ValueError))
"""For tensors on a device. The caller gets its RuntimeErrors as they are: no memory left, or a fault of a kernel."""
SERVER_REPLY = DecodeGuard("a server's reply")
