from __future__ import annotations

from collections.abc import Container

from transfer_queue.storage.arena.writer_locks import KnownSlot, Offer
from transfer_queue.testing.simulated_locks import Board


class StandInSlots:
    """Slots whose writers live in this process: a set of paths instead of locks of the kernel."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.withdrawn: set[str] = set()
        self.files: dict[int, KnownSlot] = {}
        self.board = Board()

    def path(self, slot: int) -> str:
        return f"/slots/{slot}.lock"

    def make(self, slot: int, writer: str) -> str:
        assert slot not in self.files
        self.files[slot] = KnownSlot(writer, gone=False)
        return self.path(slot)

    def is_dead(self, slot: int) -> bool:
        return self.path(slot) not in self.held

    def withdraw(self, slot: int) -> bool:
        if not self.is_dead(slot):
            return False
        self.withdrawn.add(self.path(slot))
        self.files[slot] = KnownSlot(self.files[slot].writer, gone=True)
        return True

    def forget(self, slot: int) -> None:
        assert self.files.pop(slot).gone

    def known_slots(self) -> dict[int, KnownSlot]:
        return dict(self.files)

    def offers(self, slot: int) -> set[Offer]:
        return self.board.offers(self.path(slot))

    def recall(self, slot: int, among: Container[Offer] | None = None) -> list[Offer]:
        return self.board.recall(self.path(slot), among)
