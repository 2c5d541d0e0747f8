"""The process of a storage unit: what it is built of, and how it finds its controller again."""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from transfer_queue.config import Settings
from transfer_queue.errors import ProtocolError, TransferQueueError
from transfer_queue.messages import DISK, MEMORY, AnyReply, Done, RegisterUnit
from transfer_queue.net.connection import Connection
from transfer_queue.net.server import Outgoing, Server
from transfer_queue.net.session import Session, outcome
from transfer_queue.node.arenas import take_up
from transfer_queue.node.paths import SystemFolder
from transfer_queue.node.unit_service import UnitService
from transfer_queue.storage.paging import DiskRoom
from transfer_queue.storage.room import ArenaRoom
from transfer_queue.storage.simple import StorageUnit

CALL_SECONDS = 30.0  # for which the unit waits for its controller's answer
RETRY_SECONDS = 0.1  # between two tries to reach a controller that has gone away

logger = logging.getLogger(__name__)


def build_unit(
    system: SystemFolder,
    number: int,
    config: str,
    key: bytes,
    arenas: Path,
    listener: socket.socket,
    tier: str = MEMORY,
) -> Server:
    """The server of the `number`-th unit, registered with the controller. arenas: the folder for its arena.

    listener: where it serves; a socket that outlives it (`net.listening`). tier: see `RegisterUnit`.
    It goes on with the arena of a unit of this name before it. The controller gives the unit its number, which is
    another one after an arena was lost.
    """
    settings = Settings.from_json(msgspec.json.decode(config)["settings"])
    most, sharers = settings.arena_bytes, settings.num_data_storage_units
    if tier == DISK:
        most, sharers = settings.offload_bytes, settings.replicas
    arena, slots = take_up(system, number, arenas, most, tier)
    room = DiskRoom(arena) if tier == DISK else ArenaRoom(arena)
    share = arena.capacity if most is not None else arena.capacity // sharers  # they share one file system
    name = f"unit-{number}"
    session = Session(f"{name}-{uuid.uuid4().hex}", key, lambda target: str(system.controller), role="unit")

    def registration(extents: bytes) -> RegisterUnit:
        when, newer = time.strftime("%Y-%m-%d %H:%M:%S"), room.next_extent
        address, folder = str(system.unit(number)), str(room.folder)
        return RegisterUnit(address, folder, room.boot_id, name, when, extents, newer, tier=tier, capacity=share)

    leased = room.table.leased_extents()
    request = registration(np.array([extent.number for extent in leased], "<i8").tobytes())
    connection, reply, demands = _registered(session, request)
    if not isinstance(reply, Done) or not isinstance(reply.value, int):
        raise ProtocolError(f"the storage unit {name} registered and the controller answered {reply}")
    unit = StorageUnit(reply.value, room, slots)

    def seek() -> None:
        """Connects to the controller, in a thread of its own: it may be long in coming."""
        while not session.closed:
            try:
                found = _connected(session)
            except (OSError, TransferQueueError) as error:
                logger.info("no controller yet: %s", error)
                time.sleep(RETRY_SECONDS)
            else:
                server.call_soon(partial(adopted, found))
                return

    def adopted(found: Connection) -> Iterable[Outgoing]:
        return service.connected(server.adopt(found.sock))

    def lost() -> None:
        threading.Thread(target=seek, name="seek controller", daemon=True).start()

    service = UnitService(unit, session, registration, lost, failed=lambda: server.stop())
    server = Server(service, key, max_payload=0, idle=unit.idle)
    server.inherit(listener)
    peer = server.adopt(connection.sock)

    def begin() -> Iterator[Outgoing]:
        yield from service.registered(peer)
        for body in demands:
            yield from service.received(peer, body, None, time.monotonic())

    server.call_soon(begin)
    return server


def _connected(session: Session) -> Connection:
    address = session.resolve(("controller", 0))
    connection = Connection(address)
    try:
        deadline = time.monotonic() + CALL_SECONDS
        connection.connect(address, session.role, session.client_id, session.key, deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _registered(session: Session, request: RegisterUnit) -> tuple[Connection, AnyReply, list[bytes]]:
    """The connection on which the controller has answered, its answer, and what it has demanded together with that.

    A controller that ends meanwhile will be back: the unit that asks has not failed by it.
    """
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        connection = _connected(session)
        sequence, frame = session.begin(request)
        try:
            first, *demands = connection.exchange_with_more(frame, deadline)
        except ConnectionError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
        else:
            return connection, outcome(session.answer(first).body), demands
        finally:
            session.finish(sequence)
