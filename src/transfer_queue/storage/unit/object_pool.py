"""The extent pool of an external store: each extent is the name of one block in the store.

    header    JSON (`ObjectPoolHeader`); written last
    extents   a page of numbers, then one entry for each extent, in any order

An extent's offset is only a name, too: its number times GRANULE. Numbers are never used again, so a name always stands
for the same block. So generations need not be compared: a block that does not exist any more was freed or is lost. The
file is valid between any two stores, as that of an arena (`storage.arena.extent_file`). A freed extent stays in it,
without a slot, until the store has removed its block, so that no block is left over if the unit is killed meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from transfer_queue.errors import AttachError, ProtocolError, TransferQueueError
from transfer_queue.messages.descriptors import STORE
from transfer_queue.messages.reports.unit_reports import BlockMissing, BlocksMovedReport, Move
from transfer_queue.messages.storage import ReadPieces, UnitStatusReply, WriteBytes
from transfer_queue.storage.arena.block_copier import MOVER_SLOT, Brought, Lease
from transfer_queue.storage.arena.extent_file import ENTRY_BYTES, HEAD_BYTES, NUMBER, SLOT, MappedExtents
from transfer_queue.storage.arena.extent_table import GRANULE, LeasedExtent, LeasedExtents
from transfer_queue.storage.stores.base import Store
from transfer_queue.storage.unit.extent_pool import ExtentPool, Looked
from transfer_queue.storage.unit.unit_effects import Begin, Effect

MAGIC = "transfer_queue names"
VERSION = 1
UNLIMITED = 1 << 62
ALIGNMENT = 64
MAX_REMOVED = 512  # names in one request
RETRY_SECONDS = 1.0  # between two attempts to remove blocks
REWRITE_SECONDS = 1.0  # between two times that a block is written again
LIFE_SECONDS = 0.5  # between two checks whether the store is still the same

_WHEN = "%Y-%m-%d %H:%M:%S"
_GROWTH = 4096  # entries
_REMOVING = 0  # stored as the slot of a freed extent; no slot has this number

logger = logging.getLogger(__name__)


def key_of(boot_id: str, offset: int) -> str:
    """Return the name in the store of the block at this offset."""
    return f"tq/{boot_id}/{offset // GRANULE}"


def number_of(key: str) -> int:
    """Return the extent with this name."""
    return int(key.rpartition("/")[2])


class ObjectPoolHeader(msgspec.Struct, frozen=True):
    """The content of the header file."""

    magic: str
    version: int
    boot_id: str


class ObjectNames(MappedExtents):
    """The file of extents."""

    def __init__(self, folder: Path, boot_id: str, file: int) -> None:
        self.folder = folder
        self.boot_id = boot_id
        self._file = file
        self._map(file, os.fstat(file).st_size)
        self._free = np.flatnonzero(self._entries[:, NUMBER] == 0)[::-1].tolist()
        self._places = {int(self._entries[at, NUMBER]): at for at in np.flatnonzero(self._entries[:, NUMBER]).tolist()}

    @classmethod
    def create(cls, folder: Path) -> ObjectNames:
        """Create the file of a new pool. Raises OSError if the folder cannot be used."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        header = ObjectPoolHeader(MAGIC, VERSION, uuid.uuid4().hex)
        file = os.open(folder / "extents", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.posix_fallocate(file, 0, HEAD_BYTES + _GROWTH * ENTRY_BYTES)
        names = cls(folder, header.boot_id, file)
        names._begin()
        draft = folder / "header.new"
        draft.write_bytes(msgspec.json.encode(header))
        draft.chmod(0o600)
        draft.replace(folder / "header")
        return names

    @classmethod
    def reopen(cls, folder: Path) -> ObjectNames:
        """Open the file of the unit before this one. Raises AttachError if it is incomplete."""
        try:
            header = msgspec.json.decode((folder / "header").read_bytes(), type=ObjectPoolHeader)
            file = os.open(folder / "extents", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, msgspec.DecodeError) as error:
            raise AttachError(f"the record of extents in {folder} cannot be opened: {error}") from error
        size = os.fstat(file).st_size
        if header.magic != MAGIC or header.version != VERSION or size < HEAD_BYTES or (size - HEAD_BYTES) % 32:
            os.close(file)
            raise AttachError(f"{folder} is not the record of an external store's extents, or is of another version")
        return cls(folder, header.boot_id, file)

    def lease(self, slot: int, nbytes: int, sequence: int) -> LeasedExtent | None:
        """Return the next extent; None if the file cannot grow."""
        if not self._free and not self._grow():
            return None
        at, number = self._free.pop(), self.next_extent
        extent = LeasedExtent(number, number * GRANULE, nbytes, slot, sequence)
        self._lease(at, extent)
        self._places[number] = at
        return extent

    def _grow(self) -> bool:
        count = len(self._entries)
        try:
            os.posix_fallocate(self._file, HEAD_BYTES + count * ENTRY_BYTES, _GROWTH * ENTRY_BYTES)
        except OSError as error:
            logger.error("the storage unit's file of extents in %s cannot grow: %s", self.folder, error)
            return False
        self._map(self._file, os.fstat(self._file).st_size)
        self._free = list(range(count + _GROWTH - 1, count - 1, -1))
        return True

    def mark_removing(self, number: int) -> None:
        """Record that the extent is freed, and that the store has to remove its block."""
        self._store(self._entries[self._places[number]], SLOT, _REMOVING)

    def mark_removed(self, numbers: Sequence[int]) -> None:
        """Record that the store has removed the blocks of these extents."""
        for number in numbers:
            at = self._places.pop(number)
            self._store(self._entries[at], NUMBER, 0)
            self._free.append(at)

    def read(self) -> tuple[list[LeasedExtent], list[LeasedExtent]]:
        """Return (leased, to be removed), ascending by number, as the unit before this one left them."""
        extents = []
        for number, at in sorted(self._places.items()):
            _, length, slot, sequence = self._entries[at].tolist()
            extents.append(LeasedExtent(number, number * GRANULE, length, slot, sequence))
        return [e for e in extents if e.slot != _REMOVING], [e for e in extents if e.slot == _REMOVING]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class ObjectPool(ExtentPool):
    """The extent pool of an external store, see `ExtentPool`."""

    def __init__(
        self,
        names: ObjectNames,
        store: Store,
        begin: Begin,
        capacity: int = UNLIMITED,
        life: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the pool.

        Args:
            names: The record of its extents.
            store: This process's connection to the store.
            begin: Runs calls to the store outside the unit's loop.
            capacity: The largest total size of all blocks in bytes; UNLIMITED if only the store knows it.
            life: Returns a text that changes when the store may have lost blocks. Published ones are then checked.
            clock: The clock of `begin_period`.
        """
        self.capacity, self.folder, self.boot_id = capacity, names.folder, names.boot_id
        self._names = names
        self._store = store
        self._begin = begin
        self._life = life
        self._clock = clock
        self._lives = life()
        self._look = 0.0
        """When `life` is called next."""
        self._unsure: dict[int, None] = {}
        """Extents of which the store could not say whether they exist."""
        self._ask = 0.0
        """When the store is asked about these next."""
        self._rewriting: set[int] = set()
        """Extents whose blocks the store is writing again. They are not removed before that has ended."""
        self._rewritten: dict[int, float] = {}
        """Extents whose blocks were written again in the last REWRITE_SECONDS -> when."""
        leased, unwanted = names.read()
        self.table = LeasedExtents(names.next_extent)
        for extent in leased:
            self.table.add(extent)
        self._unwanted = {extent.number: extent.length for extent in unwanted}
        self._unwanted_bytes = sum(self._unwanted.values())
        self._is_busy = False
        """A removal is in progress."""
        self._retry: float | None = None if not unwanted else 0.0
        self._serve: Callable[[], list[Effect]] = list
        self._lost: Callable[[list[int]], list[Effect]] = lambda numbers: []
        self._changed: Callable[[], object] = lambda: None

    @property
    def next_extent(self) -> int:
        """See `ExtentPool.next_extent`."""
        return self._names.next_extent

    @property
    def _free(self) -> int:
        return self.capacity - self.table.leased - self._unwanted_bytes

    def take_slot(self) -> int:
        """See `ExtentPool.take_slot`."""
        return self._names.take_slot()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """See `ExtentPool.view`. Not possible, because an extent is only a name."""
        raise ProtocolError("a storage unit of an external store has no memory to write into; write to the store")

    def lease(self, slot: int, nbytes: int, sequence: int) -> LeasedExtent | None:
        """See `ExtentPool.lease`."""
        if slot == MOVER_SLOT or self.space_for(nbytes) > self._free:
            return None
        extent = self._names.lease(slot, self.space_for(nbytes), sequence)
        if extent is not None:
            self.table.add(extent)
        return extent

    def space_for(self, nbytes: int) -> int:
        """See `ExtentPool.space_for`."""
        return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT

    def generation(self, offset: int) -> int:
        """Return 1, because an extent's offset is never used again."""
        return 1

    def free(self, extent: LeasedExtent) -> bool:
        """See `ExtentPool.free`. The store removes the block a little later. Nobody has views of it."""
        self.table.remove(extent.number)
        self._names.mark_removing(extent.number)
        self._unwanted[extent.number] = extent.length
        self._unwanted_bytes += extent.length
        self._remove()
        return True

    def cut(self, extent: LeasedExtent, keep: int) -> None:
        """See `ExtentPool.cut`. Does nothing, because there is nothing behind the block."""

    def _remove(self) -> None:
        if self._is_busy:
            return
        waiting = (number for number in self._unwanted if number not in self._rewriting)
        numbers = list(itertools.islice(waiting, MAX_REMOVED))
        if not numbers:
            return
        self._is_busy = True
        keys = [key_of(self.boot_id, number * GRANULE) for number in numbers]

        def removed(outcome: object) -> list[Effect]:
            self._is_busy = False
            if isinstance(outcome, Exception):
                self._warn(f"cannot remove {len(keys)} blocks, and is asked again in {RETRY_SECONDS:g} s", outcome)
                self._retry = self._clock() + RETRY_SECONDS
                return []
            self._retry = None
            self._names.mark_removed(numbers)
            for number in numbers:
                self._unwanted_bytes -= self._unwanted.pop(number)
            self._remove()
            return self._serve()

        self._begin(lambda: self._store.remove(keys), removed)

    def attach(
        self,
        serve: Callable[[], list[Effect]],
        lost: Callable[[list[int]], list[Effect]],
        changed: Callable[[], object],
    ) -> None:
        """See `ExtentPool.attach`."""
        self._serve, self._lost, self._changed = serve, lost, changed

    def check_content(self, numbers: list[int], then: Looked, report: BlockMissing | None = None) -> list[Effect]:
        """See `ExtentPool.check_content`.

        If a reader misses blocks that this unit finds, the store writes them again for the reader's node. If a reader
        has given them up, they are gone: the unit may have the only copy, and no other node finds it.
        """
        if report is not None and report.given_up:
            logger.warning(
                "storage unit in %s: a reader could not read %d blocks that the unit can read; they count as lost",
                self.folder,
                len(numbers),
            )
            return then(numbers, time.strftime(_WHEN), "")
        names = {key_of(self.boot_id, number * GRANULE): number for number in numbers}

        def looked(outcome: Any) -> list[Effect]:
            if isinstance(outcome, Exception):
                self._warn(f"cannot say which blocks it has, and is asked again in {RETRY_SECONDS:g} s", outcome)
                self._unsure.update(dict.fromkeys(numbers))
                self._ask = self._clock() + RETRY_SECONDS
                return then([], "", str(outcome))
            missing = [names[key] for key in outcome]
            ended = partial(then, missing, time.strftime(_WHEN), "")
            return ended() if report is None else self._rewrite(sorted({*numbers}.difference(missing)), ended)

        self._begin(lambda: self._store.missing(list(names)), looked)
        return []

    def _rewrite(self, numbers: list[int], then: Callable[[], list[Effect]]) -> list[Effect]:
        """Let the store write the blocks of these extents again, each at most once in REWRITE_SECONDS."""
        now = self._clock()
        self._rewritten = {number: at for number, at in self._rewritten.items() if now < at + REWRITE_SECONDS}
        wanted = [
            number
            for number in numbers
            if self.table.get(number) is not None and number not in self._rewriting and number not in self._rewritten
        ]
        if not wanted:
            return then()
        self._rewriting.update(wanted)
        keys = [key_of(self.boot_id, number * GRANULE) for number in wanted]

        def rewritten(outcome: object) -> list[Effect]:
            self._rewriting.difference_update(wanted)
            self._rewritten.update(dict.fromkeys(wanted, self._clock()))
            if isinstance(outcome, Exception):
                self._warn(f"cannot write {len(wanted)} blocks again that a reader misses", outcome)
            self._remove()
            return then()

        self._begin(lambda: self._store.rewrite(keys), rewritten)
        return []

    def _warn(self, failure: str, error: Exception) -> None:
        """Log what the store cannot do."""
        logger.warning("storage unit in %s: the store %s: %s", self.folder, failure, error)

    def read(self, request: ReadPieces) -> list[memoryview] | None:
        """Refuse: readers read from the store."""
        raise ProtocolError("the blocks of this storage unit are in an external store; read them there")

    def write(self, extent: LeasedExtent | None, request: WriteBytes, payload: memoryview | None) -> None:
        """Refuse: writers write to the store."""
        raise ProtocolError("the blocks of this storage unit are in an external store; write them there")

    def begin_move(self, unit: int, order: Move, lease: Lease, brought: Brought = None) -> NoBlockCopier:
        """See `ExtentPool.begin_move`. Blocks of a store are never moved."""
        return NoBlockCopier(unit, order)

    def status(self) -> UnitStatusReply:
        """See `ExtentPool.status`."""
        held = self.table.leased + self._unwanted_bytes
        return UnitStatusReply(self.capacity, held, self.table.leased, self._free, STORE)

    def next_deadline(self) -> float | None:
        """See `ExtentPool.next_deadline`."""
        times = [] if self._retry is None or self._is_busy else [self._retry]
        if self.table.leased:
            times.append(self._look)
        if self._unsure:
            times.append(self._ask)
        return min(times, default=None)

    def begin_period(self, now: float) -> bool:
        """See `ExtentPool.begin_period`. Repeats what failed, and checks whether the store is still the same."""
        if self._retry is not None and now >= self._retry:
            self._retry = None
            self._remove()
        if now >= self._look:
            self._look = now + LIFE_SECONDS
            life = self._life()
            if life != self._lives:
                self._lives = life
                self._changed()
        if self._unsure and now >= self._ask:
            numbers, self._unsure = list(self._unsure), {}
            self._lost(numbers)
        return False

    def check(self) -> None:
        """See `ExtentPool.check`."""
        self.table.check()
        leased, unwanted = self._names.read()
        assert leased == self.table.leased_extents(), "the file of extents"
        assert {extent.number: extent.length for extent in unwanted} == self._unwanted, "what is to be removed"
        assert self._unwanted_bytes == sum(self._unwanted.values()), "bytes to be removed"

    def close(self) -> None:
        """Close the file and the connection."""
        self._names.close()
        try:
            self._store.close()
        except TransferQueueError as error:
            logger.warning("storage unit in %s: closing the connection to the store failed: %s", self.folder, error)


class NoBlockCopier:
    """Reports at once that no block was moved."""

    def __init__(self, unit: int, order: Move) -> None:
        self.extent: LeasedExtent | None = None
        self._answer = BlocksMovedReport(order.number, unit, 0, 0, 0, b"", [])

    def step(self) -> BlocksMovedReport | None:
        """See `BlockCopy.step`."""
        return self._answer

    def close(self) -> None:
        """See `BlockCopy.close`."""
