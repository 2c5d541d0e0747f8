"""The messages between launcher and supervisor over their private pipe: one message in each direction.

The pipe carries the key and the user's pickled sampler. It is closed when the system is up or has failed.
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
    """The role of this node in a system of several nodes."""

    node: str = ""
    """The name of this node; "" if the system has only one."""
    host: str = ""
    """The address on which the servers listen for other nodes; "" if they do not."""
    units: int | None = None
    """Number of storage units on this node; None for the number in the settings."""
    controller: str = ""
    """"host:port" of a controller on another node, in which case this node runs only units; else ""."""
    stores: dict[str, str] = {}
    """Backend -> what its store server on this node joins (`StoreAddress.join`)."""
    system: str = ""
    """The id of a system whose controller other nodes may take over; "" if they may not."""
    succeeds: bool = False
    """Whether this node takes over the controller of `system`, with the journal in its `durability.folder`."""
    term: int = 0
    """The term of the controller on another node (`journal.terms`); 0 if no other node may take it over."""


HERE = NodeRole()
"""The role of the only node of a system."""


class StartRequest(msgspec.Struct, frozen=True):
    """Which system to start, and for which process."""

    folder: str
    """The system's folder, which the launcher has created."""
    identity: tuple[int, int]
    """See `SystemFolder.identity`."""
    config: str
    """JSON text for attaching clients; its "settings" are `config.settings.Settings`."""
    key: bytes
    samplers: dict[str, PickledSampler]
    """The samplers that the settings do not name, by the keys of `Settings.samplers`."""
    starter_pid: int
    starter_started: int | None
    """See `processes.start_time`."""
    starter_command: str
    starter_user: str
    detached: bool
    """The system outlives its starter."""
    seconds: float
    """Seconds until all servers must be up."""
    heirs: float = 0.0
    """Seconds after the starter's death in which another process may replace it (`SystemFolder.heir`)."""
    seat: NodeRole = HERE


class StartReply(msgspec.Struct, frozen=True, tag=True):
    """All servers are up."""

    warnings: list[str]
    """Texts for the user."""


class StartFailure(msgspec.Struct, frozen=True, tag=True):
    """The system did not start."""

    reason: str
    """The message, with the traceback of the server that failed."""


def send(channel: socket.socket, message: msgspec.Struct, seconds: float) -> None:
    """Send one message. Raises OSError if the other side is gone or does not read."""
    body = msgspec.msgpack.encode(message)
    channel.settimeout(seconds)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket, kind: Any, seconds: float) -> Any:
    """Return the one message of the other side, of this type.

    Raises EOFError if the pipe ends without a message, TimeoutError if none arrives in time, and StartError if the
    message is invalid.
    """
    limit = time.monotonic() + seconds
    (length,) = _LENGTH.unpack(_receive_exactly(channel, _LENGTH.size, limit))
    if length > MAX_MESSAGE:
        raise StartError(f"the launcher's pipe has a message of {length} bytes; the limit is {MAX_MESSAGE}")
    try:
        return msgspec.msgpack.decode(_receive_exactly(channel, length, limit), type=kind)
    except UNREADABLE as error:
        raise StartError(
            f"the launcher's pipe has a message that this release cannot read: {error}; install the same release of "
            f"transfer_queue for launcher and supervisor"
        ) from error


def _receive_exactly(channel: socket.socket, count: int, limit: float) -> bytes:
    received = bytearray()
    while len(received) < count:
        left = limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side of the launcher's pipe sent no message in time")
        channel.settimeout(left)
        data = channel.recv(min(count - len(received), 1 << 20))
        if not data:
            raise EOFError("the other side closed the launcher's pipe without a message")
        received += data
    return bytes(received)
