"""Counts the samples of a partition by field and task, for the matrix and for the groups."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from transfer_queue.client.control_client import ControlClient
from transfer_queue.live.payload import MatrixAnswer, MatrixField, MatrixTask
from transfer_queue.messages.overview import MOST_COLUMNS, ColumnCounts, CountColumns

ANSWER_SECONDS = 1.5
ROWS_LIMIT = (1 << 63) - 1
DUTY = 100.0  # a count is repeated after this many times the seconds that it took, so that it takes 1 % of the time
LONGEST_PAUSE = 60.0
LEAST_GROUPS = 16  # of fewer groups, a column is a sample and not a group


@dataclass
class _Sums:
    """The pages of one count, joined."""

    made: int
    version: int
    rows: int = 0
    reserved: int = 0
    group_size: int = 0
    used: int = 0
    index: np.ndarray = field(default_factory=lambda: np.full(MOST_COLUMNS, -1, np.int64))
    produced: dict[str, np.ndarray] = field(default_factory=dict)
    lost: dict[str, np.ndarray] = field(default_factory=dict)
    tasks: dict[str, np.ndarray] = field(default_factory=dict)
    whole: int = 0
    lack_field: int = 0
    parts: list[np.ndarray] = field(default_factory=list)

    def add(self, page: ColumnCounts) -> None:
        """Add a page."""
        self.rows, self.reserved, self.group_size = page.rows, page.reserved, page.group_size
        index = np.frombuffer(page.index, "<i8")
        columns = slice(page.column, page.column + len(index))
        self.used = max(self.used, columns.stop if len(index) else 0)
        unknown = self.index[columns] < 0
        self.index[columns][unknown] = index[unknown]
        for into, lines in ((self.produced, page.produced), (self.lost, page.lost)):
            for name, line in lines.items():
                into.setdefault(name, np.zeros(MOST_COLUMNS, np.int64))[columns] += np.frombuffer(line, "<i4")
        for task, states in page.tasks.items():
            total = self.tasks.setdefault(task, np.zeros((len(states), MOST_COLUMNS), np.int64))
            for number, line in enumerate(states):
                total[number, columns] += np.frombuffer(line, "<i4")
        self.whole, self.lack_field = self.whole + page.whole, self.lack_field + page.lack_field
        self.parts.append(np.frombuffer(page.parts, "<i8").reshape(-1, 3))

    def groups(self) -> tuple[int, int, int, int]:
        """Return the size of a group, and the groups that are whole, lack a field, or lack members."""
        parts = np.concatenate([np.zeros((0, 3), np.int64), *self.parts])
        numbers, which = np.unique(parts[:, 0], return_inverse=True)
        members = np.bincount(which, parts[:, 1], minlength=len(numbers))
        complete = np.bincount(which, parts[:, 2], minlength=len(numbers))
        there = members >= self.group_size
        whole = self.whole + int(np.count_nonzero(there & (complete >= members)))
        lack_field = self.lack_field + int(np.count_nonzero(there & (complete < members)))
        return self.group_size, whole, lack_field, int(np.count_nonzero(~there))


class PartitionCounter:
    """Counts one partition, again only if it has changed, and not more often than costs 1 % of the time."""

    def __init__(self, client: ControlClient, partition: str) -> None:
        self._client = client
        self._partition = partition
        self._known: _Sums | None = None
        self._asked: CountColumns | None = None
        self._due = 0.0

    def count(self, request: CountColumns) -> _Sums | None:
        """Return the counts of a request; None if there is no such partition."""
        now = time.monotonic()
        if self._known is not None and request == self._asked and now < self._due:
            return self._known
        version = self._known.version if self._known is not None and request == self._asked else None
        first = CountColumns(
            request.partition, request.width, request.first, request.last, request.takes, request.group_task,
            version=version,
        )  # fmt: skip
        page = self._client.request(first, ColumnCounts, ANSWER_SECONDS)
        same = self._known is not None and page.same and page.made == self._known.made
        if not same:
            self._known = self._count_on(request, page)
            self._asked = request
        self._due = now + min(DUTY * (time.monotonic() - now), LONGEST_PAUSE)
        return self._known

    def _count_on(self, request: CountColumns, page: ColumnCounts) -> _Sums | None:
        sums = _Sums(page.made, page.version)
        while page.known:
            sums.add(page)
            if page.chunk is None:
                return sums
            following = CountColumns(
                request.partition, request.width, request.first, request.last, request.takes, request.group_task,
                page.made, page.chunk, page.before,
            )  # fmt: skip
            page = self._client.request(following, ColumnCounts, ANSWER_SECONDS)
        return None

    def count_groups(self, takes: dict[str, list[str]], task: str) -> tuple[int, int, int, int] | None:
        """Return the size of a group, and the groups that are whole, lack a field, or lack members; None: no groups."""
        own = {task: takes.get(task, [])}
        sums = self.count(CountColumns(self._partition, 1 << 40, takes=own, group_task=task))
        return None if sums is None or not sums.group_size else sums.groups()


class MatrixCounter:
    """Answers `GET /api/matrix`. Equal questions share one count."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._counters: dict[tuple[str, int, int, int], PartitionCounter] = {}

    def answer(
        self, partition: str, first: int, last: int | None, columns: int, takes: Mapping[str, list[str]]
    ) -> MatrixAnswer | None:
        """Return the matrix of a partition; None if there is no such partition.

        Args:
            partition: The partition.
            first: The position of the first row among the live rows.
            last: The position behind the last row; None for the end.
            columns: The number of columns.
            takes: Task -> the fields that its claims name.
        """
        columns = max(1, min(columns, MOST_COLUMNS))
        # Without counting anything: how many rows there are, and the size of a group.
        task = next(iter(takes), "")
        probe = CountColumns(partition, ROWS_LIMIT, ROWS_LIMIT, takes={}, group_task=task or "-")
        found = self._client.request(probe, ColumnCounts, ANSWER_SECONDS)
        if not found.known:
            return None
        first = min(first, found.rows)
        stop = found.rows if last is None else max(min(last, found.rows), first)
        width = max(-(-(stop - first) // columns), 1)
        if found.group_size > 1 and (width > 1 or stop - first >= LEAST_GROUPS * found.group_size):
            width = -(-width // found.group_size) * found.group_size
        key = partition, first, stop, columns
        counter = self._counters.pop(key, None) or PartitionCounter(self._client, partition)
        self._counters[key] = counter  # the most recent one is last
        while len(self._counters) > 16:
            del self._counters[next(iter(self._counters))]
        sums = counter.count(CountColumns(partition, width, first, stop, {task: list(takes[task]) for task in takes}))
        if sums is None:
            return None
        return _answer(partition, sums, first, stop, width, found)


def _answer(partition: str, sums: _Sums, first: int, stop: int, width: int, found: ColumnCounts) -> MatrixAnswer:
    used = sums.used
    rows = np.full(used, width, np.int64)
    if used:
        rows[-1] = max(stop - first - (used - 1) * width, 1)
    fields = [
        MatrixField(name, int(line[:used].sum()), _runs(line[:used], rows), _runs(sums.lost.get(name), rows))
        for name, line in sums.produced.items()
    ]
    tasks = [MatrixTask(task, *(_runs(lines[state], rows) for state in range(4))) for task, lines in sums.tasks.items()]
    epoch = f"{sums.made:x}-{sums.version:x}-{width:x}-{first:x}-{stop:x}"
    return MatrixAnswer(
        partition, epoch, sums.rows, sums.reserved, first, stop,
        used, width, found.group_size, _segments(sums.index[:used]), fields, tasks,
    )  # fmt: skip


def _runs(counts: np.ndarray | None, rows: np.ndarray) -> str:
    """Return shares as run-length bytes in base64; "" if all are 0."""
    if counts is None or not len(rows):
        return ""
    counts = counts[: len(rows)]
    if not counts.any():
        return ""
    shares = np.clip(np.round(255 * counts / rows), 0, 255).astype(np.int64)
    shares = np.where((counts > 0) & (shares == 0), 1, np.where((counts < rows) & (shares == 255), 254, shares))
    first = np.flatnonzero(np.append(True, shares[1:] != shares[:-1]))
    lengths = np.diff(np.append(first, len(shares)))
    pairs = bytearray()
    for length, value in zip(lengths.tolist(), shares[first].tolist()):
        while length:
            pairs += bytes((min(length, 255), value))
            length -= min(length, 255)
    return base64.b64encode(pairs).decode()


def _segments(index: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the first global index of each column as segments [column, index, step]."""
    found: list[tuple[int, int, int]] = []
    for column, value in enumerate(index.tolist()):
        if found:
            begin, base, step = found[-1]
            if column == begin + 1:
                found[-1] = begin, base, value - base
                continue
            if value == base + step * (column - begin):
                continue
        found.append((column, value, 0))
    return found
