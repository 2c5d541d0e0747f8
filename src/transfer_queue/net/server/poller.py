"""Waits until sockets are readable or writable, with Linux's epoll."""

from __future__ import annotations

import select
import socket
from typing import Any

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
