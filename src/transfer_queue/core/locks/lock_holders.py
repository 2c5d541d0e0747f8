"""Detects that the process of a client that holds locks is dead, so that its locks end before their leases do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from transfer_queue.core.state.state import State

FIRST_CHECK = 0.01
"""Seconds between the end of a client's last connection and the first check. The kernel closes the sockets of a killed
process before it releases its other locks, or after that.
"""
LONGEST_CHECK = 1.0
"""The maximum number of seconds between two checks. The time between checks doubles until then."""


class LockHolders:
    """The clients that hold locks and have no connection.

    A client that has lost its connections may still be alive, so the end of a connection alone ends no lock. Whether
    its process is alive is known only for clients on the controller's node. The locks of other clients end with their
    leases.
    """

    def __init__(self, state: State, is_alive: Callable[[str], bool], now: float) -> None:
        """Check the holders of a restored state, which have no connection yet.

        Args:
            state: The state.
            is_alive: Returns whether the process of a client is known to be alive.
            now: The time, on the controller's clock.
        """
        self._state = state
        self._is_alive = is_alive
        self._verifiable: dict[str, bool] = {}
        """Client -> whether `is_alive` knows its process. It is checked while the client is certainly alive."""
        self._checks: dict[str, tuple[float, float]] = {}
        """Client without a connection -> the time of its next check, and the seconds before it."""
        for client in state.locks.of_client:
            self.note_holder(client)
            self.note_disconnected(client, now)

    def note_holder(self, client: str) -> None:
        """Note that a client gets a lock."""
        if client not in self._verifiable:
            self._verifiable[client] = self._is_alive(client)

    def note_disconnected(self, client: str, now: float) -> None:
        """Note that a client has no connection any more."""
        if client not in self._state.locks.of_client:
            self._verifiable.pop(client, None)
        elif self._verifiable.get(client):
            self._checks[client] = now + FIRST_CHECK, FIRST_CHECK

    def next_deadline(self) -> float | None:
        """Return the time of the next check; None if no client is checked."""
        return min(when for when, _ in self._checks.values()) if self._checks else None

    def dead_clients(self, now: float, connections: Mapping[str, Collection[int]]) -> list[str]:
        """Return the holders whose process is found dead by the checks that are due.

        Args:
            now: The time, on the controller's clock.
            connections: The connections of each client.
        """
        dead = []
        for client, (when, seconds) in list(self._checks.items()):
            if when > now:
                continue
            del self._checks[client]
            if connections.get(client) or client not in self._state.locks.of_client:
                continue
            if self._is_alive(client):
                seconds = min(2 * seconds, LONGEST_CHECK)
                self._checks[client] = now + seconds, seconds
            else:
                del self._verifiable[client]
                dead.append(client)
        return dead
