"""The blocks of one put in groups, each of which gets one reservation of space.

In an arena the blocks of a put lie one after the other in one reservation. In an external store each block is an object
of its own, so each is a group.
"""

from __future__ import annotations

from collections.abc import Sequence

from transfer_queue.client.data.extent_allocator import aligned
from transfer_queue.messages.descriptors import BlockLocation, NewBlock, schema_parts
from transfer_queue.storage.protocols import Reserved
from transfer_queue.wire.blocks.encode import EncodedBlock


def group_bytes(group: Sequence[EncodedBlock]) -> int:
    """Return the bytes of the reservation of a group."""
    *others, last = group
    return sum(aligned(block.nbytes) for block in others) + last.nbytes


def place_blocks(group: Sequence[EncodedBlock], reserved: Reserved) -> list[tuple[EncodedBlock, Reserved]]:
    """Return each block of a group with its part of the reservation."""
    placed, start = [], 0
    for block in group:
        placed.append((block, reserved.part(start, block.nbytes)))
        start += aligned(block.nbytes)
    return placed


def describe_block(encoded: EncodedBlock, reserved: Reserved) -> NewBlock:
    """Return the description of a block that was written into reserved space."""
    parts = schema_parts(encoded.schema)
    return NewBlock(
        reserved.unit, reserved.extent, reserved.offset, reserved.generation, encoded.nbytes, encoded.rows,
        [] if parts else encoded.schema, encoded.dims, reserved.length,
        [
            BlockLocation(copy.unit, copy.extent, copy.offset, copy.generation, copy.length, copy.session)
            for copy in reserved.copies
        ],
        reserved.session, parts, encoded.slots,
    )  # fmt: skip
