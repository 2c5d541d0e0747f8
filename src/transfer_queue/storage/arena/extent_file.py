"""The table of extents as a file in the arena's folder, from which a restarted unit restores its state.

The file is mapped: a page of numbers about the whole, then one entry for each granule of the arena, which contains the
extent that begins there. If a process is killed, its stores so far are kept in program order. So the table must be
valid between any two of these stores:

    lease   first the next number, so that no number is used twice; then length, slot and sequence in the entry, which
            are not read yet; then the extent's number, by which it is leased
    free    number 0
    cut     the shorter length
    grow    allocate the files before `held` includes the new bytes
    punch   first a mark in each granule's entry, then return the granules to the file system
    fill    allocate the file there, then remove the marks

The mark is stored as a length that no extent in whole granules has. The length of an entry without an extent is used
for nothing else.

Only the unit maps the file. Like the arena it is allocated as far as it is used, so that no store needs more space.
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

_NEXT_EXTENT, _NEXT_SLOT, _HELD, _BOOT = 0, 1, 2, 3  # positions in the head; the boot id takes two
NUMBER, _LENGTH, SLOT, _SEQUENCE = range(4)  # columns of the entries
_HOLE = 1  # the mark, stored as a length

Numbers = npt.NDArray[np.uint64]


def size_of(capacity: int) -> int:
    """Return the bytes of the file for an arena of this capacity."""
    return HEAD_BYTES + capacity // GRANULE * ENTRY_BYTES


class MappedExtents:
    """A mapped file of extents: a page of numbers, then one entry for each extent. Only `_store` changes it."""

    def _map(self, file: int, nbytes: int) -> None:
        mapping = mmap.mmap(file, nbytes)
        self._head: Numbers = np.frombuffer(mapping, "<u8", HEAD_BYTES // 8)
        self._entries: Numbers = np.frombuffer(mapping, "<u8", offset=HEAD_BYTES).reshape(-1, 4)

    def _begin(self) -> None:
        """Initialize the numbers of a new file."""
        self._store(self._head, _NEXT_EXTENT, 1)
        self._store(self._head, _NEXT_SLOT, 1)

    @property
    def next_extent(self) -> int:
        """The number of the next extent."""
        return int(self._head[_NEXT_EXTENT])

    def take_slot(self) -> int:
        """Return the number of a new slot, which is never used again."""
        slot = int(self._head[_NEXT_SLOT])
        self._store(self._head, _NEXT_SLOT, slot + 1)
        return slot

    def _lease(self, at: int, extent: LeasedExtent) -> None:
        """Record in entry `at` that the extent is leased."""
        entry = self._entries[at]
        self._store(self._head, _NEXT_EXTENT, extent.number + 1)
        self._store(entry, _LENGTH, extent.length)
        self._store(entry, SLOT, extent.slot)
        self._store(entry, _SEQUENCE, extent.sequence)
        self._store(entry, NUMBER, extent.number)

    def _store(self, numbers: Numbers, place: int, value: int) -> None:
        """Store one number at once."""
        numbers[place] = value


class ExtentFile(MappedExtents):
    """The mapped file. `begin` initializes it for a new arena; `read` returns the leased extents after checking it."""

    def __init__(self, file: int, capacity: int) -> None:
        self._capacity = capacity
        self._map(file, size_of(capacity))

    def begin(self, boot_id: str) -> None:
        """Initialize the empty table of a new arena."""
        self._begin()
        for place, part in enumerate(np.frombuffer(uuid.UUID(boot_id).bytes, "<u8").tolist()):
            self._store(self._head, _BOOT + place, part)

    @property
    def held(self) -> int:
        """Allocated bytes of the arena."""
        return int(self._head[_HELD])

    @held.setter
    def held(self, nbytes: int) -> None:
        self._store(self._head, _HELD, nbytes)

    def lease(self, extent: LeasedExtent) -> None:
        """Record that the extent is leased."""
        self._lease(extent.offset // GRANULE, extent)

    def free(self, extent: LeasedExtent) -> None:
        """Record that the extent is not leased any more."""
        self._store(self._entries[extent.offset // GRANULE], NUMBER, 0)

    def cut(self, extent: LeasedExtent, length: int) -> None:
        """Record the new, shorter length of the extent."""
        self._store(self._entries[extent.offset // GRANULE], _LENGTH, length)

    def mark(self, first: int, end: int, is_hole: bool) -> None:
        """Record whether these granules, which are not leased, were returned to the file system."""
        for granule in range(first, end):
            self._store(self._entries[granule], _LENGTH, _HOLE if is_hole else 0)

    def holes(self) -> npt.NDArray[np.bool_]:
        """Return which granules of the whole capacity were returned. Entries beyond `held` are not read, see above."""
        is_hole = np.zeros(len(self._entries), bool)
        count = self.held // GRANULE
        np.equal(self._entries[:count, _LENGTH], _HOLE, out=is_hole[:count])
        return is_hole

    def read(self, folder: Path, boot_id: str) -> list[LeasedExtent]:
        """Return the leased extents in order of numbers. Raises AttachError if the table is damaged or foreign."""
        damaged = f"the table of extents in {folder} is damaged and cannot be used"
        if self._head[_BOOT : _BOOT + 2].tobytes() != uuid.UUID(boot_id).bytes:
            raise AttachError(f"{damaged}: it does not belong to arena {boot_id}")
        if self.held % GRANULE or self.held > self._capacity:
            raise AttachError(f"{damaged}: {self.held} bytes are allocated of {self._capacity}")
        extents = []
        end = 0
        for at in np.flatnonzero(self._entries[: self.held // GRANULE, NUMBER]).tolist():
            number, length, slot, sequence = self._entries[at].tolist()
            extent = LeasedExtent(number, at * GRANULE, length, slot, sequence)
            if extent.offset < end or not length or length % GRANULE or extent.offset + length > self.held:
                raise AttachError(f"{damaged}: {extent} overlaps another one, or ends beyond {self.held}")
            if number >= self.next_extent or not 0 <= slot < int(self._head[_NEXT_SLOT]):
                raise AttachError(f"{damaged}: {extent} has a number or slot that was not assigned yet")
            end = extent.offset + length
            extents.append(extent)
        extents.sort(key=lambda extent: extent.number)
        if len({extent.number for extent in extents}) < len(extents):
            raise AttachError(f"{damaged}: two extents have the same number")
        return extents

    def close(self) -> None:
        """Drop the mapping."""
        self._head = self._entries = np.empty(0, np.uint64)
