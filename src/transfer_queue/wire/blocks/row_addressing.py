"""Computes from the reply of a lookup where the value of each row and field is in the arenas.

The functions use numpy on entire columns, so that 8192 blocks need a few array operations instead of a loop. They check
descriptors against the length of the arena, so that no copy reads outside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import InvalidArgumentError, ProtocolError, TransferQueueError
from transfer_queue.messages.descriptors import FieldSpec, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.buffers.block_layout import MAX_NDIM, MIXED_RANK, ColumnLayout, columns_of_many
from transfer_queue.wire.buffers.copies import U8, Copies, gather_pieces

I4 = NDArray[np.int32]
I8 = NDArray[np.int64]
Memory = Callable[[int], U8]


@dataclass(frozen=True, slots=True)
class FieldRows:
    """The requested rows of one field."""

    type: FieldType
    """The type of the field, with the dtype of these rows; with the first dtype of the field if they differ."""
    units: I4
    """The unit of each row, [rows]."""
    starts: I8
    """The start of each row in its arena, [rows]."""
    lengths: I8
    """The length of each row in bytes, [rows]."""
    shapes: I8
    """The shape of each row, [rows, ndim], filled with -1 for rows of lower rank than others."""
    parts: tuple[tuple[str, I8], ...] = ()
    """If rows differ in dtype: each dtype with the positions of its rows."""

    def places(self) -> Iterable[tuple[int, int, int]]:
        """Return the unit, the start and the length of each row."""
        return zip(self.units.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True)

    def distinct(self) -> tuple[FieldRows, list[int]] | None:
        """Return the rows without repeated places, and for each row its position there; None if no place is repeated.

        A place is repeated if rows share a value, or if a row was requested several times.
        """
        count = len(self.starts)
        if count == len(set(zip(self.units.tolist(), self.starts.tolist()))):
            return None
        keys = np.column_stack((self.units, self.starts, self.lengths, self.shapes))
        _, firsts, slots = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        if len(firsts) == count:
            return None
        at = np.full(count, -1, np.int64)
        at[firsts] = np.arange(len(firsts))
        parts = tuple((dtype, found[found >= 0]) for dtype, chosen in self.parts for found in (at[chosen],))
        kept = FieldRows(
            self.type, self.units[firsts], self.starts[firsts], self.lengths[firsts], self.shapes[firsts], parts
        )
        return kept, slots.reshape(-1).tolist()

    def gather_bytes(self, memory: Memory, later: Copies | None = None) -> U8:
        """Return all rows, one after the other, in new memory. For `later` see `copies.gather_pieces`."""
        return gather(memory, self.units, self.starts, self.lengths, later)


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


def locate_rows(reply: LookupReply, memory: Memory) -> Iterator[FieldRows]:
    """Yield the rows of each field, in the order of reply.types.

    Raises:
        ProtocolError: The reply is not consistent, or refers to bytes outside an arena.
    """
    try:
        blocks = _ReplyBlocks(reply, memory)
        places = {name: placement for placement in reply.placements for name in placement.fields}
        by_placement = {id(placement): _ReplyRows(blocks, placement, reply.count) for placement in reply.placements}
        for field in reply.types:
            if not MIXED_RANK <= field.ndim <= MAX_NDIM:
                raise ValueError(f"field {field.name!r:.80} has {field.ndim} dimensions")
            yield by_placement[id(places[field.name])].rows_of_field(field)
    except (InvalidArgumentError, ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"the reply of a lookup is not valid: {type(error).__name__}: {error}") from error


def column_fits(spec: FieldSpec, field: FieldType) -> bool:
    """Whether a column of a block can belong to a field of this type."""
    return spec.kind == field.kind and (spec.dtype == field.dtype or spec.dtype in field.dtypes)


def with_dtype(field: FieldType, dtype: str) -> FieldType:
    """Return the type of rows of a field that have this dtype."""
    return field if dtype == field.dtype else msgspec.structs.replace(field, dtype=dtype)


@dataclass(frozen=True, slots=True)
class _SchemaGroup:
    """Blocks with the same schema and number of rows."""

    columns: dict[str, ColumnLayout]
    """Field -> its layout in these blocks."""


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
        self.groups: list[_SchemaGroup] = []
        self._check_bounds(nbytes, memory)
        schema: I4 = np.frombuffer(given.schema, "<i4")
        dims: I4 = np.frombuffer(given.dims, "<i4")
        for chosen in self._alike(reply, schema, dims):
            self._add_group(reply, int(schema[chosen[0]]), dims[chosen], chosen, nbytes)

    def _check_bounds(self, nbytes: I8, memory: Memory) -> None:
        for unit in set(self.units.tolist()):
            chosen = self.units == unit
            offsets, lengths, length = self.offsets[chosen], nbytes[chosen], len(memory(unit))
            # compared by a difference, because a sum could overflow
            if int(offsets.min()) < 0 or int(lengths.min()) < 0 or (offsets > length - lengths).any():
                raise ValueError(f"a block is outside the arena of unit {unit}")

    def _alike(self, reply: LookupReply, schema: I4, dims: I4) -> Iterator[I8]:
        """Yield the positions of blocks that can be laid out together."""
        if not len(schema):
            return
        if len(schema) == 1:
            yield np.zeros(1, np.int64)
            return
        numbers = np.array([len(value) for value in reply.blocks.dims_values], np.int64)[dims]
        keys = np.stack((schema, self.rows, numbers), axis=1)
        if (keys == keys[0]).all():
            alike = [np.arange(len(schema))]
        else:
            kinds, kind = np.unique(keys, axis=0, return_inverse=True)
            alike = [np.flatnonzero(kind.reshape(-1) == number) for number in range(len(kinds))]
        for chosen in alike:
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
        self.groups.append(_SchemaGroup({column.spec.name: column for column in columns}))


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
        self._blocks = blocks
        self._slots = slots
        self._units = blocks.units[block]
        self._offsets = blocks.offsets[block]
        self._layouts = blocks.layout[block]
        group = blocks.group[block]
        self._parts: list[tuple[I8, _SchemaGroup]] | _SchemaGroup | None = None
        """The group of all rows, or the positions of the rows of each group; None without rows."""
        if count and (group == group[0]).all():
            self._parts = blocks.groups[int(group[0])]
        elif count:
            self._parts = [(np.flatnonzero(group == g), blocks.groups[g]) for g in np.unique(group).tolist()]

    def rows_of_field(self, field: FieldType) -> FieldRows:
        """Return the rows of one field of the placement."""
        if self._parts is None:
            nothing = np.zeros(0, np.int64)
            return FieldRows(field, self._units, nothing, nothing, np.zeros((0, max(field.ndim, 0)), np.int64))
        if isinstance(self._parts, _SchemaGroup):
            starts, lengths, shapes = self._within(field, self._parts, self._layouts, self._offsets, self._slots)
            spec = self._parts.columns[field.name].spec
            if spec.ndim == MIXED_RANK:
                shapes = _highest_rank(shapes)
            return FieldRows(with_dtype(field, spec.dtype), self._units, starts, lengths, shapes)
        starts, lengths = np.empty_like(self._slots), np.empty_like(self._slots)
        found = []
        dtypes: dict[str, list[I8]] = {}
        for chosen, group in self._parts:
            places = self._layouts[chosen], self._offsets[chosen], self._slots[chosen]
            starts[chosen], lengths[chosen], part = self._within(field, group, *places)
            found.append((chosen, _highest_rank(part)))
            dtypes.setdefault(group.columns[field.name].spec.dtype, []).append(chosen)
        shapes = np.full((len(self._slots), max(part.shape[1] for _, part in found)), -1, np.int64)
        for chosen, part in found:
            shapes[chosen, : part.shape[1]] = part
        if len(dtypes) == 1:
            return FieldRows(with_dtype(field, next(iter(dtypes))), self._units, starts, lengths, shapes)
        parts = tuple((dtype, np.concatenate(chosen)) for dtype, chosen in dtypes.items())
        return FieldRows(field, self._units, starts, lengths, shapes, parts)

    @staticmethod
    def _within(field: FieldType, group: _SchemaGroup, layouts: I8, offsets: I8, slots: I8) -> tuple[I8, I8, I8]:
        column = group.columns[field.name]
        if not column_fits(column.spec, field):
            raise ValueError(f"field {field.name!r} has dtype {field.dtype}, but {column.spec.dtype} in a block")
        which: I8 | int = 0 if len(column.offsets) == 1 else layouts
        starts, lengths = column.locate(which, slots)
        return offsets + starts, lengths, column.row_shapes(which, slots)


def _highest_rank(shapes: I8) -> I8:
    """Return shapes filled with -1 without the last columns that have nothing else: other rows of a block use them."""
    while shapes.shape[1] and len(shapes) and (shapes[:, -1] < 0).all():
        shapes = shapes[:, :-1]
    return shapes


_STUMBLES = (
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

    def __init__(self, what: str, kinds: tuple[type[Exception], ...] = _STUMBLES) -> None:
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
