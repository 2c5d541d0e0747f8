"""The columns of consecutive blocks. See `block_table` for what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from transfer_queue.core.columns.row_columns import columns_of
from transfer_queue.core.columns.schema import Persisted, scalar
from transfer_queue.messages.descriptors import BlockLocation

CHUNK_BITS = 12
CHUNK = 1 << CHUNK_BITS
FIELDS = (
    ("unit", "i4"), ("extent", "i8"), ("offset", "i8"), ("generation", "i8"), ("nbytes", "i8"),
    ("rows", "i4"), ("schema", "i4"), ("dims", "i4"), ("live", "i8"), ("owner", "i8"),
)  # fmt: skip
PLACE = ("unit", "extent", "offset", "generation")
"""The columns of a location."""


def _place(columns: dict[str, np.ndarray], at: int) -> BlockLocation:
    unit, extent, offset, generation = (int(columns[name][at]) for name in PLACE)
    return BlockLocation(unit, extent, offset, generation)


OfChunk = Annotated[int, msgspec.Meta(ge=0, le=CHUNK)]


class BlockChunk(Persisted):
    """The columns of CHUNK consecutive block numbers."""

    alive: int = scalar(OfChunk, 0)
    """The number of blocks that are still needed."""
    capacity: int = scalar(OfChunk, 16)
    columns: dict[str, np.ndarray] = columns_of(FIELDS, optional=False)
    second: dict[str, np.ndarray] = columns_of([each for each in FIELDS if each[0] in PLACE], optional=True)
    """The second locations; extent 0 if a block has none. Empty until a block has one."""
    shared: dict[str, np.ndarray] = columns_of([("values", "i8")], optional=True, missing={})
    """The number of values for which a block with `NewBlock.slots` was put; 0 for other blocks.

    Empty until there is such a block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.columns = {name: np.zeros(self.capacity, kind) for name, kind in FIELDS}  # in the order of FIELDS

    def grow(self, at: int) -> None:
        """Increase the capacity so that it includes this block."""
        while self.capacity <= at:
            self.capacity *= 2
        for columns in (self.columns, self.second, self.shared):
            for name, column in columns.items():
                grown = np.zeros(self.capacity, column.dtype)
                grown[: len(column)] = column
                columns[name] = grown

    def put(self, at: int, places: Sequence[BlockLocation]) -> None:
        """Set the one or two locations of a block."""
        for name in PLACE:
            self.columns[name][at] = getattr(places[0], name)
        if len(places) == 1:
            if self.second:
                self.second["extent"][at] = 0
            return
        if not self.second:
            self.second = {name: np.zeros(self.capacity, kind) for name, kind in FIELDS if name in PLACE}
        for name in PLACE:
            self.second[name][at] = getattr(places[1], name)

    def note_shared(self, at: int | np.ndarray, values: int | np.ndarray) -> None:
        """Note that blocks whose rows may have several values of a field were put for these numbers of values."""
        if not self.shared:
            self.shared = {"values": np.zeros(self.capacity, "i8")}
        self.shared["values"][at] = values

    def exchange(self, at: np.ndarray) -> None:
        """Exchange the first and the second location of these blocks."""
        for name in PLACE:
            first, second = self.columns[name], self.second[name]
            first[at], second[at] = second[at], first[at]

    def places(self, at: int) -> list[BlockLocation]:
        """Return the locations of a block."""
        found = [_place(self.columns, at)]
        if self.second and self.second["extent"][at]:
            found.append(_place(self.second, at))
        return found
