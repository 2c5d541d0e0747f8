"""Listening sockets, which the server makes, or the supervisor for each server in turn, and the wait for sockets."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from transfer_queue.utils.host_addresses import resolve

if TYPE_CHECKING:
    import ssl


BACKLOG = 1024
SILENCE = 20
"""Seconds without any confirmation of a peer after which the peer counts as gone."""
_KEEPALIVE = (
    ("TCP_KEEPIDLE", SILENCE // 2), ("TCP_KEEPINTVL", SILENCE // 8), ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", SILENCE * 1000),
)  # fmt: skip


class BoundPath:
    """A path that this process bound.

    Another process may have bound the path since, so `unlink` compares the file. While the bound socket is open, no
    other file can have its inode number.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._made = os.lstat(path)

    def unlink(self) -> None:
        """Remove the path if it still is the path of this socket."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self._made, os.lstat(self._path)):
                os.unlink(self._path)


class Listener(NamedTuple):
    """A socket on which a server listens."""

    made: BoundPath | None
    """The path of the socket; None if this server did not make it."""
    tls: ssl.SSLContext | None
    """The TLS context; None without TLS."""


def set_tcp_options(sock: socket.socket) -> None:
    """Set the options of a TCP connection: send without delay, and detect within seconds that a machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):  # some platforms do not have all options
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def bind_socket(address: Union[str, tuple[str, int]]) -> socket.socket:
    """Return a socket that listens on a path (mode 0600) or (host, port); port 0 for any free port.

    If a host name has several addresses, the socket listens on the first one that this machine has, IPv4 before IPv6.
    """
    if isinstance(address, str):
        return _bind(socket.AF_UNIX, address)
    failures: list[OSError] = []
    for family, found in resolve(*address):
        try:
            return _bind(family, found)
        except OSError as error:
            failures.append(error)
    raise failures[0]


def _bind(family: socket.AddressFamily, address: str | tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if not isinstance(address, str):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        if isinstance(address, str):
            os.chmod(address, 0o600)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class Waker:
    """A pair of sockets that wakes the loop: a byte written to one makes the other readable, which the loop watches."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    @property
    def descriptor(self) -> socket.socket:
        """The socket that becomes readable after `wake`."""
        return self._in

    def wake(self) -> None:
        """Wake the loop now, or as soon as it waits."""
        with contextlib.suppress(OSError):  # full: the loop wakes anyway; closed: the loop has ended
            self._out.send(b"\0")

    def drain(self, _: int) -> None:
        """Read the bytes of `wake`. The loop calls this when the socket is readable."""
        with contextlib.suppress(BlockingIOError):
            while len(self._in.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        """Close both sockets. `wake` may still be called."""
        self._in.close()
        self._out.close()


READ = select.EPOLLIN
WRITE = select.EPOLLOUT
MOST_EVENTS = 4096
"""Events that one `poll` returns; the others are returned by the next ones."""


class Poller:
    """The sockets of a loop, each with the events for which it waits and with data of the caller.

    The module `selectors` does the same with twice as many instructions of Python, which are a twentieth of those of a
    small request. Errors and ends of connections are events beside READ and WRITE: test for `events & ~WRITE`.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._data: dict[int, Any] = {}
        """Descriptor -> data."""

    def register(self, sock: socket.socket, events: int, data: Any) -> None:
        """Wait for events of a socket, too."""
        descriptor = sock.fileno()
        self._epoll.register(descriptor, events)
        self._data[descriptor] = data

    def modify(self, sock: socket.socket, events: int) -> None:
        """Replace the events for which a socket waits."""
        self._epoll.modify(sock.fileno(), events)

    def unregister(self, sock: socket.socket) -> None:
        """Do not wait for this socket any more. Call this before it is closed."""
        descriptor = sock.fileno()
        del self._data[descriptor]
        self._epoll.unregister(descriptor)

    def poll(self, seconds: float | None) -> list[tuple[Any, int]]:
        """Return (data, events) of the sockets that have events. Waits for these, at most `seconds`; None: forever."""
        found = self._epoll.poll(seconds, MOST_EVENTS)
        data = self._data
        return [(data[descriptor], events) for descriptor, events in found]

    def close(self) -> None:
        """Stop waiting for all sockets."""
        self._epoll.close()
        self._data.clear()
