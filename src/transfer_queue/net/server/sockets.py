"""Listening sockets: how they are made, the wait for sockets, and the acceptor of connections."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from transfer_queue.errors import advice_on_open_files
from transfer_queue.net.fd_limits import ReservedDescriptor
from transfer_queue.net.handshake import refusal_message
from transfer_queue.utils.host_addresses import resolve

if TYPE_CHECKING:
    import ssl


BACKLOG = 1024
SILENCE = 20
"""Seconds without any confirmation of a peer after which the peer counts as gone."""
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, SILENCE // 2), (socket.TCP_KEEPINTVL, SILENCE // 8), (socket.TCP_KEEPCNT, 4),
    (socket.TCP_USER_TIMEOUT, SILENCE * 1000),
)  # fmt: skip


class Listener(NamedTuple):
    """A socket on which a server listens."""

    tls: ssl.SSLContext | None
    """The TLS context; None without TLS."""
    made: tuple[str, os.stat_result] | None = None
    """The path of the socket, and its file when it was bound; None if this server did not make it."""

    def unlink(self) -> None:
        """Remove the path if it still is the path of this socket.

        Another process may have bound it since. While the socket is open, no other file can have its inode number.
        """
        with contextlib.suppress(OSError):
            if self.made is not None and os.path.samestat(self.made[1], os.lstat(self.made[0])):
                os.unlink(self.made[0])


def set_tcp_options(sock: socket.socket) -> None:
    """Set the options of a TCP connection: send without delay, and detect within seconds that a machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


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
MAX_EVENTS = 4096
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
        found = self._epoll.poll(seconds, MAX_EVENTS)
        data = self._data
        return [(data[descriptor], events) for descriptor, events in found]

    def close(self) -> None:
        """Stop waiting for all sockets."""
        self._epoll.close()
        self._data.clear()


ACCEPTS_AT_ONCE = 64
ACCEPT_PAUSE = 0.5
"""Seconds without accepting after the system had no descriptor left."""

logger = logging.getLogger(__name__)


class Acceptor:
    """Accepts the connections of any number of listening sockets.

    Args:
        poller: Waits for the sockets.
        clock: The clock of pauses.
        welcome: Called with each accepted connection, and the TLS context of its listener.
        count: Returns the number of open connections, for the log.
        counters: Counts the failures to accept, as "accept_errors".
    """

    def __init__(
        self,
        poller: Poller,
        clock: Callable[[], float],
        welcome: Callable[[socket.socket, ssl.SSLContext | None], None],
        count: Callable[[], int],
        counters: dict[str, int],
    ) -> None:
        self.paused_until: float | None = None
        """The end of a pause without accepting; None while connections are accepted."""
        self._poller = poller
        self._clock = clock
        self._welcome = welcome
        self._count = count
        self._counters = counters
        self._listeners: dict[socket.socket, Listener] = {}
        self._spared = ReservedDescriptor()

    def listen(self, address: Union[str, tuple[str, int]], tls: ssl.SSLContext | None) -> Union[str, tuple[str, int]]:
        """Listen on an address and return the address as bound. See `ServerLoop.listen`."""
        sock = bind_socket(address)
        self.inherit(sock, tls)
        if isinstance(address, str):
            self._listeners[sock] = Listener(None, (address, os.lstat(address)))
            return address
        bound = sock.getsockname()
        return str(bound[0]), int(bound[1])

    def inherit(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Listen on a socket of `bind_socket`. The process that made the socket removes its path."""
        sock.setblocking(False)
        self._listeners[sock] = Listener(None if sock.family == socket.AF_UNIX else tls)
        self._poller.register(sock, READ, self.accept)

    def accept(self, _: int) -> None:
        """Accept the connections that wait. The loop calls this when a listening socket is readable."""
        for sock, listener in self._listeners.items():
            for _ in range(ACCEPTS_AT_ONCE):
                try:
                    accepted, _ = sock.accept()
                except BlockingIOError:
                    break
                except ConnectionError:  # the peer is gone before the connection was accepted
                    continue
                except OSError as error:
                    if not self._refuse_one(sock, error):
                        self._pause(error)
                        return
                    continue
                self._welcome(accepted, listener.tls)

    def _refuse_one(self, listener: socket.socket, error: OSError) -> bool:
        """Accept one connection with the reserved descriptor to send it the reason of the refusal.

        Returns whether this was possible.
        """
        words = advice_on_open_files(error)
        if words is None or not self._spared.refuse_connection(listener, refusal_message(words)):
            return False
        self._counters["accept_errors"] += 1
        logger.warning("a connection was refused: %s; %d are open", words, self._count())
        return True

    def _pause(self, error: OSError) -> None:
        # The connection stays in the queue, so that the listener would stay readable.
        self._counters["accept_errors"] += 1
        logger.warning("cannot accept connections: %s; %d are open", error, self._count())
        self.paused_until = self._clock() + ACCEPT_PAUSE
        for sock in self._listeners:
            self._poller.unregister(sock)

    def resume(self) -> None:
        """End a pause."""
        self.paused_until = None
        for sock in self._listeners:
            self._poller.register(sock, READ, self.accept)

    def stop(self) -> None:
        """Accept no further connections. The sockets stay open."""
        if self.paused_until is None:
            for sock in self._listeners:
                self._poller.unregister(sock)

    def close(self) -> None:
        """Close all listening sockets and remove the paths that `listen` made."""
        for sock, listener in self._listeners.items():
            listener.unlink()
            sock.close()
        self._listeners.clear()
        self._spared.close()
