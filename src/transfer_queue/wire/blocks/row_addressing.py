"""From a lookup's reply to the bytes of each row: where every value of every field lies in the arenas.

Pure numpy on whole columns: 8192 blocks cost a few array operations, not a loop. Descriptors are checked
against the arena's length here, so that a copy never leaves it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    """The wanted rows of one field.

    type: with the dtype of these rows. units, starts, lengths: [rows], arena and bytes of each. shapes: [rows, ndim];
    rows of lower rank than others are filled up with -1. parts: where rows differ in dtype, each dtype with the
    positions of its rows; `type` then has the first of all dtypes of the field.
    """

    type: FieldType
    units: I4
    starts: I8
    lengths: I8
    shapes: I8
    parts: tuple[tuple[str, I8], ...] = ()

    def bytes(self, memory: Memory, later: Copies | None = None) -> U8:
        """All rows, one after the other, in fresh memory; later: see `copies.gather_pieces`."""
        return gather(memory, self.units, self.starts, self.lengths, later)


def gather(memory: Memory, units: I4, starts: I8, lengths: I8, later: Copies | None = None) -> U8:
    """Pieces of several arenas one after the other, in fresh memory; later: see `copies.gather_pieces`."""
    if not len(units):
        return np.empty(0, np.uint8)
    first = int(units[0])
    if len(units) == 1 or (units == first).all():
        return gather_pieces(memory(first), starts, lengths, later)
    # each unit's pieces together first, then all into their order: two vectorised passes
    parts, origins, end = [], np.empty(len(units), np.int64), 0
    for unit in np.unique(units).tolist():
        chosen = np.flatnonzero(units == unit)
        counts = lengths[chosen]
        ends = np.cumsum(counts)
        origins[chosen] = end + ends - counts
        end += int(ends[-1])
        parts.append(gather_pieces(memory(unit), starts[chosen], counts))
    return gather_pieces(np.concatenate(parts), origins, lengths)


def located(reply: LookupReply, memory: Memory) -> Iterator[FieldRows]:
    """The rows of each field, in the order of reply.types.

    Raises:
        ProtocolError: the reply contradicts itself, or refers to bytes outside of an arena.
    """
    try:
        blocks = _ReplyBlocks(reply, memory)
        places = {name: placement for placement in reply.placements for name in placement.fields}
        by_placement = {id(placement): _ReplyRows(blocks, placement, reply.count) for placement in reply.placements}
        for field in reply.types:
            if not MIXED_RANK <= field.ndim <= MAX_NDIM:
                raise ValueError(f"field {field.name!r:.80} has {field.ndim} dimensions")
            yield by_placement[id(places[field.name])].of(field)
    except (InvalidArgumentError, ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"a lookup's reply makes no sense: {type(error).__name__}: {error}") from error


def fits(spec: FieldSpec, field: FieldType) -> bool:
    """Whether a column of a block can belong to a field of this type."""
    return spec.kind == field.kind and (spec.dtype == field.dtype or spec.dtype in field.dtypes)


def of_dtype(field: FieldType, dtype: str) -> FieldType:
    """The type of rows of a field that have this dtype."""
    return field if dtype == field.dtype else msgspec.structs.replace(field, dtype=dtype)


@dataclass(frozen=True, slots=True)
class _SchemaGroup:
    """Blocks of one schema and row count: their column layouts by field name."""

    columns: dict[str, ColumnLayout]


class _ReplyBlocks:
    """The blocks of a reply. group, layout: [blocks], the group of each and its number among the group's layouts."""

    def __init__(self, reply: LookupReply, memory: Memory):
        given = reply.blocks
        self.units: I4 = np.frombuffer(given.unit, "<i4")
        self.offsets: I8 = np.frombuffer(given.offset, "<i8")
        self.rows: I4 = np.frombuffer(given.rows, "<i4")
        nbytes: I8 = np.frombuffer(given.nbytes, "<i8")
        self.group: I8 = np.zeros(len(self.units), np.int64)
        self.layout: I8 = np.zeros(len(self.units), np.int64)
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
            # compared so that no sum can wrap around
            if int(offsets.min()) < 0 or int(lengths.min()) < 0 or (offsets > length - lengths).any():
                raise ValueError(f"a block lies outside of the arena of unit {unit}")

    def _alike(self, reply: LookupReply, schema: I4, dims: I4) -> Iterator[I8]:
        """Positions of blocks that can be laid out together."""
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
    """See `columns_of_many`. Readers of one task ask for blocks of few kinds, again and again."""
    return columns_of_many(schema, np.frombuffer(dims, "<i8").reshape(blocks, -1), rows)


