"""Rows of blocks that are laid out alike are where the general way finds them, and invalid replies are left to it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from codec_arenas import Arenas
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.contiguous_rows import equal_rows
from transfer_queue.wire.blocks.encode import encode_columns
from transfer_queue.wire.blocks.gather import gather
from transfer_queue.wire.blocks.row_addressing import locate_rows
from transfer_queue.wire.buffers.copies import gather_equal, gather_pieces

FIELDS = {"a": (torch.int64, (3,)), "b": (torch.uint8, ()), "c": (torch.float32, (2, 2)), "d": (torch.int16, (1,))}


def arenas_with(blocks: int, rows: int) -> Arenas:
    arenas = Arenas()
    for block in range(blocks):
        columns = {
            name: torch.arange(rows * int(np.prod(shape, initial=1))).add(block).to(dtype).reshape(rows, *shape)
            for name, (dtype, shape) in FIELDS.items()
        }
        arenas.write(encode_columns(columns, rows))
    return arenas


@given(st.data())
@differential(100)
def test_rows_are_where_the_general_way_finds_them(data: st.DataObject) -> None:
    blocks, rows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    arenas = arenas_with(blocks, rows)
    pairs = st.tuples(st.integers(0, blocks - 1), st.integers(0, rows - 1))
    each = [(block, 0) for block in range(blocks)]
    reply = arenas.reply(data.draw(st.one_of(st.just(each), st.lists(pairs, min_size=1, max_size=8))))
    found = equal_rows(reply, arenas.memory)
    assert found is not None
    for expected in locate_rows(reply, arenas.memory):
        name = expected.type.name
        assert found[name].type == expected.type
        assert found[name].starts.tolist() == expected.starts.tolist()
        assert {found[name].row} == set(expected.lengths.tolist())
        assert {found[name].shape} == set(map(tuple, expected.shapes.tolist()))
        assert found[name].gather_bytes(arenas.memory).tolist() == expected.gather_bytes(arenas.memory).tolist()


def test_every_row_of_a_get_has_memory_of_its_own() -> None:
    arenas = arenas_with(3, 1)
    values = gather(arenas.reply([(1, 0), (1, 0), (2, 0)]), arenas.memory, "dense")
    values["a"][0] = -1
    assert values["a"].tolist() == [[-1, -1, -1], [1, 2, 3], [2, 3, 4]]
    assert gather(arenas.reply([(1, 0)]), arenas.memory, "dense")["a"].tolist() == [[1, 2, 3]]


def test_blocks_that_are_laid_out_in_other_ways_are_left_to_the_general_way() -> None:
    arenas = arenas_with(2, 1)
    arenas.write(encode_columns({name: torch.zeros(1, 9, dtype=dtype) for name, (dtype, _) in FIELDS.items()}, 1))
    assert equal_rows(arenas.reply([(0, 0), (2, 0)]), arenas.memory) is None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("offset", np.array([0, 1 << 40], "<i8")),
        ("offset", np.array([0, -64], "<i8")),
        ("offset", np.array([0, 2**63 - 1], "<i8")),
        ("nbytes", np.array([64, 0], "<i8")),
        ("nbytes", np.array([64], "<i8")),
        ("rows", np.array([0, 0], "<i4")),
        ("schema", np.array([7, 7], "<i4")),
        ("schema", np.array([-1, -1], "<i4")),
        ("dims", np.array([-1, -1], "<i4")),
        ("unit", np.array([], "<i4")),
    ],
)
def test_blocks_that_are_not_valid_are_left_to_the_general_way(column: str, value: np.ndarray) -> None:
    arenas = arenas_with(2, 1)
    reply = arenas.reply()
    changed = msgspec.structs.replace(reply.blocks, **{column: value.tobytes()})
    assert equal_rows(msgspec.structs.replace(reply, blocks=changed), arenas.memory) is None


@pytest.mark.parametrize(
    ("block", "slot"), [([0, 2], [0, 0]), ([0, -1], [0, 0]), ([0, 1], [0, 1]), ([0, 1], [0, -1]), ([0], [0])]
)
def test_rows_outside_their_blocks_are_left_to_the_general_way(block: list[int], slot: list[int]) -> None:
    arenas = arenas_with(2, 1)
    reply: LookupReply = arenas.reply()
    (placement,) = reply.placements
    placement = msgspec.structs.replace(
        placement, block=np.array(block, "<i4").tobytes(), slot=np.array(slot, "<i4").tobytes()
    )
    assert equal_rows(msgspec.structs.replace(reply, placements=[placement]), arenas.memory) is None


@given(st.lists(st.integers(0, 200), min_size=1, max_size=12), st.integers(1, 300), st.sampled_from([1, 2, 8, 64]))
@differential(100)
def test_pieces_of_one_length_are_those_of_the_general_copy(places: list[int], length: int, step: int) -> None:
    memory = np.random.default_rng(1).integers(0, 255, 200 * step + length, np.uint8)
    starts = np.array(places, np.int64) * step
    general = gather_pieces(memory, starts, np.full(len(starts), length))
    assert gather_equal(memory, starts, length).tolist() == general.tolist()
