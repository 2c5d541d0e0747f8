"""Runs a server as a child of the supervisor: its log, the report that it is up, and its end.

Only the supervisor holds the writing end of a pipe, the *lifeline*. When the reading end in the server reports the end
of the pipe, the supervisor is dead, for whatever reason. The server then ends too and removes the system's files. A
thread waits for this, so that it also works while the user's sampler does not return.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from transfer_queue.errors import JournalError, StartError, TransferQueueError
from transfer_queue.node.hosting.server_log import LOG_SECONDS, LogFile, write_log_to
from transfer_queue.node.system.locks import StartLock
from transfer_queue.node.system.paths import SystemFolder

READY = b"+"  # what a server writes when it is up; anything else is the reason why it is not
ORPHAN_SECONDS = 3.0  # an orphan that has not ended by itself exits after this time
LOCK_SECONDS = 2.0  # for which an orphan waits for other processes that start or remove the system
NEVER = (1 << 31) - 1  # collections of the middle generation before a full one


class _Guardian:
    """Ends this process when the supervisor dies. Until then it bounds the size of the log."""

    def __init__(self, lifeline: int, system: SystemFolder, log: LogFile) -> None:
        self.orphaned = False
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
        self.orphaned = True
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
    if guardian.orphaned:
        server.stop()
    server.run()
    logger.info("the %s ends; its counters: %s", name, server.counters)
    if guardian.orphaned:
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
