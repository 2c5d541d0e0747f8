"""Blocks that are moved to disk: which ones, when and how many; the moves of `test_migration_planner` with disks."""

from __future__ import annotations

import msgspec
import pytest
from harness import Harness
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from test_migration_planner import LENGTH, Life, settle

from differential import stateful
from transfer_queue.core.activity import Activity
from transfer_queue.core.units import migration_planner
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import DISK, MEMORY
from transfer_queue.messages.reports.unit_reports import BlocksMovedReport, Move, RegisterUnit, SpaceShortReport
from transfer_queue.messages.system import Drain, Status, SystemStatus

CAPACITY = 10 * LENGTH  # of each unit in memory


class Tiers(Life):
    """Units 0 and 1 in memory, 2 and 3 on disk. Puts go to 2 as well: a writer may find no space in memory."""

    @initialize(replicas=st.integers(1, 2))
    def start(self, replicas: int) -> None:
        super().start(replicas)
        assert self.h.ask(self.registration(3), "unit-3") == Done(3)

    def registration(self, unit: int) -> RegisterUnit:
        tier = MEMORY if unit < 2 else DISK
        return msgspec.structs.replace(super().registration(unit), tier=tier, capacity=CAPACITY)

    @rule(unit=st.integers(0, 1), waits=st.booleans())
    def short(self, unit: int, waits: bool) -> None:
        """Set whether writers wait for space."""
        freed = self.h.controller.context.services[Activity].freed.get(unit, 0)
        assert self.h.ask(SpaceShortReport(unit, ["somebody"] if waits else [], freed), f"unit-{unit}") == Done()

    @precondition(lambda self: self.values)
    @rule(unit=st.integers(0, 1), count=st.integers(1, 12))
    def fill(self, unit: int, count: int) -> None:
        """Put a number of extents with one block each."""
        for _ in range(count):
            self.put(2, ["x"], [unit], close=True)


@pytest.fixture
def little_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration_planner, "SPARE", 0)


TestTiers = pytest.mark.usefixtures("little_is_spared")(stateful(Tiers, 15, 40))


@pytest.fixture
def life() -> Tiers:
    """Return a life without replicas and without blocks."""
    made = Tiers()
    made.start(1)
    return made


def lie_in(life: Tiers) -> list[set[int]]:
    """Return the units of each block, the oldest block first."""
    return [{place.unit for place in places} for _, _, places, _ in life.h.state.blocks.live_blocks()]


def test_the_oldest_extents_are_moved_until_the_low_watermark(life: Tiers) -> None:
    for count in range(1, 9):
        life.put(2, ["x"], [0], close=True)
        settle(life.h, life.units)
        assert lie_in(life) == [{0}] * count, "80 % are not above the high watermark"
    life.put(2, ["x"], [0], close=True)
    orders = settle(life.h, life.units)
    assert all(isinstance(order, Move) for order in orders)
    assert lie_in(life) == [{2}] * 3 + [{0}] * 6
    assert life.h.state.blocks.leased_in[0] == 6 * LENGTH
    life.every_row_has_its_values()
    assert settle(life.h, life.units) == []


def test_open_extents_stay(life: Tiers) -> None:
    """Open extents are not moved, however full memory is; they are when they are closed."""
    life.put(2, ["x"], [0], close=False)
    for _ in range(9):
        life.put(2, ["x"], [0], close=False)
        life.open.clear()  # none of them is closed
    assert settle(life.h, life.units) == []
    assert lie_in(life) == [{0}] * 10


def test_waiting_writers_get_space_below_the_watermark(life: Tiers) -> None:
    """As for a block that is too large for the free space: more is moved until no writer waits."""
    life.fill(0, 4)
    assert settle(life.h, life.units) == []
    life.h.ask(SpaceShortReport(0, ["w"], 0), "unit-0")
    settle(life.h, life.units)
    assert all(units <= {2, 3} for units in lie_in(life)), "who waits has not said that he does no more"
    life.every_row_has_its_values()


