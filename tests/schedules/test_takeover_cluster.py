"""What a simulated takeover is: the next controller has what the journal has, and the earlier one ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulated import numbers
from tests.simulation.takeover_cluster import TakeoverCluster
from transfer_queue.net.calls import CONTROLLER


def take_over(cluster: TakeoverCluster) -> None:
    """Let another node begin a term at once, and start its controller."""
    before = cluster.current
    cluster.begin_claim()
    for claim in list(cluster.claims):
        while claim in cluster.claims:
            cluster.step_claim(claim)
    cluster.wait(lambda: cluster.current is not before)


@pytest.mark.parametrize(("point", "known"), [("begun", 1), ("half", 1), ("written", 4), ("checked", 4)])
def test_the_next_controller_has_what_the_frozen_one_has_written(tmp_path: Path, point: str, known: int) -> None:
    """The put of the turn in which the first one is frozen takes effect once. When that one wakes up, it ends."""
    cluster = TakeoverCluster(tmp_path)
    client = cluster.client("a")
    client.put(numbers(1), partition_id="p")
    task = client.start(client.operations.put(numbers(3), partition_id="p"))
    cluster.host.freeze_at = point
    cluster.run()
    former = cluster.current
    assert (cluster.froze, CONTROLLER in cluster.stopped, task.done) == ({point: 1}, True, False)
    take_over(cluster)
    assert cluster.controller.state.partitions["p"].row_count == known
    cluster.wait(lambda: task.done)
    assert cluster.controller.state.partitions["p"].row_count == 4
    cluster.advance(5.0)
    assert former.ended
    assert len(client.get_meta(["x"], None, "p", mode="force_fetch")) == 4
    cluster.check()
    cluster.close()


def test_an_earlier_controller_answers_no_client_that_still_uses_it(tmp_path: Path) -> None:
    cluster = TakeoverCluster(tmp_path)
    client = cluster.client("a")
    client.put(numbers(1), partition_id="p")
    former = cluster.current
    take_over(cluster)
    assert (cluster.known["a"] is former, former.ended) == (True, False)
    task = client.start(client.operations.put(numbers(1), partition_id="p"))
    cluster.run()
    assert (former.ended, cluster.late, task.done) == (True, 1, False)
    cluster.wait(lambda: task.done)
    assert cluster.controller.state.partitions["p"].row_count == 2
    cluster.check()
    cluster.close()


def test_a_controller_whose_term_has_ended_is_not_started_again(tmp_path: Path) -> None:
    cluster = TakeoverCluster(tmp_path)
    cluster.begin_claim()
    (claim,) = cluster.claims
    while cluster.current.term.is_current():
        cluster.step_claim(claim)
    cluster.crash(CONTROLLER, 0.0)
    cluster.restart(CONTROLLER)
    assert cluster.crashed(CONTROLLER)
    cluster.finish_takeovers()
    assert (cluster.current.number, cluster.hosts[0].ended) == (1, True)
    cluster.check()
    cluster.close()
