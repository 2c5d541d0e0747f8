"""The state is measured for metrics in short steps, between which anything may happen."""

from __future__ import annotations

import pytest
from harness import Harness, finished

from transfer_queue.core.claims import row_leases
from transfer_queue.core.claims.row_leases import Leases
from transfer_queue.core.reports import status
from transfer_queue.core.reports.status import measure
from transfer_queue.messages.claims import Cancel, RankGone
from transfer_queue.messages.descriptors import DISK, MEMORY, BlockLocation, FieldSpec, NewBlock
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.messages.system import Status
from transfer_queue.metrics.timing import OTHER
from transfer_queue.sampler import RankAwareSampler


def test_partitions_beyond_the_named_ones_are_reported_together(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "NAMED", 2)
    for number in range(5):
        h.put(number + 1, partition=f"p{number}")
    h.claim(1, fields=["y"], partition="p0", wait=100.0)
    h.tick(3.0)
    h.claim(1, fields=["y"], partition="p1", wait=100.0)
    found = finished(measure(h.controller.context, 4.0))
    assert found.count == 5
    *named, others = found.partitions
    assert [partition.name for partition in named] == ["p4", "p3"], "the newest"
    assert (others.name, others.rows) == (OTHER, 1 + 2 + 3)
    assert others.nbytes == sum(h.state.partitions[f"p{number}"].nbytes for number in range(3)) > 0
    (task,) = others.tasks
    assert (task.name, task.waiting, task.longest_wait) == ("t", 2, 4.0)


def test_bytes_of_partitions_in_each_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and bytes are counted including copies; values in an external store have a tier of their own."""
    monkeypatch.setattr(status, "NAMED", 2)
    h = Harness()
    for unit, tier, store in ((1, DISK, ""), (2, MEMORY, '{"kind": "Folder"}')):  # beside the one that is there
        h.ask(RegisterUnit(f"/{unit}", f"/{unit}", name=f"unit-{unit}", tier=tier, store=store), f"unit-{unit}")
    spec = [FieldSpec(name, "tensor", "int8", 0, False) for name in ("x", "y")]
    for number, (partition, unit, others) in enumerate(
        [("old", 0, []), ("p", 0, [1]), ("p", 1, []), ("q", 2, [])], start=1
    ):
        copies = [BlockLocation(other, number, 0, 1, 64) for other in others]
        block = NewBlock(unit, number, 64 * number, 1, 10 * number, 3, spec, b"", 64, copies)
        h.ask(Publish(partition, 3, block=block, pre_allocate=0))
    found = finished(measure(h.controller.context, 0.0))
    assert {partition.name: partition.stored for partition in found.partitions} == {
        "q": {"store": 40}, "p": {"memory": 20, "disk": 20 + 30}, OTHER: {"memory": 10},
    }  # fmt: skip
    assert found.series["stored_values"] == {
        ("q", "store"): 6, ("p", "memory"): 6, ("p", "disk"): 12, (OTHER, "memory"): 6,
    }  # fmt: skip
    assert found.live == {0: 10 + 20, 1: 20 + 30, 2: 40}
    h.ask(ClearPartition("p"))
    assert len(h.state.blocks.stored) == 2
    assert finished(measure(h.controller.context, 0.0)).live == {0: 10, 2: 40}
    tiers = {partition.name: partition.stored for partition in h.look(Status()).partitions}
    assert tiers == {"old": {"memory": 10}, "q": {"store": 40}}


def test_a_claim_that_arrives_between_two_steps_has_waited_for_no_negative_time(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the partitions is reported by name, one together with others."""
    monkeypatch.setattr(status, "NAMED", 1)
    for number in range(2):
        h.put(1, partition=f"p{number}")
    steps = measure(h.controller.context, 1.0)
    next(steps)
    h.tick(3.0)
    for number in range(2):
        h.claim(1, fields=["y"], partition=f"p{number}", wait=100.0)
    found = finished(steps).partitions
    assert [task.longest_wait for partition in found for task in partition.tasks] == [0.0, 0.0]


def test_partitions_dropped_between_two_steps_are_left_out(h: Harness) -> None:
    for number in range(3):
        h.put(2, partition=f"p{number}")
    steps = measure(h.controller.context, 0.0)
    next(steps)
    h.ask(ClearPartition("p0"))
    h.ask(ClearPartition("p1"))
    assert [partition.name for partition in finished(steps).partitions] == ["p2"]


def test_waits_are_counted_by_request_and_task_when_they_end(h: Harness) -> None:
    claim = h.claim(1, "train", wait=100.0)
    late = h.claim(1, "late", fields=["y"], wait=7.0)
    given_up = h.claim(1, "late", fields=["z"], wait=100.0)
    h.now = 2.0
    h.put(1)
    assert h.got(claim) == [0]
    h.tick(7.0)
    assert not h.parked(late)
    h.now = 9.0
    h.ask(Cancel(given_up), "r")
    waits = {(timing.name, timing.task): timing for timing in h.controller.context.measures.waits.timings()}
    assert {key: (sum(timing.counts), timing.seconds) for key, timing in waits.items()} == {
        ("Claim", "train"): (1, 2.0), ("Claim", "late"): (2, 7.0 + 9.0),
    }  # fmt: skip


def test_ends_of_leases_are_counted(h: Harness) -> None:
    h.put(8)
    counts = h.controller.context.services[Leases]
    first, second = h.lease(3), h.lease(2, lease=5.0)
    assert counts.granted == {"t": 2}
    assert finished(measure(h.controller.context, 0.0)).series["leases"] == {("p", "t"): 2}
    h.ack(first, [0, 1])
    h.nack(first, [2])
    h.tick(5.0)
    assert counts.acknowledged == {"t": 2}
    assert counts.redelivered == {("t", "nacked"): 1, ("t", "expired"): len(second.rows) // 8}
    assert finished(measure(h.controller.context, 0.0)).series["leases"] == {}
    again = h.lease(3, "u")
    h.nack(again, delivered=False)
    assert ("u", "nacked") not in counts.redelivered, "its client had not seen them"


def test_rows_of_a_gone_rank_count_as_delivered_again() -> None:
    h = Harness(RankAwareSampler())
    h.put(4)
    h.lease(2, dp_rank=0, batch_index=0)
    h.ask(RankGone("p", "t", 0))
    assert h.controller.context.services[Leases].redelivered == {("t", "rank gone"): 2}


def test_very_many_tasks_are_counted_together(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_leases, "MAX_NAMES", 2)
    h.put(1)
    for task in "abcd":
        h.ack(h.lease(1, task))
    assert h.controller.context.services[Leases].granted == {"a": 1, "b": 1, OTHER: 2}
    assert h.controller.context.services[Leases].acknowledged == {"a": 1, "b": 1, OTHER: 2}


def test_status_reports_times_of_requests_and_the_longest_event(h: Harness) -> None:
    assert h.look(Status()).longest == ("", 0.0)
    h.controller.context.measures.load.record_request(Status, h.now, h.now + 0.004)
    status = h.look(Status())
    assert [(timing.name, sum(timing.counts)) for timing in status.requests] == [("Status", 1)]
    assert status.longest == ("Status", 0.004)
