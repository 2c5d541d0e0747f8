"""The part of a storage unit that reads and writes for clients on other nodes, which cannot map its arena.

Bytes to read are checked here and sent without a copy. Nothing is locked for the reader: after it has received them, it
asks whether they still belonged to its blocks.
"""

from __future__ import annotations

import numpy as np

from transfer_queue.errors import InvalidArgumentError, ProtocolError, UnitLostError
from transfer_queue.messages.storage import ReadPieces, WriteBytes
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE, LeasedExtent
from transfer_queue.wire.buffers.copies import gather_pieces

MAX_PIECES = 1 << 16  # of one request
SMALL = 16 << 10  # pieces that are smaller than this on average are copied together and sent as one
MAX_WRITTEN = 4 << 20  # bytes that one request may write
MAX_COPIED = 8 << 20  # bytes in small pieces that one request may read: a few milliseconds


def read_pieces(arena: Arena, request: ReadPieces) -> list[memoryview] | None:
    """Return views of the requested bytes, in order; many small ones are copied together.

    Returns None if other blocks are there by now.

    Raises:
        ProtocolError: If the columns are inconsistent or reach beyond the arena.
        InvalidArgumentError: If the request is too large.
    """
    columns = (request.starts, request.lengths, request.offsets, request.generations)
    if any(len(column) % 8 for column in columns):
        raise ProtocolError("each column of a request to read must have a multiple of 8 bytes")
    starts, lengths, offsets, generations = (np.frombuffer(column, "<i8") for column in columns)
    if len(starts) != len(lengths) or len(offsets) != len(generations):
        raise ProtocolError("a request to read has columns of different lengths")
    if len(starts) > MAX_PIECES:
        raise InvalidArgumentError(
            f"a request to read may have at most {MAX_PIECES} pieces, got {len(starts)}; ask in parts"
        )
    for begins, sizes in ((starts, lengths), (offsets, np.ones_like(offsets))):
        # this form of the comparison cannot overflow
        if len(begins) and (begins.min() < 0 or sizes.min() <= 0 or (begins > len(arena.memory) - sizes).any()):
            raise ProtocolError(f"a request to read reaches beyond the arena of {len(arena.memory)} bytes")
    if (arena.generations[offsets // GRANULE] != generations.view("<u8")).any() or _in_holes(arena, starts, lengths):
        return None
    total = int(lengths.sum())
    if len(starts) > 1 and total < SMALL * len(starts):
        if total > MAX_COPIED:
            raise InvalidArgumentError(
                f"a request may read at most {MAX_COPIED} bytes in small pieces, got {total}; ask in parts"
            )
        return [gather_pieces(arena.memory, starts, lengths).data]
    view = arena.memory.data
    return [view[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]


def write_bytes(arena: Arena, extent: LeasedExtent | None, request: WriteBytes, payload: memoryview | None) -> None:
    """Write the payload into this extent, the request's, if its writer still has the slot in the request.

    Raises:
        UnitLostError: If the extent is not leased to the slot any more.
        ProtocolError: If the payload reaches beyond the extent.
    """
    if extent is None or extent.slot != request.slot:
        raise UnitLostError(f"extent {request.extent} is not leased to slot {request.slot} any more; write it again")
    data = payload or b""
    if request.offset < extent.offset or request.offset + len(data) > extent.offset + extent.length:
        raise ProtocolError(f"{len(data)} bytes at {request.offset} are not within extent {request.extent}")
    arena.view(request.offset, len(data))[:] = np.frombuffer(data, np.uint8)


def _in_holes(arena: Arena, starts: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether some of it is in holes or beyond `held`, so that it must not be touched."""
    if not len(starts):
        return False
    first, last = starts // GRANULE, (starts + lengths - 1) // GRANULE
    if int(last.max()) >= arena.held // GRANULE:
        return True
    if not arena.hole_bytes:
        return False
    lowest = int(first.min())
    before = np.concatenate(([0], np.cumsum(arena.holes[lowest : int(last.max()) + 1])))
    return bool((before[last + 1 - lowest] > before[first - lowest]).any())
