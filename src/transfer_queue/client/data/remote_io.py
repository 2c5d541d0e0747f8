"""Reads from units on other nodes, whose arenas this process cannot map, and writes to them.

Bytes are received directly into the memory in which they are used: entire fields become tensors without another copy.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from transfer_queue.client.data.extent_allocator import REPLY_SECONDS
from transfer_queue.errors import ProtocolError, TransferQueueError, UnitLostError, WaitTimeoutError
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.queries import LookupReply
from transfer_queue.messages.storage import CacheBlocks, CachedBlocksReply, ReadPieces, WriteBytes
from transfer_queue.net.calls import Call, Outcome, Pause, Request, Together, Work, replies_of
from transfer_queue.storage.arena.remote_access import MAX_COPIED, MAX_PIECES, MAX_WRITTEN, SMALL
from transfer_queue.storage.protocols import Reserved
from transfer_queue.wire.blocks.remote_ranges import HERE, RangePieces, RemoteRanges, find_remote
from transfer_queue.wire.blocks.row_addressing import Memory
from transfer_queue.wire.buffers.copies import HUGE, U8, allocate

MIN_KEPT = 64 << 10
"""Bytes from which a unit of this node copies a block for all readers of the node."""
_PLACE = (("unit", "<i4"), ("offset", "<i8"), ("generation", "<i8"))
SLOWEST = 4 << 20
"""Bytes a second of the slowest connection to a unit that is taken for a working one."""
AT_ONCE = 256 << 20
"""Bytes of all requests made at once. Each request has its own deadline."""
MIN_AT_ONCE = 16 << 20
"""The least bytes of each of these requests."""


Receive = Callable[[RemoteRanges, RangePieces, U8, int], Generator[Call, AnyReply, bool]]
"""Reads the pieces of one unit into a buffer, in requests of at most this number of bytes.

