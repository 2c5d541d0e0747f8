"""Writes to an external store and reads from it, in a thread if the caller has an event loop.

A block is encoded directly into memory of the store's connection, and a reader receives bytes directly into its buffer.
If the store does not have a block any more, the client reports this to the storage unit, which checks it. The
controller then reports the values as lost. If the unit, on another node, does find the block, it lets the store write
it again, and the client reads again: a block that is still missing after ten seconds is reported as lost, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from transfer_queue.client.checkpoint.block_file import BlockSource, space_of_blocks
from transfer_queue.config.store_options import SIMPLE
from transfer_queue.errors import (
    CapacityError,
    CheckpointError,
    ConnectionLostError,
    TransferQueueError,
    UnitLostError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.reports.store_reports import StoreServerProgress, describe_trouble
from transfer_queue.messages.reports.unit_reports import BlockMissing
from transfer_queue.messages.system import Topology, TopologyReply
from transfer_queue.net.calls import CONTROLLER, Call, Pause, Request, Work
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.session import Session
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.protocols import Bytes, Reserved
from transfer_queue.storage.stores.base import DevicePath, Piece, Store, StoreAddress, connect
from transfer_queue.storage.unit.object_pool import key_of, number_of
from transfer_queue.wire.blocks.encode import EncodedBlock
from transfer_queue.wire.blocks.remote_ranges import RangePieces, RemoteRanges
from transfer_queue.wire.buffers.copies import U8
from transfer_queue.wire.buffers.tensors import synchronize

MAX_READ = 16 << 20
"""The bytes of one request when a checkpoint is saved."""
READS = 10
"""How often a reader reads blocks that it misses and that their unit finds. Then they count as lost."""
RESTART_SECONDS = 0.1
"""The pause between two looks at the servers of a store, and between two writes to servers that have just started."""
REREAD_SECONDS = 0.02
"""The pause before the second of these reads. Each pause is twice as long as the one before: 10 seconds in total."""

_inherited: list[dict[str, Store]] = []
"""Connections of parent processes. They are never closed here, because closing them may crash a forked child."""


class StoreConnections:
    """The connections of one client to external stores, by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Store] = {}

    def store_of(self, unit: UnitInfo, near: StoreAddress | None = None) -> Store:
        """Return the store of a unit, connected at its first use. Raises `StartError` if its library cannot be used.

        Args:
            unit: The unit.
            near: The address of the store for this node. Default: None, the address for the unit.
        """
        address = near or msgspec.json.decode(unit.store, type=StoreAddress)
        where = msgspec.json.encode([address.kind, address.options]).decode()
        with self._lock:
            store = self._open.get(where)
            if store is None:
                store = self._open[where] = connect(address)
            return store

    def after_fork(self) -> None:
        """In a forked child: forget the parent's connections without closing them."""
        _inherited.append(self._open)
        self._lock, self._open = threading.Lock(), {}

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            stores, self._open = list(self._open.values()), {}
        for store in stores:
            store.close()


class StoreReads(Protocol):
    """Reads pieces into a buffer: a `Store`, or an object that reads into the memory of a device."""

    def read(self, pieces: Sequence[Piece], into: Any, within: float) -> list[str]:
        """See `Store.read`."""


def _use_store(unit: UnitInfo, work: Callable[[], None]) -> Generator[Call, AnyReply, None]:
    """Run a function that uses a unit's store. If that cannot be reached, the error says which server of it is down."""
    try:
        yield Work(work)
    except ConnectionLostError as error:
        raise (yield from _with_servers(error, unit)) from error


def _with_servers(error: ConnectionLostError, unit: UnitInfo) -> Generator[Call, AnyReply, ConnectionLostError]:
    """Return an error that also says which servers of a unit's store are down or were restarted."""
    trouble = describe_trouble((yield from _servers()), backend_of(unit))
    return ConnectionLostError(f"{error}; {trouble}") if trouble else error


