"""The storage units that a client knows: their arenas on this node, their external stores, and those of other nodes."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from transfer_queue.client.data import store_io
from transfer_queue.client.data.remote_io import Streams, fetch_remote, receive_pieces
from transfer_queue.client.data.store_io import StoreConnections
from transfer_queue.config.environment import max_streams
from transfer_queue.config.settings import Settings
from transfer_queue.config.store_options import SIMPLE
from transfer_queue.errors import (
    AttachError,
    ConnectionLostError,
    TransferQueueError,
    UnitLostError,
)
from transfer_queue.messages.descriptors import MEMORY, UnitInfo
from transfer_queue.messages.queries import LookupReply
from transfer_queue.messages.storage import UnitStatus
from transfer_queue.messages.system import Topology, TopologyReply
from transfer_queue.net.calls import CONTROLLER, Call, Operation, Pause, Request, ask_controller
from transfer_queue.net.session import RETRY_DELAYS, Session, Target
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.arena_views import ArenaViews, open_views
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.stores.base import Store, StoreAddress
from transfer_queue.system_folder.liveness import ClientLiveness
from transfer_queue.system_folder.paths import host_and_port
from transfer_queue.wire.blocks.gather import View
from transfer_queue.wire.blocks.remote_ranges import HERE, RangePieces, RemoteRanges
from transfer_queue.wire.blocks.row_addressing import Memory, Place
from transfer_queue.wire.buffers.copies import U8

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

_ONE, _PLACE = struct.Struct("<i"), struct.Struct("<iqQ")
"""The unit of one block; its unit, offset and generation."""


def _distinct_units(reply: LookupReply) -> list[int]:
    """Return the units of the blocks of a lookup, ascending."""
    units = reply.blocks.unit
    first = units[: _ONE.size]
    if units == first * (len(units) // _ONE.size):  # the usual case, which needs no array
        return [_ONE.unpack(first)[0]] if units else []
    return sorted(set(np.frombuffer(units, "<i4").tolist()))


class SystemAddress(Protocol):
    """The address of a running system, which `node.system.launcher.RunningSystem` has."""

    @property
    def new(self) -> bool:
        """Whether the call that returned this object has started the system."""

    @property
    def controller(self) -> str | tuple[str, int]:
        """The address of its controller."""

    @property
    def key(self) -> bytes:
        """The system's key."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of connections to other nodes; None without TLS."""

    @property
    def node(self) -> str:
        """The node of this process; "" if the system has only one."""

    @property
    def stores(self) -> Mapping[str, StoreAddress]:
        """Backend -> the address of its store for this node; the address of its unit is used if there is none."""

    @property
    def shares_states(self) -> bool:
        """Whether `states` is the folder of the controller, because this process is on its node."""

    @property
    def states(self) -> Path:
        """The folder of the system's state files."""

    def log_of(self, target: Target) -> str:
        """Return the path of the log of a server."""

    def start_liveness(self, client_id: str) -> ClientLiveness | None:
        """Report that a client of this process lives, until it ends; None if this cannot be reported."""

    def is_alive(self) -> bool:
        """Whether the system can be used. False also if a later system of its name has replaced it."""

    def will_return(self) -> bool:
        """Whether a server that cannot be reached will return, because the system restarts it or is durable."""

    def follow_controller(self, session: Session) -> None:
        """Move a session to the next controller when another node takes over."""


