"""Counts the samples of a partition by ranges of rows, for the matrix and for the groups."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from transfer_queue.client.control_client import ControlClient
from transfer_queue.messages.reports.overview import MAX_COLUMNS, ColumnCounts, CountColumns

ANSWER_SECONDS = 1.5
DUTY = 100.0  # a count is repeated after this many times the seconds that it took, so that it takes 1 % of the time
LONGEST_PAUSE = 60.0


class GroupCounts(NamedTuple):
    """The groups of a partition that one task takes."""

    size: int
    """The samples of a complete group."""
    complete: int
    lack_field: int
    lack_member: int


@dataclass
class ColumnSums:
    """The pages of one count, joined."""

    made: int
    version: int
    rows: int = 0
    reserved: int = 0
    group_size: int = 0
    used: int = 0
    index: np.ndarray = field(default_factory=lambda: np.full(MAX_COLUMNS, -1, np.int64))
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
                into.setdefault(name, np.zeros(MAX_COLUMNS, np.int64))[columns] += np.frombuffer(line, "<i4")
        for task, states in page.tasks.items():
            total = self.tasks.setdefault(task, np.zeros((len(states), MAX_COLUMNS), np.int64))
            for number, line in enumerate(states):
                total[number, columns] += np.frombuffer(line, "<i4")
        self.whole, self.lack_field = self.whole + page.whole, self.lack_field + page.lack_field
        self.parts.append(np.frombuffer(page.parts, "<i8").reshape(-1, 3))

    def groups(self) -> GroupCounts:
        """Return the counts of groups."""
        parts = np.concatenate([np.zeros((0, 3), np.int64), *self.parts])
        numbers, which = np.unique(parts[:, 0], return_inverse=True)
        members = np.bincount(which, parts[:, 1], minlength=len(numbers))
        complete = np.bincount(which, parts[:, 2], minlength=len(numbers))
        is_full = members >= self.group_size
        whole = self.whole + int(np.count_nonzero(is_full & (complete >= members)))
        lack_field = self.lack_field + int(np.count_nonzero(is_full & (complete < members)))
        return GroupCounts(self.group_size, whole, lack_field, int(np.count_nonzero(~is_full)))


class PartitionCounter:
    """Counts one partition, again only if it has changed, and not more often than costs 1 % of the time."""

    def __init__(self, client: ControlClient, partition: str) -> None:
        self._client = client
        self._partition = partition
        self._known: ColumnSums | None = None
        self._last_request: CountColumns | None = None
        self._due = 0.0

    def count(self, request: CountColumns) -> ColumnSums | None:
        """Return the counts of a request; None if the partition does not exist."""
        now = time.monotonic()
        if self._known is not None and request == self._last_request and now < self._due:
            return self._known
        version = self._known.version if self._known is not None and request == self._last_request else None
        page = self._client.request(replace(request, version=version), ColumnCounts, ANSWER_SECONDS)
        same = self._known is not None and page.same and page.made == self._known.made
        if not same:
            self._known = self._count_on(request, page)
            self._last_request = request
        self._due = now + min(DUTY * (time.monotonic() - now), LONGEST_PAUSE)
        return self._known

    def _count_on(self, request: CountColumns, page: ColumnCounts) -> ColumnSums | None:
        sums = ColumnSums(page.made, page.version)
        while page.known:
            sums.add(page)
            if page.chunk is None:
                return sums
            following = replace(request, made=page.made, chunk=page.chunk, before=page.before)
            page = self._client.request(following, ColumnCounts, ANSWER_SECONDS)
        return None

    def count_groups(self, takes: dict[str, list[str]], task: str) -> GroupCounts | None:
        """Return the counts of the groups that a task takes; None without groups."""
        own = {task: takes.get(task, [])}
        sums = self.count(CountColumns(self._partition, 1 << 40, takes=own, group_task=task))
        return None if sums is None or not sums.group_size else sums.groups()
