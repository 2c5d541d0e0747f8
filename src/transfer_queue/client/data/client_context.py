"""What all operations of one client share: its session, its space, the units' memory, the settings.

A forked child never uses its parent's: `ClientContext.forked` drops the inherited descriptors, and the child's
client makes a state of its own, with an id, extents and locks of its own.
"""

from __future__ import annotations

import os
import struct
import threading
import uuid
import zlib
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from transfer_queue.client.checkpoint.block_file import BlockSource, Mapped
from transfer_queue.client.checkpoint.checkpoint_data import CheckpointSave, Loaded
from transfer_queue.client.data import store_io
from transfer_queue.client.data.extent_allocator import ExtentAllocator
from transfer_queue.client.data.extent_allocator import SlotLockProtocol as HeldSlot
from transfer_queue.client.data.known_fields import FieldKinds
from transfer_queue.client.data.lease_renewal import Renewals
from transfer_queue.client.data.remote_chunks import RemoteAllocator, RemoteArena
from transfer_queue.client.data.remote_io import fetch_remote, received
from transfer_queue.client.data.store_io import StoreAllocator, StoreConnections, StoredBlocks
from transfer_queue.config.settings import Settings
from transfer_queue.errors import (
    AttachError,
    ConnectionLostError,
    NotInitializedError,
    ProtocolError,
    TransferQueueError,
    UnitLostError,
)
from transfer_queue.messages.descriptors import DISK, MEMORY, UnitInfo
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import CloseExtents
from transfer_queue.messages.queries import LookupReply
from transfer_queue.messages.storage import UnitStatus
from transfer_queue.messages.system import Topology, TopologyReply
from transfer_queue.net.calls import CONTROLLER, Call
from transfer_queue.net.session import Session, Target
from transfer_queue.node.system.client_liveness import ClientLiveness
from transfer_queue.node.system.paths import host_and_port
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.writer_locks import hold_slot
from transfer_queue.storage.protocols import Reserved
from transfer_queue.storage.stores.base import Store, StoreAddress
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.wire.blocks.remote_ranges import HERE, RangePieces, RemoteRanges
from transfer_queue.wire.blocks.row_addressing import Memory
from transfer_queue.wire.buffers.copies import U8

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

MOST_WARNINGS = 1000  # a client logs at most this many different warnings

_ONE, _PLACE = struct.Struct("<i"), struct.Struct("<qQ")  # the unit of one block; its offset and generation


class SystemAddress(Protocol):
    """Where a system is found: what `node.system.launcher` knows of a running one."""

    @property
    def controller(self) -> str | tuple[str, int]:
        """Where its controller listens."""

    @property
    def key(self) -> bytes:
        """The system's key."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What connections to other nodes use."""

    @property
    def node(self) -> str:
        """The node that this process is on; "" where the system has but one."""

    @property
    def store(self) -> StoreAddress | None:
        """Where its external store is reached from this node; None where its units say so."""

    @property
    def shares_states(self) -> bool:
        """Whether `states` is the folder that the controller uses, as on its node."""

    @property
    def states(self) -> Path:
        """The folder of the system's state files."""

    def log_of(self, target: Target) -> str:
        """Where a server of the system writes its log."""

    def presence(self, client_id: str) -> ClientLiveness | None:
        """Says that a client of this process lives, for as long as it does; None where that cannot be said."""

    def alive(self) -> bool:
        """Whether the system runs; a server of one that does comes back after it was killed."""


