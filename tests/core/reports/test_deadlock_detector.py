"""If every put waits for space and every claim for rows, the puts fail at once, with an explanation."""

from __future__ import annotations

import pytest
from harness import Harness, column

from transfer_queue.core.activity import Activity
from transfer_queue.errors import DeadlockError, ProtocolError
from transfer_queue.messages.claims import Finish
from transfer_queue.messages.partitions import ClearPartition, SetPolicyVersion
from transfer_queue.messages.puts import ClearRows
from transfer_queue.messages.queries import Watch
from transfer_queue.messages.reports.unit_reports import SpaceShortReport


def full(**more) -> Harness:
    """Return a harness with two rows, and no space for another one."""
    h = Harness(capacity=2)
    h.create(**more)
    h.put(2)
    return h


def waits(h: Harness, name: str = "w") -> int:
    return h.send(h.publish(1, name=name, wait=1000.0), name)


@pytest.mark.design(
    "when every put waits for space and every claim for rows, the puts fail at once, with the cycle in words"
)
def test_the_last_waiting_request_ends_the_deadlock_at_once():
    h = full()
    put = waits(h)
    assert h.parked(put, "w"), "somebody may still claim what is there"
    h.claim(4, "train", wait=1000.0)
    with pytest.raises(DeadlockError) as told:
        h.result(put)
    assert "client w waits for space for 1 sample in partition 'p'" in str(told.value)
    assert "task 'train' waits for 4 samples with ['x'] in partition 'p', where 2 are ready" in str(told.value)


def test_a_put_that_completes_the_deadlock_fails():
    """Also if there is a client that only controls the system."""
    h = full()
    h.client("onlooker")
    claim = h.claim(4, wait=1000.0)
    with pytest.raises(DeadlockError):
        h.result(waits(h))
    assert h.parked(claim, "r"), "claims wait on: fields of old rows may come, and a client may free space"


def test_clients_that_fetched_rows_may_still_clear_them():
    h = full()
    assert h.dealt(1) == [0]
    h.claim(4, "other", name="o", wait=1000.0)
    put = waits(h)
    assert h.parked(put, "w")
    h.clear([0])
    assert len(h.result(put).rows) == 8


@pytest.mark.parametrize("who", ["r", "late"])
def test_rows_consumed_by_all_waiting_tasks_may_be_cleared_by_others(who):
    """A trainer that still loads its model, or asks now and then, or reads by key; a driver that clears a step late."""
    h = full()
    assert h.dealt(2, "reward") == [0, 1]
    h.claim(2, "reward", wait=1000.0)
    put = waits(h)
    assert h.parked(put, "w")
    h.ask(ClearRows("p", column([0])), who)
    assert len(h.result(put).rows) == 8


def test_rows_that_a_waiting_task_needs_are_not_cleared():
    h = full()
    assert h.dealt(1, "reward") == [0]
    h.claim(2, "reward", wait=1000.0)
    put = waits(h)
    assert h.parked(put, "w")
    h.claim(3, "train", name="t", wait=1000.0)
    with pytest.raises(DeadlockError, match="task 'train' waits for 3 samples"):
        h.result(put)


def test_a_client_that_fetches_again_does_not_clear():
    h = full(free_when=["t"])
    h.claim(1, hold=True)
    put = waits(h)
    assert h.parked(put, "w")
    h.claim(4, wait=1000.0, hold=True)
    h.ask(Finish("p", "t", column([0]), "r"), "r")
    assert h.result(put) is not None
    with pytest.raises(DeadlockError, match="task 't' waits for 4 samples"):
        h.result(waits(h))


@pytest.mark.parametrize("free_when", [[], ["train"]])
def test_a_claim_that_lacks_only_fields_is_no_part_of_a_deadlock(free_when):
    """A client that still loads its reward model has not fetched any rows."""
    h = full(free_when=free_when)
    h.claim(2, "train", wait=1000.0, fields=["x", "r"])
    put = waits(h)
    assert h.parked(put, "w")
    h.claim(3, "other", name="o", wait=1000.0)
    assert h.parked(put, "w")


def test_a_watching_client_may_act_while_its_other_thread_puts():
    """One process that produces, and that clears in a loop over `subscribe`."""
    h = full()
    h.ask(Watch("p"), "w")
    h.claim(4, wait=1000.0)
    put = waits(h)
    assert h.parked(put, "w")
    h.clear([0])
    assert len(h.result(put).rows) == 8


def test_a_fetch_that_keeps_its_rows_may_still_clear_them():
    """A prefetching worker fetches ahead of the process that trains."""
    h = full(free_when=["t"])
    assert h.got(h.claim(2, hold=True)) == [0, 1]
    h.claim(1, wait=1000.0, hold=True)
    put = waits(h)
    assert h.parked(put, "w")
    h.ask(Finish("p", "t", column([0, 1]), "r"), "r")
    assert h.result(put) is not None


