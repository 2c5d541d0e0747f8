"""The servers of external stores, and the checks for blocks that are lost when one of them ends.

Nothing here is part of the state. A server reports itself on a connection of its own (`ReportStoreServer`), whose end
is the end of the server. The units of the store then check the blocks that are published. A block that was written
before the server ended and is published later is checked when it is published: its extent is older than the check.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np

from transfer_queue.core.context import Context, CoreService, observes
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Send, SendToUnit
from transfer_queue.errors import ProtocolError
from transfer_queue.messages.base import Done
from transfer_queue.messages.reports.store_reports import (
    AwaitFirstStoreServer,
    CheckExtents,
    CheckStore,
    ReportStoreServer,
    StoreChanged,
    StoreServerProgress,
)

MAX_ENDED = 16
RECENT_SECONDS = 300.0
"""Losses within this time after the end of a server name it as their cause."""

Key = tuple[str, str]  # backend, node


@dataclass
class _KnownServer:
    report: ReportStoreServer
    peer: int | None
    """Its connection; None if it has ended."""
    since: float
    """When it was reported, or has ended."""
    ends: int = 0

    def progress(self, now: float) -> StoreServerProgress:
        last = self.report
        up = self.peer is not None
        return StoreServerProgress(last.backend, last.node, last.host, last.process, up, now - self.since, self.ends)


def backend_of(store: str) -> str:
    """Return the backend of a unit's external store, from its address (`UnitInfo.store`).

    Raises:
        ProtocolError: It is not the address of a store.
    """
    try:
        return str(msgspec.json.decode(store)["kind"])
    except (msgspec.DecodeError, KeyError, TypeError):
        raise ProtocolError(
            f"the address of an external store must be a JSON object with its kind, got {store!r}"
        ) from None


class StoreServers(CoreService):
    """See the module."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.ends = 0
        """How many servers have ended."""
        self._state = context.state
        self._servers: dict[Key, _KnownServer] = {}
        """The last server of each store on each node that is there."""
        self._ended: deque[tuple[float, StoreServerProgress]] = deque(maxlen=MAX_ENDED)
        """The servers that have ended, and when, the last ones."""
        self._doubtful: dict[int, int] = {}
        """Unit -> the number from which on its extents are newer than the last check."""
        self._waiting: dict[tuple[int, int], AwaitFirstStoreServer] = {}
        """Peer and sequence -> the request that waits for a server of the first node, or for its end."""

    # ------------------------------------------------------------ servers

    def note_up(self, peer: int, report: ReportStoreServer) -> None:
        """Note that a server runs. If it has replaced another one, the blocks of its store are checked."""
        key, now = (report.backend, report.node), self.context.now
        known = self._servers.get(key)
        if known is None:
            self._servers[key] = _KnownServer(report, peer, now)
        else:
            if known.report.life != report.life:
                if known.peer is not None:  # the end of its connection has not been noticed yet
                    self._note_end(known)
                self.check_all(report.backend)
            known.report, known.peer, known.since = report, peer, now
        self._reply_to_waiting()

    def await_first(self, peer: int, sequence: int, request: AwaitFirstStoreServer) -> None:
        """Reply to a request when what it waits for has happened, which may be now."""
        for known in self._servers.values():
            report = known.report
            if report.first and report.backend == request.backend:
                running = "" if known.peer is None else report.life
                if running != request.life:
                    self._waiting.pop((peer, sequence), None)
                    self.context.emit(Send(peer, sequence, Done(running)))
                    return
        self._waiting[peer, sequence] = request

    def _reply_to_waiting(self) -> None:
        for (peer, sequence), request in list(self._waiting.items()):
            self.await_first(peer, sequence, request)

    def on_connection_ended(self, client: str, peer: int) -> None:
        """See `CoreService.on_connection_ended`. If it was that of a server, the server has ended."""
        for waiting in [waiting for waiting in self._waiting if waiting[0] == peer]:
            del self._waiting[waiting]
        for known in self._servers.values():
            if known.peer == peer:
                self._note_end(known)
                self._reply_to_waiting()

    def _note_end(self, known: _KnownServer) -> None:
        now = self.context.now
        self._ended.append((now, known.progress(now)))
        known.peer, known.since = None, now
        known.ends += 1
        self.ends += 1
        self.check_all(known.report.backend)

    def forget_node(self, node: str) -> None:
        """Note that a node is gone: its servers do not come back."""
        for key in [key for key in self._servers if node and key[1] == node]:
            known = self._servers.pop(key)
            if known.peer is not None:
                self._note_end(known)
            self.check_all(key[0])

    def progress(self, now: float) -> list[StoreServerProgress]:
        """Return the servers of all nodes that are there."""
        return [known.progress(now) for known in self._servers.values()]

    def cause(self, unit: int) -> str:
        """Return which servers of a unit's store have ended recently, for the message that its values are lost."""
        info, now = self._state.units.get(unit), self.context.now
        backend = backend_of(info.store) if info is not None and info.store else ""
        causes = {
            server.place: f"{server.place} had ended {now - at:.1f} s before"
            for at, server in self._ended
            if server.backend == backend and now - at <= RECENT_SECONDS
        }
        return "; ".join(causes.values())

    # ------------------------------------------------------------ checks

    def check_all(self, backend: str) -> None:
        """Let the units of a store check their blocks."""
        for unit in self._state.units.values():
            if unit.store and backend_of(unit.store) == backend:
                self.context.emit(SendToUnit(unit.unit, CheckStore()))

    def on_changed(self, report: StoreChanged) -> None:
        """A unit asks which of its blocks to check."""
        self._doubtful[report.unit] = max(report.next_extent, self._doubtful.get(report.unit, 0))
        extents = [extent for (unit, extent), entry in self._state.blocks.extents.items() if unit == report.unit]
        self._order_check(report.unit, extents)

    @observes(r.SamplesPut)
    def note_published(self, record: r.SamplesPut) -> None:
        """Check the new blocks in extents that are older than the last check of their unit."""
        for block in [block for part in record.puts for block in part.blocks] if self._doubtful else ():
            if block.extent < self._doubtful.get(block.unit, 0):
                self._order_check(block.unit, [block.extent])

    def _order_check(self, unit: int, extents: list[int]) -> None:
        if extents:
            self.context.emit(SendToUnit(unit, CheckExtents(np.array(extents, "<i8").tobytes())))
