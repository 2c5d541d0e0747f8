"""Columns of many fields that were made together, stored as two matrices in which each field has a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Union

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

    def grown(self, capacity: int) -> WideColumns:
        """Return a copy for a chunk of this capacity."""
        grown = WideColumns(self.names, capacity)
        grown.blocks[:, : self.capacity] = self.blocks
        grown.slots[:, : self.capacity] = self.slots
        return grown
