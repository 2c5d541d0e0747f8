"""Samples that a process had claimed without a lease when it was gone are reported, unless they are not lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Harness, rows_of

from transfer_queue.errors import WaitTimeoutError
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.queries import Explain
from transfer_queue.messages.reports.timeline import Introduce, Leave
from transfer_queue.messages.system import Status
from transfer_queue.sampler import RankAwareSampler


def abandoned(h: Harness, partition: str = "p") -> dict[str, dict[str, int]]:
    (progress,) = [each for each in h.ask(Status(), "onlooker").partitions if each.name == partition]
    return {task.name: task.abandoned for task in progress.tasks if task.abandoned}


def explain(h: Harness, **which: object) -> str:
    return h.ask(Explain("p", **which), "onlooker").value  # type: ignore[no-any-return, arg-type]


def give(h: Harness, rows: list[int], name: str = "r", fields: tuple[str, ...] = ("y",)) -> None:
    """Put fields of samples that exist."""
    h.ask(h.publish(len(rows), fields, name=name, rows=rows), name)


@pytest.fixture
def dead(h: Harness) -> Harness:
    """Six samples; the client r finished 0 and 1, had claimed 2 and 3, and was killed."""
    h.ask(Introduce("", -1, "node-1", 17), "r")
    h.put(6)
    give(h, h.dealt(2))
    assert h.dealt(2) == [2, 3]
    assert abandoned(h) == {}
    h.disconnect("r")
    return h


def test_what_a_dead_client_had_claimed_and_not_finished_is_named(dead: Harness) -> None:
    assert abandoned(dead) == {"t": {"pid 17, node-1": 2}}
    text = (
        "2 samples of partition 'p' may be lost to task 't', because the process that had claimed them without a lease "
        "is gone (pid 17, node-1): call reset_consumption('p', 't') to deliver all samples to this task again, and "
        "claim with lease= to avoid such losses."
    )
    words = explain(dead, task="train", fields=["x", "y"])
    assert words.startswith("Nearest to ready: sample 4 is missing the field 'y' (it has 'x')")
    assert "Sample 2" not in words
    assert words.endswith(f". {text}")
    waits = explain(dead, task="train", fields=["x", "y"], count=3)
    assert f". {text}" in waits
    assert "ample 2 " not in waits
    assert explain(dead, row=2, task="train").endswith(
        "; it may be lost to task 't', because the process that had claimed it without a lease is gone (pid 17, "
        "node-1): call reset_consumption('p', 't') to deliver all samples to this task again, and claim with lease= to "
        "avoid such losses."
    )
    assert "lost" not in explain(dead, row=1)
    assert "lost" not in explain(dead, task="other", fields=["x"])


def test_the_error_of_a_claim_that_waited_names_them(dead: Harness) -> None:
    sequence = dead.claim(3, "train", ["x", "y"], name="trainer", wait=5.0)
    dead.tick(dead.now + 5.0)
    with pytest.raises(WaitTimeoutError, match="may be lost to task 't', because the process that had claimed them"):
        dead.result(sequence, "trainer")


def test_if_nothing_else_is_missing_no_sample_is_nearest_to_ready(dead: Harness) -> None:
    give(dead, [4, 5], "w")
    words = explain(dead, task="train", fields=["x", "y"])
    assert words.startswith("All 2 samples that lack a field of ['x', 'y'] may be lost to another task. 2 samples")


def no_lease(h: Harness) -> None:
    h.lease(2, "u", name="r")


def handed_over_later(h: Harness) -> None:
    h.unseen(2, "u", name="r")


def closed(h: Harness) -> None:
    h.dealt(2, "u")
    h.ask(Leave(), "r")


def returned(h: Harness) -> None:
    h.nack(h.lease(2, "u", name="r"))


@pytest.mark.parametrize("claim", [no_lease, handed_over_later, closed, returned])
def test_samples_that_come_back_by_themselves_or_are_finished_are_not_named(
    h: Harness, claim: Callable[[Harness], None]
) -> None:
    h.put(4)
    give(h, h.dealt(1, "u"))
    claim(h)
    h.disconnect("r")
    assert abandoned(h) == {}


def test_a_batch_of_a_rank_is_dealt_to_it_again_and_not_named() -> None:
    h = Harness(RankAwareSampler())
    h.put(6)
    give(h, h.dealt(2, dp_rank=0, batch_index=0))
    h.dealt(2, dp_rank=0, batch_index=1)
    h.disconnect("r")
    assert abandoned(h) == {}


def test_a_task_that_has_put_nothing_yet_may_put_what_claims_wait_for(h: Harness) -> None:
    h.put(4)
    h.dealt(2)
    h.dealt(1)
    h.disconnect("r")
    assert abandoned(h) == {"t": {"client r": 1}}
    h.claim(2, "train", ["x", "y"], name="trainer", wait=1.0)
    assert abandoned(h) == {"t": {"client r": 3}}
    h.tick(h.now + 1.0)  # between two claims no claim waits
    assert abandoned(h) == {"t": {"client r": 3}}


def test_of_a_task_that_puts_nothing_the_last_claim_is_named(h: Harness) -> None:
    h.put(6)
    assert h.dealt(2, name="other") == [0, 1]
    assert h.dealt(2) == [2, 3]
    assert h.dealt(2) == [4, 5]
    h.disconnect("r")
    assert abandoned(h) == {"t": {"client r": 2}}
    assert "lost" not in explain(h, row=3)
    assert "it may be lost to task 't', because the process that had claimed it" in explain(h, row=5)
    h.clear([5])
    assert abandoned(h) == {"t": {"client r": 1}}
    h.ask(ResetConsumption("p", "t"))
    assert abandoned(h) == {}
    assert h.dealt(5, name="other") == [0, 1, 2, 3, 4]
    assert abandoned(h) == {}


def test_of_a_task_that_claims_with_leases_nothing_is_named(h: Harness) -> None:
    h.put(6)
    h.ack(h.lease(2, name="r"))
    h.lease(2, name="r")
    h.disconnect("r")
    assert abandoned(h) == {}


def test_a_client_that_is_back_has_lost_nothing(dead: Harness) -> None:
    dead.connect("r")
    assert abandoned(dead) == {}
    give(dead, [2])
    dead.disconnect("r")
    assert abandoned(dead) == {"t": {"pid 17, node-1": 1}}


def test_samples_are_named_until_they_are_finished_cleared_or_consumed_again(dead: Harness) -> None:
    give(dead, [2], "w")
    assert abandoned(dead) == {"t": {"pid 17, node-1": 1}}
    dead.ask(ResetConsumption("p", "t"))
    assert abandoned(dead) == {}
    assert dead.dealt(6, name="s") == [0, 1, 2, 3, 4, 5]
    assert abandoned(dead) == {}
    dead.disconnect("s")
    assert abandoned(dead) == {"t": {"client s": 3}}
    dead.clear([3, 4])
    assert abandoned(dead) == {"t": {"client s": 1}}
    dead.ask(ClearPartition("p"))
    assert dead.ask(Status(), "onlooker").partitions == []


def test_samples_that_another_client_consumed_after_a_reset_are_not_named(dead: Harness) -> None:
    """Nobody asked between the death and the second claim."""
    dead.ask(ResetConsumption("p", "t"))
    assert dead.dealt(6, name="s") == [0, 1, 2, 3, 4, 5]
    assert abandoned(dead) == {}


def test_only_what_the_timeline_still_has_is_named() -> None:
    h = Harness(timeline_events=8)
    h.put(40)
    give(h, h.dealt(1))
    for _ in range(20):
        h.dealt(1)
    give(h, [39])
    h.disconnect("r")
    assert abandoned(h) == {"t": {"client r": 6}}


def test_clients_and_partitions_are_distinguished(h: Harness) -> None:
    for partition in ("p", "q"):
        rows = h.put(6, partition=partition)
        for name in ("a", "b"):
            got = rows_of(h.result(h.claim(2, partition=partition, name=name), name))
            h.ask(h.publish(1, ("y",), partition, name, rows=got[:1]), name)
        assert len(rows) == 6
    h.disconnect("a")
    h.disconnect("b")
    assert abandoned(h) == {"t": {"client a": 1, "client b": 1}}
    assert abandoned(h, "q") == {"t": {"client a": 1, "client b": 1}}
