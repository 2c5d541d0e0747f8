"""A connection in the loop of a server: its unserved messages and its output."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Union

from transfer_queue.net.framing import Frame, FrameReader, pack_frame
from transfer_queue.net.handshake import Hello, ServerHandshake
from transfer_queue.net.server.sockets import READ

if TYPE_CHECKING:
    from transfer_queue.net.tls import Tls

MAX_PIECES = 64  # buffers of one sendmsg
SEALED_AT_ONCE = 1 << 16
"""Bytes of output that are encrypted before they are sent."""
LARGE_PAYLOAD = 1 << 16
"""Smaller payloads, in bytes, are copied behind their body. Larger ones are sent without a copy."""
OUTPUT_MARK = 1 << 20
"""Bytes of unread replies above which the loop does not read from a connection."""

Payload = Union[bytes, bytearray, memoryview]


def is_lent(piece: memoryview) -> bool:
    """Whether a piece of output is a part of memory that exists without it, like an arena."""
    return getattr(piece.obj, "base", None) is not None


def frame_pieces(body: bytes, payload: Sequence[Payload]) -> Sequence[Payload]:
    """Return a message as the pieces to send one after the other."""
    if not payload:
        return (pack_frame(body),)
    length = sum(map(len, payload))
    head = pack_frame(body, length)
    return (b"".join((head, *payload)),) if length < LARGE_PAYLOAD else (head, *filter(len, payload))


class ServerConnection:
    """A connection: first in its handshake, then open for the service."""

    __slots__ = (
        "counted", "ending", "events", "handshake", "held", "inbox", "lent", "number", "out", "out_bytes", "queued",
        "reader", "sealed", "sock", "tls",
    )  # fmt: skip

    def __init__(
        self, number: int, sock: socket.socket, reader: FrameReader, handshake: ServerHandshake | None
    ) -> None:
        self.number = number
        self.sock = sock
        self.reader = reader
        self.handshake = handshake
        """None once the handshake is done."""
        self.events = READ
        """The events for which the loop waits."""
        self.ending = False
        """Whether to close the connection as soon as the output is sent."""
        self.inbox: deque[Frame] = deque()
        """Messages that were read and not served yet, at most those of one read."""
        self.queued = False
        """Whether the connection waits for its next turn, in which these messages are served."""
        self.held = 0
        """The bytes of the unfinished message."""
        self.out: deque[Payload] = deque()
        """The output that is not sent yet, in pieces that are not empty."""
        self.out_bytes = 0
        """The length of `out` and `sealed` in bytes."""
        self.counted = 0
        """The bytes of output that `UnreadOutput` has counted."""
        self.lent = 0
        """The bytes of `out` that take no memory, because they are parts of memory that exists without them."""
        self.tls: Tls | None = None
        """The TLS of the connection; None without TLS."""
        self.sealed = bytearray()
        """Encrypted output, to send before `out`."""

    def send(self) -> None:
        """Send as much of the output as the socket takes. Raises `OSError` if the other side is gone."""
        out = self.out
        try:
            while self.out_bytes:
                if self.tls is not None:
                    self._seal(self.tls)
                    sent = self.sock.send(self.sealed)
                    del self.sealed[:sent]
                    self.out_bytes -= sent
                elif len(out) == 1:
                    self._note_sent(self.sock.send(out[0]))
                else:
                    self._note_sent(self.sock.sendmsg([out[i] for i in range(min(len(out), MAX_PIECES))]))
        except (BlockingIOError, InterruptedError):
            pass

    def decrypt(self, tls: Tls, data: bytes) -> bytes:
        """Decrypt bytes from the socket. Raises like `Tls.receive`. Bytes to send in return are added to the output."""
        try:
            return tls.receive(data)
        finally:
            self._add_sealed(tls)

    def _seal(self, tls: Tls) -> None:
        """Encrypt the next part of the output, unless encrypted output is left."""
        taken = 0
        while self.out and taken < SEALED_AT_ONCE and not self.sealed:
            piece = memoryview(self.out[0])[: SEALED_AT_ONCE - taken]
            tls.encrypt(piece)
            self._note_sent(len(piece))
            taken += len(piece)
        self._add_sealed(tls)

    def _add_sealed(self, tls: Tls) -> None:
        encrypted = tls.outgoing()
        self.sealed += encrypted
        self.out_bytes += len(encrypted)

    def discard_buffers(self) -> None:
        """Drop unserved messages and unsent output."""
        self.out.clear()
        self.sealed.clear()
        self.inbox.clear()
        self.out_bytes = self.lent = 0

    def _note_sent(self, count: int) -> None:
        self.out_bytes -= count
        if not self.out_bytes:
            self.out.clear()
            self.lent = 0
            return
        while count:
            first = self.out.popleft()
            taken = min(count, len(first))
            if self.lent and type(first) is memoryview and is_lent(first):
                self.lent -= taken
            if taken < len(first):
                self.out.appendleft(memoryview(first)[taken:])
            count -= taken


class UnreadOutput:
    """The memory of the output that clients have not read, and the order in which they have last read some."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """The bytes of all connections together."""
        self.total = 0
        self.exceeded = False
        """Whether the total is above the limit."""
        self._peers: dict[ServerConnection, None] = {}
        """The connections with such output. The one that has read nothing for the longest time is the first."""

    def note(self, peer: ServerConnection, has_read: bool) -> None:
        """Count the output of a connection again. `has_read` says that its client has taken some of it."""
        kept = peer.out_bytes - peer.lent
        self.total += kept - peer.counted
        self.exceeded = self.total > self.limit
        peer.counted = kept
        if has_read or not kept:
            self._peers.pop(peer, None)
        if kept:
            self._peers[peer] = None

    @property
    def is_too_much(self) -> bool:
        """Whether several connections take too much memory together. A single one may have one large reply."""
        return self.exceeded and len(self._peers) > 1

    def slowest(self) -> ServerConnection:
        """Return the connection that has read nothing for the longest time. There must be one."""
        return next(iter(self._peers))


class Outgoing(NamedTuple):
    """A frame to send to a peer. It is dropped if the peer is gone."""

    peer: int
    body: bytes
    payload: Sequence[Payload] = ()
    """The parts of the payload, which are sent one after the other without a copy."""


class Service(Protocol):
    """The service of a server. Only the loop's thread calls it, and it must not block. `now` is the server's clock.

    An exception in `on_message` ends that connection (`on_disconnect` follows). `ProtocolError` means that the message
    was not valid. Peers are numbered from 1, and a number is never used again.
    """

    def on_connect(self, peer: int, hello: Hello) -> None:
        """Handle a peer that has connected and proved that it has the key."""

    def on_message(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        """Handle a frame and return what to send, to this peer and others."""

    def on_disconnect(self, peer: int, now: float) -> Iterable[Outgoing]:
        """Handle the end of a peer, to which nothing can be sent any more."""

    def next_deadline(self) -> float | None:
        """Return the time at which to call `on_deadline`; None for never."""

    def on_deadline(self, now: float) -> Iterable[Outgoing]:
        """Handle deadlines that have passed."""
