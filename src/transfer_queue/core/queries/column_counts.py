"""Counts a partition by ranges of rows, called columns, in steps of about a millisecond.

A step is one request. It counts whole chunks of the row table, until it has examined `CELLS` values.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import numpy as np

from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.row_table import CHUNK_BITS, CLAIMED, CONSUMED, Chunk, Indexer
from transfer_queue.messages.reports.overview import MOST_COLUMNS, MOST_FIELDS, MOST_TASKS, ColumnCounts, CountColumns

CELLS = 1 << 18  # values of rows that a step examines
SKIPPED_ROWS = 256  # what a chunk outside of the columns costs, in rows
MOST_NAMES = 4096  # fields of a task
STATES = 4  # ready, claimed, consumed and skipped


@handles(CountColumns, reads=True)
def handle_count_columns(context: Context, caller: Caller, request: CountColumns) -> ColumnCounts:
    """Return the counts of the next rows of a partition."""
    partition = context.state.partitions.get(request.partition)
    if partition is None or request.made not in (None, partition.changes.made):
        return ColumnCounts(known=False)
    size = _group_size(context, partition) if request.group_task else 0
    count = _Count(partition, request, size)
    same = request.version == partition.version
    chunk, before = (None, 0) if same else count.step()
    return ColumnCounts(
        True, partition.changes.made, partition.version, same, partition.row_count, len(partition.waiting), size,
        count.column, count.index[: count.used].tobytes(), count.encoded(count.produced), count.encoded(count.lost),
        {task: [line.tobytes() for line in lines[:, : count.used]] for task, lines in count.tasks.items()},
        count.whole, count.lack_field, np.concatenate([np.zeros(0, "i8"), *count.parts]).tobytes(), chunk, before,
    )  # fmt: skip


def _group_size(context: Context, partition: Partition) -> int:
    """Return the samples of a group; 0 if the partition has no groups."""
    if partition.groups.explicit:
        return partition.groups.size or context.group_size_of(partition.name, None) or partition.groups.largest
    size = context.group_size_of(partition.name, None) or 0
    return size if size > 1 else 0


class _Count:
    """The counts of one step."""

    def __init__(self, partition: Partition, request: CountColumns, group_size: int) -> None:
        self._partition = partition
        self._request = request
        self._group_size = group_size
        self._last = min(request.last, request.first + request.width * MOST_COLUMNS)
        self._fields = list(islice(partition.fields, MOST_FIELDS))
        takes = {task: request.takes.get(task, []) for task in [*request.takes, *sorted(partition.tasks)]}
        self._takes: Mapping[str, list[str]] = {
            task: fields[:MOST_NAMES] for task, fields in islice(takes.items(), MOST_TASKS)
        }
        self.column = max(request.before - request.first, 0) // request.width
        """The first column of the step."""
        self.used = 0
        """The number of columns that have rows."""
        most = MOST_COLUMNS - min(self.column, MOST_COLUMNS)
        self.index = np.zeros(most, "<i8")
        self.produced = {name: np.zeros(most, "<i4") for name in self._fields}
        self.lost = {name: np.zeros(most, "<i4") for name in partition.losses.counts if name in self.produced}
        self.tasks = {task: np.zeros((STATES, most), "<i4") for task in self._takes}
        self.whole = self.lack_field = 0
        self.parts: list[np.ndarray] = []

    def encoded(self, lines: Mapping[str, np.ndarray]) -> dict[str, bytes]:
        """Return the lines without their unused ends."""
        return {name: line[: self.used].tobytes() for name, line in lines.items()}

    def step(self) -> tuple[int | None, int]:
        """Count some chunks. Returns the number of the next chunk, or None, and the live rows before it."""
        request, before = self._request, self._request.before
        lines = len(self._fields) + STATES * len(self._takes) + sum(len(fields) for fields in self._takes.values())
        budget = CELLS
        if request.first >= self._partition.rows.count:
            return None, before
        for key, chunk in self._partition.rows.chunks.items():
            if key < request.chunk:
                continue
            if before >= self._last:
                return None, before
            if budget <= 0:
                return key, before
            taken = (chunk.alive[: chunk.size] == 1) & (chunk.waiting[: chunk.size] == 0)
            count = int(np.count_nonzero(taken))
            if before + count > request.first:
                self._count_chunk(key, chunk, taken, count, before)
                budget -= chunk.size * max(lines, 1)
            budget -= SKIPPED_ROWS
            before += count
        return None, before

    def _count_chunk(self, key: int, chunk: Chunk, taken: np.ndarray, count: int, before: int) -> None:
        """Count the rows of a chunk that are within the columns."""
        request = self._request
        places = np.flatnonzero(taken)
        start, stop = max(request.first - before, 0), min(self._last - before, count)
        places = places[start:stop]
        if not len(places):
            return
        whole = int(places[-1] - places[0]) + 1 == len(places)
        at: Indexer = slice(int(places[0]), int(places[-1]) + 1) if whole else places
        rank = before + start - request.first  # of the first row among those of all columns
        column = rank // request.width
        edges = np.arange(-(rank % request.width), len(places), request.width)
        edges[0] = 0
        columns = slice(column - self.column, column - self.column + len(edges))
        self.used = max(self.used, columns.stop)
        index = self.index[columns]
        fresh = np.ones(len(edges), bool)
        fresh[0] = index[0] == 0 or rank % request.width == 0
        index[fresh] = chunk.index[at][edges[fresh]]
        have = {}
        for name in {*self._fields, *(field for fields in self._takes.values() for field in fields)}:
            blocks = chunk.field.get(name)
            have[name] = None if blocks is None else blocks[0][at] != 0
        for name in self._fields:
            _add(self.produced[name], columns, edges, have[name])
        for name, line in self.lost.items():
            column_of = chunk.lost.get(name)
            _add(line, columns, edges, None if column_of is None else column_of[at] != 0)
        for task, fields in self._takes.items():
            self._count_task(task, fields, key, chunk, at, len(places), columns, edges, have)
        if self._group_size:
            complete = _all_of(self._takes.get(request.group_task, []), have, len(places))
            self._count_groups(chunk, at, (key << CHUNK_BITS) + places, complete)

    def _count_task(
        self, task: str, fields: list[str], key: int, chunk: Chunk, at: Indexer, count: int, columns: slice,
        edges: np.ndarray, have: Mapping[str, np.ndarray | None],
    ) -> None:  # fmt: skip
        ready, claimed, consumed, passed = self.tasks[task]
        state = chunk.consumed.get(task)
        there = _all_of(fields, have, count) if fields else None
        if state is None:
            _add(ready, columns, edges, there)
            return
        state = state[at]
        _add(ready, columns, edges, None if there is None else there & (state == 0))
        _add(claimed, columns, edges, state == CLAIMED)
        done = state == CONSUMED
        codes = self._partition.passed.column_of(task, key)
        if codes is not None:
            over = codes[at] != 0
            _add(passed, columns, edges, over)
            done &= ~over
        _add(consumed, columns, edges, done)

    def _count_groups(self, chunk: Chunk, at: Indexer, positions: np.ndarray, complete: np.ndarray) -> None:
        """Count the groups of rows, by whether all members are there and have all fields."""
        groups, size = self._partition.groups, self._group_size
        if not groups.explicit:
            numbers = positions // size
        elif chunk.group is None:
            return
        else:
            numbers = chunk.group[at]
        if (numbers[1:] < numbers[:-1]).any():
            order = np.argsort(numbers, kind="stable")
            numbers, complete = numbers[order], complete[order]
        first = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
        members = np.diff(np.append(first, len(numbers)))
        with_all = np.add.reduceat(complete, first, dtype="i8")
        numbers = numbers[first]
        known = numbers >= 0
        entire = known & (members >= size)
        self.whole += int(np.count_nonzero(entire & (with_all == members)))
        self.lack_field += int(np.count_nonzero(entire & (with_all < members)))
        some = known & ~entire
        self.parts.append(np.stack([numbers[some], members[some], with_all[some]], axis=1).ravel().astype("<i8"))


def _add(line: np.ndarray, columns: slice, edges: np.ndarray, values: np.ndarray | None) -> None:
    """Add the number of true values of each column to a line."""
    if values is not None:
        line[columns] += np.add.reduceat(values, edges, dtype="i4")


def _all_of(fields: list[str], have: Mapping[str, np.ndarray | None], count: int) -> np.ndarray:
    """Return which rows have all of these fields."""
    found = np.ones(count, bool)
    for name in fields:
        there = have[name]
        if there is None:
            return np.zeros(count, bool)
        found &= there
    return found
