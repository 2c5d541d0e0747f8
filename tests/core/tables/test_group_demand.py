"""Producers learn how many complete groups are still missing."""

from __future__ import annotations

import pytest
from harness import Harness

from transfer_queue.errors import InvalidArgumentError, UnknownPartitionError
from transfer_queue.messages.partitions import SetGroupDemand, TakeGroupDemand
from transfer_queue.messages.puts import Drop
from transfer_queue.messages.system import Status
from transfer_queue.sampler import GRPOGroupNSampler


def missing(h: Harness, most: int | None = None, name: str = "w") -> int:
    return h.ask(TakeGroupDemand("p", "t", most), name).value


def pairs(*names: str) -> list[str]:
    return [name for name in names for _ in range(2)]


def made(**options) -> Harness:
    h = Harness(GRPOGroupNSampler(2))
    h.create(**{"group_size": 2, **options})
    h.ask(SetGroupDemand("p", "t", 3))
    return h


def test_groups_that_exist_or_are_begun_are_not_missing():
    h = made()
    assert missing(h) == 3
    h.put(3, groups=["a", "a", "b"])
    assert missing(h) == 1
    assert h.look(Status()).partitions[0].wanted == {"t": (3, 1)}


def test_a_drop_makes_a_group_missing_again():
    """Dynamic sampling: groups whose rewards are all equal are dropped and replaced."""
    h = made()
    h.put(6, groups=pairs("a", "b", "c"))
    assert missing(h) == 0
    waits = h.send(TakeGroupDemand("p", "t", 4, wait=100.0), "producer")
    assert h.parked(waits, "producer")
    h.ask(Drop("p", "all alike", groups=["b", "c"]))
    assert h.result(waits, "producer").value == 2


def test_consumption_increases_the_missing_groups():
    h = made()
    h.put(6, groups=pairs("a", "b", "c"))
    assert h.dealt(4) == [0, 1, 2, 3]
    assert missing(h) == 2
    h.clear([0, 1, 2, 3])
    assert missing(h) == 2


def test_groups_by_order_of_reservation_are_counted():
    h = Harness(GRPOGroupNSampler(2))
    h.create()
    h.ask(SetGroupDemand("p", "t", 3))
    h.put(3)
    assert missing(h) == 1
    assert h.dealt(2) == [0, 1]
    assert missing(h) == 2


def test_two_producers_do_not_promise_the_same_groups():
    h = made()
    assert missing(h, 2, "one") == 2
    assert missing(h, 2, "two") == 1
    assert missing(h, 2, "three") == 0
    h.put(2, groups=["a", "a"], name="one")
    assert missing(h) == 0, "one group exists, two are promised"
    h.disconnect("two")
    assert missing(h) == 1, "a client that is gone keeps no promise"
    h.put(2, groups=["b", "b"], name="one")
    assert missing(h, name="three") == 1


def test_a_wait_that_times_out_returns_zero():
    h = made()
    h.ask(SetGroupDemand("p", "t", 0))
    waits = h.send(TakeGroupDemand("p", "t", wait=5.0))
    h.tick(5.0)
    assert h.result(waits).value == 0


def test_a_producer_waits_for_a_partition_that_does_not_exist_yet():
    h = Harness()
    waits = h.send(TakeGroupDemand("p", "t", wait=5.0))
    h.create()
    h.ask(SetGroupDemand("p", "t", 2), "trainer")
    assert h.result(waits).value == 2


def test_wrong_demands_are_refused():
    h = made()
    with pytest.raises(UnknownPartitionError, match="'q'"):
        h.ask(SetGroupDemand("q", "t", 1))
    with pytest.raises(InvalidArgumentError, match="most must be positive"):
        h.ask(TakeGroupDemand("p", "t", 0))
    assert h.ask(TakeGroupDemand("q", "t")).value == 0
