"""The handshake by which two processes prove that they have the system's key, before any message is read.

    client -> server   hello    magic, version, role, length of id, id, 32 random bytes
    server -> client   welcome  magic, version, verdict 0, 0, 32 random bytes, proof of the server
                       refusal  magic, version, verdict > 0, length of reason, reason
    client -> server   proof of the client; messages may follow at once

A proof is HMAC-SHA256 over a label that distinguishes the two sides and all bytes that both have sent before. So it is
not valid on another connection, in the other direction or with another version. The key is never sent. The server
proves first: a client with a wrong key gets an error before it sends a proof, and a client's handshake is complete with
the welcome, after one round trip.

Magic and version are at the same place in every version of the protocol, so that peers of different versions can report
it. Before the proof, no length is longer than one byte, so that no peer can announce a large one.

Sans-IO: `receive` takes bytes and returns bytes to send. `leftover` has the bytes that arrived after the handshake.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import NamedTuple

from transfer_queue.errors import AttachError, AuthenticationError, ProtocolError, TransferQueueError
from transfer_queue.messages.base import PROTOCOL_VERSION

MAGIC = b"\x93TQ\n"
HANDSHAKE_SECONDS = 10.0
"""A peer that needs more seconds for the handshake is disconnected."""
ROLES = ("client", "unit")
MAX_ID = 200  # bytes of a client id

_HEAD = struct.Struct("<4sHBB")  # magic, version, role or verdict, length of what follows (id or reason)
_NONCE = 32
_PROOF = 32
_WELCOME, _WRONG_VERSION, _REFUSED = 0, 1, 2
NEEDS_TLS = "it takes only connections over TLS; set security.tls in this process's conf to that of the servers"
_TLS = b"\x16\x03"  # the first bytes of a TLS hello


class Hello(NamedTuple):
    """The role ("client" or "unit") and the client id of the process at the other end."""

    role: str
    client_id: str


def _prove(key: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, label + hashlib.sha256(transcript).digest(), "sha256")


def _check_magic(received: bytes) -> None:
    if not MAGIC.startswith(received[: len(MAGIC)]):
        raise ProtocolError(
            f"the peer must be a transfer_queue process, got bytes that begin with {received[:16]!r}; the address "
            "belongs to another program"
        )


def _wrong_version(ours: int, theirs: int) -> ProtocolError:
    return ProtocolError(
        f"this process uses protocol version {ours}, its peer version {theirs}; install the same release of "
        "transfer_queue in both, or start the system again from this release"
    )


def refusal_message(reason: str, version: int = PROTOCOL_VERSION) -> bytes:
    """Return what a server sends instead of a welcome, with at most 255 bytes of the reason."""
    said = reason.encode()[:255]
    return _HEAD.pack(MAGIC, version, _REFUSED, len(said)) + said


class ClientHandshake:
    """The side that connected.

    Send `start()`, then the bytes that `receive` returns, until `done`. `receive` raises `ProtocolError` (the peer is
    another program or has another version), `AuthenticationError` (the server has another key) or `AttachError` (the
    server refuses the connection with a reason).
    """

    def __init__(self, role: str, client_id: str, key: bytes, version: int = PROTOCOL_VERSION) -> None:
        encoded = client_id.encode()
        if role not in ROLES or not 0 < len(encoded) <= MAX_ID:
            raise ProtocolError(
                f"role must be one of {ROLES} and client_id have 1 to {MAX_ID} bytes, got {role!r} and {client_id!r}"
            )
        self.done = False
        self.leftover = b""
        self._key = key
        self._version = version
        head = _HEAD.pack(MAGIC, version, ROLES.index(role), len(encoded))
        self._hello = head + encoded + secrets.token_bytes(_NONCE)
        self._received = b""

    def start(self) -> bytes:
        """Return the hello, which is sent first."""
        return self._hello

    def receive(self, data: bytes) -> bytes:
        """Take received bytes and return the bytes to send, none while more are needed."""
        self._received += data
        _check_magic(self._received)
        if len(self._received) < _HEAD.size:
            return b""
        _, version, verdict, length = _HEAD.unpack_from(self._received)
        if version != self._version:
            raise _wrong_version(self._version, version)
        if verdict == _WELCOME:
            return self._read_welcome()
        end = _HEAD.size + length
        if len(self._received) < end:
            return b""
        reason = self._received[_HEAD.size : end].decode("utf-8", "replace")
        raise AttachError(f"the server refuses this connection: {reason}")

    def _read_welcome(self) -> bytes:
        said = _HEAD.size + _NONCE
        end = said + _PROOF
        if len(self._received) < end:
            return b""
        proof = self._received[said:end]
        if not hmac.compare_digest(proof, _prove(self._key, b"server", self._hello + self._received[:said])):
            raise AuthenticationError(
                "the server does not hold the key that this process has; it belongs to another system, or the system "
                "was started again: attach again"
            )
        self.done = True
        self.leftover = self._received[end:]
        return _prove(self._key, b"client", self._hello + self._received[:end])


class ServerHandshake:
    """The side that accepted.

    Send the bytes that `receive` returns. If `failed` is set then, close the connection after sending them.

    Args:
        key: The system's key.
        refuse: The reason to refuse the connection, which is sent to the peer. Default: None, do not refuse.
        version: The version of the protocol.
    """

    def __init__(self, key: bytes, refuse: str | None = None, version: int = PROTOCOL_VERSION) -> None:
        self.done = False
        self.failed: TransferQueueError | None = None
        self.leftover = b""
        self.hello = Hello("", "")
        """The peer, once `done` is true."""
        self._key = key
        self._refuse = refuse
        self._version = version
        self._received = b""
        self._transcript = b""  # all bytes of both sides up to the welcome; empty before it

    @property
    def refuses(self) -> bool:
        """Whether the server accepts this connection only to send the reason of a refusal."""
        return self._refuse is not None

    def receive(self, data: bytes) -> bytes:
        """Take received bytes and return the bytes to send, none while more are needed. Never raises an exception."""
        self._received += data
        try:
            return self._finish() if self._transcript else self._greet()
        except TransferQueueError as error:
            self.failed = error
            return b""

    def _greet(self) -> bytes:
        if self._received.startswith(_TLS):
            reason = "it takes no connections over TLS; leave security.tls unset, or set it for the servers, too"
            self.failed = AttachError(reason)
            return refusal_message(reason, self._version)
        _check_magic(self._received)
        if len(self._received) < _HEAD.size:
            return b""
        _, version, role, length = _HEAD.unpack_from(self._received)
        if version != self._version:
            self.failed = _wrong_version(self._version, version)
            return _HEAD.pack(MAGIC, self._version, _WRONG_VERSION, 0)
        if role >= len(ROLES) or not 0 < length <= MAX_ID:
            raise ProtocolError(f"a hello is not valid: it has role number {role} and an id of {length} bytes")
        end = _HEAD.size + length + _NONCE
        if len(self._received) < end:
            return b""
        if self._refuse is not None:
            self.failed = AttachError(self._refuse)
            return refusal_message(self._refuse, self._version)
        return self._welcome(end, role, length)

    def _welcome(self, end: int, role: int, length: int) -> bytes:
        try:
            client_id = self._received[_HEAD.size : _HEAD.size + length].decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("a hello is not valid: its id is not UTF-8") from error
        self.hello = Hello(ROLES[role], client_id)
        head = _HEAD.pack(MAGIC, self._version, _WELCOME, 0) + secrets.token_bytes(_NONCE)
        transcript = self._received[:end] + head
        answer = head + _prove(self._key, b"server", transcript)
        self._transcript = self._received[:end] + answer
        self._received = self._received[end:]
        return answer

    def _finish(self) -> bytes:
        if len(self._received) < _PROOF:
            return b""
        proof = self._received[:_PROOF]
        if not hmac.compare_digest(proof, _prove(self._key, b"client", self._transcript)):
            raise AuthenticationError(f"{self.hello.role} {self.hello.client_id!r} does not hold the system's key")
        self.done = True
        self.leftover = self._received[_PROOF:]
        return b""
