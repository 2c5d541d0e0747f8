"""The extent pool of a retired mirror, which is the mirror of an earlier term of the controller (`journal.terms`).

The unit of the earlier term may only be frozen or cut off, and may continue at any moment with what it was doing: copy
blocks into space that it has leased, or free extents. So this pool changes nothing in the files of the arena, and no
space of it is used again. What the former unit still does concerns only extents that no journal names, and extents that
no row needs. The arena is removed as a whole when no block in it is needed any more.
"""

from __future__ import annotations

import time
from pathlib import Path

from transfer_queue.errors import AttachError, CapacityError
from transfer_queue.messages.descriptors import MIRROR
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import LeasedExtent
from transfer_queue.storage.unit.extent_pool import ArenaPool

ATTEMPTS = 5
PAUSE = 0.05  # seconds between two attempts to read the table of extents


class RetiredPool(ArenaPool):
    """The extent pool of an arena that is only read. What is freed is forgotten in this process."""

    @classmethod
    def open(cls, folder: Path) -> RetiredPool:
        """Open the arena in a folder. Raises AttachError, with the reason, if this is not possible."""
        attempt = 1
        while True:
            try:
                return cls(Arena.reopen(folder, MIRROR))
            except AttachError:  # the former unit may have changed the table of extents while it was read
                if attempt == ATTEMPTS:
                    raise
            attempt += 1
            time.sleep(PAUSE)

    def take_slot(self) -> int:
        """See `ExtentPool.take_slot`. Raises CapacityError, because there are no writers."""
        raise CapacityError("no capacity for writers in the mirror of an earlier controller, which is only read")

    def lease(self, slot: int, nbytes: int, sequence: int) -> LeasedExtent | None:
        """See `ExtentPool.lease`. There is no space."""
        return None

    def free(self, extent: LeasedExtent) -> bool:
        """See `ExtentPool.free`. The space stays as it is, so views of readers do not matter."""
        self._table.free(extent.number)
        return True

    def cut(self, extent: LeasedExtent, keep: int) -> None:
        """See `ExtentPool.cut`. Keeps the whole extent."""

    def next_deadline(self) -> float | None:
        """See `ExtentPool.next_deadline`."""
        return None

    def begin_period(self, now: float) -> bool:
        """See `ExtentPool.begin_period`."""
        return False

    def work_ahead(self, short: bool) -> bool:
        """See `ExtentPool.work_ahead`."""
        return False

    def check(self) -> None:
        """See `ExtentPool.check`."""
        self._table.check()

    def remove(self) -> None:
        """Remove the arena, and its folder and that of the mirror if they are empty then."""
        self.arena.remove()
        for folder in (self.folder, self.folder.parent):
            try:
                folder.rmdir()
            except OSError:  # on network storage, a file that a reader still has open
                return
