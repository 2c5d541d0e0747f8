"""The clients that hold locks, batches or reserved rows and have no connection: detects that their processes are dead.

The locks of a dead client end before their leases do, what it has not handed over becomes ready again, and rows that it
has reserved make space for other producers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from transfer_queue.core.state.state import State

FIRST_CHECK = 0.01
"""Seconds between the end of a client's last connection and the first check. The kernel closes the sockets of a killed
process before it releases its other locks, or after that.
"""
LONGEST_CHECK = 1.0
"""The maximum number of seconds between two checks. The time between checks doubles until then."""
ABSENCE_SECONDS = 30.0
"""Seconds without a connection after which a client whose process cannot be checked has handed over nothing more."""


class AbsentHolders:
    """The clients without a connection that hold locks, batches that they have not handed over, or reserved rows.

    A client that has lost its connections may still be alive, so the end of a connection alone ends nothing. Whether
    its process is alive is known only for clients on the controller's node. The locks of other clients end with their
    leases, and their batches after ABSENCE_SECONDS.
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
        reserving = [client for partition in state.partitions.values() for client in partition.reserving_clients()]
        for client in dict.fromkeys([*state.locks.of_client, *self._holders_of_batches(), *reserving]):
            self.note_holder(client)
            self.note_disconnected(client, now)

    def _holders_of_batches(self) -> list[str]:
        partitions = self._state.partitions.values()
        return [batch.client for partition in partitions for batch in partition.unseen_batches.by_token.values()]

    def _holds(self, client: str) -> bool:
        reserves = any(client in partition.reserving_clients() for partition in self._state.partitions.values())
        return reserves or client in self._state.locks.of_client or client in self._holders_of_batches()

    def note_holder(self, client: str) -> None:
        """Note that a client gets a lock, a batch or reserved rows."""
        if client not in self._verifiable:
            self._verifiable[client] = self._is_alive(client)

    def note_disconnected(self, client: str, now: float) -> None:
        """Note that a client has no connection any more."""
        if not self._holds(client):
            self._verifiable.pop(client, None)
            return
        seconds = FIRST_CHECK if self._verifiable.get(client) else ABSENCE_SECONDS
        self._checks[client] = now + seconds, seconds

    def note_dead(self, client: str) -> None:
        """Note that a client is proven dead, which has no connection any more or is about to lose it."""
        if client in self._checks:
            self._checks[client] = 0.0, ABSENCE_SECONDS

    @property
    def awaited(self) -> Collection[str]:
        """The clients without a connection that are not known to be gone."""
        return self._checks.keys()

    def next_deadline(self) -> float | None:
        """Return the time of the next check; None if no client is checked."""
        return min(when for when, _ in self._checks.values()) if self._checks else None

    def check(self, now: float, connections: Mapping[str, Collection[int]]) -> list[tuple[str, bool]]:
        """Return the holders that are gone by the checks that are due, each with whether its process is proven dead.

        Args:
            now: The time, on the controller's clock.
            connections: The connections of each client.
        """
        gone = []
        for client, (when, seconds) in list(self._checks.items()):
            if when > now:
                continue
            del self._checks[client]
            if connections.get(client) or not self._holds(client):
                continue
            if self._is_alive(client):
                seconds = min(2 * seconds, LONGEST_CHECK)
                self._checks[client] = now + seconds, seconds
            else:
                gone.append((client, self._verifiable.pop(client, False)))
        return gone
