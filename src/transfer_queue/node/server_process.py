"""A server's life as a child of the supervisor: its log, its readiness, its end.

The supervisor holds the only writing end of a pipe, the *lifeline*: when its reading end here tells of the
end, the supervisor is dead, however it died. The server then ends too and removes the system's files. A
thread waits for that, so that it also works while the user's sampler never returns.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from transfer_queue import config
from transfer_queue.errors import StartError
from transfer_queue.node.locks import StartLock
from transfer_queue.node.paths import SystemFolder

READY = b"+"  # what a server says that is up; anything else is why it is not
ORPHAN_SECONDS = 3.0  # an orphan that has not ended by itself is ended after so long
LOCK_SECONDS = 2.0  # for which an orphan waits for others who start or remove the system

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def write_log_to(path: Path) -> None:
    """Sends stdout, stderr and logging of this process to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    configure_logging()


def configure_logging() -> None:
    """Logging of a server, to stderr, which is its log file."""
    logging.basicConfig(stream=sys.stderr, level=config.logging_level() or logging.INFO, format=_FORMAT, force=True)
    faulthandler.enable()


class _Guardian:
    """Waits for the supervisor's death and sees to it that this process follows."""

    def __init__(self, lifeline: int, system: SystemFolder) -> None:
        self.orphaned = False
        self.server: Serves | None = None
        self._lifeline = lifeline
        self._system = system
        self._identity = system.identity()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="guardian", daemon=True).start()

    def _watch(self) -> None:
        while os.read(self._lifeline, 1):
            pass
        self.orphaned = True
        if self.server is not None:
            self.server.stop()
        if not self._ended.wait(ORPHAN_SECONDS):
            self.remove_files()
            os._exit(1)

    def remove_files(self) -> None:
        """Removes the system's folder, unless it is another's by now."""
        with contextlib.ExitStack() as stack:
            # whoever starts this system may hold the lock and wait for us: then it is not our turn to wait
            with contextlib.suppress(StartError):
                stack.enter_context(StartLock(self._system.lock, LOCK_SECONDS))
            if self._system.identity() == self._identity:
                self._system.remove()
        self._ended.set()


class Serves(Protocol):
    """What a child of the supervisor does, as `net.server.Server`."""

    @property
    def counters(self) -> object:
        """What it has done, for its log."""

    def run(self) -> None:
        """Until it is stopped."""

    def stop(self) -> None:
        """Ends `run`, from any thread or a signal."""


def run_server(name: str, system: SystemFolder, lifeline: int, ready: int, build: Callable[[], Serves]) -> int:
    """Builds and runs a server in this process, until SIGTERM or the supervisor's death; the exit status.

    ready: where to say that it is up, or why not.
    """
    write_log_to(system.log(name))
    logger = logging.getLogger(f"{__name__}.{name}")
    guardian = _Guardian(lifeline, system)
    try:
        server = build()
    except BaseException:
        logger.exception("cannot start")
        _say(ready, traceback.format_exc().encode())
        return 1
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    guardian.server = server
    logger.info("up, process %d", os.getpid())
    _say(ready, READY)
    if guardian.orphaned:
        server.stop()
    server.run()
    logger.info("ends; %s", server.counters)
    if guardian.orphaned:
        guardian.remove_files()
    return 0


def _say(ready: int, message: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(ready, "wb") as pipe:
        pipe.write(message)
