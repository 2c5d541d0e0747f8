"""Schemas of very many fields, which are made in steps and compared by a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import msgspec

from transfer_queue.messages.descriptors import FieldSpec

WIDE = 2048
"""A schema with at least this many fields is compared by its digest."""
PIECE = 256
"""The number of fields of a piece of a schema that is made at once."""

Schema = Sequence[FieldSpec]

_encode = msgspec.msgpack.Encoder().encode


class WideSchema(Schema):
    """A schema in pieces with its digest. To make, to hash and to compare it takes no time for each field.

    To hash a tuple of 100,000 fields takes 10 ms or more, to compare two of them up to 40 ms, and to make one 4 ms.
    """

    def __init__(self, pieces: Sequence[Sequence[FieldSpec]], count: int, digest: bytes) -> None:
        """`count` is the number of fields. Equal schemas have the same digest, whatever their pieces are."""
        self.pieces = pieces
        self._count = count
        self._digest = digest

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[FieldSpec]:
        return chain.from_iterable(self.pieces)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice) and at.start is None and at.step is None:
            return tuple(islice(self, *at.indices(self._count)))
        return tuple(self)[at]

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, WideSchema) and self._digest == other._digest)


class SchemaMaker:
    """Makes a schema of fields that are added in order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._pieces: list[tuple[FieldSpec, ...]] = []
        self._count = 0

    def add(self, fields: Sequence[FieldSpec]) -> None:
        """Add the next fields."""
        self._pieces.append(tuple(fields))
        self._count += len(fields)
        self._hash.update(b"".join(map(_encode, fields)))

    def make(self) -> Schema:
        """Return the schema of the fields that were added so far, in the form in which it is hashed and compared."""
        if self._count < WIDE:
            return tuple(chain.from_iterable(self._pieces))
        return WideSchema(self._pieces, self._count, self._hash.digest())


def to_schema(fields: Schema) -> Schema:
    """Return a schema in the form in which it is hashed and compared."""
    if len(fields) < WIDE:
        return tuple(fields)
    if isinstance(fields, WideSchema):
        return fields
    maker = SchemaMaker()
    for at in range(0, len(fields), PIECE):
        maker.add(fields[at : at + PIECE])
    return maker.make()
