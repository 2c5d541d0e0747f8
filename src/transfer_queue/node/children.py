"""A server of a system as its supervisor sees it: over all the processes that serve for it, one after the other.

What is killed is forked anew at once. What ends by itself is given a little longer each time, and is given up when it
has done so MOST_FAILURES times in a row.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from transfer_queue.node.server_process import READY, Serves

MOST_FAILURES = 5
FIRST_PAUSE = 0.1  # seconds after the first failure in a row, twice as long after each further one
STEADY_SECONDS = 10.0  # a process that has served for so long has not failed to come up


@dataclass
class Child:
    """name: "controller" or "unit-0". build: makes the server, in the child. restarts: a dead one is forked anew.

    pid: of the process that serves; None while there is none. ready: where it says that it is up, until it has.
    said: what it has said so far; up: it has come up. due: when it is to be forked next, None: not to be.
    """

    name: str
    build: Callable[[], Serves]
    restarts: bool
    pid: int | None = None
    ready: int | None = None
    said: bytes = b""
    up: bool = False
    due: float | None = None
    deadline: float = 0.0  # by which it must be up
    failures: int = 0  # in a row
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
        self.failures = 0 if steady else self.failures + 1
        self.pid, self.up = None, False
        self.close()
        self.due = now + (FIRST_PAUSE * 2.0 ** (self.failures - 1) if self.failures else 0.0)
        return self.failures < MOST_FAILURES