class _ReplyRows:
    """The rows of one placement."""

    def __init__(self, blocks: _ReplyBlocks, placement: Placement, count: int):
        block = np.frombuffer(placement.block, "<i4").astype(np.int64)
        slots = np.frombuffer(placement.slot, "<i4").astype(np.int64)
        if len(block) != count or len(slots) != count:
            raise ValueError(f"wanted {count} rows, found {len(block)} blocks and {len(slots)} slots")
        if count and (block.min() < 0 or slots.min() < 0 or (slots >= blocks.rows[block]).any()):
            raise ValueError("a row lies outside of its block")
        self._blocks = blocks
        self._slots = slots
        self._units = blocks.units[block]
        self._offsets = blocks.offsets[block]
        self._layouts = blocks.layout[block]
        # all of a group, or (positions, group) for each of several
        group = blocks.group[block]
        self._parts: list[tuple[I8, _SchemaGroup]] | _SchemaGroup | None = None
        if count and (group == group[0]).all():
            self._parts = blocks.groups[int(group[0])]
        elif count:
            self._parts = [(np.flatnonzero(group == g), blocks.groups[g]) for g in np.unique(group).tolist()]

    def of(self, field: FieldType) -> FieldRows:
        """The rows of one field of the placement."""
        if self._parts is None:
            nothing = np.zeros(0, np.int64)
            return FieldRows(field, self._units, nothing, nothing, np.zeros((0, max(field.ndim, 0)), np.int64))
        if isinstance(self._parts, _SchemaGroup):
            starts, lengths, shapes = self._within(field, self._parts, self._layouts, self._offsets, self._slots)
            typed = of_dtype(field, self._parts.columns[field.name].spec.dtype)
            return FieldRows(typed, self._units, starts, lengths, shapes)
        starts, lengths = np.empty_like(self._slots), np.empty_like(self._slots)
        found = []
        dtypes: dict[str, list[I8]] = {}
        for chosen, group in self._parts:
            places = self._layouts[chosen], self._offsets[chosen], self._slots[chosen]
            starts[chosen], lengths[chosen], part = self._within(field, group, *places)
            found.append((chosen, part))
            dtypes.setdefault(group.columns[field.name].spec.dtype, []).append(chosen)
        shapes = np.full((len(self._slots), max(part.shape[1] for _, part in found)), -1, np.int64)
        for chosen, part in found:
            shapes[chosen, : part.shape[1]] = part
        if len(dtypes) == 1:
            return FieldRows(of_dtype(field, next(iter(dtypes))), self._units, starts, lengths, shapes)
        parts = tuple((dtype, np.concatenate(chosen)) for dtype, chosen in dtypes.items())
        return FieldRows(field, self._units, starts, lengths, shapes, parts)

    @staticmethod
    def _within(field: FieldType, group: _SchemaGroup, layouts: I8, offsets: I8, slots: I8) -> tuple[I8, I8, I8]:
        column = group.columns[field.name]
        if not fits(column.spec, field):
            raise ValueError(f"field {field.name!r} is {field.dtype} by its type and {column.spec.dtype} in a block")
        which: I8 | int = 0 if len(column.offsets) == 1 else layouts
        starts, lengths = column.locate(which, slots)
        return offsets + starts, lengths, column.row_shapes(which, slots)


_STUMBLES = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, StopIteration, TypeError, ValueError,
)  # fmt: skip


@contextlib.contextmanager
def decode_guard(what: str) -> Iterator[None]:
    """Within it whatever is wrong with the data is a ProtocolError. what: the name of the data, for its message."""
    try:
        yield
    except TransferQueueError:
        raise
    except _STUMBLES as error:
        # contextlib takes a RuntimeError caused by a StopIteration for one of its own making
        cause = None if isinstance(error, StopIteration) else error
        raise ProtocolError(f"{what} makes no sense: {type(error).__name__}: {error}") from cause
