"""Computes which bytes of blocks outside this node's memory a lookup needs, and their places in a buffer.

Such blocks get places in a buffer of the reader, which counts as the arena of a unit HERE. The reply is rewritten to
name these places, and rows are then located as usual. The blocks keep the order of their arenas, so that blocks that
are neighbours there are neighbours in the buffer and are fetched as one piece. The functions use numpy on entire
columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import ProtocolError
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.row_addressing import Memory, locate_rows
from transfer_queue.wire.buffers.copies import U8

I8 = NDArray[np.int64]

HERE = -1
"""The number of the unit whose arena is the reader's own buffer."""
ALIGNMENT = 64
NEAR = 4096
"""Pieces with at most this number of bytes between them are fetched as one."""


@dataclass(frozen=True, slots=True)
class RangePieces:
    """Pieces of the arena of one unit."""

    unit: int
    starts: I8
    """The start of each piece in the arena, ascending. Pieces do not overlap."""
    lengths: I8
    """The length of each piece in bytes."""
    at: I8
    """The start of each piece in the buffer."""

    @property
    def nbytes(self) -> int:
        """The length of all pieces in bytes."""
        return int(self.lengths.sum())

    def divide(self, count: int) -> list[RangePieces]:
        """Return `count` parts of about the same number of bytes. A piece at a border is cut."""
        if count == 1:
            return [self]
        ends = np.cumsum(self.lengths)
        bounds = [self.nbytes * part // count for part in range(count + 1)]
        return [self._between(ends, *bound) for bound in itertools.pairwise(bounds)]

    def _between(self, ends: I8, begin: int, end: int) -> RangePieces:
        """Return the bytes from `begin` to `end` of all pieces, which end at these bytes."""
        taken = slice(int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(ends, end)) + 1)
        before = ends[taken] - self.lengths[taken]
        skipped = np.maximum(begin - before, 0)
        lengths = np.minimum(ends[taken], end) - before - skipped
        return RangePieces(self.unit, self.starts[taken] + skipped, lengths, self.at[taken] + skipped)


@dataclass(frozen=True, slots=True)
class RemoteRanges:
    """The blocks of a lookup outside this node's memory, in the order of their units and offsets there."""

    reply: LookupReply
    """The reply of the lookup, rewritten to name their places in the buffer."""
    nbytes: int
    """The length of the buffer in bytes."""
    units: I8
    offsets: I8
    generations: I8
    lengths: I8
    """The length of each block in bytes."""
    at: I8
    """The start of each block in the buffer."""
    numbers: I8
    """The position of each block in the reply."""

    def needed_bytes(self, pieces: Sequence[RangePieces]) -> I8:
        """Return the number of bytes of each block that are in the pieces."""
        out = np.zeros(len(self.at), np.int64)
        for each in pieces:
            np.add.at(out, np.searchsorted(self.at, each.at, "right") - 1, each.lengths)
        return out

    def is_in_unit(self, unit: int) -> NDArray[np.bool_]:
        """Return which of the blocks are in this unit."""
        in_unit: NDArray[np.bool_] = self.units == unit
        return in_unit

    def pieces(self, memory: Memory) -> list[RangePieces]:
        """Return the pieces of the blocks that the requested rows need, for each unit.

        Args:
            memory: The arenas of the other units, of which only the lengths are used.

        Raises:
            ProtocolError: See `row_addressing.locate_rows`.
        """
        whole: U8 = np.broadcast_to(np.uint8(0), (self.nbytes,))
        starts, ends = [], []
        for rows in locate_rows(self.reply, lambda unit: whole if unit == HERE else memory(unit)).values():
            units, firsts, lengths = rows.pieces()
            chosen = (units == HERE) & (lengths > 0)
            starts.append(firsts[chosen])
            ends.append(firsts[chosen] + lengths[chosen])
        return self._join(np.concatenate(starts), np.concatenate(ends)) if starts else []

    def _join(self, starts: I8, ends: I8) -> list[RangePieces]:
        if not len(starts):
            return []
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        block = np.searchsorted(self.at, starts, "right") - 1
        shifts, units = (self.offsets - self.at)[block], self.units[block]
        first = np.ones(len(starts), np.bool_)
        first[1:] = (starts[1:] > ends[:-1] + NEAR) | (shifts[1:] != shifts[:-1]) | (units[1:] != units[:-1])
        begins = np.flatnonzero(first)
        lasts = np.append(begins[1:], len(starts)) - 1
        at, lengths = starts[begins], ends[lasts] - starts[begins]
        shifts, units = shifts[begins], units[begins]
        return [
            RangePieces(unit, (at + shifts)[chosen], lengths[chosen], at[chosen])
            for unit in dict.fromkeys(units.tolist())
            for chosen in (units == unit,)
        ]


def find_remote(reply: LookupReply, units: Container[int]) -> RemoteRanges | None:
    """Return the blocks of a reply that are in these units; None if there are none.

    Raises:
        ProtocolError: The reply is not consistent.
    """
    blocks = reply.blocks
    of = np.frombuffer(blocks.unit, "<i4")
    wanted = [unit for unit in set(of.tolist()) if unit in units]
    if not wanted:
        return None
    offsets, generations, lengths = (
        np.frombuffer(column, "<i8") for column in (blocks.offset, blocks.generation, blocks.nbytes)
    )
    if not len(of) == len(offsets) == len(generations) == len(lengths):
        raise ProtocolError("the reply of a lookup is not valid: its columns of blocks differ in length")
    chosen = np.flatnonzero(np.isin(of, wanted))
    chosen = chosen[np.lexsort((offsets[chosen], of[chosen]))]
    if (lengths[chosen] < 0).any():
        raise ProtocolError("the reply of a lookup is not valid: a block has a negative length")
    padded = np.maximum(1, -(-lengths[chosen] // ALIGNMENT)) * ALIGNMENT
    ends = np.cumsum(padded)
    at = ends - padded
    new_units, new_offsets = of.copy(), offsets.copy()
    new_units[chosen], new_offsets[chosen] = HERE, at
    moved = msgspec.structs.replace(blocks, unit=new_units.tobytes(), offset=new_offsets.tobytes())
    return RemoteRanges(
        msgspec.structs.replace(reply, blocks=moved),
        int(ends[-1]),
        of[chosen].astype(np.int64),
        offsets[chosen],
        generations[chosen],
        lengths[chosen],
        at,
        chosen,
    )
