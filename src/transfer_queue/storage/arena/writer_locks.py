"""Determines which writers are alive by locks of the kernel: POSIX record locks on slot files.

A writer holds an exclusive lock on the file of its slot for as long as it may write. Only if the kernel grants the unit
that lock is the writer dead. However long a writer is silent or stopped, that proves nothing.

The rules of these locks, all of which this module relies on:
- The kernel drops a lock when its process ends, for whatever reason.
- A forked child does not inherit the lock, and if the child closes an inherited descriptor, the parent keeps its lock.
- A process drops its locks on a file when it closes *any* descriptor of that file. So a writer opens its slot file
  once, and no other code of its process may ever open it.
  For this reason a process that puts must not read the files of its system's folder. Locks of open file descriptions
  do not have this rule, but a child that C code forked would keep them after its writer has died (docs/decisions/0014).
- Locks never conflict within one process: a unit cannot check a writer in its own process, and the check would drop
  the writer's lock.

The lock of a slot is on the first byte of its file. The following bytes are locks on *places*. After the first page,
each place has an entry in which the writer offers an extent that it has leased: its number, and the part of it that may
contain blocks. A writer holds the lock on a place while one of its puts uses that extent. So if the kernel grants the
unit the lock on a place, the unit may take back the rest of the offered extent, behind the used part: the writer is not
in a put there, and reads the entry before it begins one. A writer that was stopped during a put holds the lock for as
long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from transfer_queue.errors import AttachError, ProtocolError, with_advice

PLACES = 32
"""Extents that a writer can offer at once."""

_ENTRIES = 4096
_ENTRY = struct.Struct("<QQQ")  # extent, used, recalled

Offer = tuple[int, int]  # extent, and the bytes from its start that may contain blocks


class HeldSlot(Protocol):
    """A lock on a slot file, like `SlotLock`. By default no extents are offered."""

    def release(self) -> None:
        """Release the lock."""
        return

    def begin(self, place: int) -> bool:
        """Take a place at which no extent is offered."""
        return False

    def take(self, place: int) -> bool:
        """Begin a put in the extent offered at a place. Returns False if it was recalled."""
        return True

    def leave(self, place: int, extent: int = 0, used: int = 0) -> None:
        """End the puts at a place: offer the extent, or (0) free the place."""
        return


class NoLock(HeldSlot):
    """The lock of a slot on another node, where no extents are offered."""


class SlotLock:
    """A held lock. There is no finalizer: it is held until `release` or the end of the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Release the lock, after which the unit treats this writer as dead.

        In a forked child this closes the child's descriptor, and the parent keeps the lock.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def begin(self, place: int) -> bool:
        """Lock a place at which nothing is offered. Returns False if that is not possible now."""
        if self._descriptor is None or not _try_lock(self._descriptor, 1 + place):
            return False
        _write_entry(self._descriptor, place, 0, 0)
        return True

    def take(self, place: int) -> bool:
        """Begin a put in the extent that is offered at this place. Returns False if the unit has recalled it."""
        if self._descriptor is None or not _try_lock(self._descriptor, 1 + place):
            return False
        extent, _, recalled = _entry(self._descriptor, place)
        if extent and not recalled:
            return True
        _unlock(self._descriptor, place)
        return False

    def leave(self, place: int, extent: int = 0, used: int = 0) -> None:
        """End a put at this place: offer the extent, or free the place if `extent` is 0."""
        if self._descriptor is not None and _write_entry(self._descriptor, place, extent, used):
            _unlock(self._descriptor, place)


def hold_slot(path: Path) -> SlotLock:
    """Lock a slot file for the life of this client, or until `SlotLock.release`.

    Raises ProtocolError if another process holds it, or if the unit has withdrawn the slot meanwhile; the writer should
    then request another slot. Raises AttachError if the file cannot be opened or locked at all.
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
            raise ProtocolError(f"the slot {path} was withdrawn before it was locked; request another one") from None
        except OSError as error:
            advice = "check that the file system of its folder supports locks"
            raise AttachError(f"the slot {path} cannot be locked: {with_advice(error, advice)}") from error
        on_failure.pop_all()
        return SlotLock(path, descriptor)


def is_dead(path: Path) -> bool:
    """Whether the kernel grants this process the lock on a slot file, so that no process holds it.

    For the unit's process only. If the file does not exist or cannot be locked, nothing is proven: False.
    """
    with _granted(path) as descriptor:
        return descriptor is not None


class KnownSlot(NamedTuple):
    """A slot of a unit that ended."""

    writer: str
    is_dead: bool
    """Its writer is certainly dead."""


class WriterSlots(Protocol):
    """The slots of a unit: `SlotFolder`, or in tests a substitute for writers in the unit's own process."""

    def make(self, slot: int, writer: str) -> str:
        """Create a slot for this writer. Returns the path that the writer must lock."""

    def path(self, slot: int) -> str:
        """Return the path that the writer of a slot must lock."""

    def is_dead(self, slot: int) -> bool:
        """Whether it is certain that no writer holds the slot."""

    def withdraw(self, slot: int) -> bool:
        """End a slot forever if no writer holds it now. Returns whether it did.

        The slot stays known, as gone, until `forget`.
        """

    def forget(self, slot: int) -> None:
        """Remove the rest of a slot that is gone."""

    def known_slots(self) -> dict[int, KnownSlot]:
        """Return the slots of the unit before this one, by number."""

    def offers(self, slot: int) -> set[Offer]:
        """Return what the writer of a slot offers, or offered before it was recalled."""

    def recall(self, slot: int, among: Container[Offer] | None = None) -> list[Offer]:
        """Take back the offers of a slot's writer in which it has no put (only those in `among`, unless it is None).

        The writer will not write there again. Offers that were taken back earlier, and of which the writer has not
        taken notice, are returned again.
        """


