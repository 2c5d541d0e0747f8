"""The process of a storage unit: recovers its arena, registers the unit, and reconnects to its controller."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue.config.settings import Settings
from transfer_queue.config.store_options import SIMPLE
from transfer_queue.errors import AttachError, ProtocolError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import DISK, MEMORY, MIRROR
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.net.drivers.connection import Connection
from transfer_queue.net.server.server_loop import Outgoing, ServerLoop
from transfer_queue.net.session import Session, raise_failure
from transfer_queue.net.tls_contexts import tls_context
from transfer_queue.node.hosting.service_base import BackgroundThread, ProcessMetrics
from transfer_queue.node.system.controller_moves import controller_address, watch_controller
from transfer_queue.node.system.store_process import read_status, store_lifetime
from transfer_queue.node.unit.mirror_folders import PLAIN
from transfer_queue.node.unit.unit_service import UnitService, fetch_blocks
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.remote_access import MAX_WRITTEN
from transfer_queue.storage.arena.writer_locks import SlotFolder
from transfer_queue.storage.stores.base import connect
from transfer_queue.storage.unit.extent_pool import ArenaPool, DiskPool, ExtentPool, MirrorPool, RetiredPool
from transfer_queue.storage.unit.object_pool import UNLIMITED, ObjectNames, ObjectPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.storage.unit.unit_effects import Begin, Effect, Fetch
from transfer_queue.system_folder.paths import SystemFolder

CALL_SECONDS = 30.0  # for which the unit waits for its controller's reply
GREETING_SECONDS = 2.0  # for which the unit waits for a controller on another node to greet it
RETRY_SECONDS = 0.1  # between two attempts to reach a controller that is gone
LONGEST_PAUSE = 5.0  # seconds before connecting again, if connections end soon
STEADY_SECONDS = 10.0  # a connection that lasted this long did not end soon

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnitPlace:
    """Where a storage unit works."""

    controller: str
    """Where the controller listens: a path or "host:port"."""
    arenas: Path
    """The folder for the unit's arena."""
    listeners: Sequence[socket.socket]
    """The sockets on which the unit serves. They outlive it (`net.server.sockets`)."""
    node: str = ""
    """See `launcher_protocol.NodeRole`."""
    remote: str = ""
    """See `RegisterUnit`."""
    tier: str = MEMORY
    """See `RegisterUnit`."""
    sharers: int = 1
    """The number of units in memory that share the memory of the node."""
    backend: str = SIMPLE
    """The backend of the unit's blocks."""
    retired: bool = False
    """See `RegisterUnit`. `arenas` is then the folder of the arena itself."""

    def name(self, number: int) -> str:
        """Return the name of a unit, which is unique in the whole system and the same for all its arenas."""
        if self.retired:
            return f"{self.arenas.parent.name}/{self.arenas.name}"
        if self.tier == MIRROR and self.arenas.name != PLAIN:  # of a term: other nodes have had mirrors, too
            return self.arenas.name
        return f"unit-{number}" + (f"@{self.node}" if self.node else "")


