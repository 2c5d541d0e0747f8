"""Which bytes of which blocks a lookup wants, where blocks do not lie in this node's memory, and where they go.

Such blocks get places in a buffer of the reader's, as if it were the arena of a unit HERE, and the reply is rewritten
to name these; then rows are located as ever. They keep the order in which they lie in their arenas, so that blocks that
are neighbours there are neighbours in the buffer, and come as one piece. Pure numpy on whole columns.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import ProtocolError
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.row_addressing import Memory, located
from transfer_queue.wire.buffers.copies import U8

I8 = NDArray[np.int64]

HERE = -1
"""The unit whose arena is the reader's own buffer."""
ALIGNMENT = 64
NEAR = 4096
"""Pieces with fewer bytes than these between them come as one."""


@dataclass(frozen=True, slots=True)
class RangePieces:
    """Bytes of one unit's arena.

    starts, lengths: there, ascending, not overlapping. at: where they go in the buffer.
    """

    unit: int
    starts: I8
    lengths: I8
    at: I8

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class RemoteRanges:
    """The blocks of a lookup that lie in units elsewhere, in the order of their units and places there.

    reply: the lookup's, naming their places in a buffer of `nbytes` bytes. units, offsets, generations, lengths: where
    each block lies and how long it is; at: where in the buffer; numbers: of each in the reply. All columns are i8.
    """

    reply: LookupReply
    nbytes: int
    units: I8
    offsets: I8
    generations: I8
    lengths: I8
    at: I8
    numbers: I8

    def wanted(self, pieces: Sequence[RangePieces]) -> I8:
        """How many bytes the pieces take of each block."""
        out = np.zeros(len(self.at), np.int64)
        for each in pieces:
            np.add.at(out, np.searchsorted(self.at, each.at, "right") - 1, each.lengths)
        return out

    def of(self, unit: int) -> NDArray[np.bool_]:
        """Which of the blocks lie in this unit."""
        mine: NDArray[np.bool_] = self.units == unit
        return mine

    def pieces(self, memory: Memory) -> list[RangePieces]:
        """What the wanted rows take of the blocks, for each unit. memory: of the other units, for their lengths.

        Raises:
            ProtocolError: as `locate.located`.
        """
        whole: U8 = np.broadcast_to(np.uint8(0), (self.nbytes,))
        starts, ends = [], []
        for rows in located(self.reply, lambda unit: whole if unit == HERE else memory(unit)):
            mine = (rows.units == HERE) & (rows.lengths > 0)
            starts.append(rows.starts[mine])
            ends.append(rows.starts[mine] + rows.lengths[mine])
        return self._joined(np.concatenate(starts), np.concatenate(ends)) if starts else []

    def _joined(self, starts: I8, ends: I8) -> list[RangePieces]:
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
            RangePieces(unit, (at + shifts)[mine], lengths[mine], at[mine])
            for unit in dict.fromkeys(units.tolist())
            for mine in (units == unit,)
        ]


def elsewhere(reply: LookupReply, units: Container[int]) -> RemoteRanges | None:
    """The blocks of a reply that lie in these units; None if there are none.

    Raises:
        ProtocolError: the reply contradicts itself.
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
        raise ProtocolError("a lookup's reply makes no sense: its columns of blocks are not of one length")
    chosen = np.flatnonzero(np.isin(of, wanted))
    chosen = chosen[np.lexsort((offsets[chosen], of[chosen]))]
    if (lengths[chosen] < 0).any():
        raise ProtocolError("a lookup's reply makes no sense: a block of less than no bytes")
    room = np.maximum(1, -(-lengths[chosen] // ALIGNMENT)) * ALIGNMENT
    ends = np.cumsum(room)
    at = ends - room
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
