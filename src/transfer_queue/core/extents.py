"""The extents in which blocks lie: whose they are, where in their unit, and which of them can be freed.

An extent can be freed once its writer has closed it and no needed block has a place in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

MOST_BYTES = 1 << 62  # what an offset, a length and the sum of all lengths are below
MOST_EXTENTS = 1 << 40  # what the number of an extent is below
_ALIGNMENT = 64  # of blocks in an extent: a smaller gap between two is room for none
_CHUNK = 512

Span = tuple[int, int]  # the first byte, and the number of the extent


class Spans:
    """The extents of one storage unit that have had blocks, ascending by the first byte in which one lies.

    A sorted list in chunks: an extent more or less costs a few microseconds where there are hundreds of thousands.
    """

    __slots__ = ("_chunks", "_firsts")

    def __init__(self) -> None:
        self._chunks: list[list[Span]] = []
        """Ascending, none of them empty."""
        self._firsts: list[Span] = []
        """The first entry of each chunk."""

    def __iter__(self) -> Iterator[Span]:
        return chain.from_iterable(self._chunks)

    def add(self, span: Span) -> None:
        """Adds an extent."""
        if not self._chunks:
            self._chunks.append([])
            self._firsts.append(span)
        at = max(bisect_right(self._firsts, span) - 1, 0)
        chunk = self._chunks[at]
        insort(chunk, span)
        if len(chunk) > _CHUNK:
            half = len(chunk) // 2
            self._chunks.insert(at + 1, chunk[half:])
            self._firsts.insert(at + 1, chunk[half])
            del chunk[half:]
        self._firsts[at] = chunk[0]

    def remove(self, span: Span) -> None:
        """Removes an extent that was added."""
        at = bisect_right(self._firsts, span) - 1
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, span)]
        if chunk:
            self._firsts[at] = chunk[0]
        else:
            del self._chunks[at], self._firsts[at]

    def before(self, span: tuple[int, ...]) -> Span | None:
        """The last entry that is less than `span`; (byte,) is less than all that begin there."""
        at = bisect_left(self._firsts, span) - 1
        if at < 0:
            return None
        chunk = self._chunks[at]
        return chunk[bisect_left(chunk, span) - 1]

    def after(self, span: Span) -> Span | None:
        """The first entry that is greater than `span`."""
        at = bisect_right(self._firsts, span)
        if at:
            chunk = self._chunks[at - 1]
            within = bisect_right(chunk, span)
            if within < len(chunk):
                return chunk[within]
        return self._firsts[at] if at < len(self._firsts) else None


class Extent:
    """blocks: how many needed blocks have a place in it. closed: its writer puts no more into it.

    length: bytes, as its writer says it; 0 where it did not.
    low, top: the blocks that it has had lie between these bytes of the unit; -1 before the first one (derived).
    limit: the next block fits if it ends no later than here; where it does not, all has to be looked at (derived).
    gaps: (start, end) in between, ascending, where no block was put yet: writers that put at once may publish in
    another order than they reserved (derived; after a restart what was cleared counts as a gap, too).
    """

    __slots__ = ("blocks", "closed", "gaps", "length", "limit", "low", "top", "writer")

    def __init__(self, writer: str, length: int) -> None:
        self.writer = writer
        self.length = length
        self.blocks = 0
        self.closed = False
        self.low = self.top = self.limit = -1
        self.gaps: list[tuple[int, int]] = []

    def has_room(self, start: int, end: int) -> bool:
        """Whether no block lies between these bytes, and the extent is long enough to reach there."""
        if self.top < 0:
            return not self.length or end - start <= self.length
        if start < self.top and end > self.low:
            at = bisect_right(self.gaps, (start, MOST_BYTES)) - 1
            return at >= 0 and end <= self.gaps[at][1]
        return not self.length or max(end, self.top) - min(start, self.low) <= self.length

    def take(self, start: int, end: int) -> None:
        """A block lies between these bytes from now on."""
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
        at = bisect_right(self.gaps, (start, MOST_BYTES)) - 1
        if at < 0 or end > self.gaps[at][1]:  # as old records may have it
            self.low, self.top = min(self.low, start), max(self.top, end)
            return
        first, last = self.gaps[at]
        self.gaps[at : at + 1] = [gap for gap in ((first, start), (end, last)) if gap[1] - gap[0] >= _ALIGNMENT]


class ExtentTable:
    """The extents that are leased, as far as blocks were published in them.

    freed: extents that nobody needs any more, until their units have said that they are free. untold: those of them
    of which the units are to be told; no part of the state.
    leased: the lengths of the extents together; leased_in: of each unit's (derived).
    spans: unit -> where in it the extents lie that have had blocks (derived).
    changes: grows when values or extents go; for `core.moves`, and no part of the state.
    """

    def __init__(self) -> None:
        self.extents: dict[tuple[int, int], Extent] = {}
        self.freed: dict[tuple[int, int], None] = {}
        self.untold: dict[tuple[int, int], None] = {}
        self.leased = 0
        self.leased_in: dict[int, int] = {}
        self.spans: defaultdict[int, Spans] = defaultdict(Spans)
        self.changes = 0

    def lies_in(self, unit: int, number: int, length: int, writer: str) -> Extent:
        """The extent of a block, which is new where it is its first."""
        extent = self.extents.get((unit, number))
        if extent is None:
            extent = self.extents[unit, number] = Extent(writer, length)
            self.lengthen(unit, length)
        return extent

    def enter_empty(self, place: tuple[int, int], before: Extent) -> None:
        """An extent of another table, in which nothing is needed any more; its writer may go on in it."""
        extent = self.lies_in(*place, before.length, before.writer)
        extent.low, extent.top, extent.gaps = before.low, before.top, before.gaps
        if extent.low >= 0:
            self._list(*place, extent)

    def put_block(self, unit: int, number: int, length: int, writer: str, start: int, nbytes: int) -> None:
        """A block lies in these bytes of an extent, which is new where it is its first."""
        extent = self.extents.get((unit, number))
        if extent is None:
            extent = self.lies_in(unit, number, length, writer)
        extent.blocks += 1
        if 0 <= extent.top <= start < extent.top + _ALIGNMENT:
            extent.top = start + nbytes
        else:
            self.take(unit, number, start, nbytes)

    def take(self, unit: int, number: int, start: int, nbytes: int) -> None:
        """These bytes of an extent are taken."""
        extent = self.extents[unit, number]
        low = extent.low
        extent.take(start, start + nbytes)
        if extent.low != low:
            if low >= 0:
                self.spans[unit].remove((low, number))
            self._list(unit, number, extent)

    def _list(self, unit: int, number: int, extent: Extent) -> None:
        """Lists where an extent lies, which ends the room of the one before it."""
        spans, span = self.spans[unit], (extent.low, number)
        spans.add(span)
        before, after = spans.before(span), spans.after(span)
        if before is not None:
            other = self.extents[unit, before[1]]
            other.limit = min(other.limit, extent.low)
        extent.limit = -1 if not extent.length else min(extent.low + extent.length, after[0] if after else MOST_BYTES)

    def overlapped(self, unit: int, number: int, start: int, nbytes: int, apart: bool = True) -> int | None:
        """The extent of which some block, or the end, is in the way of a new block of extent `number`; None: it fits.

        apart: extents have bytes of their own, as in an arena; in an external store they are objects.
        """
        extent, end = self.extents.get((unit, number)), start + nbytes
        low = top = -1
        if extent is not None:
            if not extent.has_room(start, end):
                return number
            low, top = extent.low, extent.top
        spans = self.spans.get(unit) if apart else None
        if spans is None or low <= start < end <= top:
            return None
        if low < 0 or start < low:
            other = spans.before((end,) if low < 0 else (low, number))
            if other is not None and self.extents[unit, other[1]].top > start:
                return other[1]
        if low >= 0 and end > top:
            other = spans.after((low, number))
            if other is not None and other[0] < end:
                return other[1]
        return None

    def lengthen(self, unit: int, length: int) -> None:
        """So many bytes more are in extents of a unit, or (below 0) fewer."""
        self.leased += length
        self.leased_in[unit] = self.leased_in.get(unit, 0) + length

    def shorten(self, places: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """These extents are so long now, where that is less than was known."""
        for (unit, number), length in zip(places, lengths):
            extent = self.extents.get((unit, number))
            if extent is not None and length < extent.length:
                self.lengthen(unit, length - extent.length)
                extent.length = length
                extent.limit = -1

    def close(self, places: list[tuple[int, int]]) -> None:
        """These extents take no more blocks."""
        self.changes += 1
        for place in places:
            extent = self.extents.get(place)
            if extent is None:
                # closed with nothing needed in it: all its blocks are gone already, or there never were any
                self._free(place)
                continue
            extent.closed = True
            self.free_if_done(place)

    def free_if_done(self, place: tuple[int, int]) -> None:
        """Frees an extent that is closed and in which nothing is needed."""
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
            self.freed[place] = self.untold[place] = None

    def forget(self, places: Iterable[tuple[int, int]]) -> None:
        """These extents are not leased any more, whatever was in them: free, or gone."""
        for place in places:
            self.freed.pop(place, None)
            self.untold.pop(place, None)
            if place in self.extents:
                self._remove(place)

    def tell_again(self, unit: int) -> None:
        """The unit is to be told anew what it is to free."""
        self.untold.update((place, None) for place in self.freed if place[0] == unit)

    def take_freed(self, units: Container[int], pinned: Container[tuple[int, int]]) -> dict[int, list[int]]:
        """The extents of which these units are to be told, by unit; pinned ones and those of others stay for later."""
        taken: dict[int, list[int]] = {}
        if self.untold:
            kept: dict[tuple[int, int], None] = {}
            for place in self.untold:
                if place[0] in units and place not in pinned:
                    taken.setdefault(place[0], []).append(place[1])
                else:
                    kept[place] = None
            self.untold = kept
        return taken

    def measure(self, unit: np.ndarray, number: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Finds out anew where in each extent its blocks lie: one of them lies in each of these places."""
        self.spans.clear()
        for extent in self.extents.values():
            extent.low, extent.top, extent.limit, extent.gaps = -1, -1, -1, []
        if not len(unit):
            return
        order = np.lexsort((start, number, unit))
        unit, number, start, end = unit[order], number[order], start[order], end[order]
        same = (unit[1:] == unit[:-1]) & (number[1:] == number[:-1])
        first = np.concatenate([[0], np.flatnonzero(~same) + 1])
        tops = np.maximum.reduceat(end, first)
        for own, its, low, top in np.stack([unit[first], number[first], start[first], tops], axis=1).tolist():
            known = self.extents.get((own, its))
            if known is not None:
                known.low, known.top = low, top
                self._list(own, its, known)
        for at in np.flatnonzero(same & (start[1:] - end[:-1] >= _ALIGNMENT)).tolist():
            known = self.extents.get((int(unit[at]), int(number[at])))
            if known is not None:
                known.gaps.append((int(end[at]), int(start[at + 1])))