Returns False if the unit does not have them any more."""


def fetch_remote(
    reply: LookupReply,
    units: Mapping[int, str],
    keepers: Sequence[int],
    memory: Memory,
    receive: Receive,
    reads: Streams,
) -> Generator[Call, AnyReply, tuple[LookupReply, Memory] | None]:
    """Read the blocks of a lookup that are outside this node's memory.

    Args:
        reply: The reply of the lookup.
        units: Unit outside this node's memory -> "host:port"; "" for a unit with an external store.
        keepers: The units of this node, which may have copies, or copy blocks for all readers of the node.
        memory: The arenas of the other units.
        receive: Reads the pieces of one unit; `receive_pieces` for units on other nodes.
        reads: The streams of reads.

    Returns:
        The rewritten reply and the memory to gather from; None if the values must be looked up again.
    """
    ranges = find_remote(reply, units)
    if ranges is None:
        return reply, memory
    pieces = ranges.pieces(memory)
    if keepers:
        kept = yield from _use_cached(reply, ranges, pieces, units, keepers)
        if kept is not reply:
            return (yield from fetch_remote(kept, units, (), memory, receive, reads))
    sizes = {each.unit: each.nbytes for each in pieces}
    buffer = _buffer(ranges.nbytes, sum(sizes.values()))
    numbers = reads.numbers({unit: nbytes for unit, nbytes in sizes.items() if units[unit]})
    parts = [part for each in pieces for part in each.divide(numbers.get(each.unit, 1))]
    most, begun = max(AT_ONCE // len(parts), MIN_AT_ONCE) if parts else AT_ONCE, reads.clock()
    if not (yield from in_parallel([receive(ranges, part, buffer, most) for part in parts])):
        return None
    for unit, number in numbers.items():
        reads.note(unit, number, sizes[unit], reads.clock() - begun)
    return ranges.reply, lambda unit: buffer if unit == HERE else memory(unit)


def in_parallel(operations: Sequence[Generator[Call, AnyReply, bool]]) -> Generator[Call, AnyReply, bool]:
    """Run several operations at once, and return whether all of them return True.

    The calls that they yield at the same time are made in parallel. Ends with the first one that returns False or
    fails.
    """
    if len(operations) == 1:
        return (yield from operations[0])
    steps: list[tuple[Generator[Call, AnyReply, bool], Callable[[], Any]]]
    steps = [(each, partial(next, each)) for each in operations]
    while steps:
        pending: list[tuple[Generator[Call, AnyReply, bool], Request | Work | Pause]] = []
        for operation, step in steps:
            try:
                pending.append((operation, step()))
            except StopIteration as stop:
                if not stop.value:
                    return False
        if pending:
            yield Together([call for _, call in pending])
        steps = [(operation, _answer(operation, call.outcome)) for operation, call in pending]
    return True


def _answer(operation: Generator[Call, AnyReply, bool], outcome: Outcome | None) -> Callable[[], Call]:
    """Return the function that passes the outcome of its call to an operation."""
    if isinstance(outcome, TransferQueueError):
        return partial(operation.throw, outcome)
    assert outcome is not None
    return partial(operation.send, outcome)


def _use_cached(
    reply: LookupReply,
    ranges: RemoteRanges,
    pieces: Sequence[RangePieces],
    units: Mapping[int, str],
    keepers: Sequence[int],
) -> Generator[Call, AnyReply, LookupReply]:
    """Return the reply with the locations of copies on this node.

    Only for blocks of which at least half is needed does the function ask the keepers.
    """
    wanted = (2 * ranges.needed_bytes(pieces) >= ranges.lengths) & (ranges.lengths >= MIN_KEPT)
    wanted &= np.isin(ranges.units, [unit for unit, address in units.items() if address])
    if not wanted.any():
        return reply
    blocks = reply.blocks
    columns = {name: np.frombuffer(getattr(blocks, name), kind).copy() for name, kind in _PLACE}
    by = np.array(keepers)[ranges.units % len(keepers)]
    changed = False
    requests: list[tuple[np.ndarray, Request]] = []
    for keeper in dict.fromkeys(by[wanted].tolist()):
        chosen = wanted & (by == keeper)
        remotes = {unit: units[unit] for unit in set(ranges.units[chosen].tolist())}
        request = CacheBlocks(
            ranges.units[chosen].tobytes(), ranges.offsets[chosen].tobytes(), ranges.generations[chosen].tobytes(),
            ranges.lengths[chosen].tobytes(), remotes,
        )  # fmt: skip
        requests.append((chosen, Request(("unit", keeper), request)))
    replies = yield from replies_of([call for _, call in requests])
    for (chosen, call), answer in zip(requests, replies, strict=True):
        _, keeper = call.target
        if not isinstance(answer, CachedBlocksReply):
            raise ProtocolError(f"storage unit {keeper} replied to CacheBlocks with {type(answer).__name__}")
        offsets, generations = np.frombuffer(answer.offsets, "<i8"), np.frombuffer(answer.generations, "<i8")
        here = offsets >= 0
        numbers = ranges.numbers[chosen][here]
        columns["unit"][numbers] = keeper
        columns["offset"][numbers], columns["generation"][numbers] = offsets[here], generations[here]
        changed |= bool(here.any())
    if not changed:
        return reply
    moved = {name: column.tobytes() for name, column in columns.items()}
    return msgspec.structs.replace(reply, blocks=msgspec.structs.replace(blocks, **moved))


class UnitSilentError(WaitTimeoutError):
    """A unit on another node did not reply to a write, which can be made in another unit."""


def write_remote(
    place: Reserved, written: U8, replaceable: bool = False, streams: int = 1
) -> Generator[Call, AnyReply, bool]:
    """Send bytes to a unit on another node, which writes them to the reserved place.

    Args:
        place: The reserved place.
        written: The bytes.
        replaceable: Whether another unit can be used if this one does not reply in time.
        streams: The number of such writes that share the connection to the unit's node.

    Returns:
        True, as `in_parallel` expects.

    Raises:
        UnitLostError: The unit has taken the space back.
        UnitSilentError: The unit has not replied in time, and is replaceable.
    """
    for begin in range(0, len(written), MAX_WRITTEN):
        piece = written[begin : begin + MAX_WRITTEN].data
        request = WriteBytes(place.slot, place.extent, place.offset + begin, place.unit)
        within = REPLY_SECONDS + streams * len(piece) / SLOWEST if replaceable else None
        try:
            answer = yield Request(("unit", place.unit), request, within=within, payload=piece)
        except WaitTimeoutError as error:
            if not replaceable:
                raise
            raise UnitSilentError(str(error)) from error
        if not isinstance(answer, Done):
            raise ProtocolError(f"storage unit {place.unit} replied to WriteBytes with {type(answer).__name__}")
    return True


def _buffer(nbytes: int, wanted: int) -> U8:
    """Return memory of this length, of which `wanted` bytes will be written."""
    if nbytes < HUGE or 2 * wanted >= nbytes:
        return allocate(nbytes)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def receive_pieces(ranges: RemoteRanges, pieces: RangePieces, buffer: U8, most: int) -> Generator[Call, AnyReply, bool]:
    """Receive the pieces of one unit, see `Receive`."""
    in_unit = ranges.is_in_unit(pieces.unit)
    blocks = ranges.offsets[in_unit].tobytes(), ranges.generations[in_unit].tobytes()
    none = np.empty(0, np.int64)
    last = RangePieces(pieces.unit, none, none, none)  # checks the generations after the bytes have arrived
    parts = [*_parts(pieces, most), last]
    for part in parts:
        views = [
            buffer[at : at + length].data for at, length in zip(part.at.tolist(), part.lengths.tolist(), strict=True)
        ]
        request = ReadPieces(pieces.unit, part.starts.tobytes(), part.lengths.tobytes(), *blocks)
        try:
            answer = yield Request(("unit", pieces.unit), request, into=views)
        except UnitLostError:
            return False
        if not isinstance(answer, Done):
            raise ProtocolError(f"storage unit {pieces.unit} replied to ReadPieces with {type(answer).__name__}")
        if not answer.value:
            return False
    return True


def _parts(pieces: RangePieces, at_once: int) -> Iterator[RangePieces]:
    """Divide the pieces into requests of at most `at_once` bytes. A request has many small pieces, or a part of one."""
    starts, lengths, at = pieces.starts, pieces.lengths, pieces.at
    limit = MAX_COPIED if pieces.nbytes < SMALL * len(starts) or len(starts) > MAX_PIECES else at_once
    first = done = 0  # the piece to continue with, and the bytes of it in earlier requests
    while first < len(starts):
        left = limit
        taken: list[tuple[int, int, int]] = []
        while first < len(starts) and left and len(taken) < MAX_PIECES:
            size = min(int(lengths[first]) - done, left)
            taken.append((int(starts[first]) + done, size, int(at[first]) + done))
            left -= size
            done += size
            if done == lengths[first]:
                first, done = first + 1, 0
        yield RangePieces(pieces.unit, *np.array(taken, np.int64).T)


# ---------------------------------------------------------------- streams
# Large transfers with a unit use several connections at once, each with an equal part of the bytes, if that is faster.
# Some networks limit the rate of each connection.

MIN_STREAM = 8 << 20
"""The least bytes of each stream of a transfer."""
FIRST_STREAMS = 1
"""The number of streams of the first transfer."""
GAIN = 1.15
"""How many times as fast twice the number of streams must be."""
TRANSFERS = 3
"""Transfers that are compared. The fastest of them counts, because others are slowed down by what else runs."""
REST = 32
"""Times this number of transfers until other numbers are tried again."""


class Streams:
    """The number of streams to each unit, for transfers in one direction.

    Args:
        most: The largest number of all streams of a transfer.
        clock: Returns the time in seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self.clock = clock
        self._counts: defaultdict[int, StreamCount] = defaultdict(partial(StreamCount, most))

    def numbers(self, sizes: Mapping[int, int]) -> dict[int, int]:
        """Return the number of streams to each unit for transfers at the same time of these numbers of bytes."""
        most = self._most // max(1, len(sizes))
        return {
            unit: max(1, min(most, self._counts[unit].number, nbytes // MIN_STREAM)) for unit, nbytes in sizes.items()
        }

    def note(self, unit: int, number: int, nbytes: int, seconds: float) -> None:
        """Learn from a transfer that had this number of streams."""
        if nbytes >= 2 * MIN_STREAM and seconds > 0:
            self._counts[unit].note(number, nbytes / seconds)


class StreamCount:
    """The number of streams that is the fastest. It tries twice the number, and at times half of it.

    Threads may use it at the same time; they then lose a transfer of those that are compared.

    Args:
        most: The largest number.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.number = self._kept = min(FIRST_STREAMS, most)
        """The number for the next transfer: the kept one, which is the fastest, or the one that is tried."""
        self._rate = 0.0
        """The rate of the kept number."""
        self._fastest, self._noted = 0.0, 0
        """The best rate of the present number in the last transfers, and how many these are."""
        self._rest = 0
        self._grows = True
        """Whether the next number to try is twice the kept one, not half of it."""

    def note(self, number: int, rate: float) -> None:
        """Learn the rate of a transfer with this number of streams, which is ignored if it is not the present one."""
        if number != self.number or self._most == 1:
            return
        self._fastest, self._noted = max(self._fastest, rate), self._noted + 1
        if self._noted < TRANSFERS:
            return
        rate, self._fastest, self._noted = self._fastest, 0.0, 0
        if number == self._kept:
            self._rate = rate
            self._rest -= 1
        elif rate >= self._rate * (GAIN if self._grows else 1 / GAIN):
            self._kept, self._rate = number, rate
        else:
            self._reverse()
        if self._rest <= 0:
            self.number = self._kept * 2 if self._grows else self._kept // 2
            if not 1 <= self.number <= self._most:
                self._reverse()

    def _reverse(self) -> None:
        self.number, self._grows, self._rest = self._kept, not self._grows, REST
