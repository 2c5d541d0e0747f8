"""When the rows of a partition came, coarsely: in bounded memory, however many rows there are."""

from __future__ import annotations

from collections import deque

import numpy as np

from transfer_queue.core.columns.schema import (
    Count,
    Joined,
    Persisted,
    counter,
    deque_of,
    join_columns,
    map_of,
    several,
    split_columns,
)

MARKS = 64  # age is known to a MARKS-th of what is kept


class RowAges(Persisted):
    """Marks (began, time, end): all positions below `end` had come by `time`. end: that of the newest mark.

    keep: seconds that rows are kept; None where their age does not matter.
    """

    marks: deque[tuple[float, float, int]] = deque_of(float, float, Count)
    end: int = counter()

    def __init__(self, keep: float | None) -> None:
        super().__init__()
        self.step = (keep or 0.0) / MARKS

    def add(self, time: float, end: int, start: int) -> None:
        """All rows below position `end` are there at this time; those below `start` are gone."""
        began = time
        if self.marks and time - self.marks[-1][0] < self.step:
            began = self.marks.pop()[0]
        self.marks.append((began, time, end))
        self.end = end
        while self.marks[0][2] <= start and len(self.marks) > 1:
            self.marks.popleft()

    def first(self, start: int) -> float | None:
        """By when the first row from position `start` on had come; None where none has."""
        return next((time for _, time, end in self.marks if end > start), None)

    def expired(self, now: float, keep: float) -> int:
        """Return the position below which all rows are at least `keep` seconds old, 0 if none is.

        The sum is the one with which the deadline is computed. `at <= now - keep` could be rounded the other way, and
        the deadline would pass without a row that is dropped.
        """
        return max((end for _, at, end in self.marks if at + keep <= now), default=0)

    def shift(self, seconds: float) -> None:
        """All of it was so many seconds later, by another clock."""
        self.marks = deque((began + seconds, time + seconds, end) for began, time, end in self.marks)


REMEMBERED = 1 << 16  # rows of which it is still known why they were dropped


class DropLog(Persisted):
    """rows: reason -> how many. latest: (global indexes, reason), newest last."""

    rows: dict[str, int] = map_of(str, Count)
    latest: deque[tuple[np.ndarray, str]] = several(
        {"latest": Joined, "reasons": list[str]},
        deque,
        save=lambda latest: (join_columns(rows for rows, _ in latest), [reason for _, reason in latest]),
        load=lambda rows, reasons: deque(zip(split_columns(rows), reasons, strict=True)),
    )

    def __init__(self) -> None:
        super().__init__()
        self._remembered = 0

    def add(self, rows: np.ndarray, reason: str) -> None:
        """These rows (global indexes) are dropped."""
        self.rows[reason] = self.rows.get(reason, 0) + len(rows)
        self.latest.append((rows, reason))
        self._remembered += len(rows)
        while self._remembered > REMEMBERED and len(self.latest) > 1:
            self._remembered -= len(self.latest.popleft()[0])

    def reason(self, row: int) -> str | None:
        """Why this row was dropped; None where it was not, or not lately."""
        return next((reason for rows, reason in self.latest if row in rows), None)

    def restored(self) -> None:
        """Counts the rows that are remembered."""
        self._remembered = sum(len(rows) for rows, _ in self.latest)
