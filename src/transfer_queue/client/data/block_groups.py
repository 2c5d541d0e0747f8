"""The blocks of one put: which fields are in which backend, and the groups of blocks that get one reservation of space.

In an arena the blocks of a put lie one after the other in one reservation. In an external store each block is an object
of its own, so each is a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from transfer_queue.client.data.extent_allocator import aligned
from transfer_queue.config.store_options import SIMPLE
from transfer_queue.messages.descriptors import BlockLocation, NewBlock, parents, schema_parts
from transfer_queue.storage.protocols import Reserved
from transfer_queue.wire.blocks.encode import EncodedBlock

MOST_KNOWN = 100_000
"""The number of fields whose backend is remembered."""


class BlockGroup(NamedTuple):
    """Blocks of one backend that get one reservation."""

    backend: str
    blocks: list[EncodedBlock]


class BackendRoutes:
    """The backend of each field of a system.

    Args:
        default: The backend of fields that no pattern fits.
        patterns: Pattern of field names -> backend. The first one that fits decides.
    """

    def __init__(self, default: str, patterns: Mapping[str, str]) -> None:
        self._default = default
        self._patterns = patterns
        self._known: dict[str, str] = {}

    def backend_of(self, name: str) -> str:
        """Return the backend of a field. For a field in a nested TensorDict, a pattern may also fit the latter."""
        found = self._known.get(name)
        if found is None:
            names = [name, *parents(name)]
            fits = (backend for pattern, backend in self._patterns.items() if _fits_any(pattern, names))
            found = next(fits, self._default)
            if len(self._known) < MOST_KNOWN:
                self._known[name] = found
        return found

    def group(self, encoded: EncodedBlock) -> list[BlockGroup]:
        """Return the blocks as which a put is written, the one with most fields first."""
        if not self._patterns:
            return _groups_of(self._default, encoded)
        places: dict[str, list[int]] = {}
        for at, spec in enumerate(encoded.schema):
            places.setdefault(self.backend_of(spec.name), []).append(at)
        if len(places) == 1:
            return _groups_of(next(iter(places)), encoded)
        made = {backend: encoded.with_columns(columns) for backend, columns in places.items()}
        bare = [backend for backend, block in made.items() if backend != SIMPLE and not block.nbytes]
        if bare:  # a store has no object without bytes, which would count as lost: such columns join another block
            into = next((backend for backend in made if backend not in bare), bare[0])
            joined = sorted(at for backend in {*bare, into} for at in places[backend])
            made = {backend: block for backend, block in made.items() if backend not in bare}
            made[into] = encoded.with_columns(joined)
        groups = [group for backend, block in made.items() for group in _groups_of(backend, block)]
        return sorted(groups, key=lambda group: -len(group.blocks[0].schema))


def _groups_of(backend: str, encoded: EncodedBlock) -> list[BlockGroup]:
    """Return the blocks of one backend: in a store each is an object, so that each is reserved by itself."""
    blocks = encoded.split()
    return [BlockGroup(backend, blocks)] if backend == SIMPLE else [BlockGroup(backend, [block]) for block in blocks]


def _fits_any(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


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
            BlockLocation(
                copy.unit, copy.extent, copy.offset, copy.generation, copy.length, copy.session, *copy.lease
            )
            for copy in reserved.copies
        ],
        reserved.session, parts, encoded.slots, *reserved.lease,
    )  # fmt: skip
