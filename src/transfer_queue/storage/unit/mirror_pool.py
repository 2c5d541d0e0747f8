"""The extent pool of a mirror: an arena on disk whose content survives the failure of the machine.

What a move has copied is reported only when the disk has it. The unit waits for the disk in another thread, so it
serves readers meanwhile. One order has the blocks of many puts (`core.units.mirror_writer`), so that many puts need one
`fsync`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.unit.disk_pool import DiskPool
from transfer_queue.storage.unit.unit_effects import Effect

Begin = Callable[[Callable[[], Any], Callable[[Any], list[Effect]]], None]
"""Runs the first function outside the unit's loop, then the second in it, with the result or the exception."""


class MirrorPool(DiskPool):
    """The extent pool of an arena on disk that survives the failure of the machine."""

    def __init__(self, arena: Arena, begin: Begin) -> None:
        super().__init__(arena)
        self._begin = begin

    def settle(self, then: Callable[[str], list[Effect]]) -> list[Effect]:
        """See `ExtentPool.settle`. Waits until the disk has what was copied."""

        def done(outcome: Any) -> list[Effect]:
            failed = isinstance(outcome, Exception)
            return then(f"the disk cannot write: {outcome}" if failed else "")

        self._begin(self.arena.sync, done)
        return []
