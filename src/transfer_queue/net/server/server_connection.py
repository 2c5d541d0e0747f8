"""One connection as the servers' loop sees it: what it has sent and is not served, what it is to be sent."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

from transfer_queue.net.framing import Frame, FrameReader, pack_frame
from transfer_queue.net.handshake import ServerHandshake

if TYPE_CHECKING:
    from transfer_queue.net.tls import Tls


from collections.abc import Iterable
from typing import NamedTuple, Protocol

from transfer_queue.net.handshake import Hello

MAX_PIECES = 64  # of one sendmsg
SEALED_AT_ONCE = 1 << 16  # bytes of output that are encrypted before they are sent
LARGE_PAYLOAD = 1 << 16  # bytes; smaller payloads are copied behind their body, larger ones sent from where they lie
OUTPUT_MARK = 1 << 20  # bytes of unread answers above which a connection is not read from

Payload = Union[bytes, bytearray, memoryview]


def framed(body: bytes, payload: Sequence[Payload]) -> Sequence[Payload]:
    """A message as the pieces to send one after the other."""
    if not payload:
        return (pack_frame(body),)
    length = sum(map(len, payload))
    head = pack_frame(body, length)
    return (b"".join((head, *payload)),) if length < LARGE_PAYLOAD else (head, *payload)


class ServerConnection:
    """A connection: first in its handshake, then known to the service.

    handshake: None once it is done. events: what the selector waits for. ending: close as soon as the output has left.
    inbox: messages that were read and are not served yet, of one read at most; queued: for their sake the connection
    waits for its next turn. held: bytes of the message that is not whole yet. out, out_bytes: what is to be sent.
    tls: where it is used. sealed: what is to be sent before that, encrypted.
    """

    __slots__ = (
        "ending", "events", "handshake", "held", "inbox", "number", "out", "out_bytes", "queued", "reader",
        "sealed", "sock", "tls",
    )  # fmt: skip

    def __init__(
        self, number: int, sock: socket.socket, reader: FrameReader, handshake: ServerHandshake | None
    ) -> None:
        self.number = number
        self.sock = sock
        self.reader = reader
        self.handshake = handshake
        self.events = selectors.EVENT_READ
        self.ending = False
        self.inbox: deque[Frame] = deque()
        self.queued = False
        self.held = 0
        self.out: deque[Payload] = deque()
        self.out_bytes = 0
        self.tls: Tls | None = None
        self.sealed = bytearray()

    @property
    def clogged(self) -> bool:
        """Whether so many answers are unread that no further messages are served."""
        return self.out_bytes + len(self.sealed) > OUTPUT_MARK

    @property
    def unsent(self) -> bool:
        """Whether anything is to be sent."""
        return bool(self.out or self.sealed)

    def send(self) -> None:
        """Sends as much of the output as the socket takes. Raises OSError where the other side is gone."""
        out = self.out
        try:
            while self.unsent:
                if self.tls is not None:
                    self._seal(self.tls)
                    del self.sealed[: self.sock.send(self.sealed)]
                elif len(out) == 1:
                    self._sent(self.sock.send(out[0]))
                else:
                    self._sent(self.sock.sendmsg([out[i] for i in range(min(len(out), MAX_PIECES))]))
        except (BlockingIOError, InterruptedError):
            pass

    def unseal(self, tls: Tls, data: bytes) -> bytes:
        """What these bytes of the socket say; raises as `Tls.receive`. What goes over it in return is in the output."""
        try:
            return tls.receive(data)
        finally:
            self.sealed += tls.outgoing()

    def _seal(self, tls: Tls) -> None:
        """Encrypts the next of the output, where nothing is encrypted already."""
        taken = 0
        while self.out and taken < SEALED_AT_ONCE and not self.sealed:
            piece = memoryview(self.out[0])[: SEALED_AT_ONCE - taken]
            tls.say(piece)
            self._sent(len(piece))
            taken += len(piece)
        self.sealed += tls.outgoing()

    def forget(self) -> None:
        """Drops what is not served and not sent."""
        self.out.clear()
        self.sealed.clear()
        self.inbox.clear()

    def _sent(self, count: int) -> None:
        self.out_bytes -= count
        while count:
            first = self.out.popleft()
            if count < len(first):
                self.out.appendleft(memoryview(first)[count:])
                return
            count -= len(first)


class Outgoing(NamedTuple):
    """A frame for a peer; one that is gone by then gets nothing.

    payload: its parts, to be sent one after the other from where they lie.
    """

    peer: int
    body: bytes
    payload: Sequence[Payload] = ()


class Service(Protocol):
    """What a server serves. Called by the loop's thread alone; must not block. `now` is the server's clock.

    An exception in `received` ends that connection (`closed` follows); ProtocolError says that its message
    made no sense. Peers are numbered from 1 and never again.
    """

    def opened(self, peer: int, hello: Hello) -> None:
        """A peer has connected and proved that it holds the key."""

    def received(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        """A frame has come; what to send, to this peer and others."""

    def closed(self, peer: int, now: float) -> Iterable[Outgoing]:
        """A peer is gone; nothing can be sent to it."""

    def next_deadline(self) -> float | None:
        """When `ticked` wants to be called; None for never."""

    def ticked(self, now: float) -> Iterable[Outgoing]:
        """A deadline has passed."""
