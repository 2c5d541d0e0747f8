"""Ends the leases of rows when their time is over, and counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from transfer_queue.core.claims import lease_decisions
from transfer_queue.core.context import Context, CoreService, observes
from transfer_queue.core.deadlines import Deadlines
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.tables.leases import RowLease
from transfer_queue.metrics.timing import MOST_NAMES, OTHER, bounded_key


class Leases(CoreService):
    """The deadlines of the leases of rows, and how many there were since the controller started."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        leases = [
            (partition.name, lease)
            for partition in context.state.partitions.values()
            for lease in partition.leases.by_token.values()
        ]
        self.deadlines = Deadlines(leases, self._find, context.now)
        self.granted: Counter[str] = Counter()
        """Task -> leases."""
        self.acknowledged: Counter[str] = Counter()
        """Task -> rows."""
        self.redelivered: Counter[tuple[str, str]] = Counter()
        """(task, reason) -> rows whose delivery ended without an ack."""

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return any(partition.leases.by_token for partition in context.state.partitions.values())

    def _find(self, name: str, token: int) -> RowLease | None:
        partition = self.context.state.partitions.get(name)
        return None if partition is None else partition.leases.by_token.get(token)

    def begin(self, partition: str, lease: RowLease) -> None:
        """Set the deadline of a new lease."""
        self.deadlines.begin(partition, lease, self.context.now)
        self.granted[_bounded_label(lease.task, self.granted)] += 1

    def renew(self, name: str, token: int) -> bool:
        """Restart the time of a lease. Returns whether it is in force. One whose rows are all cleared is not."""
        lease = self._find(name, token)
        live = lease is not None and bool(len(self.context.state.partitions[name].leases.live_rows(lease)))
        return live and self.deadlines.renew(name, token, self.context.now)

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        return self.deadlines.next_deadline()

    def on_due(self) -> list[Effect]:
        """End the leases whose time is over: their rows are ready again, or dropped after too many deliveries."""
        context = self.context
        for name, lease in self.deadlines.expired(context.now):
            leased = context.state.partitions[name]
            most = context.config.max_deliveries
            for record in lease_decisions.end_lease(leased, lease, lease.rows, "expired", most):
                context.log.apply(record)
        return []

    @observes(r.LeaseAcked)
    def count_ack(self, record: r.LeaseAcked) -> None:
        """Count acknowledged rows."""
        if record.token:
            self.acknowledged[_bounded_label(record.task, self.acknowledged)] += len(record.rows) // 8

    @observes(r.LeaseEnded, r.RankLeft)
    def count_end(self, record: r.LeaseEnded | r.RankLeft) -> None:
        """Count rows that are delivered again."""
        reason = record.reason if isinstance(record, r.LeaseEnded) else "rank gone"
        if record.counted:
            task, reason = bounded_key((record.task, reason), self.redelivered)
            self.redelivered[task, reason] += len(record.counted) // 8

    def series(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the counters by name and label values, for `metrics.samples.series`."""
        return {
            "leases_granted": {(task,): count for task, count in self.granted.items()},
            "acknowledged_rows": {(task,): count for task, count in self.acknowledged.items()},
            "redelivered_rows": {(task, reason): count for (task, reason), count in self.redelivered.items()},
        }


def _bounded_label(task: str, known: Mapping[str, int]) -> str:
    return task if task in known or len(known) < MOST_NAMES else OTHER
