"""What wakes a loop that waits for its sockets, from any thread and from signal handlers."""

from __future__ import annotations

import contextlib
import socket


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
