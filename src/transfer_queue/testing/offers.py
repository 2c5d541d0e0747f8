"""What writers offer their units (`storage.ownership`), where they live in one process."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from transfer_queue.storage.ownership import Offer


@dataclass
class _Entry:
    extent: int = 0
    used: int = 0
    recalled: bool = False
    locked: bool = True


class Board:
    """The entries of all slots, by the name of the slot and the place."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[int, _Entry]] = {}

    def begin(self, slot: str, place: int) -> bool:
        """See `SlotLock.begin`."""
        self._entries.setdefault(slot, {})[place] = _Entry()
        return True

    def take(self, slot: str, place: int) -> bool:
        """See `SlotLock.take`."""
        entry = self._entries[slot][place]
        entry.locked = bool(entry.extent) and not entry.recalled
        return entry.locked

    def leave(self, slot: str, place: int, extent: int = 0, used: int = 0) -> None:
        """See `SlotLock.leave`."""
        self._entries[slot][place] = _Entry(extent, used, locked=False)

    def release(self, slot: str) -> None:
        """The slot's writer ends, and with it its locks."""
        for entry in self._entries.get(slot, {}).values():
            entry.locked = False

    def offers(self, slot: str) -> set[Offer]:
        """See `Slots.offers`."""
        return {(entry.extent, entry.used) for entry in self._entries.get(slot, {}).values() if entry.extent}

    def recall(self, slot: str, among: Container[Offer] | None = None) -> list[Offer]:
        """See `Slots.recall`."""
        found = []
        for entry in self._entries.get(slot, {}).values():
            offer = entry.extent, entry.used
            if entry.extent and not entry.locked and (among is None or offer in among):
                entry.recalled = True
                found.append(offer)
        return found


class HeldSlots(set[str]):
    """The names of the slots whose writers live, and what these offer."""

    def __init__(self) -> None:
        super().__init__()
        self.board = Board()
