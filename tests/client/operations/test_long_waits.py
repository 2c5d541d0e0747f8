"""A call that waits for long is logged, in virtual time."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from simulated import Start, introduce, numbers, table
from transfer_queue.client.operations.long_waits import with_verdict
from transfer_queue.client.operations.operations import Operations
from transfer_queue.errors import CapacityError, WaitTimeoutError
from transfer_queue.messages.locks import LockReply, TakeLock
from transfer_queue.messages.reports.progress import describe_abandoned, describe_loss
from transfer_queue.net.calls import Operation
from transfer_queue.sampler import RankAwareSampler
from transfer_queue.testing import Client, Cluster


def conf(seconds: float | None) -> dict[str, object]:
    return {"timeouts": {"report_wait": seconds}}


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_fetch_reports_at_doubling_intervals(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    a = start(seed=1, conf=conf(10)).client("a")
    a.put(numbers(3), partition_id="p")
    for wait in (a.get_meta, a.await_batch):
        caplog.clear()
        try:
            wait(["x"], 4, "p", task_name="train", timeout=100)  # type: ignore[operator]
        except WaitTimeoutError as error:
            assert "Timeout: task 'train' waited 100 s for 4 samples" in str(error)  # noqa: PT017
        assert [words.split(".")[0] for words in reported(caplog)] == [
            f"Still waiting after {seconds} s" for seconds in (10, 20, 40, 80)
        ]
        assert (
            "Task 'train' waits for 4 samples with fields ['x'] in partition 'p'; 3 available. All 3 samples that task "
            "'train' has not consumed are ready. 1 more must come; if none will, call seal('p').\n"
        ) in reported(caplog)[0]


def test_the_last_line_of_a_report_is_the_verdict(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    cluster = start(seed=1, conf=conf(40))
    a, rollout = cluster.client("a"), cluster.client("rollout")
    introduce(rollout, "rollout", 0)
    rollout.put(numbers(3), partition_id="p")
    with pytest.raises(WaitTimeoutError):
        a.get_meta(["x"], 4, "p", task_name="train", timeout=100)
    assert [words.splitlines()[-1] for words in reported(caplog)] == [
        "Starting: so far train waits 100 % of the time for `x`, which rollout puts.",
        "Stopped: nothing was dealt for 80 s; train waits 100 % of the time for `x`, which rollout puts.",
    ]


def test_without_a_timeline_the_report_has_no_verdict(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    a = start(seed=1, conf={**conf(10), "timeline": {"events": 0}}).client("a")
    with pytest.raises(WaitTimeoutError):
        a.get_meta(["x"], 2, "p", task_name="t", timeout=15)
    assert "\n" not in reported(caplog)[0]


def test_a_fetch_that_was_reported_is_met(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    cluster = start(seed=1, conf=conf(10))
    a, b = cluster.client("a"), cluster.client("b")
    waiting = a.start(a.operations.get_meta(["x"], 2, "p", task_name="t", timeout=100))
    cluster.later(35.0, lambda: b.start(b.operations.put(numbers(2), partition_id="p")))
    cluster.wait(lambda: waiting.done)
    assert waiting.result().global_indexes == [0, 1]
    assert [words[:24] for words in reported(caplog)] == ["Still waiting after 10 s", "Still waiting after 20 s"]
    assert "the partition does not exist yet" in reported(caplog)[0]


@pytest.mark.parametrize("wait", ["get_meta", "await_batch"])
def test_a_fetch_of_no_samples_neither_waits_nor_reports(
    start: Start, caplog: pytest.LogCaptureFixture, wait: str
) -> None:
    cluster = start(seed=1, conf=conf(10))
    a = cluster.client("a")
    a.put(numbers(3), partition_id="p")
    before = cluster.controller.context.measures.counters["requests"]
    getattr(a, wait)(["x"], 0, "p", task_name="train", timeout=100)
    assert cluster.controller.context.measures.counters["requests"] == before + 1
    assert reported(caplog) == []


@pytest.mark.parametrize("seconds", [None, 100.0])
def test_nothing_is_reported_before_that_or_if_it_is_switched_off(
    start: Start, caplog: pytest.LogCaptureFixture, seconds: float | None
) -> None:
    a = start(seed=1, conf=conf(seconds)).client("a")
    with pytest.raises(WaitTimeoutError):
        a.get_meta(["x"], 4, "p", task_name="t", timeout=100)
    assert reported(caplog) == []


# A wait -> the call that begins it with a timeout, and the text that explains it.
WAITS: dict[str, tuple[Callable[[Operations, float], Operation[Any]], str]] = {
    "get": (
        lambda its, seconds: its._take_items("queue", 1, 1, seconds),
        "Task 'get' waits for 1 sample with fields ['item'] in partition 'queue'; 0 available. ",
    ),
    "get_many": (
        lambda its, seconds: its._take_items("queue", 8, 1, seconds),
        "Task 'get' waits for 1 to 8 samples with fields ['item'] in partition 'queue'; 0 available. ",
    ),
    "await_ready": (
        lambda its, seconds: its.await_ready("x", 8, "full", "t", timeout=seconds),
        "Task 't' waits for 8 samples with fields ['x'] in partition 'full'; 2 available. ",
    ),
    "put": (
        lambda its, seconds: its.put(numbers(1), partition_id="full", timeout=seconds),
        "A put of 1 sample into partition 'full' waits because partition 'full' is full: 2 rows wait for its "
        "tasks, the limit is 2 (max_rows), and this put adds 1.",
    ),
    "reservation": (
        lambda its, seconds: its.get_meta([], 1, "full", mode="insert", timeout=seconds),
        "A reservation of 1 sample into partition 'full' waits because partition 'full' is full: 2 rows wait for its "
        "tasks, the limit is 2 (max_rows), and this put adds 1.",
    ),
    "stale": (
        lambda its, seconds: its.put(numbers(1), partition_id="stale", timeout=seconds),
        "A put of 1 sample into partition 'stale' waits because partition 'stale' has admitted 2 rows, and its limit "
        "at policy version 0 is 2 (max_staleness 0, 2 rows per version): 2 are not finished by a task (none has "
        "fetched samples so far), and 0 were finished since this version was set, which make space with the next "
        "version. 1 more would be too far ahead of the policy, until set_policy_version is called.",
    ),
    "join": (
        lambda its, seconds: its.await_done("full", timeout=seconds),
        "A join (await_done) of partition 'full' waits: 2 samples were put and are not reported as done (report_done, "
        "or task_done of a queue).",
    ),
    "wanted": (
        lambda its, seconds: its.wanted("full", "t", timeout=seconds),
        "A producer (wanted) waits until task 't' misses groups in partition 'full'; its group demand is 1, and as "
        "many groups exist that it has not consumed or are promised by producers (0 are promised).",
    ),
    "no demand": (
        lambda its, seconds: its.wanted("full", "other", timeout=seconds),
        "A producer (wanted) waits until task 'other' misses groups in partition 'full'; no group demand of this task "
        "is set (want).",
    ),
    "watch": (
        lambda its, seconds: its.wait_for_change("full", where={"status": "done"}, timeout=seconds),
        "A call of wait_for_change waits for changes of samples with the tags ['status'] in partition 'full'; it has "
        "2 samples and is at version ",
    ),
    "watch of nothing": (
        lambda its, seconds: its.wait_for_change("ful", timeout=seconds),
        "A call of wait_for_change waits for changes in partition 'ful'; the partition does not exist yet (did you "
        "mean 'full'?).",
    ),
    "lock": (
        lambda its, seconds: its.attachment.ask(TakeLock("full", ["key"], 30.0, seconds), LockReply, None, seconds),
        "A request of pid {pid}, {host} waited 10 s for a lock of 'key' of partition 'full': 'key' is locked for 10 s "
        "by pid {pid}, {host} (token ",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_wait_reports_what_it_waits_for(start: Start, caplog: pytest.LogCaptureFixture, name: str) -> None:
    cluster = start(seed=1, conf=conf(10))
    holder, a = cluster.client("holder"), cluster.client("a")
    holder.call(holder.operations._open_queue("queue", 1, "fifo"))
    holder.create_partition("full", max_rows=2)
    holder.create_partition("stale", max_staleness=0, rows_per_version=2)
    for partition in ("full", "stale"):
        holder.put(numbers(2), partition_id=partition)
    holder.want("full", 1, "t")
    a.get_partition_list()
    holder.kv_lock("key", "full", lease=1000.0).__enter__()
    begin, text = WAITS[name]
    waiting = a.start(begin(a.operations, 75.0))
    cluster.wait(lambda: waiting.done)
    said = reported(caplog)
    assert [words.split(". ")[0] for words in said] == [f"Still waiting after {seconds} s" for seconds in (10, 20, 40)]
    expected = text.format(pid=os.getpid(), host=socket.gethostname())
    assert said[0].removeprefix("Still waiting after 10 s. ").startswith(expected)
    assert "\n" in said[0]  # the verdict


def test_a_wait_keeps_its_place_while_it_is_reported(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The request that came first is met first, however often it was reported."""
    cluster = start(seed=1, conf=conf(10))
    a, b, c = (cluster.client(name) for name in "abc")
    a.create_partition("p", max_rows=1)
    a.put(numbers(1), partition_id="p")
    first = a.start(a.operations.put(numbers(1, 1), partition_id="p", timeout=100))
    cluster.advance(9.0)
    second = b.start(b.operations.put(numbers(1, 2), partition_id="p", timeout=100))
    cluster.advance(9.0)
    assert len(reported(caplog)) == 1
    c.clear_samples(c.get_meta("x", 1, "p", mode="force_fetch"))
    cluster.wait(lambda: first.done)
    assert not second.done
    cluster.advance(10.0)
    c.clear_samples(c.get_meta("x", 1, "p", mode="force_fetch"))
    cluster.wait(lambda: second.done)


