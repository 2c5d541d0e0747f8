"""Moves interleaved with puts, replacements, clears, deals and drains: every row keeps its values, whatever units say.

Units are stood in for by what lies where: a place holds, for each field, whose value is in which row of the block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness, column, rows_of, schema_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from unit_standin import BYTES, Content, Units

from differential import stateful
from transfer_queue.core.events.records import StateLoaded
from transfer_queue.core.units import migration_planner
from transfer_queue.core.units.migration_planner import MigrationPlanner
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import BlockLocation, NewBlock
from transfer_queue.messages.puts import CloseExtents, Publish
from transfer_queue.messages.queries import Lookup
from transfer_queue.messages.reports.unit_reports import (
    BlocksMovedReport,
    DrainFinished,
    Move,
    RegisterUnit,
    WriterGone,
)
from transfer_queue.messages.system import Drain

LENGTH = 1 << 20  # of every extent that clients write
UNITS = 3


@pytest.fixture(autouse=True)
def _little_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration_planner, "SPARE", 0)


class Life(RuleBasedStateMachine):
    """values: row -> field -> what was put last."""

    def __init__(self) -> None:
        super().__init__()
        self.h = Harness()
        self.units = Units()
        self.values: dict[int, dict[str, int]] = {}
        self.peers: dict[int, int] = {}
        self.next_value = 0
        self.freed = 0
        self.open: dict[int, int] = {}

    @initialize(replicas=st.integers(1, 2))
    def start(self, replicas: int) -> None:
        self.h.controller.context.services[MigrationPlanner].replicas = replicas
        for unit in range(UNITS):
            assert self.h.ask(self.registration(unit), f"unit-{unit}") == Done(unit)

    def registration(self, unit: int) -> RegisterUnit:
        """Return the registration of a unit."""
        return RegisterUnit(f"{unit}", f"/{unit}" if unit else "/arena")

    def put(
        self,
        rows: list[int] | int,
        fields: list[str],
        places: list[int],
        close: bool,
        share: int = 1,
        split: bool = False,
    ) -> None:
        """Put values. share: how many neighbours have one value. split: whether each field has a block of its own."""
        count = rows if isinstance(rows, int) else len(rows)
        made = [self.block(count, some, places, share) for some in ([[name] for name in fields] if split else [fields])]
        closes = [(unit, self.open.pop(unit)) for unit in places] if close else []
        target = None if isinstance(rows, int) else column(rows)
        first, *further = [block for block, _ in made]
        reply = self.h.ask(Publish("p", count, target, block=first, further=further, closes=closes, pre_allocate=0))
        for at, row in enumerate(rows_of(reply)):
            for _, content in made:
                self.values.setdefault(row, {}).update({name: content[name][at // share] for name in content})

    def block(self, count: int, fields: list[str], places: list[int], share: int) -> tuple[NewBlock, Content]:
        """Write a block. Returns it and its content."""
        held = -(-count // share)
        content = {name: list(range(self.next_value, self.next_value + held)) for name in fields}
        self.next_value += held
        there = []
        for unit in places:
            if unit not in self.open:
                self.open[unit] = self.units.open(unit)
            there.append(
                BlockLocation(unit, self.open[unit], self.units.write(unit, self.open[unit], content), 1, LENGTH)
            )
        schema, dims = schema_of(fields, held)
        slots = None if share == 1 else (np.arange(count) // share).astype("<i4").tobytes()
        first, *more = there
        block = NewBlock(
            first.unit, first.extent, first.offset, 1, BYTES, held, schema, dims, LENGTH, more, slots=slots
        )
        return block, content

    @rule(
        count=st.sampled_from([1, 2, 8]),
        fields=st.sampled_from([["x"], ["x", "y"]]),
        places=st.lists(st.integers(0, UNITS - 1), min_size=1, max_size=2, unique=True),
        close=st.booleans(),
        share=st.sampled_from([1, 1, 3]),
        split=st.booleans(),
    )
    def put_new(self, count: int, fields: list[str], places: list[int], close: bool, share: int, split: bool) -> None:
        self.put(count, fields, places, close, share, split)

    @precondition(lambda self: self.values)
    @rule(data=st.data(), unit=st.integers(0, UNITS - 1), close=st.booleans())
    def replace(self, data: st.DataObject, unit: int, close: bool) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.values)), min_size=1, unique=True, max_size=4))
        self.put(rows, ["x"], [unit], close)

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.values)), min_size=1, unique=True))
        self.h.clear(rows)
        for row in rows:
            del self.values[row]

    @rule(count=st.integers(1, 3))
    def deal(self, count: int) -> None:
        assert self.h.dealt(count) is not None

    @rule()
    def close(self) -> None:
        if self.open:
            self.h.ask(CloseExtents(list(self.open.items())))
            self.open.clear()

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0]), ticks=st.integers(1, 5))
    def time(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.h.tick(self.h.now + seconds)

    @rule(unit=st.integers(0, UNITS - 1), undo=st.booleans())
    def drain(self, unit: int, undo: bool) -> None:
        sequence = self.h.send(Drain(unit, undo))
        reply = self.h.reply(sequence)
        assert reply is not None

    @precondition(lambda self: any(isinstance(order, Move) for _, order in self.h.orders))
    @rule(data=st.data(), how=st.sampled_from(["done", "done", "done", "gone", "full", "lost"]))
    def carry_out(self, data: st.DataObject, how: str) -> None:
        self.forget()
        unit, order = next((unit, order) for unit, order in self.h.orders if isinstance(order, Move))
        self.h.orders.remove((unit, order))
        if how == "lost":
            self.h.freed.clear()  # it is told again what it has not confirmed
            self.freed = 0
            self.h.disconnect(f"unit-{unit}")
            self.h.connect(f"unit-{unit}")
            self.h.ask(self.registration(unit), f"unit-{unit}")
        if how == "full":
            reply = BlocksMovedReport(order.number, unit, 0, 0, 0, b"", [])
        else:
            blocks = range(len(order.blocks.unit) // 4)
            gone = data.draw(st.sets(st.sampled_from(blocks))) if how == "gone" else set()
            reply = self.units.carry_out(unit, order, gone | self.units.missing(order))
        assert self.h.ask(reply, f"unit-{unit}") == Done()

    @rule()
    def a_unit_is_proven_dead_to_nobody(self) -> None:
        """A unit that connects again reports its extents; those that are needed stay."""
        held = [extent for (unit, extent) in self.units.held if unit == 1 and extent not in self.open.values()]
        self.h.ask(WriterGone("", 1, held), "unit-1")

    def forget(self) -> None:
        """Overwrite freed extents."""
        for place in self.h.freed[self.freed :]:
            self.units.held.pop(place, None)
        self.freed = len(self.h.freed)

    @invariant()
    def every_row_has_its_values(self) -> None:
        self.forget()
        for name in ("x", "y"):
            rows = [row for row, values in self.values.items() if name in values]
            if not rows:
                continue
            reply = self.h.look(Lookup("p", column(rows), fields=[name]))
            assert self.units.values(reply, name) == [self.values[row][name] for row in rows]

    def teardown(self) -> None:
        """With time and units that carry out orders everything settles: each plan ends."""
        for _ in range(400):
            self.forget()
            order = next(((u, o) for u, o in self.h.orders if isinstance(o, Move)), None)
            if order is not None:
                self.h.orders.remove(order)
                unit, move = order
                self.h.ask(self.units.carry_out(unit, move, self.units.missing(move)), f"unit-{unit}")
            elif self.h.controller.context.services[MigrationPlanner].next_due() is None:
                break
            else:
                self.h.tick(self.h.now + 10.0)
        else:
            raise AssertionError("moves never end")
        self.every_row_has_its_values()


TestLife = stateful(Life, 20, 40)


def settle(h: Harness, units: Units) -> list[Any]:
    """Carry out all orders, and return them."""
    orders = []
    for _ in range(200):
        h.tick(h.now + 1.0)
        while h.orders:
            unit, order = h.orders.pop(0)
            orders.append(order)
            if isinstance(order, Move):
                h.ask(units.carry_out(unit, order, set()), f"unit-{unit}")
        for place in h.freed:
            units.held.pop(place, None)
    return orders


def test_nothing_is_moved_if_it_frees_too_little(h: Harness) -> None:
    """Extents stay that are full or open, and those of a unit that has little to free."""
    life = Life()
    life.start(1)
    for _ in range(3):
        life.put(8, ["x"], [0], close=True)
    migration_planner.SPARE = 16 << 20
    assert settle(life.h, life.units) == []


def test_a_running_drain_is_reported_again(h: Harness) -> None:
    life = Life()
    life.start(1)
    life.put(2, ["x"], [1], close=True)
    sequence = life.h.send(Drain(1, wait=60.0))
    assert life.h.reply(sequence) is None
    life.h.tick(1.0)
    assert life.h.orders[0] == (1, DrainFinished(True))
    life.h.disconnect("unit-1")
    life.h.connect("unit-1")
    life.h.orders.pop(0)
    life.h.ask(RegisterUnit("1", "/1"), "unit-1")
    assert DrainFinished(True) in settle(life.h, life.units)
    assert life.h.reply(sequence) == Done(0)
    life.every_row_has_its_values()


def test_rows_that_share_values_share_their_copies(h: Harness) -> None:
    """A sparse block is copied with each value once, and its bytes end with the last row that needs them."""
    life = Life()
    life.start(1)
    for _ in range(40):
        life.put(16, ["x"], [0], close=False, share=4)
    life.close()
    rows = sorted(life.values)
    cleared = [row for row in rows if row % 16 >= 4]
    life.h.clear(cleared)
    for row in cleared:
        del life.values[row]
    settle(life.h, life.units)
    life.forget()
    life.every_row_has_its_values()
    held = [content for blocks in life.units.held.values() for content in blocks.values()]
    assert len(held) == 40
    assert all(len(content["x"]) == 1 for content in held)
    life.h.clear(sorted(life.values))
    settle(life.h, life.units)
    life.forget()
    assert not any(life.units.held.values())


def test_a_forgotten_plan_leaves_no_extent_of_blocks_that_were_to_be_copied_once_more(h: Harness) -> None:
    """A checkpoint is loaded after repacked blocks were reported, and before their second location is."""
    life = Life()
    life.start(2)
    for _ in range(40):
        life.put(16, ["x"], [0, 1], close=False)
    life.close()
    life.h.clear([row for row in sorted(life.values) if row % 16 >= 4])
    repacked: tuple[int, int] | None = None
    for _ in range(200):
        life.h.tick(life.h.now + 1.0)
        moves = [each for each in life.h.orders if isinstance(each[1], Move)]
        life.h.orders.clear()
        if repacked is not None and moves:
            break
        for unit, order in moves:
            report = life.units.carry_out(unit, order, set())
            repacked = (unit, report.extent) if order.repacks else None
            life.h.ask(report, f"unit-{unit}")
            if repacked is not None and life.h.orders:
                break
    assert repacked is not None
    planner = life.h.controller.context.services[MigrationPlanner]
    planner.forget(StateLoaded(b"", 0.0))
    assert planner.next_due() == 0.0
    life.h.tick(life.h.now)
    assert repacked in life.h.freed
