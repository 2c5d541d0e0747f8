"""Producers that would be too far ahead of the policy have to wait."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness

from transfer_queue.core.absent_clients import ABSENCE_SECONDS
from transfer_queue.errors import InvalidArgumentError, StalenessError, UnknownPartitionError
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.partitions import (
    CreatePartition,
    ReadPolicyVersion,
    Seal,
    SetGroupDemand,
    SetPolicyVersion,
    TakeGroupDemand,
)
from transfer_queue.messages.puts import Drop, Reserve
from transfer_queue.messages.queries import Explain
from transfer_queue.messages.system import Status


def made(**options: Any) -> Harness:
    h = Harness()
    h.create(max_staleness=1, rows_per_version=4, **options)
    return h


def test_new_rows_are_admitted_up_to_the_staleness():
    h = made()
    h.put(8)
    with pytest.raises(StalenessError, match=r"8 rows, and its limit at policy version 0 is 8 .*1 more"):
        h.put(1)
    h.put(8, ["y"], rows=range(8))  # new fields of old rows are no new rows


def counts(h: Harness, partition: str = "p") -> int:
    """The number of rows that count for the limit."""
    return h.state.partitions[partition].window.counted


def test_a_waiting_put_continues_with_a_new_policy_version():
    h = made()
    h.put(8)
    waits = h.send(h.publish(4, wait=10.0), "w")
    assert h.dealt(4) == [0, 1, 2, 3]
    assert h.parked(waits, "w"), "finished rows make space with the next version"
    inserts = h.send(Reserve("p", 1, None, 0, wait=10.0), "v")
    h.ask(SetPolicyVersion("p", 1))
    assert len(h.result(waits, "w").rows) == 32
    assert h.parked(inserts, "v"), "12 rows are all that version 1 lets in"
    h.tick(11.0)
    with pytest.raises(StalenessError, match="It waited"):
        h.result(inserts, "v")


@pytest.mark.parametrize("first", [0, 1, 500])
def test_the_limit_does_not_depend_on_the_first_version_or_on_jumps(first):
    h = Harness()
    h.ask(CreatePartition("p", 0, PartitionOptions(max_staleness=1, rows_per_version=4), first))
    assert h.look(ReadPolicyVersion("p")).value == first
    for version in (first, first + 3, first + 100):
        if version > first:
            h.ask(SetPolicyVersion("p", version))
            assert h.look(ReadPolicyVersion("p")).value == version
        while counts(h) < 8:
            h.put(2)
        with pytest.raises(StalenessError, match=f"at policy version {version} .*8 are not finished"):
            h.put(1)
        assert len(h.dealt(4)) == 4
        with pytest.raises(StalenessError, match="4 are not finished by task 't', and 4 were finished since"):
            h.put(1)
    with pytest.raises(UnknownPartitionError, match="'q'"):
        h.ask(ReadPolicyVersion("q"))


def test_the_error_says_that_rows_were_finished_too_late():
    """A loader with delivery="at_least_once" acknowledges a step only when the next one is requested."""
    h = Harness()
    h.ask(CreatePartition("p", 0, PartitionOptions(max_staleness=0, rows_per_version=4)))
    h.put(4)
    h.ask(SetPolicyVersion("p", 1))
    assert len(h.dealt(4)) == 4
    with pytest.raises(StalenessError, match="if version 1 was trained on them, ack them before you set the version"):
        h.put(1)


def test_a_put_that_could_never_be_admitted_is_refused_at_once():
    h = made()
    with pytest.raises(InvalidArgumentError, match=r"at most 8 rows .* this put alone adds 9"):
        h.ask(h.publish(9, wait=10.0))


def test_the_named_task_finishes_rows():
    h = made(trained_by="train", free_when=["reward", "train"])
    h.put(8)
    assert len(h.dealt(8, "reward")) == 8
    h.ask(SetPolicyVersion("p", 1))
    assert counts(h) == 8
    assert len(h.dealt(2, "train")) == 2
    h.ask(SetPolicyVersion("p", 2))
    assert counts(h) == 6


def test_without_a_named_task_all_tasks_of_free_when_finish_rows():
    h = made(free_when=["reward", "train"])
    h.put(8)
    h.dealt(8, "log")
    h.dealt(2, "train")
    h.dealt(8, "reward")
    h.ask(SetPolicyVersion("p", 1))
    assert counts(h) == 6


def test_without_free_when_all_tasks_that_have_claimed_rows_finish_them():
    h = made()
    h.put(8)
    h.dealt(8, "reward")
    assert h.dealt(2, "train") == [0, 1]
    h.ask(SetPolicyVersion("p", 1))
    assert counts(h) == 6
    with pytest.raises(StalenessError, match=r"not finished by all of the tasks \['reward', 'train'\]"):
        h.put(3)


def test_a_task_that_only_has_leases_counts_as_well():
    h = made()
    h.put(8)
    h.dealt(8, "reward")
    h.lease(2, "train")
    h.ask(SetPolicyVersion("p", 1))
    assert counts(h) == 8


def test_rows_that_a_reset_makes_ready_again_are_not_finished():
    h = made()
    h.put(8)
    h.dealt(8)
    h.ask(SetPolicyVersion("p", 1))
    assert counts(h) == 0
    h.ask(ResetConsumption("p", "t"))
    assert counts(h) == 8
    h.dealt(4)
    assert counts(h) == 8
    h.ask(ResetConsumption("p", "t"))
    assert counts(h) == 8
    h.dealt(4)
    h.ask(SetPolicyVersion("p", 2))
    assert counts(h) == 4


def test_a_reset_of_one_of_the_tasks_finishes_what_the_others_have_consumed():
    h = made()
    h.put(8)
    h.dealt(6, "reward")
    h.dealt(2, "train")
    assert counts(h) == 8
    h.ask(ResetConsumption("p", "train"))
    assert counts(h) == 8, "6 are finished, but not before this version"
    h.ask(SetPolicyVersion("p", 1))
    assert counts(h) == 2


def test_rows_skipped_as_poison_make_space_at_once():
    h = made(max_deliveries=1)
    h.put(8)
    waits = h.send(h.publish(2, wait=10.0), "w")
    h.nack(h.lease(2))
    assert len(h.result(waits, "w").rows) == 16
    assert counts(h) == 8


def test_pre_allocated_rows_count_when_they_are_taken():
    h = made(pre_allocate=16)
    assert counts(h) == 0
    h.put(8)
    assert counts(h) == 8
    h.ask(Seal("p"))
    assert counts(h) == 8


def test_wanted_groups_are_at_most_as_many_as_the_limit_admits():
    h = made(group_size=2)
    h.ask(SetGroupDemand("p", "t", 100))
    assert h.ask(TakeGroupDemand("p", "t", None)).value == 4
    assert h.ask(TakeGroupDemand("p", "t", 3), "v").value == 3
    assert h.ask(TakeGroupDemand("p", "t", 3), "w").value == 1
    assert h.ask(TakeGroupDemand("p", "t", 3), "x").value == 0
    for name in "vvvw":
        h.put(2, groups=[f"g{h.state.next_index}"] * 2, name=name)
    waits = h.send(TakeGroupDemand("p", "t", 3, 10.0), "x")
    h.dealt(4)
    assert h.parked(waits, "x")
    h.ask(SetPolicyVersion("p", 1))
    assert h.result(waits, "x").value == 2


def test_dropped_rows_do_not_count():
    h = made(group_size=2)
    h.put(8, groups=[f"g{i // 2}" for i in range(8)])
    waits = h.send(h.publish(2, groups=["h", "h"], wait=10.0), "w")
    assert h.ask(Drop("p", "all alike", groups=["g1"])).value == 2
    assert h.result(waits, "w") is not None


@pytest.mark.parametrize(
    "options", [{"max_staleness": 1, "rows_per_version": 2}, {"max_rows": 4}], ids=["staleness", "rows"]
)
@pytest.mark.parametrize("is_waiting", [True, False])
def test_rows_that_a_dead_client_has_reserved_make_space(options: dict[str, int], is_waiting: bool) -> None:
    """A producer that was killed after it reserved rows does not keep the others from putting for ever."""
    h = Harness()
    h.create(**options)
    h.send(Reserve("p", 3, None, 0), "dead")
    h.put(1)
    waits = h.send(h.publish(2, wait=100.0), "w") if is_waiting else 0
    h.disconnect("dead")
    if is_waiting:
        assert h.parked(waits, "w"), "the client may come back"
    h.tick(ABSENCE_SECONDS + 1)
    if not is_waiting:
        waits = h.send(h.publish(2), "w")
    assert len(h.result(waits, "w").rows) == 16
    [shown] = h.look(Status()).partitions
    assert shown.dropped == {"reserved by a client that is gone": 3}


def test_rows_that_a_dead_client_has_reserved_stay_while_there_is_space() -> None:
    """Another process may have their metadata, and put them."""
    h = made()
    h.send(Reserve("p", 3, None, 0), "dead")
    h.disconnect("dead")
    h.tick(ABSENCE_SECONDS + 1)
    h.put(3, rows=range(3))
    assert h.dealt(3) == [0, 1, 2]


def test_a_version_never_goes_back():
    h = made()
    h.ask(SetPolicyVersion("p", 3))
    h.ask(SetPolicyVersion("p", 3))
    with pytest.raises(InvalidArgumentError, match="cannot go back to 2"):
        h.ask(SetPolicyVersion("p", 2))
    with pytest.raises(UnknownPartitionError, match="'q'"):
        h.ask(SetPolicyVersion("q", 1))


def test_it_shows_in_status_and_explain():
    h = made()
    h.put(8)
    h.send(h.publish(1, wait=10.0), "w")
    (partition,) = h.look(Status()).partitions
    assert (partition.policy.version, partition.policy.admitted, partition.policy.limit) == (0, 8, 8)
    assert partition.waiting_puts == 1
    words = h.look(Explain("p", task="t", fields=["z"])).value
    assert "New samples wait for the policy: 8 samples were admitted" in words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_staleness": 1}, "go together"),
        ({"trained_by": "t"}, "pass max_staleness and rows_per_version, too"),
        ({"rows_per_version": 1}, "go together"),
        ({"max_staleness": 1, "rows_per_version": 0}, "rows_per_version must be positive"),
        ({"keep_rows": 0}, "keep_rows must be positive"),
        ({"keep_seconds": -1.0}, "keep_seconds must be positive"),
        ({"replicas": 0}, "replicas must be positive"),
        ({"max_rows": 0}, "max_rows must be positive"),
        ({"order": "random"}, "order must be one of fifo, lifo, priority"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        Harness().create(**options)
