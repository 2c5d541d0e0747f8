"""Finds the samples that have not changed for some time and are not finished, some chunks of a partition at a time.

When a row changed follows from `Chunk.changed`, the version of the partition at the last change of its fields or tags:
versions ascend with time, so the rows that are old enough are those below one version.
"""

from __future__ import annotations

import math
from itertools import islice

import numpy as np

from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.reports.sample_report import tasks_of
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.row_table import CONSUMED, Chunk
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.messages.reports.samples import FindStuck, StuckPage

MAX_ROWS = 1024
"""Rows of a reply."""
MAX_FIELDS = 256
"""Fields of a partition that are examined, the first ones."""
MAX_COLUMNS = 64
"""Columns of 4,096 rows that are read for one reply, at least those of one chunk."""


@handles(FindStuck, reads=True)
def handle_find_stuck(context: Context, caller: Caller, request: FindStuck) -> StuckPage:
    """Reply with the stuck samples of the next chunks of a partition."""
    timeline = context.services[TimelineRecorder]
    now = context.now + timeline.wall
    names = list(context.state.partitions) if request.partitions is None else request.partitions
    if not names:
        return StuckPage(now)
    partition = context.state.partitions.get(names[0])
    if partition is None or request.made not in (None, partition.changes.made):
        return StuckPage(now, names[0], left=names[1:])
    cutoff = context.now - max(0.0, request.seconds)
    search = _Search(context, partition, cutoff)
    following = search.read(request.start)
    left = names[1:] if following is None else names
    made = None if following is None else partition.changes.made
    rows, times = search.oldest(min(request.most, MAX_ROWS))
    return StuckPage(
        now, partition.name, search.count, rows.tobytes(), (times + timeline.wall).tobytes(), left, made, following or 0
    )


class _Search:
    """The stuck rows of some chunks of a partition.

    Args:
        context: The controller.
        partition: The partition.
        cutoff: A row is stuck if it has not changed after this time, by the controller's clock.
    """

    def __init__(self, context: Context, partition: Partition, cutoff: float) -> None:
        timeline = context.services[TimelineRecorder]
        self._rows, self._chunks = partition.rows, partition.rows.chunks
        self._changes, self._reservations = timeline.change_times, timeline.reservation_times
        self._unknown = timeline.known_since <= cutoff
        """Whether rows that changed at an unknown time are old enough."""
        self._version = timeline.change_times.number_after(cutoff)
        """Rows that changed at this version or later are too young."""
        self._index = timeline.reservation_times.number_after(cutoff)
        """Rows without a version that were reserved at this global index or later are too young."""
        self._tasks = tasks_of(context, partition)
        self._fields = [stats.name for stats in islice(partition.fields.values(), MAX_FIELDS) if stats.live]
        self.count = 0
        """The number of stuck rows."""
        self._found: list[tuple[np.ndarray, np.ndarray]] = []  # their indexes, and the versions of their changes

    def read(self, start: int) -> int | None:
        """Read chunks, beginning with this number. Returns the number of the next chunk; None after the last one."""
        left = MAX_COLUMNS
        for number, chunk in self._chunks.items():
            if number < start:
                continue
            if left <= 0:
                return number
            left -= self._read_chunk(chunk)
        return None

    def _read_chunk(self, chunk: Chunk) -> int:
        """Add the stuck rows of a chunk. Returns the number of columns that were read."""
        size = chunk.size
        changed = chunk.changed[:size]
        old = (changed > 0) & (changed < self._version)
        if not self._unknown:
            old &= changed >= self._changes.first
        reserved = np.flatnonzero((changed == 0) & (chunk.alive[:size] == 1) & (chunk.waiting[:size] == 0))
        if len(reserved):
            index = chunk.index[reserved]
            aged = (index < self._index) & (self._unknown | (index >= self._reservations.first))
            old[reserved[aged]] = True
        old &= chunk.alive[:size] == 1
        if not old.any():
            return 4
        unfinished = self._unfinished(chunk, size)
        at = np.flatnonzero(old & unfinished)
        self.count += len(at)
        if len(at):
            self._found.append((chunk.index[at], changed[at]))
        return 4 + len(self._tasks) + len(self._fields)

    def _unfinished(self, chunk: Chunk, size: int) -> np.ndarray:
        unfinished = np.zeros(size, bool)
        for task in self._tasks:
            column = chunk.consumed.get(task)
            if column is None:
                return np.ones(size, bool)
            unfinished |= column[:size] != CONSUMED
        for name in self._fields:
            columns = chunk.field.get(name)
            if columns is None:
                return np.ones(size, bool)
            unfinished |= columns[0][:size] == 0
        return unfinished

    def oldest(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that changed first, at most `most`, and when; NaN if it is not known."""
        if not self._found or not most:
            return np.zeros(0, "i8"), np.zeros(0, "f8")
        rows, versions = (np.concatenate(columns) for columns in zip(*self._found))
        chosen = []
        for some in (np.flatnonzero(versions == 0), np.flatnonzero(versions > 0)):
            if len(some) > most:  # a selection takes a tenth of the time of a sort
                some = some[versions[some] <= np.partition(versions[some], most - 1)[most - 1]]
            if not (versions[some][1:] >= versions[some][:-1]).all():
                some = some[np.argsort(versions[some], kind="stable")]
            chosen.append(some[:most])
        kept = np.concatenate(chosen)
        times = np.array([self._time(*row) for row in zip(rows[kept].tolist(), versions[kept].tolist())], "f8")
        order = np.lexsort((rows[kept], np.nan_to_num(times, nan=-math.inf)))[:most]
        return rows[kept][order].astype("<i8"), times[order].astype("<f8")

    def _time(self, row: int, version: int) -> float:
        return self._changes.time_of(version) if version else self._reservations.time_of(row)
