"""Tells which clients of a system live: each client holds a lock on its own file, and the lock ends with its process.

A client may be busy for minutes without sending a message. A restarted controller checks the lock before it treats a
client that has not reconnected as gone. The controller removes the files of killed clients.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
from collections.abc import Collection, Container, Mapping
from itertools import islice
from pathlib import Path

from transfer_queue.node.system.locks import is_alive, names_open_file

LOOKS = 16  # files that a sweep checks


MARKS = 256
"""Batches of one client whose hand-over is noted. Every request of the client reports the ones before, so these are
more than calls that one process makes at once."""
_MARK = 8  # bytes


class ClientLiveness:
    """Shows that a client lives, until `end` or the end of its process. The file is in the system's folder for this.

    The file also contains the tokens of the batches that the client handed over last, so that the controller knows them
    if the process dies before a request reports them. To note one takes no system call.

    Raises OSError if the file cannot be created, locked or extended.
    """

    def __init__(self, folder: Path, client_id: str) -> None:
        self._path = folder / client_id
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)  # a process that checks the lock holds it for an instant only
            if names_open_file(self._path, self._file):
                break
            os.close(self._file)  # it was swept between open and lock
        os.posix_fallocate(self._file, 0, MARKS * _MARK)  # otherwise a full file system would end the process later
        self._marks = memoryview(mmap.mmap(self._file, MARKS * _MARK)).cast("Q")
        self._marked = itertools.count()

    def note_handed_over(self, token: int) -> None:
        """Note that this client has handed over the batch with this token."""
        self._marks[next(self._marked) % MARKS] = token

    def end(self) -> None:
        """Show that the client is gone."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the copy in a forked child, which would show the parent as alive after its death."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_client_alive(folder: Path, client_id: str) -> bool:
    """Whether the process of a client lives. Returns True if this cannot be determined."""
    if not client_id.isalnum():
        return False
    try:
        return is_alive(folder / client_id)
    except OSError:  # for example if this process has reached its limit of open files
        return True


def handed_over(folder: Path) -> set[int]:
    """Return the tokens that the clients in a folder have noted last."""
    found: set[int] = set()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # it was removed meanwhile
            data = path.read_bytes()
            found.update(memoryview(data[: len(data) // _MARK * _MARK]).cast("Q"))
    return found


class DepartedClients:
    """Removes the files of killed clients. Each `sweep` checks a few of them.

    The files that are in the folder at the beginning are checked, too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left: dict[str, None] = dict.fromkeys(path.name for path in folder.iterdir())

    def note_departed(self, client_id: str) -> None:
        """Note that a client has no connection any more. If it was killed, its lock is free within a moment."""
        self._left[client_id] = None

    def sweep(self, connections: Mapping[str, Collection[int]], awaited: Container[str] = ()) -> None:
        """Remove the files of clients that are gone, except those that have `connections` (again).

        Args:
            connections: The connections of each client.
            awaited: The clients whose notes are still needed. Default: none.
        """
        for client_id in list(islice(self._left, LOOKS)):
            del self._left[client_id]
            if connections.get(client_id):
                continue
            if client_id in awaited or is_client_alive(self._folder, client_id):
                self._left[client_id] = None  # checked again after all others
            elif client_id.isalnum():
                (self._folder / client_id).unlink(missing_ok=True)
