"""What the steps of a wide put have found out and made for it (`core.wide_puts`). Derived, and no part of the state."""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue.core.fields import Field
from transfer_queue.core.rows import Chunk
from transfer_queue.core.wide_columns import WideColumns
from transfer_queue.messages import FieldSpec, NewBlock


class Prepared:
    """A block of very many fields that is about to be put, whose description of itself was found to be right.

    sent: as its client has sent it. block: the same with its schema. types, columns: None where they are not prepared.
    """

    def __init__(self, sent: NewBlock) -> None:
        self.sent = sent
        self.block = sent
        self.types: PreparedTypes | None = None
        self.columns: PreparedColumns | None = None

    def let_go(self, count: int) -> bool:
        """Frees some of what the put has replaced, or of what it could not use; whether that was all."""
        gone: list[dict[str, Any] | list[Any]] = []
        if self.types is not None:
            gone += [self.types.replaced, self.types.spare]
        if self.columns is not None:
            gone.append(self.columns.spare)
        for some in gone:
            for _ in range(min(count, len(some))):
                some.popitem() if isinstance(some, dict) else some.pop()
        return not any(gone)

    def fits(self, fields: dict[str, Field], typed: int) -> bool:
        """Whether its values are known to go with these fields."""
        return self.types is not None and self.types.hold_for(fields, typed)


class PreparedTypes:
    """The fields of a partition, with those of a block taken in.

    fields: by name. of_block: those of the block, in its order. replaced: those of which the block makes something
    else known, and what takes their place. several: the dtypes of the block's fields that have several. taken: these
    are the partition's fields. spare: those that are nobody's, once the put is decided on.
    """

    def __init__(self, fields: dict[str, Field], typed: int) -> None:
        self.fields = self.spare = dict(fields)
        self.taken = False
        self._had = (fields, len(fields), typed)
        self.of_block: list[Field] = []
        self.replaced: list[tuple[Field, Field]] = []
        self.several: dict[str, list[str]] = {}

    def add(self, spec: FieldSpec, dims: np.ndarray) -> None:
        """Takes in the next field of the block. Raises FieldTypeError where it does not go with live values."""
        field = self.fields.get(spec.name)
        if field is None:
            field = self.fields[spec.name] = Field(spec.name)
            field.add(spec, dims)
        else:
            field.check(spec)
            known = field.copy()
            if known.add(spec, dims):
                self.replaced.append((field, known))
                field = self.fields[spec.name] = known
        self.of_block.append(field)
        if field.others:
            self.several[field.name] = [field.dtype, *field.others]

    def hold_for(self, fields: dict[str, Field], typed: int) -> bool:
        """Whether these fields, which only ever become more, and their types are as they were."""
        had, count, before = self._had
        return (fields is had or not count) and (len(fields), typed) == (count, before)

    def take_over(self) -> dict[str, Field]:
        """The fields, by name; they have the values that the others had."""
        for field, known in self.replaced:
            known.live, known.ever = field.live, field.ever
        self.taken = True
        self.spare = self._had[0]
        return self.fields


class PreparedColumns:
    """The columns of a block's fields in the chunk where its rows will be, as rows of one matrix.

    Fields that the chunk has move into the matrix as it is made; the others are the chunk's once the block is put.
    chunk: None where it is not there yet. done: of the fields. spare: what is nobody's, once the put is decided on.
    """

    def __init__(self, names: list[str], chunk: Chunk | None, capacity: int) -> None:
        self.done = 0
        self._wide = WideColumns(names, capacity)
        self._chunk = chunk
        self._field = self.spare = {} if chunk is None else dict(chunk.field)
        self._had = None if chunk is None else chunk.field
        self._count = len(self._field)

    def make(self, count: int, rows: slice) -> bool:
        """Makes the columns of so many fields; whether these were the last. rows: where the block's will be."""
        wide, chunk = self._wide, self._chunk
        stop = self.done + count
        wide.touch(self.done, stop, rows)  # has the system give the memory now
        for name, columns in wide.columns(self.done, stop):
            self._field[name] = columns
            held = None if chunk is None else chunk.field.get(name)
            if chunk is not None and held is not None:
                chunk.wide = []  # what was made together is so no more
                columns[0][:], columns[1][:] = held
                chunk.field[name] = columns
        self.done = stop
        return stop >= len(wide.names)

    def hold_for(self, chunk: Chunk | None) -> bool:
        """Whether the chunk has the fields and the capacity that it had, or will have when it is made."""
        if chunk is None or self._had is None:
            return chunk is self._chunk
        return chunk.field is self._had and len(chunk.field) == self._count and chunk.capacity == self._wide.capacity

    def give(self, chunk: Chunk, schema: list[FieldSpec]) -> None:
        """Makes them the chunk's where they are for it."""
        made = self._had is None and not chunk.field and chunk.capacity == self._wide.capacity
        if made or (chunk is self._chunk and self.hold_for(chunk)):
            self.spare, chunk.field, self._had = chunk.field, self._field, {}
            chunk.wide.append(self._wide)
            self._wide.schema = schema
