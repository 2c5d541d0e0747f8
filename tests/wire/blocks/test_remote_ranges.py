"""Blocks that lie elsewhere: which bytes are brought, and that rows come out of them as they would out of the arena."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import ProtocolError
from transfer_queue.messages.descriptors import Blocks, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.encode import encode_columns
from transfer_queue.wire.blocks.gather import gather
from transfer_queue.wire.blocks.remote_ranges import RangePieces, find_remote

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


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 9))
def test_pieces_are_divided_into_equal_parts(sizes: list[int], count: int) -> None:
    """Each byte is in one part, and comes from and goes to the same places."""
    lengths = np.array(sizes)
    at = np.cumsum(lengths) - lengths
    whole = RangePieces(3, at * 2 + 7, lengths, at * 3)
    count = min(count, whole.nbytes)

    def places(pieces: RangePieces) -> list[tuple[int, int]]:
        columns = zip(pieces.starts.tolist(), pieces.at.tolist(), pieces.lengths.tolist(), strict=True)
        return [(start + n, at + n) for start, at, length in columns for n in range(length)]

    parts = whole.divide(count)
    assert len(parts) == count
    assert {part.unit for part in parts} == {3}
    assert [place for part in parts for place in places(part)] == places(whole)
    assert {part.nbytes - whole.nbytes // count for part in parts} <= {0, 1}
    assert all((part.lengths > 0).all() for part in parts)
