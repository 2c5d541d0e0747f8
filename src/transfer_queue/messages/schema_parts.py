"""The schema of a block with very many fields, in parts that are decoded one by one."""

from __future__ import annotations

import msgspec

from transfer_queue.messages.descriptors import FieldSpec

WIDE = 2048
"""Fields, from which on a schema travels in parts."""
PART = 512
"""Fields of a part, which take a fraction of a millisecond to decode."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[FieldSpec]).decode


def schema_parts(schema: list[FieldSpec]) -> list[bytes]:
    """A schema as `NewBlock.parts` has it; no parts where it has not very many fields."""
    if len(schema) < WIDE:
        return []
    return [_encode(schema[start : start + PART]) for start in range(0, len(schema), PART)]


def fields_of_part(part: bytes) -> list[FieldSpec]:
    """The fields of a part. Raises one of `messages.UNREADABLE` if it is none."""
    return _decode(part)
