"""Lets units copy blocks, one order of each unit at a time, and takes their reports.

What is copied, and where to, is decided by *policies*: `core.units.mirror_writer` copies new blocks to the mirror, and
`core.units.migration_planner` does the rest. A policy carries out one plan at a time. Policies that have orders for the
same unit stand in a line, so that they take turns.

A unit copies the blocks of an order, and reports the locations of the copies
(`messages.reports.unit_reports.BlocksMovedReport`). The plan makes a record of them, which ignores values that were
cleared or replaced in the meantime.

Nothing here is part of the state. A plan ends with its process, and its units then free what they copied
(`ExtentsClosed` of extents without blocks).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from transfer_queue.core.context import Context, CoreService, observes
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, SendToUnit
from transfer_queue.core.units.location_checks import check_moved, close_reported_extents
from transfer_queue.messages.descriptors import Blocks
from transfer_queue.messages.reports.unit_reports import BlocksMovedReport, DrainFinished, Move, Repack

SLICES = 4
"""Steps of a plan in one turn of the controller."""

ResultT = TypeVar("ResultT")
PlanSteps = Generator[Sequence[r.AnyRecord] | None, None, ResultT]
"""A plan, or a part of it. Yields the records to be applied before it goes on, if any; None if it waits for a unit."""


class Mover(CoreService):
    """The connected units, and the orders for them."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.units: set[int] = set()
        """The connected units."""
        self.short: set[int] = set()
        """The units whose writers wait for space."""
        self.lines: dict[int, list[Policy]] = {}
        """Unit -> the policies that have an order for it. It carries out that of the first one."""
        self.unsent: list[tuple[int, Move | DrainFinished]] = []
        """The orders to be sent, and their units."""
        self.nudges = 0
        """Grows when a plan may achieve something that it could not achieve before."""
        self._number = 0

    def on_connect(self, unit: int) -> None:
        """Note that a unit has connected."""
        self.units.add(unit)
        self.nudges += 1
        if unit in self.context.state.draining:
            self.unsent.append((unit, DrainFinished(True)))

    def on_unit_removed(self, unit: int) -> None:
        """See `CoreService.on_unit_removed`. Its orders are dropped."""
        self.units.discard(unit)
        self.short.discard(unit)
        self.lines.pop(unit, None)
        self.unsent = [order for order in self.unsent if order[0] != unit]

    def set_waiting_writers(self, unit: int, has_writers: bool) -> None:
        """Note whether writers wait for space in a unit."""
        (self.short.add if has_writers and unit in self.units else self.short.discard)(unit)

    def drain(self, unit: int, draining: bool) -> None:
        """Start or stop the drain of a unit."""
        self.nudges += 1
        self.unsent.append((unit, DrainFinished(draining)))

    def present_mirrors(self) -> set[int]:
        """Return the connected mirrors to which blocks are copied. Those of earlier terms are drained."""
        return self.context.state.mirrors & self.units - self.context.state.draining

    def send(self, unit: int, blocks: Blocks, repacks: Sequence[Repack]) -> Move:
        """Order a unit to copy these blocks. Returns the order."""
        self._number = max(self._number, int(self.context.now * 1e6)) + 1  # larger than those before a restart
        lie_in = set(np.frombuffer(blocks.unit, "<i4").tolist())
        units = self.context.state.units
        node = units[unit].node
        lie_in_units = [info for number, info in units.items() if number in lie_in]
        arenas = {info.unit: info.arena for info in lie_in_units if info.node == node}
        remotes = {info.unit: info.remote for info in lie_in_units if info.node != node}
        order = Move(self._number, blocks, arenas, list(repacks), remotes)
        self.unsent.append((unit, order))
        return order

    def on_report(self, report: BlocksMovedReport) -> list[r.AnyRecord]:
        """Take a unit's report of an order; return the records.

        Raises ProtocolError if the report is not valid; the plan then continues as if the unit could not copy anything.
        """
        policy = next(iter(self.lines.get(report.unit, ())), None)
        if policy is None or policy.order is None or policy.order.number != report.move:
            # the order of a plan that was forgotten
            return close_reported_extents(self.context.state, report.unit, [report.extent]) if report.extent else []
        return policy.on_report(policy.order, report)


