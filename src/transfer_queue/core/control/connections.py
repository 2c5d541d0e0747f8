"""Clients that a restored controller knows, and that have not come back to it yet.

They count as connected for a grace, in which they notice that their connection broke and make a new one. Those that
did not are then as gone as if their connection had just ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from transfer_queue.core.state.state import State

GRACE_SECONDS = 10.0


def known(state: State) -> list[str]:
    """The clients that a state knows: by kept replies, by rows that they hold, by what they have promised."""
    clients = dict.fromkeys(state.clients)
    for partition in state.partitions.values():
        clients |= dict.fromkeys(client for _, client, _ in partition.holds.by_holder)
        clients |= dict.fromkeys(client for _, client in partition.wants.promised)
    return list(clients)


class ReconnectGrace:
    """clients: those awaited. until: the end of their grace, on the controller's clock.

    lives: whether the process of a client is known to live; such a client is awaited on.
    """

    def __init__(self, clients: list[str], now: float, lives: Callable[[str], bool]) -> None:
        self.clients = clients
        self.until = now + GRACE_SECONDS
        self._lives = lives

    def due(self) -> float | None:
        """When the grace ends; None where nobody is awaited."""
        return self.until if self.clients else None

    def gone(self, now: float, connections: Mapping[str, Collection[int]]) -> list[str]:
        """Those that count as gone from now on. connections: the peers of each client."""
        if not self.clients or now < self.until:
            return []
        self.until = now + GRACE_SECONDS
        awaited = [client for client in self.clients if not connections.get(client)]
        self.clients = [client for client in awaited if self._lives(client)]
        return [client for client in awaited if client not in self.clients]
