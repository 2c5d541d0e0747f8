"""Finds the live rows of sparse blocks, and makes the messages in which blocks are sent to units.

`core.units.migration_planner` uses both.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from transfer_queue.core.tables.rows import Chunk
from transfer_queue.messages.descriptors import Blocks, NewBlock

_Hits = tuple[np.ndarray, np.ndarray, np.ndarray, int]


class SparseBlock(NamedTuple):
    """A block of which only some rows are alive."""

    number: int
    rows: np.ndarray
    """The global indexes of the live rows, i8."""
    slots: np.ndarray
    """The positions of the live rows in the block, i4, ascending. Rows that share a value have the same position."""
    fields: list[str]
    """The fields that live rows have in the block."""

    @property
    def copied(self) -> np.ndarray:
        """The positions in the block that are copied, i4: each of `slots` once."""
        return np.unique(self.slots)

    def entered_in(self, made: NewBlock) -> NewBlock:
        """Return the block that contains the copies, with the slot of each live row if rows share values."""
        copied = self.copied
        if len(copied) == len(self.slots):
            return made
        return msgspec.structs.replace(made, slots=np.searchsorted(copied, self.slots).astype("<i4").tobytes())


class SparseRows:
    """Searches the rows of some blocks. numbers: the numbers of the blocks, ascending."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers
        self._fields: dict[str, int] = {}
        """The fields that were found, with their numbers in `_Hits`."""
        self._found: dict[str, list[_Hits]] = {}

    @property
    def partitions(self) -> list[str]:
        """The names of the partitions that have such rows, in the order of the search."""
        return list(self._found)

    def scan_chunk(self, partition: str, chunk: Chunk) -> None:
        """Note which rows of a chunk are in these blocks."""
        low, high = int(self.numbers[0]), int(self.numbers[-1])
        for name, (column, slots) in chunk.field.items():
            at = np.flatnonzero((column >= low) & (column <= high))
            if not len(at):
                continue
            which = np.searchsorted(self.numbers, column[at])
            hit = self.numbers[which] == column[at]
            if not hit.any():
                continue
            at = at[hit]
            hits = (which[hit], slots[at], chunk.index[at], self._fields.setdefault(name, len(self._fields)))
            self._found.setdefault(partition, []).append(hits)

    def sparse_blocks(self, partition: str) -> list[SparseBlock]:
        """Return the blocks of a partition that have live rows, ascending."""
        found = self._found[partition]
        which, slots, rows = (np.concatenate([hits[k] for hits in found]) for k in (0, 1, 2))
        fields = np.concatenate([np.full(len(hits[0]), hits[3]) for hits in found])
        order = np.lexsort((rows, slots, which))
        which, slots, rows, fields = which[order], slots[order], rows[order], fields[order]
        names = list(self._fields)
        edges = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), len(which)]
        out = []
        for a, b in pairwise(edges):
            first = np.ones(b - a, bool)
            first[1:] = (slots[a + 1 : b] != slots[a : b - 1]) | (rows[a + 1 : b] != rows[a : b - 1])
            found_fields = [names[k] for k in sorted(set(fields[a:b].tolist()))]
            number = int(self.numbers[which[a]])
            found_rows, found_slots = rows[a:b][first].astype("i8"), slots[a:b][first].astype("i4")
            out.append(SparseBlock(number, found_rows, found_slots, found_fields))
        return out


def split_into_runs(nbytes: np.ndarray, most_bytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide entries into runs of at most `most_bytes` bytes and `most` entries each, but at least one entry."""
    start, total = 0, 0.0
    for at, size in enumerate(nbytes.tolist()):
        if at > start and (total + size > most_bytes or at - start == most):
            yield start, at
            start, total = at, 0.0
        total += size
    if start < len(nbytes):
        yield start, len(nbytes)


def blocks_message(blocks: list[NewBlock]) -> Blocks:
    """Return the message that describes blocks which no row needs yet."""
    kinds = (("unit", "<i4"), ("offset", "<i8"), ("generation", "<i8"), ("nbytes", "<i8"), ("rows", "<i4"))
    columns = {name: np.array([getattr(block, name) for block in blocks], kind).tobytes() for name, kind in kinds}
    count = np.arange(len(blocks), dtype="<i4").tobytes()
    return Blocks(
        **columns,
        schema=count,
        dims=count,
        schemas=[list(block.schema) for block in blocks],
        dims_values=[block.dims for block in blocks],
    )
