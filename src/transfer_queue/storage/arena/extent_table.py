"""The table of extents: the free granules of an arena, and the slots to which extents are leased.

It only counts, in whole granules: it touches no file and no byte of the arena, and does not know which free space was
returned to the file system (`Arena.holes`). Offsets and lengths are bytes and multiples of `GRANULE`. The table covers
the held space, offsets 0 to `held`; every granule of it is in exactly one free run or one leased extent.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from transfer_queue.errors import InvalidArgumentError, ProtocolError

GRANULE = 64 * 1024


def round_up(nbytes: int) -> int:
    """Return the smallest multiple of GRANULE that is not less than this number of bytes."""
    return -(-nbytes // GRANULE) * GRANULE


@dataclass(frozen=True, slots=True)
class LeasedExtent:
    """A leased piece of the arena."""

    number: int
    """Ascending, never used again."""
    offset: int
    length: int
    slot: int
    sequence: int = 0
    """The sequence of the request that leased it."""


class LeasedExtents:
    """The leased extents, by number and by slot."""

    def __init__(self, next_number: int = 1) -> None:
        self.leased = 0
        """The total length of all leased extents."""
        self._extents: dict[int, LeasedExtent] = {}
        """Number -> extent, for exactly the leased extents."""
        self._slots: dict[int, dict[int, None]] = {}
        """Slot -> numbers of its extents in order of lease. It contains no slot without extents."""
        self._next = next_number

    def leased_extents(self) -> list[LeasedExtent]:
        """Return all leased extents, ascending by number."""
        return list(self._extents.values())

    def get(self, number: int) -> LeasedExtent | None:
        """Return the leased extent of this number, or None."""
        return self._extents.get(number)

    def extents_of_slot(self, slot: int) -> list[int]:
        """Return the numbers of a slot's extents, ascending."""
        return list(self._slots.get(slot, ()))

    def count(self, slot: int) -> int:
        """Return the number of extents of a slot."""
        return len(self._slots.get(slot, ()))

    def was_leased(self, number: int) -> bool:
        """Whether an extent of this number was ever leased."""
        return 0 < number < self._next

    def describe(self, number: int) -> str:
        """Return a phrase about the state of an extent."""
        extent = self._extents.get(number)
        if extent is not None:
            return f"it is leased to slot {extent.slot}"
        return "it was freed before" if self.was_leased(number) else "no extent of this number was ever leased"

    def add(self, extent: LeasedExtent) -> None:
        """Add a leased extent."""
        self._extents[extent.number] = extent
        self._slots.setdefault(extent.slot, {})[extent.number] = None
        self._next = max(self._next, extent.number + 1)
        self.leased += extent.length

    def remove(self, number: int) -> LeasedExtent:
        """Remove a leased extent and return it. Raises ProtocolError if it is not leased."""
        extent = self._extents.pop(number, None)
        if extent is None:
            raise ProtocolError(f"extent {number} is not leased: {self.describe(number)}")
        numbers = self._slots[extent.slot]
        del numbers[number]
        if not numbers:
            del self._slots[extent.slot]
        self.leased -= extent.length
        return extent

    def check(self) -> None:
        """Recount everything. Raises AssertionError if the table contradicts itself."""
        assert self.leased == sum(extent.length for extent in self._extents.values()), "leased bytes"
        by_slot: dict[int, list[int]] = {}
        for number in sorted(self._extents):
            assert self._extents[number].number == number < self._next, f"number of extent {number}"
            by_slot.setdefault(self._extents[number].slot, []).append(number)
        assert by_slot == {slot: list(numbers) for slot, numbers in self._slots.items()}, "index of slots"


