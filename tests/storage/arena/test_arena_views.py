"""Views of an arena, and their holds, between real processes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leftovers import descriptors, opened_for
from transfer_queue.errors import AttachError
from transfer_queue.storage.arena import arena_views
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.arena_views import MAPPINGS, ArenaViews, holders_here, is_viewed, open_views
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.read_holds import HOLDS, HoldFile, HoldLocks

# Views bytes of the arena of its first argument, and does what it hears: END a view, FORK a child, or END of the child.
READER = """
import os, sys
from pathlib import Path
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.arena_views import open_views
arena = Arena.open(Path(sys.argv[1]))
views = open_views(arena)
held = {}
child = 0
print("ready", flush=True)
for line in sys.stdin:
    order, *numbers = line.split()
    if order == "view":
        start, nbytes = map(int, numbers)
        held[start] = views.take("reader", start, nbytes)
        print(int(held[start].sum()), flush=True)
    elif order == "end":
        del held[int(numbers[0])]
        print("ended", flush=True)
    elif order == "write":
        held[int(numbers[0])][:] = 9
        print("written", flush=True)
    elif order == "fork":
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)
            print(int(held[int(numbers[0])].sum()), flush=True)
            os._exit(0)
        os.close(reading)
        print("forked", flush=True)
    elif order == "finish":
        os.write(writing, b"x")
        os.waitpid(child, 0)
        print("finished", flush=True)
"""


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    """An arena of 16 granules, whose bytes are the numbers of their granules."""
    made = Arena.create(tmp_path / "arena", 16 * GRANULE)
    made.grow(16 * GRANULE)
    made.memory.reshape(16, -1)[:] = np.arange(16, dtype=np.uint8)[:, None]
    return made


@pytest.fixture
def views(arena: Arena) -> ArenaViews:
    return open_views(arena)


@pytest.fixture
def reader(arena: Arena, child: Callable) -> Any:
    made = child(READER, str(arena.folder))
    assert made.hear() == "ready"
    return made


@pytest.fixture(params=[True, False], ids=["pagemap", "no pagemap"])
def pagemap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether this process may read which of its pages are private."""

    def refused(start: int, end: int) -> None:
        raise OSError

    if not request.param:
        monkeypatch.setattr(arena_views, "_private_pages", refused)


@pytest.fixture(autouse=True)
def everything_is_collected() -> Iterator[None]:
    """No view or file of a test is closed during a later one."""
    yield
    gc.collect()


def held_granules(arena: Arena) -> list[int]:
    """The granules that other processes hold."""
    return [number for number in range(16) if arena.holds.is_held(number * GRANULE, GRANULE)]


def test_the_unit_sees_what_other_processes_hold(arena: Arena, reader: Any) -> None:
    assert held_granules(arena) == []
    assert reader.ask(f"view {3 * GRANULE + 100} {2 * GRANULE}") == str(3 * (GRANULE - 100) + 4 * GRANULE + 5 * 100)
    assert held_granules(arena) == [3, 4, 5]
    assert reader.ask(f"view {5 * GRANULE + 200} 8") == "40"
    assert reader.ask(f"end {3 * GRANULE + 100}") == "ended"
    assert held_granules(arena) == [5]
    assert reader.ask(f"end {5 * GRANULE + 200}") == "ended"
    assert held_granules(arena) == []


def test_the_unit_knows_who_holds(arena: Arena, reader: Any, child: Callable) -> None:
    other = child(READER, str(arena.folder))
    assert other.hear() == "ready"
    for each in (reader, other):
        each.ask("view 0 1000")
    reader.ask("view 2000 100")
    found = {hold.pid: hold for hold in arena.holds.holders()}
    assert set(found) == {reader.process.pid, other.process.pid}
    one = found[reader.process.pid]
    assert (one.client, one.nbytes, one.views) == ("reader", 1100, 2)
    reader.ask("end 0")
    assert {hold.pid: hold.nbytes for hold in arena.holds.holders()}[reader.process.pid] == 100
    reader.ask("end 2000")
    assert [hold.pid for hold in arena.holds.holders()] == [other.process.pid]


def test_a_killed_process_holds_nothing(arena: Arena, reader: Any) -> None:
    reader.ask("view 0 1000")
    reader.process.send_signal(signal.SIGSTOP)
    assert held_granules(arena) == [0]
    reader.process.kill()
    reader.process.wait()
    assert held_granules(arena) == []
    assert arena.holds.holders() == []


def test_a_forked_child_holds_what_it_inherits(arena: Arena, reader: Any) -> None:
    reader.ask(f"view {GRANULE} 1000")
    assert reader.ask(f"fork {GRANULE}") == "forked"
    assert reader.ask(f"end {GRANULE}") == "ended"
    assert held_granules(arena) == [1], "the child has its own lock"
    assert reader.ask("finish") == "1000"
    assert reader.hear() == "finished"
    assert held_granules(arena) == []


