"""The table of extents: which granules of an arena are free, and what is leased to what slot.

Pure bookkeeping in whole granules; it touches no file and no byte of the arena, and does not know what of the free
space is given back to the file system (`Arena.holes`). Offsets and lengths
are bytes and multiples of `GRANULE`. The table covers the held space, offsets 0 to `held`; every
granule of it lies in exactly one free run or one leased extent.
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
    """The least multiple of GRANULE that holds this many bytes."""
    return -(-nbytes // GRANULE) * GRANULE


@dataclass(frozen=True, slots=True)
class LeasedExtent:
    """A leased piece of the arena. number: ascending, never used again. sequence: of the request that leased it."""

    number: int
    offset: int
    length: int
    slot: int
    sequence: int = 0


class LeasedExtents:
    """The leased extents, wherever they lie."""

    def __init__(self, next_number: int = 1) -> None:
        self.leased = 0
        """The lengths of all leased extents together."""
        self._extents: dict[int, LeasedExtent] = {}
        """Number -> extent of all and only the leased extents."""
        self._slots: dict[int, dict[int, None]] = {}
        """Slot -> numbers of its extents in order of lease; no slot without extents."""
        self._next = next_number

    def leased_extents(self) -> list[LeasedExtent]:
        """All of them, ascending by number."""
        return list(self._extents.values())

    def get(self, number: int) -> LeasedExtent | None:
        """The leased extent of this number."""
        return self._extents.get(number)

    def of_slot(self, slot: int) -> list[int]:
        """The numbers of a slot's extents, ascending."""
        return list(self._slots.get(slot, ()))

    def count(self, slot: int) -> int:
        """How many extents a slot has."""
        return len(self._slots.get(slot, ()))

    def was_leased(self, number: int) -> bool:
        """Whether an extent of this number was ever handed out."""
        return 0 < number < self._next

    def story(self, number: int) -> str:
        """What became of an extent, in words."""
        extent = self._extents.get(number)
        if extent is not None:
            return f"it is leased to slot {extent.slot}"
        return "it was freed before" if self.was_leased(number) else "no extent of this number was ever leased"

    def enter(self, extent: LeasedExtent) -> None:
        """An extent is leased."""
        self._extents[extent.number] = extent
        self._slots.setdefault(extent.slot, {})[extent.number] = None
        self._next = max(self._next, extent.number + 1)
        self.leased += extent.length

    def leave(self, number: int) -> LeasedExtent:
        """A leased extent is leased no more; answers what it was. ProtocolError if it is not leased."""
        extent = self._extents.pop(number, None)
        if extent is None:
            raise ProtocolError(f"extent {number} is not leased: {self.story(number)}")
        numbers = self._slots[extent.slot]
        del numbers[number]
        if not numbers:
            del self._slots[extent.slot]
        self.leased -= extent.length
        return extent

    def check(self) -> None:
        """Recounts everything; AssertionError where the table contradicts itself."""
        assert self.leased == sum(extent.length for extent in self._extents.values()), "leased bytes"
        by_slot: dict[int, list[int]] = {}
        for number in sorted(self._extents):
            assert self._extents[number].number == number < self._next, f"number of extent {number}"
            by_slot.setdefault(self._extents[number].slot, []).append(number)
        assert by_slot == {slot: list(numbers) for slot, numbers in self._slots.items()}, "index of slots"


