"""Blocks made smaller: the layout of some rows and fields of a block as a block of their own, and what to copy.

A pure function of the descriptor, as `wire.buffers.block_layout` is; it moves no byte.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer_queue.messages.descriptors import FieldSpec
from transfer_queue.wire.buffers.block_layout import MIXED_RANK, ColumnLayout, aligned, columns

I8 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RepackedBlock:
    """A block of some rows of another. schema, dims, nbytes: as in `messages.NewBlock`.

    starts, lengths: for each field the pieces of the old block, counted from its start; in the new one they follow
    one another from the field's entry of `places` on.
    """

    schema: list[FieldSpec]
    dims: bytes
    nbytes: int
    starts: list[I8]
    lengths: list[I8]
    places: list[int]


def repacked(schema: list[FieldSpec], dims: bytes, rows: int, slots: I8, fields: Collection[str]) -> RepackedBlock:
    """The rows `slots` (one or more, ascending) of a block, with these fields only (one or more), as a block.

    Raises:
        InvalidArgumentError: the block's descriptor contradicts itself.
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
        end = aligned(end + int(sizes.sum()))
    return RepackedBlock(made, np.concatenate(numbers).astype("<i8").tobytes(), end, starts, lengths, places)


def _shapes(column: ColumnLayout, slots: I8) -> tuple[FieldSpec, I8]:
    """How these rows of a column lie in a block of their own, and the dims that say so."""
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
