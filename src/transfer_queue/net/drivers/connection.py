"""The client's end of an authenticated connection, its replies, and the pool of connections of a session.

A `Connection` is a non-blocking socket with its frame reader. `exchange` waits with poll, so that it works in any
thread, also in one that runs an event loop. The asyncio driver uses the same object with the readers of its loop. Only
one caller uses a connection at a time: the caller takes it out of the `Pool`, or makes one, and gives it back between
calls. This module does not interpret bodies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Union

from transfer_queue.errors import AttachError, ProtocolError, TransferQueueError, advice_on_open_files
from transfer_queue.net.framing import HEADER, FrameReader
from transfer_queue.net.handshake import HANDSHAKE_SECONDS, ClientHandshake
from transfer_queue.net.server.sockets import set_tcp_options
from transfer_queue.net.session import Session, Target
from transfer_queue.utils.host_addresses import resolve

if TYPE_CHECKING:
    import ssl

    from transfer_queue.net.tls import Tls


MAX_PIECES = 64  # buffers of one recvmsg


Address = Union[str, tuple[str, int]]

READ_SIZE = 1 << 16
LARGE_READ = 1 << 20
MAX_IDLE = 64
"""Idle connections that are kept per target. If more threads make calls at once, the others connect for each call."""
BUSY_SECONDS = 0.005
"""Seconds between two tries to connect to a UNIX socket whose queue of connections is full."""
LONGEST_POLL = 86400.0
"""Seconds of one poll; the kernel accepts at most 24 days."""
MAX_PATH = 107
"""Bytes of a UNIX socket's path."""


def new_socket(address: Address) -> socket.socket:
    """Return a non-blocking socket of the address's family.

    Args:
        address: The path of a UNIX socket, or (host, port).
    """
    if isinstance(address, str):
        if len(address.encode()) > MAX_PATH:
            raise AttachError(
                f"a socket path must have at most {MAX_PATH} bytes, got {len(address.encode())} ({address!r}); set "
                "TQ_RUNTIME_DIR to a folder with a shorter path"
            )
        sock = _open(socket.AF_UNIX)
    else:
        sock = _open(resolve(*address)[0][0])
        set_tcp_options(sock)
    sock.setblocking(False)
    return sock


def _open(family: socket.AddressFamily) -> socket.socket:
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        words = advice_on_open_files(error)
        if words is None:
            raise
        raise AttachError(f"cannot open a connection to a server: {words}") from error


