"""What a partition knows of a field: its type over its live values, and how many rows it has of each rank.

The type is the kind, the dtypes, and the dimensions in which the rows differ. Ranks are counted of the fields whose
rows differ in rank, and a rank is forgotten with its last row. Nearly all fields have rows of one rank, and cost
nothing there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np

from transfer_queue.core.columns.schema import Column, Count, Persisted, counter, custom_column, scalar
from transfer_queue.core.tables.rows import Chunk, RowTable
from transfer_queue.errors import FieldTypeError, InvalidArgumentError
from transfer_queue.messages.descriptors import NESTED, FieldSpec, FieldType, NewBlock

MAX_FIELDS = 4096
"""The maximum number of fields of a partition that have values in live rows."""
MIXED_RANK = -1  # ndim of a field, or of one block's column, whose rows differ in rank

_WIDE_UNSIGNED = frozenset({"uint16", "uint32", "uint64"})
_FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})
_PROMOTED = _FLOATING | {
    "bool", "uint8", "int8", "int16", "int32", "int64", "complex32", "complex64", "complex128",
}  # fmt: skip


def can_promote(one: str, other: str) -> bool:
    """Return whether `torch.promote_types` has a result for these two dtypes; this process does not import torch."""
    if one == other or (one in _PROMOTED and other in _PROMOTED):
        return True
    return (one in _WIDE_UNSIGNED and other in _FLOATING) or (one in _FLOATING and other in _WIDE_UNSIGNED)


class FieldStats(Persisted, array_like=True):
    """The type and the number of values of one field. The type is forgotten when no row has a value."""

    live: int = counter()
    """The number of rows that have a value."""
    ever: int = counter()
    """The number of values that rows have got so far."""
    kind: str = scalar(str, "")
    dtype: str = scalar(str, "")
    """The dtype of the first value."""
    ndim: int = scalar(int, 0)
    """The rank of the first value, as long as a row has that rank."""
    shape: tuple[int, ...] = scalar(tuple[Count, ...], ())
    """The row shape of the first value of this rank."""
    differs: int = scalar(Annotated[int, msgspec.Meta(ge=0)], 0)
    """Bit d is set once rows of this rank differ in dimension d."""
    mixed_rank: bool = scalar(bool, False)
    """Whether there are `further` ranks."""
    others: tuple[str, ...]
    """The other dtypes of values, in order of appearance. The partition saves them."""
    further: dict[int, tuple[tuple[int, ...], int]]
    """Each other rank of values -> `shape` and `differs` of the values of this rank. `FieldRanks` saves them."""
    counts: Counter[int]
    """Each other rank -> the number of rows that have a value of it. `FieldRanks` counts them."""

    def __init__(self, name: str) -> None:  # super().__init__() would take four times as long
        self.name = name
        self.live = self.ever = 0
        self.forget()

    def forget(self) -> None:
        """Forget the type, because no live row has the field."""
        self.kind = self.dtype = ""
        self.others = self.shape = ()
        self.ndim = self.differs = 0
        self.mixed_rank = False
        self.further, self.counts = {}, Counter()

    def forget_empty_ranks(self) -> bool:
        """Forget the ranks of which no row has a value. Return whether there were any."""
        empty = [rank for rank in self.further if not self.counts[rank]]
        for rank in empty:
            del self.further[rank], self.counts[rank]
        is_first_empty = bool(self.further) and self.counts.total() == self.live
        if is_first_empty:
            self.ndim = min(self.further)
            self.shape, self.differs = self.further.pop(self.ndim)
            del self.counts[self.ndim]
        self.mixed_rank = bool(self.further)
        return bool(empty) or is_first_empty

    def check(self, spec: FieldSpec) -> None:
        """Raise FieldTypeError if a value of this spec does not match the live values."""
        if not self.live or (self.kind, self.dtype) == (spec.kind, spec.dtype):
            return
        if self.kind != spec.kind:
            raise FieldTypeError(
                f"field {self.name!r} holds {_text(self.kind, self.dtype)} in its live rows, but this put contains "
                f"{_text(spec.kind, spec.dtype)}; nothing was put. {_REMEDY[spec.kind]}, use another field name, or "
                f"clear the rows that have the field first.",
                field=self.name,
            )
        for dtype in (self.dtype, *self.others):
            if not can_promote(dtype, spec.dtype):
                raise FieldTypeError(
                    f"field {self.name!r} holds {_text(self.kind, dtype)} in its live rows, but this put contains "
                    f"{_text(spec.kind, spec.dtype)}, and torch.promote_types has no dtype for both; nothing was put. "
                    f"Convert the values to {dtype}, use another field name, or clear the rows that have the field "
                    f"first.",
                    field=self.name,
                )

    def add(self, spec: FieldSpec, dims: np.ndarray) -> None:
        """Add the row shapes of one column of a block to the type. `dims` is the column's part of the block's dims."""
        if not self.kind:
            self.kind, self.dtype = spec.kind, spec.dtype
            mixed = spec.ndim == MIXED_RANK
            self.ndim = int(dims[0]) if mixed else spec.ndim
            self.shape = tuple(dims[mixed : mixed + self.ndim].tolist())
        elif spec.dtype != self.dtype and spec.dtype not in self.others:
            self.others += (spec.dtype,)
        if spec.kind != "tensor":
            return
        if spec.ndim != MIXED_RANK:
            self._add_shapes(spec.ndim, dims)
            return
        by_rank: dict[int, list[int]] = {}
        for shape in mixed_shapes(dims):
            by_rank.setdefault(len(shape), []).extend(shape)
        for rank, sizes in by_rank.items():
            self._add_shapes(rank, np.array(sizes, "i8"))

    def _add_shapes(self, rank: int, dims: np.ndarray) -> None:
        """Add the row shapes of values of one rank."""
        if rank == self.ndim:
            shape, differs = self.shape, self.differs
        else:
            shape, differs = self.further.get(rank) or (tuple(dims[:rank].tolist()), 0)
        if len(dims) == rank:  # one shape for all rows
            for d, size in enumerate(dims.tolist()):
                if size != shape[d]:
                    differs |= 1 << d
        else:
            for d in np.flatnonzero((dims.reshape(-1, rank) != shape).any(axis=0)).tolist():
                differs |= 1 << d
        if rank == self.ndim:
            self.differs = differs
        else:
            self.further[rank] = shape, differs
            self.mixed_rank = True

    def absorb(self, other: FieldStats) -> None:
        """Add the values and the type of a field of another partition, which `check` allows. Both have values."""
        self.others += tuple(dtype for dtype in (other.dtype, *other.others) if dtype not in (self.dtype, *self.others))
        first = other.live - other.counts.total()
        for rank, (shape, differs), count in [
            (other.ndim, (other.shape, other.differs), first),
            *((rank, shapes, other.counts[rank]) for rank, shapes in other.further.items()),
        ]:
            self._add_shapes(rank, np.array(shape, "i8"))
            if rank == self.ndim:
                self.differs |= differs
            else:
                self.further[rank] = self.further[rank][0], self.further[rank][1] | differs
                self.counts[rank] += count
        self.live, self.ever = self.live + other.live, self.ever + other.ever

    def to_field_type(self, ranks: Collection[int] = ()) -> FieldType:
        """Return the type as replies contain it. ranks: the ranks of the values in the reply, if there are several."""
        kind, dtype, ndim, shape, differs, mixed = self.kind, self.dtype, self.ndim, self.shape, self.differs, False
        if ranks:
            mixed = len(ranks) > 1
            if not mixed and ndim not in ranks:
                ndim = next(iter(ranks))
                shape, differs = self.further[ndim]
        known = list(shape) if not differs and not mixed and kind == "tensor" else None
        dtypes = [dtype, *self.others] if self.others else []
        return FieldType(self.name, kind, dtype, ndim, known, differs, mixed, dtypes)

    def describe(self) -> str:
        """Return the type as text."""
        if not self.kind:
            return "no values"
        if self.kind == "object":
            return "objects"
        if self.kind == NESTED:
            return "a nested TensorDict"
        shape = ["?" if self.differs >> d & 1 else str(n) for d, n in enumerate(self.shape)]
        return f"{'|'.join((self.dtype, *self.others))}[{'mixed ranks' if self.mixed_rank else ', '.join(shape)}]"


def count_live(fields: Mapping[str, FieldStats]) -> int:
    """Return the number of fields that have values."""
    return sum(field.live > 0 for field in fields.values())


def check_number(partition: str, fields: Mapping[str, FieldStats], added: Collection[str]) -> None:
    """Raise InvalidArgumentError if a partition with these fields cannot have values of these, too."""
    if len(fields) + len(added) <= MAX_FIELDS:
        return
    live = count_live(fields)
    fresh = [name for name in added if name not in fields or not fields[name].live]
    if live + len(fresh) > MAX_FIELDS:
        named = ", ".join(map(repr, fresh[:3])) + (", ..." if len(fresh) > 3 else "")
        raise InvalidArgumentError(
            f"a partition can have at most {MAX_FIELDS} fields with values, but partition {partition!r} would have "
            f"more: it has {live}, and {named} would be added; nothing was changed. Put values that belong together "
            f"into one field (a tensor with one more dimension, or a dict), use several partitions, or clear the "
            f"samples whose fields are not needed any more."
        )


_REMEDY = {  # by the kind of the values that are put
    "object": "Put tensors, or NumPy arrays and numbers, which are converted to tensors",
    NESTED: "Put its fields as fields of their own",
    "tensor": "Put every value as a torch.Tensor from the first put on (a NumPy array or a number in the dict of a "
    "kv_put, and a list of numbers, are stored as Python objects if they come first), put Python objects here, too",
}


def _text(kind: str, dtype: str) -> str:
    if kind == NESTED:
        return "nested TensorDicts"
    return "Python objects" if kind == "object" else f"tensors of {dtype}"


def dims_parts(schema: Sequence[FieldSpec], dims: np.ndarray, rows: int) -> list[np.ndarray]:
    """Return the part of a block's dims that belongs to each field, in order.

    Raises InvalidArgumentError if the numbers do not fit the schema.
    """
    parts, at = [], 0
    for spec in schema:
        end = _dims_end(spec, dims, at, rows)
        parts.append(dims[at:end])
        at = end
    if at != len(dims) or (len(dims) and int(dims.min()) < 0):
        raise InvalidArgumentError(f"a block of {rows} rows and {len(schema)} fields cannot have {len(dims)} dims")
    return parts


def _dims_end(spec: FieldSpec, dims: np.ndarray, at: int, rows: int) -> int:
    """Return where the part of the field that begins at `at` ends."""
    if spec.ndim == MIXED_RANK:
        for _ in range(rows):
            if at >= len(dims) or not 0 <= dims[at] <= 64:
                raise InvalidArgumentError(f"field {spec.name!r}: the dims of the block do not cover its {rows} rows")
            at += 1 + int(dims[at])
        return at
    if not 0 <= spec.ndim <= 64:
        raise InvalidArgumentError(f"field {spec.name!r}: a tensor cannot have {spec.ndim} dimensions")
    return at + spec.ndim * (rows if spec.ragged else 1)


def mixed_shapes(dims: np.ndarray) -> list[list[int]]:
    """Return the shape of each row of a column whose rows differ in rank."""
    listed, shapes, at = dims.tolist(), [], 0
    while at < len(listed):
        end = at + 1 + listed[at]
        shapes.append(listed[at + 1 : end])
        at = end
    return shapes


BlockShape = tuple[int, bytes, tuple[FieldSpec, ...]]
"""The rows, dims and schema of a block: its content without its location. The items that compare fastest come first."""


def check_block(block: NewBlock, count: int, is_known: bool = False) -> None:
    """Raise InvalidArgumentError if the description of a block is wrong. `is_known`: its shape was checked before."""
    if block.slots is not None:
        _check_slots(block, block.slots, count)
    elif block.rows != count or count < 1:
        raise InvalidArgumentError(f"the block has {block.rows} rows, but {count} rows are put")
    if block.parts:
        raise InvalidArgumentError("the schema of a block must be a list, got parts of one; put with this release")
    place = (block.unit, block.extent, block.offset, block.generation, block.nbytes)
    if min(place) < 0 or max(place) >= 1 << 62:
        raise InvalidArgumentError("the location of the block is not possible")
    if is_known:
        return
    names = [spec.name for spec in block.schema]
    if not names or len(set(names)) != len(names):
        raise InvalidArgumentError(f"a block needs fields with distinct names, got {names}")
    for spec in block.schema:
        if spec.kind not in ("tensor", "object", NESTED):
            raise InvalidArgumentError(f"field {spec.name!r} has the unknown kind {spec.kind!r}")
    if len(block.dims) % 8:
        raise InvalidArgumentError(f"the dims of the block must be 64-bit integers, got {len(block.dims)} bytes")
    dims_parts(block.schema, np.frombuffer(block.dims, "<i8"), block.rows)


def _check_slots(block: NewBlock, packed: bytes, count: int) -> None:
    if len(packed) != 4 * count or not 0 < block.rows <= count:
        raise InvalidArgumentError(
            f"the block has {block.rows} rows for {len(packed) // 4} values of each field, but {count} rows are put"
        )
    slots = np.frombuffer(packed, "<i4")
    if int(slots.min()) < -1 or int(slots.max()) >= block.rows:
        raise InvalidArgumentError(
            f"the block has {block.rows} rows, but values are in its rows {int(slots.min())} to {int(slots.max())}"
        )


_Rank = tuple[Annotated[int, msgspec.Meta(ge=0, le=64)], Count, tuple[Count, ...], Annotated[int, msgspec.Meta(ge=0)]]
"""A rank with the number of its values, and their `shape` and `differs` (`FieldStats`)."""


class BlockShapes(Protocol):
    """What is read of the table of blocks, which imports this package."""

    def column(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """Return one column of these blocks, in order."""

    def shape_source(self, number: int) -> tuple[Sequence[FieldSpec], bytes, int]:
        """Return the schema, dims and row count of one block."""


class _FurtherRanks(Column):
    """`further` and `counts` of the fields that have several ranks."""

    def __init__(self) -> None:
        super().__init__(dict[str, list[_Rank]], None)

    def save(self, table: FieldRanks, tree: dict[str, Any]) -> None:
        """See `Column`."""
        tree[self.key] = self.to_comparable(table)

    def load(self, table: FieldRanks, loaded: Any) -> None:
        """See `Column`."""
        for name, ranks in loaded.further.items():
            field = table.fields[name]
            for rank, count, shape, differs in ranks:
                field.further[rank], field.counts[rank] = (shape, differs), count

    def to_comparable(self, table: FieldRanks) -> Any:
        """See `Column`."""
        ranks = {}
        for name, field in table.fields.items():
            if field.further and field.live:
                ranks[name] = [(rank, field.counts[rank], *field.further[rank]) for rank in sorted(field.further)]
        return ranks


class FieldRanks(Persisted, bare=True):
    """The ranks of the fields of one partition."""

    further: Any = custom_column(_FurtherRanks())

    def __init__(self, rows: RowTable, fields: Mapping[str, FieldStats], blocks: BlockShapes) -> None:
        super().__init__()
        self.rows = rows
        self.fields = fields
        """The fields of the partition."""
        self.names: set[str] = set()
        """The fields with rows of several ranks. Derived."""
        self._blocks = blocks

    def ranks_of(self, name: str, numbers: np.ndarray, slots: np.ndarray) -> list[int]:
        """Return the ranks of these values of a field, ascending; [] if the field has values of one rank only."""
        if name not in self.names:
            return []
        ranks = np.unique(value_ranks(self._blocks, name, numbers, slots)).tolist()
        return [rank for rank in ranks if rank != NO_VALUE]

    def derive(self) -> None:
        """Find the fields with several ranks."""
        self.names = {name for name, field in self.fields.items() if field.mixed_rank}

    def count_old(self) -> None:
        """Count the ranks of fields in a state of a release that did not count them, which is now complete."""
        for name in self.names:
            field = self.fields[name]
            if not field.further:
                self._find_ranks(field)
                field.forget_empty_ranks()
        self.derive()

    def remove(self, chunk: Chunk, at: Any) -> None:
        """Subtract the values of these rows of a chunk, which are about to change."""
        for name in self.names:
            self._count(name, chunk, at, -1)

    def add(self, chunk: Chunk, at: Any) -> None:
        """Count the values of these rows of a chunk, which have changed."""
        for name in self.names:
            self._count(name, chunk, at, 1)

    def forget_empty(self) -> list[str]:
        """Forget the ranks of which no row has a value, after a change. Return the fields that had such a rank."""
        names = []
        for name in sorted(self.names):
            field = self.fields[name]
            if field.live and field.forget_empty_ranks():
                names.append(name)
            if not field.live or not field.further:
                self.names.discard(name)
        return names

    def _count(self, name: str, chunk: Chunk, at: Any, sign: int) -> None:
        columns = chunk.field.get(name)
        if columns is None:
            return
        field = self.fields[name]
        ranks = value_ranks(self._blocks, name, np.atleast_1d(columns[0][at]), np.atleast_1d(columns[1][at]))
        for rank, count in zip(*(each.tolist() for each in np.unique(ranks, return_counts=True)), strict=True):
            if rank not in (NO_VALUE, field.ndim):
                field.counts[rank] += sign * count

    def _find_ranks(self, field: FieldStats) -> None:
        """Add the shapes of the live values of a field to its type, and count its ranks."""
        for chunk in self.rows.chunks.values():
            columns = chunk.field.get(field.name)
            if columns is None:
                continue
            for where, spec, dims in value_layouts(self._blocks, field.name, columns[0]):
                chosen = _dims_of_rows(spec, dims, columns[1][where])
                if field.ndim == MIXED_RANK:
                    field.ndim, field.shape = len(chosen[0]), tuple(chosen[0])
                for shape in chosen:
                    field.add(FieldSpec(field.name, spec.kind, spec.dtype, len(shape), False), np.array(shape, "i8"))
            self._count(field.name, chunk, slice(None), 1)


NO_VALUE = -1


def value_layouts(
    blocks: BlockShapes, name: str, numbers: np.ndarray
) -> Iterator[tuple[np.ndarray, FieldSpec, np.ndarray]]:
    """Iterate over the layouts of the values of a field in these blocks (0: no value).

    Yields:
        The positions of the values in `numbers`, the field in the schema of their blocks, and its part of their dims.
    """
    filled = np.flatnonzero(numbers)
    if not len(filled):
        return
    schemas, dims = (blocks.column(column, numbers[filled]).astype("i8") for column in ("schema", "dims"))
    _, firsts, layouts = np.unique(schemas << 32 | dims, return_index=True, return_inverse=True)
    for layout, first in enumerate(firsts.tolist()):
        schema, packed, rows = blocks.shape_source(int(numbers[filled[first]]))
        at = next(at for at, spec in enumerate(schema) if spec.name == name)
        where = filled if len(firsts) == 1 else filled[np.flatnonzero(layouts.reshape(-1) == layout)]
        yield where, schema[at], dims_parts(schema, np.frombuffer(packed, "<i8"), rows)[at]


def value_ranks(blocks: BlockShapes, name: str, numbers: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the rank of each of these values of a field; `NO_VALUE` in block 0."""
    out = np.full(len(numbers), NO_VALUE, "i8")
    for where, spec, dims in value_layouts(blocks, name, numbers):
        out[where] = spec.ndim
        if spec.ndim == MIXED_RANK:
            out[where] = np.array([len(shape) for shape in mixed_shapes(dims)], "i8")[slots[where]]
    return out


def _dims_of_rows(spec: FieldSpec, dims: np.ndarray, slots: np.ndarray) -> list[list[int]]:
    """Return the distinct shapes of these rows of a column, in order of appearance."""
    if spec.ndim == MIXED_RANK:
        shapes = mixed_shapes(dims)
    elif spec.ragged and spec.ndim:
        shapes = dims.reshape(-1, spec.ndim).tolist()
    else:
        return [dims.tolist()]
    return [list(shape) for shape in dict.fromkeys(tuple(shapes[slot]) for slot in slots.tolist())]
