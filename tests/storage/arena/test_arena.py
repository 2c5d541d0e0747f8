from __future__ import annotations

import errno
import gc
import json
import os
import resource
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from leftovers import descriptors, opened_for
from transfer_queue.errors import AttachError, CapacityError, InvalidArgumentError, ProtocolError, StartError
from transfer_queue.messages.descriptors import MIRROR
from transfer_queue.storage.arena.arena import SEGMENT, Arena, choose_folder
from transfer_queue.storage.arena.extent_table import GRANULE

MIB = 1 << 20


def allocated(folder: Path) -> int:
    return (folder / "arena").stat().st_blocks * 512


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.create(tmp_path / "a", MIB)


def test_nothing_is_allocated_before_it_is_grown(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a", 150 * MIB)
    assert arena.capacity == 150 * MIB == (tmp_path / "a" / "arena").stat().st_size
    assert (arena.held, allocated(tmp_path / "a")) == (0, 0)
    assert arena.grow(1) == SEGMENT == arena.held
    assert allocated(tmp_path / "a") >= SEGMENT
    assert arena.grow(SEGMENT + 1) == SEGMENT + GRANULE
    assert arena.grow(GRANULE) == 150 * MIB - 2 * SEGMENT - GRANULE  # all that is left of the capacity
    with pytest.raises(CapacityError, match=f"{GRANULE} bytes more wanted, {150 * MIB} held.*capacity"):
        arena.grow(1)
    assert arena.held == 150 * MIB


def test_files_are_private(tmp_path: Path) -> None:
    Arena.create(tmp_path / "a", MIB)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    for name in ("arena", "generations", "header"):
        assert stat.S_IMODE((tmp_path / "a" / name).stat().st_mode) == 0o600


def test_the_capacity_is_in_whole_granules_and_no_more_than_the_file_system(tmp_path: Path) -> None:
    assert Arena.create(tmp_path / "a", MIB + 1).capacity == MIB
    system = os.statvfs(tmp_path)
    total = system.f_blocks * system.f_frsize
    assert Arena.create(tmp_path / "b").capacity == total // GRANULE * GRANULE
    assert Arena.create(tmp_path / "c", 1 << 60).capacity == total // GRANULE * GRANULE
    with pytest.raises(InvalidArgumentError, match="must be at least"):
        Arena.create(tmp_path / "d", GRANULE - 1)


def test_a_limit_on_file_sizes_limits_the_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 * MIB, 3 * MIB))
    assert Arena.create(tmp_path / "a").capacity == 3 * MIB


def test_a_tmpfs_without_a_size_counts_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: system)
    arena = Arena.create(tmp_path / "a", MIB)
    assert arena.capacity == MIB
    assert arena.grow(MIB) == MIB


def test_two_mappings_see_the_same_bytes(tmp_path: Path) -> None:
    unit = Arena.create(tmp_path / "a", MIB)
    unit.grow(MIB)
    client = Arena.open(tmp_path / "a")
    assert (client.capacity, client.boot_id) == (unit.capacity, unit.boot_id)
    client.view(100, 5)[:] = np.frombuffer(b"hello", np.uint8)
    assert unit.view(100, 5).tobytes() == b"hello"
    unit.bump(GRANULE, 2 * GRANULE)
    assert [client.generation(i * GRANULE + 5) for i in range(4)] == [0, 1, 1, 0]


def test_clients_cannot_write_generations_nor_grow(tmp_path: Path) -> None:
    Arena.create(tmp_path / "a", MIB)
    client = Arena.open(tmp_path / "a")
    with pytest.raises(ValueError, match="read-only"):
        client.generations[0] = 7
    with pytest.raises(ProtocolError, match="only be grown by its storage unit"):
        client.grow(1)