def test_pages_that_a_device_keeps(arena: Arena, child: Callable) -> None:
    code = READER.replace(
        'print("ready"', 'views.keep_pages(4, 2); views.keep_pages(9, 1); views.drop_pages(9, 1); print("ready"'
    )
    reader = child(code, str(arena.folder))
    reader.hear()
    registered = [number for number in range(16) if arena.holds.is_registered(number * GRANULE, GRANULE)]
    assert registered == [4, 5]
    assert held_granules(arena) == []


def test_a_child_that_does_not_lock_in_time(arena: Arena, views: ArenaViews, monkeypatch: pytest.MonkeyPatch) -> None:
    """The views are held for as long as this process lives, because the child may read them."""
    monkeypatch.setattr(arena_views, "FORK_SECONDS", 0.01)
    monkeypatch.setattr(arena_views, "_pipe", None)
    view = views.take("c", 0, 100)
    reading, writing = os.pipe()
    monkeypatch.setattr(os, "pipe", lambda: (os.dup(reading), os.dup(writing)))
    arena_views._before_fork()
    arena_views._after_fork_in_parent()
    del view
    assert views._held[0] == 1
    views._held[0] = 0
    views.users -= 1
    os.close(reading)
    os.close(writing)


def test_a_write_changes_only_the_view(arena: Arena, reader: Any) -> None:
    reader.ask(f"view {2 * GRANULE} 1000")
    reader.ask(f"write {2 * GRANULE}")
    assert arena.memory[2 * GRANULE : 2 * GRANULE + 1000].max() == 2
    reader.ask(f"end {2 * GRANULE}")
    assert reader.ask(f"view {2 * GRANULE} 1000") == "2000", "the next view shows the arena again"


@pytest.mark.usefixtures("pagemap")
def test_written_pages_are_dropped_with_the_last_view_of_their_granule(arena: Arena, views: ArenaViews) -> None:
    first, second = views.take("c", 0, 1000), views.take("c", 2 * 4096, 1000)
    first[:] = 7
    second[:] = 8
    del first
    assert second.max() == second.min() == 8, "what was written to a view stays as long as the view"
    again = views.take("c", 0, 1000)
    assert again is not None
    del again, second
    third = views.take("c", 0, 3 * 4096)
    assert third.max() == 0
    arena.memory[:100] = 5  # as the next writer of this space does
    assert third[:100].min() == 5


@pytest.mark.usefixtures("pagemap")
@pytest.mark.parametrize("ended", [True, False])
def test_a_page_that_was_written_to_is_in_no_later_view(arena: Arena, views: ArenaViews, ended: bool) -> None:
    """Another view keeps the granule, and so the page; the arena may get other bytes there meanwhile."""
    beside, written = views.take("c", 9000, 100), views.take("c", 0, 100)
    assert beside is not None
    written[:] = 9
    arena.memory[100:200] = 5  # a put into the same page
    if ended:
        del written
    again, fresh = views.take("c", 0, 100), views.take("c", 100, 100)
    for view, value in ((again, 0), (fresh, 5)):
        assert view.min() == view.max() == value


def test_views_of_the_same_bytes_do_not_see_each_others_writes(arena: Arena, views: ArenaViews) -> None:
    made = [views.take("c", GRANULE, 100) for _ in range(MAPPINGS)]
    for number, view in enumerate(made):
        assert view.max() == 1
        view[:] = 100 + number
    assert views.take("c", GRANULE + 99, 100) is None, "there are no more mappings"
    assert [int(view[0]) for view in made if view is not None] == [100 + number for number in range(MAPPINGS)]
    assert views.take("c", GRANULE + 100, 100) is None, "the page was written to in all of them"
    beside = views.take("c", GRANULE + 5000, 100)
    assert beside.max() == 1
    assert arena.memory[GRANULE : GRANULE + 100].max() == 1


def test_a_view_lives_as_long_as_anything_refers_to_it(arena: Arena, views: ArenaViews) -> None:
    def held() -> bool:
        return bool(holders_here(arena.boot_id, 0, GRANULE))

    array = views.take("c", 0, 800)
    tensor = torch.from_numpy(array).view(torch.int64)
    address = tensor.data_ptr()
    part = tensor.view(10, 10)[3:4, 2:5]
    del array, tensor
    assert held()
    assert is_viewed(part.data_ptr())
    as_array = part.numpy()
    del part
    gc.collect()
    assert held()
    del as_array
    assert not held()
    assert not is_viewed(address)