def test_a_put_that_waits_for_a_storage_unit_is_reported(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    cluster = start(seed=1, conf=conf(10), arena_bytes=1 << 20)
    a = cluster.client("a")
    a.put(table(x=torch.zeros(1, 150_000)), partition_id="p")
    with pytest.raises(CapacityError):
        a.put(table(x=torch.zeros(1, 150_000)), partition_id="p", timeout=15)
    assert reported(caplog)[0].startswith("Still waiting after 10 s. A put waits for ")


def test_waits_that_end_without_an_error_are_not_failures(start: Start) -> None:
    cluster = start(seed=1, conf=conf(10))
    a = cluster.client("a")
    a.create_partition("p")
    a.put(numbers(1), partition_id="p")
    failures = cluster.controller.context.measures.counters
    for number, wait in enumerate(
        (
            partial(a.await_batch, "x", 2, "p", "t"),
            partial(a.await_ready, "x", 2, "p", "t"),
            partial(a.wanted, "p", "t"),
            partial(a.await_done, "p"),
            partial(a.wait_for_change, "q"),
        )
    ):
        wait(timeout=50)
        assert failures["failures"] == 0, number
    with pytest.raises(WaitTimeoutError):
        a.get_meta("x", 2, "p", task_name="t", timeout=50)
    assert failures["failures"] == 1


class TestRanks:
    @pytest.fixture
    def cluster(self, start: Start) -> Cluster:
        return start(seed=1, sampler=RankAwareSampler())

    def test_the_one_that_is_ahead_is_named(self, a: Client) -> None:
        a.put(numbers(6), partition_id="p")
        for number in range(3):
            a.get_meta(["x"], 2, "p", task_name="t", sampling_config={"dp_rank": 0, "batch_index": number}, timeout=0)
        mine = {"dp_rank": 1, "batch_index": 0}
        words = (
            "Ahead of dp_rank 1, which was dealt 0 batches: dp_rank 0 (3 batches). Pass dp_size= to the datasets, so "
            "that no rank takes samples that another one needs."
        )
        with pytest.raises(WaitTimeoutError) as caught:
            a.get_meta(["x"], 2, "p", task_name="t", sampling_config=mine, timeout=1)
        assert words in str(caught.value)
        text = a.explain("p", task="t", fields=["x"], batch_size=2, sampling_config=mine)
        assert text.startswith("Task 't' waits for 2 samples with fields ['x'] in partition 'p' (batch 0 of dp_rank 1)")
        assert words in text

    def test_explain_of_a_task_includes_ranks_that_wait(self, cluster: Cluster, a: Client, b: Client) -> None:
        a.put(numbers(2), partition_id="p")
        a.get_meta(["x"], 2, "p", task_name="t", sampling_config={"dp_rank": 0, "batch_index": 0}, timeout=0)
        sampling = {"dp_rank": 1, "batch_index": 0}
        b.start(b.operations.get_meta(["x"], 2, "p", task_name="t", sampling_config=sampling, timeout=1))
        cluster.run()
        words = "The dp_ranks of task 't' were dealt different numbers of batches (0: 1, 1: 0): dp_rank 0 is ahead."
        assert words in a.explain("p", task="t", fields=["x"])


@pytest.mark.parametrize("claimed", ["4 samples of partition 'p' may be lost to", "it may be lost to"])
def test_a_verdict_does_not_repeat_which_samples_are_lost(claimed: str) -> None:
    loss = describe_loss("p", "reward", ["rank 0, pid 1, node"], 4)
    other = describe_abandoned("q", "reward", {"rank 0, pid 1, node": 1})
    verdict = f"Stopped: x. {describe_abandoned('p', 'reward', {'rank 0, pid 1, node': 4})}. {other}."
    assert with_verdict(f"Why; {claimed} {loss}.", verdict) == f"Why; {claimed} {loss}.\nStopped: x. {other}."
    assert with_verdict("Why.", verdict) == f"Why.\n{verdict}"
