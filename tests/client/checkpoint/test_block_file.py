"""Files of blocks: what is written is read, and what is damaged or foreign is told."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.client.checkpoint import block_file
from transfer_queue.client.checkpoint.block_file import BlockFile, Mapped, space_of_blocks, write_blocks
from transfer_queue.errors import CheckpointError

MEMORY = {unit: np.random.default_rng(unit).integers(0, 256, 1 << 16, np.uint8) for unit in (0, 3)}


def write(path: Path, blocks: list[tuple[int, int, int, int]], origin: str = "here") -> int:
    """blocks: (number, unit, offset, nbytes) each."""
    columns = np.array(blocks, "i8").reshape(-1, 4).T
    return write_blocks(path, origin, columns[0], columns[1], columns[2], columns[3], lambda unit: Mapped(MEMORY[unit]))


def contents(path: Path) -> dict[int, bytes]:
    """The bytes of each block in a file, by number."""
    found = {}
    with BlockFile(path) as file:
        columns = [file.index.column(name).tolist() for name in ("number", "position", "nbytes")]
        blocks = list(zip(*columns, strict=True))
        for which, start, length, checksum in file.index.segments():
            read = np.empty(length, np.uint8)
            file.read(read, start, checksum)
            for number, position, nbytes in blocks[which]:
                found[number] = read[position - start : position - start + nbytes].tobytes()
    return found


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Blocks of two units, with and without gaps between them, under numbers in any order."""
    blocks = []
    for unit in MEMORY:
        offset = 0
        for _ in range(draw(st.integers(0, 12))):
            nbytes = draw(st.integers(0, 900))
            offset += 64 * draw(st.sampled_from([0, 0, 0, 1, 5]))
            blocks.append((unit, offset, nbytes))
            offset += int(space_of_blocks(np.array([nbytes]))[0])
    numbers = draw(st.permutations(range(1, len(blocks) + 1)))
    return draw(st.permutations([(number, *block) for number, block in zip(numbers, blocks, strict=True)]))


@settings(max_examples=60, deadline=None)
@given(blocks=layouts(), segment=st.sampled_from([64, 256, 1024, 1 << 20]), pieces=st.sampled_from([1, 2, 512]))
def test_what_is_written_is_read(tmp_path_factory, blocks, segment, pieces):
    """Whatever lies beside whatever, however it is cut into segments."""
    path = tmp_path_factory.mktemp("blocks") / "one.blocks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_file, "SEGMENT", segment)
        patch.setattr(block_file, "_PIECES", pieces)
        assert write(path, blocks) == path.stat().st_size
    wanted = {number: MEMORY[unit][offset : offset + nbytes].tobytes() for number, unit, offset, nbytes in blocks}
    assert contents(path) == wanted


def test_origin(tmp_path):
    """Whose numbers they are is told."""
    write(tmp_path / "a", [(7, 0, 64, 100)], "of-another")
    with BlockFile(tmp_path / "a") as file:
        assert file.index.origin == "of-another"


def test_never_over_another(tmp_path):
    """A file that is there is not written over."""
    write(tmp_path / "a", [(7, 0, 64, 100)])
    with pytest.raises(FileExistsError):
        write(tmp_path / "a", [(8, 0, 64, 100)])
    assert list(contents(tmp_path / "a")) == [7]


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"x" * 4096, bytes(4096)])
def test_foreign(tmp_path, content):
    """Another program's file is no file of blocks, and the error says so."""
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a file of blocks"):
        BlockFile(tmp_path / "a")


def test_another_version(tmp_path, monkeypatch):
    """A later version's file is refused by its version."""
    monkeypatch.setattr(block_file, "VERSION", 2)
    write(tmp_path / "a", [(1, 0, 0, 10)])
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="version 2, and this release reads version 1"):
        BlockFile(tmp_path / "a")


def test_every_bit_counts(tmp_path):
    """One flipped byte anywhere is noticed, but for the padding behind a head that nothing reads."""
    path = tmp_path / "a"
    write(path, [(1, 0, 0, 100), (2, 3, 640, 64)])
    whole = path.read_bytes()
    unread = range(struct.calcsize("<8sIIQQI"), block_file.ALIGNMENT)
    for at in set(range(len(whole))) - set(unread):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(CheckpointError):
            contents(path)


def test_cut_short(tmp_path):
    """A file that lost its end is noticed."""
    path = tmp_path / "a"
    write(path, [(1, 0, 0, 5000)])
    whole = path.read_bytes()
    for length in range(0, len(whole), 100):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            contents(path)
