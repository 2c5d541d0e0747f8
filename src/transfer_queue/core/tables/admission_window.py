"""Which rows of a partition count for its limit of staleness. `core.puts.flow_control` defines the limit."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transfer_queue.core.columns.schema import Persisted, counter
from transfer_queue.core.tables.row_table import CHUNK_BITS, CONSUMED, Chunk, RowTable
from transfer_queue.core.tables.skipped_rows import SkippedRows
from transfer_queue.messages.descriptors import PartitionOptions


class AdmissionWindow(Persisted, bare=True):
    """The rows that count: those that are not finished, and those that were finished since the version was set."""

    finished: int = counter()
    """The number of rows that were finished since the policy version was set, cleared ones included."""

    def __init__(self, rows: RowTable, skipped: SkippedRows, options: PartitionOptions) -> None:
        super().__init__()
        self._rows = rows
        self._skipped = skipped
        self.limit: int | None = None
        """The number of rows that may count; None for no limit."""
        if options.max_staleness is not None and options.rows_per_version is not None:
            self.limit = (options.max_staleness + 1) * options.rows_per_version
        self._named = [options.trained_by] if options.trained_by else options.free_when
        self.tasks: list[str] = list(self._named)
        """The tasks that must have consumed a row, so that it is finished. Derived."""
        self.unfinished = 0
        """The number of live rows that are not finished, and that no task has skipped. 0 without a limit. Derived."""

    @property
    def counted(self) -> int:
        """The number of rows that count."""
        return self.unfinished + self.finished

    def add_task(self, tasks: Collection[str]) -> None:
        """Record that these tasks have had rows of the partition."""
        if self.limit is not None and not self._named:
            self.recount(tasks)

    def add_rows(self, count: int) -> None:
        """Record that rows were added."""
        if self.limit is not None:
            self.unfinished += count

    def remove(self, key: int, chunk: Chunk, at: np.ndarray) -> None:
        """Record that these rows of a chunk are about to be cleared, dropped or skipped. They do not count any more.

        Rows that are finished already count as before.
        """
        if self.limit is not None:
            self.unfinished -= self._count(key, chunk, at)

    def consume(self, task: str, key: int, chunk: Chunk, at: np.ndarray) -> None:
        """Record that a task is about to consume these rows of a chunk."""
        if self.limit is None or task not in self.tasks:
            return
        others = [name for name in self.tasks if name != task]
        last = at[_consumed_by(others, chunk, at)] if others else at
        count = self._count(key, chunk, last)
        self.unfinished -= count
        self.finished += count

    def recount(self, tasks: Collection[str]) -> None:
        """Count the rows that are not finished. tasks: those that have had rows of the partition."""
        if self.limit is None:
            return
        self.tasks = list(self._named or tasks)
        self.unfinished = self.count_unfinished()

    def count_unfinished(self) -> int:
        """Return the number of live rows that are not finished, and that no task has skipped."""
        return sum(self._count(key, chunk, np.arange(chunk.size)) for key, chunk in self._rows.chunks.items())

    def _count(self, key: int, chunk: Chunk, at: np.ndarray) -> int:
        """Return how many of these rows are live, not finished and not skipped."""
        open_ = (chunk.alive[at] == 1) & (chunk.waiting[at] == 0)
        if self.tasks:
            open_ &= ~_consumed_by(self.tasks, chunk, at)
        open_ &= ~self._skipped.skipped(at + (key << CHUNK_BITS))
        return int(np.count_nonzero(open_))


def _consumed_by(tasks: Collection[str], chunk: Chunk, at: np.ndarray) -> np.ndarray:
    """Return which of these rows all the tasks have consumed, bool [rows]."""
    done = np.ones(len(at), bool)
    for task in tasks:
        column = chunk.consumed.get(task)
        if column is None:
            return np.zeros(len(at), bool)
        done &= column[at] == CONSUMED
    return done
