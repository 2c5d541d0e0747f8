"""Which space an arena returns to its file system, and which it keeps."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from test_unit import Writer

from transfer_queue.storage.arena import free_space_reclaim
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.free_space_reclaim import PERIOD
from transfer_queue.storage.unit import extent_pool
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.testing.simulated_locks import HoldsHere, SimulatedSlots

GRANULES = 64
RESERVE = 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_space_reclaim, "RESERVE", RESERVE * GRANULE)
    monkeypatch.setattr(free_space_reclaim, "STEP", 4 * GRANULE)
    monkeypatch.setattr(extent_pool, "SEGMENT", 4 * GRANULE)  # grown ahead of need: as far as two granules are free


@pytest.fixture
def unit(tmp_path: Path, slots: SimulatedSlots) -> StorageUnit:
    return StorageUnit(0, ArenaPool(Arena.create(tmp_path / "arena", GRANULES * GRANULE)), slots)


@pytest.fixture
def writer(unit: StorageUnit, slots: SimulatedSlots) -> Writer:
    return Writer(unit, slots, "w", 1).locked()


def allocated(unit: StorageUnit) -> int:
    """Return the number of granules that the file system has allocated for the file."""
    return os.stat(unit.pool.arena.folder / "arena").st_blocks * 512 // GRANULE


def rest(unit: StorageUnit, now: float, periods: int) -> float:
    """Let this many periods pass without requests. Returns the time of their end."""
    for _ in range(periods):
        now += PERIOD
        unit.tick(now)
        while unit.work_ahead():
            unit.check()
    unit.check()
    return now


def test_cleared_space_is_returned_to_the_file_system(unit: StorageUnit, writer: Writer) -> None:
    leases = [writer.lease(4) for _ in range(16)]
    unit.pool.arena.memory[:] = 7
    assert allocated(unit) == GRANULES
    now = rest(unit, 0.0, 3)
    assert allocated(unit) == GRANULES  # all of it is leased
    unit.free([lease.extent for lease in leases[1:]])
    now = rest(unit, now, 1)
    assert allocated(unit) == GRANULES  # it may be wanted again
    rest(unit, now, 2)
    assert allocated(unit) == 4 + RESERVE
    status = unit.pool.status()
    assert (status.held, status.leased, status.free) == ((4 + RESERVE) * GRANULE, 4 * GRANULE, RESERVE * GRANULE)
    assert (unit.pool.arena.memory[: 4 * GRANULE] == 7).all()
    assert unit.next_deadline() is None  # nothing is left to do


def test_space_that_is_used_in_each_period_is_kept(unit: StorageUnit, writer: Writer) -> None:
    """A workload fills the arena in each period, and empties it: no page is touched for the first time again."""
    now = 0.0
    for _ in range(8):
        leases = [writer.lease(4, now=now) for _ in range(16)]
        unit.pool.arena.memory[:] = 7
        unit.free([lease.extent for lease in leases])
        now = rest(unit, now, 1)
        assert unit.pool.arena.hole_bytes == 0
    assert allocated(unit) == GRANULES


def test_space_that_was_returned_is_leased_again(unit: StorageUnit, writer: Writer) -> None:
    everything = writer.lease(GRANULES)
    unit.free([everything.extent])
    now = rest(unit, 0.0, 3)
    assert allocated(unit) == RESERVE
    first = writer.lease(RESERVE - 1, now=now)
    assert first.offset == 0
    assert unit.pool.arena.hole_bytes == (GRANULES - RESERVE) * GRANULE  # nothing had to be filled for it
    big = writer.lease(20, now=now)
    assert big.offset == (RESERVE - 1) * GRANULE
    assert allocated(unit) >= RESERVE - 1 + 20
    view = unit.pool.arena.view(big.offset, big.length)
    view[:] = 9
    assert (view == 9).all()
    unit.check()


def test_resident_space_is_leased_before_lower_holes(unit: StorageUnit, writer: Writer) -> None:
    low, high = writer.lease(GRANULES - 12), writer.lease(12)
    unit.free([low.extent])
    now = rest(unit, 0.0, 3)
    assert unit.pool.arena.holes[RESERVE : GRANULES - 12].all()
    unit.free([high.extent])
    assert writer.lease(10, now=now).offset == (GRANULES - 12) * GRANULE


def test_an_idle_unit_fills_holes_before_it_grows_the_arena(unit: StorageUnit, writer: Writer) -> None:
    everything = writer.lease(GRANULES)
    unit.free([everything.extent])
    now = rest(unit, 0.0, 3)
    writer.lease(RESERVE, now=now)
    assert unit.pool.trimmer.resident == 0
    while unit.work_ahead():
        unit.check()
    assert unit.pool.trimmer.resident >= 2 * GRANULE
    assert not unit.pool.arena.holes[RESERVE : RESERVE + 2].any()


def test_holes_that_cannot_be_filled_are_an_error_at_the_put(
    small_tmpfs: Path, slots: SimulatedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If other programs took the returned space, a put fails, and the rest of the space is leased."""
    unit = StorageUnit(0, ArenaPool(Arena.create(small_tmpfs / "arena")), slots)
    writer = Writer(unit, slots, "w", 1).locked()
    parts = [writer.lease(16) for _ in range(12)]
    unit.free([part.extent for part in parts[1:]])
    now = rest(unit, 0.0, 3)
    assert allocated(unit) == 16 + RESERVE
    other = small_tmpfs / "other"
    with pytest.raises(OSError, match="No space"):
        other.write_bytes(bytes(GRANULES * 16 * GRANULE))
    assert unit._lease_own(32 * GRANULE) is None
    lease = writer.lease(RESERVE, now=now)
    unit.pool.arena.view(lease.offset, lease.length)[:] = 1
    assert unit._lease_own(GRANULE) is None
    unit.check()
    other.unlink()
    assert unit._lease_own(32 * GRANULE) is not None
    unit.check()


