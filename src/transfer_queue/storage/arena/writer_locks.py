"""Who is alive, by the word of the kernel: POSIX record locks on slot files.

A writer holds an exclusive lock on the file of its slot for as long as it may write. Only when the
unit is granted that lock is the writer dead; being silent or stopped for however long proves nothing.

The rules of these locks, all of them relied on here:
- The kernel drops a lock when its process ends, however that happens.
- A forked child does not inherit it, and the child's closing of an inherited descriptor leaves the
  parent's lock alone.
- A process drops its locks on a file when it closes *any* descriptor of that file. So a writer opens
  its slot file once, and nothing else in its process may ever open it.
  That is why a process that puts must not read the files of its system's folder. Locks of open file descriptions
  do not have this rule, but a child that C code forked would keep them after its writer has died (docs/decisions/0014).
- Locks never conflict within one process: a unit cannot judge a writer of its own process, and its
  asking would drop the writer's lock.

The lock of a slot is on the first byte of its file. The bytes after it are locks on *places*, and after the first
page each place has an entry in which the writer offers an extent that it has leased: its number, and how much of it may
hold blocks. A writer holds the lock on a place while one of its puts is under way in that extent. So the unit may take
back what is offered, the rest of the extent behind what is used, when the kernel grants it the lock on the place: the
writer is then certainly in no put there, and looks at the entry before it begins one. A writer that was stopped in the
middle of a put holds the lock for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from transfer_queue.errors import AttachError, ProtocolError

PLACES = 32
"""Extents that a writer can offer at once."""

_ENTRIES = 4096
_ENTRY = struct.Struct("<QQQ")  # extent, used, recalled

Offer = tuple[int, int]  # extent, and the bytes from its start in which blocks may lie


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

    def begin(self, place: int) -> bool:
        """Takes a place at which nothing is offered; False where that cannot be done now."""
        if self._descriptor is None or not _try_lock(self._descriptor, 1 + place):
            return False
        self._write(place, 0, 0)
        return True

    def take(self, place: int) -> bool:
        """The writer begins a put in the extent that it offers there; False where the unit has recalled it."""
        if self._descriptor is None or not _try_lock(self._descriptor, 1 + place):
            return False
        extent, _, recalled = _entry(self._descriptor, place)
        if extent and not recalled:
            return True
        self._unlock(place)
        return False

    def leave(self, place: int, extent: int = 0, used: int = 0) -> None:
        """No put is under way there any more: the extent is offered, or (0) the place is free."""
        if self._descriptor is not None and self._write(place, extent, used):
            self._unlock(place)

    def _write(self, place: int, extent: int, used: int) -> bool:
        """False where the file system has no room for it: the place then stays locked, and nothing is offered."""
        assert self._descriptor is not None
        try:
            os.pwrite(self._descriptor, _ENTRY.pack(extent, used, 0), _ENTRIES + place * _ENTRY.size)
        except OSError:
            return False
        return True

    def _unlock(self, place: int) -> None:
        assert self._descriptor is not None
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 1 + place)


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


class KnownSlot(NamedTuple):
    """A slot of a unit that ended. gone: its writer is proven dead."""

    writer: str
    gone: bool


class WriterSlots(Protocol):
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

    def known(self) -> dict[int, KnownSlot]:
        """The slots that a unit before this one has left, by number."""

    def offers(self, slot: int) -> set[Offer]:
        """What the writer of a slot offers, or has offered before it was recalled."""

    def recall(self, slot: int, among: Container[Offer] | None = None) -> list[Offer]:
        """Takes back what a slot's writer offers (of these) and is in no put in: it will not write there again.

        What was taken before, and the writer has not noticed, is answered again.
        """


class SlotFolder:
    """The slot files of a unit, in a folder of mode 0700 that is made if missing.

    A file holds its writer's name and a newline, so that a unit that starts again knows whose it is; one without
    newline was never told to anybody. `N.lock` is the slot's, `N.gone` what is left of it when its writer is dead.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, slot: int) -> str:
        """See `WriterSlots.path`."""
        return str(self._lock(slot))

    def make(self, slot: int, writer: str) -> str:
        """See `WriterSlots.make`."""
        path = self._lock(slot)
        _write_name(path, writer, os.O_EXCL)
        return str(path)

    def is_dead(self, slot: int) -> bool:
        """See `WriterSlots.is_dead`."""
        return is_dead(self._lock(slot))

    def withdraw(self, slot: int) -> bool:
        """See `WriterSlots.withdraw`. The file is unlinked under its lock, which `hold_slot` looks for."""
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
        """See `WriterSlots.forget`."""
        self._gone(slot).unlink(missing_ok=True)

    def known(self) -> dict[int, KnownSlot]:
        """See `WriterSlots.known`. Removes slots of which nobody was told."""
        found: dict[int, KnownSlot] = {}
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
                found[int(path.stem)] = KnownSlot(writer, path.suffix == ".gone")
        return found

    def offers(self, slot: int) -> set[Offer]:
        """See `WriterSlots.offers`."""
        try:
            descriptor = os.open(self._lock(slot), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return set()
        try:
            return {(extent, used) for extent, used, _ in _entries(descriptor).values()}
        finally:
            os.close(descriptor)

    def recall(self, slot: int, among: Container[Offer] | None = None) -> list[Offer]:
        """See `WriterSlots.recall`. An entry is marked before anybody else may write where it says."""
        try:
            descriptor = os.open(self._lock(slot), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return []
        found = []
        try:
            for place, (extent, used, recalled) in _entries(descriptor).items():
                if among is not None and (extent, used) not in among:
                    continue
                if not recalled:
                    if not _try_lock(descriptor, 1 + place):
                        continue
                    extent, used, recalled = _entry(descriptor, place)
                    if extent and not recalled:
                        os.pwrite(descriptor, _ENTRY.pack(extent, used, 1), _ENTRIES + place * _ENTRY.size)
                    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, 1 + place)
                if extent:
                    found.append((extent, used))
        except OSError:  # nothing more can be asked now
            pass
        finally:
            os.close(descriptor)
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
    name, end, _ = os.pread(descriptor, _ENTRIES, 0).partition(b"\n")
    return name.decode() if end else None


def _entry(descriptor: int, place: int) -> tuple[int, int, int]:
    """Extent, used, recalled; extent 0 where nothing is offered."""
    content = os.pread(descriptor, _ENTRY.size, _ENTRIES + place * _ENTRY.size)
    return _ENTRY.unpack(content) if len(content) == _ENTRY.size else (0, 0, 0)


def _entries(descriptor: int) -> dict[int, tuple[int, int, int]]:
    """All entries that name an extent, by place."""
    content = os.pread(descriptor, PLACES * _ENTRY.size, _ENTRIES)
    whole = content[: len(content) // _ENTRY.size * _ENTRY.size]
    return {place: entry for place, entry in enumerate(_ENTRY.iter_unpack(whole)) if entry[0]}


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


def _try_lock(descriptor: int, at: int = 0) -> bool:
    """Locks one byte: the first is the slot's, the others are those of its places."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
    except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES for a lock that is held
        return False
    return True
