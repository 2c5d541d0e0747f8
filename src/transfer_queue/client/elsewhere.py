"""Bytes to and from units on other nodes, whose arenas are not to be had here.

The bytes are received straight to where they are used: whole fields become tensors without another copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Container, Generator, Iterator

import numpy as np

from transfer_queue.client.calls import Call
from transfer_queue.errors import ProtocolError, UnitLostError
from transfer_queue.messages import AnyReply, Done, LookupReply, ReadPieces, WriteBytes
from transfer_queue.storage.base import Reserved
from transfer_queue.storage.serving import MOST_COPIED, MOST_PIECES, MOST_WRITTEN, SMALL
from transfer_queue.wire.copies import HUGE, U8, allocate
from transfer_queue.wire.locate import Memory
from transfer_queue.wire.ranges import HERE, Elsewhere, Pieces, elsewhere

AT_ONCE = 256 << 20  # bytes of one request, so that each has its own deadline


Receive = Callable[[Elsewhere, Pieces, U8], Generator[Call, AnyReply, bool]]
"""Brings the pieces of one unit into a buffer; False where they are not there any more."""


def bring(
    reply: LookupReply, units: Container[int], memory: Memory, receive: Receive
) -> Generator[Call, AnyReply, tuple[LookupReply, Memory] | None]:
    """The reply and the memory to gather from, once what lies in these units is here; None: look it up again.

    memory: of all other units. receive: how; `received` from units on other nodes.
    """
    found = elsewhere(reply, units)
    if found is None:
        return reply, memory
    pieces = found.pieces(memory)
    buffer = _buffer(found.nbytes, sum(each.nbytes for each in pieces))
    for each in pieces:
        if not (yield from receive(found, each, buffer)):
            return None
    return found.reply, lambda unit: buffer if unit == HERE else memory(unit)


def send_to(place: Reserved, written: U8) -> Generator[Call, AnyReply, None]:
    """Has the unit of a place, on another node, write these bytes there. UnitLostError where it has taken it back."""
    for begin in range(0, len(written), MOST_WRITTEN):
        piece = written[begin : begin + MOST_WRITTEN].data
        request = WriteBytes(place.slot, place.extent, place.offset + begin, place.unit)
        answer = yield Call(("unit", place.unit), request, payload=piece)
        if not isinstance(answer, Done):
            raise ProtocolError(f"storage unit {place.unit} answered WriteBytes with {type(answer).__name__}")


def _buffer(nbytes: int, wanted: int) -> U8:
    """Memory of this length, of which so much is going to be touched."""
    if nbytes < HUGE or 2 * wanted >= nbytes:
        return allocate(nbytes)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def received(found: Elsewhere, pieces: Pieces, buffer: U8) -> Generator[Call, AnyReply, bool]:
    """Receives the pieces of one unit; False where they are not there any more."""
    mine = found.of(pieces.unit)
    blocks = found.offsets[mine].tobytes(), found.generations[mine].tobytes()
    none = np.empty(0, np.int64)
    parts = [*_parts(pieces), Pieces(pieces.unit, none, none, none)]  # the last asks whether all was as it should be
    for part in parts:
        views = [
            buffer[at : at + length].data for at, length in zip(part.at.tolist(), part.lengths.tolist(), strict=True)
        ]
        request = ReadPieces(pieces.unit, part.starts.tobytes(), part.lengths.tobytes(), *blocks)
        try:
            answer = yield Call(("unit", pieces.unit), request, into=views)
        except UnitLostError:
            return False
        if not isinstance(answer, Done):
            raise ProtocolError(f"storage unit {pieces.unit} answered ReadPieces with {type(answer).__name__}")
        if not answer.value:
            return False
    return True


def _parts(pieces: Pieces) -> Iterator[Pieces]:
    """The same in requests that a unit takes: large pieces are cut, small ones asked for in numbers."""
    starts, lengths, at = pieces.starts, pieces.lengths, pieces.at
    if pieces.nbytes < SMALL * len(starts) or len(starts) > MOST_PIECES:
        limit, most = MOST_COPIED, MOST_PIECES
    else:
        limit, most = AT_ONCE, MOST_PIECES
    first = done = 0  # the piece to go on with, and what was asked for of it
    while first < len(starts):
        left = limit
        begins: list[int] = []
        sizes: list[int] = []
        places: list[int] = []
        while first < len(starts) and left and len(begins) < most:
            size = min(int(lengths[first]) - done, left)
            begins.append(int(starts[first]) + done)
            sizes.append(size)
            places.append(int(at[first]) + done)
            left -= size
            done += size
            if done == lengths[first]:
                first, done = first + 1, 0
        yield Pieces(pieces.unit, *(np.array(column, np.int64) for column in (begins, sizes, places)))
