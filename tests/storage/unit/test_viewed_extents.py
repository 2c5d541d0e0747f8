"""Extents of which readers have views: they are freed when the last view ends, and nothing writes to them before."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer_queue.messages.reports.unit_reports import ExtentsFreedReport
from transfer_queue.messages.storage import ExtentLeaseReply, LeaseExtent, OpenSlot, ReturnExtent
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.arena_views import open_views
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.storage_unit import SHORT_VIEWS_INTERVAL, VIEWS_INTERVAL, StorageUnit
from transfer_queue.storage.unit.unit_effects import Effect, SendReply
from transfer_queue.testing.simulated_locks import HeldSlots, HoldsHere, SimulatedSlots

GRANULES = 12


class System:
    """A unit with one writer and one reader in this process. The bytes of an extent are its number."""

    def __init__(self, folder: Path) -> None:
        self.slots = SimulatedSlots(0, HeldSlots())
        self.folder = folder
        self.sequence = 0
        self.begin(Arena.create(folder, GRANULES * GRANULE))
        [effect] = self.unit.handle("w", 1, 0, OpenSlot("w"), 0.0)
        self.slot = effect.reply.slot
        self.slots.held.add(effect.reply.lock_path)

    def begin(self, arena: Arena) -> None:
        if arena.holds is not None:
            arena.holds.close()
        arena.holds = HoldsHere(arena)
        self.arena = arena
        self.unit = StorageUnit(0, ArenaPool(arena), self.slots)
        views = open_views(arena)
        self.views = views

    def restart(self) -> None:
        """Another unit takes up the arena of this one."""
        self.begin(Arena.reopen(self.folder))

    def lease(self, granules: int, now: float, wait: float | None = None) -> list[Effect]:
        self.sequence += 1
        nbytes = granules * GRANULE
        return self.unit.handle("w", 1, self.sequence, LeaseExtent(self.slot, nbytes, nbytes, wait), now)

    def fill(self, effects: list[Effect]) -> list[ExtentLeaseReply]:
        """Write into what was leased."""
        leased = [e.reply for e in effects if isinstance(e, SendReply) and isinstance(e.reply, ExtentLeaseReply)]
        for extent in leased:
            self.arena.view(extent.offset, extent.length)[:] = extent.extent % 256
        return leased

    def view(self, extent: ExtentLeaseReply, start: int, nbytes: int) -> Bytes | None:
        """View bytes of an extent, as a reader does that has looked up its generation."""
        found = self.views.take("r", extent.offset + start, nbytes)
        return found if self.arena.generation(extent.offset) == extent.generation else None

    def confirmed(self) -> list[int]:
        """The extents that the unit has reported as free since the last call."""
        found: list[int] = []
        for report in self.unit.take_reports():
            if isinstance(report.body, ExtentsFreedReport):
                found += np.frombuffer(report.body.extents, "<i8").tolist()
        return found


@pytest.fixture(autouse=True)
def everything_is_collected() -> Iterator[None]:
    """No view or file of a test is closed during a later one."""
    yield
    gc.collect()


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path / "arena")


def freed(system: System, granules: int = GRANULES) -> tuple[ExtentLeaseReply, Bytes]:
    """Return an extent that was freed while there is a view of its first bytes, and the view."""
    [extent] = system.fill(system.lease(granules, 0.0))
    view = system.view(extent, 0, 8)
    system.unit.free([extent.extent])
    return extent, view


def test_a_viewed_extent_is_free_when_its_view_ends(system: System) -> None:
    [extent] = system.fill(system.lease(GRANULES, 0.0))
    view = system.view(extent, 100, GRANULE)
    assert system.unit.free([extent.extent]) == []
    assert system.confirmed() == []
    assert system.unit.pool.status().viewed == extent.length
    assert system.view(extent, 100, GRANULE) is None, "it is not found any more"
    assert system.unit.tick(VIEWS_INTERVAL) == []
    assert view.min() == view.max() == 1
    del view
    system.unit.tick(2 * VIEWS_INTERVAL)
    assert system.confirmed() == [extent.extent]
    assert system.unit.pool.status().viewed == system.unit.table.leased == 0
    assert system.unit.next_deadline() is None or system.unit.next_deadline() != 3 * VIEWS_INTERVAL
    system.unit.check()


def test_only_the_extent_with_the_view_waits(system: System) -> None:
    extents = [system.fill(system.lease(2, 0.0))[0] for _ in range(3)]
    view = system.view(extents[1], GRANULE, 8)
    system.unit.free([extent.extent for extent in extents])
    assert system.confirmed() == [extents[0].extent, extents[2].extent]
    assert view.max() == extents[1].extent


def test_a_lease_waits_for_the_end_of_views(system: System) -> None:
    extent, view = freed(system)
    assert system.lease(GRANULES, 1.0, wait=60.0) == []
    assert system.unit.next_deadline() == 1.0 + SHORT_VIEWS_INTERVAL
    assert system.fill(system.unit.tick(1.0 + SHORT_VIEWS_INTERVAL)) == []
    del view
    assert [each.length for each in system.fill(system.unit.tick(1.0 + 2 * SHORT_VIEWS_INTERVAL))] == [extent.length]


def test_a_lease_looks_at_once_whether_views_have_ended(system: System) -> None:
    _, view = freed(system)
    system.unit.tick(1.0)
    del view
    assert len(system.fill(system.lease(1, 1.0))) == 1


def test_a_refused_lease_says_what_views_hold(system: System) -> None:
    extent, view = freed(system)
    [effect] = system.lease(1, 0.0)
    assert f"of which {extent.length} are free when views of readers end" in str(effect.reply)
    del view


def test_a_unit_that_restarts_frees_it_on_a_new_order(system: System) -> None:
    extent, view = freed(system, 3)
    system.restart()
    assert system.unit.table.leased == extent.length
    system.unit.free([extent.extent])
    assert system.confirmed() == []
    assert view.max() == view.min() == extent.extent
    del view
    system.unit.tick(VIEWS_INTERVAL)
    assert system.confirmed() == [extent.extent]


def test_what_a_writer_returns_waits_too(system: System) -> None:
    [extent] = system.fill(system.lease(2, 0.0))
    view = system.view(extent, 0, 8)
    system.unit.handle("w", 1, 99, ReturnExtent(system.slot, [extent.extent]), 0.0)
    system.unit.handle("w", 1, 100, ReturnExtent(system.slot, [extent.extent]), 0.0)
    assert system.unit.table.leased == extent.length
    del view
    system.unit.tick(VIEWS_INTERVAL)
    assert system.unit.table.leased == 0


class ViewedExtents(RuleBasedStateMachine):
    """Leases, frees, views and restarts in any order. A view never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.system = System(self.home / "arena")
        self.now = 0.0
        self.extents: list[ExtentLeaseReply] = []
        self.gone: list[ExtentLeaseReply] = []
        self.held: list[tuple[ExtentLeaseReply, Bytes]] = []

    @rule(granules=st.integers(1, 5), wait=st.sampled_from([None, 0.0, 0.1]))
    def lease(self, granules: int, wait: float | None) -> None:
        self.extents += self.system.fill(self.system.lease(granules, self.now, wait))

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = self.extents.pop(data.draw(st.integers(0, len(self.extents) - 1)))
        self.gone.append(extent)
        self.extents += self.system.fill(self.system.unit.free([extent.extent]))

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(self.extents))
        start = data.draw(st.integers(0, extent.length - 1))
        view = self.system.view(extent, start, data.draw(st.integers(1, extent.length - start)))
        if view is not None:
            self.held.append((extent, view))

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def view_what_is_gone(self, data: st.DataObject) -> None:
        assert self.system.view(data.draw(st.sampled_from(self.gone)), 0, 8) is None

    @precondition(lambda self: self.held)
    @rule(data=st.data(), value=st.integers(0, 255))
    def write(self, data: st.DataObject, value: int) -> None:
        """The view has its own page then, which no later view shows."""
        _, view = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        view[:] = value

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def write_and_view_again(self, data: st.DataObject) -> None:
        """Other views may keep the granule of the page that was written to."""
        extent, view = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        start = view.__array_interface__["data"][0] % GRANULE
        view[:] = 255 - extent.extent % 256
        del view
        again = self.system.view(extent, min(start, extent.length - 1), 1)
        if again is not None:
            self.held.append((extent, again))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @rule(seconds=st.sampled_from([0.0, 0.02, 0.3]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.extents += self.system.fill(self.system.unit.tick(self.now))

    @rule()
    def restart(self) -> None:
        """The controller then orders again to free what is not confirmed."""
        self.system.restart()
        self.system.slots.held.add(self.system.slots.path(self.system.slot))
        self.extents += self.system.fill(self.system.unit.free([extent.extent for extent in self.gone]))

    @invariant()
    def views_are_as_they_were(self) -> None:
        for extent, view in self.held:
            assert view.min() == view.max() == extent.extent % 256
        self.system.unit.check()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        gone = {extent.extent for extent in self.gone}
        waiting = {extent.number for extent in self.system.unit.table.leased_extents()} & gone
        assert self.system.unit.pool.status().viewed == sum(
            extent.length for extent in self.gone if extent.extent in waiting
        )

    def teardown(self) -> None:
        """All views end: what was freed is free."""
        self.held.clear()
        self.system.unit.tick(self.now + 1)
        assert self.system.unit.pool.status().viewed == 0
        shutil.rmtree(self.home)


ViewedExtents.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestViewedExtents = ViewedExtents.TestCase
