"""Rows that a task will never be dealt and counts as finished: how many, which ones, and why."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from transfer_queue.core.columns.row_columns import per_chunk, per_task
from transfer_queue.core.columns.schema import Count, Persisted, list_of, map_of_tuples
from transfer_queue.core.tables.row_table import CHUNK, CHUNK_BITS, MASK, RowTable


class SkippedRows(Persisted):
    """The skipped rows of the tasks of one partition."""

    counts: dict[tuple[str, str], int] = map_of_tuples((str, str), Count)
    """(task, reason) -> rows skipped so far, cleared ones included, until the task's consumption is reset."""
    _reasons: list[str] = list_of(str)
    _codes: dict[str, dict[int, np.ndarray]] = per_task(per_chunk("u2", CHUNK))
    """Task -> chunk number -> for each live row 1 + the number of the reason, 0 if it was not skipped."""

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self._rows = rows

    def add(self, task: str, positions: np.ndarray, reason: str) -> None:
        """Record that the task skips these rows."""
        self.counts[task, reason] = self.counts.get((task, reason), 0) + len(positions)
        if reason not in self._reasons:
            self._reasons.append(reason)
        columns = self._codes.setdefault(task, {})
        for key, _, at, _ in self._rows.split(positions):
            if key not in columns:
                columns[key] = np.zeros(CHUNK, "u2")
            columns[key][at] = 1 + self._reasons.index(reason)

    def reason(self, task: str, position: int) -> str | None:
        """Return why the task skipped a row; None if it did not."""
        column = self._codes.get(task, {}).get(position >> CHUNK_BITS)
        code = 0 if column is None else int(column[position & MASK])
        return self._reasons[code - 1] if code else None

    def column_of(self, task: str, key: int) -> np.ndarray | None:
        """Return for each row of a chunk 1 + the number of the reason, or 0; None if the task skipped no row of it."""
        return self._codes.get(task, {}).get(key)

    @property
    def reason_count(self) -> int:
        """The number of different reasons."""
        return len(self._reasons)

    def columns(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Iterate over (task, chunk number, 1 + the number of the reason of each row)."""
        for task, columns in self._codes.items():
            for key, column in columns.items():
                yield task, key, column

    def skipped(self, positions: np.ndarray) -> np.ndarray:
        """Return which of these rows any task has skipped, bool [rows]."""
        out = np.zeros(len(positions), bool)
        for columns in self._codes.values():
            for key, _, at, where in self._rows.split(positions):
                if key in columns:
                    out[where] |= columns[key][at] != 0
        return out

    def skipped_by(self, task: str, positions: np.ndarray) -> np.ndarray:
        """Return which of these rows a task has skipped, bool [rows]."""
        out = np.zeros(len(positions), bool)
        columns = self._codes.get(task, {})
        for key, _, at, where in self._rows.split(positions) if columns else ():
            if key in columns:
                out[where] = columns[key][at] != 0
        return out

    def skipped_count(self) -> int:
        """Return how many live rows any task has skipped."""
        found: dict[int, np.ndarray] = {}
        for _, key, column in self.columns():
            found[key] = found.get(key, False) | (column != 0)
        return sum(int(np.count_nonzero(column)) for column in found.values())

    def rows_of(self, task: str) -> dict[str, np.ndarray]:
        """Return reason -> positions of the live rows that the task skipped, ascending."""
        found: dict[str, list[np.ndarray]] = {}
        for key, column in sorted(self._codes.get(task, {}).items()):
            for code in np.unique(column[column > 0]).tolist():
                found.setdefault(self._reasons[code - 1], []).append(
                    np.flatnonzero(column == code) + (key << CHUNK_BITS)
                )
        return {reason: np.concatenate(parts) for reason, parts in found.items()}

    def counts_of(self, task: str) -> dict[str, int]:
        """Return reason -> number of rows that the task skipped."""
        return {reason: count for (name, reason), count in self.counts.items() if name == task}

    def clear_rows(self, key: int, at: np.ndarray) -> None:
        """Record that rows of a chunk are cleared."""
        for columns in self._codes.values():
            column = columns.get(key)
            if column is not None:
                column[at] = 0
                if not column.any():
                    del columns[key]

    def forget(self, task: str) -> None:
        """Forget a task whose consumption is reset."""
        self._codes.pop(task, None)
        self.counts = {key: count for key, count in self.counts.items() if key[0] != task}
