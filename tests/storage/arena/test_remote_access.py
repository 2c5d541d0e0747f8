"""What a unit reads and writes for clients on other nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from transfer_queue.errors import InvalidArgumentError, ProtocolError, UnitLostError
from transfer_queue.messages.storage import ReadPieces, WriteBytes
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE, LeasedExtent
from transfer_queue.storage.arena.remote_access import MAX_COPIED, MAX_PIECES, read_pieces, write_bytes

HELD = 4 * GRANULE


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena.create(tmp_path / "arena", 256 << 20)
    made.grow(HELD)
    made.memory[:HELD] = np.arange(HELD, dtype=np.uint64).astype(np.uint8)
    yield made
    made.close()


def column(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def wanted(starts: list[int], lengths: list[int], offset: int = 0, generation: int | None = None) -> ReadPieces:
    known = () if generation is None else (generation,)
    return ReadPieces(0, column(*starts), column(*lengths), column(*(offset for _ in known)), column(*known))


def test_pieces_are_in_order_and_large_ones_are_not_copied(arena: Arena) -> None:
    views = read_pieces(arena, wanted([GRANULE, 0], [GRANULE, 2 * GRANULE]))
    assert [bytes(view) for view in views] == [
        bytes(arena.memory[GRANULE : 2 * GRANULE]),
        bytes(arena.memory[: 2 * GRANULE]),
    ]
    arena.memory[GRANULE] ^= 0xFF
    assert views[0][0] == arena.memory[GRANULE]


def test_many_small_pieces_are_copied_together(arena: Arena) -> None:
    starts = list(range(0, 64 * 50, 64))[::-1]
    views = read_pieces(arena, wanted(starts, [10] * len(starts)))
    assert len(views) == 1
    assert bytes(views[0]) == b"".join(bytes(arena.memory[start : start + 10]) for start in starts)


def test_other_blocks_are_not_read(arena: Arena) -> None:
    now = arena.generation(0)
    assert read_pieces(arena, wanted([0], [8], 0, now)) is not None
    assert read_pieces(arena, wanted([], [], 0, now)) == []
    arena.bump(0, GRANULE)
    assert read_pieces(arena, wanted([0], [8], 0, now)) is None
    assert read_pieces(arena, wanted([], [], 0, now)) is None


def test_holes_are_not_touched(arena: Arena) -> None:
    assert read_pieces(arena, wanted([arena.held - 8], [16])) is None
    arena.punch(GRANULE, GRANULE)
    assert read_pieces(arena, wanted([GRANULE - 8], [16])) is None
    assert read_pieces(arena, wanted([GRANULE - 8], [8])) is not None
    assert read_pieces(arena, wanted([2 * GRANULE], [8])) is not None


@pytest.mark.parametrize(
    ("start", "length"), [(-1, 8), (0, 0), (0, -5), (256 << 20, 1), (2**62, 2**62), (0, 2**63 - 1)]
)
def test_bytes_outside_of_the_arena_are_not_read(arena: Arena, start: int, length: int) -> None:
    with pytest.raises(ProtocolError, match="beyond the arena"):
        read_pieces(arena, wanted([start], [length]))


def test_inconsistent_requests_are_refused(arena: Arena) -> None:
    with pytest.raises(ProtocolError):
        read_pieces(arena, ReadPieces(0, bytes(7), bytes(7), b"", b""))
    with pytest.raises(ProtocolError):
        read_pieces(arena, ReadPieces(0, bytes(8), bytes(16), b"", b""))
    with pytest.raises(InvalidArgumentError, match="in parts"):
        read_pieces(arena, wanted([0] * (MAX_PIECES + 1), [1] * (MAX_PIECES + 1)))
    many = MAX_COPIED // 1024 + 1
    with pytest.raises(InvalidArgumentError, match="in parts"):
        read_pieces(arena, wanted([0] * many, [1024] * many))


def test_bytes_are_written_into_their_extent_and_nowhere_else(arena: Arena) -> None:
    extent = LeasedExtent(5, GRANULE, GRANULE, 3)
    payload = memoryview(b"written")
    write_bytes(arena, extent, WriteBytes(3, 5, GRANULE + 64, 0), payload)
    assert bytes(arena.memory[GRANULE + 64 : GRANULE + 71]) == b"written"
    for offset in (GRANULE - 1, 2 * GRANULE - 6, 0, -1):
        with pytest.raises(ProtocolError, match="not within"):
            write_bytes(arena, extent, WriteBytes(3, 5, offset, 0), payload)
    for gone in (None, LeasedExtent(5, GRANULE, GRANULE, 4)):
        with pytest.raises(UnitLostError, match="write it again"):
            write_bytes(arena, gone, WriteBytes(3, 5, GRANULE, 0), payload)
