"""Finds rows of equal bytes by a hash, in one put and across puts, so that each distinct value is written once.

`hash_put` makes the digests of the rows of some fields. `HashedPut.without` makes the put that writes each value once
and leaves out the values that the system has already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer_queue.messages.descriptors import NESTED, EqualField, FieldSpec
from transfer_queue.wire.blocks.column_sources import EncodedBytes, find_equal_keys
from transfer_queue.wire.blocks.encode import EncodedBlock, PutColumn
from transfer_queue.wire.blocks.repack import repack_block
from transfer_queue.wire.buffers.block_layout import columns
from transfer_queue.wire.buffers.copies import U8

MIN_HASHED = 4096
"""Bytes from which a row is hashed."""

I4 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HashedField:
    """The digests of one field of a put."""

    name: str
    digests: list[bytes]
    """The distinct digests of rows of at least `MIN_HASHED` bytes, in the order of their first rows."""
    numbers: I4
    """For each row of the put the position of its digest; -1 for a shorter row."""
    column: PutColumn
    digest_of: list[bytes | None]
    """The digest of each row of the column, before equal ones are left out; None for a short one."""
    pieces: list[list[U8]]
    """The bytes of each row of the column."""


class HashedPut:
    """A put with the digests of some of its fields."""

    def __init__(self, put: EncodedBlock, fields: list[HashedField]) -> None:
        self.put = put
        self.fields = fields
        """The digests of each hashed field."""

    def without(self, known: Mapping[str, Collection[bytes]]) -> EncodedBlock:
        """Return the put that writes each distinct value once, without values of these digests.

        Slots are -1 for rows of the put whose value is not written. A field of which nothing is written is missing.
        """
        made = []
        hashed_fields = {field.name: field for field in self.fields}
        for column in self.put.columns:
            hashed = hashed_fields.get(column.spec.name)
            kept = column if hashed is None else _distinct(hashed, known.get(column.spec.name, ()))
            if kept is not None:
                made.append(kept)
        put = EncodedBlock(self.put.rows, made)
        put.converted = self.put.converted
        return put

    def known_digests(self, reported: Sequence[bytes]) -> dict[str, set[bytes]]:
        """Return the known digests of each field, from the reply to the digests of all fields."""
        return {
            field.name: {digest for digest, exists in zip(field.digests, known, strict=True) if exists}
            for field, known in zip(self.fields, reported, strict=True)
        }

    def describe(self, known: Mapping[str, Collection[bytes]]) -> list[EqualField]:
        """Return the digests for the request that publishes `without(known)`."""
        return [
            EqualField(
                field.name, b"".join(field.digests), field.numbers.tobytes(),
                bytes(digest in known.get(field.name, ()) for digest in field.digests),
            )
            for field in self.fields
        ]  # fmt: skip


def hash_put(put: EncodedBlock, matches: Callable[[str], bool]) -> HashedPut | None:
    """Return the put with the digests of the fields that match; None if none of them has rows to hash."""
    fields = []
    for column in put.columns:
        spec, slots = column.spec, column.slots
        if spec.kind != NESTED and column.nbytes >= MIN_HASHED and matches(spec.name):
            field = _hash_column(column, put.rows if slots is None else int(slots.max()) + 1)
            if field is not None:
                fields.append(field)
    return HashedPut(put, fields) if fields else None


def _distinct(hashed: HashedField, known: Collection[bytes]) -> PutColumn | None:
    """Return the column with one row for each distinct value that is not known; None if all are known."""
    column, rows = hashed.column, len(hashed.digest_of)
    equal = find_equal_keys([row if digest is None else digest for row, digest in enumerate(hashed.digest_of)])
    if equal is None and not known:
        return column
    firsts = list(range(rows)) if equal is None else equal.firsts
    of_row = np.arange(rows, dtype=np.int32) if equal is None else equal.slots
    written = [row for row in firsts if hashed.digest_of[row] not in known]
    if not written:
        return None
    places = np.full(len(firsts), -1, np.int32)
    places[[at for at, row in enumerate(firsts) if hashed.digest_of[row] not in known]] = np.arange(len(written))
    slots = places[of_row]
    if column.slots is not None:
        slots = slots[column.slots]
    spec, dims = _select(column, rows, written)
    parts = [piece for row in written for piece in hashed.pieces[row]]
    values = column.source.values if isinstance(column.source, EncodedBytes) else []
    source = EncodedBytes(parts, [values[row] for row in written] if values else [])
    return PutColumn(spec, dims, source.nbytes, source, np.ascontiguousarray(slots))


def _select(column: PutColumn, rows: int, chosen: Sequence[int]) -> tuple[FieldSpec, bytes]:
    """Return the spec and the dims of these rows of a column."""
    made = repack_block([column.spec], column.dims, rows, np.array(chosen, np.int64), (column.spec.name,))
    return made.schema[0], made.dims


def _hash_column(column: PutColumn, rows: int) -> HashedField | None:
    """Return the digests of a column of this many rows; None if no row is long enough."""
    spec = column.spec
    (layout,) = columns([spec], np.frombuffer(column.dims, "<i8"), rows)
    all_rows = np.arange(rows)
    _, lengths = layout.locate(0, all_rows)
    if int(lengths.max(initial=0)) < MIN_HASHED:
        return None
    shapes = layout.row_shapes(0, all_rows)
    pieces = list(_cut(column.source.memory(), lengths.tolist()))
    digests = [
        None if length < MIN_HASHED else _digest(piece, f"{spec.kind} {spec.dtype} {shape}")
        for piece, length, shape in zip(pieces, lengths.tolist(), shapes.tolist(), strict=True)
    ]
    distinct: dict[bytes, int] = {}
    of_rows = [-1 if digest is None else distinct.setdefault(digest, len(distinct)) for digest in digests]
    numbers = np.array(of_rows, np.int32)
    slots = column.slots
    return HashedField(spec.name, list(distinct), numbers if slots is None else numbers[slots], column, digests, pieces)


def _cut(memory: Sequence[U8], lengths: Sequence[int]) -> Iterator[list[U8]]:
    """Yield the bytes of each row, which are one after the other in the pieces of memory."""
    number = start = 0
    for length in lengths:
        row = []
        while length:
            piece = memory[number][start : start + length]
            row.append(piece)
            length -= len(piece)
            start += len(piece)
            if start == len(memory[number]):
                number, start = number + 1, 0
        yield row


def _digest(pieces: Sequence[U8], form: str) -> bytes:
    """Return the digest of a value. Values of equal bytes but another kind, dtype or shape have another digest."""
    import xxhash

    seed = xxhash.xxh3_64_intdigest(form.encode())
    if len(pieces) == 1:
        digest: bytes = xxhash.xxh3_128_digest(pieces[0].data, seed)
        return digest
    state = xxhash.xxh3_128(seed=seed)
    for piece in pieces:
        state.update(piece.data)
    whole: bytes = state.digest()
    return whole