class Units:
    """The storage units of a system, as one client knows and reaches them.

    Args:
        system: The address of the system.
        session: The session of the client.
    """

    def __init__(self, system: SystemAddress, session: Session) -> None:
        self._system = system
        self._session = session
        self._lock = threading.Lock()
        self.known: Mapping[int, UnitInfo] = {}
        """Number -> the unit."""
        self.remote: frozenset[int] = frozenset()
        """The units on other nodes."""
        self._elsewhere: frozenset[int] = frozenset()
        """The units on other nodes and those with external stores: their blocks are not in arenas of this node."""
        self._keepers: list[int] = []
        """The units with arenas in memory on this node."""
        self.unreachable: set[int] = set()
        """The units on other nodes that could not be reached at the last request."""
        self._reads, self.writes = (Streams(max_streams(), lambda: session.clock()) for _ in range(2))
        """The streams of reads from units on other nodes, and of writes to them."""
        self.stores = StoreConnections()
        self._near: Mapping[str, StoreAddress] = {}
        """Backend -> the address of its external store for this node."""
        self._backends: dict[int, str] = {}
        """Unit -> the backend of its blocks."""
        self._arenas: dict[int, Arena] = {}
        self._views: dict[int, ArenaViews] = {}
        """The views of units' arenas, opened at their first use."""
        self.settings: Settings
        """The system's settings. `begin` must have run."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the units were requested again."""

    def begin(self, settings: Settings, units: Sequence[UnitInfo]) -> None:
        """Take the first units, and the settings of the system."""
        self.settings = settings
        self._take(units)

    def _take(self, units: Sequence[UnitInfo]) -> None:
        self.known = {unit.unit: unit for unit in units}
        self.remote = frozenset(unit.unit for unit in units if unit.node != self._system.node)
        self._backends.update({unit.unit: store_io.backend_of(unit) for unit in units})
        self._near = self._system.stores if any(unit.store for unit in units) else {}
        self._elsewhere = self.remote | {unit.unit for unit in units if unit.store}
        self._keepers = [unit for unit in self.of_tier(SIMPLE, MEMORY) if unit not in self._elsewhere]

    def close(self) -> None:
        """Close the arenas and the connections to stores."""
        for arena in self._arenas.values():
            arena.close()
        self.stores.close()

    def address(self, unit: int) -> str | tuple[str, int]:
        """Return where a unit listens."""
        info = self.known.get(unit)
        if info is None:
            raise UnitLostError(f"storage unit {unit} does not exist any more")
        if unit not in self.remote:
            return info.address
        if not info.remote:
            raise AttachError(
                f"storage unit {unit} on node {info.node} does not serve other nodes, and this process is on "
                f"{self._system.node or 'the first node'}"
            )
        return host_and_port(info.remote)

    def is_elsewhere(self, unit: int) -> bool:
        """Whether the blocks of a unit are on another node, or in an external store."""
        return unit in self._elsewhere

    def backend_of(self, unit: int) -> str:
        """Return the backend of the blocks of a unit."""
        return self._backends[unit]

    @property
    def nodes(self) -> dict[int, str]:
        """Unit -> its node."""
        return {unit.unit: unit.node for unit in self.known.values()}

    def preferences(self) -> tuple[list[int], list[int]]:
        """Return the units that this client prefers in lookups, and those that it cannot reach."""
        if not self.remote or (self.settings.replicas == 1 and self.settings.max_lag is None):
            return [], []
        if self.settings.replicas == 1:  # memory of another node is preferred to a mirror on this one
            return [], list(self.unreachable)
        return [unit for unit in self.known if unit not in self.remote], list(self.unreachable)

    def refresh(self) -> Operation[None]:
        """Request the units again, because one was lost or is new, and forget those that do not exist any more."""
        reply = yield from ask_controller(Topology(), TopologyReply)
        with self._lock:
            self._take(reply.units)
            for unit in self._arenas.keys() - self.known.keys():
                del self._arenas[unit]
        self.on_change()

    def of_tier(self, backend: str, tier: str) -> list[int]:
        """Return the units of a backend that are in memory, or on disk."""
        return sorted(
            unit for unit, info in self.known.items() if info.tier == tier and self._backends[unit] == backend
        )

    def fetch_values(self, reply: LookupReply) -> Operation[tuple[LookupReply, Memory] | None]:
        """Return a lookup's reply with the memory to gather its values from. Fetches values that are elsewhere.

        Returns None if the values must be looked up again: a unit was lost, or there are other blocks at the locations
        now. Their space may have been returned to the file system, and must not be accessed.
        """
        units = _distinct_units(reply)
        if not (yield from self.open_arenas(units)) or not self.is_unchanged(reply):
            return None
        if not self._elsewhere:
            return reply, self.memory
        # values in a unit that cannot be reached may also be in another one; the next lookup then names that unit, or
        # otherwise the same one again
        patient = bool(self.unreachable.intersection(units))
        in_arenas = any(unit in self.remote and not self.known[unit].store for unit in units)
        try:
            addresses = {unit: self.known[unit].remote if unit in self.remote else "" for unit in self._elsewhere}
            receive = partial(self._receive, patient)
            return (yield from fetch_remote(reply, addresses, self._keepers, self.memory, receive, self._reads))
        except UnitLostError:
            return None
        except ConnectionLostError:
            if patient or not in_arenas:  # a store has each value once
                raise
            return None

    def watch_lost(self, operation: Operation[T], patient: bool = True) -> Operation[T]:
        """Run an operation, in which an unreachable unit of another node raises `UnitLostError` if it is lost.

        A unit of this node returns as long as the system runs. For a unit of another node, this is unknown here, so the
        client requests the units from the controller. If `patient`, a call to a unit that is not lost is repeated for
        `session.grace` seconds, unless the system has ended.
        """
        limit: float | None = None
        try:
            call = next(operation)
            while True:
                try:
                    reply = yield call
                except ConnectionLostError as error:
                    limit = self._session.clock() + self._session.grace if limit is None else limit
                    classified = yield from self._classify_failure(call, error)
                    is_over = self._session.clock() > limit or not self._system.will_return()
                    if classified is not error or not patient or is_over:
                        call = operation.throw(classified)
                    else:
                        yield Pause(RETRY_DELAYS[-1])
                except BaseException as error:
                    call = operation.throw(error)
                else:
                    if self.unreachable and isinstance(call, Request) and call.target != CONTROLLER:
                        self.unreachable.discard(call.target[1])
                    call = operation.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _classify_failure(self, call: Call, error: ConnectionLostError) -> Operation[TransferQueueError]:
        """Return the error for an unreachable server: `UnitLostError` if it is a lost unit of another node."""
        unit = call.target[1] if isinstance(call, Request) and call.target != CONTROLLER else -1
        if unit not in self.remote:
            return error
        yield from self.refresh()
        if unit in self.known:
            self.unreachable.add(unit)
            return error
        self.unreachable.discard(unit)
        return UnitLostError(f"storage unit {unit} is lost with its node: {error}")

    def _receive(
        self, patient: bool, ranges: RemoteRanges, pieces: RangePieces, buffer: U8, most: int
    ) -> Operation[bool]:
        """Read the pieces of one unit from its store or from its node. For `patient` see `watch_lost`."""
        external = self.external_store(pieces.unit)
        if external is None:
            operation = receive_pieces(ranges, pieces, buffer, most)
        else:
            operation = store_io.read(*external, ranges, pieces, buffer, self.settings.call_timeout)
        return (yield from self.watch_lost(operation, patient))

    def external_store(self, unit: int) -> tuple[Store, UnitInfo] | None:
        """Return the external store of a unit; None if its blocks are in an arena."""
        info = self.known.get(unit)
        if info is None or not info.store:
            return None
        return self.stores.store_of(info, self._near.get(self._backends[unit])), info

    def only_store(self, reply: LookupReply) -> Operation[tuple[Store, UnitInfo] | None]:
        """Return the external store that has all blocks of a lookup, and its unit; None if there is no such store."""
        if len(_distinct_units(reply)) != 1:
            return None
        unit: int = _ONE.unpack_from(reply.blocks.unit)[0]
        if unit not in self.known:
            yield from self.refresh()
        return self.external_store(unit)

    def open_arenas(self, units: list[int]) -> Operation[bool]:
        """Open the arenas of the units that a reply names. Returns False if a unit was lost: a new reply is needed."""
        for unit in units:
            if unit not in self.known:
                yield from self.refresh()
            if unit in self._elsewhere:
                continue
            try:
                self.arena(unit)
            except UnitLostError:
                return False
            except AttachError:
                yield from self.refresh()
                if unit not in self.known:  # the mirror of an earlier controller, which was removed when it was empty
                    return False
                yield Request(("unit", unit), UnitStatus())  # the unit may be restarting with another arena
                yield from self.refresh()
                if unit in self.known:
                    self.arena(unit)
                return False
        return True

    def arena(self, unit: int) -> Arena:
        """Return the mapped arena of a unit, opened at its first use.

        Raises `UnitLostError` if the unit does not exist any more, and `AttachError` if its arena does not.
        """
        arena = self._arenas.get(unit)
        if arena is None:
            with self._lock:
                arena = self._arenas.get(unit)
                if arena is None:
                    info = self.known.get(unit)
                    if info is None:
                        raise UnitLostError(f"storage unit {unit} does not exist any more")
                    arena = Arena.open(Path(info.arena))
                    if info.boot_id not in ("", arena.boot_id):
                        arena.close()
                        raise AttachError(f"the arena in {info.arena} is not the arena of storage unit {unit}")
                    self._arenas[unit] = arena
        return arena

    def is_in_use(self, unit: int, arena: Arena) -> bool:
        """Whether a unit still exists and this is its mapped arena."""
        return self._arenas.get(unit) is arena

    def hold_views(self, places: Sequence[Place]) -> list[View]:
        """Return views of bytes of arenas of this node, each held until nothing refers to it; None where none can be.

        The caller must compare the generations afterwards.
        """
        held: list[View] = [None] * len(places)
        for unit in {unit for unit, _, _ in places}:
            views = self.views_of(unit)
            if views is not None:
                chosen = [at for at, place in enumerate(places) if place[0] == unit]
                taken = views.take_all(self._session.client_id, [places[at][1:] for at in chosen])
                for at, view in zip(chosen, taken, strict=True):
                    held[at] = view
        return held

    def views_of(self, unit: int) -> ArenaViews | None:
        """Return the views of the arena of a unit of this node; None if there can be none."""
        arena = self.arena(unit)
        views = self._views.get(unit)
        if views is None or views.boot_id != arena.boot_id:
            views = open_views(arena)
            if views is not None:
                self._views[unit] = views
        return views

    def memory(self, unit: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return all bytes of a unit's arena."""
        return self.arena(unit).memory

    def has_open_arenas(self, reply: LookupReply) -> bool:
        """Whether all blocks of a lookup are in arenas of this node that are mapped already."""
        return self._arenas.keys() >= set(_distinct_units(reply))

    def is_unchanged(self, reply: LookupReply) -> bool:
        """Whether every block of a lookup has the generation of its descriptor. Call it after the bytes were copied.

        Blocks outside this node are not checked, because `fetch_remote` has checked them.
        """
        blocks = reply.blocks
        if len(blocks.unit) == _ONE.size:  # arrays of one element take ten times as long
            unit, offset, generation = _PLACE.unpack(blocks.unit + blocks.offset + blocks.generation)
            if unit == HERE or unit in self._elsewhere:
                return True
            return bool(self.arena(unit).generations[offset // GRANULE] == generation)
        units = np.frombuffer(blocks.unit, "<i4")
        granules = np.frombuffer(blocks.offset, "<i8") // GRANULE
        generations = np.frombuffer(blocks.generation, "<i8").view("<u8")
        only = blocks.unit[: _ONE.size] * len(units) == blocks.unit
        for unit in set(units[: 1 if only else None].tolist()) - self._elsewhere - {HERE}:
            chosen = slice(None) if only else units == unit
            if (self.arena(unit).generations[granules[chosen]] != generations[chosen]).any():
                return False
        return True
