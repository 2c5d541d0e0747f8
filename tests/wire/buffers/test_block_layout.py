"""The byte layout of blocks: what writers write is what controllers and readers compute, and lies are refused."""

from contextlib import suppress

import numpy as np
import pytest
from codec_arenas import packed
from hypothesis import given, settings
from hypothesis import strategies as st

from differential import differential, small
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import Blocks, FieldSpec, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.row_addressing import locate_rows
from transfer_queue.wire.buffers.block_layout import ALIGNMENT, ITEM_SIZES, MAX_BYTES, MIXED_RANK, columns
from transfer_queue.wire.buffers.block_layout import columns_of_many as many


def tensor(name="x", ndim=1, ragged=False, dtype="float32"):
    return FieldSpec(name, "tensor", dtype, ndim, ragged)


def dims_of(*numbers):
    return np.frombuffer(packed(*numbers), np.int64)


@st.composite
def descriptors(draw):
    """A schema with dims, and for each field the shapes of its rows, laid out by hand."""
    rows = draw(st.integers(0, 5))
    schema, dims, shapes = [], [], []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["uniform", "ragged", "object"] + ["mixed"] * (rows > 1)))
        ndim = 1 if kind == "object" else draw(st.integers(0, 3))
        ragged = kind in ("ragged", "mixed") or (kind == "object" and draw(st.booleans()))
        ranks = [draw(st.integers(0, 3)) if kind == "mixed" else ndim for _ in range(rows)]
        field = [tuple(draw(st.integers(0, 5)) for _ in range(rank)) for rank in ranks]
        if not ragged:
            shape = tuple(draw(st.integers(0, 5)) for _ in range(ndim))
            field = [shape] * rows
            dims += shape
        else:
            dims += [size for shape in field for size in ((len(shape),) if kind == "mixed" else ()) + shape]
        dtype = "object" if kind == "object" else draw(st.sampled_from(["int8", "bfloat16", "float32", "complex128"]))
        spec_kind = "object" if kind == "object" else "tensor"
        schema.append(FieldSpec(f"f{number}", spec_kind, dtype, MIXED_RANK if kind == "mixed" else ndim, ragged))
        shapes.append(field)
    return schema, dims_of(*dims), rows, shapes


@given(descriptors())
@settings(max_examples=200, deadline=None)
def test_columns_follow_one_another(descriptor):
    schema, dims, rows, shapes = descriptor
    end = 0
    for spec, column, field in zip(schema, columns(schema, dims, rows), shapes, strict=True):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        assert int(column.offsets[0]) == start
        lengths = [int(np.prod(shape, dtype=np.int64)) * ITEM_SIZES[spec.dtype] for shape in field]
        starts, found = column.locate(0, np.arange(rows))
        assert found.tolist() == lengths
        assert starts.tolist() == [start + sum(lengths[:row]) for row in range(rows)]
        back = [tuple(s for s in shape if s >= 0) for shape in column.row_shapes(0, np.arange(rows)).tolist()]
        assert back == field
        end = start + sum(lengths)
        assert int(column.nbytes[0]) == sum(lengths)


