"""The log files of the servers, with a bound on their size.

A log file contains the log lines of a server, and everything that the server or a user's code prints. Repeated lines
are counted instead of written. When a file has grown to MAX_BYTES, it replaces the file before it, and a new one is
started. So a server cannot fill the disk with its log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from transfer_queue.config import environment

MAX_BYTES = 16 << 20
OLD = ".1"  # suffix of the former file
PERIOD = 10.0  # seconds
LOG_SECONDS = 5.0  # between two checks of the size of a log, in addition to the check at each line
LINES_A_PERIOD = 20  # similar lines that are written in a period; more are only counted
MAX_KINDS = 1024  # kinds of lines that are remembered

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RepeatLimit(logging.Filter):
    """Passes at most LINES_A_PERIOD similar lines in a period, and adds the number of the others to the next one.

    Lines are similar if the same statement has written them: numbers and names in them may differ.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, int, str], list[float]] = {}
        """Logger, level and text of a line -> when its period began, lines so far."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        kind = (record.name, record.levelno, str(record.msg))
        now = self._clock()
        with self._lock:
            seen = self._seen.get(kind)
            if seen is None or now >= seen[0] + PERIOD:
                silent = 0 if seen is None else max(0, int(seen[1]) - LINES_A_PERIOD)
                if len(self._seen) >= MAX_KINDS:
                    self._seen.clear()
                self._seen[kind] = [now, 1]
                if silent:
                    record.msg = f"{record.getMessage()} ({silent} more lines like this were not written)"
                    record.args = ()
                return True
            seen[1] += 1
            return seen[1] <= LINES_A_PERIOD


class LogFile:
    """A file of bounded size for stdout and stderr of this process. Any thread may call `limit_size`, at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)

    def limit_size(self) -> None:
        """Start a new file if this one has grown to MAX_BYTES; this one replaces the former file."""
        with self._lock, contextlib.suppress(OSError):  # a full disk must not end the server
            if os.fstat(2).st_size >= MAX_BYTES:
                with contextlib.suppress(FileNotFoundError):  # the last attempt could not create the new file
                    self._path.replace(self._path.with_name(self._path.name + OLD))
                self._begin()


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines to stderr, and bounds the size of its file."""

    def __init__(self, file: LogFile | None) -> None:
        super().__init__(sys.stderr)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self._file is not None:
            self._file.limit_size()


def write_log_to(path: Path) -> LogFile:
    """Redirect stdout, stderr and logging of this process to a file."""
    file = LogFile(path)
    configure_logging(file)
    return file


def configure_logging(file: LogFile | None = None) -> None:
    """Configure logging of a server to stderr, which is its log file."""
    handler = _Handler(file)
    handler.addFilter(RepeatLimit())
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.basicConfig(level=environment.logging_level() or logging.INFO, handlers=[handler], force=True)
    faulthandler.enable()
