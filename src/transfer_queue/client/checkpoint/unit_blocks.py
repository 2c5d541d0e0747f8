"""The blocks of storage units, as checkpoints read and write them.

Units of other nodes are read and written in pieces, each with a blocking round trip. Saves and loads of checkpoints use
it in a thread that may block. They read entire arenas, which must not be in memory at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transfer_queue.client.checkpoint.block_file import BlockSource, Mapped, join_neighbors
from transfer_queue.client.data.store_io import StoreAllocator, StoredBlocks
from transfer_queue.client.units import Units
from transfer_queue.errors import CheckpointError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.checkpoints import FetchState, SendState
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.storage import ReadPieces, WriteBytes
from transfer_queue.net.calls import CONTROLLER, Request
from transfer_queue.net.drivers.blocking_driver import exchange
from transfer_queue.net.session import Session
from transfer_queue.private_files import no_link
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.remote_access import MAX_WRITTEN
from transfer_queue.storage.protocols import Bytes, Reserved

MAX_READ = 16 << 20
"""The bytes of one round trip."""


class UnitBlocks:
    """Reads and writes the blocks of all units for checkpoints.

    Args:
        units: The units.
        session: The session of the client.
    """

    def __init__(self, units: Units, session: Session) -> None:
        self._units = units
        self._session = session

    def source(self, unit: int) -> BlockSource:
        """Return the blocks of a unit. Blocks outside this node are read in blocking round trips."""
        external = self._units.external_store(unit)
        if external is not None:
            return StoredBlocks(self._session, *external, self._units.settings.call_timeout)
        if unit in self._units.remote:
            return RemoteArena(self._session, unit)
        return Mapped(self._units.memory(unit))

    def reserved_space(self, place: Reserved, nbytes: int, within: float) -> Any:
        """Return reserved space, to whose slices bytes can be assigned; outside this node with blocking round trips.

        `within` is the time in seconds in which an external store must have space.
        """
        external = self._units.external_store(place.unit)
        if external is not None:
            return StoreAllocator(*external, place, nbytes, within)
        if place.session:
            return RemoteAllocator(self._session, place)
        return self._units.arena(place.unit).view(place.offset, nbytes)

    def has_stale_blocks(self, unit: int, offsets: np.ndarray[Any, Any], generations: np.ndarray[Any, Any]) -> bool:
        """Whether a unit does not have some block any more. For a unit on another node, this takes a round trip."""
        if self._units.external_store(unit) is not None:
            return False  # a name always means the same block
        if unit in self._units.remote:
            return not RemoteArena(self._session, unit).is_unchanged(offsets, generations)
        current = self._units.arena(unit).generations[offsets // GRANULE]
        return bool((current != generations.view("<u8")).any())


class RemoteArena(BlockSource):
    """The arena of a unit on another node, for a checkpoint."""

    def __init__(self, session: Session, unit: int) -> None:
        self._session = session
        self._unit = unit

    def pieces(self, offset: np.ndarray, nbytes: np.ndarray) -> Iterator[list[memoryview]]:
        """See `BlockSource.pieces`."""
        for start, length in zip(*join_neighbors(offset, nbytes)):
            for begin in range(0, length, MAX_READ):
                yield [self._fetch(start + begin, min(MAX_READ, length - begin))]

    def _fetch(self, start: int, length: int) -> memoryview:
        into = memoryview(bytearray(length))
        where, many = (np.array([value], "<i8").tobytes() for value in (start, length))
        request = ReadPieces(self._unit, where, many, b"", b"")
        reply = exchange(self._session, Request(("unit", self._unit), request, into=[into]))
        if not _is_done(reply):
            raise CheckpointError(f"samples of the checkpoint are missing in storage unit {self._unit}; save again")
        return into

    def is_unchanged(self, offsets: np.ndarray, generations: np.ndarray) -> bool:
        """Whether the unit still has all these blocks."""
        where, known = (np.ascontiguousarray(column, "<i8").tobytes() for column in (offsets, generations))
        request = ReadPieces(self._unit, b"", b"", where, known)
        return _is_done(exchange(self._session, Request(("unit", self._unit), request)))


class RemoteAllocator:
    """Reserved space in a unit on another node. Values assigned to its slices are sent to the unit."""

    def __init__(self, session: Session, place: Reserved) -> None:
        self._session = session
        self._place = place

    def __setitem__(self, piece: slice, values: Bytes) -> None:
        place = self._place
        for begin in range(0, len(values), MAX_WRITTEN):
            data = np.ascontiguousarray(values[begin : begin + MAX_WRITTEN]).data
            request = WriteBytes(place.slot, place.extent, place.offset + piece.start + begin, place.unit)
            exchange(self._session, Request(("unit", place.unit), request, payload=data))


def fetch_state(session: Session, name: str, path: Path) -> None:
    """Copy a state file of the controller's node to `path`. Raises `FileNotFoundError` if it does not exist."""
    with open(path, "wb", opener=no_link) as file:
        while True:
            reply = exchange(session, Request(CONTROLLER, FetchState(name, file.tell(), 0)))
            left = reply.value if isinstance(reply, Done) else None
            if left is None:
                raise FileNotFoundError(2, "the controller has removed it", name)
            if not left:
                return
            into = memoryview(bytearray(min(left, MAX_WRITTEN)))
            exchange(session, Request(CONTROLLER, FetchState(name, file.tell(), len(into)), into=[into]))
            file.write(into)


def send_state(session: Session, path: Path, name: str) -> None:
    """Copy a state file of this node to the controller's node."""
    with open(path, "rb") as file:
        while True:
            start = file.tell()
            data = file.read(MAX_WRITTEN)
            if not data:
                return
            exchange(session, Request(CONTROLLER, SendState(name, start), payload=memoryview(data)))


def remove_sent(session: Session, name: str) -> None:
    """Remove the file that `send_state` has sent."""
    with contextlib.suppress(TransferQueueError):  # otherwise the end of the system removes it
        exchange(session, Request(CONTROLLER, SendState(name, -1)))


def _is_done(reply: AnyReply) -> bool:
    return isinstance(reply, Done) and bool(reply.value)
