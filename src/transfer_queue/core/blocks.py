"""Published blocks and the extents they lie in, as columns; who still needs which.

A block is needed while a live row has a value in it. An extent can be freed once its writer has closed it
and no block in it is needed. Block numbers start at 1 and are never used again (0 means "no value").
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from transfer_queue.messages import Blocks, FieldSpec, NewBlock

CHUNK_BITS = 12
CHUNK = 1 << CHUNK_BITS
_FIELDS = (
    ("unit", "i4"), ("extent", "i8"), ("offset", "i8"), ("generation", "i8"), ("nbytes", "i8"),
    ("rows", "i4"), ("schema", "i4"), ("dims", "i4"), ("live", "i8"),
)  # fmt: skip


T = TypeVar("T", bound=Hashable)


def _counted(values: np.ndarray) -> list[tuple[int, int]]:
    """Each distinct value with its number of entries."""
    if len(values) == 1:
        return [(int(values[0]), 1)]
    unique, counts = np.unique(values, return_counts=True)
    return list(zip(unique.tolist(), counts.tolist(), strict=True))


class Interned(Generic[T]):
    """Equal values stored once, counted, under small numbers that are used again when free."""

    def __init__(self) -> None:
        self.number: dict[T, int] = {}
        self.values: list[T | None] = []
        self.uses: list[int] = []
        self.spare: list[int] = []

    def add(self, value: T) -> int:
        """The number of this value, used once more."""
        at = self.number.get(value)
        if at is not None:
            self.uses[at] += 1
            return at
        if self.spare:
            at = self.spare.pop()
            self.values[at], self.uses[at] = value, 1
        else:
            at = len(self.values)
            self.values.append(value)
            self.uses.append(1)
        self.number[value] = at
        return at

    def drop(self, at: int, uses: int = 1) -> None:
        """So many uses fewer; the value goes with the last."""
        self.uses[at] -= uses
        if self.uses[at] == 0:
            del self.number[self[at]]
            self.values[at] = None
            self.spare.append(at)

    def __getitem__(self, at: int) -> T:
        value = self.values[at]
        assert value is not None
        return value


class _Chunk:
    """CHUNK block numbers' columns; `alive` counts the blocks in it that are still needed."""

    __slots__ = ("alive", "capacity", "columns")

    def __init__(self) -> None:
        self.alive = 0
        self.capacity = 16
        self.columns = {name: np.zeros(self.capacity, kind) for name, kind in _FIELDS}

    def ensure(self, at: int) -> None:
        if at < self.capacity:
            return
        while self.capacity <= at:
            self.capacity *= 2
        for name, column in self.columns.items():
            grown = np.zeros(self.capacity, column.dtype)
            grown[: len(column)] = column
            self.columns[name] = grown


class Extent:
    """blocks: how many needed blocks lie in it. closed: its writer puts no more into it."""

    __slots__ = ("blocks", "closed", "writer")

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self.blocks = 0
        self.closed = False


