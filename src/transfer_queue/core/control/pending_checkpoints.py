"""The saves and loads of the whole state that are under way."""

from __future__ import annotations

from collections.abc import Container

from transfer_queue.core.events.effects import Effect, RemoveState
from transfer_queue.core.state.wait_queues import RequestKey
from transfer_queue.messages.checkpoints import BeginCheckpointReply

Place = tuple[int, int]


class Cut:
    """One save under way. extents: (unit, extent) of all that its values lie in. asker: who waits for its file."""

    def __init__(self, client: str, extents: frozenset[Place], asker: RequestKey, reply: BeginCheckpointReply) -> None:
        self.client = client
        self.extents = extents
        self.asker: RequestKey | None = asker
        self.reply = reply


class Checkpoints(Container[Place]):
    """cuts: by name. loads: who waits for a state to be loaded. peers: where each who waits is answered.

    It contains all and only the extents that some cut needs.
    """

    def __init__(self) -> None:
        self.cuts: dict[str, Cut] = {}
        self.loads: set[RequestKey] = set()
        self.peers: dict[RequestKey, int] = {}

    def __contains__(self, place: object) -> bool:
        return any(place in cut.extents for cut in self.cuts.values())

    def wait_for_load(self, client: str, sequence: int, peer: int) -> None:
        """Note that a client waits for a state to be loaded, on its newest connection."""
        self.loads.add((client, sequence))
        self.peers[client, sequence] = peer

    def heard(self, client: str, sequence: int) -> int | None:
        """A file was read: where its client is answered, None where nobody waits any more."""
        waiting = (client, sequence) in self.loads
        self.loads.discard((client, sequence))
        peer = self.peers.pop((client, sequence), None)
        return peer if waiting else None

    def left(self, client: str) -> list[Effect]:
        """A client has gone: nobody saves or loads for it any more."""
        for waiter in [waiter for waiter in self.peers if waiter[0] == client]:
            del self.peers[waiter]
        self.loads = {waiter for waiter in self.loads if waiter[0] != client}
        gone = [name for name, cut in self.cuts.items() if cut.client == client]
        for name in gone:
            del self.cuts[name]
        return [RemoveState(name) for name in gone]
