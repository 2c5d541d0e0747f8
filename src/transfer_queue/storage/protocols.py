"""What a storage backend offers to a client: six methods in two roles, and the space they speak of.

Writing: `Allocator.reserve` finds space, the caller copies its block into `ArenaMemory.view` of it, publishes
it to the controller, and says how that ended with `published` or `abandon`. Reading: the caller copies
out of `ArenaMemory.view` and then compares `ArenaMemory.generation` with the one its descriptor names; a difference
means that the space was leased anew meanwhile, and what was copied must be thrown away.

`client.data.extent_allocator.Space` and `storage.arena.arena.Arena` are the simple backend's. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from transfer_queue.messages.envelopes import AnyReply

Bytes = npt.NDArray[np.uint8]
CallT_co = TypeVar("CallT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes that nobody but the reserving call may write.

    unit, extent, offset, generation, nbytes: as `messages.NewBlock` names them. The offset is a multiple
    of 64 and the generation is that of the granule at the offset. length: bytes of the extent.
    copies: as much space in other units, for the same bytes. session, slot: where the unit is on another node and
    writes for its writer (`messages.OpenSlot`), under which that leased the extent.
    """

    unit: int
    extent: int
    offset: int
    generation: int
    nbytes: int
    length: int = 0
    copies: tuple[Reserved, ...] = ()
    session: str = ""
    slot: int = 0

    @property
    def places(self) -> tuple[Reserved, ...]:
        """The space in each unit, its own first."""
        return (self, *self.copies)


class ArenaMemory(Protocol):
    """The bytes of one storage unit, as this process sees them."""

    def view(self, offset: int, nbytes: int) -> Bytes:
        """The bytes themselves, no copy. ProtocolError if they lie outside."""

    def generation(self, offset: int) -> int:
        """The generation of the space at this offset, now."""


class Allocator(Protocol[CallT_co]):
    """Space for blocks to be written, for all threads of one client."""

    def reserve(self, nbytes: int, wait: float | None = None) -> Generator[CallT_co, AnyReply, Reserved]:
        """Space for one block. A generator: it yields the calls it needs made and gets their replies sent in.

        wait: seconds to wait for space; None fails at once. CapacityError if there is none.
        """

    def published(self, reserved: Reserved, certain: bool = True) -> None:
        """The block may be known to the controller, which now owns the question when its space is free.

        certain: False where nobody can tell whether the Publish was carried out, or will be.
        """

    def abandon(self, reserved: Reserved) -> None:
        """The block was never published and never will be."""

    def closes(self, current: Reserved | None = None) -> list[tuple[int, int]]:
        """Takes the (unit, extent) that will get no more blocks, to tell the controller of."""
