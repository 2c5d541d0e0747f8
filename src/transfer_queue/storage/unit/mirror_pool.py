"""The extent pool of a mirror: an arena on disk whose content survives the failure of the machine.

What a move has copied is reported only when the disk has it. The unit waits for the disk in another thread, so it
serves readers meanwhile. One order has the blocks of many puts (`core.units.mirror_writer`), so that many puts need one
`fsync`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.unit.disk_pool import DiskPool
from transfer_queue.storage.unit.unit_effects import Begin, Effect

MOST_SPARED = 256 << 20
LEAST_SPARED = 12 << 20  # while the journal begins a new file, it has reserved space in two


class MirrorPool(DiskPool):
    """The extent pool of an arena on disk that survives the failure of the machine.

    It leaves a tenth of its file system free, from LEAST_SPARED to MOST_SPARED bytes. If the disk is full, the journal
    there can still be written, so that samples can be cleared and the mirror gets space again.
    """

    def __init__(self, arena: Arena, begin: Begin) -> None:
        super().__init__(arena)
        disk = os.statvfs(arena.folder)
        arena.spared = min(MOST_SPARED, max(LEAST_SPARED, disk.f_blocks * disk.f_frsize // 10))
        self._begin = begin

    def settle(self, then: Callable[[str], list[Effect]]) -> list[Effect]:
        """See `ExtentPool.settle`. Waits until the disk has what was copied."""

        def done(outcome: Any) -> list[Effect]:
            failed = isinstance(outcome, Exception)
            return then(f"the disk cannot write: {outcome}" if failed else "")

        self._begin(self.arena.sync, done)
        return []
