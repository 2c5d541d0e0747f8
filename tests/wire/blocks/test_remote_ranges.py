"""Blocks that lie elsewhere: which bytes are brought, and that rows come out of them as they would out of the arena."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import ProtocolError
from transfer_queue.messages.descriptors import Blocks, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.encode import encode_columns
from transfer_queue.wire.blocks.gather import gather
from transfer_queue.wire.blocks.remote_ranges import HERE, find_remote

ARENA = 1 << 16


def block_at(arena: np.ndarray, offset: int, rows: int, seed: int) -> tuple[int, object]:
    """Writes a block of two fields; its length and what describes it."""
    generator = np.random.default_rng(seed)
    columns = {
        "a": torch.from_numpy(generator.integers(0, 1000, (rows, 3))),
        "b": torch.from_numpy(generator.random((rows, 2))),
    }
    encoded = encode_columns(columns, rows, allow_pickle=False)
    encoded.write_into(arena[offset : offset + encoded.nbytes])
    return encoded.nbytes, encoded


@st.composite
def lookups(draw: st.DrawFn) -> tuple[dict[int, np.ndarray], LookupReply]:
    """Arenas of three units with blocks in them, and a lookup of some of their rows, in any order."""
    arenas = {unit: np.random.default_rng(unit).integers(0, 255, ARENA, dtype=np.uint8) for unit in range(3)}
    places, ends = [], dict.fromkeys(arenas, 0)
    for seed in range(draw(st.integers(1, 8))):
        unit, rows, gap = draw(st.integers(0, 2)), draw(st.integers(1, 12)), draw(st.sampled_from([0, 64, 8192]))
        offset = ends[unit] + gap
        nbytes, encoded = block_at(arenas[unit], offset, rows, seed)
        ends[unit] = offset + -(-nbytes // 64) * 64
        places.append((unit, offset, nbytes, rows, encoded))
    rows_of = [(block, row) for block, place in enumerate(places) for row in range(place[3])]
    picked = draw(st.lists(st.sampled_from(rows_of), min_size=1, max_size=30))
    first = places[0][4]
    blocks = Blocks(
        *(np.array([place[n] for place in places], kind).tobytes() for n, kind in ((0, "<i4"), (1, "<i8"))),
        np.ones(len(places), "<i8").tobytes(),
        *(np.array([place[n] for place in places], kind).tobytes() for n, kind in ((2, "<i8"), (3, "<i4"))),
        bytes(4 * len(places)), bytes(4 * len(places)), [first.schema], [first.dims],
    )  # fmt: skip
    columns = [np.array(column, "<i4").tobytes() for column in zip(*picked, strict=True)]
    fields = draw(st.sampled_from([["a", "b"], ["b"], ["a"]]))
    types = [FieldType(spec.name, spec.kind, spec.dtype, 1, [3 if spec.name == "a" else 2], 0, False)
             for spec in first.schema if spec.name in fields]  # fmt: skip
    return arenas, LookupReply(len(picked), types, blocks, [Placement(fields, *columns)])


@given(lookups(), st.sets(st.integers(0, 2)))
def test_rows_are_those_of_the_arenas(made: tuple[dict[int, np.ndarray], LookupReply], away: set[int]) -> None:
    arenas, reply = made
    wanted = gather(reply, arenas.__getitem__, "dense")
    found = find_remote(reply, away)
    named = set(np.frombuffer(reply.blocks.unit, "<i4").tolist())
    if found is None:
        assert not named & away
        return
    buffer = np.full(found.nbytes, 0xEE, np.uint8)
    pieces = found.pieces(arenas.__getitem__)
    taken = np.zeros(found.nbytes, bool)
    for each in pieces:
        assert each.unit in away
        assert (np.diff(each.starts) > 0).all()
        for start, length, at in zip(each.starts.tolist(), each.lengths.tolist(), each.at.tolist(), strict=True):
            buffer[at : at + length] = arenas[each.unit][start : start + length]
            assert not taken[at : at + length].any()
            taken[at : at + length] = True
    got = gather(found.reply, lambda unit: buffer if unit == HERE else arenas[unit], "dense")
    assert all(torch.equal(got[name], wanted[name]) for name in list(wanted.keys()))
    assert int(found.needed_bytes(pieces).sum()) == int(taken.sum()) == sum(each.nbytes for each in pieces)


def test_a_whole_block_comes_as_one_piece_and_is_not_copied_again() -> None:
    arena = np.zeros(ARENA, np.uint8)
    nbytes, encoded = block_at(arena, 4096, 12, 1)
    blocks = Blocks(
        *(np.array([value], kind).tobytes() for value, kind in ((7, "<i4"), (4096, "<i8"), (1, "<i8"))),
        *(np.array([value], kind).tobytes() for value, kind in ((nbytes, "<i8"), (12, "<i4"), (0, "<i4"), (0, "<i4"))),
        [encoded.schema], [encoded.dims],
    )  # fmt: skip
    types = [FieldType(spec.name, spec.kind, spec.dtype, 1, None, 0, False) for spec in encoded.schema]
    rows = np.arange(12, dtype="<i4").tobytes()
    reply = LookupReply(12, types, blocks, [Placement(["a", "b"], bytes(48), rows)])
    found = find_remote(reply, {7})
    assert found is not None
    (piece,) = found.pieces(lambda unit: arena)
    assert len(piece.starts) == 1
    assert int(piece.starts[0]) == 4096
    buffer = np.zeros(found.nbytes, np.uint8)
    buffer[: piece.nbytes] = arena[4096 : 4096 + piece.nbytes]
    got = gather(found.reply, lambda unit: buffer)
    address = int(buffer.__array_interface__["data"][0])
    assert {address <= got[name].values().data_ptr() < address + len(buffer) for name in ("a", "b")} == {True}


def test_columns_of_different_lengths_are_refused() -> None:
    blocks = Blocks(bytes(8), bytes(8), bytes(16), bytes(16), bytes(8), bytes(8), bytes(8), [[]], [b""])
    with pytest.raises(ProtocolError, match="differ in length"):
        find_remote(LookupReply(0, [], blocks, []), {0})