class ExtentTable(LeasedExtents):
    """Free runs and leased extents of an arena.

    Leases are first fit by address. Space was first touched in the order of addresses, so the lowest
    run that fits is also the warmest: nothing cold is used while something warm would do.
    """

    def __init__(self, next_number: int = 1) -> None:
        super().__init__(next_number)
        self.held = 0
        """Bytes the table covers."""
        self._starts: list[int] = []
        """The offsets of all and only the free runs, ascending; no two runs touch."""
        self._lengths: dict[int, int] = {}
        """Offset -> length of all and only the free runs."""
        self._largest = 0
        """No free run is longer than this; may overstate, and is made exact by a search that fails."""

    @classmethod
    def of(cls, held: int, extents: Iterable[LeasedExtent], next_number: int) -> ExtentTable:
        """The table in which these extents, ascending by number, are leased and all else is free."""
        table = cls(next_number)
        table.held = held
        for extent in extents:
            table.enter(extent)
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
        """Held and not leased."""
        return self.held - self.leased

    @property
    def largest_free(self) -> int:
        """Length of the longest free run."""
        return max(self._lengths.values(), default=0)

    @property
    def tail(self) -> int:
        """Length of the free run at the end of the held space: what growth would be joined to."""
        if not self._starts:
            return 0
        start = self._starts[-1]
        length = self._lengths[start]
        return length if start + length == self.held else 0

    def grow(self, granules: int) -> None:
        """Adds this many free granules at the end."""
        if granules <= 0:
            raise InvalidArgumentError(f"an arena grows by one granule or more, not {granules}")
        start, self.held = self.held, self.held + granules * GRANULE
        self._release(start, granules * GRANULE)

    def lease(
        self, slot: int, nbytes: int, sequence: int = 0, without: npt.NDArray[np.bool_] | None = None
    ) -> LeasedExtent | None:
        """The lowest free space of nbytes, rounded up to granules; None if no free run is that long.

        without: the granules that are not to be in it.
        """
        if nbytes <= 0:
            raise InvalidArgumentError(f"an extent has one byte or more, not {nbytes}")
        length = round_up(nbytes)
        found = self._find(length) if without is None else self._find_without(length, without)
        if found is None:
            return None
        index, start = found
        run = self._starts[index]
        after = run + self._lengths.pop(run) - start - length
        pieces = [(run, start - run), (start + length, after)]
        self._starts[index : index + 1] = [offset for offset, nbytes_ in pieces if nbytes_]
        self._lengths.update((offset, nbytes_) for offset, nbytes_ in pieces if nbytes_)
        extent = LeasedExtent(self._next, start, length, slot, sequence)
        self.enter(extent)
        return extent

    def cut(self, number: int, length: int) -> None:
        """Makes what a leased extent has beyond this length, in whole granules, free space."""
        extent = self._extents[number]
        if not 0 < length < extent.length or length % GRANULE:
            raise InvalidArgumentError(f"{extent} cannot be cut to {length} bytes: give fewer, whole granules")
        self._extents[number] = replace(extent, length=length)
        self.leased -= extent.length - length
        self._release(extent.offset + length, extent.length - length)

    def free(self, number: int) -> LeasedExtent:
        """Makes a leased extent free space; answers what it was. ProtocolError if it is not leased."""
        extent = self.leave(number)
        self._release(extent.offset, extent.length)
        return extent

    def check(self) -> None:
        """Recounts everything; AssertionError where the table contradicts itself."""
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
        """The lowest free run of this length or more: its index and offset."""
        if length > self._largest:
            return None
        for index, start in enumerate(self._starts):
            if self._lengths[start] >= length:
                return index, start
        self._largest = max(self._lengths.values(), default=0)
        return None

    def _find_without(self, length: int, without: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
        """The lowest place for this length in a free run and without these granules: index of the run, and offset."""
        for index, start in enumerate(self._starts):
            if self._lengths[start] >= length:
                first, end = start // GRANULE, (start + self._lengths[start]) // GRANULE
                edges = np.concatenate([[first - 1], np.flatnonzero(without[first:end]) + first, [end]])
                fits = np.flatnonzero(np.diff(edges) > length // GRANULE)
                if len(fits):
                    return index, (int(edges[fits[0]]) + 1) * GRANULE
        return None

    def _release(self, start: int, length: int) -> None:
        """Adds a free run and joins it with the runs it touches."""
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
