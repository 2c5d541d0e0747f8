"""Simulated locks of writer slots, which replace those of the kernel (`storage.arena.writer_locks`) in one process."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from transfer_queue.messages.storage import ReadHold
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.arena_views import holders_here
from transfer_queue.storage.arena.read_holds import ReadHolds
from transfer_queue.storage.arena.writer_locks import KnownSlot, Offer


@dataclass
class _SimulatedSlotEntry:
    extent: int = 0
    used: int = 0
    recalled: bool = False
    locked: bool = True


class Board:
    """The entries of all slots, by the name of the slot and the position of the entry."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[int, _SimulatedSlotEntry]] = {}

    def begin(self, slot: str, place: int) -> bool:
        """See `SlotLock.begin`."""
        self._entries.setdefault(slot, {})[place] = _SimulatedSlotEntry()
        return True

    def take(self, slot: str, place: int) -> bool:
        """See `SlotLock.take`."""
        entry = self._entries[slot][place]
        entry.locked = bool(entry.extent) and not entry.recalled
        return entry.locked

    def leave(self, slot: str, place: int, extent: int = 0, used: int = 0) -> None:
        """See `SlotLock.leave`."""
        self._entries[slot][place] = _SimulatedSlotEntry(extent, used, locked=False)

    def release(self, slot: str) -> None:
        """Release all locks of a slot, because its writer ends."""
        for entry in self._entries.get(slot, {}).values():
            entry.locked = False

    def offers(self, slot: str) -> set[Offer]:
        """See `SimulatedSlots.offers`."""
        return {(entry.extent, entry.used) for entry in self._entries.get(slot, {}).values() if entry.extent}

    def recall(self, slot: str, among: Container[Offer] | None = None) -> list[Offer]:
        """See `SimulatedSlots.recall`."""
        offers = []
        for entry in self._entries.get(slot, {}).values():
            offer = entry.extent, entry.used
            if entry.extent and not entry.locked and (among is None or offer in among):
                entry.recalled = True
                offers.append(offer)
        return offers


class HoldsHere(ReadHolds):
    """The views that clients of this process have of an arena: the kernel does not show a process its own locks.

    Args:
        arena: The arena of a unit in this process.
    """

    def __init__(self, arena: Arena) -> None:
        self._boot_id, self._capacity = arena.boot_id, arena.capacity

    def is_held(self, offset: int, length: int) -> bool:
        """See `ReadHolds.is_held`."""
        return bool(holders_here(self._boot_id, offset, length))

    def is_registered(self, offset: int, length: int) -> bool:
        """See `ReadHolds.is_registered`. Simulated clients have no devices."""
        return False

    def holders(self) -> list[ReadHold]:
        """See `ReadHolds.holders`."""
        return holders_here(self._boot_id, 0, self._capacity)

    def close(self) -> None:
        """See `ReadHolds.close`."""


class HeldSlots(set[str]):
    """The names of the slots whose writers live, and the extents that they offer."""

    def __init__(self) -> None:
        super().__init__()
        self.board = Board()


class SimulatedSlotLock:
    """A slot file that a client has locked. held: The names of all locked slots."""

    def __init__(self, held: HeldSlots, path: Path) -> None:
        self._held, self._path = held, path
        held.add(path.name)

    def release(self) -> None:
        """See `writer_locks.SlotLock`."""
        self._held.discard(self._path.name)
        self._held.board.release(self._path.name)

    def begin(self, place: int) -> bool:
        """See `writer_locks.SlotLock`."""
        return self._held.board.begin(self._path.name, place)

    def take(self, place: int) -> bool:
        """See `writer_locks.SlotLock`."""
        return self._held.board.take(self._path.name, place)

    def leave(self, place: int, extent: int = 0, used: int = 0) -> None:
        """See `writer_locks.SlotLock`."""
        self._held.board.leave(self._path.name, place, extent, used)


class SimulatedSlots:
    """Slot locks of one unit without a kernel. held: The names of the slots of all units whose writers live."""

    def __init__(self, unit: int, held: HeldSlots) -> None:
        self.unit = unit
        self.held = held
        self._known: dict[int, KnownSlot] = {}

    def make(self, slot: int, writer: str) -> str:
        """See `writer_locks.WriterSlots`."""
        self._known[slot] = KnownSlot(writer, is_dead=False)
        return self.path(slot)

    def path(self, slot: int) -> str:
        """See `writer_locks.WriterSlots`."""
        return f"{self.unit}-{slot}"

    def is_dead(self, slot: int) -> bool:
        """See `writer_locks.WriterSlots`."""
        return self.path(slot) not in self.held

    def withdraw(self, slot: int) -> bool:
        """See `writer_locks.WriterSlots`."""
        if not self.is_dead(slot):
            return False
        self._known[slot] = KnownSlot(self._known[slot].writer, is_dead=True)
        return True

    def forget(self, slot: int) -> None:
        """See `writer_locks.WriterSlots`."""
        del self._known[slot]

    def known_slots(self) -> dict[int, KnownSlot]:
        """See `writer_locks.WriterSlots`."""
        return dict(self._known)

    def offers(self, slot: int) -> set[Offer]:
        """See `writer_locks.WriterSlots`."""
        return self.held.board.offers(self.path(slot))

    def recall(self, slot: int, among: Container[Offer] | None = None) -> list[Offer]:
        """See `writer_locks.WriterSlots`."""
        return self.held.board.recall(self.path(slot), among)
