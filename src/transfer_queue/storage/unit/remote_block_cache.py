"""Copies of blocks of other nodes' units, for all readers of this node: each is fetched once.

A reader asks the unit of its node before it reads elsewhere. While it is the only one here that reads, it is told to
do so itself, which costs one copy less. Where there are more, the unit fetches what is wanted into an extent of its
own, and all of them read that. Blocks never change, and where one lies (unit, offset, generation) names it for ever.
So a copy is right as long as its extent is, which readers see by its generation, as that of any value. Copies give way
to whoever wants their space, to newer ones, and where nobody has read them for a while.
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
from transfer_queue.storage.unit.unit_effects import Effect, Fetch, SendReply

ALIGNMENT = 64
SHARE = 4  # copies take one part in so many of the arena at most
IDLE_SECONDS = 30.0  # for which a copy is kept that nobody reads
READER_SECONDS = 60.0  # for which a reader counts after it has asked

Key = tuple[int, int, int]  # of a block: its unit, offset and generation there


@dataclass
class _FetchedGroup:
    """Copies that were fetched together. places: where each lies here; coming: until they have come."""

    extent: LeasedExtent
    places: dict[Key, int]
    read_at: float
    coming: bool = True
    doomed: bool = False  # to be freed as soon as nothing is written into it any more


@dataclass
class _WaitingReader:
    peer: int
    sequence: int
    keys: list[Key]
    groups: set[int] = field(default_factory=set)


class RemoteBlockCache:
    """The copies in one unit. lease: an extent of so many bytes of the unit's own; release: gives extents up."""

    def __init__(
        self, room: ExtentPool, lease: Callable[[int], LeasedExtent | None], release: Callable[[Sequence[int]], None]
    ) -> None:
        self._room = room
        self._lease = lease
        self._release = release
        self._groups: OrderedDict[int, _FetchedGroup] = OrderedDict()
        """Extent -> what lies in it; the last read ones last."""
        self._of: dict[Key, int] = {}
        """Block -> the extent of its copy."""
        self._waiting: list[_WaitingReader] = []
        self._readers: dict[str, float] = {}
        """Client -> when it asked last."""

    def asked(self, reader: str, peer: int, sequence: int, request: CacheBlocks, now: float) -> list[Effect]:
        """A reader of this node is about to read blocks elsewhere. It is answered once those are here that will be."""
        columns = (request.units, request.offsets, request.generations, request.nbytes)
        if len({len(column) for column in columns}) > 1 or len(request.units) % 8:
            raise ProtocolError("a request to keep blocks has columns of different lengths, or of no whole numbers")
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
        budget = self._room.capacity // SHARE
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
        views = [self._room.view(group.places[key], size) for key, size in missing.items()]
        wanted = [(*key, size) for key, size in missing.items()]
        return [Fetch(extent.number, wanted, remotes, views)]

    def came(self, extent: int, good: set[int], now: float) -> list[Effect]:
        """What was to be fetched into this extent is here, those blocks of it that were still there."""
        group = self._groups.get(extent)
        if group is not None:
            group.coming = False
            group.read_at = now
            for at, key in enumerate(list(group.places)):
                if at not in good or group.doomed:
                    del group.places[key], self._of[key]
            if not group.places:
                self._release([extent])
        return self._answered(extent)

    def _answered(self, extent: int) -> list[Effect]:
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
        return offset, self._room.generation(offset)

    def forget(self, extent: int) -> None:
        """An extent was freed, whatever lay in it."""
        group = self._groups.pop(extent, None)
        if group is not None:
            for key in group.places:
                del self._of[key]

    def is_filling(self, extent: int) -> bool:
        """Whether bytes are being received into an extent that is to be freed: it is freed when they have come."""
        group = self._groups.get(extent)
        if group is None or not group.coming:
            return False
        group.doomed = True
        return True

    def left(self, peer: int) -> None:
        """Nobody waits on this connection any more."""
        self._waiting = [waiting for waiting in self._waiting if waiting.peer != peer]

    @property
    def nbytes(self) -> int:
        """Of all extents of copies."""
        return sum(group.extent.length for group in self._groups.values())

    def give_way(self) -> bool:
        """Frees all copies that are not just coming; whether there were any."""
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

    def due(self) -> float | None:
        """When the next copy has been idle for long."""
        return min((group.read_at + IDLE_SECONDS for group in self._groups.values() if not group.coming), default=None)

    def turn(self, now: float) -> None:
        """Frees what has been idle for long."""
        idle = [
            number for number, group in self._groups.items()
            if not group.coming and group.read_at + IDLE_SECONDS <= now
        ]  # fmt: skip
        self._release(idle)
