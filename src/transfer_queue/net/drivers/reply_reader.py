"""Receives one reply: its body, and its payload directly into the caller's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from transfer_queue.errors import ProtocolError
from transfer_queue.net.framing import HEADER

if TYPE_CHECKING:
    import socket

    from transfer_queue.net.tls import Tls

MAX_PIECES = 64  # buffers of one recvmsg


class ReplySource(Protocol):
    """The connection from which a reply is read: `connection.Connection`."""

    sock: socket.socket
    tls: Tls | None

    def read(self, deadline: float) -> bytes:
        """Return the bytes that the socket has now, decrypted; b"" if it has none."""


class ReplyReader:
    """Receives the next reply of a connection.

    Args:
        connection: The connection.
        into: The memory for the payload, one part after the other. The reply may have no payload.
        deadline: See `Connection`.
    """

    __slots__ = ("_connection", "_deadline", "_parts", "_start", "body")

    def __init__(self, connection: ReplySource, into: Sequence[memoryview], deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._start = bytearray()
        self._parts = deque(into)
        self.body: bytes | None = None
        """The body; None until it has arrived as a whole."""

    @property
    def whole(self) -> bool:
        """Whether body and payload have arrived."""
        return self.body is not None and not self._parts

    def receive(self) -> None:
        """Read from the socket, which should be readable. Raises like `Connection`, and `ProtocolError`."""
        if self.body is None:
            self._begin(self._connection.read(self._deadline))
        elif self._connection.tls is not None:
            self._put(memoryview(self._connection.read(self._deadline)))
        else:
            parts = [self._parts[i] for i in range(min(len(self._parts), MAX_PIECES))]
            try:
                count = self._connection.sock.recvmsg_into(parts)[0]
            except BlockingIOError:
                return
            if not count:
                raise ConnectionResetError("the server closed the connection")
            self._note_received(count)

    def _begin(self, data: bytes) -> None:
        start = self._start
        start += data
        if len(start) < HEADER.size or len(start) < HEADER.size + HEADER.unpack_from(start)[0]:
            return
        length, payload = HEADER.unpack_from(start)
        more = memoryview(start)[HEADER.size + length :]
        wanted = sum(map(len, self._parts))
        if payload not in (0, wanted) or len(more) > payload:
            raise ProtocolError(
                f"expected a reply with {wanted} bytes of payload or none, got one that announces {payload} bytes and "
                f"sends at least {len(more)}"
            )
        self.body = bytes(start[HEADER.size : HEADER.size + length])
        if payload:
            self._put(more)
        else:
            self._parts.clear()

    def _put(self, data: memoryview) -> None:
        while data:
            first = self._parts[0]
            count = min(len(data), len(first))
            first[:count] = data[:count]
            self._note_received(count)
            data = data[count:]

    def _note_received(self, count: int) -> None:
        while count:
            first = self._parts.popleft()
            if count < len(first):
                self._parts.appendleft(first[count:])
                return
            count -= len(first)
