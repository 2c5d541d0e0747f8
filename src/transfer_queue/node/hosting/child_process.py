"""A server of a system as its supervisor sees it: one state over all the processes that run it, one after the other.

A server that was killed while it served is restarted at once. A server that ended by itself, or before it was up, is
restarted after a pause that grows. The supervisor gives it up when it has not served for `patience` seconds, however
often it was restarted in that time. In its own process, `run_server` runs the server until the supervisor ends it or is
dead.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from transfer_queue.errors import JournalError, StartError, TransferQueueError
from transfer_queue.node.hosting.server_log import LOG_SECONDS, LogFile, write_log_to
from transfer_queue.system_folder.liveness import StartLock
from transfer_queue.system_folder.paths import SystemFolder

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
    is_essential: bool = True
    """Whether the system stops if the server is given up."""
    needed: Callable[[], bool] = lambda: True
    """Whether the server has something to do. If not, no further process is forked when one has ended."""
    listeners: Sequence[socket.socket] = ()
    """The sockets of the server, if they are to be closed when it is not needed any more."""
    pid: int | None = None
    """The process that runs the server; None if there is none."""
    ready: int | None = None
    """The pipe on which the process reports that it is up; None after that."""
    report: bytes = b""
    """What the process has written to that pipe so far."""
    is_up: bool = False
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
        self.report, self.is_up, self.due = b"", False, None

    def read_report(self) -> None:
        """Read what the process reports. At the end of the pipe the server is up, or has failed."""
        assert self.ready is not None
        piece = os.read(self.ready, 1 << 16)
        self.report += piece
        if not piece:
            self.close()
            self.is_up = self.report == READY
            self._up_since = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether the process reported that it cannot come up, or ended without a message."""
        return self.ready is None and not self.is_up

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
        steady = self.is_up and (code == -signal.SIGKILL or now - self._up_since >= STEADY_SECONDS)
        if steady:
            self.failures, self.failing_since = 0, None
        else:
            self.failures += 1
            self.failing_since = now if self.failing_since is None else self.failing_since
        self.pid, self.is_up = None, False
        self.close()
        pause = min(FIRST_PAUSE * 2.0 ** min(self.failures - 1, 10), LONGEST_PAUSE) if self.failures else 0.0
        given_up = self.failing_since is not None and now >= self.failing_since + self.patience
        self.due = None if given_up else now + pause
        return not given_up


# ---------------------------------------------------------------- in the process of the server
# Only the supervisor holds the writing end of a pipe, the *lifeline*. When the reading end in the server reports the
# end of the pipe, the supervisor is dead, for whatever reason. The server then ends too and removes the system's files.
# A thread waits for this, so that it also works while the user's sampler does not return.


READY = b"+"  # what a server writes when it is up; anything else is the reason why it is not
ORPHAN_SECONDS = 3.0  # an orphan that has not ended by itself exits after this time
LOCK_SECONDS = 2.0  # for which an orphan waits for other processes that start or remove the system
NEVER = (1 << 31) - 1  # collections of the middle generation before a full one


class _Guardian:
    """Ends this process when the supervisor dies. Until then it bounds the size of the log."""

    def __init__(self, lifeline: int, system: SystemFolder, log: LogFile) -> None:
        self.is_orphaned = False
        self.server: Serves | None = None
        self._lifeline = lifeline
        self._log = log
        self._system = system
        self._identity = system.identity()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="guardian", daemon=True).start()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)
        while not poll.poll(LOG_SECONDS * 1000) or os.read(self._lifeline, 1):
            self._log.limit_size()
        self.is_orphaned = True
        if self.server is not None:
            self.server.stop()
        if not self._ended.wait(ORPHAN_SECONDS):
            self.remove_files()
            os._exit(1)

    def remove_files(self) -> None:
        """Remove the system's folder, unless it belongs to a later start of the system."""
        with contextlib.ExitStack() as stack:
            # a process that starts this system may hold the lock and wait for our end, so we do not wait for long
            with contextlib.suppress(StartError):
                stack.enter_context(StartLock(self._system.lock, LOCK_SECONDS))
            if self._system.identity() == self._identity:
                self._system.remove()
        self._ended.set()


class Serves(Protocol):
    """What a child of the supervisor runs, such as a `net.server.server_loop.ServerLoop`."""

    @property
    def counters(self) -> object:
        """Counts of what the server has done, for its log."""

    def run(self) -> None:
        """Serve until `stop` is called."""

    def stop(self) -> None:
        """End `run`. Any thread or signal handler may call it."""


def spare_old_objects() -> None:
    """Restrict Python's garbage collector to young objects, which takes at most a millisecond.

    A full collection examines every object. With ten thousand partitions this takes half a second, in which no client
    would be served. The objects of a server are not in reference cycles, so that they are freed without the collector
    (`tests/node/test_old_objects.py`).
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


def run_server(name: str, system: SystemFolder, lifeline: int, ready: int, build: Callable[[], Serves]) -> int:
    """Build and run a server in this process until SIGTERM or the supervisor's death. Returns the exit status.

    `ready` is the pipe on which it reports that it is up, or why it is not.
    """
    log = write_log_to(system.log(name))
    logger = logging.getLogger(f"{__name__}.{name}")
    guardian = _Guardian(lifeline, system, log)
    try:
        server = build()
    except BaseException as error:
        logger.exception("the %s cannot start", name)
        _report(ready, _error_text(error).encode())
        return 1
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    guardian.server = server
    spare_old_objects()
    logger.info("the %s is up, process %d", name, os.getpid())
    _report(ready, READY)
    if guardian.is_orphaned:
        server.stop()
    server.run()
    logger.info("the %s ends; its counters: %s", name, server.counters)
    if guardian.is_orphaned:
        guardian.remove_files()
    return 0


def _error_text(error: BaseException) -> str:
    """Return the text of an error for the starter. It has no traceback if the message is enough; the log has it."""
    known = isinstance(error, (StartError, JournalError))
    if known or (isinstance(error, TransferQueueError) and isinstance(error.__cause__, OSError)):
        return f"{error} ({type(error).__name__})"
    return "".join(traceback.format_exception(error))


def _report(ready: int, message: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(ready, "wb") as pipe:
        pipe.write(message)
