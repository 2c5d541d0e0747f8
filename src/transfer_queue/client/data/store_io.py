"""How a client writes to and reads from an external store: in a thread where the caller's loop must not stand still.

A block is encoded straight into memory of the store's connection, and what a reader wants comes straight into its
buffer. What the store does not have any more the storage unit is told of, which looks for itself: what is gone is then
known to everybody as lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from transfer_queue.client.checkpoint.block_file import BlockSource, aligned
from transfer_queue.errors import CheckpointError, UnitLostError
from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.system import Topology
from transfer_queue.messages.unit_reports import BlockMissing
from transfer_queue.net.calls import CONTROLLER, Call
from transfer_queue.net.drivers.blocking_driver import exchange
from transfer_queue.net.session import Session
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.protocols import Bytes, Reserved
from transfer_queue.storage.stores.base import DevicePath, Piece, Store, StoreAddress, connect
from transfer_queue.storage.unit.object_pool import key_of, number_of
from transfer_queue.wire.blocks.encode import EncodedBlock
from transfer_queue.wire.blocks.remote_ranges import RangePieces, RemoteRanges
from transfer_queue.wire.buffers.copies import U8
from transfer_queue.wire.buffers.tensors import settle

MOST_READ = 16 << 20  # bytes of what is saved, in one request

_inherited: list[dict[str, Store]] = []  # kept for good


class StoreConnections:
    """The connections of one client, by where their stores are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Store] = {}

    def of(self, unit: UnitInfo, near: StoreAddress | None = None) -> Store:
        """The store of a unit, connected at its first use. StartError where its library cannot be used.

        near: where it is reached from this node, if not as the unit does.
        """
        address = near or msgspec.json.decode(unit.store, type=StoreAddress)
        where = msgspec.json.encode([address.kind, address.options]).decode()
        with self._lock:
            found = self._open.get(where)
            if found is None:
                found = self._open[where] = connect(address)
            return found

    def forked(self) -> None:
        """In a forked child: leaves the parent's connections as they are; what ends one there may crash here."""
        _inherited.append(self._open)
        self._lock, self._open = threading.Lock(), {}

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            found, self._open = list(self._open.values()), {}
        for store in found:
            store.close()


class StoreReads(Protocol):
    """What reads pieces into a buffer of its kind: a `Store`, or on a device."""

    def read(self, pieces: Sequence[Piece], into: Any, within: float) -> list[str]:
        """See `Store.read`."""


def beside(work: Callable[[], None]) -> Call:
    """Has something done that takes a while."""
    return Call(CONTROLLER, Topology(), work=work)


def write(
    store: Store, unit: UnitInfo, encoded: EncodedBlock, reserved: Reserved, within: float
) -> Generator[Call, AnyReply, None]:
    """Writes a block under the name of its extent. CapacityError where there is no room for so many seconds."""
    key = key_of(unit.boot_id, reserved.offset)

    def work() -> None:
        path = store.device_path()
        device = None if path is None else encoded.device(path.kind)
        if path is not None and device is not None and write_from(path, device, key, encoded, within):
            return
        with store.buffer(key, encoded.nbytes) as memory:
            encoded.write_into(memory)
            store.write(key, memory, within)

    if encoded.nbytes:
        yield beside(work)


def write_from(path: DevicePath, device: torch.device, key: str, encoded: EncodedBlock, within: float) -> bool:
    """Puts a block together on a device, and writes it from there; False where it cannot be done there."""
    with path.buffer(device, encoded.nbytes) as memory:
        if memory is None:
            return False
        encoded.write_on(memory)
        settle(device)
        path.write(key, memory, within)
    return True


def read(
    store: StoreReads, unit: UnitInfo, found: RemoteRanges, pieces: RangePieces, buffer: Any, within: float
) -> Generator[Call, AnyReply, bool]:
    """Reads the pieces of one unit; False where they are not there any more."""
    wanted = _by_block(unit, found, pieces)
    missing: list[str] = []
    yield beside(lambda: missing.extend(store.read(wanted, buffer, within)))
    if not missing:
        return True
    with contextlib.suppress(UnitLostError):
        yield _missed(unit, missing)
    return False


