"""The actor of a RayStore with direct transport: it stores blocks in its own registered memory.

A writer offers its memory, and the actor reads it at once, so that blocks outlive their writers. The actor offers its
memory to a reader. The reader reads it without the actor, and then asks whether the blocks that it read were still
there. So a reader that is killed leaves no state behind. Processes without the transport call `keep` and `pieces`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transfer_queue.errors import StartError
from transfer_queue.ray_runtime.block_store_actor import BlockStore
from transfer_queue.storage.arena.extent_table import GRANULE, ExtentTable, round_up
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.ray_direct import HOW, LEAST, NO_SPACE, NixlTransport, Offer, load, transport
from transfer_queue.wire.buffers.copies import allocate

Wanted = Sequence[tuple[str, int, int]]  # (key, start, length) of each piece


@dataclass(frozen=True)
class RegisteredBlock:
    """A stored block."""

    memory: Bytes
    stamp: int
    """Identifies this content of the key."""
    attempt: int
    """The number of the writer's attempt."""
    extent: int | None = None
    """The number of its extent in the arena; None if it is not in the arena."""
    offset: int = 0
    """The offset of its extent."""


def arena_bytes(capacity: int) -> int:
    """Return the arena's size for blocks of `capacity` bytes: an eighth more, because free space is fragmented."""
    return round_up(capacity + capacity // 8)


class DirectKeeperActor(BlockStore):
    """A `BlockStore` whose blocks are in memory that other processes read directly."""

    def __init__(self, listens: str, capacity: int, least: int = LEAST) -> None:
        """Make a store for `capacity` bytes, of which blocks of at least `least` bytes are read directly."""
        super().__init__(listens)
        self._least = least
        self._stamps = itertools.count(1)
        self._table = ExtentTable()
        self._table.grow(arena_bytes(capacity) // GRANULE)
        self._making = threading.Lock()
        self._transport: NixlTransport | None = None
        self._failure = ""
        try:
            load()
            self._arena = allocate(self._table.held)
        except MemoryError as error:
            self._failure = f"{error}; lower backend.RayStore.capacity"
        except ImportError as error:
            self._failure = f"nixl cannot be used ({error}): {HOW}"

    def check(self) -> None:
        """Raise StartError if the transport or the memory is not available."""
        if self._failure:
            raise StartError(f"backend.RayStore.direct_transport: {self._failure}")

    def _nixl(self) -> NixlTransport:
        """Return the transport. It is created at its first use, because it takes a core from then on."""
        with self._making:
            if self._transport is None:
                made = transport()
                made.register(self._arena)
                self._transport = made
            return self._transport

    def keep(self, key: str, data: Bytes, attempt: int) -> bool:
        """Store a copy of a block. Returns False if there is no space."""
        if data.nbytes < self._least:
            self._hold(key, RegisteredBlock(np.array(data), next(self._stamps), attempt))
            return True
        block = self._lease(data.nbytes, attempt)
        if block is None:
            return False
        block.memory[:] = data
        self._hold(key, block)
        return True

    def fetch(self, key: str, nbytes: int, offer: Offer, attempt: int, within: float) -> str:
        """Store the block that a writer offers. Returns "", NO_SPACE, or why it could not be read within this time."""
        block = self._lease(nbytes, attempt)
        if block is None:
            return NO_SPACE
        try:
            self._nixl().fetch(offer, self._arena, [(block.offset, nbytes)], within)
        except TimeoutError as error:  # late bytes may still arrive, so this space is not used again
            return f"the actor received nothing from the writer: {error}"
        except Exception as error:  # an error of Ray or of the library
            self._free_blocks([block])
            return f"the actor cannot read the writer's memory: {error}"
        self._hold(key, block)
        return ""

    def _lease(self, nbytes: int, attempt: int) -> RegisteredBlock | None:
        with self._lock:
            extent = self._table.lease(1, nbytes)
        if extent is None:
            return None
        memory = self._arena[extent.offset : extent.offset + nbytes]
        return RegisteredBlock(memory, next(self._stamps), attempt, extent.number, extent.offset)

    def _hold(self, key: str, block: RegisteredBlock) -> None:
        """Store a block, unless a later attempt of its writer ended earlier."""
        with self._lock:
            there = self._held.get(key)
            stale = there is not None and there.attempt > block.attempt
            if not stale:
                self._held[key] = block
        self._free_blocks([block if stale else there])

    def _free_blocks(self, gone: list[Any]) -> None:
        with self._lock:
            for block in gone:
                if block is not None and block.extent is not None:
                    self._table.free(block.extent)

    def _find(self, wanted: Wanted) -> tuple[dict[str, RegisteredBlock], list[str]]:
        with self._lock:
            found = {key: self._held.get(key) for key in dict.fromkeys(key for key, _, _ in wanted)}
        return (
            {key: block for key, block in found.items() if block is not None},
            [key for key, block in found.items() if block is None],
        )

    def pieces(self, wanted: Wanted) -> tuple[Bytes, list[str]]:
        """Return the bytes of all pieces whose keys exist, one after the other; and the keys that do not exist."""
        while True:
            blocks, missing = self._find(wanted)
            parts = [blocks[key].memory[start : start + length] for key, start, length in wanted if key in blocks]
            found: Bytes = np.concatenate(parts) if parts else np.empty(0, np.uint8)
            if not self.changed([(key, block.stamp) for key, block in blocks.items()]):
                return found, missing

    def offer(self, wanted: Wanted) -> tuple[Offer | None, list[tuple[str, int]], list[str]]:
        """Offer pieces. Returns the offer, the argument of `changed` for after the read, and the missing keys.

        The offer is None if no key exists, or if a block is too small to be in the arena.
        """
        blocks, missing = self._find(wanted)
        if not blocks or any(block.extent is None for block in blocks.values()):
            return None, [], missing if not blocks else []
        places = [(blocks[key].offset + start, length) for key, start, length in wanted if key in blocks]
        with self._nixl().offering(self._arena, places) as offer:
            return offer, [(key, block.stamp) for key, block in blocks.items()], missing

    def changed(self, stamps: Sequence[tuple[str, int]]) -> list[str]:
        """Return the keys of these whose block was replaced or removed."""
        with self._lock:
            blocks = [(key, stamp, self._held.get(key)) for key, stamp in stamps]
        return [key for key, stamp, block in blocks if block is None or block.stamp != stamp]