def _servers() -> Generator[Call, AnyReply, list[StoreServerProgress]]:
    """Return the servers of all external stores; none if the controller cannot be asked."""
    with contextlib.suppress(TransferQueueError):
        reply = yield Request(CONTROLLER, Topology())
        if isinstance(reply, TopologyReply):
            return reply.stores
    return []


def backend_of(unit: UnitInfo) -> str:
    """Return the backend of the blocks of a unit."""
    return msgspec.json.decode(unit.store, type=StoreAddress).kind if unit.store else SIMPLE


def write(
    session: Session,
    store: Store,
    unit: UnitInfo,
    encoded: EncodedBlock,
    reserved: Reserved,
    within: float,
    patience: float,
) -> Generator[Call, AnyReply, None]:
    """Write a block under the name of its extent. If a server of the store is down, wait for it and try again.

    Args:
        session: The client's session.
        store: The store.
        unit: The store's unit.
        encoded: The block.
        reserved: The extent.
        within: The time in seconds in which the store must have space.
        patience: The time in seconds in which the servers of the store must run again.

    Raises:
        CapacityError: The store has no space, and this is not because a server was restarted.
        ConnectionLostError: The store cannot be reached, and the system does not restart it, or not in time.
    """
    key = key_of(unit.boot_id, reserved.offset)
    end = session.clock() + patience

    def work() -> None:
        path = store.device_path()
        device = None if path is None else encoded.device_of_kind(path.kind)
        if path is not None and device is not None and write_from_device(path, device, key, encoded, within):
            return
        with store.buffer(key, encoded.nbytes) as memory:
            encoded.write_into(memory)
            store.write(key, memory, within)

    while encoded.nbytes:
        try:
            yield from _use_store(unit, work)
            return
        except (ConnectionLostError, CapacityError):
            if not (yield from _await_restart(session, unit, end)):
                raise


def _await_restart(session: Session, unit: UnitInfo, end: float) -> Generator[Call, AnyReply, bool]:
    """Wait until no server of a unit's store is down. Returns whether one has just started, before this time.

    The store is not used meanwhile: requests to a server that ends are answered late, and may crash a library.
    """
    backend = backend_of(unit)
    while session.clock() < end:
        servers = [server for server in (yield from _servers()) if server.backend == backend]
        down = not all(server.up for server in servers)
        if not down and not any(server.is_settling for server in servers):
            return False
        yield Pause(RESTART_SECONDS)
        if not down:
            return True
    return False


def write_from_device(path: DevicePath, device: torch.device, key: str, encoded: EncodedBlock, within: float) -> bool:
    """Encode a block on a device and write it from there. Returns whether this was possible."""
    with path.buffer(device, encoded.nbytes) as memory:
        if memory is None:
            return False
        encoded.write_on(memory)
        synchronize(device)
        path.write(key, memory, within)
    return True


def read(
    store: StoreReads,
    unit: UnitInfo,
    ranges: RemoteRanges,
    pieces: RangePieces,
    buffer: Any,
    within: float,
    reads: int = READS,
) -> Generator[Call, AnyReply, bool]:
    """Read the pieces of one unit, see `_read_wanted`. Returns False if the store does not have them any more."""
    return (yield from _read_wanted(store, unit, _by_block(unit, ranges, pieces), buffer, within, reads))


def _read_wanted(
    store: StoreReads, unit: UnitInfo, wanted: list[Piece], buffer: Any, within: float, reads: int = READS
) -> Generator[Call, AnyReply, bool]:
    """Read pieces. Returns False if the store does not have some of them any more.

    The unit may find blocks that this process misses, because a store may answer differently on each node. The unit
    then writes them again, and they are read again, `reads` times in total. What is missing after READS times is lost.
    """
    for turn in range(reads):
        if turn:
            yield Pause(REREAD_SECONDS * 2.0 ** (turn - 1))
        missing: list[str] = []
        yield from _use_store(unit, partial(_collect_missing, store, wanted, buffer, within, missing))
        if not missing:
            return True
        if not (yield from _is_there(unit, missing, turn + 1 == READS)):
            return False
    return False


