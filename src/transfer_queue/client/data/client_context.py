"""The state that all operations of one client share: its session, its space, the units' memory, the settings.

A forked child never uses the state of its parent: `ClientContext.after_fork` closes the inherited descriptors, and the
child's client makes a new state, with its own id, extents and locks.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import uuid
import zlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from transfer_queue.client.checkpoint.block_file import BlockSource, Mapped
from transfer_queue.client.checkpoint.checkpoint_data import CheckpointSave, Loaded
from transfer_queue.client.data import store_io
from transfer_queue.client.data.block_groups import BackendRoutes
from transfer_queue.client.data.extent_allocator import ExtentAllocator
from transfer_queue.client.data.known_fields import FieldKinds
from transfer_queue.client.data.lease_renewal import Renewals
from transfer_queue.client.data.remote_chunks import RemoteAllocator, RemoteArena
from transfer_queue.client.data.remote_io import fetch_remote, receive_pieces
from transfer_queue.client.data.store_io import StoreAllocator, StoreConnections, StoredBlocks
from transfer_queue.client.data.timeline_reader import TimelineReader
from transfer_queue.client.tracing import find_tracing
from transfer_queue.config.environment import copy_threads
from transfer_queue.config.settings import Settings
from transfer_queue.config.store_options import SIMPLE
from transfer_queue.errors import (
    AttachError,
    ConnectionLostError,
    NotInitializedError,
    ProtocolError,
    TransferQueueError,
    UnitLostError,
)
from transfer_queue.messages.claims import ReportBatches
from transfer_queue.messages.descriptors import DISK, MEMORY, UnitInfo
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.queries import LookupReply
from transfer_queue.messages.reports.timeline import Introduce, Leave
from transfer_queue.messages.storage import UnitStatus
from transfer_queue.messages.system import Topology, TopologyReply
from transfer_queue.net.calls import CONTROLLER, Call, pause
from transfer_queue.net.session import RETRY_DELAYS, Session, Target
from transfer_queue.node.system.client_liveness import ClientLiveness
from transfer_queue.node.system.paths import host_and_port
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.arena_views import ArenaViews, open_views
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.writer_locks import HeldSlot, hold_slot
from transfer_queue.storage.protocols import Reserved
from transfer_queue.storage.stores.base import Store, StoreAddress
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.wire.blocks.gather import View
from transfer_queue.wire.blocks.remote_ranges import HERE, RangePieces, RemoteRanges
from transfer_queue.wire.blocks.row_addressing import Memory, Place
from transfer_queue.wire.buffers.copies import U8, set_copy_threads

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

MOST_WARNINGS = 1000
"""A client logs at most this many different warnings."""

_ONE, _PLACE = struct.Struct("<i"), struct.Struct("<qQ")
"""The unit of one block; its offset and generation."""


class SystemAddress(Protocol):
    """The address of a running system, which `node.system.launcher` has."""

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

    def will_return(self) -> bool:
        """Whether a server that cannot be reached will return, because the system restarts it or is durable."""

    def follow_controller(self, session: Session) -> None:
        """Move a session to the next controller when another node takes over."""


def _backend_of(unit: UnitInfo) -> str:
    """Return the backend of the blocks of a unit."""
    return msgspec.json.decode(unit.store, type=StoreAddress).kind if unit.store else SIMPLE


def _distinct_units(reply: LookupReply) -> list[int]:
    """Return the units of the blocks of a lookup, ascending."""
    units = reply.blocks.unit
    first = units[: _ONE.size]
    if units == first * (len(units) // _ONE.size):  # the usual case, which needs no array
        return [_ONE.unpack(first)[0]] if units else []
    return sorted(set(np.frombuffer(units, "<i4").tolist()))


class ClientContext:
    """The session of one client id in one process, and its knowledge of the system.

    Args:
        system: The address of the system.
        client_id: The client id. Default: a new one.
        hold: Locks a slot file.
    """

    def __init__(
        self,
        system: SystemAddress,
        client_id: str | None = None,
        hold: Callable[[Path], HeldSlot] = hold_slot,
        introduction: Introduce | None = None,
    ) -> None:
        self.system = system
        self.introduction = Introduce("") if introduction is None else introduction
        """What `learn` sends to the controller, with the host and the pid of this process, so that reports name it."""
        self.client_id = client_id or uuid.uuid4().hex
        self._hold = hold
        self.session = Session(
            self.client_id, system.key, self._resolve, log_of=system.log_of, alive=self._will_return, tls=system.tls
        )
        session = self.session
        self.renewals = Renewals(lambda: session.clock(), lambda: bool(session.notices))
        self.jitter = random.Random(self.client_id)
        """The random generator for the pauses between attempts, which must differ between clients."""
        self.timeline = TimelineReader(lambda: session.clock())
        """What this client knows of the timeline."""
        self._lock = threading.Lock()
        self._units: dict[int, UnitInfo] = {}
        self._arenas: dict[int, Arena] = {}
        self.on_close: list[Callable[[], object]] = []
        """Called when this client closes, before its connections do."""
        self._views: dict[int, ArenaViews] = {}
        """The views of units' arenas, opened at their first use."""
        self._remote: frozenset[int] = frozenset()
        """The units on other nodes."""
        self._elsewhere: frozenset[int] = frozenset()
        """The units on other nodes and those with external stores: their blocks are not in arenas of this node."""
        self._keepers: list[int] = []
        """The units with arenas in memory on this node."""
        self.unreachable: set[int] = set()
        """The units on other nodes that could not be reached at the last request."""
        self.stores = StoreConnections()
        self._near: Mapping[str, StoreAddress] = {}
        """Backend -> the address of its external store for this node."""
        self._kinds: dict[int, str] = {}
        """Unit -> the backend of its blocks."""
        self._spaces: dict[str, ExtentAllocator] = {}
        """Backend -> the space into which this client writes; empty before `learn` has run."""
        self._only_space: ExtentAllocator | None = None
        """The space of the backend if there is only one."""
        self._routes: BackendRoutes | None = None
        self._presence: ClientLiveness | None = None
        self._marks: ClientLiveness | None = None
        """`_presence`, if the controller finds there what this client has handed over."""
        self._settings: Settings | None = None
        self.config: dict[str, Any] = {}
        """The system's configuration; empty before `learn` has run."""
        self._introduced: Introduce | None = None
        self._warned: set[str] = set()
        self.lost_cuts: set[str] = set()
        """The names of pending saves that were interrupted. The next save ends them."""
        self.cuts: dict[str, tuple[CheckpointSave, str | os.PathLike[str] | None]] = {}
        """Folder -> the pending save for it, and the older checkpoint."""
        self.loaded: Loaded | None = None
        """The blocks of a checkpoint that were written and not published yet."""
        self.kinds = FieldKinds()
        self.tracing = find_tracing()
        """Makes the spans of OpenTelemetry; None if the environment disables them."""

    def _resolve(self, target: Target) -> str | tuple[str, int]:
        if target == CONTROLLER:
            return self.system.controller
        unit = self._units.get(target[1])
        if unit is None:
            raise UnitLostError(f"storage unit {target[1]} does not exist any more")
        if target[1] not in self._remote:
            return unit.address
        if not unit.remote:
            raise AttachError(
                f"storage unit {target[1]} on node {unit.node} does not serve other nodes, and this process is on "
                f"{self.system.node or 'the first node'}"
            )
        return host_and_port(unit.remote)

    def _will_return(self, target: Target) -> bool | None:
        """Whether a server that cannot be reached will return; None for one on another node, where this is unknown.

        No server returns to a system that has ended.
        """
        if not self.system.will_return():
            return False
        return None if target[0] == "unit" and target[1] in self._elsewhere else True

    @property
    def settings(self) -> Settings:
        """The system's settings. `learn` must have run."""
        if self._settings is None:
            raise NotInitializedError("the client has not reached its system yet")
        return self._settings

    @property
    def report_wait(self) -> float | None:
        """The system's `timeouts.report_wait`; None also before `learn` has run."""
        return None if self._settings is None else self._settings.report_wait

    @property
    def units(self) -> Mapping[int, UnitInfo]:
        """The storage units that this client knows."""
        return self._units

    @property
    def routes(self) -> BackendRoutes:
        """The backend of each field. `learn` must have run."""
        if self._routes is None:
            raise NotInitializedError("the client has not reached its system yet")
        return self._routes

    @property
    def spaces(self) -> Collection[ExtentAllocator]:
        """The space into which this client writes, one for each backend. Empty before `learn` has run."""
        return self._spaces.values()

    def backend_of(self, unit: int) -> str:
        """Return the backend of the blocks of a unit."""
        return self._kinds[unit]

    def space(self, backend: str) -> ExtentAllocator:
        """Return the space of a backend. `learn` must have run."""
        return self._spaces[backend]

    def space_of(self, reserved: Reserved) -> ExtentAllocator:
        """Return the space of a reservation."""
        return self._only_space or self._spaces[self._kinds[reserved.unit]]

    def warn(self, words: str, subject: str = "") -> None:
        """Log a warning, unless this client has already logged the same one, or one about the same subject."""
        with self._lock:
            if (subject or words) in self._warned or len(self._warned) >= MOST_WARNINGS:
                return
            self._warned.add(subject or words)
        get_logger(__name__).warning("%s", words)

    def note_handed_over(self, report: ReportBatches) -> bool:
        """Note that batches are handed over, so that the next request reports it. Returns False if it cannot wait.

        If the process dies before, the controller of the same node reads the note in the file of this client. A
        controller elsewhere, or one that may lose this file with the other processes, cannot.
        """
        if self._marks is None:
            return False
        for _, token in report.handed_over or report.finished:
            self._marks.note_handed_over(token)
        self.session.notices.add(report)
        return True

    def learn(self) -> Generator[Call, AnyReply, None]:
        """Request units and settings, once."""
        if self._spaces:
            return
        reply = yield Call(CONTROLLER, Topology())
        if not isinstance(reply, TopologyReply):
            raise ProtocolError(f"the controller replied to Topology with {type(reply).__name__}")
        config = msgspec.json.decode(reply.config)
        yield from self.introduce()
        with self._lock:
            if not self._spaces:
                self._presence = self.system.start_liveness(self.client_id)
                self.session.notices.on_add = self.renewals.note_notice
                self.system.follow_controller(self.session)
                self.config = config
                self._settings = Settings.from_json(config["settings"])
                self.session.grace = self._settings.call_timeout
                self.session.report_wait = self._settings.report_wait
                set_copy_threads(self._settings.copy_threads or copy_threads())
                self._marks = self._presence if self._settings.durability_folder is None else None
                self._routes = BackendRoutes(self._settings.storage_backend, self._settings.field_backends)
                self._take(reply.units)
                spaces = {backend: self._make_space(backend) for backend in self._settings.backends}
                self._only_space = next(iter(spaces.values())) if len(spaces) == 1 else None
                self._spaces = spaces

    def _make_space(self, backend: str) -> ExtentAllocator:
        numbers = self._units_of_tier(backend, MEMORY)
        first = zlib.crc32(self.client_id.encode()) % max(1, len(numbers))  # clients spread over the units
        external = backend != SIMPLE
        return ExtentAllocator(
            self.client_id, numbers[first:] + numbers[:first], self._hold, 1 if external else self.settings.replicas,
            self._units_of_tier(backend, DISK), self._nodes(), self.system.node, external, self.unreachable,
        )  # fmt: skip

    def introduce(self) -> Generator[Call, AnyReply, None]:
        """Send the introduction, unless this process has sent it."""
        said = self.introduction
        if said == self._introduced:
            return
        yield Call(CONTROLLER, msgspec.structs.replace(said, host=socket.gethostname(), pid=os.getpid()))
        self._introduced = said

    def _take(self, units: list[UnitInfo]) -> None:
        self._units = {unit.unit: unit for unit in units}
        self._remote = frozenset(unit.unit for unit in units if unit.node != self.system.node)
        self._kinds.update({unit.unit: _backend_of(unit) for unit in units})
        self._near = self.system.stores if any(unit.store for unit in units) else {}
        self._elsewhere = self._remote | {unit.unit for unit in units if unit.store}
        self._keepers = [unit for unit in self._units_of_tier(SIMPLE, MEMORY) if unit not in self._elsewhere]

    def _nodes(self) -> dict[int, str]:
        return {unit.unit: unit.node for unit in self._units.values()}

    def learn_again(self) -> Generator[Call, AnyReply, None]:
        """Request the units again, because one was lost or is new, and forget those that do not exist any more."""
        reply = yield Call(CONTROLLER, Topology())
        if not isinstance(reply, TopologyReply):
            raise ProtocolError(f"the controller replied to Topology with {type(reply).__name__}")
        with self._lock:
            self._take(reply.units)
            for unit in self._arenas.keys() - self._units.keys():
                del self._arenas[unit]
        for backend, space in self._spaces.items():
            memory, disk = (self._units_of_tier(backend, tier) for tier in (MEMORY, DISK))
            space.set_units(memory, disk, self._nodes())

    def _units_of_tier(self, backend: str, tier: str) -> list[int]:
        return sorted(unit for unit, info in self._units.items() if info.tier == tier and self._kinds[unit] == backend)

    def fetch_values(self, reply: LookupReply) -> Generator[Call, AnyReply, tuple[LookupReply, Memory] | None]:
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
        in_arenas = any(unit in self._remote and not self._units[unit].store for unit in units)
        try:
            addresses = {unit: self._units[unit].remote if unit in self._remote else "" for unit in self._elsewhere}
            return (
                yield from fetch_remote(reply, addresses, self._keepers, self.memory, partial(self._receive, patient))
            )
        except UnitLostError:
            return None
        except ConnectionLostError:
            if patient or not in_arenas:  # a store has each value once
                raise
            return None

    def unit_preferences(self) -> tuple[list[int], list[int]]:
        """Return the units that this client prefers in lookups, and those that it cannot reach."""
        if not self._remote or (self.settings.replicas == 1 and self.settings.max_lag is None):
            return [], []
        if self.settings.replicas == 1:  # memory of another node is preferred to a mirror on this one
            return [], list(self.unreachable)
        return [unit for unit in self._units if unit not in self._remote], list(self.unreachable)

    def watch_lost_units(
        self, operation: Generator[Call, AnyReply, T], patient: bool = True
    ) -> Generator[Call, AnyReply, T]:
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
                    limit = self.session.clock() + self.session.grace if limit is None else limit
                    found = yield from self._classify_failure(call, error)
                    is_over = self.session.clock() > limit or not self.system.will_return()
                    if found is not error or not patient or is_over:
                        call = operation.throw(found)
                    else:
                        yield pause(RETRY_DELAYS[-1])
                except BaseException as error:
                    call = operation.throw(error)
                else:
                    if self.unreachable and call.target != CONTROLLER:
                        self.unreachable.discard(call.target[1])
                    call = operation.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _classify_failure(
        self, call: Call, error: ConnectionLostError
    ) -> Generator[Call, AnyReply, TransferQueueError]:
        """Return the error for an unreachable server: `UnitLostError` if it is a lost unit of another node."""
        kind, unit = call.target
        if kind != "unit" or unit not in self._remote:
            return error
        yield from self.learn_again()
        if unit in self._units:
            self.unreachable.add(unit)
            return error
        self.unreachable.discard(unit)
        return UnitLostError(f"storage unit {unit} is lost with its node: {error}")

    def _receive(
        self, patient: bool, found: RemoteRanges, pieces: RangePieces, buffer: U8
    ) -> Generator[Call, AnyReply, bool]:
        """Read the pieces of one unit from its store or from its node. For `patient` see `watch_lost_units`."""
        external = self.external_store(pieces.unit)
        if external is None:
            operation = receive_pieces(found, pieces, buffer)
        else:
            operation = store_io.read(*external, found, pieces, buffer, self.settings.call_timeout)
        return (yield from self.watch_lost_units(operation, patient))

    def external_store(self, unit: int) -> tuple[Store, UnitInfo] | None:
        """Return the external store of a unit; None if its blocks are in an arena."""
        info = self._units.get(unit)
        if info is None or not info.store:
            return None
        return self.stores.store_of(info, self._near.get(self._kinds[unit])), info

    def only_store(self, reply: LookupReply) -> Generator[Call, AnyReply, tuple[Store, UnitInfo] | None]:
        """Return the external store that has all blocks of a lookup, and its unit; None if there is no such store."""
        if len(_distinct_units(reply)) != 1:
            return None
        unit: int = _ONE.unpack_from(reply.blocks.unit)[0]
        if unit not in self._units:
            yield from self.learn_again()
        return self.external_store(unit)

    def open_arenas(self, units: list[int]) -> Generator[Call, AnyReply, bool]:
        """Open the arenas of the units that a reply names. Returns False if a unit was lost: a new reply is needed."""
        for unit in units:
            if unit not in self._units:
                yield from self.learn_again()
            if unit in self._elsewhere:
                continue
            try:
                self.arena(unit)
            except UnitLostError:
                return False
            except AttachError:
                yield from self.learn_again()
                if unit not in self._units:  # the mirror of an earlier controller, which was removed when it was empty
                    return False
                yield Call(("unit", unit), UnitStatus())  # the unit may be restarting with another arena
                yield from self.learn_again()
                if unit in self._units:
                    self.arena(unit)
                return False
        return True

    def arena(self, unit: int) -> Arena:
        """Return the mapped arena of a unit, opened at its first use.

        Raises `UnitLostError` if the unit does not exist any more, and `AttachError` if its arena does not.
        """
        found = self._arenas.get(unit)
        if found is None:
            with self._lock:
                found = self._arenas.get(unit)
                if found is None:
                    info = self._units.get(unit)
                    if info is None:
                        raise UnitLostError(f"storage unit {unit} does not exist any more")
                    found = Arena.open(Path(info.arena))
                    if info.boot_id not in ("", found.boot_id):
                        found.close()
                        raise AttachError(f"the arena in {info.arena} is not the arena of storage unit {unit}")
                    self._arenas[unit] = found
        return found

    def is_in_use(self, unit: int, arena: Arena) -> bool:
        """Whether a unit still exists and this is its mapped arena."""
        return self._arenas.get(unit) is arena

    def hold_views(self, places: Sequence[Place]) -> list[View]:
        """Return views of bytes of arenas of this node, each held until nothing refers to it; None where none can be.

        The caller must compare the generations afterwards.
        """
        found: list[View] = [None] * len(places)
        for unit in {unit for unit, _, _ in places}:
            views = self.views_of(unit)
            if views is not None:
                mine = [at for at, place in enumerate(places) if place[0] == unit]
                for at, view in zip(mine, views.take_all(self.client_id, [places[at][1:] for at in mine]), strict=True):
                    found[at] = view
        return found

    def views_of(self, unit: int) -> ArenaViews | None:
        """Return the views of the arena of a unit of this node; None if there can be none."""
        arena = self.arena(unit)
        views = self._views.get(unit)
        if views is None or views.boot_id != arena.boot_id:
            views = open_views(arena)
            if views is not None:
                self._views[unit] = views
        return views

    def block_source(self, unit: int) -> BlockSource:
        """Return the blocks of a unit for a checkpoint. Blocks outside this node are read in blocking round trips."""
        external = self.external_store(unit)
        if external is not None:
            return StoredBlocks(self.session, *external, self.settings.call_timeout)
        return RemoteArena(self.session, unit) if unit in self._remote else Mapped(self.memory(unit))

    def reserved_space(self, place: Reserved, nbytes: int, within: float) -> Any:
        """Return reserved space, to whose slices bytes can be assigned; outside this node with blocking round trips.

        `within` is the time in seconds in which an external store must have space.
        """
        external = self.external_store(place.unit)
        if external is not None:
            return StoreAllocator(*external, place, nbytes, within)
        if place.session:
            return RemoteAllocator(self.session, place)
        return self.arena(place.unit).view(place.offset, nbytes)

    def has_stale_blocks(self, unit: int, offsets: np.ndarray[Any, Any], generations: np.ndarray[Any, Any]) -> bool:
        """Whether a unit does not have some block any more. For a unit on another node, this takes a round trip."""
        if self.external_store(unit) is not None:
            return False  # a name always means the same block
        if unit in self._remote:
            return not RemoteArena(self.session, unit).is_unchanged(offsets, generations)
        return bool((self.arena(unit).generations[offsets // GRANULE] != generations.view("<u8")).any())

    def memory(self, unit: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return all bytes of a unit's arena."""
        return self.arena(unit).memory

    def is_unchanged(self, reply: LookupReply) -> bool:
        """Whether every block of a lookup has the generation of its descriptor. Call it after the bytes were copied.

        Blocks outside this node are not checked, because `fetch_remote` has checked them.
        """
        blocks = reply.blocks
        if len(blocks.unit) == _ONE.size:  # arrays of one element take ten times as long
            unit, offset, generation = _ONE.unpack(blocks.unit)[0], *_PLACE.unpack(blocks.offset + blocks.generation)
            if unit == HERE or unit in self._elsewhere:
                return True
            return bool(self.arena(unit).generations[offset // GRANULE] == generation)
        units = np.frombuffer(blocks.unit, "<i4")
        granules = np.frombuffer(blocks.offset, "<i8") // GRANULE
        generations = np.frombuffer(blocks.generation, "<i8").view("<u8")
        only = blocks.unit[: _ONE.size] * len(units) == blocks.unit
        for unit in set(units[: 1 if only else None].tolist()) - self._elsewhere - {HERE}:
            mine = slice(None) if only else units == unit
            if (self.arena(unit).generations[granules[mine]] != generations[mine]).any():
                return False
        return True

    def return_extents(self) -> Generator[Call, AnyReply, None]:
        """Return every extent into which no block is being written."""
        for space in self.spaces:
            space.drain()
            yield from space.return_extents()
            yield from space.close_extents()

    def leave(self, in_order: bool = True) -> Generator[Call, AnyReply, None]:
        """Return every leased extent, and say that this client closes. A client sends these requests last.

        Args:
            in_order: False if it closes because of an error: then it counts as gone, like one whose process died.
        """
        if self._spaces:
            yield from self.return_extents()
            if in_order:
                yield Call(CONTROLLER, ReportBatches(left=True), is_notice=True)
                yield Call(CONTROLLER, Leave())

    def close(self) -> None:
        """Close connections and release the locks of slots."""
        for function in self.on_close:
            function()
        self.session.close()
        self.stores.close()
        for space in self.spaces:
            space.release()
        if self._presence is not None:
            self._presence.end()

    def after_fork(self) -> None:
        """In a forked child: close inherited descriptors and forget connections."""
        self.session.after_fork()
        self.stores.after_fork()
        if self._presence is not None:
            self._presence.close_in_child()
