"""The file of read holds in an arena's folder: which granules processes have views of, by locks of the kernel.

A view is memory of a process over the arena itself (`storage.arena.arena_views`). While a process has a view of a
granule, it has a shared POSIX record lock on the byte of the file `holds` whose position is the number of the granule.
The unit does not free an extent while the kernel reports such a lock on one of its granules. The rules of these locks
are those of `storage.arena.writer_locks`: the kernel drops the locks of a process when it ends, a forked child inherits
none, and a process loses its locks if any code in it opens and closes the file. So no other code may open it.

A free and a new hold may run at the same time. The reader locks first and compares the generation afterwards; the unit
increases the generation first and looks for locks afterwards. So either the reader notices that its block is gone, or
the unit notices the hold.

A process that has registered granules with a device, which then keeps their pages, has a lock on the byte
REGISTERED + number of the granule. The unit does not return such granules to the file system, because the device would
not see the pages that replace them.

The file also says, for people, who holds: each client of a process with views has an entry, and locks the byte
ENTRY_LOCKS + number of the entry. An entry without a lock means nothing. No decision depends on an entry.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Container
from pathlib import Path
from typing import Protocol

from transfer_queue.messages.storage import ReadHold
from transfer_queue.storage.arena.extent_table import GRANULE

HOLDS = "holds"
"""The name of the file."""
CAN_HOLD = sys.platform == "linux" and sys.maxsize > 1 << 32
"""Whether this module knows how to ask the kernel for locks. Elsewhere there are no views."""
ENTRY_LOCKS = 1 << 40
"""The position of the lock of the first entry, behind those of all granules."""
REGISTERED = 1 << 41
"""The position of the lock of the first registered granule."""
ENTRIES = 4096
"""The most entries of a file. Further clients hold without an entry."""

_ENTRY = struct.Struct("<64sqdqq")  # client, pid, since, bytes, views
_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid of struct flock on 64-bit Linux


class ReadHolds(Protocol):
    """The read holds of an arena, as its unit sees them: `HoldFile`, or a substitute in simulations."""

    def is_held(self, offset: int, length: int) -> bool:
        """Whether a process may have a view of any of these granules."""

    def is_registered(self, offset: int, length: int) -> bool:
        """Whether a process has registered any of these granules with a device."""

    def holders(self) -> list[ReadHold]:
        """Return the clients that have views, with the time and the size."""

    def close(self) -> None:
        """Close the file."""


class HoldFile(ReadHolds):
    """The file, as the unit sees it. The unit creates it if it is missing, and has no lock in it."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / HOLDS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def is_held(self, offset: int, length: int) -> bool:
        """See `ReadHolds.is_held`."""
        return _is_locked(self._file, offset // GRANULE, length // GRANULE)

    def is_registered(self, offset: int, length: int) -> bool:
        """See `ReadHolds.is_registered`."""
        return _is_locked(self._file, REGISTERED + offset // GRANULE, length // GRANULE)

    def holders(self) -> list[ReadHold]:
        """See `ReadHolds.holders`."""
        content = os.pread(self._file, ENTRIES * _ENTRY.size, 0)
        holders = []
        for number, entry in enumerate(_ENTRY.iter_unpack(content[: len(content) // _ENTRY.size * _ENTRY.size])):
            client, pid, since, nbytes, views = entry
            if views and _is_locked(self._file, ENTRY_LOCKS + number, 1):
                holders.append(ReadHold(client.rstrip(b"\0").decode(errors="replace"), pid, since, nbytes, views))
        return holders

    def close(self) -> None:
        """See `ReadHolds.close`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class HoldLocks:
    """The locks of this process in the file of one arena. The file is opened once in a process."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / HOLDS, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def lock(self, first: int, count: int) -> bool:
        """Lock these granules; it does not matter if they are locked already. Returns False if that is not possible."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, count, first)
        except OSError:
            return False
        return True

    def unlock(self, first: int, count: int) -> None:
        """Unlock these granules."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, count, first)

    def take_entry(self, own: Container[int | None]) -> int | None:
        """Lock an entry that neither another process has, nor this one (`own`). Returns None if there is none."""
        for number in range(ENTRIES):
            if number in own:
                continue
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, ENTRY_LOCKS + number)
            except (BlockingIOError, PermissionError):
                continue
            except OSError:
                return None
            return number
        return None

    def write_entry(self, number: int, hold: ReadHold) -> None:
        """Write an entry. It is left as it is if the file system is full."""
        name = hold.client.encode()[:64]
        try:
            os.pwrite(
                self._file, _ENTRY.pack(name, hold.pid, hold.since, hold.nbytes, hold.views), number * _ENTRY.size
            )
        except OSError:
            return

    def leave_entry(self, number: int) -> None:
        """Unlock an entry."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, ENTRY_LOCKS + number)

    def close(self) -> None:
        """Close the file, and so drop all locks."""
        os.close(self._file)


def _is_locked(file: int, first: int, count: int) -> bool:
    """Whether another process has a lock on any of these bytes."""
    if not CAN_HOLD:
        return False
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, query))[0]
    return kind != fcntl.F_UNLCK
