"""Which rows the events of the ring are about, so that the history of one sample can be found.

Each event in the ring has either a range of global indexes, or a place in a second ring, of global indexes. The ring
of indexes has four entries for each event of the ring, so a history goes back as far as the events or these entries do.
To look a row up means to compare it with all entries. A page of them takes a fraction of a millisecond.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from transfer_queue.core.timeline.event_ring import EventRing

ROWS_PER_EVENT = 4
"""Global indexes that are kept for each event of the ring."""
PAGE_EVENTS = 1 << 16
"""Events that one search examines."""
PAGE_ROWS = 1 << 18
"""Global indexes that one search examines."""


class RowHistory:
    """The rows of the newest events.

    Args:
        ring: The events. Each says how many global indexes had been listed here before its own.
    """

    def __init__(self, ring: EventRing) -> None:
        self._ring = ring
        self.capacity = ROWS_PER_EVENT * ring.capacity
        """The number of global indexes that are kept."""
        self._rows = np.empty(self.capacity, "<i8")
        self._bytes = self._rows.view("u1").data
        self._nbytes = 8 * self.capacity
        self.end = 0
        """The number of global indexes that were written so far."""
        self.first = 0
        """Events before this position are about rows of another state, which may have had the same global indexes."""

    def write(self, rows: bytes) -> None:
        """List global indexes, event by event. Of more than `capacity`, the last are kept."""
        skipped = max(0, len(rows) - self._nbytes)
        start, end = (self.end * 8 + skipped) % self._nbytes, (self.end * 8 + len(rows)) % self._nbytes
        if start < end or len(rows) == skipped:
            self._bytes[start:end] = rows[skipped:] if skipped else rows
        else:
            self._bytes[start:] = rows[skipped : skipped + self._nbytes - start]
            self._bytes[:end] = rows[len(rows) - end :]
        self.end += len(rows) >> 3

    def find(self, row: int, before: int | None = None) -> tuple[list[int], int | None]:
        """Return the positions of some of the events of a row, ascending, and where to continue.

        Args:
            row: The global index.
            before: Only events before this position are examined. Default: the newest ones.

        Returns:
            The positions, and the position before which the next call continues; None if all events are examined.
        """
        ring = self._ring
        end = ring.end if before is None else min(before, ring.end)
        rows_end = self.end if end == ring.end else self._before(end)
        oldest = max(self.end - self.capacity, rows_end - PAGE_ROWS)
        # a page does not go beyond the end of the array
        first = max(ring.first, self.first)
        begin = max(first, end - PAGE_EVENTS, (end - 1) // ring.capacity * ring.capacity if end else 0)
        if begin >= end:
            return [], None
        begin += bisect_left(range(begin, end), oldest, key=self._before)
        if begin == end and rows_end > self.end - self.capacity:
            begin = end - 1  # an event with more rows than a page has
        page = ring.rows_of(begin, end - begin)
        found = (np.flatnonzero((page["first"] <= row) & (row <= page["last"])) + begin).tolist()
        if begin < end:
            found += self._listed(row, page["before"], begin, rows_end)
        kept = begin > first and self._before(begin) > self.end - self.capacity
        return sorted(set(found)), begin if kept else None

    def listed(self, before: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of several events that have listed theirs, and the place of the event of each row.

        Rows that are no longer kept are left out.

        Args:
            before: The column "before" of the events (`EventRing.rows_of`).
            counts: The number of rows of each event.
        """
        counts = counts.astype("i8")
        event = np.repeat(np.arange(len(counts)), counts)
        at = np.arange(len(event)) + np.repeat(before - (np.cumsum(counts) - counts), counts)
        kept = at >= self.end - self.capacity
        return self._rows[at[kept] % self.capacity], event[kept]

    def reaches_start(self) -> bool:
        """Return whether no event and no row was lost so far."""
        return 0 < self._ring.end <= self._ring.capacity and self.end <= self.capacity and not self.first

    def _before(self, position: int) -> int:
        return int(self._ring.rows_of(position)["before"][0])

    def _listed(self, row: int, before: np.ndarray, begin: int, rows_end: int) -> list[int]:
        """Return the positions of the events from `begin` on whose listed rows contain a row."""
        low = max(int(before[0]), self.end - self.capacity)
        found: list[int] = []
        while low < rows_end:
            start = low % self.capacity
            some = self._rows[start : start + rows_end - low]
            at = np.flatnonzero(some == row) + low
            found += (before.searchsorted(at, "right") - 1 + begin).tolist()
            low += len(some)
        return found
