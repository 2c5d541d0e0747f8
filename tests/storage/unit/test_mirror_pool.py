"""The arena of a mirror: a copy is reported when the disk has it, and some of the disk is left to the journal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer_queue.messages.descriptors import MIRROR, Blocks
from transfer_queue.messages.reports.unit_reports import Move
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.writer_locks import SlotFolder
from transfer_queue.storage.unit.extent_pool import MAX_SPARED, MirrorPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.storage.unit.unit_effects import Effect

SIZE = 16 * GRANULE


class Disk:
    """Stands in for the thread that waits for the disk: `waits` are begun and not done."""

    def __init__(self) -> None:
        self.waits: list[tuple[Callable[[], Any], Callable[[Any], list[Effect]]]] = []

    def begin(self, run: Callable[[], Any], then: Callable[[Any], list[Effect]]) -> None:
        self.waits.append((run, then))

    def end(self) -> list[Effect]:
        """Wait for the disk, and return what the unit then does."""
        ((run, then),) = self.waits
        self.waits.clear()
        try:
            outcome = run()
        except OSError as error:
            outcome = error
        return then(outcome)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def unit(tmp_path: Path, disk: Disk) -> StorageUnit:
    arena = Arena.create(tmp_path / "mirror", SIZE, MIRROR)
    return StorageUnit(1, MirrorPool(arena, disk.begin), SlotFolder(tmp_path / "slots"))


@pytest.fixture
def source(tmp_path: Path) -> Arena:
    arena = Arena.create(tmp_path / "memory", SIZE)
    arena.grow(SIZE)
    arena.memory[:SIZE] = np.random.default_rng(1).integers(0, 256, SIZE, "u1")
    arena.set_generation(0, SIZE)
    return arena


def order(source: Arena, sizes: list[int]) -> Move:
    """Return the order to copy blocks that follow one another."""
    offsets = np.cumsum([0, *sizes[:-1]])

    def column(values: Any, kind: str) -> bytes:
        return np.broadcast_to(np.array(values, kind), len(sizes)).tobytes()

    blocks = Blocks(
        column(7, "<i4"), column(offsets, "<i8"), column(source.generation(0), "<i8"), column(sizes, "<i8"),
        column(1, "<i4"), column(0, "<i4"), column(0, "<i4"), [[]], [b""],
    )  # fmt: skip
    return Move(1, blocks, {7: str(source.folder)})


def carry_out(unit: StorageUnit, move: Move) -> None:
    """Let the unit copy; it reports nothing yet."""
    assert unit.move(move) == []
    while unit._moving is not None:
        assert unit.tick(0.0) == []


def test_a_copy_is_reported_when_the_disk_has_it(unit: StorageUnit, disk: Disk, source: Arena) -> None:
    carry_out(unit, order(source, [1000, 70_000, 64]))
    (report,) = disk.end()
    pool = unit.pool
    written = (pool.folder / "arena").read_bytes()
    for at, start, size in zip(
        np.frombuffer(report.body.offsets, "<i8").tolist(), (0, 1000, 71_000), (1000, 70_000, 64), strict=True
    ):
        assert written[at : at + size] == source.memory[start : start + size].tobytes()
    unit.check()


def test_a_disk_that_cannot_write_is_a_failed_order_that_takes_no_space(
    unit: StorageUnit, disk: Disk, source: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out(unit, order(source, [1000]))

    def fail(file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    (report,) = disk.end()
    assert report.body.extent == 0
    assert "Input/output error" in report.body.failed
    assert unit.table.leased_extents() == []
    unit.check()


def test_an_arena_that_leaves_space_for_the_journal_does_not_grow_into_it(
    unit: StorageUnit, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = unit.pool
    assert 0 < pool.arena.spared <= MAX_SPARED
    found = os.statvfs(pool.folder)
    pool.arena.spared = found.f_bavail * found.f_frsize - GRANULE
    assert not pool.grow(8 * GRANULE)


def test_a_unit_that_starts_again_has_the_copies(unit: StorageUnit, disk: Disk, source: Arena, tmp_path: Path) -> None:
    carry_out(unit, order(source, [1000]))
    disk.end()
    pool = unit.pool
    pool.arena.close()
    again = MirrorPool(Arena.reopen(tmp_path / "mirror", MIRROR), disk.begin)
    (extent,) = again.table.leased_extents()
    assert again.view(extent.offset, 1000).tobytes() == source.memory[:1000].tobytes()
