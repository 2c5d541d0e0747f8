"""A fetch that waits for long is logged, in virtual time."""

from __future__ import annotations

import logging

import pytest

from simulated import Start, numbers
from transfer_queue.errors import WaitTimeoutError
from transfer_queue.messages.reports.timeline import Introduce
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
            "'train' has not consumed are ready.\n"
        ) in reported(caplog)[0]


def test_the_last_line_of_a_report_is_the_verdict(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    cluster = start(seed=1, conf=conf(40))
    a, rollout = cluster.client("a"), cluster.client("rollout")
    rollout.call(rollout.operations._introduce(Introduce("rollout", 0)))
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
