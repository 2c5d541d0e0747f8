"""The clients without a connection: those that may come back after a restart, and those that are gone.

A client whose process is dead holds nothing any more: its locks end before their leases do, what it has not handed over
becomes ready again, and rows that it has reserved make space for other producers.
"""

from __future__ import annotations

from collections.abc import Collection

from transfer_queue.core.claims import row_leases
from transfer_queue.core.context import Context, CoreService, observes
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.locks import release_all
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.state import State

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


FIRST_CHECK = 0.01
"""Seconds between the end of a client's last connection and the first check. The kernel closes the sockets of a killed
process before it releases its other locks, or after that.
"""
LONGEST_CHECK = 1.0
"""The maximum number of seconds between two checks. The time between checks doubles until then."""
ABSENCE_SECONDS = 30.0
"""Seconds without a connection after which a client whose process cannot be checked has handed over nothing more."""


class AbsentHolders(CoreService):
    """The clients without a connection that hold locks, batches that they have not handed over, or reserved rows.

    A client that has lost its connections may still be alive, so the end of a connection alone ends nothing. Whether
    its process is alive is known only for clients on the controller's node. The locks of other clients end with their
    leases, and their batches after ABSENCE_SECONDS.
    """

    begins_with = (r.LockGranted,)

    def __init__(self, context: Context) -> None:
        """Check the holders of a restored state, which have no connection yet."""
        super().__init__(context)
        self._state = context.state
        self._is_alive = context.config.lives
        self._verifiable: dict[str, bool] = {}
        """Client -> whether `_is_alive` knows its process. It is checked while the client is certainly alive."""
        self._checks: dict[str, tuple[float, float]] = {}
        """Client without a connection -> the time of its next check, and the seconds before it."""
        for client in _holders(context.state):
            self.note_holder(client)
            if not context.connections.peers.get(client):
                self._note_disconnected(client)

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return bool(_holders(context.state))

    def note_holder(self, client: str) -> None:
        """Note that a client gets a batch or reserved rows, or got a lock."""
        if client not in self._verifiable:
            self._verifiable[client] = self._is_alive(client)

    def _note_disconnected(self, client: str) -> None:
        if client not in _holders(self._state):
            self._verifiable.pop(client, None)
            return
        seconds = FIRST_CHECK if self._verifiable.get(client) else ABSENCE_SECONDS
        self._checks[client] = self.context.now + seconds, seconds

    def on_client_left(self, client: str, announced: bool) -> list[Effect]:
        """See `CoreService.on_client_left`. A client that closes hands over nothing more."""
        if announced:
            self._end_holds(client, "left")
        self._note_disconnected(client)
        return []

    @observes(r.LockGranted)
    def note_lock(self, record: r.LockGranted) -> None:
        """Note that a client got a lock."""
        self.note_holder(record.client)

    @observes(r.WriterFenced)
    def note_dead(self, record: r.WriterFenced) -> None:
        """Note that a client is proven dead, which has no connection any more or is about to lose it."""
        if record.writer in self._checks:
            self._checks[record.writer] = 0.0, ABSENCE_SECONDS

    @property
    def awaited(self) -> Collection[str]:
        """The clients without a connection that are not known to be gone."""
        return self._checks.keys()

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        return min(when for when, _ in self._checks.values()) if self._checks else None

    def on_due(self) -> list[Effect]:
        """Check the clients of which a check is due, and end what those hold that are gone."""
        for client, is_dead in self._take_ended():
            self._end_holds(client, "gone", ends_locks=is_dead)
            for waiting in self._state.waiting.space.values():
                self.drop_abandoned(waiting.request.partition)
        return []

    def _take_ended(self) -> list[tuple[str, bool]]:
        """Return the clients that are gone by the checks that are due, each with whether its process is proven dead."""
        ended, now = [], self.context.now
        for client, (when, seconds) in list(self._checks.items()):
            if when > now:
                continue
            del self._checks[client]
            if self.context.connections.peers.get(client) or client not in _holders(self._state):
                continue
            if self._is_alive(client):
                seconds = min(2 * seconds, LONGEST_CHECK)
                self._checks[client] = now + seconds, seconds
            else:
                ended.append((client, self._verifiable.pop(client, False)))
        return ended

    def _end_holds(self, client: str, reason: str, *, ends_locks: bool = True) -> None:
        """End what a client still holds: batches that it has not handed over, and its locks. reason: of the records."""
        released = release_all(self._state, client) if ends_locks else []
        settled = row_leases.settle_unseen(self._state, self.context.config.handed_over, client, reason)
        self.context.log.apply_all([*settled, *released])

    def drop_abandoned(self, name: str) -> bool:
        """Drop the rows of a partition whose clients reserved them and are gone. Return whether there were any."""
        partition = self._state.partitions.get(name)
        if partition is None:
            return False
        records = unneeded_rows.drop_abandoned(partition, {*self.context.connections.peers, *self.awaited})
        self.context.log.apply_all(records)
        return bool(records)


class ClientRemoval(CoreService):
    """Ends what depends on a client that is gone."""

    runs_always = True

    def on_client_removed(self, client: str) -> None:
        """End the references to rows that it holds, its promises of groups, and the rows that it has reserved.

        Its kept replies are forgotten later, when many more clients have left.
        """
        context = self.context
        for partition in list(context.state.partitions.values()):
            for task, rows in partition.holds.references_of(client):
                context.log.apply_all(unneeded_rows.finish_rows(partition, task, client, rows))
            for task in [task for task, name in partition.wants.promised if name == client]:
                context.log.apply(r.GroupsTaken(partition.name, task, client, 0))
            if partition.sealed and client in partition.owners:
                context.log.apply_all(unneeded_rows.drop_abandoned(partition, context.connections.peers))
        for oldest in context.connections.depart(client):
            context.log.apply(r.ClientForgotten(oldest))


def _holders(state: State) -> dict[str, None]:
    """Return the clients that hold locks, batches that they have not handed over, or reserved rows."""
    partitions = state.partitions.values()
    batches = [batch.client for partition in partitions for batch in partition.unseen_batches.by_token.values()]
    reserving = [client for partition in partitions for client in partition.reserving_clients()]
    return dict.fromkeys([*state.locks.holders(), *batches, *reserving])
