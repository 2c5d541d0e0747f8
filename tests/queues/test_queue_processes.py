"""Queues between processes, some of which are killed, and a controller that is killed while puts and gets wait."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import transfer_queue as tq
import warm
from server_processes import server_process, until
from transfer_queue.config.settings import Settings
from transfer_queue.node.system.launcher import start_local
from transfer_queue.queues import Empty, Full, ShutDown

SECONDS = 60


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    tq.close()


@pytest.fixture(autouse=True)
def system(closed: None) -> None:
    """The system of the test before, or a new one if that test has ended it."""
    tq.init()


def produce(q: tq.Queue, number: int, count: int) -> None:
    for at in range(count):
        q.put({"from": number, "at": at, "ids": torch.arange(at)})


def consume(q: tq.Queue, told: Connection[Any, Any]) -> None:
    got = []
    try:
        while True:
            item = q.get(timeout=SECONDS)
            assert item["ids"].tolist() == list(range(item["at"]))
            got.append((item["from"], item["at"]))
            q.task_done()
    except ShutDown:
        told.send(got)


def test_items_go_through_processes_once_and_in_the_order_of_their_producer():
    q = tq.Queue("work", maxsize=8)
    consumers = [warm.reporting(consume, q) for _ in range(2)]
    producers = [warm.process(produce, q, number, 30) for number in range(2)]
    for process in producers:
        process.start()
    for process in producers:
        process.join(SECONDS)
        assert process.exitcode == 0
    q.join(timeout=SECONDS)
    q.shutdown()
    got = [end.recv() for _, end in consumers]
    for process, _ in consumers:
        process.join(SECONDS)
    assert sorted(got[0] + got[1]) == [(number, at) for number in range(2) for at in range(30)]
    for items in got:
        for number in range(2):
            mine = [at for producer, at in items if producer == number]
            assert mine == sorted(mine)


def echo(q: Any, other: Any, told: Connection[Any, Any]) -> None:
    told.send("called")
    other.put(q.get(timeout=SECONDS))


def test_a_process_attaches_by_the_queue_that_it_gets():
    q, other = tq.Queue(maxsize=1), tq.PriorityQueue(prefetch=2)
    process, here = warm.reporting(echo, q, other)
    q.put((3, torch.ones(2)))
    assert here.recv() == "called"  # on a busy machine its imports may take longer than SECONDS
    priority, value = other.get(timeout=SECONDS)
    process.join(SECONDS)
    assert (priority, value.tolist(), process.exitcode) == (3, [1.0, 1.0], 0)


def hang(q: tq.Queue, lease: float | None, told: Connection[Any, Any]) -> None:
    item = q.get(timeout=SECONDS, lease=lease)
    told.send(item.item if lease is not None else item)
    signal.pause()


def test_an_item_of_a_killed_consumer_comes_again_if_it_had_a_lease():
    q = tq.Queue()
    for lease, expected in ((0.5, "a"), (None, "b")):
        q.put(expected)
        process, here = warm.reporting(hang, q, lease)
        assert here.recv() == expected
        process.kill()
        process.join()
        if lease is not None:
            again = q.get(timeout=SECONDS, lease=60)
            assert (again.item, again.deliveries) == (expected, 2)
            assert again.ack()
        else:
            with pytest.raises(Empty):
                q.get_nowait()


def block(q: tq.Queue, item: str) -> None:
    q.put(item)


def test_a_producer_that_is_killed_while_it_waits_puts_nothing():
    q = tq.Queue(maxsize=1)
    q.put("a")
    process = warm.process(block, q, "never")
    process.start()
    until(lambda: _waiting_puts(q) == 1)
    process.kill()
    process.join()
    until(lambda: _waiting_puts(q) == 0)
    assert q.get() == "a"
    with pytest.raises(Empty):
        q.get(timeout=0.1)


def test_puts_and_gets_that_wait_go_on_after_the_controller_was_killed():
    full, empty = tq.Queue(maxsize=1), tq.Queue()
    full.put("a")
    with ThreadPoolExecutor(3) as pool:
        puts = [pool.submit(full.put, item, True, SECONDS) for item in "bc"]
        get = pool.submit(empty.get, True, SECONDS)
        until(lambda: _waiting_puts(full) == 2)
        server_process("controller").kill()
        with pytest.raises(Full):
            full.put_nowait("d")
        taken = [full.get(timeout=SECONDS) for _ in range(3)]
        empty.put("e")
        assert get.result(SECONDS) == "e"
        for put in puts:
            put.result(SECONDS)
    assert taken[0] == "a"
    assert sorted(taken[1:]) == ["b", "c"]
    assert full.unfinished_tasks == 3
    full.task_done(3)
    full.join()


def test_a_join_that_waits_goes_on_after_the_controller_was_killed():
    q = tq.Queue()
    q.put("a")
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(q.join, SECONDS)
        until(lambda: not joined.done() and q.unfinished_tasks == 1)
        server_process("controller").kill()
        assert q.get() == "a"
        q.task_done()
        joined.result(SECONDS)


def test_a_queue_is_in_checkpoints(tmp_path: Any):
    q = tq.Queue("kept", 3)
    q.put_many(["a", "b"])
    assert q.get() == "a"
    q.task_done()
    tq.save_checkpoint(tmp_path / "checkpoint")
    tq.close()
    tq.init()
    tq.load_checkpoint(tmp_path / "checkpoint")
    loaded = tq.Queue("kept", 3)
    assert (loaded.qsize(), loaded.unfinished_tasks) == (1, 1)
    assert loaded.get() == "b"


def test_a_queue_of_a_system_that_was_closed_says_so_and_a_new_one_starts_a_system():
    q = tq.Queue()
    pickled = pickle.dumps(q)
    tq.close()
    with pytest.raises(tq.NotInitializedError):
        pickle.loads(pickled).put("a")
    q = tq.Queue()
    q.put("a")
    assert q.get() == "a"


def test_a_queue_of_another_running_system_is_refused():
    tq.close()
    other = start_local("other", {"settings": Settings.from_config(None).to_json()})
    try:
        tq.init({"system": {"name": "other"}})
        theirs = pickle.loads(pickle.dumps(tq.Queue("same name", 1)))
        tq.close()
        tq.init()
        mine = tq.Queue("same name")
        for call in (lambda: theirs.put("a"), theirs.qsize, theirs.get_nowait):
            with pytest.raises(tq.InvalidArgumentError, match=r"belongs to the system in .*other, but this process"):
                call()
        assert mine.empty()
        tq.close()
        theirs.put("a")  # attaches to the other system by itself
        assert theirs.get() == "a"
    finally:
        tq.close()
        other.stop()


def _waiting_puts(q: tq.Queue) -> int:
    (found,) = [p.waiting_puts for p in tq.get_client().status().partitions if p.name == q.name]
    return found
