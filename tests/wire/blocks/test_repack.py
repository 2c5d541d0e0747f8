"""Some rows and fields of a block as a block of their own: the values are those of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from carried_values import DTYPES_OF_EACH_SIZE, pattern, same_tensor
from codec_arenas import nbytes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from differential import differential, row_lengths, small
from transfer_queue.core.units.migration_planner import blocks_message
from transfer_queue.messages.descriptors import FieldType, NewBlock, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.encode import EncodedBlock, encode_columns
from transfer_queue.wire.blocks.gather import gather
from transfer_queue.wire.blocks.repack import repack_block
from transfer_queue.wire.buffers.block_layout import MIXED_RANK


def columns(rows: int, shapes: list[tuple[int, ...]]) -> dict[str, object]:
    """A column of each kind; the tensors of `mixed` have these shapes."""
    one = [torch.full(shape[:1], float(row)) for row, shape in enumerate(shapes)]
    return {
        "dense": torch.arange(rows * 6, dtype=torch.int16).reshape(rows, 2, 3),
        "scalar": torch.arange(rows),
        "ragged": one,
        "mixed": [torch.full(shape, row, dtype=torch.uint8) for row, shape in enumerate(shapes)],
        "object": [{"row": row, "text": "x" * row} for row in range(rows)],
    }


def smaller(block: EncodedBlock, slots: list[int], fields: list[str]) -> tuple[NewBlock, np.ndarray]:
    """The block of these rows, and its bytes."""
    memory = np.zeros(max(block.nbytes, 1), np.uint8)
    block.write_into(memory)
    made = repack_block(block.schema, block.dims, block.rows, np.array(slots, "i8"), fields)
    out = np.zeros(made.nbytes + 64, np.uint8)
    for place, starts, lengths in zip(made.places, made.starts, made.lengths, strict=True):
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            out[place : place + length] = memory[start : start + length]
            place += length
    return NewBlock(0, 1, 0, 1, made.nbytes, len(slots), made.schema, made.dims), out


def gathered(block: NewBlock, memory: np.ndarray, fields: list[str], order: list[int]) -> dict[str, list[Any]]:
    """The rows of a block in this order, by field."""
    types = [
        FieldType(s.name, s.kind, s.dtype, max(s.ndim, 0), None, 0, s.ndim == MIXED_RANK) for s in block.schema
    ]  # fmt: skip
    placement = Placement(fields, bytes(4 * len(order)), np.array(order, "i4").tobytes())
    reply = LookupReply(len(order), types, blocks_message([block]), [placement])
    got = gather(reply, lambda unit: memory, "list")
    return {name: got.get(name).tolist() for name in fields}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_rows_are_the_same(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 6))
    shape = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
    shapes = data.draw(st.lists(shape, min_size=rows, max_size=rows))
    given_columns = columns(rows, shapes)
    slots = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
    fields = sorted(data.draw(st.sets(st.sampled_from(sorted(given_columns)), min_size=1)))
    block, memory = smaller(encode_columns(given_columns, rows), slots, fields)
    assert block.nbytes == nbytes_of(block, block.rows)
    assert [spec.name for spec in block.schema] == [name for name in given_columns if name in fields]
    for name, found in gathered(block, memory, fields, list(range(len(slots)))).items():
        for slot, value in zip(slots, found, strict=True):
            expected = given_columns[name][slot]  # type: ignore[index]
            assert torch.equal(value, expected) if isinstance(expected, torch.Tensor) else value == expected


@st.composite
def few_shapes(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[int]]:
    """Rows of a field whose shapes coincide, and which of them live."""
    count = draw(st.integers(1, 6))
    dtype, other = draw(st.sampled_from(DTYPES_OF_EACH_SIZE)), draw(small)
    first = draw(row_lengths(count))
    ranks = draw(st.sampled_from([[1] * count, [2] * count, [1, 2] * count, [0, 1, 2] * count]))
    shapes = [(size, other, other)[:rank] for size, rank in zip(first, ranks, strict=False)]
    slots = sorted(draw(st.sets(st.integers(0, count - 1), min_size=1)))
    return [pattern(dtype, shape, row) for row, shape in enumerate(shapes)], slots


@given(few_shapes(), few_shapes(), st.booleans())
@differential(60)
def test_rows_whose_shapes_coincide_are_the_same(
    one: tuple[list[torch.Tensor], list[int]], other: tuple[list[torch.Tensor], list[int]], both: bool
) -> None:
    rows = min(len(one[0]), len(other[0]))
    slots = sorted({min(slot, rows - 1) for slot in one[1]})
    put = {"x": one[0][:rows], "y": other[0][:rows]}
    fields = ["x", "y"] if both else ["y"]
    block, memory = smaller(encode_columns(put, rows), slots, fields)
    for name, found in gathered(block, memory, fields, list(reversed(range(len(slots))))).items():
        assert all(map(same_tensor, found, [put[name][slot] for slot in reversed(slots)]))


def test_what_has_become_alike_is_dense() -> None:
    block, _ = smaller(encode_columns({"x": [torch.zeros(2), torch.zeros(3), torch.zeros(2)]}, 3), [0, 2], ["x"])
    assert [(spec.ndim, spec.ragged) for spec in block.schema] == [(1, False)]
    assert np.frombuffer(block.dims, "<i8").tolist() == [2]
