"""Copies of blocks of units on other nodes, for all readers of this node: each block is fetched once.

A reader asks the unit of its node before it reads from another node. If it is the only reader here, the unit tells it
to read there itself, which saves one copy. Otherwise the unit fetches the blocks into an extent of its own, and all
readers read that. Blocks never change, and the location of one (unit, offset, generation) identifies it forever. So a
copy is valid as long as its extent is, which readers check by its generation, as for any value. Copies are freed for
leases that need their space, for newer copies, and if they were not read for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from transfer_queue.errors import ProtocolError
from transfer_queue.messages.storage import CacheBlocks, CachedBlocksReply
from transfer_queue.storage.arena.extent_table import LeasedExtent
from transfer_queue.storage.unit.extent_pool import ExtentPool
from transfer_queue.storage.unit.unit_effects import Effect, Fetch, RemoteBlock, SendReply

ALIGNMENT = 64
SHARE = 4  # copies take at most one in this many parts of the arena
IDLE_SECONDS = 30.0  # for which a copy is kept that is not read
READER_SECONDS = 60.0  # for which a client counts as a reader after a request

Key = tuple[int, int, int]  # of a block: its unit, offset and generation there


@dataclass
class _FetchedGroup:
    """Copies that were fetched together."""

    extent: LeasedExtent
    places: dict[Key, int]
    """Block -> the offset of its copy."""
    read_at: float
    coming: bool = True
    """The fetch is in progress."""
    doomed: bool = False
    """The extent is freed at the end of the fetch."""


@dataclass
class _WaitingReader:
    peer: int
    sequence: int
    keys: list[Key]
    groups: set[int] = field(default_factory=set)


class RemoteBlockCache:
    """The copies in one unit. `lease` makes an extent of the unit's own of this many bytes; `release` frees extents."""

    def __init__(
        self, pool: ExtentPool, lease: Callable[[int], LeasedExtent | None], release: Callable[[Sequence[int]], None]
    ) -> None:
        self._pool = pool
        self._lease = lease
        self._release = release
        self._groups: OrderedDict[int, _FetchedGroup] = OrderedDict()
        """Extent -> its copies, least recently read first."""
        self._of: dict[Key, int] = {}
        """Block -> the extent of its copy."""
        self._waiting: list[_WaitingReader] = []
        self._readers: dict[str, float] = {}
        """Client -> when it asked last."""

    def handle_request(self, reader: str, peer: int, sequence: int, request: CacheBlocks, now: float) -> list[Effect]:
        """Handle the request of a reader of this node. It is answered when the blocks to be fetched are here."""
        columns = (request.units, request.offsets, request.generations, request.nbytes)
        if len({len(column) for column in columns}) > 1 or len(request.units) % 8:
            raise ProtocolError("a request for blocks has columns of different lengths, or not in whole numbers")
        units, offsets, generations, nbytes = (np.frombuffer(column, "<i8").tolist() for column in columns)
        keys = list(zip(units, offsets, generations, strict=True))
        self._readers[reader] = now
        self._readers = {who: at for who, at in self._readers.items() if now - at < READER_SECONDS}
        missing = {key: size for key, size in zip(keys, nbytes, strict=True) if key not in self._of and size > 0}
        effects: list[Effect] = []
        if missing and len(self._readers) > 1:
            effects += self._fetch(missing, request.remotes, now)
        waiting = _WaitingReader(peer, sequence, keys)
        for key in keys:
            group = self._groups.get(self._of.get(key, 0))
            if group is None:
                continue
            group.read_at = now
            self._groups.move_to_end(group.extent.number)
            if group.coming:
                waiting.groups.add(group.extent.number)
        if waiting.groups:
            self._waiting.append(waiting)
            return effects
        return [*effects, self._answer(waiting)]

    def _fetch(self, missing: dict[Key, int], remotes: dict[int, str], now: float) -> list[Effect]:
        places, end = {}, 0
        for key, size in missing.items():
            places[key] = end
            end += max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        budget = self._pool.capacity // SHARE
        if end > budget or any(key[0] not in remotes for key in missing):
            return []
        while self._groups and self.nbytes + end > budget:
            if not self._drop_oldest():
                return []
        extent = self._lease(end)
        if extent is None:
            return []
        group = _FetchedGroup(extent, {key: extent.offset + at for key, at in places.items()}, now)
        self._groups[extent.number] = group
        self._of.update(dict.fromkeys(places, extent.number))
        views = [self._pool.view(group.places[key], size) for key, size in missing.items()]
        wanted = [RemoteBlock(*key, size) for key, size in missing.items()]
        return [Fetch(extent.number, wanted, remotes, views)]

    def end_fetch(self, extent: int, good: set[int], now: float) -> list[Effect]:
        """End the fetch into this extent. `good` has the numbers of the blocks that were still there."""
        group = self._groups.get(extent)
        if group is not None:
            group.coming = False
            group.read_at = now
            for at, key in enumerate(list(group.places)):
                if at not in good or group.doomed:
                    del group.places[key], self._of[key]
            if not group.places:
                self._release([extent])
        effects: list[Effect] = []
        for waiting in list(self._waiting):
            waiting.groups.discard(extent)
            if not waiting.groups:
                self._waiting.remove(waiting)
                effects.append(self._answer(waiting))
        return effects

    def _answer(self, waiting: _WaitingReader) -> SendReply:
        places = [self._place(key) for key in waiting.keys]
        offsets = np.array([offset for offset, _ in places], "<i8").tobytes()
        generations = np.array([generation for _, generation in places], "<i8").tobytes()
        return SendReply(waiting.peer, waiting.sequence, CachedBlocksReply(offsets, generations))

    def _place(self, key: Key) -> tuple[int, int]:
        group = self._groups.get(self._of.get(key, 0))
        if group is None or group.coming:
            return -1, 0
        offset = group.places[key]
        return offset, self._pool.generation(offset)

    def forget(self, extent: int) -> None:
        """Note that an extent was freed, whatever it contained."""
        group = self._groups.pop(extent, None)
        if group is not None:
            for key in group.places:
                del self._of[key]

    def is_filling(self, extent: int) -> bool:
        """Whether a fetch writes into an extent that is to be freed. It is then freed at the end of the fetch."""
        group = self._groups.get(extent)
        if group is None or not group.coming:
            return False
        group.doomed = True
        return True

    def drop_requests(self, peer: int) -> None:
        """Drop the requests of a closed connection."""
        self._waiting = [waiting for waiting in self._waiting if waiting.peer != peer]

    @property
    def nbytes(self) -> int:
        """Bytes of all extents of copies."""
        return sum(group.extent.length for group in self._groups.values())

    def free_copies(self) -> bool:
        """Free all copies except those of fetches in progress. Returns whether there were any."""
        freed = False
        while self._drop_oldest():
            freed = True
        return freed

    def _drop_oldest(self) -> bool:
        oldest = next((group for group in self._groups.values() if not group.coming), None)
        if oldest is None:
            return False
        self._release([oldest.extent.number])
        return True

    def next_deadline(self) -> float | None:
        """Return when the next copy has been idle for IDLE_SECONDS; None if there is none."""
        return min((group.read_at + IDLE_SECONDS for group in self._groups.values() if not group.coming), default=None)

    def free_idle(self, now: float) -> None:
        """Free the copies that have been idle for IDLE_SECONDS."""
        idle = [
            number for number, group in self._groups.items()
            if not group.coming and group.read_at + IDLE_SECONDS <= now
        ]  # fmt: skip
        self._release(idle)
