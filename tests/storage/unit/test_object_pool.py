"""The extent pool of an external store: what is leased, what is removed, and what a restarted unit continues with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer_queue.errors import AttachError, CapacityError, ConnectionLostError
from transfer_queue.messages.reports.unit_reports import BlockMissing
from transfer_queue.storage.arena.extent_table import LeasedExtent
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.base import Piece, Store
from transfer_queue.storage.unit.object_pool import RETRY_SECONDS, REWRITE_SECONDS, ObjectNames, ObjectPool, key_of
from transfer_queue.storage.unit.unit_effects import Effect


class Memory(Store):
    """Keeps names only. It cannot be reached while `down` is set."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.removed: list[str] = []
        self.rewritten: list[str] = []
        self.down = False
        self.full = False

    def write(self, key: str, data: Bytes, within: float) -> None:
        self.names.add(key)

    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        return self.missing([piece.key for piece in pieces])

    def remove(self, keys: Sequence[str]) -> None:
        if self.down:
            raise ConnectionLostError("down")
        self.removed += keys
        self.names -= set(keys)

    def missing(self, keys: Sequence[str]) -> list[str]:
        if self.down:
            raise ConnectionLostError("down")
        return [key for key in keys if key not in self.names]

    def rewrite(self, keys: Sequence[str]) -> None:
        if self.full:
            raise CapacityError("full")
        assert not set(keys).intersection(self.removed)
        self.rewritten += keys


class Later:
    """Calls that begin outside of the loop; the test decides when they run."""

    def __init__(self) -> None:
        self.begun: list[tuple[Callable[[], Any], Callable[[Any], list[Effect]]]] = []

    def __call__(self, run: Callable[[], Any], then: Callable[[Any], list[Effect]]) -> None:
        self.begun.append((run, then))

    def done(self) -> None:
        while self.begun:
            self.step()

    def step(self) -> None:
        run, then = self.begun.pop(0)
        try:
            outcome = run()
        except Exception as error:
            outcome = error
        then(outcome)


def leased(pool: ObjectPool, store: Memory, nbytes: int) -> LeasedExtent:
    extent = pool.lease(1, nbytes, 7)
    store.names.add(key_of(pool.boot_id, extent.offset))
    pool.check()
    return extent


def test_space_is_free_again_once_the_store_has_removed_the_block(tmp_path: Path) -> None:
    store, later = Memory(), Later()
    pool = ObjectPool(ObjectNames.create(tmp_path / "a"), store, later, capacity=1000)
    served: list[bool] = []
    pool.attach(lambda: served.append(True) or [], lambda numbers: [], lambda: None)  # type: ignore[func-returns-value]
    first = leased(pool, store, 500)
    assert pool.lease(1, 500, 8) is None  # 512 bytes are taken
    pool.free(first)
    pool.check()
    assert pool.lease(1, 900, 9) is None  # the store has removed no block yet
    assert not served
    later.done()
    pool.check()
    assert served
    assert store.names == set()
    second = leased(pool, store, 900)
    assert (second.number, second.offset) != (first.number, first.offset)
    pool.close()


def test_blocks_that_could_not_be_removed_are_removed_later(tmp_path: Path) -> None:
    store, later = Memory(), Later()
    pool = ObjectPool(ObjectNames.create(tmp_path / "a"), store, later, capacity=1000)
    store.down = True
    pool.free(leased(pool, store, 10))
    later.done()
    due = pool.next_deadline()
    store.down = False
    pool.begin_period(due)
    later.done()
    pool.check()
    assert store.names == set()
    assert pool.next_deadline() is None
    pool.close()


def test_a_restarted_unit_has_its_leases_and_continues_to_remove(tmp_path: Path) -> None:
    """It has the leased extents, and removes the blocks that the unit before it had not removed yet."""
    store, later = Memory(), Later()
    pool = ObjectPool(ObjectNames.create(tmp_path / "a"), store, later)
    kept, freed = leased(pool, store, 10), leased(pool, store, 20)
    slot = pool.take_slot()
    pool.free(freed)  # and is killed before it is removed
    pool.close()
    again = ObjectPool(ObjectNames.reopen(tmp_path / "a"), store, later)
    again.check()
    assert again.boot_id == pool.boot_id
    assert again.table.leased_extents() == [kept]
    assert again.take_slot() == slot + 1
    later.begun.clear()
    again.begin_period(0.0)
    later.done()
    again.check()
    assert store.removed == [key_of(pool.boot_id, freed.offset)]
    assert leased(again, store, 30).number > freed.number
    again.close()