def test_a_lease_has_one_generation_that_no_earlier_one_had(arena: Arena) -> None:
    arena.grow(MIB)
    seen: list[set[int]] = [set() for _ in range(4)]
    for first, count in [(0, 1), (0, 1), (0, 2), (1, 3), (0, 4), (2, 1), (0, 4)]:
        arena.set_generation(first * GRANULE, count * GRANULE)
        generation = arena.generation(first * GRANULE)
        for granule in range(first, first + count):
            assert generation not in seen[granule]
            assert arena.generation(granule * GRANULE) == generation
            seen[granule].add(generation)
        arena.bump(first * GRANULE, count * GRANULE)
    assert all(0 not in one for one in seen)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (MIB, 1), (MIB - 1, 2), (1 << 70, 1)])
def test_a_view_must_be_inside_the_arena(arena: Arena, offset: int, nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="not in the arena"):
        arena.view(offset, nbytes)
    assert arena.view(MIB, 0).size == 0


@pytest.mark.parametrize("offset", [-1, MIB, 1 << 70])
def test_an_offset_of_a_generation_must_be_inside_the_arena(tmp_path: Path, offset: int) -> None:
    with pytest.raises(ProtocolError, match="not in the arena"):
        Arena.create(tmp_path / "a", MIB).generation(offset)


def test_a_view_outlives_the_arena(tmp_path: Path, arena: Arena) -> None:
    arena.grow(MIB)
    view = arena.view(0, MIB)
    view[:] = 7
    arena.close()
    arena.remove()
    arena.close()
    del arena
    gc.collect()
    assert int(view.sum()) == 7 * MIB
    assert list((tmp_path / "a").iterdir()) == []


def test_a_closed_arena_has_no_views(arena: Arena) -> None:
    arena.close()
    with pytest.raises(ProtocolError):
        arena.view(0, 1)
    with pytest.raises(ProtocolError):
        arena.grow(1)


def test_prefaulting_changes_no_byte(tmp_path: Path) -> None:
    for populates in (True, False):
        arena = Arena.create(tmp_path / str(populates), 4 * MIB)
        arena._populates = populates
        arena.grow(4 * MIB)
        arena.memory[:] = 9
        steps = [arena.prefault_some(1_500_000)]
        while steps[-1]:
            steps.append(arena.prefault_some(1_500_000))
        assert steps == [True, True, False]
        assert arena.warm == arena.held
        assert (arena.memory == 9).all()


def test_prefaulting_makes_pages_resident(tmp_path: Path) -> None:
    folder = choose_folder(least=16 * MIB).folder / f"tq-test-{os.getpid()}-{threading.get_ident()}"
    arena = Arena.create(folder, 8 * MIB)
    try:
        arena.grow(8 * MIB)
        if not arena.prefault_some(4 * MIB) or not arena._populates:
            pytest.skip("this kernel does not populate")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        arena.memory[: 4 * MIB : 4096] = 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100
    finally:
        arena.close()
        arena.remove()
        folder.rmdir()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_zeros_are_written_if_the_file_system_cannot_allocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, "unsupported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    arena = Arena.create(tmp_path / "a", 3 * MIB)
    arena.grow(MIB)
    assert arena.held == 3 * MIB
    os.sync()
    assert allocated(tmp_path / "a") >= 3 * MIB
    assert not arena.memory.any()


def test_an_arena_grows_by_less_if_a_segment_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def grudging(file: int, offset: int, length: int) -> None:
        if length > 10 * MIB:
            real(file, offset, MIB)  # what a file system may leave behind that does not undo
            raise OSError(errno.ENOSPC, "full")
        real(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", grudging)
    arena = Arena.create(tmp_path / "a", 100 * MIB)
    assert arena.grow(MIB) == 8 * MIB
    with pytest.raises(CapacityError, match="its file system refuses"):
        arena.grow(11 * MIB)
    os.sync()
    assert allocated(tmp_path / "a") < 9 * MIB
    assert (tmp_path / "a" / "arena").stat().st_size == 100 * MIB


def test_an_unexpected_failure_of_the_file_system_is_a_capacity_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: int) -> None:
        raise OSError(errno.EIO, "broken")

    arena = Arena.create(tmp_path / "a", MIB)
    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(CapacityError, match="broken"):
        arena.grow(MIB)
    assert arena.held == 0