def _missed(unit: UnitInfo, keys: list[str]) -> Call:
    """Tells a unit what was not there."""
    extents = np.array([number_of(key) for key in keys], "<i8").tobytes()
    return Call(("unit", unit.unit), BlockMissing(unit.unit, extents))


def _by_block(unit: UnitInfo, found: RemoteRanges, pieces: RangePieces) -> list[Piece]:
    """The same pieces, cut where blocks end: each extent is an object of its own in the store."""
    begins = found.at
    wanted = []
    for at, length in zip(pieces.at.tolist(), pieces.lengths.tolist(), strict=True):
        end = at + length
        block = int(np.searchsorted(begins, at, "right")) - 1
        while at < end:
            stop = min(end, int(begins[block] + found.lengths[block]))
            if stop > at:
                key = key_of(unit.boot_id, int(found.offsets[block]))
                start = int(found.offsets[block]) % GRANULE + at - int(begins[block])
                wanted.append(Piece(key, start, stop - at, at))
            block += 1
            at = int(begins[block]) if block < len(begins) else end
    return wanted


class StoredBlocks(BlockSource):
    """The blocks of a unit in an external store, to be saved. within: seconds for the store to answer."""

    def __init__(self, session: Session, store: Store, unit: UnitInfo, within: float) -> None:
        self._session = session
        self._store = store
        self._unit = unit
        self._within = within

    def pieces(self, offset: np.ndarray, nbytes: np.ndarray) -> Iterator[list[memoryview]]:
        """See `BlockSource.pieces`. Many small blocks are read at once, of large ones some MiB."""
        wanted: list[Piece] = []
        filled = 0
        for start, length, taken in zip(offset.tolist(), nbytes.tolist(), aligned(nbytes).tolist()):
            key, done = key_of(self._unit.boot_id, start), 0
            while done < length:
                some = min(length - done, MOST_READ - filled)
                wanted.append(Piece(key, start % GRANULE + done, some, filled))
                done, filled = done + some, filled + some
                if filled == MOST_READ:
                    yield [self._read(wanted, filled)]
                    wanted, filled = [], 0
            filled += taken - length
            if filled >= MOST_READ:
                yield [self._read(wanted, filled)]
                wanted, filled = [], 0
        if filled:
            yield [self._read(wanted, filled)]

    def _read(self, wanted: list[Piece], nbytes: int) -> memoryview:
        into = np.zeros(nbytes, np.uint8)
        missing = self._store.read(wanted, into, self._within) if wanted else []
        if missing:
            with contextlib.suppress(UnitLostError):
                exchange(self._session, _missed(self._unit, missing))
            raise CheckpointError(
                f"{len(missing)} blocks that were to be saved are gone from the store of storage unit "
                f"{self._unit.unit}; what is gone is told as lost: save again, and it is left out"
            )
        return into.data


class StoreAllocator:
    """Reserved space in an external store, to be filled: what is assigned to slices of it is written once all is there.

    within: seconds for the store to have room.
    """

    def __init__(self, store: Store, unit: UnitInfo, place: Reserved, nbytes: int, within: float) -> None:
        self._store = store
        self._key = key_of(unit.boot_id, place.offset)
        self._within = within
        self._nbytes = self._left = nbytes
        self._memory: U8 | None = None

    def __setitem__(self, piece: slice, values: Bytes) -> None:
        if len(values) < self._nbytes:
            if self._memory is None:
                self._memory = np.empty(self._nbytes, np.uint8)
            self._memory[piece] = values
            self._left -= len(values)
            if self._left:
                return
            values, self._memory = self._memory, None
        with self._store.buffer(self._key, self._nbytes) as memory:
            memory[:] = values
            self._store.write(self._key, memory, self._within)
