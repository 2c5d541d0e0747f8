"""The columns of many fields that were made together: two matrices, of which each field has a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Union

import numpy as np

from transfer_queue.messages import FieldSpec

MANY_FIELDS = 64
"""Of one block, whose columns are made together."""

Columns = tuple[np.ndarray, np.ndarray]


class WideColumns:
    """Block numbers and slots of fields of one chunk, each (fields, capacity of the chunk).

    A put that has exactly these fields sets all of them at once. The chunk has each row under the field's name, too,
    so that whoever looks at one field need not know of the others. schema: the list of fields that was last found to
    have these names. Derived.
    """

    __slots__ = ("blocks", "capacity", "names", "schema", "slots")

    def __init__(self, names: list[str], capacity: int) -> None:
        self.names = names
        self.capacity = capacity
        self.schema: Sequence[FieldSpec] | None = None
        self.blocks = np.zeros((len(names), capacity), "i8")
        self.slots = np.zeros((len(names), capacity), "i4")

    def touch(self, start: int, stop: int, at: slice) -> None:
        """Has the system give the memory for some fields of these rows now, and not when they are put."""
        self.blocks[start:stop, at] = 0
        self.slots[start:stop, at] = 0

    def columns(self, start: int = 0, stop: int | None = None) -> Iterable[tuple[str, Columns]]:
        """(name, its columns) of the fields from `start` up to before `stop`."""
        some = slice(start, stop)
        return zip(self.names[some], zip(self.blocks[some], self.slots[some]))

    def put(self, at: Union[int, slice, np.ndarray], number: int, slots: Any) -> None:
        """These rows of the chunk have all the fields in block `number`, in these slots of it."""
        self.blocks[:, at] = number
        self.slots[:, at] = slots

    def grown(self, capacity: int) -> WideColumns:
        """The same in a chunk of this capacity."""
        grown = WideColumns(self.names, capacity)
        grown.blocks[:, : self.capacity] = self.blocks
        grown.slots[:, : self.capacity] = self.slots
        return grown