class Policy(CoreService):
    """Decides what units copy, in one plan at a time."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.state = context.state
        self.mover = context.services[Mover]
        self.order: Move | None = None
        """The order that a unit carries out."""
        self._unit = -1  # in whose line this policy stands
        self._report: BlocksMovedReport | None = None  # of the last order
        self._steps: PlanSteps[Sequence[r.AnyRecord]] | None = None  # the plan that is carried out
        self._unrecorded: list[tuple[int, int]] = []  # the extents of reports that are in no record yet

    def plan(self) -> PlanSteps[Sequence[r.AnyRecord]]:
        """Make and carry out a plan, if there is something to do. Returns the last records to be applied."""
        raise NotImplementedError

    def is_waiting(self) -> bool:
        """Return whether the plan waits for a unit."""
        line = self.mover.lines.get(self._unit, [])
        return self in line and (self.order is not None or line[0] is not self)

    def on_due(self) -> list[Effect]:
        """Do a few steps of a plan: apply its records, and return the orders to units."""
        if self._steps is None:
            self._steps = self.plan()
        records = self._advance()
        unsent, self.mover.unsent = self.mover.unsent, []
        self.context.log.apply_all(records)
        return [SendToUnit(unit, order) for unit, order in unsent]

    def on_report(self, order: Move, report: BlocksMovedReport) -> list[r.AnyRecord]:
        """Take the report of the order; return the records. See `Mover.on_report`."""
        self.leave()
        self._report = msgspec.structs.replace(report, extent=0, failed="the report was not valid")
        lost = check_moved(self.state, order, report) if report.extent else []
        self._report = report
        if report.extent:
            self._unrecorded.append((report.unit, report.extent))
        return lost + self._advance()

    @observes(r.StateLoaded)
    def forget(self, record: r.StateLoaded) -> None:
        """Forget the plan, because another state with other blocks was loaded. The extents that it has filled close."""
        self.leave()
        self.mover.nudges += 1
        self.mover.unsent = [each for each in self.mover.unsent if isinstance(each[1], DrainFinished)]
        self._steps, self._unrecorded = self._close(self._unrecorded), []

    def await_turn(self, unit: int) -> PlanSteps[bool]:
        """Wait until a unit can take an order of this policy. Returns False if the unit is gone."""
        if unit in self.mover.units:
            self._unit = unit
            self.mover.lines.setdefault(unit, []).append(self)
        while self.is_waiting():
            yield None
        return self in self.mover.lines.get(unit, [])

    def carry_out(self, blocks: Blocks, repacks: Sequence[Repack] = ()) -> PlanSteps[BlocksMovedReport | None]:
        """Let the unit whose turn was awaited copy blocks. Returns its report; None if the unit is gone."""
        self._report, self.order = None, self.mover.send(self._unit, blocks, repacks)
        while self.is_waiting():
            yield None
        self.order = None
        return self._report

    def leave(self) -> None:
        """Leave the line of the unit, so that the next policy has its turn."""
        line = self.mover.lines.get(self._unit, [])
        if self in line:
            line.remove(self)
        self.order = None

    def _advance(self) -> list[r.AnyRecord]:
        """Do a few steps of the plan, until it has records or waits. Returns the records."""
        steps = self._steps
        assert steps is not None
        for _ in range(SLICES):
            try:
                records = next(steps)
            except StopIteration as end:
                self._steps, records = None, end.value or None
            if records is None:
                break
            if records:
                self._unrecorded.clear()
                return list(records)
        return []

    def _close(self, extents: list[tuple[int, int]]) -> PlanSteps[Sequence[r.AnyRecord]]:
        for unit, extent in extents:
            if unit in self.state.units:
                yield close_reported_extents(self.state, unit, [extent])
        return []