class SlotFolder:
    """The slot files of a unit, in a folder that is created with mode 0700 if it is missing.

    A file contains its writer's name and a newline, so that a restarted unit knows its writer. A file without a newline
    was never reported to a writer. `N.lock` is the file of a slot; `N.gone` replaces it when its writer is dead.
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
        """See `WriterSlots.withdraw`. The file is unlinked under its lock, which `hold_slot` checks."""
        with _granted(self._lock(slot)) as descriptor:
            if descriptor is None:
                return False
            try:
                _write_name(self._dead_path(slot), _name_in(descriptor) or "", os.O_TRUNC)
                self._lock(slot).unlink()
            except OSError:
                return False
            return True

    def forget(self, slot: int) -> None:
        """See `WriterSlots.forget`."""
        self._dead_path(slot).unlink(missing_ok=True)

    def known_slots(self) -> dict[int, KnownSlot]:
        """See `WriterSlots.known_slots`. Removes slots that were never reported to a writer."""
        slots: dict[int, KnownSlot] = {}
        for path in sorted(self.folder.iterdir()):  # N.gone before N.lock, which takes precedence if both exist
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
                slots[int(path.stem)] = KnownSlot(writer, path.suffix == ".gone")
        return slots

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
        """See `WriterSlots.recall`. An entry is marked before the space in it can be leased to another writer."""
        try:
            descriptor = os.open(self._lock(slot), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return []
        extents = []
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
                    _unlock(descriptor, place)
                if extent:
                    extents.append((extent, used))
        except OSError:  # nothing more can be recalled now
            pass
        finally:
            os.close(descriptor)
        return extents

    def _lock(self, slot: int) -> Path:
        return self.folder / f"{slot}.lock"

    def _dead_path(self, slot: int) -> Path:
        return self.folder / f"{slot}.gone"


def _write_name(path: Path, writer: str, mode: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | mode, 0o600)
    try:
        os.write(file, writer.encode() + b"\n")
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(file)


def _name_in(descriptor: int) -> str | None:
    """Return the writer in a slot's file; None if the name is incomplete."""
    name, end, _ = os.pread(descriptor, _ENTRIES, 0).partition(b"\n")
    return name.decode() if end else None


def _entry(descriptor: int, place: int) -> tuple[int, int, int]:
    """Return (extent, used, recalled) of a place; extent 0 if nothing is offered."""
    content = os.pread(descriptor, _ENTRY.size, _ENTRIES + place * _ENTRY.size)
    return _ENTRY.unpack(content) if len(content) == _ENTRY.size else (0, 0, 0)


def _write_entry(descriptor: int, place: int, extent: int, used: int) -> bool:
    """Write an entry. Returns False if the file system is full; then the place stays locked and offers nothing."""
    try:
        os.pwrite(descriptor, _ENTRY.pack(extent, used, 0), _ENTRIES + place * _ENTRY.size)
    except OSError:
        return False
    return True


def _entries(descriptor: int) -> dict[int, tuple[int, int, int]]:
    """Return all entries with an extent, by place."""
    content = os.pread(descriptor, PLACES * _ENTRY.size, _ENTRIES)
    whole = content[: len(content) // _ENTRY.size * _ENTRY.size]
    return {place: entry for place, entry in enumerate(_ENTRY.iter_unpack(whole)) if entry[0]}


@contextlib.contextmanager
def _granted(path: Path) -> Iterator[int | None]:
    """Yield the open file while this process has its lock; None if it does not exist or cannot be locked."""
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
    """Lock one byte: the first one for the slot, or another one for a place."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
    except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES for a lock that is held
        return False
    return True


def _unlock(descriptor: int, place: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, 1 + place)
