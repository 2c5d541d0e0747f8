"""Schemas of very many fields, which are compared by a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from transfer_queue.messages.descriptors import FieldSpec

WIDE = 2048
"""A schema with at least this many fields is compared by its digest."""

_encode = msgspec.msgpack.Encoder().encode


class SchemaDigest:
    """The digest of a schema, which is computed while the fields are added in order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, fields: Iterable[FieldSpec]) -> None:
        """Add the next fields."""
        self._hash.update(b"".join(map(_encode, fields)))

    def value(self) -> bytes:
        """Return the digest of the fields that were added so far."""
        return self._hash.digest()


class WideSchema(tuple[FieldSpec, ...]):
    """A schema with its digest. To hash and to compare two of them takes no time for each field.

    To hash a tuple of 100,000 fields takes 10 ms or more, and to compare two of them up to 40 ms.
    """

    digest: bytes

    @classmethod
    def of(cls, fields: Iterable[FieldSpec], digest: bytes) -> WideSchema:
        """Return the schema of these fields with their digest (`SchemaDigest`)."""
        made = cls(fields)
        made.digest = digest
        return made

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, WideSchema) and self.digest == other.digest)

    def __ne__(self, other: object) -> bool:
        return not self == other


def schema_key(fields: Sequence[FieldSpec]) -> tuple[FieldSpec, ...]:
    """Return a schema in the form in which it is compared."""
    if len(fields) < WIDE:
        return tuple(fields)
    if isinstance(fields, WideSchema):
        return fields
    digest = SchemaDigest()
    digest.add(fields)
    return WideSchema.of(fields, digest.value())