class BlockTable:
    """All blocks that some live row needs, and the extents that hold them."""

    def __init__(self) -> None:
        self.chunks: dict[int, _Chunk] = {}
        self.schemas: Interned[tuple[FieldSpec, ...]] = Interned()
        self.dims: Interned[bytes] = Interned()
        self.extents: dict[tuple[int, int], Extent] = {}
        self.freed: list[tuple[int, int]] = []  # extents to hand back, drained by the controller
        self.live_bytes = 0

    def add(self, number: int, writer: str, block: NewBlock, values: int) -> None:
        """Block `number`, needed for `values` values."""
        key, at = number >> CHUNK_BITS, number & (CHUNK - 1)
        chunk = self.chunks.get(key)
        if chunk is None:
            chunk = self.chunks[key] = _Chunk()
        chunk.ensure(at)
        row = (
            block.unit, block.extent, block.offset, block.generation, block.nbytes, block.rows,
            self.schemas.add(tuple(block.schema)), self.dims.add(block.dims), values,
        )  # fmt: skip
        for (name, _), value in zip(_FIELDS, row, strict=True):
            chunk.columns[name][at] = value
        chunk.alive += 1
        self.live_bytes += block.nbytes
        place = (block.unit, block.extent)
        extent = self.extents.get(place)
        if extent is None:
            extent = self.extents[place] = Extent(writer)
        extent.blocks += 1

    def release(self, numbers: np.ndarray) -> int:
        """One value fewer is needed for each entry (0 entries count nothing); bytes of the blocks that went."""
        numbers = numbers[numbers > 0]
        if len(numbers) == 1:
            return self._release(int(numbers[0]) >> CHUNK_BITS, numbers & (CHUNK - 1), 1)
        unique, counts = np.unique(numbers, return_counts=True)
        keys = unique >> CHUNK_BITS
        edges = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)] if len(keys) else []
        return sum(self._release(int(keys[a]), unique[a:b] & (CHUNK - 1), counts[a:b]) for a, b in pairwise(edges))

    def _release(self, key: int, at: np.ndarray, counts: np.ndarray | int) -> int:
        """The same for distinct blocks of one chunk."""
        chunk = self.chunks[key]
        column = chunk.columns
        column["live"][at] -= counts
        at = at[column["live"][at] == 0]
        if not len(at):
            return 0
        tables: tuple[tuple[Interned[Any], str], ...] = ((self.schemas, "schema"), (self.dims, "dims"))
        for table, name in tables:
            for value, uses in _counted(column[name][at]):
                table.drop(value, uses)
        nbytes = int(column["nbytes"][at].sum())
        self.live_bytes -= nbytes
        for unit in set(column["unit"][at].tolist()):
            mine = at[column["unit"][at] == unit]
            for extent, blocks in _counted(column["extent"][mine]):
                self.extents[unit, extent].blocks -= blocks
                self._free_if_done((unit, extent))
        chunk.alive -= len(at)
        if not chunk.alive:
            del self.chunks[key]
        return nbytes

    def close(self, places: list[tuple[int, int]]) -> None:
        """These extents take no more blocks."""
        for place in places:
            extent = self.extents.get(place)
            if extent is None:
                # closed with nothing needed in it: all its blocks are gone already, or there never were any
                self.freed.append(place)
                continue
            extent.closed = True
            self._free_if_done(place)

    def _free_if_done(self, place: tuple[int, int]) -> None:
        extent = self.extents[place]
        if extent.blocks == 0 and extent.closed:
            del self.extents[place]
            self.freed.append(place)

    def take_freed(self, units: Container[int]) -> dict[int, list[int]]:
        """The extents to hand back to these units, by unit; those of other units stay for a later call."""
        taken: dict[int, list[int]] = {}
        if self.freed:
            for unit, extent in self.freed:
                if unit in units:
                    taken.setdefault(unit, []).append(extent)
            self.freed = [place for place in self.freed if place[0] not in units]
        return taken

    def column(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """One column of these blocks, in order."""
        keys = numbers >> CHUNK_BITS
        at = numbers & (CHUNK - 1)
        if len(numbers) and keys[0] == keys[-1] and (keys == keys[0]).all():
            column: np.ndarray = self.chunks[int(keys[0])].columns[name][at]
            return column
        out = np.empty(len(numbers), dict(_FIELDS)[name])
        for key in np.unique(keys).tolist():
            mine = keys == key
            out[mine] = self.chunks[key].columns[name][at[mine]]
        return out

    def describe(self, numbers: np.ndarray) -> Blocks:
        """These blocks as a reply carries them."""
        columns = {name: self.column(name, numbers) for name, _ in _FIELDS[:8] if name != "extent"}
        schema_numbers, schema_at = np.unique(columns["schema"], return_inverse=True)
        dims_numbers, dims_at = np.unique(columns["dims"], return_inverse=True)
        return Blocks(
            unit=columns["unit"].tobytes(),
            offset=columns["offset"].tobytes(),
            generation=columns["generation"].tobytes(),
            nbytes=columns["nbytes"].tobytes(),
            rows=columns["rows"].tobytes(),
            schema=schema_at.astype("i4").tobytes(),
            dims=dims_at.astype("i4").tobytes(),
            schemas=[list(self.schemas[n]) for n in schema_numbers.tolist()],
            dims_values=[self.dims[n] for n in dims_numbers.tolist()],
        )

    def shape_source(self, number: int) -> tuple[tuple[FieldSpec, ...], bytes, int]:
        """Schema, dims and row count of one block."""
        columns = self.chunks[number >> CHUNK_BITS].columns
        at = number & (CHUNK - 1)
        return (
            self.schemas[int(columns["schema"][at])],
            self.dims[int(columns["dims"][at])],
            int(columns["rows"][at]),
        )

    def live_blocks(self) -> Iterator[tuple[int, int, tuple[int, int], int]]:
        """(number, values needed, (unit, extent), nbytes) of every needed block; for invariants."""
        for key in sorted(self.chunks):
            columns = self.chunks[key].columns
            for at in np.flatnonzero(columns["live"]).tolist():
                place = (int(columns["unit"][at]), int(columns["extent"][at]))
                yield (key << CHUNK_BITS) + at, int(columns["live"][at]), place, int(columns["nbytes"][at])

    def state(self) -> dict[str, object]:
        """Everything that replay must reproduce, as plain values."""
        return {
            "blocks": [
                (n, live, place, nbytes, repr(self.shape_source(n))) for n, live, place, nbytes in self.live_blocks()
            ],
            "extents": {place: (e.writer, e.blocks, e.closed) for place, e in sorted(self.extents.items())},
            "live_bytes": self.live_bytes,
        }