def _collect_missing(store: StoreReads, wanted: list[Piece], buffer: Any, within: float, missing: list[str]) -> None:
    missing += store.read(wanted, buffer, within)


def _is_there(unit: UnitInfo, missing: list[str], given_up: bool) -> Generator[Call, AnyReply, bool]:
    """Report missing blocks to their unit. Returns whether the unit has found all of them."""
    answer: Any = True
    with contextlib.suppress(UnitLostError):
        extents = np.array([number_of(key) for key in missing], "<i8").tobytes()
        reply = yield Request(("unit", unit.unit), BlockMissing(unit.unit, extents, given_up))
        answer = reply.value if isinstance(reply, Done) else True
    if isinstance(answer, str):
        error = ConnectionLostError(
            f"{len(missing)} blocks cannot be read from the store of storage unit {unit.unit}, and it is not known "
            f"whether they are lost: {answer}; try again"
        )
        raise (yield from _with_servers(error, unit))
    return not answer


def _by_block(unit: UnitInfo, ranges: RemoteRanges, pieces: RangePieces) -> list[Piece]:
    """Divide pieces at the ends of blocks, because each extent is an object of its own in the store."""
    begins = ranges.at
    wanted = []
    for at, length in zip(pieces.at.tolist(), pieces.lengths.tolist(), strict=True):
        end = at + length
        block = int(np.searchsorted(begins, at, "right")) - 1
        while at < end:
            stop = min(end, int(begins[block] + ranges.lengths[block]))
            if stop > at:
                key = key_of(unit.boot_id, int(ranges.offsets[block]))
                start = int(ranges.offsets[block]) % GRANULE + at - int(begins[block])
                wanted.append(Piece(key, start, stop - at, at))
            block += 1
            at = int(begins[block]) if block < len(begins) else end
    return wanted


class StoredBlocks(BlockSource):
    """The blocks of a unit in an external store, for a checkpoint. The store must respond in `within` seconds."""

    def __init__(self, session: Session, store: Store, unit: UnitInfo, within: float) -> None:
        self._session = session
        self._store = store
        self._unit = unit
        self._within = within

    def pieces(self, offset: np.ndarray, nbytes: np.ndarray) -> Iterator[list[memoryview]]:
        """See `BlockSource.pieces`. One request reads many small blocks, or some MiB of a large one."""
        wanted: list[Piece] = []
        filled = 0
        for start, length, taken in zip(offset.tolist(), nbytes.tolist(), space_of_blocks(nbytes).tolist()):
            key, done = key_of(self._unit.boot_id, start), 0
            while done < length:
                some = min(length - done, MAX_READ - filled)
                wanted.append(Piece(key, start % GRANULE + done, some, filled))
                done, filled = done + some, filled + some
                if filled == MAX_READ:
                    yield [self._read(wanted, filled)]
                    wanted, filled = [], 0
            filled += taken - length
            if filled >= MAX_READ:
                yield [self._read(wanted, filled)]
                wanted, filled = [], 0
        if filled:
            yield [self._read(wanted, filled)]

    def _read(self, wanted: list[Piece], nbytes: int) -> memoryview:
        into = np.zeros(nbytes, np.uint8)
        reading = _read_wanted(self._store, self._unit, wanted, into, self._within)
        if wanted and not run_blocking(self._session, reading):
            raise CheckpointError(
                f"blocks of the checkpoint are missing in the store of storage unit {self._unit.unit}; their values "
                f"are reported as lost: save again, which leaves them out"
            )
        return into.data


class StoreAllocator:
    """Reserved space in an external store. Values assigned to its slices are written when all of them are assigned.

    The store must have space within `within` seconds.
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
