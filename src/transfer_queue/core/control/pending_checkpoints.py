"""The saves and loads of the whole state that are under way."""

from __future__ import annotations

from collections.abc import Container

from transfer_queue.core.events.effects import Effect, RemoveState
from transfer_queue.core.state.wait_queues import RequestKey
from transfer_queue.messages.checkpoints import BeginCheckpointReply
from transfer_queue.messages.envelopes import RequestEnvelope

ExtentKey = tuple[int, int]
"""A storage unit, and an extent of it."""


class PendingSave:
    """One save that is under way."""

    def __init__(
        self, client: str, extents: frozenset[ExtentKey], waiter: RequestKey, reply: BeginCheckpointReply
    ) -> None:
        self.client = client
        self.extents = extents
        """All extents that contain saved values."""
        self.waiter: RequestKey | None = waiter
        """The request that waits for the file of the state; None once it was answered."""
        self.reply = reply


class PendingCheckpoints(Container[ExtentKey]):
    """The saves and loads under way. It contains exactly the extents that a save needs."""

    def __init__(self) -> None:
        self.saves: dict[str, PendingSave] = {}
        """Name of the state file -> save."""
        self.loads: dict[RequestKey, RequestEnvelope] = {}
        """The requests that wait for a state to be loaded."""
        self.peers: dict[RequestKey, int] = {}
        """The connection on which each waiting request is answered."""

    def __contains__(self, extent: object) -> bool:
        return any(extent in save.extents for save in self.saves.values())

    def wait_for_load(self, client: str, envelope: RequestEnvelope, peer: int) -> None:
        """Note that a client waits for a state to be loaded, on its newest connection."""
        self.loads.setdefault((client, envelope.sequence), envelope)
        self.peers[client, envelope.sequence] = peer

    def end_load(self, client: str, sequence: int) -> int | None:
        """Forget a load. Returns the connection on which its client is answered; None if no client waits any more."""
        waiting = (client, sequence) in self.loads
        self.loads.pop((client, sequence), None)
        peer = self.peers.pop((client, sequence), None)
        return peer if waiting else None

    def forget_client(self, client: str) -> list[Effect]:
        """End the saves and loads of a client that is gone."""
        for waiter in [waiter for waiter in self.peers if waiter[0] == client]:
            del self.peers[waiter]
        self.loads = {waiter: envelope for waiter, envelope in self.loads.items() if waiter[0] != client}
        gone = [name for name, save in self.saves.items() if save.client == client]
        for name in gone:
            del self.saves[name]
        return [RemoveState(name) for name in gone]
