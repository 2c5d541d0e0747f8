"""When the rows of a partition were added, and why rows were dropped, in bounded memory."""

from __future__ import annotations

from collections import deque

import numpy as np

from transfer_queue.core.columns.joined_columns import Joined, join_columns, split_columns
from transfer_queue.core.columns.schema import Count, Persisted, counter, deque_of, map_of, several

MARKS = 64  # the age of a row is known to 1/MARKS of `keep_seconds`


class RowAges(Persisted):
    """The approximate age of the rows of one partition. `keep`: seconds that rows are kept, None if without limit."""

    marks: deque[tuple[float, float, int]] = deque_of(float, float, Count)
    """(began, time, end): all positions below `end` existed by `time`. The oldest mark is first."""
    end: int = counter()
    """`end` of the newest mark."""

    def __init__(self, keep: float | None) -> None:
        super().__init__()
        self.step = (keep or 0.0) / MARKS

    def add(self, time: float, end: int, start: int) -> None:
        """Record that all rows below position `end` exist at this time, and that those below `start` are gone."""
        began = time
        if self.marks and time - self.marks[-1][0] < self.step:
            began = self.marks.pop()[0]
        self.marks.append((began, time, end))
        self.end = end
        while self.marks[0][2] <= start and len(self.marks) > 1:
            self.marks.popleft()

    def first_time(self, start: int) -> float | None:
        """Return the time by which the first row from position `start` on existed; None if there is no such row."""
        return next((time for _, time, end in self.marks if end > start), None)

    def expired_end(self, now: float, keep: float) -> int:
        """Return the position below which all rows are at least `keep` seconds old, 0 if none is.

        The sum is the one that computes the deadline. `at <= now - keep` could be rounded the other way, and then the
        deadline would pass without a row that is dropped.
        """
        return max((end for _, at, end in self.marks if at + keep <= now), default=0)

    def shift(self, seconds: float) -> None:
        """Move all times by this number of seconds, to another clock."""
        self.marks = deque((began + seconds, time + seconds, end) for began, time, end in self.marks)


REMEMBERED = 1 << 16  # dropped rows whose reason is remembered


class DropLog(Persisted):
    """Why rows of one partition were dropped."""

    rows: dict[str, int] = map_of(str, Count)
    """Reason -> number of dropped rows."""
    latest: deque[tuple[np.ndarray, str]] = several(
        {"latest": Joined, "reasons": list[str]},
        deque,
        save=lambda latest: (join_columns(rows for rows, _ in latest), [reason for _, reason in latest]),
        load=lambda rows, reasons: deque(zip(split_columns(rows), reasons, strict=True)),
    )
    """(global indexes, reason) of the latest drops, the newest last."""

    def __init__(self) -> None:
        super().__init__()
        self._remembered = 0

    def add(self, rows: np.ndarray, reason: str) -> None:
        """Record that these rows (global indexes) are dropped."""
        self.rows[reason] = self.rows.get(reason, 0) + len(rows)
        self.latest.append((rows, reason))
        self._remembered += len(rows)
        while self._remembered > REMEMBERED and len(self.latest) > 1:
            self._remembered -= len(self.latest.popleft()[0])

    def reason(self, row: int) -> str | None:
        """Return why this row was dropped; None if it was not, or not recently."""
        return next((reason for rows, reason in self.latest if row in rows), None)

    def derive(self) -> None:
        """Count the rows that are remembered."""
        self._remembered = sum(len(rows) for rows, _ in self.latest)
