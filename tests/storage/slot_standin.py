from __future__ import annotations


class StandInSlots:
    """Slots whose writers live in this process: a set of paths instead of locks of the kernel."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.withdrawn: set[str] = set()

    def path(self, slot: int) -> str:
        return f"/slots/{slot}.lock"

    def make(self, slot: int) -> str:
        return self.path(slot)

    def is_dead(self, slot: int) -> bool:
        return self.path(slot) not in self.held

    def withdraw(self, slot: int) -> bool:
        if not self.is_dead(slot):
            return False
        self.withdrawn.add(self.path(slot))
        return True
