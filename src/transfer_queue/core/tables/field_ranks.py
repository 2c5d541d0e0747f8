"""Counts the rows of each rank of the fields whose rows differ in rank. A rank is forgotten with its last row.

Nearly all fields have rows of one rank, and cost nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np

from transfer_queue.core.columns.schema import Column, Count, Persisted, custom_column
from transfer_queue.core.tables.field_types import MIXED_RANK, FieldStats, dims_parts, mixed_shapes
from transfer_queue.core.tables.row_table import Chunk, RowTable
from transfer_queue.messages.descriptors import FieldSpec

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
        found = {}
        for name, field in table.fields.items():
            if field.further and field.live:
                found[name] = [(rank, field.counts[rank], *field.further[rank]) for rank in sorted(field.further)]
        return found


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
                field.forget_gone_ranks()
        self.derive()

    def remove(self, chunk: Chunk, at: Any) -> None:
        """Subtract the values of these rows of a chunk, which are about to change."""
        for name in self.names:
            self._count(name, chunk, at, -1)

    def add(self, chunk: Chunk, at: Any) -> None:
        """Count the values of these rows of a chunk, which have changed."""
        for name in self.names:
            self._count(name, chunk, at, 1)

    def forget_gone(self) -> list[str]:
        """Forget the ranks of which no row has a value, after a change. Return the fields that had such a rank."""
        found = []
        for name in sorted(self.names):
            field = self.fields[name]
            if field.live and field.forget_gone_ranks():
                found.append(name)
            if not field.live or not field.further:
                self.names.discard(name)
        return found

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
    there = np.flatnonzero(numbers)
    if not len(there):
        return
    schemas, dims = (blocks.column(column, numbers[there]).astype("i8") for column in ("schema", "dims"))
    _, firsts, layouts = np.unique(schemas << 32 | dims, return_index=True, return_inverse=True)
    for layout, first in enumerate(firsts.tolist()):
        schema, packed, rows = blocks.shape_source(int(numbers[there[first]]))
        at = next(at for at, spec in enumerate(schema) if spec.name == name)
        where = there if len(firsts) == 1 else there[np.flatnonzero(layouts.reshape(-1) == layout)]
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
