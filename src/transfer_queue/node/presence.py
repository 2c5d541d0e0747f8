"""Which clients of a system live: each holds a lock on a file of its own, which ends with its process.

A client may be busy for minutes without a word. A controller that was started anew asks here before it takes one that
has not come back for gone. What killed clients leave goes with the system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from transfer_queue.node.locks import is_alive


class Presence:
    """Says that a client lives, until `end` or the end of its process. folder: the system's, for this. OSError."""

    def __init__(self, folder: Path, client_id: str) -> None:
        self._path = folder / client_id
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # who looks holds it for an instant

    def end(self) -> None:
        """The client is gone."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.forked()

    def forked(self) -> None:
        """In a forked child: lets go of the copy, which would speak for the parent after its death."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def lives(folder: Path, client_id: str) -> bool:
    """Whether the process of a client is known to live."""
    return client_id.isalnum() and is_alive(folder / client_id)