def test_two_replicas_move_to_two_units_on_disk() -> None:
    life = Tiers()
    life.start(2)
    for _ in range(9):
        life.put(2, ["x"], [0, 1], close=True)
    settle(life.h, life.units)
    assert [sorted(units) for units in lie_in(life)[:3]] == [[2, 3]] * 3
    assert lie_in(life)[3:] == [{0, 1}] * 6
    life.every_row_has_its_values()


def test_a_disk_of_the_same_node_is_taken(life: Tiers) -> None:
    for unit, node in enumerate(["a", "b", "b", "a"]):
        life.h.ask(msgspec.structs.replace(life.registration(unit), node=node), f"unit-{unit}")
    for unit in (0, 1):
        life.fill(unit, 9)
    settle(life.h, life.units)
    assert lie_in(life) == [{3}] * 3 + [{0}] * 6 + [{2}] * 3 + [{1}] * 6


def test_a_full_disk_is_not_asked_again_and_again(life: Tiers) -> None:
    life.fill(0, 9)
    asked = 0
    for _ in range(20):
        life.h.tick(life.h.now + 1.0)
        while life.h.orders:
            unit, order = life.h.orders.pop()
            assert isinstance(order, Move)
            asked += 1
            life.h.ask(BlocksMovedReport(order.number, unit, 0, 0, 0, b"", []), f"unit-{unit}")
    assert 0 < asked < 4
    assert lie_in(life) == [{0}] * 9
    life.h.clear([min(life.values)])
    del life.values[min(life.values)]
    life.h.clear([min(life.values)])
    del life.values[min(life.values)]
    settle(life.h, life.units)
    assert lie_in(life) == [{0}] * 8, "80 % again"
    life.put(2, ["x"], [0], close=True)
    settle(life.h, life.units)
    assert lie_in(life) == [{2}] * 3 + [{0}] * 6


def test_drains_over_tiers(life: Tiers) -> None:
    """A drain moves blocks to a unit of the same tier, or of the other tier if there is none with space."""
    life.fill(0, 4)
    life.h.ask(Drain(0))
    settle(life.h, life.units)
    assert lie_in(life) == [{1}] * 4
    life.h.ask(Drain(0, undo=True))
    for _ in range(9):
        life.put(2, ["x"], [0], close=False)
        life.open.clear()  # it stays open, and in memory
    life.h.ask(Drain(1))
    settle(life.h, life.units)
    assert lie_in(life) == [{2}] * 4 + [{0}] * 9
    life.every_row_has_its_values()
    life.h.ask(Drain(1, undo=True))
    life.h.ask(Drain(0))
    with pytest.raises(InvalidArgumentError, match="but there would be 0"):
        life.h.ask(Drain(1))  # what is on disk is not written to
    life.h.ask(Drain(0, undo=True))
    life.h.ask(Drain(2))
    settle(life.h, life.units)
    assert lie_in(life)[:4] == [{3}] * 4
    life.h.ask(Drain(3))
    settle(life.h, life.units)
    assert all(units <= {0, 1} for units in lie_in(life))
    life.every_row_has_its_values()


def test_status_reports_bytes_by_tier(life: Tiers) -> None:
    life.fill(0, 9)
    settle(life.h, life.units)
    status = life.h.ask(Status())
    assert isinstance(status, SystemStatus)
    told = [(unit.unit, unit.tier, unit.capacity, unit.leased > 0) for unit in status.units]
    assert told == [
        (0, MEMORY, CAPACITY, True), (1, MEMORY, CAPACITY, False),
        (2, DISK, CAPACITY, True), (3, DISK, CAPACITY, False),
    ]  # fmt: skip


def test_nothing_is_moved_without_a_disk(h: Harness) -> None:
    life = Life()
    life.start(1)
    life.h.ask(msgspec.structs.replace(life.registration(0), capacity=CAPACITY), "unit-0")
    for _ in range(10):
        life.put(2, ["x"], [0], close=True)
    assert settle(life.h, life.units) == []