class Connection:
    """One socket to one server.

    Methods raise `OSError` if the connection breaks, and `TimeoutError` after the deadline, which is a reading of
    `time.monotonic`.
    """

    __slots__ = ("_poll", "_polled", "address", "reader", "sock", "tls")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.sock = new_socket(address)
        # replies with a payload go through `exchange_into`; no server of this package sends other payloads
        self.reader = FrameReader(max_payload=0)
        self.tls: Tls | None = None
        self._poll = select.poll()
        self._polled = 0  # the events that _poll waits for

    @property
    def closed(self) -> bool:
        """Whether the socket was closed at this end."""
        return self.sock.fileno() < 0

    def close(self) -> None:
        """Close this end. A reply that has not arrived is lost. Copies of the socket in other processes stay open."""
        self.sock.close()

    def wake(self) -> None:
        """End the connection from another thread. The thread that waits on it gets an error."""
        with contextlib.suppress(OSError):  # the socket is not connected any more
            self.sock.shutdown(socket.SHUT_RDWR)

    def connect(self, session: Session, deadline: float) -> None:
        """Connect and authenticate as this session, within HANDSHAKE_SECONDS and before the deadline."""
        deadline = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
        while not self.try_connect():
            if not isinstance(self.address, str):
                self._wait(select.POLLOUT, deadline)
            elif time.monotonic() > deadline:
                raise TimeoutError("the server did not accept the connection before the deadline")
            else:
                time.sleep(BUSY_SECONDS)
        if (hello := self.start_tls(session.tls)) and self.tls is not None:
            self._push(hello, deadline)
            while not self.tls.done:
                self._receive(deadline)  # returns no bytes before the client has sent its hello
        handshake = ClientHandshake(session.role, session.client_id, session.key)
        with contextlib.suppress(ConnectionError):  # the server may have sent the reason of a refusal and closed
            self._send(handshake.start(), deadline)
        while not handshake.done:
            proof = handshake.receive(self._receive(deadline))
            if proof:
                self._send(proof, deadline)
        self.reader.feed(handshake.leftover)

    def try_connect(self) -> bool:
        """Make one step of connecting and return whether the socket is connected.

        If it is not, call again: after a short pause (UNIX), or when the socket is writable (TCP).
        """
        code = self.sock.connect_ex(self.address)
        if code in (0, errno.EISCONN):
            return True
        if code in (errno.EINPROGRESS, errno.EALREADY, errno.EAGAIN):
            return False
        raise OSError(code, os.strerror(code), str(self.address))

    def start_tls(self, tls: ssl.SSLContext | None) -> bytes:
        """Start TLS and return the bytes to send first. Over a UNIX socket: use no TLS and return no bytes."""
        if tls is None or isinstance(self.address, str):
            return b""
        from transfer_queue.net.tls import Tls  # ssl is slow to import, and most systems do not use it

        self.tls = Tls(tls, server=False)
        return self.tls.start()

    def encrypt(self, data: bytes) -> bytes:
        """Return the bytes to send over the socket for this data: encrypted if the connection uses TLS."""
        if self.tls is None:
            return data
        self.tls.encrypt(data)
        return self.tls.outgoing()

    def decrypt(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the data in bytes from the socket, and the bytes to send in return. Raises like `Tls.receive`."""
        if self.tls is None:
            return data, b""
        try:
            said = self.tls.receive(data)
        except TransferQueueError:
            with contextlib.suppress(OSError):  # so that the server can log the reason, too
                self.sock.send(self.tls.outgoing())
            raise
        if self.tls.ended and not said:
            raise ConnectionResetError("the server ended the connection")
        return said, self.tls.outgoing()

    def exchange(self, frame: bytes, deadline: float, payload: memoryview | None = None) -> bytes:
        """Send a frame, with the payload that it announces, and return the body of the reply."""
        self.send(frame, deadline, payload)
        return self.receive_reply(deadline, deadline)

    def receive_reply(self, until: float, deadline: float) -> bytes:
        """Return the body of the reply to a frame that was sent.

        Raises `TimeoutError` if it has not arrived before `until`. Until the deadline, the call can then be repeated.
        """
        while True:
            self._wait(select.POLLIN, until)
            frames = self.reader.feed(self.read(deadline))
            if frames:
                if len(frames) > 1 or not self.reader.clean:
                    raise ProtocolError("expected one reply from a server, got more bytes after it")
                return frames[0][0]

    def is_readable(self, until: float) -> bool:
        """Wait until bytes have arrived, or the connection has ended. Return False if that is not before `until`."""
        try:
            self._wait(select.POLLIN, until)
        except TimeoutError:
            return False
        return True

    def exchange_into(self, frame: bytes, deadline: float, into: Sequence[memoryview]) -> bytes:
        """Like `exchange`, for a reply whose payload is written into these parts. The reply may have no payload."""
        self._send(frame, deadline)
        incoming = ReplyReader(self, into, deadline)
        while not incoming.whole:
            self._wait(select.POLLIN, deadline)
            incoming.receive()
        assert incoming.body is not None
        return incoming.body

    def exchange_with_more(self, frame: bytes, deadline: float) -> list[bytes]:
        """Send a frame to a server that also sends messages unasked, and return all bodies up to the reply's end."""
        self._send(frame, deadline)
        bodies: list[bytes] = []
        while not bodies or not self.reader.clean:
            bodies += [body for body, _ in self.reader.feed(self._receive(deadline))]
        return bodies

    def send(self, frame: bytes, deadline: float, payload: memoryview | None = None) -> None:
        """Send a frame, with the payload that it announces."""
        self._send(frame, deadline)
        if payload is not None:
            for begin in range(0, len(payload), LARGE_READ):
                self._send(payload[begin : begin + LARGE_READ], deadline)

    def _send(self, data: bytes | memoryview, deadline: float) -> None:
        self._push(data if self.tls is None else self.encrypt(bytes(data)), deadline)

    def _push(self, data: bytes | memoryview, deadline: float) -> None:
        rest: bytes | memoryview = data
        while True:
            try:
                sent = self.sock.send(rest)
            except BlockingIOError:
                sent = 0
            if sent == len(rest):
                return
            rest = memoryview(rest)[sent:]
            self._wait(select.POLLOUT, deadline)

    def _receive(self, deadline: float) -> bytes:
        self._wait(select.POLLIN, deadline)
        return self.read(deadline)

    def read(self, deadline: float) -> bytes:
        """Return the bytes that have arrived, b"" if there are none."""
        try:
            data = self.sock.recv(min(READ_SIZE + self.reader.missing, LARGE_READ))
        except BlockingIOError:
            return b""
        if not data:
            raise ConnectionResetError("the server closed the connection")
        if self.tls is None:
            return data
        said, answer = self.decrypt(data)
        if answer:
            self._push(answer, deadline)
        return said

    def _wait(self, events: int, deadline: float) -> None:
        if self._polled != events:
            self._poll.register(self.sock, events)
            self._polled = events
        remaining = deadline - time.monotonic()
        while remaining > 0:
            if self._poll.poll(min(remaining, LONGEST_POLL) * 1000):
                return
            remaining = deadline - time.monotonic()
        raise TimeoutError("no reply before the deadline")


class Pool:
    """The connections of one session: the idle ones by target, and all that are open.

    The pool has no reference to its session, so that the connections close as soon as the session is garbage.

    Threads change lists and sets only by operations that are atomic in the interpreter. So there is no lock that a
    thread could hold while another one forks.
    """

    def __init__(self) -> None:
        self._closed = False
        self._idle: dict[Target, list[Connection]] = {}
        self._open: set[Connection] = set()  # idle or in use

    def take(self, target: Target) -> Connection | None:
        """Return an idle connection for the caller's use alone, None if there is none."""
        idle = self._idle.get(target)
        while idle:
            try:
                connection = idle.pop()
            except IndexError:  # another thread was faster
                return None
            if not connection.closed:
                return connection
        return None

    def new_connection(self, address: Address) -> Connection:
        """Return a socket that is not connected yet, for the caller's use alone."""
        connection = Connection(address)
        self._open.add(connection)
        return connection

    def connect(self, session: Session, target: Target, deadline: float) -> Connection:
        """Return a new connection to the target, for the caller's use alone. Blocks until it is authenticated."""
        connection = self.new_connection(session.resolve(target))
        try:
            connection.connect(session, deadline)
        except BaseException:
            self.discard(connection)
            raise
        return connection

    def give_back(self, target: Target, connection: Connection) -> None:
        """Put back a connection on which no reply is outstanding."""
        idle = self._idle.setdefault(target, [])
        if self._closed or len(idle) >= MAX_IDLE:
            self.discard(connection)
        else:
            idle.append(connection)

    def discard(self, connection: Connection) -> None:
        """Close a connection that the caller uses."""
        self._open.discard(connection)
        connection.close()

    def close_idle(self, target: Target) -> None:
        """Close the idle connections to a target, because the server that they led to is gone."""
        while (connection := self.take(target)) is not None:
            self.discard(connection)

    @property
    def addresses(self) -> set[Address]:
        """The addresses of all open connections."""
        return {connection.address for connection in list(self._open)}

    def end_connections(self, addresses: Collection[Address]) -> None:
        """Break the connections to these addresses, from any thread. Their users get an error and connect again."""
        for connection in list(self._open):
            if connection.address in addresses:
                connection.wake()

    def close(self) -> None:
        """Close idle connections, and break those in use, which their users then close."""
        self._closed = True
        for target in list(self._idle):
            self.close_idle(target)
        for connection in list(self._open):
            connection.wake()

    def after_fork(self) -> None:
        """In a forked child: close the copies of the parent's sockets."""
        for connection in list(self._open):
            connection.close()
        self._open.clear()
        self._idle.clear()


class ReplyReader:
    """Receives the next reply of a connection.

    Args:
        connection: The connection.
        into: The memory for the payload, one part after the other. The reply may have no payload.
        deadline: See `Connection`.
    """

    __slots__ = ("_connection", "_deadline", "_parts", "_start", "body")

    def __init__(self, connection: Connection, into: Sequence[memoryview], deadline: float) -> None:
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
