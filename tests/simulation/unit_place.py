"""An address of a storage unit in the simulated cluster, where units are killed and started again."""

from __future__ import annotations

from dataclasses import dataclass

from transfer_queue.net.session import Target
from transfer_queue.storage.arena.arena import Arena


@dataclass
class Place:
    """An address of a unit.

    number: The number of the unit; None if its arena was lost and the new one has no number yet.
    lives: How often a unit was started here.
    arena: Its arena; None for the unit of an external store.
    link: Its connection to the controller.
    sequence: The sequence number of its last message.
    arenas: How many arenas there were.
    """

    index: int
    arena: Arena | None
    number: int | None
    lives: int = 0
    link: int | None = None
    sequence: int = 0
    arenas: int = 1

    @property
    def name(self) -> str:
        """Return the name of the address."""
        return f"unit-{self.index}"

    @property
    def target(self) -> Target:
        """Return the unit as the target of a call."""
        return "unit", self.index
