"""Sockets that listen, made by the server itself or by the supervisor for one server after the other."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, NamedTuple, Union

if TYPE_CHECKING:
    import ssl


BACKLOG = 1024
SILENCE = 20  # seconds after which a peer that confirms nothing counts as gone
_KEEPALIVE = (
    ("TCP_KEEPIDLE", SILENCE // 2), ("TCP_KEEPINTVL", SILENCE // 8), ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", SILENCE * 1000),
)  # fmt: skip


class BoundPath:
    """A path that this process bound. Another may have taken it since, so that only the same file is unlinked.

    The bound socket keeps its inode, so no other file can have its number while it is open.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._made = os.lstat(path)

    def unlink(self) -> None:
        """Removes the path, if it still leads to this socket."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self._made, os.lstat(self._path)):
                os.unlink(self._path)


class Listener(NamedTuple):
    """What a server knows of a socket on which it listens. made: its path, where the server made it. tls: if used."""

    made: BoundPath | None
    tls: ssl.SSLContext | None


def set_tcp_options(sock: socket.socket) -> None:
    """For a connection over TCP: nothing waits for more to send, and a machine that is gone is noticed in seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def bound_socket(address: Union[str, tuple[str, int]]) -> socket.socket:
    """A socket that listens on a path (mode 0600) or (host, port), port 0 for any."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        if isinstance(address, str):
            os.chmod(address, 0o600)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class Waker:
    """A pair of sockets: a byte that is written at one end makes the other, which the loop watches, readable."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    @property
    def descriptor(self) -> socket.socket:
        """What is readable once `wake` was called."""
        return self._in

    def wake(self) -> None:
        """Wakes the loop, now or as soon as it waits."""
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: the loop is over
            self._out.send(b"\0")

    def woken(self, _: int) -> None:
        """The loop's answer to it."""
        with contextlib.suppress(BlockingIOError):
            while len(self._in.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        """Closes both ends; `wake` may still be called."""
        self._in.close()
        self._out.close()
