"""What was dropped from a partition and why: counted for ever, told by index for the latest."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from transfer_queue.core.columns import joined, parted

REMEMBERED = 1 << 16  # rows of which it is still known why they were dropped


class Drops:
    """rows: reason -> how many. latest: (global indexes, reason), newest last."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.latest: deque[tuple[np.ndarray, str]] = deque()
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

    def saved(self) -> dict[str, Any]:
        """See `core.saving`."""
        return {
            "rows": self.rows,
            "latest": joined([rows for rows, _ in self.latest]),
            "reasons": [reason for _, reason in self.latest],
        }

    def restore(self, saved: Any) -> None:
        """See `core.saving`."""
        self.rows = dict(saved["rows"])
        self.latest = deque(zip(parted(saved["latest"]), saved["reasons"], strict=True))
        self._remembered = sum(len(rows) for rows, _ in self.latest)

    def state(self) -> object:
        """For comparison after replay."""
        return dict(self.rows), [(rows.tolist(), reason) for rows, reason in self.latest]