class ExtentTable(LeasedExtents):
    """Free runs and leased extents of an arena.

    A lease takes the first free run that fits, by address. Space is first touched in the order of addresses, so the
    lowest run that fits is most likely resident.
    """

    def __init__(self, next_number: int = 1) -> None:
        super().__init__(next_number)
        self.held = 0
        """Bytes that the table covers."""
        self._starts: list[int] = []
        """The offsets of all free runs, ascending. No two runs are adjacent."""
        self._lengths: dict[int, int] = {}
        """Offset -> length of all free runs."""
        self._largest = 0
        """An upper bound of the lengths of free runs. A search that fails makes it exact."""

    @classmethod
    def from_extents(cls, held: int, extents: Iterable[LeasedExtent], next_number: int) -> ExtentTable:
        """Return the table in which these extents, ascending by number, are leased and all else is free."""
        table = cls(next_number)
        table.held = held
        for extent in extents:
            table.add(extent)
        end = 0
        for extent in sorted(table._extents.values(), key=lambda extent: extent.offset):
            if extent.offset > end:
                table._release(end, extent.offset - end)
            end = extent.offset + extent.length
        if end < held:
            table._release(end, held - end)
        return table

    @property
    def free_bytes(self) -> int:
        """Bytes that are held and not leased."""
        return self.held - self.leased

    @property
    def largest_free(self) -> int:
        """Length of the longest free run."""
        return max(self._lengths.values(), default=0)

    @property
    def tail(self) -> int:
        """Length of the free run at the end of the held space, which growth would extend."""
        if not self._starts:
            return 0
        start = self._starts[-1]
        length = self._lengths[start]
        return length if start + length == self.held else 0

    def grow(self, granules: int) -> None:
        """Add this many free granules at the end."""
        if granules <= 0:
            raise InvalidArgumentError(f"an arena must grow by at least one granule, got {granules}")
        start, self.held = self.held, self.held + granules * GRANULE
        self._release(start, granules * GRANULE)

    def lease(
        self, slot: int, nbytes: int, sequence: int = 0, without: npt.NDArray[np.bool_] | None = None
    ) -> LeasedExtent | None:
        """Lease the lowest free space of nbytes, rounded up to granules; None if no free run is that long.

        `without` marks granules that must not be part of it.
        """
        if nbytes <= 0:
            raise InvalidArgumentError(f"an extent must have at least one byte, got {nbytes}")
        length = round_up(nbytes)
        space = self._find(length) if without is None else self._find_without(length, without)
        if space is None:
            return None
        index, start = space
        run = self._starts[index]
        after = run + self._lengths.pop(run) - start - length
        pieces = [(run, start - run), (start + length, after)]
        self._starts[index : index + 1] = [offset for offset, nbytes_ in pieces if nbytes_]
        self._lengths.update((offset, nbytes_) for offset, nbytes_ in pieces if nbytes_)
        extent = LeasedExtent(self._next, start, length, slot, sequence)
        self.add(extent)
        return extent

    def cut(self, number: int, length: int) -> None:
        """Free the part of a leased extent beyond this length, which must be in whole granules."""
        extent = self._extents[number]
        if not 0 < length < extent.length or length % GRANULE:
            raise InvalidArgumentError(
                f"{extent} cannot be cut to {length} bytes: the new length must be shorter and in whole granules"
            )
        self._extents[number] = replace(extent, length=length)
        self.leased -= extent.length - length
        self._release(extent.offset + length, extent.length - length)

    def free(self, number: int) -> LeasedExtent:
        """Free a leased extent and return it. Raises ProtocolError if it is not leased."""
        extent = self.remove(number)
        self._release(extent.offset, extent.length)
        return extent

    def check(self) -> None:
        """Recount everything. Raises AssertionError if the table contradicts itself."""
        super().check()
        assert self._starts == sorted(self._lengths), "index of free runs"
        pieces = [(start, length, True) for start, length in self._lengths.items()]
        pieces += [(extent.offset, extent.length, False) for extent in self._extents.values()]
        end, was_free = 0, False
        for offset, length, is_free in sorted(pieces):
            assert offset == end, f"gap or overlap at {end}: next piece at {offset}"
            assert length > 0, f"piece of {length} bytes at {offset}"
            assert length % GRANULE == 0, f"piece of {length} bytes at {offset}"
            assert not (was_free and is_free), f"free runs not joined at {offset}"
            end, was_free = offset + length, is_free
        assert end == self.held, f"pieces end at {end}, held {self.held}"
        assert self.free_bytes == sum(self._lengths.values()), "free bytes"
        assert self._largest >= max(self._lengths.values(), default=0), "bound of the largest run"

    def _find(self, length: int) -> tuple[int, int] | None:
        """Return index and offset of the lowest free run that has at least this length."""
        if length > self._largest:
            return None
        for index, start in enumerate(self._starts):
            if self._lengths[start] >= length:
                return index, start
        self._largest = max(self._lengths.values(), default=0)
        return None

    def _find_without(self, length: int, without: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
        """Return the lowest place of this length in a free run without these granules: run's index, and offset."""
        for index, start in enumerate(self._starts):
            if self._lengths[start] >= length:
                first, end = start // GRANULE, (start + self._lengths[start]) // GRANULE
                edges = np.concatenate([[first - 1], np.flatnonzero(without[first:end]) + first, [end]])
                fits = np.flatnonzero(np.diff(edges) > length // GRANULE)
                if len(fits):
                    return index, (int(edges[fits[0]]) + 1) * GRANULE
        return None

    def _release(self, start: int, length: int) -> None:
        """Add a free run and join it with adjacent runs."""
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + length:
            length += self._lengths.pop(self._starts.pop(index))
        if index and self._starts[index - 1] + self._lengths[self._starts[index - 1]] == start:
            start = self._starts[index - 1]
            length += self._lengths[start]
        else:
            insort(self._starts, start)
        self._lengths[start] = length
        self._largest = max(self._largest, length)
