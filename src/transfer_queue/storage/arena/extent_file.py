"""The table of extents as a file of the arena's folder, from which a unit that starts again takes up where it was.

A mapped file: a page of numbers about the whole, then one entry for each granule of the arena, in which stands the
extent that begins there. A process that is killed keeps its stores in the order of the program, so the rule is that
the table is right between any two of them:

    lease   the next number first, so that no number is ever used twice; then length, slot and sequence into the
            entry, which nobody looks at yet; then the extent's number, with which it is leased
    free    number 0
    cut     the shorter length
    grow    the files are allocated before `held` says so
    punch   a mark in each granule's entry first, then what is there is given back to the file system
    fill    the file is allocated there, then the marks go

The mark is in the place of the length, of which no whole granule has it; of an entry without an extent nobody else
looks at that.

Only the unit maps it. Like the arena it is allocated as far as it is used, so that no store meets a full file system.
"""

from __future__ import annotations

import mmap
import uuid
from pathlib import Path

import numpy as np
import numpy.typing as npt

from transfer_queue.errors import AttachError
from transfer_queue.storage.arena.extent_table import GRANULE, LeasedExtent

HEAD_BYTES = 4096
ENTRY_BYTES = 32

_NEXT_EXTENT, _NEXT_SLOT, _HELD, _BOOT = 0, 1, 2, 3  # places in the head; the boot id takes two
_NUMBER, _LENGTH, _SLOT, _SEQUENCE = range(4)  # columns of the entries
_HOLE = 1  # in the place of a length

Numbers = npt.NDArray[np.uint64]


def size_of(capacity: int) -> int:
    """Bytes of the file for an arena of this capacity."""
    return HEAD_BYTES + capacity // GRANULE * ENTRY_BYTES


class ExtentFile:
    """The mapped file. `begin` makes it a new arena's; `read` gives what is leased, once it is known to be whole."""

    def __init__(self, file: int, capacity: int) -> None:
        self._capacity = capacity
        mapping = mmap.mmap(file, size_of(capacity))
        self._head: Numbers = np.frombuffer(mapping, "<u8", HEAD_BYTES // 8)
        self._entries: Numbers = np.frombuffer(mapping, "<u8", offset=HEAD_BYTES).reshape(-1, 4)

    def begin(self, boot_id: str) -> None:
        """The table of a new arena, which is empty."""
        self._store(self._head, _NEXT_EXTENT, 1)
        self._store(self._head, _NEXT_SLOT, 1)
        for place, part in enumerate(np.frombuffer(uuid.UUID(boot_id).bytes, "<u8").tolist()):
            self._store(self._head, _BOOT + place, part)

    @property
    def next_extent(self) -> int:
        """The number of the next extent."""
        return int(self._head[_NEXT_EXTENT])

    @property
    def held(self) -> int:
        """Bytes of the arena that are allocated."""
        return int(self._head[_HELD])

    @held.setter
    def held(self, nbytes: int) -> None:
        self._store(self._head, _HELD, nbytes)

    def take_slot(self) -> int:
        """The number of a new slot, which no other will ever have."""
        slot = int(self._head[_NEXT_SLOT])
        self._store(self._head, _NEXT_SLOT, slot + 1)
        return slot

    def lease(self, extent: LeasedExtent) -> None:
        """The extent is leased."""
        entry = self._entries[extent.offset // GRANULE]
        self._store(self._head, _NEXT_EXTENT, extent.number + 1)
        self._store(entry, _LENGTH, extent.length)
        self._store(entry, _SLOT, extent.slot)
        self._store(entry, _SEQUENCE, extent.sequence)
        self._store(entry, _NUMBER, extent.number)

    def free(self, extent: LeasedExtent) -> None:
        """The extent is leased no more."""
        self._store(self._entries[extent.offset // GRANULE], _NUMBER, 0)

    def cut(self, extent: LeasedExtent, length: int) -> None:
        """The extent is so long from now on, and no longer."""
        self._store(self._entries[extent.offset // GRANULE], _LENGTH, length)

    def mark(self, first: int, end: int, hole: bool) -> None:
        """Whether these granules, which are not leased, are given back to the file system."""
        for granule in range(first, end):
            self._store(self._entries[granule], _LENGTH, _HOLE if hole else 0)

    def holes(self) -> npt.NDArray[np.bool_]:
        """Which granules, of the whole capacity, are given back. Beyond `held` nothing is looked at, see above."""
        found = np.zeros(len(self._entries), bool)
        there = self.held // GRANULE
        np.equal(self._entries[:there, _LENGTH], _HOLE, out=found[:there])
        return found

    def read(self, folder: Path, boot_id: str) -> list[LeasedExtent]:
        """What is leased, in order of numbers. AttachError where the table is another arena's or contradicts itself."""
        damaged = f"the table of extents in {folder} is damaged"
        if self._head[_BOOT : _BOOT + 2].tobytes() != uuid.UUID(boot_id).bytes:
            raise AttachError(f"{damaged}: it belongs to another arena than {boot_id}")
        if self.held % GRANULE or self.held > self._capacity:
            raise AttachError(f"{damaged}: {self.held} bytes held of {self._capacity}")
        found = []
        end = 0
        for at in np.flatnonzero(self._entries[: self.held // GRANULE, _NUMBER]).tolist():
            number, length, slot, sequence = self._entries[at].tolist()
            extent = LeasedExtent(number, at * GRANULE, length, slot, sequence)
            if extent.offset < end or not length or length % GRANULE or extent.offset + length > self.held:
                raise AttachError(f"{damaged}: {extent} overlaps another one, or ends beyond {self.held}")
            if number >= self.next_extent or not 0 <= slot < int(self._head[_NEXT_SLOT]):
                raise AttachError(f"{damaged}: {extent} has a number that was not given yet")
            end = extent.offset + length
            found.append(extent)
        found.sort(key=lambda extent: extent.number)
        if len({extent.number for extent in found}) < len(found):
            raise AttachError(f"{damaged}: two extents have one number")
        return found

    def close(self) -> None:
        """Lets go of the mapping."""
        self._head = self._entries = np.empty(0, np.uint64)

    def _store(self, numbers: Numbers, place: int, value: int) -> None:
        """One number, at once: the one way by which the file changes."""
        numbers[place] = value
