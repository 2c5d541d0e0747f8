"""The arena of an earlier term is read, and nothing in it is changed, whatever its former unit still does."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from transfer_queue.errors import AttachError
from transfer_queue.messages.descriptors import MIRROR
from transfer_queue.messages.storage import OpenSlot, ReadPieces
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.writer_locks import SlotFolder
from transfer_queue.storage.unit import extent_pool
from transfer_queue.storage.unit.extent_pool import MirrorPool, RetiredPool
from transfer_queue.storage.unit.storage_unit import StorageUnit

SIZE = 16 * GRANULE


@pytest.fixture
def former(tmp_path: Path) -> MirrorPool:
    """The pool of the former unit, which has leased three extents."""
    pool = MirrorPool(Arena.create(tmp_path / "mirror-1-ab" / "unit-0", SIZE, MIRROR), lambda run, then: None)
    for number in range(3):
        extent = pool.lease(0, GRANULE, 0)
        pool.arena.write(extent.offset, np.full(GRANULE, number + 1, "u1"))
    return pool


def retired(former: MirrorPool, slots: str = "slots") -> StorageUnit:
    return StorageUnit(1, RetiredPool.open(former.folder), SlotFolder(former.folder.parent.parent / slots))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nothing_in_the_arena_is_changed(former: MirrorPool) -> None:
    before = content(former.folder)
    unit = retired(former)
    first, *others = unit.table.leased_extents()
    unit.free([first.number, *(extent.number for extent in others), first.number])
    (report,) = unit.take_reports()
    assert np.frombuffer(report.body.extents, "<i8").tolist() == [1, 2, 3, 1]
    assert not report.body.failed
    assert unit.table.leased_extents() == []
    assert unit.pool.lease(0, GRANULE, 0) is None
    (reply,) = unit.handle("w", 1, 1, OpenSlot("w"), 0.0)
    assert "only read" in str(reply.reply)
    assert not unit.work_ahead()
    unit.tick(1e9)
    unit.check()
    assert content(former.folder) == before
    assert len(RetiredPool.open(former.folder).table.leased_extents()) == 3, "the next unit confirms them again"


def test_the_former_unit_may_go_on(former: MirrorPool) -> None:
    """What it frees and leases changes nothing for the extents that are needed."""
    unit = retired(former)
    first, second, _ = former.table.leased_extents()
    generation = former.generation(second.offset)
    former.free(first)
    again = former.lease(0, GRANULE, 0)
    former.arena.write(again.offset, np.full(GRANULE, 9, "u1"))
    unit.free([first.number])

    def column(value: int) -> bytes:
        return np.array([value], "<i8").tobytes()

    read = ReadPieces(1, column(second.offset), column(GRANULE), column(second.offset), column(generation))
    (reply,) = unit.handle("w", 1, 1, read, 0.0)
    assert bytes(reply.payload[0]) == bytes([2]) * GRANULE
    assert (former.arena.memory[again.offset : again.offset + GRANULE] == 9).all(), "its space was not given back"
    former.check()


def test_the_arena_is_removed_with_its_folders(former: MirrorPool) -> None:
    pool = RetiredPool.open(former.folder)
    pool.remove()
    assert not former.folder.parent.exists()
    assert pool.arena.memory[:GRANULE].tolist() == [1] * GRANULE, "a reader that has mapped it still reads it"


def test_an_arena_that_cannot_be_read_is_refused(former: MirrorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent_pool, "REOPEN_PAUSE", 0.0)
    (former.folder / "generations").unlink()
    with pytest.raises(AttachError, match="generations"):
        RetiredPool.open(former.folder)


def test_a_table_that_changes_while_it_is_read_is_read_again(
    former: MirrorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = former.folder.with_name("away")
    shutil.move(former.folder / "generations", away)
    monkeypatch.setattr(extent_pool.time, "sleep", lambda seconds: shutil.move(away, former.folder / "generations"))
    assert len(RetiredPool.open(former.folder).table.leased_extents()) == 3
