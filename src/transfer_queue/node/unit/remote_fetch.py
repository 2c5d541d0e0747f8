"""Fetches blocks from units on other nodes, several units at once. Blocking: a unit runs it in a thread."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.storage import ReadPieces
from transfer_queue.net.drivers.connection import Connection
from transfer_queue.net.session import Session, raise_failure
from transfer_queue.node.system.paths import host_and_port
from transfer_queue.storage.unit.unit_effects import Fetch

if TYPE_CHECKING:
    import ssl

CALL_SECONDS = 30.0  # for one reply of another unit
AT_ONCE = 256 << 20  # bytes of one reply
MOST_LANES = 8  # units from which blocks are fetched at once

logger = logging.getLogger(__name__)


def fetch_blocks(order: Fetch, key: bytes, tls: ssl.SSLContext | None = None) -> set[int]:
    """Fetch the blocks of an order, with the key and TLS context of the system. Returns the numbers of those fetched.

    Blocks that were freed before they were copied, and blocks whose unit cannot be reached, are not among them.
    """
    units = list(dict.fromkeys(block[0] for block in order.wanted))
    good: list[int] = []

    def receive(lane: list[int]) -> None:
        for unit in lane:
            wanted = [at for at, block in enumerate(order.wanted) if block[0] == unit]
            try:
                good.extend(_fetch_from_unit(unit, host_and_port(order.remotes[unit]), key, tls, order, wanted))
            except (OSError, KeyError, TransferQueueError) as error:
                logger.warning("%d blocks cannot be fetched from storage unit %d: %s", len(wanted), unit, error)

    lanes = [units[first::MOST_LANES] for first in range(min(MOST_LANES, len(units)))]
    threads = [threading.Thread(target=receive, args=(lane,), name="fetch blocks", daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return set(good)


def _fetch_from_unit(
    unit: int, address: tuple[str, int], key: bytes, tls: ssl.SSLContext | None, order: Fetch, wanted: list[int]
) -> list[int]:
    session = Session(f"fetch-{uuid.uuid4().hex}", key, lambda target: address, role="unit")
    connection = Connection(address)
    try:
        connection.connect(address, session.role, session.client_id, key, time.monotonic() + CALL_SECONDS, tls)
        return [at for at in wanted if _receive(session, connection, order.wanted[at], order.into[at])]
    finally:
        connection.close()
        session.close()


def _receive(session: Session, connection: Connection, block: tuple[int, int, int, int], into: memoryview) -> bool:
    """Whether the block was fetched, and still had its generation after that."""
    unit, offset, generation, nbytes = block
    for begin in range(0, nbytes, AT_ONCE):
        part = into[begin : min(nbytes, begin + AT_ONCE)]
        if not _read_pieces(session, connection, (unit, offset, generation), [(offset + begin, part)]):
            return False
    return _read_pieces(session, connection, (unit, offset, generation), [])


def _read_pieces(
    session: Session, connection: Connection, block: tuple[int, int, int], parts: Sequence[tuple[int, memoryview]]
) -> bool:
    unit, offset, generation = block
    starts, lengths = (
        np.array(c, "<i8").tobytes() for c in ([at for at, _ in parts], [len(part) for _, part in parts])
    )
    place = np.array([offset], "<i8").tobytes(), np.array([generation], "<i8").tobytes()
    sequence, frame = session.begin_request(ReadPieces(unit, starts, lengths, *place))
    deadline = time.monotonic() + CALL_SECONDS
    try:
        into = [part for _, part in parts]
        body = connection.exchange_into(frame, deadline, into) if into else connection.exchange(frame, deadline)
        reply = raise_failure(session.decode_reply(body).body)
        return isinstance(reply, Done) and bool(reply.value)
    finally:
        session.finish(sequence)
