"""What a storage backend offers to a client: six methods in two roles, and the type that describes reserved space.

Writing: `Allocator.reserve` finds space. The caller copies its block into `ArenaMemory.view` of it, publishes it to the
controller, and reports the outcome with `mark_published` or `abandon`. Reading: the caller copies out of
`ArenaMemory.view` and then compares `ArenaMemory.generation` with the generation in its descriptor. If they differ,
the space was leased again meanwhile, and the caller must discard the copy.

`client.data.extent_allocator.ExtentAllocator` and `storage.arena.arena.Arena` implement this for the simple backend.
Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.messages.envelopes import AnyReply

Bytes = npt.NDArray[np.uint8]
CallT_co = TypeVar("CallT_co", covariant=True)


class Reserved(msgspec.Struct, frozen=True):
    """Bytes that only the reserving call may write.

    `unit` to `nbytes` are the fields of `messages.descriptors.NewBlock`.
    """

    unit: int
    extent: int
    offset: int
    """A multiple of 64."""
    generation: int
    """The generation of the granule at the offset."""
    nbytes: int
    length: int = 0
    """Bytes of the extent."""
    copies: tuple[Reserved, ...] = ()
    """Space of the same size in other units, for the same bytes."""
    session: str = ""
    """The session under which the writer leased the extent, if its unit is on another node
    (`messages.storage.OpenSlot`).
    """
    slot: int = 0
    """The slot of the writer in the unit."""
    lease: tuple[int, int] = (-1, 0)
    """The offset of the first byte of the extent, and the proof of its lease (`messages.storage.lease_proof`)."""

    @property
    def places(self) -> tuple[Reserved, ...]:
        """The space in each unit, beginning with this one."""
        return (self, *self.copies)

    def part(self, start: int, nbytes: int) -> Reserved:
        """Return the part of the space from this byte on, which must be a multiple of 64, with its copies."""
        copies = tuple(copy.part(start, nbytes) for copy in self.copies)
        return msgspec.structs.replace(self, offset=self.offset + start, nbytes=nbytes, copies=copies)


class ArenaMemory(Protocol):
    """The bytes of one storage unit, as this process sees them."""

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Return the bytes themselves, not a copy. Raises ProtocolError if they are outside of the unit's memory."""

    def generation(self, offset: int) -> int:
        """Return the current generation of the space at this offset."""


class Allocator(Protocol[CallT_co]):
    """Space for blocks to be written, for all threads of one client."""

    def reserve(self, nbytes: int, wait: float | None = None) -> Generator[CallT_co, AnyReply, Reserved]:
        """Reserve space for one block. A generator: it yields the calls that it needs and receives their replies.

        `wait` is the time in seconds to wait for space; None fails at once. Raises CapacityError if there is no space.
        """

    def mark_published(self, reserved: Reserved, certain: bool = True) -> None:
        """Report that the controller may know the block. From now on the controller decides when its space is freed.

        `certain` is False if the client cannot determine whether the Publish was or will be carried out.
        """

    def abandon(self, reserved: Reserved) -> None:
        """Report that the block was not published and will never be."""

    def take_closes(self, current: Reserved | None = None) -> list[tuple[int, int]]:
        """Take the (unit, extent) that will get no more blocks, to report them to the controller."""