def test_a_folder_can_contain_only_one_arena(tmp_path: Path) -> None:
    first = Arena.create(tmp_path / "a", MIB)
    with pytest.raises(StartError, match="exists"):
        Arena.create(tmp_path / "a", MIB)
    assert Arena.open(tmp_path / "a").boot_id == first.boot_id


def test_a_failed_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CapacityError, match="full"):
        Arena.create(tmp_path / "a", MIB)
    assert list((tmp_path / "a").iterdir()) == []
    with pytest.raises(StartError):
        Arena.create(Path("/proc/nowhere"), MIB)


def header(**changes: object) -> bytes:
    good = {"magic": "transfer_queue arena", "version": 1, "granule": GRANULE, "capacity": MIB, "boot_id": "x"}
    return json.dumps({**good, **changes}).encode()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not the header"),
        (b"[]", "not the header"),
        (header(capacity="1"), "not the header"),
        (header(magic="x"), "not the header of an arena"),
        (header(version=2), "version 2"),
        (header(granule=4096), "granules of 4096"),
        (header(capacity=0), "whole granules"),
        (header(capacity=MIB + 1), "whole granules"),
        (header(capacity=2 * MIB), "damaged"),
        (header(capacity=1 << 70), "whole granules|not the header|damaged"),
    ],
)
def test_a_strange_header_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    Arena.create(tmp_path / "a", MIB)
    (tmp_path / "a" / "header").write_bytes(content)
    with pytest.raises(AttachError, match=complaint):
        Arena.open(tmp_path / "a")


def test_missing_and_odd_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match="check that its storage unit runs"):
        Arena.open(tmp_path)
    Arena.create(tmp_path / "a", MIB)
    (tmp_path / "a" / "generations").write_bytes(b"short")
    with pytest.raises(AttachError, match="generations has 5 bytes"):
        Arena.open(tmp_path / "a")
    (tmp_path / "a" / "arena").rename(tmp_path / "moved")
    (tmp_path / "a" / "arena").symlink_to(tmp_path / "moved")
    with pytest.raises(AttachError):
        Arena.open(tmp_path / "a")


def test_opening_leaves_no_descriptor_but_the_mappings(tmp_path: Path) -> None:
    Arena.create(tmp_path / "a", MIB).close()
    before = descriptors()
    (tmp_path / "a" / "header").rename(tmp_path / "a" / "other")
    with pytest.raises(AttachError):
        Arena.open(tmp_path / "a")
    assert opened_for(before) == []
    (tmp_path / "a" / "other").rename(tmp_path / "a" / "header")
    client = Arena.open(tmp_path / "a")
    assert len(descriptors() - before) == 2
    client.close()
    assert opened_for(before) == []


def test_shared_memory_is_chosen_if_it_has_enough_free_space(tmp_path: Path) -> None:
    assert choose_folder(tmp_path, least=1) == (tmp_path, None)
    fallback = tmp_path / "slow"
    folder, warning = choose_folder(tmp_path, fallback, least=1 << 60)
    assert folder == fallback
    assert f"of the {1 << 60} wanted" in warning
    folder, warning = choose_folder(tmp_path / "none", least=1)
    assert folder.is_dir()
    assert "does not exist" in warning


def test_shared_memory_that_is_not_writable_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    _, warning = choose_folder(tmp_path, least=1)
    assert "is not writable" in warning


def test_the_arena_of_a_mirror_is_on_the_disk_as_soon_as_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that a failure of the machine makes empty would lose all that was written through after it."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    Arena.create(tmp_path / "memory", GRANULE).close()
    assert synced == []
    folder = tmp_path / "mirror" / "unit-0"
    Arena.create(folder, GRANULE, MIRROR).close()
    assert synced == [str(folder / "header.new"), str(folder), str(folder.parent)]
