"""Parks requests that cannot be met yet, and knows on which connection each of them will be answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import Caller
from transfer_queue.core.measures import ControllerMeasures
from transfer_queue.core.record_log import RecordLog
from transfer_queue.core.state.wait_queues import Parkable, ParkedRequest, RequestKey
from transfer_queue.messages.base import name_of
from transfer_queue.messages.claims import Claim


class ParkedRequests:
    """The connections of the requests that wait. The requests themselves are part of the state (`State.waiting`)."""

    def __init__(self, log: RecordLog, measures: ControllerMeasures) -> None:
        self._log = log
        self._measures = measures
        self.on_ended: list[Any] = []
        """The services with the hook `on_wait_ended`."""
        self.peers: dict[RequestKey, int] = {}
        """The connection of each parked request. After a restart a request has none until its client sends it again."""

    def park(self, caller: Caller, request: Parkable, seconds: float) -> None:
        """Let a request wait for at most `seconds`.

        Raises:
            CapacityError: Too many requests of this client wait.
        """
        sequence, now = caller.envelope.sequence, self._log.now
        self._log.state.waiting.check_limits(caller.client, request)
        self._log.apply(r.RequestParked(caller.client, sequence, now, now + seconds, request))
        self.peers[caller.client, sequence] = caller.peer

    def attach(self, waiting: ParkedRequest, peer: int) -> bool:
        """A client has sent its parked request again: answer it on the newest connection.

        Peers are numbered in ascending order. Returns whether the request had no connection since a restart.
        """
        known = self.peers.get(waiting.waiter)
        self.peers[waiting.waiter] = peer if known is None else max(peer, known)
        return known is None

    def unpark(self, waiter: RequestKey, *, met: bool = True) -> None:
        """End the wait of a request. met: whether it got what it waited for."""
        waiting = self._log.state.waiting.by_waiter[waiter]
        kind, task = name_of(type(waiting.request)), getattr(waiting.request, "task", "")
        self._measures.waits.record(kind, task, self._log.now - waiting.since)
        for service in self.on_ended:
            service.on_wait_ended(waiting, met)
        self._log.apply(r.Unparked(*waiter))
        self.peers.pop(waiter, None)

    def unpark_claims(self, waits: Sequence[ParkedRequest]) -> list[int]:
        """End the waits of claims of one task that are met together. Returns the connection of each."""
        now, apply = self._log.now, self._log.apply
        self._measures.waits.record_all(name_of(Claim), waits[0].claim.task, [now - each.since for each in waits])
        peers = []
        for waiting in waits:
            for service in self.on_ended:
                service.on_wait_ended(waiting, True)
            apply(r.Unparked(waiting.client, waiting.sequence))
            peers.append(self.peers.pop(waiting.waiter))
        return peers

    def cancel(self, client: str, peer: int) -> None:
        """End the waits of the requests that a connection would have answered."""
        for waiter in [waiter for waiter, known in self.peers.items() if known == peer and waiter[0] == client]:
            self.unpark(waiter, met=False)