class ClientContext:
    """The session of one client id in one process, and what it has learned of its system.

    settings, config: known after the first call. space: where it writes. hold: locks a slot file.
    cuts: by the folder that they are saved into, with the older checkpoint.
    lost_cuts: checkpoints whose saving was interrupted, to be ended by the next. loaded: what is written of one that
    is being loaded. renewals: its leases. kinds: what it knows about the fields that it puts.
    """

    def __init__(
        self, system: SystemAddress, client_id: str | None = None, hold: Callable[[Path], HeldSlot] = hold_slot
    ) -> None:
        self.system = system
        self.client_id = client_id or uuid.uuid4().hex
        self._hold = hold
        self.session = Session(
            self.client_id, system.key, self._resolve, log_of=system.log_of, alive=self._returns, tls=system.tls
        )
        session = self.session
        self.renewals = Renewals(lambda: session.clock())
        self._lock = threading.Lock()
        self._units: dict[int, UnitInfo] = {}
        self._arenas: dict[int, Arena] = {}
        self._remote: frozenset[int] = frozenset()
        """The units on other nodes."""
        self._elsewhere: frozenset[int] = frozenset()
        """Those and the units of external stores, whose blocks are not in arenas of this node."""
        self._keepers: list[int] = []
        """Units of arenas in memory on this node."""
        self.unreachable: set[int] = set()
        """Units on other nodes that could not be reached when they were last asked."""
        self.stores = StoreConnections()
        self._near: StoreAddress | None = None
        """Where the system's external store is reached from this node."""
        self._space: ExtentAllocator | None = None
        self._presence: ClientLiveness | None = None
        self._settings: Settings | None = None
        self.config: dict[str, Any] = {}
        self._warned: set[str] = set()
        self.lost_cuts: set[str] = set()
        self.cuts: dict[str, tuple[CheckpointSave, str | os.PathLike[str] | None]] = {}
        self.loaded: Loaded | None = None
        self.kinds = FieldKinds()

    def _resolve(self, target: Target) -> str | tuple[str, int]:
        if target == CONTROLLER:
            return self.system.controller
        unit = self._units.get(target[1])
        if unit is None:
            raise UnitLostError(f"there is no storage unit {target[1]} any more")
        if target[1] not in self._remote:
            return unit.address
        if not unit.remote:
            raise AttachError(
                f"storage unit {target[1]} is on node {unit.node} and serves no other nodes; this process is on "
                f"{self.system.node or 'the first'}"
            )
        return host_and_port(unit.remote)

    def _returns(self, target: Target) -> bool | None:
        """Whether a server that cannot be reached will come back; of one on another node nobody here knows."""
        return None if target[0] == "unit" and target[1] in self._elsewhere else self.system.alive()

    @property
    def settings(self) -> Settings:
        """The system's settings; `learn` must have run."""
        if self._settings is None:
            raise NotInitializedError("the client has not reached its system yet")
        return self._settings

    @property
    def report_wait(self) -> float | None:
        """The system's `timeouts.report_wait`; None also before `learn` has run."""
        return None if self._settings is None else self._settings.report_wait

    @property
    def units(self) -> Mapping[int, UnitInfo]:
        """The storage units that there are, as far as this client knows."""
        return self._units

    @property
    def space(self) -> ExtentAllocator:
        """Where this client writes; `learn` must have run."""
        if self._space is None:
            raise NotInitializedError("the client has not reached its system yet")
        return self._space

    def warn(self, words: str) -> None:
        """Log a warning, unless this client has already logged the same one."""
        with self._lock:
            if words in self._warned or len(self._warned) >= MOST_WARNINGS:
                return
            self._warned.add(words)
        get_logger(__name__).warning("%s", words)

    def learn(self) -> Generator[Call, AnyReply, None]:
        """Asks for units and settings, once."""
        if self._space is not None:
            return
        reply = yield Call(CONTROLLER, Topology())
        if not isinstance(reply, TopologyReply):
            raise ProtocolError(f"the controller answered Topology with {type(reply).__name__}")
        config = msgspec.json.decode(reply.config)
        with self._lock:
            if self._space is None:
                self._presence = self.system.presence(self.client_id)
                self.config = config
                self._settings = Settings.from_json(config["settings"])
                self.session.grace = self._settings.call_timeout
                self._take(reply.units)
                numbers = self._of_tier(MEMORY)
                first = zlib.crc32(self.client_id.encode()) % max(1, len(numbers))  # clients spread over the units
                self._space = ExtentAllocator(
                    self.client_id, numbers[first:] + numbers[:first], self._hold, self._settings.replicas,
                    self._of_tier(DISK), self._nodes(), self.system.node,
                    self._settings.storage_backend != "SimpleStorage",
                )  # fmt: skip

    def _take(self, units: list[UnitInfo]) -> None:
        self._units = {unit.unit: unit for unit in units}
        self._remote = frozenset(unit.unit for unit in units if unit.node != self.system.node)
        self._near = self.system.store if any(unit.store for unit in units) else None
        self._elsewhere = self._remote | {unit.unit for unit in units if unit.store}
        self._keepers = sorted(unit for unit in self._of_tier(MEMORY) if unit not in self._elsewhere)

    def _nodes(self) -> dict[int, str]:
        return {unit.unit: unit.node for unit in self._units.values()}

    def learn_again(self) -> Generator[Call, AnyReply, None]:
        """Asks which units there are, because one was lost or is new; forgets those that are not there any more."""
        reply = yield Call(CONTROLLER, Topology())
        if not isinstance(reply, TopologyReply):
            raise ProtocolError(f"the controller answered Topology with {type(reply).__name__}")
        with self._lock:
            self._take(reply.units)
            for unit in self._arenas.keys() - self._units.keys():
                del self._arenas[unit]
        self.space.use(self._of_tier(MEMORY), self._of_tier(DISK), self._nodes())

    def _of_tier(self, tier: str) -> list[int]:
        return sorted(unit for unit, info in self._units.items() if info.tier == tier)

    def bring(self, reply: LookupReply) -> Generator[Call, AnyReply, tuple[LookupReply, Memory] | None]:
        """What a lookup names, with the memory to gather it from: brought here where it lies elsewhere.

        None where it is to be looked up again: a unit was lost, or other blocks lie there by now, whose space may have
        been given back to the file system and is not to be touched.
        """
        units = sorted(set(np.frombuffer(reply.blocks.unit, "<i4").tolist()))
        if not (yield from self.reach(units)) or not self.unchanged(reply):
            return None
        if not self._elsewhere:
            return reply, self.memory
        # what lies in a unit that cannot be reached may lie in another one, too, which the next lookup names; else it
        # names the same
        patient = bool(self.unreachable.intersection(np.frombuffer(reply.blocks.unit, "<i4").tolist()))
        try:
            addresses = {unit: self._units[unit].remote if unit in self._remote else "" for unit in self._elsewhere}
            return (
                yield from fetch_remote(reply, addresses, self._keepers, self.memory, partial(self._receive, patient))
            )
        except UnitLostError:
            return None
        except ConnectionLostError:
            if patient:
                raise
            return None

    def wishes(self) -> tuple[list[int], list[int]]:
        """The units in which this client would rather have values lie, and those that it cannot reach."""
        if not self._remote or self.settings.replicas == 1:
            return [], []
        return [unit for unit in self._units if unit not in self._remote], list(self.unreachable)

    def minding(self, operation: Generator[Call, AnyReply, T], patient: bool = True) -> Generator[Call, AnyReply, T]:
        """The same operation; where a unit on another node cannot be reached in it, and is lost, a UnitLostError.

        A unit of this node comes back as long as the system lives. Of one that is elsewhere nobody here knows, so the
        controller is asked. patient: one that is not lost is tried again for `session.grace` seconds.
        """
        limit: float | None = None
        try:
            call = next(operation)
            while True:
                try:
                    reply = yield call
                except ConnectionLostError as error:
                    limit = self.session.clock() + self.session.grace if limit is None else limit
                    found = yield from self._judged(call, error)
                    if found is not error or not patient or self.session.clock() > limit:
                        call = operation.throw(found)
                except BaseException as error:
                    call = operation.throw(error)
                else:
                    if self.unreachable and call.target != CONTROLLER:
                        self.unreachable.discard(call.target[1])
                    call = operation.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _judged(self, call: Call, error: ConnectionLostError) -> Generator[Call, AnyReply, TransferQueueError]:
        """What the failure to reach a server means."""
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
        """Brings the pieces of one unit: from its store, or from its node. patient: see `minding`."""
        external = self.external(pieces.unit)
        if external is None:
            operation = received(found, pieces, buffer)
        else:
            operation = store_io.read(*external, found, pieces, buffer, self.settings.call_timeout)
        return (yield from self.minding(operation, patient))

    def external(self, unit: int) -> tuple[Store, UnitInfo] | None:
        """The store of a unit whose blocks are in an external one."""
        info = self._units.get(unit)
        return (self.stores.of(info, self._near), info) if info is not None and info.store else None

    def only_store(self, reply: LookupReply) -> Generator[Call, AnyReply, tuple[Store, UnitInfo] | None]:
        """The store in which all lies that a lookup names, and its unit; None where it is another place, or several."""
        if len(set(np.frombuffer(reply.blocks.unit, "<i4").tolist())) != 1:
            return None
        unit: int = _ONE.unpack_from(reply.blocks.unit)[0]
        if unit not in self._units:
            yield from self.learn_again()
        return self.external(unit)

    def reach(self, units: list[int]) -> Generator[Call, AnyReply, bool]:
        """Open the arenas of the units that a reply names. False if a unit was lost, so that a new reply is needed."""
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
                yield Call(("unit", unit), UnitStatus())  # it may be about to come back, with another arena
                yield from self.learn_again()
                if unit in self._units:
                    self.arena(unit)
                return False
        return True

    def arena(self, unit: int) -> Arena:
        """The mapped arena of a unit, opened at its first use. UnitLostError, AttachError if it is not there."""
        found = self._arenas.get(unit)
        if found is None:
            with self._lock:
                found = self._arenas.get(unit)
                if found is None:
                    info = self._units.get(unit)
                    if info is None:
                        raise UnitLostError(f"there is no storage unit {unit} any more")
                    found = Arena.open(Path(info.arena))
                    if info.boot_id not in ("", found.boot_id):
                        found.close()
                        raise AttachError(f"the arena in {info.arena} is not that of storage unit {unit}, but another")
                    self._arenas[unit] = found
        return found

    def held(self, unit: int) -> BlockSource:
        """What a unit has, to be saved; where it lies elsewhere it comes in round trips that block."""
        external = self.external(unit)
        if external is not None:
            return StoredBlocks(self.session, *external, self.settings.call_timeout)
        return RemoteArena(self.session, unit) if unit in self._remote else Mapped(self.memory(unit))

    def space_in(self, place: Reserved, nbytes: int, within: float) -> Any:
        """Reserved space, to be filled in slices; elsewhere that takes round trips that block.

        within: seconds for an external store to have room.
        """
        external = self.external(place.unit)
        if external is not None:
            return StoreAllocator(*external, place, nbytes, within)
        if place.session:
            return RemoteAllocator(self.session, place)
        return self.arena(place.unit).view(place.offset, nbytes)

    def stale(self, unit: int, offsets: np.ndarray[Any, Any], generations: np.ndarray[Any, Any]) -> bool:
        """Whether some block of a unit is not there any more; of a unit on another node after a round trip."""
        if self.external(unit) is not None:
            return False  # a name stands for one block for ever: what was read was it
        if unit in self._remote:
            return not RemoteArena(self.session, unit).unchanged(offsets, generations)
        return bool((self.arena(unit).generations[offsets // GRANULE] != generations.view("<u8")).any())

    def memory(self, unit: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All bytes of a unit."""
        return self.arena(unit).memory

    def unchanged(self, reply: LookupReply) -> bool:
        """Whether every block of a lookup still is what its descriptor says; to be asked after its bytes are copied.

        Of blocks elsewhere it says nothing: `fetch_remote` has seen to these.
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
        for unit in set(units.tolist()) - self._elsewhere - {HERE}:
            mine = units == unit
            if (self.arena(unit).generations[granules[mine]] != generations[mine]).any():
                return False
        return True

    def hand_back(self) -> Generator[Call, AnyReply, None]:
        """Hands back every extent in which no block is being written."""
        space = self.space
        space.drain()
        yield from space.give_back()
        yield from self.tell_closed()

    def tell_closed(self) -> Generator[Call, AnyReply, None]:
        """Tells the controller which extents take no more blocks."""
        closes = self.space.closes()
        if closes:
            try:
                yield Call(CONTROLLER, CloseExtents(closes))
            except BaseException:
                self.space.keep(closes)
                raise

    def leave(self) -> Generator[Call, AnyReply, None]:
        """Hands every leased extent back: the last thing that a client says."""
        if self._space is not None:
            yield from self.hand_back()

    def close(self) -> None:
        """Closes connections and gives up the slots' locks."""
        self.session.close()
        self.stores.close()
        if self._space is not None:
            self._space.release()
        if self._presence is not None:
            self._presence.end()

    def forked(self) -> None:
        """In a forked child: drops what was inherited."""
        self.session.forked()
        self.stores.forked()
        if self._presence is not None:
            self._presence.forked()
