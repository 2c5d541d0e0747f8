"""The process of a storage unit: what it is built of."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import msgspec

from transfer_queue.config import Settings
from transfer_queue.errors import ProtocolError
from transfer_queue.messages import AnyReply, Done, RegisterUnit
from transfer_queue.net.connection import Connection
from transfer_queue.net.server import Server
from transfer_queue.net.session import Session, outcome
from transfer_queue.node.paths import SystemFolder
from transfer_queue.node.unit_service import UnitService
from transfer_queue.storage.arena import Arena
from transfer_queue.storage.ownership import SlotFolder
from transfer_queue.storage.simple import StorageUnit

CALL_SECONDS = 30.0  # for which the unit waits for its controller's answer


def build_unit(system: SystemFolder, number: int, config: str, key: bytes, arenas: Path) -> Server:
    """The unit's server, listening, registered with the controller. arenas: the folder for its arena."""
    settings = Settings.from_json(msgspec.json.decode(config)["settings"])
    arena = Arena.create(arenas / f"unit-{number}", settings.arena_bytes)
    address = str(system.controller)
    session = Session(f"unit-{number}-{uuid.uuid4().hex}", key, lambda target: address, role="unit")
    connection = Connection(address)
    connection.connect(address, session.role, session.client_id, key, time.monotonic() + CALL_SECONDS)
    reply = _register(session, connection, RegisterUnit(str(system.unit(number)), str(arena.folder)))
    if reply != Done(number):
        raise ProtocolError(f"storage unit {number} registered and the controller answered {reply}")
    unit = StorageUnit(number, arena, SlotFolder(system.slots(number)))
    service = UnitService(unit, session, lost=lambda: server.stop())
    server = Server(service, key, max_payload=0, idle=unit.idle)
    server.listen(str(system.unit(number)))
    service.controller = server.adopt(connection.sock)
    return server


def _register(session: Session, connection: Connection, request: RegisterUnit) -> AnyReply:
    sequence, frame = session.begin(request)
    answer = session.answer(connection.exchange(frame, time.monotonic() + CALL_SECONDS))
    session.finish(sequence)
    return outcome(answer.body)