def test_a_restarted_unit_knows_the_holes(unit: StorageUnit, writer: Writer, slots: SimulatedSlots) -> None:
    keeps = writer.lease(4)
    unit.free([writer.lease(GRANULES - 4).extent])
    rest(unit, 0.0, 3)
    holes = unit.pool.arena.holes.copy()
    folder = unit.pool.arena.folder
    unit.pool.arena.close()
    again = StorageUnit(0, ArenaPool(Arena.reopen(folder)), slots)
    assert np.array_equal(again.pool.arena.holes, holes)
    assert holes.sum() == GRANULES - 4 - RESERVE
    again.check()
    assert again.table.get(keeps.extent) is not None
    unit.pool.arena = again.pool.arena  # whose files the fixtures' owner closes


def test_a_file_system_without_holes_keeps_all_space(
    unit: StorageUnit, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit.pool.arena, "_mapping", Unwilling())
    unit.free([writer.lease(GRANULES).extent])
    now = rest(unit, 0.0, 3)
    assert unit.pool.arena.hole_bytes == 0
    assert not unit.pool.arena.extents.holes().any()
    assert writer.lease(GRANULES, now=now).offset == 0


class Unwilling:
    def madvise(self, advice: int, start: int, length: int) -> None:
        raise OSError(95, "not supported")


def test_random_leases_and_returns_keep_all_bytes(unit: StorageUnit, writer: Writer) -> None:
    """Every extent keeps its bytes, whatever space next to it is returned."""
    draw = random.Random(0)
    leases, now = {}, 0.0
    for step in range(400):
        what = draw.random()
        if what < 0.45 and unit.table.free_bytes >= 8 * GRANULE:
            try:
                lease = writer.lease(draw.randint(1, 6), now=now)
            except AssertionError:  # in pieces that are too small
                continue
            unit.pool.arena.view(lease.offset, lease.length)[:] = lease.extent % 251
            leases[lease.extent] = lease
        elif what < 0.8 and leases:
            chosen = draw.sample(sorted(leases), min(len(leases), draw.randint(1, 4)))
            unit.free(chosen)
            for extent in chosen:
                del leases[extent]
        else:
            now = rest(unit, now, draw.randint(1, 3))
        if step % 20 == 0:
            unit.check()
            for lease in leases.values():
                assert (unit.pool.arena.view(lease.offset, lease.length) == lease.extent % 251).all()
            assert allocated(unit) <= (unit.pool.arena.held - unit.pool.arena.hole_bytes) // GRANULE
    assert unit.pool.arena.hole_bytes > 0


def test_space_whose_pages_a_device_keeps_stays(unit: StorageUnit, writer: Writer) -> None:
    """The device would go on to read the returned pages."""

    class KeptHere(HoldsHere):
        def is_registered(self, offset: int, length: int) -> bool:
            return offset <= 40 * GRANULE < offset + length

    unit.pool.arena.holds.close()
    unit.pool.arena.holds = KeptHere(unit.pool.arena)
    leases = [writer.lease(4) for _ in range(16)]
    unit.pool.arena.memory[:] = 7
    unit.free([lease.extent for lease in leases])
    rest(unit, 0.0, 4)
    assert not unit.pool.arena.holes[40]
    assert unit.pool.arena.memory[40 * GRANULE] == 7
    assert unit.pool.arena.holes[60]
