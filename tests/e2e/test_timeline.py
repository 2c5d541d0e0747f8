"""The timeline of a real system: processes that say their task and rank, and readers in two kinds of clients."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
import warm
from server_processes import server_process
from transfer_queue.client.control_client import ControlClient
from transfer_queue.interface import CURRENT
from transfer_queue.messages.reports.timeline import ReadTimeline, TimelineReply
from transfer_queue.net.calls import ask_controller
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.timeline.events import CLOSED, EVENT, EventKind


def produce() -> None:
    tq.init(attach="require", task="rollout", rank=3)
    for number in range(4):
        tq.kv_put(str(number), "p", {"x": torch.zeros(3)})


def produce_forked() -> None:
    tq.init(attach="require", task="loader", rank=1)
    child = os.fork()
    tq.kv_put("parent" if child else "child", "q", {"x": torch.zeros(3)})
    if not child:
        tq.get_client().close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def put_in_child(fails: bool) -> None:
    tq.init(attach="require", task=f"fails: {fails}")
    tq.kv_put("a", "p", {"x": torch.zeros(3)})
    if fails:
        raise ValueError("this child fails on purpose")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[tq.TransferQueueClient]:
    monkeypatch.setenv("TQ_SYSTEM", "timeline-test")
    tq.init()
    yield tq.get_client()
    tq.close()


def run(program: Callable[[], None]) -> None:
    process = warm.process(program)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def read(client: tq.TransferQueueClient) -> TimelineReply:
    return run_blocking(client.storage_manager.session, ask_controller(ReadTimeline(), TimelineReply))


def test_processes_are_lanes(client: tq.TransferQueueClient) -> None:
    run(produce)
    client.get_meta(["x"], 4, "p", task_name="train")
    reply = read(client)
    producer, consumer = reply.lanes
    assert (producer.task, producer.rank, producer.host) == ("rollout", 3, socket.gethostname())
    assert producer.pid not in (0, os.getpid())
    assert (consumer.task, consumer.client, consumer.pid) == ("train", client.client_id, os.getpid())
    events = np.frombuffer(reply.events, EVENT)
    kinds = [EventKind(kind) for kind in events["kind"].tolist()]
    assert kinds == [EventKind.PUT] * 4 + [EventKind.GONE, EventKind.CLAIM]
    assert events["lane"].tolist() == [producer.number] * 5 + [consumer.number]
    assert (np.diff(events["time"]) >= 0).all()
    assert abs(reply.now + reply.wall - time.time()) < 10
    assert reply.connected
    assert producer.client not in reply.connected


def test_gets_are_reported_with_the_next_request(client: tq.TransferQueueClient) -> None:
    values = TensorDict({"x": torch.zeros(4, 8), "more": TensorDict({"y": torch.zeros(4, 2)}, [4])}, [4])
    meta = client.put(values, partition_id="p")
    client.get_data(meta)
    client.get_meta(["x"], 3, "p", task_name="train")
    events = np.frombuffer(read(client).events, EVENT)
    assert events["kind"].tolist() == [EventKind.PUT, EventKind.READ, EventKind.CLAIM]
    assert (events["rows"][1], events["bytes"][1]) == (4, 4 * 4 * (8 + 2))
    assert events["since"][1] <= events["time"][1] - events["age"][1] <= events["time"][1]


def test_a_forked_process_is_a_client_of_the_same_task(client: tq.TransferQueueClient) -> None:
    run(produce_forked)
    lanes = read(client).lanes
    assert [(lane.task, lane.rank) for lane in lanes] == [("loader", 1)] * 2
    assert len({lane.pid for lane in lanes}) == 2
    assert len({lane.client for lane in lanes}) == 2


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_child_of_multiprocessing_that_ends_has_closed_unless_it_failed(
    client: tq.TransferQueueClient, method: str
) -> None:
    client.create_partition("p")
    for fails in (False, True):
        if method == "forkserver":
            child = warm.process(put_in_child, fails)
        else:
            child = multiprocessing.get_context(method).Process(target=put_in_child, args=(fails,))
        child.start()
        child.join(120)
        assert child.exitcode == int(fails)
    client.get_meta(["x"], 1, "p", task_name="train")
    reply = read(client)
    for fails in (False, True):
        (lane,) = [lane.number for lane in reply.lanes if lane.task == f"fails: {fails}"]
        events = np.frombuffer(reply.events, EVENT)
        events = events[events["lane"] == lane]
        assert events["kind"].tolist() == [EventKind.PUT, EventKind.GONE]
        assert bool(events["flags"][-1] & CLOSED) != fails


def test_a_process_may_say_its_task_later(client: tq.TransferQueueClient) -> None:
    tq.init(task="trainer")
    tq.init(task="trainer", rank=np.int64(5))  # type: ignore[arg-type]
    assert [(lane.task, lane.rank, lane.pid) for lane in read(client).lanes] == [
        ("trainer", -1, os.getpid()), ("trainer", 5, os.getpid())
    ]  # fmt: skip


def test_a_wrong_task_or_rank_is_refused() -> None:
    wrong: list[dict[str, Any]] = [{"rank": -1}, {"rank": 1 << 31}, {"rank": "one"}, {"task": 7}, {"task": "x" * 2000}]
    for arguments in wrong:
        with pytest.raises(tq.InvalidArgumentError, match=next(iter(arguments))):
            tq.init(**arguments)


def test_the_controller_knows_tasks_after_a_restart(client: tq.TransferQueueClient) -> None:
    tq.init(task="trainer", rank=2)
    client.put({"x": torch.zeros(2, 3)}, partition_id="p")
    before = read(client)
    server_process("controller").kill()
    client.put({"x": torch.zeros(2, 3)}, partition_id="p")
    with ControlClient(CURRENT.system) as other:
        after = other.request(ReadTimeline(before.boot, before.position, 60.0, 100, 100, 100), TimelineReply)
    assert after.boot != before.boot
    assert [(lane.task, lane.rank) for lane in after.lanes] == [("trainer", 2)]
    events = np.frombuffer(after.events, EVENT)
    assert events["kind"].tolist() == [EventKind.PUT]
    assert events["rows"].tolist() == [2]
