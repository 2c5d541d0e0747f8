"""An arena on disk: blocks that its unit writes do not stay in memory, and no page is made resident in advance."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from transfer_queue.messages.descriptors import DISK, MEMORY, Blocks
from transfer_queue.messages.reports.unit_reports import Move
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE, LeasedExtent
from transfer_queue.storage.unit.extent_pool import DROP_PAUSES, DROPS_A_TURN, ArenaPool, DiskPool
from transfer_queue.system_folder.paths import mount_of

SIZE = 16 * GRANULE


def held(path: Path, offset: int, length: int) -> int:
    """Return how many bytes of this part of a file the kernel has in memory."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), length, offset=offset) as mapping:
        pages = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapping)
        address = ctypes.c_void_p(ctypes.addressof(first))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(length), pages) == 0
        del first
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def move(pool: ArenaPool, source: Arena, offset: int, nbytes: int) -> tuple[LeasedExtent, bytes]:
    """Copy a block of another arena. Returns the extent and its bytes."""

    def column(value: int, kind: str) -> bytes:
        return np.array([value], kind).tobytes()

    blocks = Blocks(
        column(7, "<i4"), column(offset, "<i8"), column(source.generation(offset), "<i8"), column(nbytes, "<i8"),
        column(1, "<i4"), column(0, "<i4"), column(0, "<i4"), [[]], [b""],
    )  # fmt: skip
    mover = pool.begin_move(1, Move(1, blocks, {7: str(source.folder)}), lambda n: pool.lease(0, n, 0))
    while (answer := mover.step()) is None:
        pass
    mover.close()
    assert mover.extent is not None
    (at,) = np.frombuffer(answer.offsets, "<i8").tolist()
    return mover.extent, pool.arena.view(at, nbytes).tobytes()


def test_pages_of_moved_blocks_are_dropped(tmp_path: Path) -> None:
    if mount_of(tmp_path)[0] in ("tmpfs", "ramfs"):
        pytest.skip("the folder of tests is in memory itself")
    source = Arena.create(tmp_path / "memory", SIZE)
    source.grow(SIZE)
    source.memory[:SIZE] = np.random.default_rng(1).integers(0, 256, SIZE, "u1")
    pool = DiskPool(Arena.create(tmp_path / "disk", SIZE, DISK))
    extent, found = move(pool, source, 0, 5 * GRANULE)
    assert found == source.view(0, 5 * GRANULE).tobytes()
    file = os.open(pool.folder / "arena", os.O_RDWR)
    os.fsync(file)  # what its unit does not wait for
    os.close(file)
    now = 100.0
    assert pool.next_deadline() == 0.0
    for pause in DROP_PAUSES:
        pool.begin_period(now)
        due = pool.next_deadline()
        assert due >= now + pause
        now = due
    pool.begin_period(now)
    assert pool.next_deadline() is None or pool.next_deadline() > now  # type: ignore[operator]
    assert held(pool.folder / "arena", extent.offset, extent.length) == 0
    reader = Arena.open(pool.folder)
    assert reader.view(extent.offset, 5 * GRANULE).tobytes() == found, "it is read back"
    assert held(pool.folder / "arena", extent.offset, extent.length) == extent.length
    for arena in (source, pool.arena, reader):
        arena.close()


def test_pages_of_many_extents_are_dropped_in_turns(tmp_path: Path) -> None:
    source = Arena.create(tmp_path / "memory", SIZE)
    source.grow(SIZE)
    pool = DiskPool(Arena.create(tmp_path / "disk", 4 * DROPS_A_TURN * GRANULE, DISK))
    for _ in range(DROPS_A_TURN + 3):
        move(pool, source, 0, 100)
    pool.begin_period(0.0)
    assert pool.next_deadline() == DROP_PAUSES[0]
    pool.begin_period(DROP_PAUSES[0])
    assert pool.next_deadline() == DROP_PAUSES[0], "the rest is next"
    pool.begin_period(DROP_PAUSES[0])
    assert pool.next_deadline() == DROP_PAUSES[0] + DROP_PAUSES[1]
    for arena in (source, pool.arena):
        arena.close()


@pytest.mark.parametrize("tier", [MEMORY, DISK])
def test_only_units_in_memory_prefault(tmp_path: Path, tier: str) -> None:
    """On disk a prefault would write zeros, which would then be in memory."""
    arena = Arena.create(tmp_path / tier, SIZE, tier)
    pool = DiskPool(arena) if tier == DISK else ArenaPool(arena)
    for _ in range(100):
        if not pool.work_ahead(short=False):
            break
    assert (arena.warm > 0) == (tier == MEMORY)
    assert arena.held == SIZE, "space is allocated ahead on both"
    assert pool.status().tier == tier
    arena.close()
    again = Arena.reopen(tmp_path / tier, tier)
    assert again.tier == tier
    again.close()
