"""The listening sockets of a server: accepts connections, and pauses while the system has no descriptor left."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Union

from transfer_queue.errors import advice_on_open_files
from transfer_queue.net.fd_limits import RateLimitedLog, ReservedDescriptor
from transfer_queue.net.handshake import refusal_message
from transfer_queue.net.server.sockets import READ, BoundPath, Listener, Poller, bind_socket

if TYPE_CHECKING:
    import ssl

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
        self._warn = RateLimitedLog(logger, clock)

    def listen(self, address: Union[str, tuple[str, int]], tls: ssl.SSLContext | None) -> Union[str, tuple[str, int]]:
        """Listen on an address and return the address as bound. See `ServerLoop.listen`."""
        sock = bind_socket(address)
        self.inherit(sock, tls)
        if isinstance(address, str):
            self._listeners[sock] = Listener(BoundPath(address), None)
            return address
        bound = sock.getsockname()
        return str(bound[0]), int(bound[1])

    def inherit(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Listen on a socket of `bind_socket`. The process that made the socket removes its path."""
        sock.setblocking(False)
        self._listeners[sock] = Listener(None, None if sock.family == socket.AF_UNIX else tls)
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
        self._warn("a connection was refused: %s; %d are open", words, self._count())
        return True

    def _pause(self, error: OSError) -> None:
        # The connection stays in the queue, so that the listener would stay readable.
        self._counters["accept_errors"] += 1
        self._warn("cannot accept connections: %s; %d are open", error, self._count())
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
            if listener.made is not None:
                listener.made.unlink()
            sock.close()
        self._listeners.clear()
        self._spared.close()
