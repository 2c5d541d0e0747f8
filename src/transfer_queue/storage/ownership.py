"""Who is alive, by the word of the kernel: POSIX record locks on slot files.

A writer holds an exclusive lock on the file of its slot for as long as it may write. Only when the
unit is granted that lock is the writer dead; being silent or stopped for however long proves nothing.

The rules of these locks, all of them relied on here:
- The kernel drops a lock when its process ends, however that happens.
- A forked child does not inherit it, and the child's closing of an inherited descriptor leaves the
  parent's lock alone.
- A process drops its locks on a file when it closes *any* descriptor of that file. So a writer opens
  its slot file once, and nothing else in its process may ever open it.
- Locks never conflict within one process: a unit cannot judge a writer of its own process, and its
  asking would drop the writer's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from transfer_queue.errors import AttachError, ProtocolError


class SlotLock:
    """A held lock. There is no finalizer: it is held until `release` or the end of the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Gives the lock up, after which the unit takes this writer for dead.

        In a forked child this closes the child's descriptor, and the parent still holds the lock.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def hold_slot(path: Path) -> SlotLock:
    """Locks a slot file for the life of this client, or until `SlotLock.release`.

    ProtocolError if another process holds it, or if the unit has withdrawn the slot meanwhile; the
    writer should then ask for a slot anew. AttachError if the file cannot be opened or locked at all.
    """
    with contextlib.ExitStack() as on_failure:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            on_failure.callback(os.close, descriptor)
            if not _try_lock(descriptor):
                raise ProtocolError(f"the slot {path} is locked by another process; each writer needs its own")
            if os.fstat(descriptor).st_nlink == 0:
                raise FileNotFoundError
        except FileNotFoundError:
            raise ProtocolError(f"the slot {path} was withdrawn before it was locked; ask for another") from None
        except OSError as error:
            raise AttachError(f"the slot {path} cannot be locked: {error}; does its folder allow locks?") from error
        on_failure.pop_all()
        return SlotLock(path, descriptor)


def is_dead(path: Path) -> bool:
    """Whether the kernel grants this process the lock on a slot file, so that nobody holds it.

    For the unit's process only. A file that is not there or cannot be asked about proves nothing: False.
    """
    with _granted(path) as descriptor:
        return descriptor is not None


class Known(NamedTuple):
    """A slot of a unit that ended. gone: its writer is proven dead."""

    writer: str
    gone: bool


class Slots(Protocol):
    """Slots as the unit sees them; `SlotFolder` in life, a stand-in where writers share the unit's process."""

    def make(self, slot: int, writer: str) -> str:
        """A new slot for this writer; answers the path that it must lock."""

    def path(self, slot: int) -> str:
        """The path that the writer of a slot must lock."""

    def is_dead(self, slot: int) -> bool:
        """Whether it is certain that no writer holds the slot now."""

    def withdraw(self, slot: int) -> bool:
        """Ends a slot, so that nobody can hold it ever again, if no writer holds it now; whether that was so.

        It stays known, as gone, until `forget`.
        """

    def forget(self, slot: int) -> None:
        """Nothing is left of a slot that is gone."""

    def known(self) -> dict[int, Known]:
        """The slots that a unit before this one has left, by number."""


class SlotFolder:
    """The slot files of a unit, in a folder of mode 0700 that is made if missing.

    A file holds its writer's name and a newline, so that a unit that starts again knows whose it is; one without
    newline was never told to anybody. `N.lock` is the slot's, `N.gone` what is left of it when its writer is dead.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, slot: int) -> str:
        """See `Slots.path`."""
        return str(self._lock(slot))

    def make(self, slot: int, writer: str) -> str:
        """See `Slots.make`."""
        path = self._lock(slot)
        _write_name(path, writer, os.O_EXCL)
        return str(path)

    def is_dead(self, slot: int) -> bool:
        """See `Slots.is_dead`."""
        return is_dead(self._lock(slot))

    def withdraw(self, slot: int) -> bool:
        """See `Slots.withdraw`. The file is unlinked under its lock, which `hold_slot` looks for."""
        with _granted(self._lock(slot)) as descriptor:
            if descriptor is None:
                return False
            try:
                _write_name(self._gone(slot), _name_in(descriptor) or "", os.O_TRUNC)
                self._lock(slot).unlink()
            except OSError:
                return False
            return True

    def forget(self, slot: int) -> None:
        """See `Slots.forget`."""
        self._gone(slot).unlink(missing_ok=True)

    def known(self) -> dict[int, Known]:
        """See `Slots.known`. Removes slots of which nobody was told."""
        found: dict[int, Known] = {}
        for path in sorted(self.folder.iterdir()):  # N.gone before N.lock, which counts while it is there
            if path.suffix not in (".gone", ".lock") or not path.stem.isdecimal():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                writer = _name_in(descriptor)
            finally:
                os.close(descriptor)
            if writer is None:
                path.unlink()
            else:
                found[int(path.stem)] = Known(writer, path.suffix == ".gone")
        return found

    def _lock(self, slot: int) -> Path:
        return self.folder / f"{slot}.lock"

    def _gone(self, slot: int) -> Path:
        return self.folder / f"{slot}.gone"


def _write_name(path: Path, writer: str, mode: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | mode, 0o600)
    try:
        os.write(file, writer.encode() + b"\n")
    finally:
        os.close(file)


def _name_in(descriptor: int) -> str | None:
    """The writer that a slot's file names; None where it is not written whole."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return content[:-1].decode() if content.endswith(b"\n") else None


@contextlib.contextmanager
def _granted(path: Path) -> Iterator[int | None]:
    """The open file while its lock is ours; None if it is not there, held by another, or cannot be asked about."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        try:
            granted = _try_lock(descriptor)
        except OSError:
            granted = False
        yield descriptor if granted else None
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES for a lock that is held
        return False
    return True
