"""Rows that a task was not dealt and never will be, though it is through with them: how many, which, and why."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from transfer_queue.core.columns.schema import Count, Persisted, list_of, map_of_tuples, per_chunk, per_task
from transfer_queue.core.tables.row_table import CHUNK, CHUNK_BITS, MASK, RowTable


class SkippedRows(Persisted):
    """counts: (task, reason) -> rows passed over so far, cleared ones included; until the task's consumption is reset.

    Of rows that live the reason is kept, in columns of u2 for the chunks in which any was passed over.
    """

    counts: dict[tuple[str, str], int] = map_of_tuples((str, str), Count)
    _reasons: list[str] = list_of(str)
    _codes: dict[str, dict[int, np.ndarray]] = per_task(per_chunk("u2", CHUNK))
    """1 + number of the reason; 0 without."""

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self._rows = rows

    def add(self, task: str, positions: np.ndarray, reason: str) -> None:
        """The task passes over these rows."""
        self.counts[task, reason] = self.counts.get((task, reason), 0) + len(positions)
        if reason not in self._reasons:
            self._reasons.append(reason)
        columns = self._codes.setdefault(task, {})
        for key, _, at, _ in self._rows.split(positions):
            if key not in columns:
                columns[key] = np.zeros(CHUNK, "u2")
            columns[key][at] = 1 + self._reasons.index(reason)

    def reason(self, task: str, position: int) -> str | None:
        """Why the task passed over a row; None where it did not."""
        column = self._codes.get(task, {}).get(position >> CHUNK_BITS)
        code = 0 if column is None else int(column[position & MASK])
        return self._reasons[code - 1] if code else None

    @property
    def known(self) -> int:
        """How many reasons there are."""
        return len(self._reasons)

    def columns(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """(task, chunk number, 1 + number of the reason of each row)."""
        for task, columns in self._codes.items():
            for key, column in columns.items():
                yield task, key, column

    def of(self, task: str) -> dict[str, int]:
        """Reason -> rows that the task passed over."""
        return {reason: count for (name, reason), count in self.counts.items() if name == task}

    def cleared(self, key: int, at: np.ndarray) -> None:
        """Rows of a chunk end."""
        for columns in self._codes.values():
            column = columns.get(key)
            if column is not None:
                column[at] = 0
                if not column.any():
                    del columns[key]

    def forget(self, task: str) -> None:
        """The task's consumption is reset."""
        self._codes.pop(task, None)
        self.counts = {key: count for key, count in self.counts.items() if key[0] != task}
