"""Handles the open-file limit.

Every connection needs a descriptor at both of its ends. A process that has none left reports what to do about it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from transfer_queue.errors import StartError, advice_on_open_files, with_advice


@contextlib.contextmanager
def refuse_without_files() -> Iterator[None]:
    """Raise StartError, with the limit, if the operating system refuses to open a file because too many are open."""
    try:
        yield
    except OSError as error:
        if advice_on_open_files(error) is None:
            raise
        raise StartError(f"a system cannot be started or attached to: {with_advice(error, '')}") from error


class ReservedDescriptor:
    """A descriptor in reserve, with which a server without other descriptors accepts a connection to refuse it."""

    def __init__(self) -> None:
        self._file = _open()

    def refuse_connection(self, listener: socket.socket, words: bytes) -> bool:
        """Accept one connection, send it these bytes and close it. Returns whether this was possible."""
        if self._file is None:
            self._file = _open()
            return False
        os.close(self._file)
        self._file = None
        try:
            accepted, _ = listener.accept()
        except BlockingIOError:  # the connection is gone meanwhile
            return True
        except OSError:
            return False
        else:
            with accepted, contextlib.suppress(OSError):
                accepted.setblocking(False)
                accepted.send(words)
                accepted.shutdown(socket.SHUT_WR)
                accepted.recv(4096)  # over TCP, closing with unread input could discard the sent bytes
            return True
        finally:
            self._file = _open()

    def close(self) -> None:
        """Close the descriptor."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
