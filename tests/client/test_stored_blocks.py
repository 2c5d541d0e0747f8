"""Blocks of checkpoints in an external store: read in pieces, written whole, however they are cut."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.client.checkpoint import block_file, checkpoint_data
from transfer_queue.client.checkpoint.block_file import BlockFile, Mapped, space_of_blocks, write_blocks
from transfer_queue.client.data import store_io
from transfer_queue.client.data.store_io import StoreAllocator, StoredBlocks
from transfer_queue.errors import CheckpointError, UnitLostError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.reports.unit_reports import BlockMissing
from transfer_queue.net.calls import Call, Request, Work
from transfer_queue.net.session import Session, Target
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.protocols import Bytes, Reserved
from transfer_queue.storage.stores.base import Piece, Store

UNIT = UnitInfo(0, "", "", "boot")


class Memory(Store):
    """Keeps blocks in a dict, and how many bytes each read was of."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.reads: list[int] = []

    def write(self, key: str, data: Bytes, within: float) -> None:
        assert key not in self.held
        self.held[key] = data.tobytes()

    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        self.reads.append(len(into))
        for key, start, length, at in pieces:
            if key in self.held:
                into[at : at + length] = np.frombuffer(self.held[key], np.uint8)[start : start + length]
        return self.missing([piece.key for piece in pieces])

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self.held]


def nowhere(target: Target) -> str:
    raise UnitLostError("there is no unit")


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session("c", b"key", nowhere)
    yield made
    made.close()


SIZES = st.lists(st.sampled_from([0, 1, 63, 64, 1000, 5000, GRANULE - 64, GRANULE, GRANULE + 1, 200_000]), max_size=40)


@given(sizes=SIZES, most=st.sampled_from([1000, 4096, 100_000, 1 << 24]), segment=st.sampled_from([1 << 16, 1 << 23]))
def test_what_is_loaded_is_saved_again(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], most: int, segment: int
) -> None:
    """Out of an arena into a file, into a store, into another file: the same bytes, never many at once."""
    folder, store = tmp_path_factory.mktemp("blocks"), Memory()
    nbytes = np.array(sizes, "i8")
    taken = space_of_blocks(nbytes)
    numbers, units, offset = np.arange(len(sizes)) + 1, np.zeros(len(sizes), "i8"), np.cumsum(taken) - taken
    memory = np.random.default_rng(1).integers(0, 256, int(taken.sum()) + 64, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_io, "MAX_READ", most)
        patch.setattr(block_file, "SEGMENT", segment)
        write_blocks(folder / "one", "here", numbers, units, offset, nbytes, lambda unit: Mapped(memory))
        loaded = load(folder / "one", store)
        blocks = StoredBlocks(Session("c", b"key", nowhere), store, UNIT, 1.0)
        where = loaded["offset"]
        write_blocks(folder / "two", "there", loaded["number"], loaded["unit"], where, nbytes, lambda unit: blocks)
    assert all(read < most + 64 for read in store.reads)
    assert contents(folder / "two") == [memory[at : at + n].tobytes() for at, n in zip(offset, nbytes)]
    keys = where // GRANULE
    for key in np.unique(keys):
        beside = nbytes[keys == key]
        assert len(beside) == 1 or (beside < GRANULE).all()


def load(path: Path, store: Store) -> checkpoint_data.Columns:
    """As a client does; each piece in an extent of its own."""
    with BlockFile(path) as file:
        source = checkpoint_data.block_sources([file], None)
        piece, within, sizes = checkpoint_data.layout_pieces(source, is_external=True)
        reserved = [Reserved(0, n, n * GRANULE, 1, size, size) for n, size in enumerate(sizes, 1)]
        spaces = [[StoreAllocator(store, UNIT, place, place.nbytes, 1.0)] for place in reserved]
        checkpoint_data.copy_blocks(source, piece, within, spaces)  # type: ignore[arg-type]
        (placed,) = checkpoint_data.block_locations(source, piece, within, reserved)
        return placed


def contents(path: Path) -> list[bytes]:
    """The blocks in a file, by number."""
    with BlockFile(path) as file:
        source = checkpoint_data.block_sources([file], None)
        whole = np.zeros(file.index.end, np.uint8)
        zeros = np.zeros(len(source.number), "i8")
        checkpoint_data.copy_blocks(source, zeros, source.position, [[whole]])
        found = {
            number: whole[at : at + length].tobytes()
            for number, at, length in zip(source.number.tolist(), source.position.tolist(), source.nbytes.tolist())
        }
    return [found[number] for number in sorted(found)]


def test_what_this_node_misses_is_read_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit, which finds the block, lets the store write it again."""
    store = Memory()
    asked: list[object] = []

    def run(session: Session, operation: Generator[Call, AnyReply, bool]) -> bool:
        try:
            call = next(operation)
            while True:
                if isinstance(call, Work):
                    call.function()
                elif isinstance(call, Request):
                    asked.append(call.body)
                    store.held["tq/boot/1"] = bytes(range(100))
                call = operation.send(Done(False))
        except StopIteration as stop:
            return bool(stop.value)

    monkeypatch.setattr(store_io, "run_blocking", run)
    blocks = StoredBlocks(session, store, UNIT, 1.0)
    (((found,)),) = blocks.pieces(np.array([GRANULE]), np.array([100]))
    assert bytes(found[:100]) == bytes(range(100))
    assert asked == [BlockMissing(0, np.array([1], "<i8").tobytes())]


def test_what_is_gone_is_told(session: Session) -> None:
    store = Memory()
    store.held["tq/boot/1"] = bytes(100)
    blocks = StoredBlocks(session, store, UNIT, 1.0)
    with pytest.raises(CheckpointError, match="blocks of the checkpoint are missing in the store"):
        list(blocks.pieces(np.array([GRANULE, 2 * GRANULE]), np.array([100, 100])))
