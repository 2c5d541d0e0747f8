"""One connection as the servers' loop sees it: what it has sent and is not served, what it is to be sent."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from typing import Union

from transfer_queue.net.handshake import ServerHandshake
from transfer_queue.wire.framing import Frame, FrameReader

OUTPUT_MARK = 1 << 20  # bytes of unread answers above which a connection is not read from

Payload = Union[bytes, bytearray, memoryview]


class Peer:
    """A connection: first in its handshake, then known to the service.

    handshake: None once it is done. events: what the selector waits for. ending: close as soon as the output has left.
    inbox: messages that were read and are not served yet, of one read at most; queued: for their sake the connection
    waits for its next turn. held: bytes of the message that is not whole yet. out, out_bytes: what is to be sent.
    """

    __slots__ = (
        "ending", "events", "handshake", "held", "inbox", "number", "out", "out_bytes", "queued", "reader", "sock",
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

    @property
    def clogged(self) -> bool:
        """Whether so many answers are unread that no further messages are served."""
        return self.out_bytes > OUTPUT_MARK

    def sent(self, count: int) -> None:
        """So many bytes of the output have left."""
        self.out_bytes -= count
        while count:
            first = self.out.popleft()
            if count < len(first):
                self.out.appendleft(memoryview(first)[count:])
                return
            count -= len(first)
