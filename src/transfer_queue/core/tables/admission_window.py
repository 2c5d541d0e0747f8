"""Which rows of a partition count for its limit of staleness. `core.puts.limits` defines the limit."""

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
            self.change_tasks(self.finished_rows(), tasks)

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

    def take_back(self, task: str, key: int, chunk: Chunk, at: np.ndarray, is_current: bool) -> None:
        """Record that rows of a chunk are about to be ready again. is_current: they were dealt at this version."""
        if self.limit is None or task not in self.tasks:
            return
        count = int(np.count_nonzero(self._classify(key, chunk, at)[1]))
        self.unfinished += count
        self.finished -= count if is_current else 0

    def finished_rows(self) -> dict[int, np.ndarray]:
        """Return chunk number -> which of its live rows are finished, bool [rows]; nothing without a limit."""
        if self.limit is None:
            return {}
        return {key: self._classify(key, chunk, np.arange(chunk.size))[1] for key, chunk in self._rows.chunks.items()}

    def change_tasks(self, before: dict[int, np.ndarray], tasks: Collection[str]) -> None:
        """Record that the consumption of a task was reset, or that a task had its first rows, if none is named.

        Rows that are not finished any more are taken from those that were finished since the version was set. Rows
        that the other tasks alone have finished are added to these.

        before: The result of `finished_rows` before. tasks: See `recount`.
        """
        self.recount(tasks)
        for key, done in self.finished_rows().items():
            self.finished -= min(self.finished, int(np.count_nonzero(before[key] & ~done)))
            self.finished += int(np.count_nonzero(done & ~before[key]))

    def recount(self, tasks: Collection[str]) -> None:
        """Count the rows that are not finished. tasks: those that have had rows of the partition."""
        if self.limit is not None:
            self.tasks = list(self._named or tasks)
            self.unfinished = self.count_unfinished()

    def count_unfinished(self) -> int:
        """Return the number of live rows that are not finished, and that no task has skipped."""
        return sum(self._count(key, chunk, np.arange(chunk.size)) for key, chunk in self._rows.chunks.items())

    def _count(self, key: int, chunk: Chunk, at: np.ndarray) -> int:
        return int(np.count_nonzero(self._classify(key, chunk, at)[0]))

    def _classify(self, key: int, chunk: Chunk, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of these rows of a chunk are not finished, and which are finished, bool [rows].

        Rows that are cleared, not taken or skipped are neither.
        """
        taken = (chunk.alive[at] == 1) & (chunk.waiting[at] == 0) & ~self._skipped.skipped(at + (key << CHUNK_BITS))
        done = _consumed_by(self.tasks, chunk, at) & bool(self.tasks)
        return taken & ~done, taken & done


def _consumed_by(tasks: Collection[str], chunk: Chunk, at: np.ndarray) -> np.ndarray:
    """Return which of these rows all the tasks have consumed, bool [rows]."""
    done = np.ones(len(at), bool)
    for task in tasks:
        column = chunk.consumed.get(task)
        if column is None:
            return np.zeros(len(at), bool)
        done &= column[at] == CONSUMED
    return done