@given(st.lists(descriptors(), min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_many_blocks_are_laid_out_as_each(blocks, data):
    schema, dims, rows, _ = blocks[0]
    if any(spec.ndim == MIXED_RANK for spec in schema):
        return
    matrix = np.stack([dims, *(data.draw(st.permutations(dims.tolist())) for _ in range(3))]).astype(np.int64)
    together = many(schema, matrix, rows)
    blocks_of_rows, slots = np.repeat(np.arange(4), rows), np.tile(np.arange(rows), 4)
    for position, column in enumerate(together):
        places = column.locate(blocks_of_rows, slots)
        for block in range(4):
            alone = columns(schema, matrix[block], rows)[position]
            assert (alone.offsets[0], alone.nbytes[0]) == (column.offsets[block], column.nbytes[block])
            for one, all_of_them in zip(alone.locate(0, np.arange(rows)), places, strict=True):
                assert one.tolist() == all_of_them[block * rows : (block + 1) * rows].tolist()


LIES = [
    ([tensor()], (-1,), 2), ([tensor()], (), 2), ([tensor()], (1, 2), 2), ([tensor(ragged=True)], (1,), 2),
    ([tensor(ragged=True)], (1, -2), 2), ([tensor(ndim=2)], (2**40, 2**40), 1), ([tensor(ndim=2)], (2**62, 4), 1),
    ([tensor(ndim=3)], (2**32, 2**32, 2**32), 1), ([tensor()], (2**47,), 2**30), ([tensor(dtype="float33")], (1,), 1),
    ([tensor(dtype="object")], (1,), 1), ([tensor(ndim=-2)], (), 1), ([tensor(ndim=65)], (1,) * 65, 1),
    ([tensor()], (1,), -1), ([tensor()], (1,), 2**31), ([tensor(), tensor()], (1, 1), 1),
    ([FieldSpec("x", "thing", "float32", 1, False)], (1,), 1),
    ([FieldSpec("x", "object", "float32", 1, False)], (1,), 1),
    ([FieldSpec("x", "object", "object", 2, False)], (1, 1), 1),
    ([FieldSpec("x", "object", "object", 0, False)], (), 1),
    ([tensor(ndim=MIXED_RANK)], (1, 1), 2), ([tensor(ndim=MIXED_RANK, ragged=True)], (1, 1), 1),
    ([tensor(ndim=MIXED_RANK, ragged=True)], (1, 1), 2), ([tensor(ndim=MIXED_RANK, ragged=True)], (1, 1, 2, 1), 2),
    ([tensor(ndim=MIXED_RANK, ragged=True)], (1, 1, -1), 2), ([tensor(ndim=MIXED_RANK, ragged=True)], (66, 0), 2),
    ([tensor(ndim=MIXED_RANK, ragged=True)], (1, -4, 0), 2), ([tensor(ndim=MIXED_RANK, ragged=True)], (0,), 2**31 - 1),
    ([tensor("a"), tensor("b")], (2**46, 2**46), 1), ([tensor(ragged=True)], (2**47, 2**47), 2), ([], (1,), 1),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "dims", "rows"), LIES)
def test_lies_are_refused(schema, dims, rows):
    with pytest.raises(InvalidArgumentError):
        columns(schema, dims_of(*dims), rows)


extreme = st.one_of(st.integers(-3, 70), st.sampled_from([2**31, 2**48, 2**62, 2**63 - 1, -(2**63)]))
specs = st.builds(FieldSpec, st.sampled_from("ab"), st.sampled_from(["tensor", "object"]),
                  st.sampled_from(["float32", "object", "x"]), extreme, st.booleans())  # fmt: skip


@given(st.lists(specs, max_size=3), st.lists(extreme, max_size=8), extreme)
@settings(max_examples=400, deadline=None)
def test_anything_is_laid_out_or_refused(schema, dims, rows):
    """What is accepted is not absurd."""
    with suppress(InvalidArgumentError):
        for column in columns(schema, dims_of(*dims), rows):
            assert 0 <= int(column.offsets[0] + column.nbytes[0]) <= MAX_BYTES


def test_a_block_without_fields_is_empty():
    assert columns([], dims_of(), 3) == []


def test_blocks_of_mixed_rank_one_at_a_time():
    spec = tensor(ndim=MIXED_RANK, ragged=True)
    with pytest.raises(InvalidArgumentError, match="one at a time"):
        many([spec], np.array([[1, 2, 0], [1, 2, 0]], np.int64), 2)


@st.composite
def alike_descriptors(draw):
    """(schema, dims, blocks, rows) out of few, many of which differ in only one value; some are invalid."""
    dtypes = st.sampled_from(["int8", "bool", "int16", "bfloat16", "complex128"])
    specs = st.builds(tensor, st.sampled_from(["x", "y"]), st.sampled_from([0, 1, 1, 2]), st.booleans(), dtypes)
    schema = draw(st.lists(specs, min_size=1, max_size=2, unique_by=lambda spec: spec.name))
    rows, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    numbers = sum(spec.ndim * (rows if spec.ragged else 1) for spec in schema)
    dims = draw(st.lists(small, min_size=blocks * numbers, max_size=blocks * numbers))
    return tuple(schema), packed(*dims), blocks, rows


@given(st.lists(alike_descriptors(), min_size=2, max_size=12))
@differential(60)
def test_kept_layouts_are_those_that_would_be_made(asked):
    """This holds whatever descriptors were laid out before."""
    for schema, dims, blocks, rows in asked:
        made = many(schema, np.frombuffer(dims, "<i8").reshape(blocks, -1), rows)
        for found in (located(schema, dims, blocks, rows, 1), located(schema, dims, blocks, rows, blocks)):
            for column in made:
                _, starts, lengths, shapes = found[column.spec.name].each()
                block, slot = np.divmod(np.arange(len(starts)), rows)
                expected = column.locate(block, slot)
                assert starts.tolist() == (block * MAX_BYTES + expected[0]).tolist()
                assert lengths.tolist() == expected[1].tolist()
                assert shapes.tolist() == column.row_shapes(block, slot).tolist()


def located(schema, dims, blocks, rows, count):
    """Where a reader locates the rows of the first blocks, which are MAX_BYTES from one another."""
    each = len(dims) // blocks
    of_blocks = [dims[each * block : each * (block + 1)] for block in range(count)]
    given_ = Blocks(
        bytes(4 * count), (np.arange(count) * MAX_BYTES).astype("<i8").tobytes(), bytes(8 * count),
        np.full(count, MAX_BYTES, "<i8").tobytes(), np.full(count, rows, "<i4").tobytes(), bytes(4 * count),
        np.arange(count, dtype="<i4").tobytes(), [list(schema)], of_blocks,
    )  # fmt: skip
    block, slot = np.divmod(np.arange(count * rows, dtype="<i4"), rows)
    names = [spec.name for spec in schema]
    types = [FieldType(spec.name, spec.kind, spec.dtype, spec.ndim, None, 0, False) for spec in schema]
    placement = Placement(names, block.astype("<i4").tobytes(), slot.astype("<i4").tobytes())
    arena = np.broadcast_to(np.uint8(0), (count * MAX_BYTES,))
    return locate_rows(LookupReply(count * rows, types, given_, [placement]), lambda unit: arena)


def test_rows_without_dimensions_are_laid_out_without_looking_at_each():
    """A descriptor of few bytes must not make a reader allocate memory for rows that it has no bytes for."""
    (column,) = columns([tensor(ndim=0, ragged=True)], dims_of(), 2**31 - 1)
    assert column.nbytes.tolist() == [column.lengths.item() * (2**31 - 1)]
    assert column.lengths.size == 1