def build_unit(system: SystemFolder, number: int, config: str, key: bytes, place: UnitPlace) -> ServerLoop:
    """Return the server of the `number`-th unit of this node, registered with the controller.

    It continues with the arena of the previous unit of this name. The controller gives the unit its number in the
    system, which is a new one if an arena was lost.
    """
    settings = Settings.from_json(msgspec.json.decode(config)["settings"])
    pool, slots, share, store = _open_pool(system, number, place, settings, lambda run, then: begin_beside(run, then))
    name = place.name(number)
    tls = tls_context(settings.tls, server=False)
    session = Session(
        f"unit-{number}-{uuid.uuid4().hex}", key, lambda target: controller_address(system, place.controller),
        role="unit", tls=tls,
    )  # fmt: skip

    def registration(extents: bytes) -> RegisterUnit:
        when, newer = time.strftime("%Y-%m-%d %H:%M:%S"), pool.next_extent
        return RegisterUnit(
            str(system.unit(number)), str(pool.folder), pool.boot_id, name, when, extents, newer, place.node,
            place.remote, place.tier, share, store, place.retired,
        )  # fmt: skip

    leased = pool.table.leased_extents()
    request = registration(np.array([extent.number for extent in leased], "<i8").tobytes())
    connection, reply, demands = _register(session, request)
    if not isinstance(reply, Done) or not isinstance(reply.value, int):
        raise ProtocolError(f"the controller answered the registration of storage unit {name} with {reply}")
    unit = StorageUnit(reply.value, pool, slots, key=key)

    worker, pauses = BackgroundThread(), _Pauses()
    remote = not place.controller.startswith("/")
    links = {connection.address: connection}  # the newest connection to each controller

    def begin_beside(run: Callable[[], Any], then: Callable[[Any], list[Effect]]) -> None:
        def done(outcome: Any) -> None:
            server.call_soon(lambda: service.carry_out(then(outcome)))

        worker.begin(run, done)

    def seek() -> None:
        """Connect to the controller. Runs in a thread of its own, because this may take long."""
        time.sleep(pauses.next_pause(time.monotonic()))
        while not session.closed:
            try:
                # a frozen controller accepts connections and does not greet, and may be replaced meanwhile
                connection = _connect_to_controller(session, GREETING_SECONDS if remote else CALL_SECONDS)
            except (OSError, TransferQueueError) as error:
                logger.info("storage unit %s cannot reach its controller yet and tries again: %s", name, error)
                time.sleep(RETRY_SECONDS)
            else:
                links[connection.address] = connection
                server.call_soon(partial(adopted, connection))
                return

    def follow(former: Collection[str | tuple[str, int]], moved: bool) -> bool:
        for address in former:
            if address in links:
                links.pop(address).wake()  # the loop sees its end, and seeks the new controller
        return True

    def adopted(connection: Connection) -> Iterable[Outgoing]:
        return service.on_reconnect(server.adopt(connection.sock, connection.tls))

    def lost() -> None:
        threading.Thread(target=seek, name="seek controller", daemon=True).start()

    def fetch(order: Fetch, come: Callable[[set[int]], Iterable[Outgoing]]) -> None:
        def run() -> None:
            good = fetch_blocks(order, key, tls)
            server.call_soon(lambda: come(good))

        threading.Thread(target=run, name="fetch blocks", daemon=True).start()

    service = UnitService(unit, session, registration, lost, end=lambda: server.stop(), fetch=fetch)
    server = ServerLoop(service, key, max_payload=MAX_WRITTEN, idle=service.work_ahead, longest=service.load.longest)
    service.meter = ProcessMetrics(server, service.load)
    secret = tls_context(settings.tls, server=True)
    for listener in place.listeners:
        server.inherit(listener, secret)

    def begin() -> Iterator[Outgoing]:
        # not earlier: the service could not name the sender of its messages
        peer = server.adopt(connection.sock, connection.tls)
        yield from service.on_registered(peer)
        for body in demands:
            yield from service.on_message(peer, body, None, time.monotonic())

    server.call_soon(begin)
    if remote:
        watch_controller(system, place.controller, follow)
    return server


class _Pauses:
    """The pauses before connecting again: none at first, and a longer one each time a connection ends soon."""

    def __init__(self) -> None:
        self._ended = -STEADY_SECONDS
        self._pause = 0.0

    def next_pause(self, now: float) -> float:
        """Return the seconds to wait after a connection that has ended at `now`."""
        soon = now - self._ended < STEADY_SECONDS + self._pause
        self._pause = min(max(2 * self._pause, RETRY_SECONDS), LONGEST_PAUSE) if soon else 0.0
        self._ended = now
        return self._pause


class _Opened(NamedTuple):
    """What a unit has opened."""

    pool: ExtentPool
    slots: SlotFolder
    capacity: int
    """The bytes that it may use."""
    store: str
    """The address of its external store (JSON); "" for an arena."""


def _open_pool(system: SystemFolder, number: int, place: UnitPlace, settings: Settings, begin: Begin) -> _Opened:
    """Open the unit's extent pool and its writer slots."""
    if place.backend != SIMPLE:
        path = system.store(place.backend)
        address = read_status(path)
        names, slots = recover_object_names(system, number, place.arenas)
        store = connect(address)
        known = address.capacity or store.capacity
        pool = ObjectPool(names, store, begin, known or UNLIMITED, lambda: f"{store_lifetime(path)} {store.life()}")
        return _Opened(pool, slots, known, msgspec.json.encode(address).decode())
    if place.retired:
        retired = RetiredPool.open(place.arenas)
        return _Opened(retired, SlotFolder(system.slots(number) / retired.boot_id), retired.capacity, "")
    most, sharers = settings.arena_bytes, place.sharers
    if place.tier != MEMORY:
        most, sharers = (settings.offload_bytes, settings.replicas) if place.tier == DISK else (None, 1)
    arena, slots = recover_arena(system, number, place.arenas, most, place.tier)
    share = arena.capacity if most is not None else arena.capacity // sharers  # they share one file system
    if place.tier == MIRROR:
        arena.sync()
        return _Opened(MirrorPool(arena, begin), slots, share, "")
    return _Opened(DiskPool(arena) if place.tier == DISK else ArenaPool(arena), slots, share, "")