def test_a_cycle_of_garbage_ends_its_view(arena: Arena, views: ArenaViews) -> None:
    view = views.take("c", 0, 800)
    loop = [view]
    loop.append(loop)  # type: ignore[arg-type]
    del view, loop
    gc.collect()
    assert holders_here(arena.boot_id, 0, GRANULE) == []


def test_views_of_many_threads(arena: Arena, views: ArenaViews) -> None:
    def work(place: int) -> None:
        for round_ in range(300):
            view = views.take(f"c{place}", ((place + round_) % 16) * GRANULE, 5000)
            if view is not None:
                assert view.max() == view.min() == (place + round_) % 16

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert holders_here(arena.boot_id, 0, 16 * GRANULE) == []
    assert not views.views
    assert all(not mapping.counts.any() for mapping in views.mappings)
    assert not views._held.any()


def test_everything_is_closed_after_the_last_use(tmp_path: Path, opened_arenas: list[Arena]) -> None:
    arena = Arena.create(tmp_path / "a", GRANULE)
    arena.grow(GRANULE)
    before = descriptors()
    again, other = Arena.open(arena.folder), Arena.open(arena.folder)
    opened_arenas[:] = [arena]
    views = open_views(again)
    assert views is open_views(other)
    view = views.take("c", 0, 100)
    del again, other, views
    assert any(path.startswith(str(tmp_path)) for _, path in descriptors() - before)
    assert view.max() == 0
    del view
    gc.collect()
    assert opened_for(before) == []


def test_a_replaced_arena_has_no_views(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a", GRANULE)
    arena.remove()
    another = Arena.create(tmp_path / "a", GRANULE)
    assert open_views(arena) is None
    assert open_views(another) is not None
    with pytest.raises(AttachError, match="was replaced"):
        ArenaViews(tmp_path / "a", GRANULE, arena.boot_id)


def test_an_arena_without_the_file_has_no_views(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a", GRANULE)
    (arena.folder / HOLDS).unlink()
    assert open_views(arena) is None
    arena.close()
    assert open_views(Arena.reopen(tmp_path / "a")) is not None


def test_a_system_without_such_locks_has_no_views(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_views, "CAN_HOLD", False)
    assert open_views(arena) is None


def test_a_lock_that_is_refused_is_no_view(views: ArenaViews, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HoldLocks, "lock", lambda self, first, count: False)
    assert views.take("c", 0, 100) is None
    assert not views.views


def test_entries_that_make_no_sense_are_no_holders(tmp_path: Path) -> None:
    (tmp_path / HOLDS).write_bytes(os.urandom(5000))
    holds = HoldFile(tmp_path)
    assert holds.holders() == []
    holds.close()
    holds.close()


def test_parts_that_are_held_together_end_one_by_one(arena: Arena, views: ArenaViews) -> None:
    holds = [(2 * GRANULE, GRANULE), (GRANULE, GRANULE), (8 * GRANULE, 100)]
    with open_reader_locks(arena) as is_held:
        taken = views.take_all("reader", holds)
        assert [None if part is None else int(part[0]) for part in taken] == [2, 1, 8]
        assert [is_held(granule) for granule in (0, 1, 2, 3, 7, 8, 9)] == [False, True, True, False, False, True, False]
        taken[0] = None
        assert [is_held(granule) for granule in (1, 2, 8)] == [True, False, True]
        taken.clear()
        assert not any(map(is_held, range(16)))


def test_parts_that_overlap_do_not_share_memory(views: ArenaViews) -> None:
    one, other = views.take_all("reader", [(0, GRANULE), (0, GRANULE)])
    one[0] = 9
    assert int(other[0]) == 0


def test_what_cannot_be_viewed_is_not_held(arena: Arena, views: ArenaViews) -> None:
    kept = [views.take("reader", 0, GRANULE) for _ in range(MAPPINGS)]
    with open_reader_locks(arena) as is_held:
        first, second = views.take_all("reader", [(0, 100), (3 * GRANULE, 100)])
        assert first is None
        assert second is not None
        assert [is_held(0), is_held(3)] == [True, True]
        kept.clear()
        assert [is_held(0), is_held(3)] == [False, True]


@contextlib.contextmanager
def open_reader_locks(arena: Arena) -> Iterator[Callable[[int], bool]]:
    """Yield a function that says whether a granule is held by this process, which another process asks the kernel."""
    program = """
import sys
from pathlib import Path
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.read_holds import HoldFile
holds = HoldFile(Path(sys.argv[1]))
for line in sys.stdin:
    print(int(holds.is_held(int(line) * GRANULE, GRANULE)), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(arena.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        told, heard = process.stdin, process.stdout

        def is_held(granule: int) -> bool:
            told.write(f"{granule}\n")
            told.flush()
            return heard.readline() == "1\n"

        yield is_held
        told.close()
