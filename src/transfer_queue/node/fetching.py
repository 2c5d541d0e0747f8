"""Blocks of units on other nodes, for a move to this one. Blocking: a thread of the unit's process does it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import numpy as np

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages import Done, Move, ReadPieces
from transfer_queue.net.connection import Connection
from transfer_queue.net.session import Session, outcome
from transfer_queue.node.paths import host_and_port
from transfer_queue.wire.copies import U8

CALL_SECONDS = 30.0  # for one answer of another unit


def fetched(order: Move, key: bytes) -> dict[int, U8]:
    """The bytes of the order's blocks that lie on other nodes, by their number in the order.

    Those that were gone before they were here, or whose unit cannot be reached, are left out.
    """
    blocks = order.blocks
    units = np.frombuffer(blocks.unit, "<i4").tolist()
    columns = (blocks.offset, blocks.generation, blocks.nbytes)
    places = list(zip(*(np.frombuffer(column, "<i8").tolist() for column in columns), strict=True))
    found: dict[int, U8] = {}
    for unit, remote in order.remotes.items():
        wanted = {at: places[at] for at in range(len(units)) if units[at] == unit}
        try:
            found.update(_from(unit, host_and_port(remote), key, wanted))
        except (OSError, TransferQueueError):
            continue
    return found


def _from(unit: int, address: tuple[str, int], key: bytes, wanted: dict[int, tuple[int, int, int]]) -> dict[int, U8]:
    """What of these (offset, generation, nbytes) one unit still has."""
    session = Session(f"move-{uuid.uuid4().hex}", key, lambda target: address, role="unit")
    connection = Connection(address)
    try:
        connection.connect(address, session.role, session.client_id, key, time.monotonic() + CALL_SECONDS)
        return dict(_blocks(session, connection, unit, wanted))
    finally:
        connection.close()
        session.close()


def _blocks(
    session: Session, connection: Connection, unit: int, wanted: dict[int, tuple[int, int, int]]
) -> Iterator[tuple[int, U8]]:
    for at, (offset, generation, nbytes) in wanted.items():
        buffer = np.empty(nbytes, np.uint8)
        place = np.array([offset], "<i8").tobytes(), np.array([generation], "<i8").tobytes()
        length = np.array([nbytes], "<i8").tobytes()
        whole = ReadPieces(unit, place[0], length, *place)
        still = ReadPieces(unit, b"", b"", *place)
        if nbytes and not _ask(session, connection, whole, [buffer.data]):
            continue
        if _ask(session, connection, still, []):
            yield at, buffer


def _ask(session: Session, connection: Connection, request: ReadPieces, into: list[memoryview]) -> bool:
    sequence, frame = session.begin(request)
    deadline = time.monotonic() + CALL_SECONDS
    try:
        body = connection.exchange_into(frame, deadline, into) if into else connection.exchange(frame, deadline)
        reply = outcome(session.answer(body).body)
        return isinstance(reply, Done) and bool(reply.value)
    finally:
        session.finish(sequence)