def _connect_to_controller(session: Session, seconds: float = CALL_SECONDS) -> Connection:
    connection = Connection(session.resolve(("controller", 0)))
    try:
        connection.connect(session, time.monotonic() + seconds)
    except BaseException:
        connection.close()
        raise
    return connection


def _register(session: Session, request: RegisterUnit) -> tuple[Connection, AnyReply, list[bytes]]:
    """Register. Returns the connection, the controller's reply, and the demands that it sent together with the reply.

    If the controller ends meanwhile, it will be restarted, so the unit tries again.
    """
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        connection = _connect_to_controller(session)
        sequence, frame = session.begin_request(request)
        try:
            first, *demands = connection.exchange_with_more(frame, deadline)
        except ConnectionError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
        else:
            return connection, raise_failure(session.decode_reply(first).body), demands
        finally:
            session.finish(sequence)


# ---------------------------------------------------------------- arenas
# Makes the arena and slots of a storage unit: those of the unit before it if they are valid, else new ones.
#
# <arenas>/unit-0, or unit-0.2 after the first was lost, and so on
# <system>/slots-0/<boot id of the arena>/


def recover_arena(
    system: SystemFolder, number: int, arenas: Path, capacity: int | None, tier: str
) -> tuple[Arena, SlotFolder]:
    """Return the arena and slots of unit `number` of a system. Arenas that cannot be reopened are logged and removed.

    `capacity` applies to a new arena, `tier` to any; see `Arena.create`.
    """
    slots = system.slots(number)
    names = (f"unit-{number}" + (f".{n}" if n > 1 else "") for n in count(1))
    for name in names:
        folder = arenas / name
        if not folder.exists():
            break
        if not any(folder.iterdir()):
            continue  # was lost before
        try:
            arena = Arena.reopen(folder, tier)
        except AttachError as error:
            logger.error("storage unit %d: all values in arena %s are lost: %s", number, folder, error)
        else:
            logger.info("storage unit %d continues with arena %s: %d bytes are leased", number, folder, arena.held)
            return arena, SlotFolder(slots / arena.boot_id)
    if slots.exists() and any(slots.iterdir()) and folder == arenas / f"unit-{number}":
        logger.error("storage unit %d: all values are lost, because arena %s does not exist any more", number, folder)
    arena = Arena.create(folder, capacity, tier)
    _remove_slots(slots)
    for lost in arenas.glob(f"unit-{number}*"):
        if lost != folder and lost.name.partition(".")[0] == f"unit-{number}":
            _remove_files(lost)
    return arena, SlotFolder(slots / arena.boot_id)


def recover_object_names(system: SystemFolder, number: int, arenas: Path) -> tuple[ObjectNames, SlotFolder]:
    """Do the same for a unit whose blocks are in an external store. Raises OSError if the folder cannot be used."""
    folder, slots = arenas / f"unit-{number}", system.slots(number)
    if folder.exists():
        try:
            names = ObjectNames.reopen(folder)
        except AttachError as error:
            logger.error("storage unit %d: the record of its objects in the store is lost: %s", number, error)
            _remove_files(folder)
        else:
            return names, SlotFolder(slots / names.boot_id)
    names = ObjectNames.create(folder)
    _remove_slots(slots)
    return names, SlotFolder(slots / names.boot_id)


def _remove_slots(slots: Path) -> None:
    """Remove the slots of a lost arena. The folder itself stays, because it may be a link to a durable one."""
    for path in slots.iterdir() if slots.exists() else ():
        shutil.rmtree(path, ignore_errors=True)


def _remove_files(folder: Path) -> None:
    """Free the space of a lost arena."""
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
