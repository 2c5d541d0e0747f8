"""Rows of every form are where a few simple lines find them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from codec_arenas import Arenas
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.wire.blocks.encode import encode_columns
from transfer_queue.wire.blocks.gather import gather
from transfer_queue.wire.blocks.row_addressing import LocatedRows, locate_rows
from transfer_queue.wire.buffers.block_layout import columns

Row = tuple[int, int, int, tuple[int, ...]]
FIELDS = {"a": (torch.int64, (3,)), "b": (torch.uint8, ()), "c": (torch.float32, (2, 2)), "d": (torch.int16, (1,))}
KINDS = ["dense", "scalar", "jagged", "objects", "alike", "empty", "mixed"]


def of_every_kind(rows: int = 6) -> Arenas:
    """Arenas with two blocks of fields of each kind."""
    arenas = Arenas(2)
    for seed in range(2):
        jagged = torch.nested.nested_tensor([torch.arange(n + seed) for n in range(rows)], layout=torch.jagged)
        fields = {
            "dense": torch.rand(rows, 3, 2), "scalar": torch.rand(rows).bfloat16(), "jagged": jagged,
            "objects": [f"row {n}" * n for n in range(rows)], "alike": [1] * rows, "empty": torch.zeros(rows, 0),
            "mixed": [torch.zeros([1] * (n % 3)) for n in range(rows)],
        }  # fmt: skip
        arenas.write(encode_columns(fields, rows), seed)
    return arenas


def of_one_layout(blocks: int, rows: int) -> Arenas:
    arenas = Arenas()
    for block in range(blocks):
        fields = {
            name: torch.arange(rows * int(np.prod(shape, initial=1))).add(block).to(dtype).reshape(rows, *shape)
            for name, (dtype, shape) in FIELDS.items()
        }
        arenas.write(encode_columns(fields, rows))
    return arenas


def expected(arenas: Arenas, pairs: Sequence[tuple[int, int]], name: str) -> list[Row]:
    """Return the unit, the start, the length and the shape of each row, one after the other."""
    found = []
    for number, slot in pairs:
        unit, start, block = arenas.blocks[number]
        layouts = columns(block.schema, np.frombuffer(block.dims, "<i8"), block.rows)
        (layout,) = [layout for layout in layouts if layout.spec.name == name]
        starts, lengths = layout.locate(0, np.array([slot]))
        shape = layout.row_shapes(0, np.array([slot]))[0].tolist()
        found.append((unit, start + int(starts[0]), int(lengths[0]), tuple(size for size in shape if size >= 0)))
    return found


def check(rows: LocatedRows, wanted: list[Row], arenas: Arenas) -> None:
    """Compare everything that is known of rows."""
    units, starts, lengths, shapes = (column.tolist() for column in rows.each())
    sizes = [tuple(size for size in shape if size >= 0) for shape in shapes]
    assert list(zip(units, starts, lengths, sizes, strict=True)) == wanted
    assert list(rows.places()) == [row[:3] for row in wanted]
    its = {row[3] for row in wanted}
    assert rows.common_shape() == (next(iter(its)) if len(its) == 1 else None)
    assert rows.shape in (None, rows.common_shape())
    joined = b"".join(arenas.memory(unit)[start : start + length].tobytes() for unit, start, length, _ in wanted)
    assert rows.gather_bytes().tobytes() == joined
    pieces = zip(*(column.tolist() for column in rows.pieces()), strict=True)
    assert b"".join(arenas.memory(unit)[start : start + nbytes].tobytes() for unit, start, nbytes in pieces) == joined
    if rows.run is not None:
        unit, start, nbytes = rows.run
        assert arenas.memory(unit)[start : start + nbytes].tobytes() == joined


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=5), st.sets(st.sampled_from(KINDS))
)
@differential(60)
def test_any_rows(pairs: list[tuple[int, int]], names: set[str]) -> None:
    arenas = of_every_kind()
    found = locate_rows(arenas.reply(pairs, sorted(names) or KINDS), arenas.memory)
    for name, rows in found.items():
        check(rows, expected(arenas, pairs, name), arenas)


@given(st.integers(0, 1), st.integers(0, 5), st.integers(1, 6), st.sets(st.sampled_from(KINDS), min_size=1))
@differential(60)
def test_rows_one_after_the_other_in_one_block(block: int, first: int, count: int, names: set[str]) -> None:
    arenas = of_every_kind()
    pairs = [(block, slot) for slot in range(first, min(first + count, 6))]
    found = locate_rows(arenas.reply(pairs, sorted(names)), arenas.memory)
    assert set(found) == names
    for name, rows in found.items():
        assert (rows.run is None) == (name == "mixed")
        check(rows, expected(arenas, pairs, name), arenas)


@given(st.data())
@differential(60)
def test_rows_of_blocks_of_one_layout(data: st.DataObject) -> None:
    blocks, rows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    arenas = of_one_layout(blocks, rows)
    pairs = st.tuples(st.integers(0, blocks - 1), st.integers(0, rows - 1))
    each = [(block, 0) for block in range(blocks)]
    wanted = data.draw(st.one_of(st.just(each), st.lists(pairs, min_size=1, max_size=8)))
    for name, found in locate_rows(arenas.reply(wanted), arenas.memory).items():
        assert found.shape == FIELDS[name][1]
        check(found, expected(arenas, wanted, name), arenas)


def test_fields_of_several_puts() -> None:
    arenas = Arenas()
    arenas.write(encode_columns({"x": torch.arange(4)}, 4))
    arenas.write(encode_columns({"y": torch.arange(4) * 2}, 4))
    reply = arenas.reply(fields={"x": [(0, 1), (0, 2)], "y": [(1, 2), (1, 3)]})
    found = locate_rows(reply, arenas.memory)
    assert all(rows.run is not None for rows in found.values())
    table = gather(reply, arenas.memory)
    assert (table["x"].tolist(), table["y"].tolist()) == ([1, 2], [4, 6])


def test_the_distinct_rows_and_a_selection() -> None:
    arenas = of_every_kind()
    pairs = [(1, 2), (0, 3), (1, 2), (0, 0), (0, 3)]
    for name, rows in locate_rows(arenas.reply(pairs, KINDS), arenas.memory).items():
        check(rows.select(np.array([3, 1])), expected(arenas, [pairs[3], pairs[1]], name), arenas)
        distinct = rows.distinct()
        if name == "empty":  # rows without bytes share nothing
            assert distinct is None
            continue
        assert distinct is not None
        kept, slots = distinct
        check(kept.select(np.array(slots)), expected(arenas, pairs, name), arenas)
        assert kept.distinct() is None


def test_a_field_of_which_one_block_is_laid_out_in_another_way() -> None:
    arenas = of_one_layout(2, 1)
    arenas.write(encode_columns({name: torch.zeros(1, 9, dtype=dtype) for name, (dtype, _) in FIELDS.items()}, 1))
    for name, rows in locate_rows(arenas.reply([(0, 0), (2, 0)]), arenas.memory).items():
        check(rows, expected(arenas, [(0, 0), (2, 0)], name), arenas)
