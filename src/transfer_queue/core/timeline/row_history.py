"""How the history of one sample is found: which events are about its row, and when its blocks were published.

Each event in the ring has either a range of global indexes, or a place in a second ring, of global indexes. The ring
of indexes has four entries for each event of the ring, so a history goes back as far as the events or these entries do.
To look a row up means to compare it with all entries. A page of them takes a fraction of a millisecond.

The times of publication, and the policy versions, are found by the numbers of blocks. Blocks are numbered in the order
of their publication, so a few checkpoints are enough. The same table contains the times at which rows changed or were
reserved, because the versions of partitions and the global indexes of rows ascend with time, too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

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


GRAIN = 0.001
"""Seconds for which the blocks that are published have one checkpoint."""
MAX_CHECKPOINTS = 16_384
MAX_VERSIONS = 1_024
"""Policy versions of one partition that are remembered."""
MAX_PARTITIONS = 1_024
"""Partitions whose policy versions are remembered."""

_UNKNOWN = math.nan
_LARGEST = (1 << 63) - 1


class PublicationTimes:
    """The times at which blocks were published. Those of old blocks are less exact."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        """The first block of each checkpoint, ascending."""
        self._times: list[float] = []
        """When it was published; NaN: these blocks are copies of older ones."""
        self.newest = 0
        """The first block of the newest checkpoint."""
        self.newest_time = _UNKNOWN
        """Its time."""
        self.due = -math.inf
        """From this time on a block needs a checkpoint of its own. Before, `note` has no effect."""

    def note(self, number: int, now: float) -> None:
        """Note that this block was published, and that later ones follow."""
        if now >= self.due:
            self._add(number, now)
            self.due = now + GRAIN

    def note_copies(self, number: int) -> None:
        """Note that the blocks from this one on are copies of older blocks, until the next one is published."""
        if not self._times or not math.isnan(self._times[-1]):
            self._add(number, _UNKNOWN)
        self.due = -math.inf

    def time_of(self, number: int) -> float:
        """Return when a block was published; NaN if it is not known."""
        at = bisect_right(self._numbers, number) - 1
        return self._times[at] if at >= 0 else _UNKNOWN

    @property
    def first(self) -> int:
        """The first number whose time is known. If no time is known, it is larger than every number."""
        return self._numbers[0] if self._numbers else _LARGEST

    def number_after(self, time: float) -> int:
        """Return the first number whose time is after this one. If no time is, returns a number above all others.

        For tables without copies.
        """
        at = bisect_right(self._times, time)
        return self._numbers[at] if at < len(self._numbers) else _LARGEST

    def _add(self, number: int, time: float) -> None:
        if len(self._numbers) >= MAX_CHECKPOINTS:
            self._thin()
        self._numbers.append(number)
        self._times.append(time)
        self.newest, self.newest_time = number, time

    def _thin(self) -> None:
        """Remove every second checkpoint of the older half, or all of it if most of its blocks are copies."""
        times, half = self._times, len(self._times) // 2
        kept = [at for at in range(half) if not at % 2 or math.isnan(times[at]) or math.isnan(times[at - 1])]
        if len(kept) > half * 3 // 4:
            kept = []
        self._numbers = [*(self._numbers[at] for at in kept), *self._numbers[half:]]
        self._times = [*(times[at] for at in kept), *times[half:]]


class PolicyHistory:
    """The policy version that each partition had when a block was published."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[int], list[int]]] = {}
        """Partition -> (the first block of each version, ascending, and the version)."""

    def note(self, partition: str, before: int, version: int, next_block: int) -> None:
        """Note a new version, and the one before it, which is 0 if none was set."""
        known = self._known.get(partition)
        if known is None:
            if len(self._known) >= MAX_PARTITIONS:
                del self._known[next(iter(self._known))]
            # versions never decrease: if it was 0 until now, it was 0 for all earlier blocks
            known = self._known[partition] = ([], []) if before else ([0], [0])
        blocks, versions = known
        blocks.append(next_block)
        versions.append(version)
        if len(blocks) > MAX_VERSIONS:
            del blocks[: MAX_VERSIONS // 2], versions[: MAX_VERSIONS // 2]

    def version_at(self, partition: str, block: int) -> int | None:
        """Return the version that the partition had when this block was published; None if it is not known."""
        known = self._known.get(partition)
        at = -1 if known is None else bisect_right(known[0], block) - 1
        return None if known is None or at < 0 else known[1][at]

    def forget(self, partition: str) -> None:
        """Forget a partition."""
        self._known.pop(partition, None)
