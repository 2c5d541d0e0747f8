"""A memory file system that fills up causes errors, but no SIGBUS and no leaks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from transfer_queue.errors import CapacityError
from transfer_queue.messages.storage import (
    ExtentLeaseReply,
    LeaseExtent,
    OpenSlot,
    UnitStatus,
)
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.testing.simulated_locks import SimulatedSlots

MIB = 1 << 20

# Writes every byte of the arena that is held, and reads them back; a SIGBUS would end it with a signal.
WRITER = """
import sys
from pathlib import Path
from transfer_queue.storage.arena.arena import Arena
arena = Arena.open(Path(sys.argv[1]))
for line in sys.stdin:
    start, length, value = map(int, line.split())
    view = arena.view(start, length)
    view[:] = value
    print(int(view.min()), int(view.max()), flush=True)
"""


def allocated(arena: Arena) -> int:
    return (arena.folder / "arena").stat().st_blocks * 512


def used(folder: Path) -> int:
    system = os.statvfs(folder)
    return (system.f_blocks - system.f_bfree) * system.f_frsize


def test_a_full_file_system_can_be_used_again(small_tmpfs: Path, slots: SimulatedSlots, child: Callable) -> None:
    arena = Arena.create(small_tmpfs / "a")
    assert arena.capacity == 16 * MIB
    unit = StorageUnit(0, ArenaPool(arena), slots)
    writer = child(WRITER, str(small_tmpfs / "a"))
    numbers = iter(range(1, 10_000))

    def ask(body: object) -> object:
        [effect] = unit.handle("w", 1, next(numbers), body, 0.0)  # type: ignore[arg-type]
        unit.check()
        return effect.reply

    slot = ask(OpenSlot("w"))
    slots.held.add(slot.lock_path)

    leases: list[ExtentLeaseReply] = []
    while isinstance(reply := ask(LeaseExtent(slot.slot, 1, 3 * MIB)), ExtentLeaseReply):
        leases.append(reply)
    assert reply.kind == "CapacityError"
    status = ask(UnitStatus())
    # the generations and the header take a few pages, so that the last granules cannot be had
    assert 16 * MIB - 2 * GRANULE <= status.held < 16 * MIB
    assert status.held == status.leased == sum(lease.length for lease in leases) == allocated(arena)
    assert used(small_tmpfs) - status.held < GRANULE

    for lease in leases:
        assert writer.ask(f"{lease.offset} {lease.length} 7") == "7 7"
    assert allocated(arena) == status.held

    assert unit.free([lease.extent for lease in leases]) == []
    again = ask(LeaseExtent(slot.slot, 10 * MIB, 10 * MIB))
    assert writer.ask(f"{again.offset} {again.length} 9") == "9 9"
    assert allocated(arena) == status.held == unit.table.held


def test_other_programs_may_use_up_the_space(small_tmpfs: Path) -> None:
    arena = Arena.create(small_tmpfs / "a", 12 * MIB)
    assert arena.grow(GRANULE) == 12 * MIB
    assert allocated(arena) == 12 * MIB
    other = Arena.create(small_tmpfs / "b", 12 * MIB)
    grown = other.grow(MIB)  # less than a segment, because there is less
    assert 3 * MIB < grown < 4 * MIB
    before = used(small_tmpfs)
    with pytest.raises(CapacityError, match=r"file system has \d+ bytes left"):
        other.grow(MIB)
    assert used(small_tmpfs) == before
    assert other.held == allocated(other) == grown


def test_a_race_for_the_last_space_leaves_no_allocation_behind(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena.create(small_tmpfs / "a")
    (small_tmpfs / "others").write_bytes(bytes(10 * MIB))
    before = used(small_tmpfs)
    # the space was free when it was checked, and is not free any more when it is allocated
    monkeypatch.setattr("transfer_queue.storage.arena.arena._available", lambda _: 16 * MIB)
    with pytest.raises(CapacityError, match="its file system refuses"):
        arena.grow(8 * MIB)
    assert (arena.held, allocated(arena)) == (0, 0)
    assert used(small_tmpfs) - before <= 4 * 4096  # of generations and extents, which the next growth uses
    assert arena.grow(MIB) == 4 * MIB
    assert allocated(arena) == 4 * MIB


def test_no_space_for_the_header_is_an_error(small_tmpfs: Path) -> None:
    with pytest.raises(OSError, match="No space"), (small_tmpfs / "others").open("wb") as file:
        file.write(bytes(17 * MIB))
    before = used(small_tmpfs)
    with pytest.raises(CapacityError, match="choose another folder"):
        Arena.create(small_tmpfs / "a")
    assert used(small_tmpfs) == before
    assert list((small_tmpfs / "a").iterdir()) == []


def test_removal_frees_the_space(small_tmpfs: Path) -> None:
    before = used(small_tmpfs)
    arena = Arena.create(small_tmpfs / "a")
    arena.grow(8 * MIB)
    arena.close()
    arena.remove()
    assert used(small_tmpfs) == before