def watches_and_waits(h: Harness) -> None:
    h.ask(Watch("p"), "other")
    h.send(Watch("p", h.state.partitions["p"].version, wait=1000.0), "other")


@pytest.mark.parametrize(
    "act",
    [
        lambda h: h.put(1, ["z"], name="other", rows=[0]),
        lambda h: h.ask(ClearRows("p", column([17])), "other"),
        lambda h: h.ask(SetPolicyVersion("p", 1), "other"),
        lambda h: h.ask(Watch("p"), "other"),
        watches_and_waits,
    ],
    ids=["puts", "clears", "sets the policy", "watches", "watches and waits"],
)
def test_a_client_that_may_act_again_prevents_a_deadlock(act):
    """For example a driver loop that watches for finished rows and clears them."""
    h = full()
    act(h)
    h.claim(4, wait=1000.0)
    put = waits(h)
    assert h.parked(put, "w")
    h.disconnect("other")
    with pytest.raises(DeadlockError):
        h.result(put)


def test_a_task_that_may_free_rows_prevents_a_deadlock():
    h = full(free_when=["t", "u"])
    h.claim(4, wait=1000.0)
    put = waits(h)
    assert h.parked(put, "w"), "nobody has come for task 'u' yet"
    h.claim(4, "u", name="u", wait=1000.0)
    with pytest.raises(DeadlockError):
        h.result(put)


def test_a_partition_without_waiting_claims_may_still_be_cleared():
    """The partition of the last step, which its driver drops when the step is done."""
    h = Harness(capacity=4)
    h.put(2, partition="last")
    h.put(2)
    h.claim(4, wait=1000.0)
    put = waits(h)
    assert h.parked(put, "w")
    h.ask(ClearPartition("last"), "driver")
    assert h.result(put) is not None


def test_producers_of_dropped_partitions_do_not_count():
    h = Harness(capacity=2)
    h.put(1, partition="gone", name="driver")
    h.ask(ClearPartition("gone"), "driver")
    h.put(2)
    h.claim(4, wait=1000.0)
    with pytest.raises(DeadlockError):
        h.result(waits(h))


def test_no_claim_no_deadlock():
    h = full()
    put = waits(h)
    assert h.parked(put, "w")
    h.tick(1000.0)
    with pytest.raises(Exception, match="It waited"):
        h.result(put)


def test_admission_can_deadlock_too():
    h = Harness()
    h.create(max_staleness=0, rows_per_version=2)
    h.put(2)
    put = waits(h)
    h.claim(4, wait=1000.0)
    assert h.parked(put, "w"), "somebody is to set the policy's version, and has not come yet"
    h.ask(SetPolicyVersion("p", 0), "r")
    with pytest.raises(DeadlockError):
        h.result(put)


class TestBytes:
    """A writer that waits for bytes waits at the storage unit, which reports it to the controller."""

    def short(self, h: Harness, *writers: str, freed: int = 0) -> None:
        h.ask(SpaceShortReport(0, list(writers), freed), "unit-0")

    def test_the_unit_gets_the_order_to_refuse_leases(self):
        h = Harness()
        h.put(2)
        h.claim(4, wait=1000.0)
        self.short(h, "w")
        ((unit, words),) = h.refused
        assert unit == 0
        assert "w waits for bytes of storage unit 0" in words

    def test_extents_that_are_being_freed_prevent_a_deadlock(self):
        h = Harness()
        for _ in range(4):
            rows = h.put(1)
        h.clear(range(rows[0]))
        assert h.freed
        h.claim(4, wait=1000.0)
        self.short(h, "w", freed=0)
        assert not h.refused
        self.short(h, "w", freed=1)
        assert len(h.refused) == 1

    def test_only_the_unit_itself_may_report_short_space(self):
        h = Harness()
        with pytest.raises(ProtocolError, match="only the unit itself"):
            h.ask(SpaceShortReport(0, ["w"], 0), "w")


def test_activity_in_dropped_partitions_is_forgotten():
    """A run creates a partition for each step, without end."""
    h = Harness()
    for step in range(20):
        name = f"train_{step}"
        h.create(name, max_staleness=0, rows_per_version=4)
        h.ask(SetPolicyVersion(name, 1))
        h.put(2, partition=name)
        assert h.dealt(2, partition=name)
        h.ask(ClearPartition(name))
    movers = h.controller.context.services[Activity]
    assert not any([*movers.actors.values(), *movers.watchers.values(), *movers.busy.values(), movers.policies])
