"""The extents that contain blocks: their writers, their locations in the storage units, and which ones can be freed.

An extent can be freed when its writer has closed it and no needed block is in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter

import numpy as np

from transfer_queue.core.columns.schema import Count, Persisted, counter, unique_dict, value_of
from transfer_queue.messages.descriptors import BlockLocation, NewBlock

MAX_BYTES = 1 << 62  # every offset and length, and the sum of all lengths, is less than this
MAX_EXTENTS = 1 << 40  # the number of an extent is less than this
_ALIGNMENT = 64  # of blocks in an extent: no block fits into a smaller gap between two others
_CHUNK = 512
_FIRST = itemgetter(0)  # the first entry of a chunk

Span = tuple[int, int]  # the first byte, and the number of the extent


class Spans:
    """The extents of one storage unit that have had blocks, ascending by the first byte of their first block.

    A sorted list in chunks: to add or remove an extent takes a few microseconds among hundreds of thousands.
    """

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[list[Span]] = []
        """Ascending; no chunk is empty."""

    def __iter__(self) -> Iterator[Span]:
        return chain.from_iterable(self._chunks)

    def add(self, span: Span) -> None:
        """Add an extent."""
        if not self._chunks:
            self._chunks.append([span])
            return
        at = max(bisect_right(self._chunks, span, key=_FIRST) - 1, 0)
        chunk = self._chunks[at]
        insort(chunk, span)
        if len(chunk) > _CHUNK:
            self._chunks[at : at + 1] = [chunk[: _CHUNK // 2], chunk[_CHUNK // 2 :]]

    def remove(self, span: Span) -> None:
        """Remove an extent that was added."""
        at = bisect_right(self._chunks, span, key=_FIRST) - 1
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, span)]
        if not chunk:
            del self._chunks[at]

    def last_before(self, span: tuple[int, ...]) -> Span | None:
        """Return the last entry that is less than `span`. (byte,) is less than all entries that begin at that byte."""
        at = bisect_left(self._chunks, span, key=_FIRST) - 1
        if at < 0:
            return None
        chunk = self._chunks[at]
        return chunk[bisect_left(chunk, span) - 1]

    def first_after(self, span: Span) -> Span | None:
        """Return the first entry that is greater than `span`."""
        at = bisect_right(self._chunks, span, key=_FIRST)
        chunk = self._chunks[at - 1] if at else []
        within = bisect_right(chunk, span)
        if within < len(chunk):
            return chunk[within]
        return self._chunks[at][0] if at < len(self._chunks) else None


class ExtentRecord:
    """An extent that has or had blocks."""

    __slots__ = ("begin", "blocks", "closed", "gaps", "length", "limit", "low", "top", "writer")

    def __init__(self, writer: str, length: int) -> None:
        self.writer = writer
        self.length = length
        """Bytes, as the writer has reported them; 0 if it has not."""
        self.blocks = 0
        """The number of needed blocks in the extent."""
        self.closed = False
        """Whether the writer puts no more blocks into it."""
        self.begin = -1
        """Its first byte, as its lease proves; -1 before a block with such a proof, and after a restart before the next
        one. Not part of the state.
        """
        self.low = self.top = self.limit = -1
        """The blocks are or were between the bytes `low` and `top` of the unit; -1 before the first block. Derived.

        The next block fits if it ends at or before `limit`; if it ends later, `find_overlap` decides.
        """
        self.gaps: list[tuple[int, int]] = []
        """(start, end) of the ranges between `low` and `top`, ascending, in which no block was put yet. Derived.

        Writers that put at the same time may publish in another order than they reserved, which leaves such gaps.
        After a restart, the space of cleared blocks is a gap, too.
        """

    def fits(self, start: int, end: int) -> bool:
        """Return whether no block is between these bytes, and the extent is long enough for them."""
        if self.begin >= 0 and not self.begin <= start <= end <= self.begin + self.length:
            return False
        if self.top < 0:
            return not self.length or end - start <= self.length
        if start < self.top and end > self.low:
            at = bisect_right(self.gaps, (start, MAX_BYTES)) - 1
            return at >= 0 and end <= self.gaps[at][1]
        return not self.length or max(end, self.top) - min(start, self.low) <= self.length

    def take(self, start: int, end: int) -> None:
        """Mark these bytes as used by a block."""
        if self.top < 0:
            self.low, self.top = start, end
        elif start >= self.top:
            if start - self.top >= _ALIGNMENT:
                self.gaps.append((self.top, start))
            self.top = end
        elif end <= self.low:
            if self.low - end >= _ALIGNMENT:
                self.gaps.insert(0, (end, self.low))
            self.low = start
        else:
            self._split(start, end)

    def _split(self, start: int, end: int) -> None:
        at = bisect_right(self.gaps, (start, MAX_BYTES)) - 1
        if at < 0 or end > self.gaps[at][1]:  # a migration marks the range of all blocks that it has moved at once
            self.low, self.top = min(self.low, start), max(self.top, end)
            parts = [part for a, b in self.gaps for part in ((a, min(b, start)), (max(a, end), b))]
            self.gaps = [part for part in parts if part[1] - part[0] >= _ALIGNMENT]
            return
        first, last = self.gaps[at]
        self.gaps[at : at + 1] = [gap for gap in ((first, start), (end, last)) if gap[1] - gap[0] >= _ALIGNMENT]


def _listed(extents: dict[tuple[int, int], ExtentRecord]) -> list[tuple[int, int, str, int, int, bool]]:
    return [(*place, e.writer, e.length, e.blocks, e.closed) for place, e in extents.items()]


def _extents(entries: list[tuple[int, int, str, int, int, bool]]) -> dict[tuple[int, int], ExtentRecord]:
    extents = []
    for unit, number, writer, length, blocks, closed in entries:
        extent = ExtentRecord(writer, length)
        extent.blocks, extent.closed = blocks, closed
        extents.append(((unit, number), extent))
    return unique_dict(extents)


class PublishedExtents(Persisted):
    """The leased extents in which blocks were published."""

    extents: dict[tuple[int, int], ExtentRecord] = value_of(
        list[tuple[Count, Count, str, Count, Count, bool]], dict, _listed, _extents
    )
    freed: dict[tuple[int, int], None] = value_of(list[tuple[int, int]], dict, list, dict.fromkeys)
    """The extents that are not needed any more, until their units have reported that they are free."""
    leased: int = counter()
    """The sum of the lengths of the extents."""

    def __init__(self) -> None:
        super().__init__()
        self.unreported: dict[tuple[int, int], None] = {}
        """Those of `freed` that the units must still be ordered to free. Not part of the state."""
        self.leased_in: dict[int, int] = {}
        """Unit -> the sum of the lengths of its extents. Derived."""
        self.spans: defaultdict[int, Spans] = defaultdict(Spans)
        """Unit -> the ranges of its extents that have had blocks. Derived."""
        self.changes = 0
        """Grows when values or extents are removed; read by `core.units.migration_planner`. Not part of the state."""

    def extent_for(self, unit: int, number: int, length: int, writer: str) -> ExtentRecord:
        """Return the extent of a block. Makes it if this is its first block."""
        extent = self.extents.get((unit, number))
        if extent is None:
            extent = self.extents[unit, number] = ExtentRecord(writer, length)
            self.lengthen(unit, length)
        return extent

    def enter_empty(self, place: tuple[int, int], before: ExtentRecord) -> None:
        """Take over an extent of another table without its blocks. Its writer may continue to put into it."""
        extent = self.extent_for(*place, before.length, before.writer)
        extent.begin, extent.low, extent.top, extent.gaps = before.begin, before.low, before.top, before.gaps
        if extent.low >= 0:
            self._list(*place, extent)

    def put_block(self, place: BlockLocation | NewBlock, writer: str, nbytes: int) -> None:
        """Put a block of this many bytes into an extent; the extent is made if this is its first block."""
        unit, number, start = place.unit, place.extent, place.offset
        extent = self.extents.get((unit, number)) or self.extent_for(unit, number, place.length, writer)
        extent.blocks += 1
        if 0 <= extent.top <= start < extent.top + _ALIGNMENT:
            extent.top = start + nbytes
        else:
            if extent.begin < 0:
                extent.begin = place.begin
            self.mark_used(unit, number, start, nbytes)

    def mark_used(self, unit: int, number: int, start: int, nbytes: int) -> None:
        """Mark these bytes of an extent as used."""
        extent = self.extents[unit, number]
        low = extent.low
        extent.take(start, start + nbytes)
        if extent.low != low:
            if low >= 0:
                self.spans[unit].remove((low, number))
            self._list(unit, number, extent)

    def _list(self, unit: int, number: int, extent: ExtentRecord) -> None:
        """Add an extent to the ranges of its unit, and limit the extent before it to the bytes before this one."""
        spans, span = self.spans[unit], (extent.low, number)
        spans.add(span)
        before, after = spans.last_before(span), spans.first_after(span)
        if before is not None:
            other = self.extents[unit, before[1]]
            other.limit = min(other.limit, extent.low)
        known = extent.length and extent.begin >= 0
        extent.limit = min(extent.begin + extent.length, after[0] if after else MAX_BYTES) if known else -1

    def find_overlap(self, unit: int, number: int, start: int, nbytes: int, apart: bool = True) -> int | None:
        """Return the extent with whose blocks or end a new block of extent `number` would overlap; None if it fits.

        `apart` says that extents are separate ranges of bytes, as in an arena. In an external store they are objects.
        """
        extent = self.extents.get((unit, number))
        low, top = start, start + nbytes
        if extent is not None:
            if not extent.fits(start, top):
                return number
            if extent.low <= start < top <= extent.top:
                return None
            if extent.top >= 0:
                low, top = min(extent.low, start), max(extent.top, top)
        if not apart:
            return None
        spans = self.spans[unit]
        other = spans.last_before((top,))
        while other is not None:
            used_end = self.extents[unit, other[1]].top
            if other[1] != number and used_end > low:
                return other[1]
            # the extent itself, and one with empty blocks only, may hide another extent
            other = spans.last_before(other) if other[1] == number or used_end == other[0] else None
        return None

    def between(self, unit: int, start: int, end: int) -> list[int]:
        """Return the extents of a unit with an arena that have had blocks between these bytes."""
        spans = self.spans.get(unit, ())
        return [number for low, number in spans if low < end and self.extents[unit, number].top > start]

    def lengthen(self, unit: int, length: int) -> None:
        """Add this number of bytes, which may be negative, to the length of all extents of a unit."""
        self.leased += length
        self.leased_in[unit] = self.leased_in.get(unit, 0) + length

    def shorten(self, places: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Set the lengths of these extents if they are shorter than before."""
        for (unit, number), length in zip(places, lengths):
            extent = self.extents.get((unit, number))
            if extent is not None and length < extent.length:
                self.lengthen(unit, length - extent.length)
                extent.length = length
                extent.limit = -1

    def close(self, places: list[tuple[int, int]]) -> None:
        """Record that these extents receive no more blocks."""
        self.changes += 1
        for place in places:
            if place in self.extents:
                self.extents[place].closed = True
                self.free_if_done(place)
            else:  # no needed block is in it: all its blocks were removed, or it never had one
                self._free(place)

    def free_if_done(self, place: tuple[int, int]) -> None:
        """Free an extent if it is closed and no needed block is in it."""
        extent = self.extents[place]
        if extent.blocks == 0 and extent.closed:
            self._remove(place)
            self._free(place)

    def _remove(self, place: tuple[int, int]) -> None:
        extent = self.extents.pop(place)
        self.lengthen(place[0], -extent.length)
        if extent.low >= 0:
            self.spans[place[0]].remove((extent.low, place[1]))

    def _free(self, place: tuple[int, int]) -> None:
        if place not in self.freed:
            self.freed[place] = self.unreported[place] = None

    def forget(self, places: Iterable[tuple[int, int]]) -> None:
        """Remove these extents, which are free or lost, together with their blocks."""
        for place in places:
            self.freed.pop(place, None)
            self.unreported.pop(place, None)
            if place in self.extents:
                self._remove(place)

    def free_again(self, unit: int) -> None:
        """Order the unit again to free its freed extents."""
        self.unreported.update((place, None) for place in self.freed if place[0] == unit)

    def take_freed(self, units: Container[int], pinned: Container[tuple[int, int]]) -> dict[int, list[int]]:
        """Take the extents that these units must be ordered to free, by unit. Leaves pinned ones and other units'."""
        taken: dict[int, list[int]] = {}
        for place in list(self.unreported):
            if place[0] in units and place not in pinned:
                taken.setdefault(place[0], []).append(place[1])
                del self.unreported[place]
        return taken

    def measure(self, unit: np.ndarray, number: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Compute the used ranges of the extents again. Each entry of the arguments is the location of a block."""
        self.spans.clear()
        for extent in self.extents.values():
            extent.low, extent.top, extent.limit, extent.gaps = -1, -1, -1, []
        if not len(unit):
            return
        order = np.lexsort((end, start, number, unit))  # an empty block may begin where another one does
        unit, number, start, end = unit[order], number[order], start[order], end[order]
        same = (unit[1:] == unit[:-1]) & (number[1:] == number[:-1])
        first = np.concatenate([[0], np.flatnonzero(~same) + 1])
        tops = np.maximum.reduceat(end, first)
        for own, extent_number, low, top in np.stack([unit[first], number[first], start[first], tops], axis=1).tolist():
            known = self.extents.get((own, extent_number))
            if known is not None:
                known.low, known.top = low, top
                self._list(own, extent_number, known)
        for at in np.flatnonzero(same & (start[1:] - end[:-1] >= _ALIGNMENT)).tolist():
            known = self.extents.get((int(unit[at]), int(number[at])))
            if known is not None:
                known.gaps.append((int(end[at]), int(start[at + 1])))
