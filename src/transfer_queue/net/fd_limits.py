"""What is said where the open-file limit is reached, and how seldom a server repeats itself in its log.

Every connection costs a descriptor at both of its ends. Who has none left says so, with what to do about it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable

SPOKEN_SECONDS = 10.0  # a period of a log: most lines in it are SPOKEN_LINES
SPOKEN_LINES = 20


def out_of_files(error: OSError) -> str | None:
    """What to do, in words, about an error that says that no more files can be opened; None for any other error."""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"the open-file limit of {limit} is reached in process {os.getpid()}: raise `ulimit -n` where it is "
            "started, or let it hold fewer connections and files"
        )
    if error.errno == errno.ENFILE:
        return "the open-file limit of this machine is reached: raise fs.file-max, or end what holds so many files"
    return None


class ReservedDescriptor:
    """A descriptor kept for the moment in which there is no other: to take a connection and say why it cannot stay."""

    def __init__(self) -> None:
        self._file = _open()

    def tell(self, listener: socket.socket, words: bytes) -> bool:
        """Takes one connection, sends it these bytes and closes it; False where even that cannot be done."""
        if self._file is None:
            self._file = _open()
            return False
        os.close(self._file)
        self._file = None
        try:
            accepted, _ = listener.accept()
        except BlockingIOError:  # it has gone meanwhile
            return True
        except OSError:
            return False
        else:
            with accepted, contextlib.suppress(OSError):
                accepted.setblocking(False)
                accepted.send(words)
                accepted.shutdown(socket.SHUT_WR)
                accepted.recv(4096)  # over TCP, closing with its hello unread would destroy what was sent
            return True
        finally:
            self._file = _open()

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


class RateLimitedLog:
    """Warnings of which others decide how many there are: beyond a number in a period they are only counted.

    clock: seconds. Without this, whoever can connect could fill the disk with a log.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._until = 0.0
        self._lines = 0
        self._silent = 0

    def __call__(self, text: str, *args: object) -> None:
        """Logs a warning, or counts it."""
        now = self._clock()
        if now >= self._until:
            if self._silent:
                self._logger.warning("%d more warnings like these were not written", self._silent)
            self._until, self._lines, self._silent = now + SPOKEN_SECONDS, 0, 0
        self._lines += 1
        if self._lines > SPOKEN_LINES:
            self._silent += 1
        else:
            self._logger.warning(text, *args)
