"""The connections of clients and storage units, and the clients whose connections have ended."""

from __future__ import annotations

from transfer_queue.core.state.state import ReplyCache, State
from transfer_queue.core.state.wait_queues import RequestKey
from transfer_queue.messages.envelopes import AnyReply

MAX_DEPARTED = 1024
"""Clients without a connection whose replies are kept."""


def known_clients(state: State) -> list[str]:
    """Return the clients that a state names: in kept replies, as holders of rows, and in promises of groups."""
    clients = dict.fromkeys(state.clients)
    for partition in state.partitions.values():
        clients |= dict.fromkeys(client for _, client, _ in partition.holds.by_holder)
        clients |= dict.fromkeys(client for _, client in partition.wants.promised)
    return list(clients)


class Connections:
    """Which connections each client and each storage unit has."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.restored = known_clients(state)
        """The clients of the controller before this one."""
        self.peers: dict[str, set[int]] = {client: set() for client in self.restored}
        """Client -> its connections. A client that is awaited has none, and is in here."""
        self.units: dict[int, int] = {}
        """Storage unit -> its connection."""
        self.leaving: set[str] = set()
        """The clients that have announced that they close, and that still have connections."""
        self.departed: dict[str, None] = {}
        """The clients without a connection whose replies are kept, the first to leave first."""
        self.unrecorded: dict[str, ReplyCache] = {}
        """Client -> its replies that no record has: refusals, and those to requests that have changed nothing.

        A copy of such a request may still arrive on another connection of its client. It must not be carried out when
        the client was told that it was refused. When all connections have ended, no copy is left.
        """

    def note_opened(self, client: str, peer: int) -> None:
        """Note a connection of a client."""
        self.peers.setdefault(client, set()).add(peer)
        self.departed.pop(client, None)

    def note_closed(self, client: str, peer: int) -> bool:
        """Note the end of a connection. Returns whether it was the last one of its client."""
        peers = self.peers.get(client)
        if peers is None:
            return False
        peers.discard(peer)
        if not peers:
            self.unrecorded.pop(client, None)
        return not peers

    def note_answer(self, waiter: RequestKey, reply: AnyReply) -> None:
        """Keep a reply that no record has, unless its client is gone or has given the request up."""
        client, sequence = waiter
        if client in self.peers:
            kept = self.unrecorded.setdefault(client, ReplyCache())
            if not kept.is_finished(sequence):
                kept.replies[sequence] = reply

    def note_leaving(self, client: str) -> None:
        """Note that a client has announced that it closes."""
        if client in self.peers:
            self.leaving.add(client)

    def take_leaving(self, client: str) -> bool:
        """Return whether a client without connections had announced that it closes, and forget it."""
        said = client in self.leaving
        self.leaving.discard(client)
        return said

    def units_at(self, peer: int) -> list[int]:
        """Return the storage units that use this connection."""
        return [unit for unit, known in self.units.items() if known == peer]

    def depart(self, client: str) -> list[str]:
        """Note that a client is gone. Returns the clients whose replies are not kept any longer."""
        if client not in self._state.clients:
            return []
        self.departed[client] = None
        forgotten = list(self.departed)[: max(0, len(self.departed) - MAX_DEPARTED)]
        for oldest in forgotten:
            del self.departed[oldest]
        return forgotten
