"""The parts of a wide put that are prepared before the put itself (`core.puts.wide_puts`).

They are not part of the state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue.core.tables.field_types import FieldStats
from transfer_queue.core.tables.row_table import Chunk
from transfer_queue.core.tables.wide_columns import WideColumns
from transfer_queue.messages.descriptors import FieldSpec, NewBlock


class Prepared:
    """A block of very many fields that is about to be put, and what was prepared for it."""

    def __init__(self, sent: NewBlock) -> None:
        self.sent = sent
        """The block as the client sent it."""
        self.block = sent
        """The same block with its whole schema."""
        self.types: PreparedTypes | None = None
        """None if the types of its fields are not prepared."""
        self.columns: PreparedColumns | None = None
        """None if the columns of its fields are not prepared."""

    def matches(self, fields: dict[str, FieldStats], typed: int) -> bool:
        """Return whether the types are prepared and its values match these fields of the partition."""
        return self.types is not None and self.types.is_current(fields, typed)

    def free_some(self, count: int) -> bool:
        """Free up to `count` entries of each collection that is not needed after the put. Return whether all are freed.

        To free 100,000 entries at once takes 20 ms.
        """
        unused: list[dict[str, Any] | list[Any]] = []
        if self.types is not None:
            unused += [self.types.replaced, self.types.unused]
        if self.columns is not None:
            unused.append(self.columns.unused)
        for some in unused:
            for _ in range(min(count, len(some))):
                some.popitem() if isinstance(some, dict) else some.pop()
        return not any(unused)


class PreparedTypes:
    """The fields of a partition as they are after a put, with the types of the put's block added."""

    def __init__(self, fields: dict[str, FieldStats], typed: int) -> None:
        self.fields = dict(fields)
        """All fields of the partition by name."""
        self.of_block: list[FieldStats] = []
        """The fields of the block, in its order."""
        self.replaced: list[tuple[FieldStats, FieldStats]] = []
        """Fields whose types the block changes, each with the field that replaces it."""
        self.several: dict[str, list[str]] = {}
        """The dtypes of those fields of the block that have several."""
        self.installed = False
        """Whether the partition has these fields."""
        self.unused = self.fields
        """The dict of fields that is not needed after the put: this one, or the one that it replaces."""
        self._base = (fields, len(fields), typed)

    def add(self, spec: FieldSpec, dims: np.ndarray) -> None:
        """Add the next field of the block.

        Raises:
            FieldTypeError: The field does not match live values.
        """
        field = self.fields.get(spec.name)
        if field is None:
            field = self.fields[spec.name] = FieldStats(spec.name)
            field.add(spec, dims)
        else:
            field.check(spec)
            changed = field.copy()
            if changed.add(spec, dims):
                self.replaced.append((field, changed))
                field = self.fields[spec.name] = changed
        self.of_block.append(field)
        if field.others:
            self.several[field.name] = [field.dtype, *field.others]

    def is_current(self, fields: dict[str, FieldStats], typed: int) -> bool:
        """Return whether the partition has the fields and types that it had when this was prepared."""
        base, count, before = self._base  # fields are added to the dict and never removed
        return (fields is base or not count) and (len(fields), typed) == (count, before)

    def install(self) -> dict[str, FieldStats]:
        """Return the fields for the partition, with the numbers of values that the replaced fields have now."""
        for field, changed in self.replaced:
            changed.live, changed.ever = field.live, field.ever
        self.installed = True
        self.unused = self._base[0]
        return self.fields


class PreparedColumns:
    """The columns of a block's fields in the chunk of the put's rows, as rows of one matrix.

    Columns that the chunk has are moved into the matrix while it is made. The chunk gets the other columns with the
    put.
    """

    def __init__(self, names: list[str], chunk: Chunk | None, capacity: int) -> None:
        """`chunk` is None if it does not exist yet; `capacity` is that of the chunk when the put is applied."""
        self.done = 0
        """The number of fields whose columns are made."""
        self._wide = WideColumns(names, capacity)
        self._chunk = chunk
        self._base = None if chunk is None else chunk.field
        self._field = {} if chunk is None else dict(chunk.field)
        self._count = len(self._field)
        self.unused = self._field
        """The dict of columns that is not needed after the put: this one, or the one that it replaces."""

    def make(self, count: int, rows: slice) -> bool:
        """Make the columns of `count` more fields. Returns whether these were the last.

        Args:
            count: Number of fields.
            rows: Where the put's rows will be in the chunk; the system allocates their memory now.
        """
        wide, chunk = self._wide, self._chunk
        stop = self.done + count
        wide.touch(self.done, stop, rows)
        for name, columns in wide.columns(self.done, stop):
            self._field[name] = columns
            held = None if chunk is None else chunk.field.get(name)
            if chunk is not None and held is not None:
                chunk.wide = []  # a matrix that lost a column cannot be used as a whole any more
                columns[0][:], columns[1][:] = held
                chunk.field[name] = columns
        self.done = stop
        return stop >= len(wide.names)

    def is_current(self, chunk: Chunk | None) -> bool:
        """Return whether the chunk has the fields and the capacity for which the columns are prepared."""
        if chunk is None or self._base is None:
            return chunk is self._chunk
        same = chunk.field is self._base and len(chunk.field) == self._count
        return same and chunk.capacity == self._wide.capacity

    def install(self, chunk: Chunk, schema: list[FieldSpec]) -> None:
        """Give the columns to the chunk if they are prepared for it."""
        is_new = self._base is None and not chunk.field and chunk.capacity == self._wide.capacity
        if is_new or (chunk is self._chunk and self.is_current(chunk)):
            self.unused, chunk.field, self._base = chunk.field, self._field, {}
            chunk.wide.append(self._wide)
            self._wide.schema = schema
