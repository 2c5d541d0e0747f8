"""The verdict on pipelines of the virtual cluster, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simulated import Start, introduce, numbers
from transfer_queue.messages.base import Done
from transfer_queue.messages.reports.timeline import Introduce
from transfer_queue.testing import Client, Cluster

POLL = 0.05
BATCH = 4


class Stage:
    """One rank of a task: claims a batch, works for some seconds, and puts a field of the same samples."""

    def __init__(
        self,
        cluster: Cluster,
        client: Client,
        task: str,
        takes: str | None,
        puts: str | None,
        seconds: float,
        batch: int = BATCH,
    ) -> None:
        self.cluster, self.client = cluster, client
        self.task, self.takes, self.puts, self.seconds, self.batch = task, takes, puts, seconds, batch

    def begin(self) -> None:
        """Claim the next batch, or generate it if the stage takes no field."""
        if self.takes is None:
            self._work(None)
            return
        claim = self.client.operations.get_meta([self.takes], self.batch, "p", task_name=self.task, timeout=1e6)
        task = self.client.start(claim)
        when(self.cluster, lambda: task.done, lambda: self._work(task.result()))

    def _work(self, meta: Any) -> None:
        self.cluster.later(self.seconds, lambda: self._put(meta))

    def _put(self, meta: Any) -> None:
        if self.puts is None:
            self.begin()
            return
        data = numbers(BATCH).rename_key_("x", self.puts)
        where = {"metadata": meta} if meta is not None else {"partition_id": "p"}
        put = self.client.start(self.client.operations.put(data, **where))
        when(self.cluster, lambda: put.done, self.begin)


def when(cluster: Cluster, done: Callable[[], bool], then: Callable[[], None]) -> None:
    """Check every POLL seconds whether something is done."""
    if done():
        then()
    else:
        cluster.later(POLL, lambda: when(cluster, done, then))


def run_pipeline(cluster: Cluster, seconds: dict[str, float], until: float) -> None:
    """Run rollout, reward and train, which take this many seconds for a batch."""
    fields = {"rollout": (None, "tokens"), "reward": ("tokens", "score"), "train": ("score", None)}
    for task, (takes, puts) in fields.items():
        client = cluster.client(task)
        client.start(client.state.ask(Introduce(task, 0), Done, None))
        Stage(cluster, client, task, takes, puts, seconds[task]).begin()
    cluster.advance(until)


@pytest.mark.parametrize("slow", ["rollout", "reward"])
def test_the_slowest_stage_of_a_pipeline_is_named(start: Start, slow: str) -> None:
    cluster = start(seed=1)
    seconds = {"rollout": 0.5, "reward": 0.5, "train": 0.5} | {slow: 2.0}
    run_pipeline(cluster, seconds, 150.0)
    verdict = cluster.client("onlooker").verdict()
    assert (verdict.state, verdict.stage) == ("slow", slow), verdict.text
    assert verdict.text.startswith(f"{slow} is the slowest stage")
    assert "train waits 7" in verdict.text
    assert 0.7 < verdict.wait_share < 0.8


def test_a_producer_that_waits_for_group_demand_is_held(start: Start) -> None:
    cluster = start(seed=1)
    train, rollout = cluster.client("train"), cluster.client("rollout")
    introduce(rollout, "rollout", 0)
    train.create_partition("p")
    train.call(train.operations.want("p", 2, "train"))

    def produce() -> None:
        asked = rollout.start(rollout.operations.wanted("p", "train", BATCH, timeout=1e6))
        when(cluster, lambda: asked.done, lambda: put(asked.result()))

    def put(groups: int) -> None:
        made = rollout.start(rollout.operations.put(numbers(groups), partition_id="p"))
        when(cluster, lambda: made.done, produce)

    produce()
    Stage(cluster, train, "train", "x", None, 4.0, batch=2).begin()
    cluster.advance(150.0)
    verdict = cluster.client("onlooker").verdict()
    assert (verdict.state, verdict.stage) == ("slow", "train"), verdict.text
    assert verdict.cause == "rollout is held because no more groups are wanted"
    assert "% of the time by the group demand" in verdict.text


def test_a_status_has_the_verdict(start: Start) -> None:
    cluster = start(seed=1)
    run_pipeline(cluster, {"rollout": 0.5, "reward": 2.0, "train": 0.5}, 150.0)
    onlooker = cluster.client("onlooker")
    status = onlooker.status()
    assert status.verdict == onlooker.verdict()
    assert status.verdict.stage == "reward"
    assert repr(status).startswith(f"SystemStatus({status.verdict.text!r}, 1 partition")


def test_a_status_soon_after_another_has_the_same_verdict_and_asks_no_more(start: Start) -> None:
    cluster = start(seed=1)
    run_pipeline(cluster, {"rollout": 0.5, "reward": 2.0, "train": 0.5}, 50.0)
    onlooker = cluster.client("onlooker")
    first = onlooker.status()

    def requests() -> float:
        return cluster.controller.context.measures.counters["requests"]

    before = requests()
    assert onlooker.status().verdict is first.verdict
    assert requests() == before + 2  # the status, and the views of readers
    cluster.advance(30.0)
    assert onlooker.status().verdict != first.verdict
