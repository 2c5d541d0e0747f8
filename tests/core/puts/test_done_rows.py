"""The controller counts the rows that were added and those that are done, and clients wait until these are equal."""

from __future__ import annotations

import pytest
from harness import Harness, column

from transfer_queue.errors import InvalidArgumentError, UnknownPartitionError
from transfer_queue.messages.partitions import AwaitDone, ClearPartition, ReportDone
from transfer_queue.messages.puts import ClearRows, Drop
from transfer_queue.messages.queries import Backlog, ReadBacklog


def done(h: Harness) -> bool:
    return bool(h.ask(AwaitDone("p")).value)


def test_a_wait_ends_when_as_many_rows_are_done_as_were_added():
    h = Harness()
    h.create()
    assert done(h)
    h.put(2)
    assert not done(h)
    waits = h.send(AwaitDone("p", 10.0), "v")
    h.ask(ReportDone("p"))
    h.put(1)
    h.ask(ReportDone("p", 1))
    assert h.parked(waits, "v"), "a row that was added meanwhile counts, too"
    h.ask(ReportDone("p"))
    assert h.result(waits, "v").value is True
    assert done(h)


def test_the_wait_ends_with_its_time_and_with_the_partition():
    h = Harness()
    h.put(1)
    waits = h.send(AwaitDone("p", 10.0), "v")
    h.tick(11.0)
    assert h.result(waits, "v").value is False
    waits = h.send(AwaitDone("p", 10.0), "v")
    h.ask(ClearPartition("p"))
    with pytest.raises(UnknownPartitionError):
        h.result(waits, "v")


def test_cleared_rows_stay_undone_and_dropped_rows_do_not_count():
    h = Harness()
    h.put(3)
    h.ask(ClearRows("p", column([0])))
    h.ask(Drop("p", "stale", column([1])))
    assert h.look(ReadBacklog("p", "t")) == Backlog(1, 0, 2, False)
    h.ask(ReportDone("p", 2))
    assert done(h)


def test_a_row_that_was_delivered_too_often_is_done_because_nobody_can_report_it():
    h = Harness()
    h.create(free_when=["t"], max_deliveries=2)
    h.put(2)
    waits = h.send(AwaitDone("p", 100.0), "v")
    for _ in range(2):
        assert h.nack(h.lease(2))
    assert h.result(waits, "v").value is True
    h.put(1)
    assert not done(h)
    h.ask(ReportDone("p"))
    assert done(h)


def test_a_row_that_another_task_needs_is_not_done_when_one_task_skips_it():
    h = Harness()
    h.create(free_when=["t", "u"], max_deliveries=1)
    h.put(1)
    assert h.nack(h.lease(1))
    assert not done(h)


def test_more_rows_than_were_added_cannot_be_done():
    h = Harness()
    h.put(1)
    h.ask(ReportDone("p", 0))
    with pytest.raises(InvalidArgumentError, match="2 samples of partition 'p' were reported as done, but only 1"):
        h.ask(ReportDone("p", 2))
    h.ask(ReportDone("p"))
    with pytest.raises(InvalidArgumentError, match="only 0"):
        h.ask(ReportDone("p"))
    with pytest.raises(UnknownPartitionError, match="'q'"):
        h.ask(ReportDone("q"))


def test_a_report_that_is_sent_twice_counts_once():
    h = Harness()
    h.put(2)
    sequence = h.send(ReportDone("p"), "v")
    h.connect("v")
    h.send(ReportDone("p"), "v", sequence)
    assert h.state.partitions["p"].undone == 1


def test_the_backlog_of_a_task_has_waiting_and_claimed_rows():
    h = Harness()
    h.put(4)
    assert h.dealt(1) == [0]
    h.lease(1)
    assert h.look(ReadBacklog("p", "t")) == Backlog(2, 1, 4, False)
    assert h.look(ReadBacklog("p", "other")) == Backlog(4, 0, 4, False)
    assert h.look(ReadBacklog("unknown", "t")) == Backlog(0, 0, 0, False)
