"""What the controller counts and times for status and metrics. None of it is part of the state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from transfer_queue.core.events import records as r
from transfer_queue.metrics.timing import MOST_NAMES, OTHER, Load, Waits, bounded_key


class LeaseCounts:
    """Counts leases and their ends since the controller started."""

    RECORDS = frozenset({r.Dealt, r.RowsLeased, r.LeaseAcked, r.LeaseEnded, r.RankLeft})

    def __init__(self) -> None:
        self.granted: Counter[str] = Counter()
        """Task -> leases."""
        self.acknowledged: Counter[str] = Counter()
        """Task -> rows."""
        self.redelivered: Counter[tuple[str, str]] = Counter()
        """(task, reason) -> rows whose delivery ended without an ack."""

    def series(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the counters by name and label values, for `metrics.samples.series`."""
        return {
            "leases_granted": {(task,): count for task, count in self.granted.items()},
            "acknowledged_rows": {(task,): count for task, count in self.acknowledged.items()},
            "redelivered_rows": {(task, reason): count for (task, reason), count in self.redelivered.items()},
        }

    def count_record(self, record: r.AnyRecord) -> None:
        """Count a record that was applied, which is one of RECORDS."""
        if isinstance(record, r.Dealt):
            if record.lease is not None:
                self.count_record(record.lease)
            for lease in record.leases:
                self.count_record(lease)
        elif isinstance(record, r.RowsLeased):
            self.granted[_bounded_label(record.task, self.granted)] += 1
        elif isinstance(record, r.LeaseAcked):
            if record.token:
                self.acknowledged[_bounded_label(record.task, self.acknowledged)] += len(record.rows) // 8
        elif isinstance(record, (r.LeaseEnded, r.RankLeft)):
            reason = record.reason if isinstance(record, r.LeaseEnded) else "rank gone"
            if record.counted:
                task, reason = bounded_key((record.task, reason), self.redelivered)
                self.redelivered[task, reason] += len(record.counted) // 8


def _bounded_label(task: str, known: Mapping[str, int]) -> str:
    return task if task in known or len(known) < MOST_NAMES else OTHER


class ControllerMeasures:
    """The counters and timings of the controller and of the server around it."""

    def __init__(self) -> None:
        self.counters = defaultdict[str, float](float, requests=0, failures=0, dealt_rows=0, published_rows=0)
        self.server_counters: Mapping[str, float] = {}
        """The counters of the server's connections. The server sets them."""
        self.load = Load()
        """What the server's loop has had to do. The server sets and measures it."""
        self.waits = Waits()
        """How long requests were parked."""
        self.lease_counts = LeaseCounts()
