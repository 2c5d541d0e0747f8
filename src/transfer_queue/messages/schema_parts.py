"""The schema of a block with very many fields, in parts that are decoded one by one."""

from __future__ import annotations

import msgspec

from transfer_queue.messages.descriptors import FieldSpec

WIDE = 2048
"""Fields from which on a schema is sent in parts."""
PART = 512
"""Fields of a part, which is decoded in a fraction of a millisecond."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[FieldSpec]).decode


def schema_parts(schema: list[FieldSpec]) -> list[bytes]:
    """Return the parts of a schema for `NewBlock.parts`; an empty list if it has fewer than `WIDE` fields."""
    if len(schema) < WIDE:
        return []
    return [_encode(schema[start : start + PART]) for start in range(0, len(schema), PART)]


def fields_of_part(part: bytes) -> list[FieldSpec]:
    """Return the fields of a part. Raises one of `messages.UNREADABLE` if it is not a part of a schema."""
    return _decode(part)
