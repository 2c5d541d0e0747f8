"""`client.stats()` and the verdict of a status, on a system in virtual time."""

from __future__ import annotations

import pytest

from simulated import Start, introduce, numbers
from transfer_queue.client.data.timeline_reader import TimelineReader
from transfer_queue.messages.reports.timeline import ReadTimeline, TimelineReply
from transfer_queue.testing import Client, Cluster


def claim(client: Client, rows: int) -> None:
    assert len(client.get_meta(["x"], rows, "p", task_name="train").global_indexes) == rows


def test_stats_are_about_the_time_since_the_previous_call(start: Start) -> None:
    cluster = start(seed=1)
    a, onlooker = cluster.client("a"), cluster.client("onlooker")
    a.put(numbers(100), partition_id="p")
    cluster.advance(10.0)
    claim(a, 20)
    cluster.advance(10.0)
    first = onlooker.stats()
    assert first["tq/seconds"] == pytest.approx(20, abs=0.5)  # no longer than the system runs
    assert first["tq/train/rate"] == pytest.approx(1.0, rel=0.05)
    assert first["tq/train/queue_rows"] == 80
    assert first["tq/train/time_in_queue_p50"] == pytest.approx(10, abs=0.5)
    cluster.advance(4.0)
    claim(a, 40)
    second = onlooker.stats()
    assert second["tq/seconds"] == pytest.approx(4, abs=0.5)
    assert second["tq/train/rate"] == pytest.approx(10, rel=0.1)
    third = onlooker.stats()
    assert (third["tq/train/rate"], third["tq/rows"]) == (0, 100)
    assert "tq/train/time_in_queue_p50" not in third


def test_each_client_has_windows_of_its_own(start: Start) -> None:
    cluster = start(seed=1)
    a, b = cluster.client("a"), cluster.client("b")
    a.put(numbers(8), partition_id="p")
    claim(a, 8)
    cluster.advance(8.0)
    assert a.stats()["tq/train/rate"] == pytest.approx(1.0, rel=0.1)
    assert b.stats()["tq/train/rate"] == pytest.approx(1.0, rel=0.1)
    assert a.stats()["tq/train/rate"] == 0


def test_replies_to_requests_of_several_threads_are_added_once(start: Start) -> None:
    cluster = start(seed=1)
    a = cluster.client("a")
    introduce(a, "rollout", 0)
    a.put(numbers(2), partition_id="p")
    reader = TimelineReader(lambda: 0.0)
    tasks = [a.start(reader.read(a.state.ask, None)) for _ in range(3)]
    cluster.run()
    for task in tasks:
        task.result()
    assert reader.make_stats(a.status())["tq/rollout/rate"] > 0
    assert len(reader._recording.events) == 1


def test_a_reader_with_a_limit_reads_the_newest_events(start: Start) -> None:
    cluster: Cluster = start(seed=1)
    a = cluster.client("a")
    for number in range(50):
        a.put(numbers(1, number), partition_id="p")
    a.get_meta(["x"], 1, "p", task_name="train")
    reply = a.call(a.state.ask(ReadTimeline(seconds=60.0, most=5), TimelineReply, None))
    assert (reply.position - len(reply.events) // 64, reply.position) == (46, 51)
    assert reply.missed == 0
    assert a.call(a.state.ask(ReadTimeline(seconds=60.0, most=500), TimelineReply, None)).events[:8]


def test_explain_adds_the_verdict_if_wanted(start: Start) -> None:
    a = start(seed=1).client("a")
    a.put(numbers(2), partition_id="p")
    plain = a.explain("p", task="train", fields=["x"])
    with_verdict = a.explain("p", task="train", fields=["x"], verdict=True)
    assert with_verdict == f"{plain}\n{a.verdict().text}"
