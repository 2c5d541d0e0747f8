"""Which clients of a system live: each holds a lock on a file of its own, which ends with its process.

A client may be busy for minutes without a word. A controller that was started anew asks here before it takes one that
has not come back for gone. The file that a killed client leaves is removed by the controller.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Container
from itertools import islice
from pathlib import Path

from transfer_queue.node.system.locks import is_alive, leads_to

LOOKS = 16  # of a sweep


class ClientLiveness:
    """Says that a client lives, until `end` or the end of its process. folder: the system's, for this. OSError."""

    def __init__(self, folder: Path, client_id: str) -> None:
        self._path = folder / client_id
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)  # who looks holds it for an instant
            if leads_to(self._path, self._file):
                return
            os.close(self._file)  # it was swept before it was locked

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
    """Whether the process of a client lives, as far as can be seen: only one that surely does not is dead."""
    if not client_id.isalnum():
        return False
    try:
        return is_alive(folder / client_id)
    except OSError:  # as when this process has as many files open as it may
        return True


class DepartedClients:
    """Removes what clients leave that were killed; a few are looked at in each `sweep`.

    What lies in the folder at the beginning is looked at, too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left: dict[str, None] = dict.fromkeys(path.name for path in folder.iterdir())

    def left(self, client_id: str) -> None:
        """A client has no connection any more. If it was killed it lets go of its lock within a moment."""
        self._left[client_id] = None

    def sweep(self, connected: Container[str]) -> None:
        """Removes the files of those that have left and live no more. connected: clients that have come back."""
        for client_id in list(islice(self._left, LOOKS)):
            del self._left[client_id]
            if client_id in connected:
                continue
            if lives(self._folder, client_id):
                self._left[client_id] = None  # the last to be looked at again
            elif client_id.isalnum():
                (self._folder / client_id).unlink(missing_ok=True)
