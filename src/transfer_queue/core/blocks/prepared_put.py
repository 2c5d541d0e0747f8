"""What is prepared for a put of very many fields before it is decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

from transfer_queue.core.tables.field_types import FieldStats, PreparedTypes
from transfer_queue.messages.descriptors import NewBlock

Discarded = Union[dict[Any, Any], list[Any], set[Any]]
"""A collection that is not needed any more, and may have very many entries."""


class PreparedPut:
    """The blocks of a put of very many fields, and what was prepared for them."""

    def __init__(self, sent: Sequence[NewBlock]) -> None:
        self.sent = sent
        """The blocks as the client sent them."""
        self.blocks: list[NewBlock] = []
        """The same blocks with their whole schemas, as far as these are checked."""
        self.names: frozenset[str] | None = None
        """The names of the fields of all blocks; None if there is one block, or no ready set needs them."""
        self.types: PreparedTypes | None = None
        """None if the types of the fields are not prepared."""
        self._whole: dict[int, NewBlock] = {}
        """The `id` of a block that was sent -> it with its whole schema."""

    def add(self, whole: NewBlock) -> None:
        """Add the next block, with its whole schema."""
        self._whole[id(self.sent[len(self.blocks)])] = whole
        self.blocks.append(whole)
        if self.types is not None:
            self.types.end_block()

    def whole(self, sent: NewBlock) -> NewBlock | None:
        """Return a block of the put with its whole schema; None for other blocks."""
        return self._whole.get(id(sent))

    def has(self, whole: NewBlock) -> bool:
        """Return whether this is a block of the put with its whole schema, which is then checked."""
        return any(block is whole for block in self.blocks)

    def matches(self, fields: dict[str, FieldStats], typed: int) -> bool:
        """Return whether the types are prepared and its values match these fields of the partition."""
        return self.types is not None and self.types.is_current(fields, typed)

    def unused(self) -> list[Discarded]:
        """Return the collections that are not needed after the put."""
        types = self.types
        if types is None:
            return []
        return [types.replaced, types.unused, types.recounted]
