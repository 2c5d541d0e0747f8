"""What launcher and supervisor say to each other over their private pipe: one message each way.

The pipe carries the key and, pickled, the user's sampler; it ends when the system is up or has failed.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import msgspec

from transfer_queue.errors import StartError
from transfer_queue.messages.base import UNREADABLE
from transfer_queue.node.system.sampler_transfer import PickledSampler

MAX_MESSAGE = 1 << 30  # bytes; a pickled sampler may be large

_LENGTH = struct.Struct("<Q")


class NodeRole(msgspec.Struct, frozen=True):
    """Where in a system of several nodes its servers here are.

    node: the name of this node; "" where the system has but one. host: on which the servers listen for other nodes, ""
    where they do not. units: storage units here; None: as many as the settings say. controller: its "host:port" where
    it is on another node: here are units alone. store: what the keeper of an external store joins here
    (`StoreAddress.join`).
    """

    node: str = ""
    host: str = ""
    units: int | None = None
    controller: str = ""
    store: str = ""


HERE = NodeRole()
"""Of a system that has but one node."""


class StartRequest(msgspec.Struct, frozen=True):
    """What is to be started, and for whom.

    folder: of the system, made by the launcher; identity: see `SystemFolder.identity`. config: JSON text for
    attaching clients; its "settings" are `config.Settings`. started: see `processes.start_time`. detached:
    outlives its starter. seconds: until all servers must be up. heirs: for so long after its starter's death another
    process may take its place (`SystemFolder.heir`); seconds.
    """

    folder: str
    identity: tuple[int, int]
    config: str
    key: bytes
    sampler: PickledSampler | None
    starter_pid: int
    starter_started: int | None
    starter_command: str
    starter_user: str
    detached: bool
    seconds: float
    heirs: float = 0.0
    seat: NodeRole = HERE


class StartReply(msgspec.Struct, frozen=True, tag=True):
    """All servers are up. warnings: for a person to read."""

    warnings: list[str]


class StartFailure(msgspec.Struct, frozen=True, tag=True):
    """A server is not; why, with its traceback."""

    reason: str


def send(channel: socket.socket, message: msgspec.Struct, seconds: float) -> None:
    """Sends one message. OSError if the other side is gone or does not read."""
    body = msgspec.msgpack.encode(message)
    channel.settimeout(seconds)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket, kind: Any, seconds: float) -> Any:
    """The one message of the other side, of this type.

    EOFError if it ended without, TimeoutError past the time, StartError where what it said is no such message.
    """
    limit = time.monotonic() + seconds
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size, limit))
    if length > MAX_MESSAGE:
        raise StartError(f"a message of {length} bytes in the launcher's pipe; most are {MAX_MESSAGE}")
    try:
        return msgspec.msgpack.decode(_exactly(channel, length, limit), type=kind)
    except UNREADABLE as error:
        raise StartError(f"what came over the launcher's pipe is no message of its release: {error}") from error


def _exactly(channel: socket.socket, count: int, limit: float) -> bytes:
    received = bytearray()
    while len(received) < count:
        left = limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("no message in time")
        channel.settimeout(left)
        data = channel.recv(min(count - len(received), 1 << 20))
        if not data:
            raise EOFError("the other side ended")
        received += data
    return bytes(received)
