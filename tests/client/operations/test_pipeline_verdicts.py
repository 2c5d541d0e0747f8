"""The verdict on pipelines of the virtual cluster, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simulated import Start, numbers
from transfer_queue.messages.base import Done
from transfer_queue.messages.timeline import Introduce
from transfer_queue.testing import Client, Cluster

POLL = 0.05
BATCH = 4


class Stage:
    """One rank of a task: claims a batch, works for some seconds, and puts a field of the same samples."""

    def __init__(
        self, cluster: Cluster, client: Client, task: str, takes: str | None, puts: str | None, seconds: float
    ) -> None:
        self.cluster, self.client = cluster, client
        self.task, self.takes, self.puts, self.seconds = task, takes, puts, seconds

    def begin(self) -> None:
        """Claim the next batch, or generate it if the stage takes no field."""
        if self.takes is None:
            self._work(None)
            return
        claim = self.client.operations.get_meta([self.takes], BATCH, "p", task_name=self.task, timeout=1e6)
        task = self.client.start(claim)
        self._when(lambda: task.done, lambda: self._work(task.result()))

    def _work(self, meta: Any) -> None:
        self.cluster.later(self.seconds, lambda: self._put(meta))

    def _put(self, meta: Any) -> None:
        if self.puts is None:
            self.begin()
            return
        data = numbers(BATCH).rename_key_("x", self.puts)
        where = {"metadata": meta} if meta is not None else {"partition_id": "p"}
        put = self.client.start(self.client.operations.put(data, **where))
        self._when(lambda: put.done, self.begin)

    def _when(self, done: Callable[[], bool], then: Callable[[], None]) -> None:
        if done():
            then()
        else:
            self.cluster.later(POLL, lambda: self._when(done, then))


def run_pipeline(cluster: Cluster, seconds: dict[str, float], until: float) -> None:
    """Run rollout, reward and train, which take so many seconds for a batch."""
    fields = {"rollout": (None, "tokens"), "reward": ("tokens", "score"), "train": ("score", None)}
    for task, (takes, puts) in fields.items():
        client = cluster.client(task)
        client.start(client.operations._ask(Introduce(task, 0), Done, None))
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


def test_a_last_stage_that_falls_behind_is_the_slowest_one(start: Start) -> None:
    cluster = start(seed=1)
    run_pipeline(cluster, {"rollout": 0.5, "reward": 0.5, "train": 1.0}, 150.0)
    verdict = cluster.client("onlooker").verdict()
    assert (verdict.state, verdict.stage) == ("slow", "train"), verdict.text
    assert verdict.queue_rows > 0
    assert verdict.queue_growth > 0


def test_a_pipeline_whose_last_stage_hardly_waits_is_flowing(start: Start) -> None:
    cluster = start(seed=1)
    run_pipeline(cluster, {"rollout": 1.0, "reward": 0.8, "train": 1.0}, 150.0)
    verdict = cluster.client("onlooker").verdict()
    assert (verdict.state, verdict.stage) == ("flowing", None), verdict.text


def test_nothing_happens_in_an_idle_system(start: Start) -> None:
    verdict = start(seed=1).client("onlooker").verdict()
    assert (verdict.state, verdict.stage) == ("idle", None)
