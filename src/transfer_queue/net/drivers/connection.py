"""A client's end of one authenticated connection, and the idle ones that a session keeps.

A `Connection` is a non-blocking socket with its frame reader. `exchange` waits with poll, so that it
works in any thread and inside a running event loop; the asyncio driver uses the same object with its
loop's readers instead. Only one caller uses a connection at a time: it is taken out of the `Pool`, or
made, and given back between calls. Nothing here knows what a body means.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

from transfer_queue.errors import AttachError, ProtocolError, TransferQueueError
from transfer_queue.net.drivers.reply_reader import ReplyReader
from transfer_queue.net.fd_limits import out_of_files
from transfer_queue.net.framing import FrameReader
from transfer_queue.net.handshake import HANDSHAKE_SECONDS, ClientHandshake
from transfer_queue.net.server.sockets import set_tcp_options
from transfer_queue.net.session import Session, Target

if TYPE_CHECKING:
    import ssl

    from transfer_queue.net.tls import Tls

Address = Union[str, tuple[str, int]]

READ_SIZE = 1 << 16
LARGE_READ = 1 << 20
MAX_IDLE = 64  # connections kept per target; more threads than this at once pay for their own
BUSY_SECONDS = 0.005  # between two tries at a UNIX socket whose queue of connections is full
LONGEST_POLL = 86400.0  # seconds; the kernel takes 24 days at most
MAX_PATH = 107  # bytes of a UNIX socket's path


def new_socket(address: Address) -> socket.socket:
    """A non-blocking socket of the family that the address wants: a path, or (host, port)."""
    if isinstance(address, str):
        if len(address.encode()) > MAX_PATH:
            raise AttachError(
                f"the socket path {address!r} has {len(address.encode())} bytes, the system's limit is {MAX_PATH}: set "
                "TQ_RUNTIME_DIR to a folder with a shorter path"
            )
        sock = _open(socket.AF_UNIX)
    else:
        sock = _open(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        set_tcp_options(sock)
    sock.setblocking(False)
    return sock


def _open(family: socket.AddressFamily) -> socket.socket:
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        words = out_of_files(error)
        if words is None:
            raise
        raise AttachError(f"no connection to a server can be opened: {words}") from error


class Connection:
    """One socket to one server. Raises OSError when the peer is gone, TimeoutError past a deadline.

    Deadlines are readings of `time.monotonic`.
    """

    __slots__ = ("_poll", "_polled", "reader", "sock", "tls")

    def __init__(self, address: Address) -> None:
        self.sock = new_socket(address)
        # such replies go through `exchange_into`: a server that announces a payload unasked is none of ours
        self.reader = FrameReader(max_payload=0)
        self.tls: Tls | None = None
        self._poll = select.poll()
        self._polled = 0  # the events that _poll waits for

    @property
    def closed(self) -> bool:
        """Whether the socket was closed at this end."""
        return self.sock.fileno() < 0

    def close(self) -> None:
        """Closes this end; a reply under way is lost. Touches no other process's copy."""
        self.sock.close()

    def wake(self) -> None:
        """Ends the connection from another thread; who waits on it sees it broken."""
        with contextlib.suppress(OSError):  # not connected any more, which is what was wanted
            self.sock.shutdown(socket.SHUT_RDWR)

    def connect(
        self,
        address: Address,
        role: str,
        client_id: str,
        key: bytes,
        deadline: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connects and shakes hands, within HANDSHAKE_SECONDS and before the deadline."""
        deadline = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
        while not self.try_connect(address):
            if isinstance(address, str):
                _wait_a_moment(deadline)
            else:
                self._wait(select.POLLOUT, deadline)
        if (hello := self.secure(address, tls)) and self.tls is not None:
            self._push(hello, deadline)
            while not self.tls.done:
                self._receive(deadline)  # which is empty until our own hello
        handshake = ClientHandshake(role, client_id, key)
        with contextlib.suppress(ConnectionError):  # it may have said why it takes none, and closed
            self._send(handshake.start(), deadline)
        while not handshake.done:
            proof = handshake.receive(self._receive(deadline))
            if proof:
                self._send(proof, deadline)
        self.reader.feed(handshake.leftover)

    def try_connect(self, address: Address) -> bool:
        """One step of connecting; False if it must be tried again: in a moment (UNIX), or once writable (TCP)."""
        code = self.sock.connect_ex(address)
        if code in (0, errno.EISCONN):
            return True
        if code in (errno.EINPROGRESS, errno.EALREADY, errno.EAGAIN):
            return False
        raise OSError(code, os.strerror(code), str(address))

    def secure(self, address: Address, tls: ssl.SSLContext | None) -> bytes:
        """What to send first on a connection that is to use TLS; empty, and no TLS, over UNIX sockets."""
        if tls is None or isinstance(address, str):
            return b""
        from transfer_queue.net.tls import Tls  # ssl is slow to import, and most systems need none

        self.tls = Tls(tls, server=False)
        return self.tls.start()

    def sealed(self, data: bytes) -> bytes:
        """What goes over the socket to say this."""
        if self.tls is None:
            return data
        self.tls.say(data)
        return self.tls.outgoing()

    def unsealed(self, data: bytes) -> tuple[bytes, bytes]:
        """What these bytes of the socket say, and what goes over it in return. Raises as `Tls.receive`."""
        if self.tls is None:
            return data, b""
        try:
            said = self.tls.receive(data)
        except TransferQueueError:
            with contextlib.suppress(OSError):  # the server's log should say why, too
                self.sock.send(self.tls.outgoing())
            raise
        if self.tls.ended and not said:
            raise ConnectionResetError("the server ended the connection")
        return said, self.tls.outgoing()

    def exchange(self, frame: bytes, deadline: float, payload: memoryview | None = None) -> bytes:
        """Sends one frame, with the payload that it announces, and returns the body of the one that answers it."""
        self.send(frame, deadline, payload)
        while True:
            frames = self.reader.feed(self._receive(deadline))
            if frames:
                if len(frames) > 1 or not self.reader.clean:
                    raise ProtocolError("a server sent more than the one reply that was asked for")
                return frames[0][0]

    def exchange_into(self, frame: bytes, deadline: float, into: Sequence[memoryview]) -> bytes:
        """Like `exchange`, of an answer with a payload, which goes into these parts; an answer without one may come."""
        self._send(frame, deadline)
        incoming = ReplyReader(self, into, deadline)
        while not incoming.whole:
            self._wait(select.POLLIN, deadline)
            incoming.receive()
        assert incoming.body is not None
        return incoming.body

    def exchange_with_more(self, frame: bytes, deadline: float) -> list[bytes]:
        """Sends one frame to a server that also speaks unasked; the bodies of the answer and of what came with it."""
        self._send(frame, deadline)
        bodies: list[bytes] = []
        while not bodies or not self.reader.clean:
            bodies += [body for body, _ in self.reader.feed(self._receive(deadline))]
        return bodies

    def send(self, frame: bytes, deadline: float, payload: memoryview | None = None) -> None:
        """Sends one frame, with the payload that it announces."""
        self._send(frame, deadline)
        if payload is not None:
            for begin in range(0, len(payload), LARGE_READ):
                self._send(payload[begin : begin + LARGE_READ], deadline)

    def _send(self, data: bytes | memoryview, deadline: float) -> None:
        self._push(data if self.tls is None else self.sealed(bytes(data)), deadline)

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
        """What is there; b"" where nothing is."""
        try:
            data = self.sock.recv(min(max(READ_SIZE, self.reader.missing), LARGE_READ))
        except BlockingIOError:
            return b""
        if not data:
            raise ConnectionResetError("the server closed the connection")
        said, answer = self.unsealed(data)
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
        raise TimeoutError("no answer before the deadline")


def _wait_a_moment(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the server takes no connection")
    time.sleep(BUSY_SECONDS)


class Pool:
    """The connections of one session: the idle ones by target, and all that are open.

    It holds no reference to its session, so that dropping the session closes them at once.

    Lists and sets are touched by single operations that the interpreter does whole, so no lock is held
    when a thread forks.
    """

    def __init__(self) -> None:
        self._closed = False
        self._idle: dict[Target, list[Connection]] = {}
        self._open: set[Connection] = set()  # idle or in use

    def take(self, target: Target) -> Connection | None:
        """An idle connection, now the caller's alone; None if there is none."""
        idle = self._idle.get(target)
        while idle:
            try:
                connection = idle.pop()
            except IndexError:  # another thread was faster
                return None
            if not connection.closed:
                return connection
        return None

    def new(self, address: Address) -> Connection:
        """A socket that is not connected yet, the caller's alone."""
        connection = Connection(address)
        self._open.add(connection)
        return connection

    def connect(self, session: Session, target: Target, deadline: float) -> Connection:
        """A new connection to the target, the caller's alone; blocks until it is authenticated."""
        address = session.resolve(target)
        connection = self.new(address)
        try:
            connection.connect(address, session.role, session.client_id, session.key, deadline, session.tls)
        except BaseException:
            self.discard(connection)
            raise
        return connection

    def give(self, target: Target, connection: Connection) -> None:
        """Puts back a connection on which no reply is outstanding."""
        idle = self._idle.setdefault(target, [])
        if self._closed or len(idle) >= MAX_IDLE:
            self.discard(connection)
        else:
            idle.append(connection)

    def discard(self, connection: Connection) -> None:
        """Closes a connection that is the caller's."""
        self._open.discard(connection)
        connection.close()

    def forget(self, target: Target) -> None:
        """Closes the idle connections to a target: its server is not the one they led to."""
        while (connection := self.take(target)) is not None:
            self.discard(connection)

    def close(self) -> None:
        """Closes what is idle and breaks what is in use, whose users then close it."""
        self._closed = True
        for target in list(self._idle):
            self.forget(target)
        for connection in list(self._open):
            connection.wake()

    def forked(self) -> None:
        """In a forked child: closes the copies of the parent's sockets."""
        for connection in list(self._open):
            connection.close()
        self._open.clear()
        self._idle.clear()
