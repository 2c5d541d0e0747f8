"""Columns of many fields that were made together, stored as two matrices in which each field has a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Union

import numpy as np

from transfer_queue.messages.descriptors import FieldSpec

MANY_FIELDS = 64
"""From this number of fields of one block on, their columns are made together."""

Columns = tuple[np.ndarray, np.ndarray]


class WideColumns:
    """Block numbers and slots of many fields in one chunk, as matrices (fields, capacity of the chunk). Derived.

    A put of exactly these fields sets all of them at once. The chunk also has each row of the matrices under the name
    of its field, so that code that uses one field does not depend on the others.
    """

    __slots__ = ("blocks", "capacity", "names", "schema", "slots")

    def __init__(self, names: list[str], capacity: int) -> None:
        self.names = names
        self.capacity = capacity
        self.schema: Sequence[FieldSpec] | None = None
        """The list of fields that was last found to have these names."""
        self.blocks = np.zeros((len(names), capacity), "i8")
        self.slots = np.zeros((len(names), capacity), "i4")

    def touch(self, start: int, stop: int, at: slice) -> None:
        """Write to the memory of some fields of these rows, so that the system allocates it before the put."""
        self.blocks[start:stop, at] = 0
        self.slots[start:stop, at] = 0

    def columns(self, start: int = 0, stop: int | None = None) -> Iterable[tuple[str, Columns]]:
        """Return (name, columns) of each field from `start` to `stop`, which is not included."""
        some = slice(start, stop)
        return zip(self.names[some], zip(self.blocks[some], self.slots[some]))

    def put(self, at: Union[int, slice, np.ndarray], number: int, slots: Any) -> None:
        """Set the values of all fields for these rows of the chunk to these slots of block `number`."""
        self.blocks[:, at] = number
        self.slots[:, at] = slots

    def with_capacity(self, capacity: int) -> WideColumns:
        """Return a copy for a chunk of this capacity."""
        grown = WideColumns(self.names, capacity)
        grown.blocks[:, : self.capacity] = self.blocks
        grown.slots[:, : self.capacity] = self.slots
        return grown


class ChunkFields(Protocol):
    """The columns of the fields of a chunk."""

    capacity: int
    field: dict[str, Columns]
    wide: list[WideColumns]
    longer: PreparedColumns | None
    """Columns for the next capacity of the chunk."""


class PreparedColumns:
    """The columns of the fields of some blocks in the chunk of the put's rows, as rows of one matrix for each block.

    Columns that the chunk has are moved into the matrix while it is made. The chunk gets the other columns with the
    put. If the put increases the capacity of the chunk, all columns of the chunk are moved into longer ones; until the
    put, the chunk has only their beginnings.
    """

    def __init__(self, schemas: Sequence[list[FieldSpec]], chunk: ChunkFields | None, capacity: int) -> None:
        """`chunk` is None if it does not exist yet; `capacity` is that of the chunk when the put is applied."""
        self._capacity = capacity
        self._before = capacity if chunk is None else chunk.capacity
        self._wides: list[WideColumns] = []
        self._unmade: deque[tuple[Sequence[FieldSpec] | None, list[str]]] = deque(
            (schema, [spec.name for spec in schema]) for schema in schemas
        )
        """The schemas and fields of the blocks whose columns are not all made; without a schema: other fields."""
        self._done = 0
        """The number of fields of the first of them whose columns are made."""
        self._chunk = chunk
        self._base = None if chunk is None else chunk.field
        self._field = {} if chunk is None else dict(chunk.field)
        self._count = len(self._field)
        self.unused = self._field
        """The dict of columns that is not needed after the put: this one, or the one that it replaces."""
        if chunk is not None and self._before != capacity and self._count > sum(map(len, schemas)):
            put = {name for _, names in self._unmade for name in names}
            others = [name for name in chunk.field if name not in put]
            if len(others) >= MANY_FIELDS:
                self._unmade.append((None, others))

    def make(self, count: int, rows: slice) -> bool:
        """Make the columns of up to `count` more fields of one block. Returns whether these were the last.

        Args:
            count: Number of fields.
            rows: Where the put's rows will be in the chunk; the system allocates their memory now.
        """
        if not self._done:
            schema, names = self._unmade[0]
            self._wides.append(WideColumns(names, self._capacity))
            self._wides[-1].schema = schema
        wide, chunk, before = self._wides[-1], self._chunk, self._before
        stop = self._done + count
        wide.touch(self._done, stop, rows)
        for name, columns in wide.columns(self._done, stop):
            self._field[name] = columns
            held = None if chunk is None else chunk.field.get(name)
            if chunk is not None and held is not None:
                chunk.wide = []  # a matrix that lost a column cannot be used as a whole any more
                if before != self._capacity:
                    columns = columns[0][:before], columns[1][:before]
                columns[0][:], columns[1][:] = held
                chunk.field[name] = columns
        self._done = stop
        if stop >= len(wide.names):
            self._unmade.popleft()
            self._done = 0
        if not self._unmade and chunk is not None and before != self._capacity:
            chunk.longer = self
        return not self._unmade

    def is_current(self, chunk: ChunkFields | None) -> bool:
        """Return whether the chunk has the fields and the capacity for which the columns are prepared."""
        if chunk is None or self._base is None:
            return chunk is self._chunk
        same = chunk.field is self._base and len(chunk.field) == self._count
        return same and chunk.capacity == self._before

    def install(self, chunk: ChunkFields, capacity: int) -> None:
        """Give the columns to the chunk if they are prepared for it and for this capacity."""
        is_new = self._base is None and not chunk.field
        if capacity == self._capacity and (is_new or (chunk is self._chunk and self.is_current(chunk))):
            self.unused, chunk.field, self._base = chunk.field, self._field, {}
            chunk.wide += self._wides
