"""The locks of a system, all `flock`s that end with their process.

StartLock   <runtime dir>/.<name>.lock, held while a process starts the system or removes its files, so that of many
            simultaneous starts one starts the system and the others find it
Liveness    <folder>/alive, held by the supervisor and, through fork, by every process of the system; if it is free,
            none of these processes lives
ClientLiveness   a client's own file in <folder>/clients. A client may be busy for minutes without sending a message. A
            restarted controller checks the lock before it treats a client that has not reconnected as gone. The
            controller removes the files of killed clients.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import time
from collections.abc import Callable, Collection, Container, Mapping
from itertools import islice
from pathlib import Path

from transfer_queue.errors import StartError, with_advice

LIVENESS_SECONDS = 5.0  # for which a start waits for a liveness file that another process checks
PAUSE = 0.005  # seconds between two attempts to get a lock that another process holds


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Try to lock this open file without waiting. Returns whether it now holds the lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = PAUSE) -> bool:
    """Check a condition repeatedly until it is true. Returns False if that takes longer than some seconds."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(pause)
    return True


def names_open_file(path: Path, file: int) -> bool:
    """Whether the path still names this open file."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


class StartLock:
    """`with StartLock(path, seconds)`. The file exists only while a process holds the lock or waits for it.

    Raises StartError if the lock is not free within the time.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._seconds = seconds
        self._file = -1

    def __enter__(self) -> StartLock:
        if not wait_until(self._try, self._seconds):
            raise StartError(
                f"another process has held {self._path} for {self._seconds:g} s: it is starting or removing this "
                "system; wait for it, or end it"
            )
        return self

    def _try(self) -> bool:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            advice = (
                "it is the lock with which starts of one system wait for each other: if it is a link or a file of "
                "another program, remove it"
            )
            raise StartError(f"{self._path} cannot be opened: {with_advice(error, advice)}") from error
        try:
            if _try_lock(file) and names_open_file(self._path, file):  # else the last holder has removed this file
                self._file, file = file, -1
                return True
            return False
        finally:
            if file >= 0:
                os.close(file)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._file)


def hold_liveness(path: Path) -> int:
    """Show that the supervisor lives, by a lock. Returns its descriptor, which the children inherit.

    It tries for LIVENESS_SECONDS, because a process that checks the lock shares it for an instant.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not wait_until(lambda: _try_lock(file), LIVENESS_SECONDS):
        os.close(file)
        raise StartError(f"{path} is locked: another system is using this folder; stop it, or choose another name")
    return file


class Liveness:
    """Checks whether any process of a system lives. It keeps checking the same file after that was removed.

    Raises OSError if the file exists and cannot be opened, for example if this process has reached its limit of open
    files: then the answer is not known.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self._file = None

    def is_held(self) -> bool:
        """Whether a process of the system lives."""
        if self._file is None:
            return False
        if _try_lock(self._file, fcntl.LOCK_SH):  # shared, because several processes may check at the same time
            fcntl.flock(self._file, fcntl.LOCK_UN)
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until no process lives. Returns False if that takes longer."""
        return wait_until(lambda: not self.is_held(), seconds)

    def __enter__(self) -> Liveness:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def is_alive(path: Path) -> bool:
    """Whether a process holds this liveness file. Raises OSError, see `Liveness`."""
    with Liveness(path) as liveness:
        return liveness.is_held()


# ---------------------------------------------------------------- clients

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
    tokens: set[int] = set()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # it was removed meanwhile
            data = path.read_bytes()
            tokens.update(memoryview(data[: len(data) // _MARK * _MARK]).cast("Q"))
    return tokens


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
