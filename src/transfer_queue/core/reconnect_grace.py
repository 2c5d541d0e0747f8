"""Awaits the clients of the controller before this one."""

from __future__ import annotations

from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events.effects import Effect

GRACE_SECONDS = 10.0


class ReconnectGrace(CoreService):
    """The clients that a restored controller knows and that have not reconnected yet.

    They count as connected during a grace period, in which they notice that their connection broke and make a new one.
    A client that has not reconnected at its end is treated as if its connection had just ended.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.clients = context.connections.restored
        self.until = context.now + GRACE_SECONDS
        """The end of the grace period, on the controller's clock."""

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return bool(context.connections.restored)

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        return self.until if self.clients else None

    def on_due(self) -> list[Effect]:
        """Treat the clients as gone that have not come back, unless their processes are known to be alive."""
        self.until = self.context.now + GRACE_SECONDS
        connections = self.context.connections
        awaited = [client for client in self.clients if not connections.peers.get(client)]
        self.clients = [client for client in awaited if self.context.config.lives(client)]
        for client in awaited:
            if client not in self.clients:
                self.context.forget_client(client)
        return []
