"""A server of a system as its supervisor sees it: one state over all the processes that run it, one after the other.

A server that was killed while it served is restarted at once. A server that ended by itself, or before it was up, is
restarted after a pause that grows. The supervisor gives it up when it has not served for `patience` seconds, however
often it was restarted in that time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transfer_queue.node.hosting.server_process import READY, Serves

FIRST_PAUSE = 0.1  # seconds after the first failure in a row; doubles with each further one
LONGEST_PAUSE = 5.0
STEADY_SECONDS = 10.0  # the end of a process that served for this time is not a failure to come up


@dataclass
class ChildServer:
    """A server process as its supervisor sees it."""

    name: str
    """"controller", "store" or for example "unit-0"."""
    build: Callable[[], Serves]
    """Makes the server, in the child."""
    restarts: bool
    """Whether a dead process is forked again."""
    patience: float
    """Seconds for which it may fail to come up, or to stay up; then the supervisor gives it up."""
    essential: bool = True
    """Whether the system stops if the server is given up."""
    needed: Callable[[], bool] = lambda: True
    """Whether the server has something to do. If not, no further process is forked when one has ended."""
    listeners: Sequence[socket.socket] = ()
    """The sockets of the server, if they are to be closed when it is not needed any more."""
    pid: int | None = None
    """The process that runs the server; None if there is none."""
    ready: int | None = None
    """The pipe on which the process reports that it is up; None after that."""
    said: bytes = b""
    """What the process has written to that pipe so far."""
    up: bool = False
    due: float | None = None
    """When the next process is forked; None if none is planned."""
    deadline: float = 0.0
    """When the process must be up."""
    failures: int = 0
    """Failures in a row."""
    failing_since: float | None = None
    """When the first of these failures was."""
    _up_since: float = 0.0

    def record_fork(self, pid: int, ready: int, deadline: float) -> None:
        """Record that a process was forked for this server."""
        self.pid, self.ready, self.deadline = pid, ready, deadline
        self.said, self.up, self.due = b"", False, None

    def read_report(self) -> None:
        """Read what the process reports. At the end of the pipe the server is up, or has failed."""
        assert self.ready is not None
        piece = os.read(self.ready, 1 << 16)
        self.said += piece
        if not piece:
            self.close()
            self.up = self.said == READY
            self._up_since = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether the process reported that it cannot come up, or ended without a message."""
        return self.ready is None and not self.up

    def close(self) -> None:
        """Stop reading the pipe."""
        if self.ready is not None:
            os.close(self.ready)
            self.ready = None

    def refuse_connections(self) -> None:
        """Let nobody wait for the server. Closing is not enough, because other processes have inherited the sockets."""
        for listener in self.listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)

    def record_end(self, code: int) -> bool:
        """Record that the process ended with this exit code. Returns whether another one is forked, at `due`."""
        now = time.monotonic()
        steady = self.up and (code == -signal.SIGKILL or now - self._up_since >= STEADY_SECONDS)
        if steady:
            self.failures, self.failing_since = 0, None
        else:
            self.failures += 1
            self.failing_since = now if self.failing_since is None else self.failing_since
        self.pid, self.up = None, False
        self.close()
        pause = min(FIRST_PAUSE * 2.0 ** min(self.failures - 1, 10), LONGEST_PAUSE) if self.failures else 0.0
        given_up = self.failing_since is not None and now >= self.failing_since + self.patience
        self.due = None if given_up else now + pause
        return not given_up
