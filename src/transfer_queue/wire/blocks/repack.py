"""Computes the layout of a new block of some rows and fields of a block, and what to copy into it.

It is a pure function of the descriptor, like `wire.buffers.block_layout`, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer_queue.messages.descriptors import FieldSpec
from transfer_queue.wire.buffers.block_layout import MIXED_RANK, ColumnLayout, align, columns

I8 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RepackedBlock:
    """A block of some rows of another one. `messages.descriptors.NewBlock` describes `schema`, `dims` and `nbytes`."""

    schema: list[FieldSpec]
    dims: bytes
    nbytes: int
    starts: list[I8]
    """For each field the starts of its pieces in the old block."""
    lengths: list[I8]
    """For each field the lengths of its pieces in bytes."""
    places: list[int]
    """For each field its start in the new block, where its pieces are one after the other."""


def repack_block(schema: list[FieldSpec], dims: bytes, rows: int, slots: I8, fields: Collection[str]) -> RepackedBlock:
    """Return the block of the rows `slots` (at least one, ascending) of a block, with these fields (at least one).

    Raises:
        InvalidArgumentError: The block's descriptor is not consistent.
    """
    made: list[FieldSpec] = []
    numbers: list[I8] = []
    starts: list[I8] = []
    lengths: list[I8] = []
    places: list[int] = []
    end = 0
    for column in columns(schema, np.frombuffer(dims, "<i8"), rows):
        if column.spec.name not in fields:
            continue
        at, sizes = column.locate(0, slots)
        spec, shapes = _shapes(column, slots)
        made.append(spec)
        numbers.append(shapes)
        starts.append(at)
        lengths.append(sizes)
        places.append(end)
        end = align(end + int(sizes.sum()))
    return RepackedBlock(made, np.concatenate(numbers).astype("<i8").tobytes(), end, starts, lengths, places)


def _shapes(column: ColumnLayout, slots: I8) -> tuple[FieldSpec, I8]:
    """Return the spec and the dims of these rows of a column in a new block."""
    spec = column.spec
    shapes = column.row_shapes(0, slots)
    ranks = np.full(len(slots), spec.ndim) if column.ranks is None else column.ranks[0, slots]
    rank = int(ranks[0])
    if (ranks != rank).any():
        parts = [np.concatenate(([n], shape[:n])) for n, shape in zip(ranks.tolist(), shapes, strict=True)]
        return FieldSpec(spec.name, spec.kind, spec.dtype, MIXED_RANK, True), np.concatenate(parts)
    shapes = shapes[:, :rank]
    ragged = bool((shapes != shapes[0]).any())
    return (
        FieldSpec(spec.name, spec.kind, spec.dtype, rank, ragged),
        (shapes if ragged else shapes[0]).reshape(-1),
    )
