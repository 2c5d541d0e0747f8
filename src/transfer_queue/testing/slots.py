"""What the kernel's locks on slot files are elsewhere."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from transfer_queue.storage.ownership import Known, Offer
from transfer_queue.testing.offers import HeldSlots


class Held:
    """A slot file that a client has locked. held: the names of all that are."""

    def __init__(self, held: HeldSlots, path: Path) -> None:
        self._held, self._path = held, path
        held.add(path.name)

    def release(self) -> None:
        """See `ownership.SlotLock`."""
        self._held.discard(self._path.name)
        self._held.board.release(self._path.name)

    def begin(self, place: int) -> bool:
        """See `ownership.SlotLock`."""
        return self._held.board.begin(self._path.name, place)

    def take(self, place: int) -> bool:
        """See `ownership.SlotLock`."""
        return self._held.board.take(self._path.name, place)

    def leave(self, place: int, extent: int = 0, used: int = 0) -> None:
        """See `ownership.SlotLock`."""
        self._held.board.leave(self._path.name, place, extent, used)


class Slots:
    """Slot locks of one unit without a kernel. held: names of the slots whose writers live, of all units."""

    def __init__(self, unit: int, held: HeldSlots) -> None:
        self.unit = unit
        self.held = held
        self._known: dict[int, Known] = {}

    def make(self, slot: int, writer: str) -> str:
        """See `ownership.Slots`."""
        self._known[slot] = Known(writer, gone=False)
        return self.path(slot)

    def path(self, slot: int) -> str:
        """See `ownership.Slots`."""
        return f"{self.unit}-{slot}"

    def is_dead(self, slot: int) -> bool:
        """See `ownership.Slots`."""
        return self.path(slot) not in self.held

    def withdraw(self, slot: int) -> bool:
        """See `ownership.Slots`."""
        if not self.is_dead(slot):
            return False
        self._known[slot] = Known(self._known[slot].writer, gone=True)
        return True

    def forget(self, slot: int) -> None:
        """See `ownership.Slots`."""
        del self._known[slot]

    def known(self) -> dict[int, Known]:
        """See `ownership.Slots`."""
        return dict(self._known)

    def offers(self, slot: int) -> set[Offer]:
        """See `ownership.Slots`."""
        return self.held.board.offers(self.path(slot))

    def recall(self, slot: int, among: Container[Offer] | None = None) -> list[Offer]:
        """See `ownership.Slots`."""
        return self.held.board.recall(self.path(slot), among)
