"""Ends the leases of rows when their time is over."""

from __future__ import annotations

from transfer_queue.core.claims import lease_decisions
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.deadlines import Deadlines
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.service import Service
from transfer_queue.core.tables.lease_table import RowLease


class Leases(Service):
    """The deadlines of the leases of rows."""

    def __init__(self, context: ControllerContext) -> None:
        super().__init__(context)
        leases = [
            (partition.name, lease)
            for partition in context.state.partitions.values()
            for lease in partition.leases.by_token.values()
        ]
        self.deadlines = Deadlines(leases, self._find, context.now)

    @classmethod
    def must_start(cls, context: ControllerContext) -> bool:
        """See `Service.must_start`."""
        return any(partition.leases.by_token for partition in context.state.partitions.values())

    def _find(self, name: str, token: int) -> RowLease | None:
        partition = self.context.state.partitions.get(name)
        return None if partition is None else partition.leases.by_token.get(token)

    def begin(self, partition: str, lease: RowLease) -> None:
        """Set the deadline of a new lease."""
        self.deadlines.begin(partition, lease, self.context.now)

    def renew(self, name: str, token: int) -> bool:
        """Restart the time of a lease. Returns whether it is in force. One whose rows are all cleared is not."""
        lease = self._find(name, token)
        live = lease is not None and bool(len(self.context.state.partitions[name].leases.live_rows(lease)))
        return live and self.deadlines.renew(name, token, self.context.now)

    def next_due(self) -> float | None:
        """See `Service.next_due`."""
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