def test_many_extents_make_the_file_longer(tmp_path: Path) -> None:
    store, later = Memory(), Later()
    pool = ObjectPool(ObjectNames.create(tmp_path / "a"), store, later)
    extents = [pool.lease(1, 64, n) for n in range(5000)]
    assert all(extent is not None for extent in extents)
    pool.check()
    again = ObjectPool(ObjectNames.reopen(tmp_path / "a"), store, later)
    assert again.table.leased_extents() == extents
    again.close()
    pool.close()


def test_the_store_is_asked_which_blocks_are_gone(tmp_path: Path) -> None:
    """When a reader misses a block, and when the store server was restarted."""
    lives = ["one"]
    store, later = Memory(), Later()
    pool = ObjectPool(ObjectNames.create(tmp_path / "a"), store, later, life=lambda: lives[-1])
    asked: list[list[int]] = []
    changes: list[bool] = []
    pool.attach(list, lambda numbers: asked.append(numbers) or [], lambda: changes.append(True))  # type: ignore[func-returns-value]
    here, gone = leased(pool, store, 10), leased(pool, store, 20)
    store.names.discard(key_of(pool.boot_id, gone.offset))
    found: list[tuple[list[int], str]] = []
    pool.check_content([here.number, gone.number], lambda numbers, when, unknown: found.append((numbers, when)) or [])  # type: ignore[func-returns-value]
    later.done()
    assert [numbers for numbers, _ in found] == [[gone.number]]
    assert found[0][1]
    pool.begin_period(0.0)
    assert changes == []
    lives.append("two")
    pool.begin_period(pool.next_deadline() or 0.0)
    assert changes == [True]
    assert asked == []  # the controller says which blocks are published
    store.down = True  # the reply says neither that the block exists nor that it is lost
    pool.check_content([gone.number], lambda numbers, when, unknown: found.append((numbers, when)) or [])  # type: ignore[func-returns-value]
    later.done()
    assert found[1][0] == []
    asked.clear()
    pool.begin_period(time.monotonic())
    assert asked == []
    pool.begin_period(time.monotonic() + RETRY_SECONDS)
    assert asked == [[gone.number]]
    pool.close()


def test_what_a_reader_misses_is_written_again(tmp_path: Path) -> None:
    """Only what the store has; not while it is being written, nor a second time at once; and not if it is freed."""
    store, later, now = Memory(), Later(), [100.0]
    pool = ObjectPool(ObjectNames.create(tmp_path / "a"), store, later, clock=lambda: now[0])
    here, gone = leased(pool, store, 10), leased(pool, store, 20)
    key = key_of(pool.boot_id, here.offset)
    store.names.discard(key_of(pool.boot_id, gone.offset))
    numbers = [here.number, gone.number]
    report = BlockMissing(0, np.array(numbers, "<i8").tobytes())
    found: list[tuple[list[int], str]] = []

    def told(lost: list[int], when: str, unknown: str) -> list[Effect]:
        found.append((lost, unknown))
        return []

    pool.check_content(numbers, told)
    later.done()
    assert store.rewritten == []  # no reader misses it
    pool.check_content(numbers, told, report)
    pool.check_content(numbers, told, report)
    assert len(later.begun) == 2
    later.step()
    later.step()
    assert len(found) == 2  # the second one does not wait for the first
    pool.free(here)
    later.done()
    assert store.rewritten == [key]
    assert found == [([gone.number], "")] * 3
    assert store.removed == [key]  # after it was written
    again = leased(pool, store, 30)
    for seconds, count in ((0.0, 1), (REWRITE_SECONDS / 2, 1), (REWRITE_SECONDS, 2)):
        now[0] += seconds
        pool.check_content([again.number], told, report)
        later.done()
        assert store.rewritten[1:] == [key_of(pool.boot_id, again.offset)] * count
    pool.check()
    pool.close()


def test_what_cannot_be_written_again_is_not_lost_until_its_reader_gives_up(tmp_path: Path) -> None:
    store, later = Memory(), Later()
    pool = ObjectPool(ObjectNames.create(tmp_path / "a"), store, later)
    here = leased(pool, store, 10)
    report = BlockMissing(0, np.array([here.number], "<i8").tobytes())
    found: list[list[int]] = []

    def told(lost: list[int], when: str, unknown: str) -> list[Effect]:
        assert not unknown
        found.append(lost)
        return []

    store.full = True
    pool.check_content([here.number], told, report)
    later.done()
    assert found == [[]]
    pool.check_content([here.number], told, BlockMissing(0, report.extents, given_up=True))
    assert found == [[], [here.number]]
    pool.close()


def test_a_folder_without_a_valid_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AttachError):
        ObjectNames.reopen(tmp_path)
    ObjectNames.create(tmp_path / "a").close()
    (tmp_path / "a" / "header").write_text("{}")
    with pytest.raises(AttachError):
        ObjectNames.reopen(tmp_path / "a")
