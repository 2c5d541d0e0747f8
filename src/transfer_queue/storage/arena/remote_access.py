"""What a storage unit does for clients on other nodes, which cannot map its arena: it reads and writes for them.

Bytes to read are checked here and sent from where they lie. Nothing is held for the reader: it asks after it has got
them whether they still were what it wanted.
"""

from __future__ import annotations

import numpy as np

from transfer_queue.errors import InvalidArgumentError, ProtocolError, UnitLostError
from transfer_queue.messages.storage import ReadPieces, WriteBytes
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE, LeasedExtent
from transfer_queue.wire.buffers.copies import gather_pieces

MOST_PIECES = 1 << 16  # of one request
SMALL = 16 << 10  # pieces of less bytes on average are copied together and sent as one
MOST_WRITTEN = 4 << 20  # bytes of one request to write
MOST_COPIED = 8 << 20  # bytes of these that one request may ask for: a few milliseconds


def read_pieces(arena: Arena, request: ReadPieces) -> list[memoryview] | None:
    """Views of what is wanted, in order, many small ones copied together; None where other blocks lie there by now.

    Raises:
        ProtocolError: columns do not fit together, or reach out of the arena. InvalidArgumentError: too much at once.
    """
    columns = (request.starts, request.lengths, request.offsets, request.generations)
    if any(len(column) % 8 for column in columns):
        raise ProtocolError("a request to read has a column that is none of whole numbers of 8 bytes")
    starts, lengths, offsets, generations = (np.frombuffer(column, "<i8") for column in columns)
    if len(starts) != len(lengths) or len(offsets) != len(generations):
        raise ProtocolError("a request to read has columns of different lengths")
    if len(starts) > MOST_PIECES:
        raise InvalidArgumentError(f"{len(starts)} pieces in one request, most are {MOST_PIECES}; ask in parts")
    for begins, sizes in ((starts, lengths), (offsets, np.ones_like(offsets))):
        # compared so that no sum can wrap around
        if len(begins) and (begins.min() < 0 or sizes.min() <= 0 or (begins > len(arena.memory) - sizes).any()):
            raise ProtocolError(f"a request to read reaches out of the arena of {len(arena.memory)} bytes")
    if (arena.generations[offsets // GRANULE] != generations.view("<u8")).any() or _in_holes(arena, starts, lengths):
        return None
    total = int(lengths.sum())
    if len(starts) > 1 and total < SMALL * len(starts):
        if total > MOST_COPIED:
            raise InvalidArgumentError(
                f"{total} bytes in pieces as small as these, most are {MOST_COPIED}; ask in parts"
            )
        return [gather_pieces(arena.memory, starts, lengths).data]
    view = arena.memory.data
    return [view[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]


def write_bytes(arena: Arena, extent: LeasedExtent | None, request: WriteBytes, payload: memoryview | None) -> None:
    """Writes the payload into this extent: the request's, if its writer still has the slot that it names.

    Raises:
        UnitLostError: the extent is not leased to the slot any more. ProtocolError: it goes beyond the extent.
    """
    if extent is None or extent.slot != request.slot:
        raise UnitLostError(f"extent {request.extent} is not leased to slot {request.slot} any more; write it anew")
    data = payload or b""
    if request.offset < extent.offset or request.offset + len(data) > extent.offset + extent.length:
        raise ProtocolError(f"{len(data)} bytes at {request.offset} are not within extent {request.extent}")
    arena.view(request.offset, len(data))[:] = np.frombuffer(data, np.uint8)


def _in_holes(arena: Arena, starts: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether some of it was given back to the file system, or never came from it: it cannot be touched safely."""
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
