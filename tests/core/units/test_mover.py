"""Policies take turns at a unit; a drain that waits says what it waits for, on the newest connection of its client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from harness import Harness
from test_migration_planner import LENGTH, Life, settle

from transfer_queue.core.context import Context
from transfer_queue.core.events.records import AnyRecord
from transfer_queue.core.units.migration_planner import blocks_message
from transfer_queue.core.units.mover import PlanSteps, Policy
from transfer_queue.errors import ProtocolError
from transfer_queue.messages.base import Done
from transfer_queue.messages.queries import ExplainWait
from transfer_queue.messages.reports.unit_reports import BlocksMovedReport, Move
from transfer_queue.messages.system import Drain


class Endless(Policy):
    """Always has another order for unit 0. reports: what it got."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.reports: list[BlocksMovedReport | None] = []

    def plan(self) -> PlanSteps[Sequence[AnyRecord]]:
        while (yield from self.await_turn(0)):
            self.reports.append((yield from self.carry_out(blocks_message([]))))
        return []


def work(h: Harness, policies: list[Endless]) -> list[Move]:
    """Let all policies go on; return the orders that were sent."""
    return [
        effect.request  # type: ignore[union-attr]
        for policy in policies
        for effect in policy.on_due()
    ]


def full(order: Move) -> BlocksMovedReport:
    return BlocksMovedReport(order.number, 0, 0, 0, 0, b"", [])


def test_policies_take_turns_at_a_unit(h: Harness) -> None:
    life = Life()
    life.start(1)
    policies = [Endless(life.h.controller.context) for _ in range(3)]
    for _ in range(9):
        (order,) = work(life.h, policies)
        assert life.h.ask(full(order), "unit-0") == Done()
    assert [len(policy.reports) for policy in policies] == [3, 3, 3]


def test_a_unit_that_is_gone_keeps_no_policy_waiting(h: Harness) -> None:
    life = Life()
    life.start(1)
    policies = [Endless(life.h.controller.context) for _ in range(2)]
    assert len(work(life.h, policies)) == 1
    life.h.disconnect("unit-0")
    assert not any(policy.is_waiting() for policy in policies)
    assert work(life.h, policies) == []
    assert policies[0].reports == [None]
    assert policies[1].reports == []


def test_a_report_that_is_not_valid_counts_as_one_of_no_copies(h: Harness) -> None:
    life = Life()
    life.start(1)
    (policy,) = policies = [Endless(life.h.controller.context)]
    (order,) = work(life.h, policies)
    offsets = np.array([0], "<i8").tobytes()
    with pytest.raises(ProtocolError, match="was for 0 blocks"):
        life.h.ask(BlocksMovedReport(order.number, 0, 99, LENGTH, 1, offsets, []), "unit-0")
    assert len(work(life.h, policies)) == 1, "the next order is sent"
    (report,) = policy.reports
    assert report is not None
    assert not report.extent


def drained() -> tuple[Life, int]:
    """A client waits until unit 1 with one block is empty."""
    life = Life()
    life.start(1)
    life.put(2, ["x"], [1], close=True)
    return life, life.h.send(Drain(1, wait=60.0))


def test_a_drain_that_waits_says_for_what(h: Harness) -> None:
    life, sequence = drained()
    text = "A drain waits until storage unit 1 is empty; it still holds 1 blocks."
    assert life.h.ask(ExplainWait(sequence)) == Done(text)
    settle(life.h, life.units)
    assert life.h.reply(sequence) == Done(0)
    assert life.h.ask(ExplainWait(sequence)) == Done("")


def test_a_late_copy_of_a_drain_does_not_take_its_reply(h: Harness) -> None:
    """It was sent on an earlier connection, which ends later."""
    life, sequence = drained()
    h = life.h
    first = h.clients["w"].peer
    newest = h.connect("w")
    h.send(Drain(1, wait=60.0), sequence=sequence)
    h.clients["w"].peer = first
    h.send(Drain(1, wait=60.0), sequence=sequence)
    h.clients["w"].peer = newest
    h.disconnect("w", first)
    settle(h, life.units)
    assert h.reply(sequence) == Done(0)
