"""A server of a system as its supervisor sees it: over all the processes that serve for it, one after the other.

A server that was killed while it served is restarted at once. A server that ended by itself, or before it was up, is
restarted after a pause that grows. The supervisor gives it up when it has not served for `patience` seconds, however
often it was restarted in that time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from transfer_queue.node.hosting.server_process import READY, Serves

FIRST_PAUSE = 0.1  # seconds after the first failure in a row, twice as long after each further one
LONGEST_PAUSE = 5.0
STEADY_SECONDS = 10.0  # a process that has served for so long has not failed to come up


@dataclass
class ChildServer:
    """A server process as its supervisor sees it.

    name: "controller" or "unit-0". build: makes the server, in the child. restarts: a dead one is forked again.
    patience: seconds for which it may fail to come up, or to stay up; then it is given up. pid: of the process that
    serves; None while there is none. ready: where it says that it is up, until it has. said: what it has said so far;
    up: it has come up. due: when it is to be forked next, None: not to be.
    """

    name: str
    build: Callable[[], Serves]
    restarts: bool
    patience: float
    pid: int | None = None
    ready: int | None = None
    said: bytes = b""
    up: bool = False
    due: float | None = None
    deadline: float = 0.0  # by which it must be up
    failures: int = 0  # in a row
    failing_since: float | None = None  # when the first of these failures was
    _up_since: float = 0.0

    def forked(self, pid: int, ready: int, deadline: float) -> None:
        """A process for it was made."""
        self.pid, self.ready, self.deadline = pid, ready, deadline
        self.said, self.up, self.due = b"", False, None

    def hear(self) -> None:
        """Reads what it says; at the end of it, it is up or will end."""
        assert self.ready is not None
        piece = os.read(self.ready, 1 << 16)
        self.said += piece
        if not piece:
            self.close()
            self.up = self.said == READY
            self._up_since = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether it has said that it cannot come up, or ended without a word."""
        return self.ready is None and not self.up

    def close(self) -> None:
        """Hears no more of it."""
        if self.ready is not None:
            os.close(self.ready)
            self.ready = None

    def ended(self, code: int) -> bool:
        """Its process has ended with this exit code; whether another one is to be tried, when `due` has come."""
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
