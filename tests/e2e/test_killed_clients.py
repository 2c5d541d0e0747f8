"""Consumers, producers and holders of locks that are killed: others do their work, once, and go on at once."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import transfer_queue as tq
import warm
from server_processes import server_process, until
from simulated import numbers
from transfer_queue.cli import main
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.errors import LockLostError

ROWS, BATCH, MICRO = 24, 4, 2
LEASE = 600.0
"""Seconds of a lease that does not end within a test."""
LONG = 100.0


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    """The configuration of the system of all tests."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TQ_SYSTEM", "killed")
        yield tq.init()
        tq.close()


@pytest.fixture
def config(system: Any) -> Iterator[Any]:
    """The configuration of the system, which is empty after the test."""
    yield system
    for partition in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(partition)


def reward(told: Connection[Any, Any]) -> None:
    """A worker that finishes two samples, and is then in the middle of two others."""
    tq.init(attach="require")
    client = tq.get_client()
    meta = client.get_meta(["x"], 2, "p", task_name="reward", timeout=60)
    client.put(numbers(2, name="score"), metadata=meta)
    client.get_meta(["x"], 2, "p", task_name="reward", timeout=60)
    told.send(os.getpid())
    signal.pause()


# The first of the tests of this system, whose verdict then is about these workers.
def test_killed_workers_and_the_samples_that_they_had_are_named(
    config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    client, host, workers = tq.get_client(), socket.gethostname(), []
    try:
        client.put(numbers(12), partition_id="p")
        pids = []
        for _ in range(2):
            worker, here = warm.reporting(reward)
            workers.append(worker)
            pids.append(here.recv())
        with ThreadPoolExecutor() as pool:
            train = pool.submit(client.get_meta, ["x", "score"], 8, "p", task_name="train", timeout=60)
            workers[0].kill()
            until(lambda: f"1 of 2 reward workers is gone (pid {pids[0]}, {host}) since" in client.verdict().text)
            workers[1].kill()
            until(lambda: client.verdict().state == "stopped")
            verdict = client.verdict()
            assert verdict.stage == "reward"
            gone = f"all reward workers are gone (pid {pids[0]}, {host}; pid {pids[1]}, {host}) since"
            assert verdict.text.startswith(f"Stopped: {gone}")
            lost = (
                f"4 samples of partition 'p' may be lost to task 'reward', because the processes that had claimed "
                f"them without a lease are gone (pid {pids[0]}, {host}; pid {pids[1]}, {host})"
            )
            until(lambda: lost in client.verdict().text)  # when the controller knows what they had not handed over
            explained = client.explain("p", task="train", fields=["x", "score"])
            assert explained.startswith("Nearest to ready: sample 8 is missing the field 'score'")
            assert lost in explained
            assert main(["explain", "p", "--task", "train", "--fields", "x,score", "--name", "killed"]) == 0
            assert capsys.readouterr().out.splitlines()[1].startswith(f"Stopped: {gone}")
            client.reset_consumption("p", "reward")
            assert "may be lost" not in client.verdict().text
            meta = client.get_meta(["x"], 12, "p", task_name="reward")
            client.put(numbers(12, name="score"), metadata=meta)
            assert train.result().size == 8
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def train(config: Any, workers: int, most: int | None, told: Connection[Any, Any]) -> None:
    """A rank in a process of its own. most: items after which it hangs, with a batch that it is in the middle of."""
    dataset = StreamingDataset(
        config, BATCH, MICRO, ["x"], "p", "train", 0, delivery="at_least_once", lease_seconds=0.6
    )
    for count, (data, _) in enumerate(StreamingDataLoader(dataset, num_workers=workers)):
        told.send(data["x"].tolist())
        if count + 1 == most:
            signal.pause()
    told.send(None)
    os._exit(0)


def test_what_a_killed_consumer_had_is_done_by_another_once(config: Any) -> None:
    processes = []
    try:
        client = tq.get_client()
        client.put(numbers(ROWS), partition_id="p")
        client.seal("p")
        process, here = warm.reporting(train, config, 1, 3, daemon=False)
        processes.append(process)
        assert [here.recv() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        process.kill()
        process.join()
        process, here = warm.reporting(train, config, 0, None, daemon=False)
        processes.append(process)
        second: list[int] = []
        while (item := here.recv()) is not None:
            second += item
        assert sorted(second) == list(range(4, ROWS)), "all but the batch that was acknowledged"
        (progress,) = client.status().partitions[0].tasks
        assert (progress.consumed, progress.claimed, progress.consumed_ever) == (ROWS, 0, ROWS)
    finally:
        for process in processes:
            process.kill()
            process.join()


def reserve(config: Any, told: Connection[Any, Any]) -> None:
    """Reserve all samples that the partition accepts, and hang before the put."""
    tq.init(config)
    meta = tq.get_client().get_meta([], 4, "p", mode="insert")
    told.send(meta.global_indexes)
    signal.pause()


@pytest.mark.parametrize("options", [{"max_staleness": 0, "rows_per_version": 4}, {"max_rows": 4}], ids=str)
def test_the_reservation_of_a_killed_producer_makes_space(config: Any, options: dict[str, int]) -> None:
    client = tq.get_client()
    client.create_partition("p", **options)
    producer, here = warm.reporting(reserve, config)
    try:
        reserved = here.recv()
        assert len(reserved) == 4
        with pytest.raises(tq.CapacityError):
            client.put(numbers(4), partition_id="p")
        producer.kill()
        meta = client.get_meta([], 4, "p", mode="insert", timeout=60)
        client.put(numbers(4), metadata=meta)
        assert client.get_meta(["x"], 4, "p", task_name="train").global_indexes == [row + 4 for row in reserved]
        assert client.status().partitions[0].dropped == {"reserved by a client that is gone": 4}
    finally:
        producer.kill()
        producer.join()


def kill_controller() -> None:
    server_process("controller").kill()


def hold(config: Any, told: Connection) -> None:
    """Hold a lock until the process is killed."""
    tq.init(config, task="holder", rank=1)
    with tq.kv_lock(["x", "y"], "p", lease=LEASE) as lock:
        tq.kv_put("x", "p", {"n": 1}, fence=lock)
        told.send(lock.token)
        signal.pause()


def count(config: Any, times: int | None, told: Connection) -> None:
    """Increment a counter, and report each increment; `times` None: until the process is killed."""
    tq.init(config)
    done = 0
    while times is None or done < times:
        done += 1
        told.send(("begin", done))
        tq.kv_update("counter", "counts", "n", lambda old: {"n": old["n"] + 1}, empty={"n": torch.tensor(0)})
        told.send(("end", done))
    os._exit(0)


def received(connection: Connection) -> Iterator[Any]:
    """What a process sends, until it has ended."""
    while True:
        try:
            yield connection.recv()
        except EOFError:
            return


def test_the_lock_of_a_killed_process_is_free_long_before_its_lease_ends(config: Any) -> None:
    holder, here = warm.reporting(hold, config)
    token = here.recv()
    (entry,) = tq.kv_lock_list("p")
    assert (entry.keys, entry.token, entry.task, entry.rank, entry.pid) == (["x", "y"], token, "holder", 1, holder.pid)
    client = tq.get_client()
    assert re.search(rf"Key 'x' is locked for .* s by holder rank 1, pid {holder.pid}, ", client.explain("p", key="x"))
    with pytest.raises(tq.WaitTimeoutError, match=f"'y' is locked for .* s by holder rank 1, pid {holder.pid}, "):
        tq.kv_lock("y", "p", timeout=0).__enter__()
    holder.kill()
    holder.join()
    with tq.kv_lock("y", "p", timeout=LONG) as lock:
        assert lock.token > token
        with pytest.raises(LockLostError, match=f"token {token} is not in force"):
            tq.kv_put("x", "p", {"n": 2}, fence=token)
        tq.kv_put("x", "p", {"n": 3}, fence=lock)
    assert tq.kv_batch_get("x", "p")["n"][0] == 3


def test_a_lock_survives_the_death_of_the_controller(config: Any) -> None:
    with tq.kv_lock("x", "p", lease=LEASE) as lock:
        kill_controller()
        tq.kv_put("x", "p", {"n": 1}, fence=lock)
        (entry,) = tq.kv_lock_list()
        assert entry.token == lock.token

        async def wait() -> int:
            async with tq.async_kv_lock("x", "p", timeout=LONG) as second:
                return second.token

        async def release_meanwhile() -> int:
            waiting = asyncio.create_task(wait())
            while not any(not entry.held for entry in await tq.async_kv_lock_list()):
                await asyncio.sleep(0)
            kill_controller()  # the request that waits is sent again to the next controller
            await tq.get_client().async_get_partition_list()
            assert not waiting.done()
            lock.__exit__(None, None, None)
            token = await waiting
            lock.__enter__()
            return token

        first = lock.token
        assert asyncio.run(release_meanwhile()) > first


def test_updates_of_one_event_loop_and_of_threads_all_count(config: Any) -> None:
    def more(old: dict[str, Any]) -> dict[str, Any]:
        return {"n": old["n"] + 1}

    async def run() -> list[Any]:
        together = [tq.async_kv_update("k", "p", "n", more, empty={"n": 0}) for _ in range(20)]
        in_threads = [asyncio.to_thread(tq.kv_update, "k", "p", "n", more, empty={"n": 0}) for _ in range(20)]
        return await asyncio.gather(*together, *in_threads)

    assert sorted(found["n"] for found in asyncio.run(run())) == list(range(1, 41))


def test_increments_of_killed_processes_happen_at_most_once(config: Any) -> None:
    victims = [warm.reporting(count, config, None) for _ in range(2)]
    others = [warm.reporting(count, config, 20) for _ in range(2)]
    said: list[Any] = []
    for victim, here in victims:
        for what in received(here):
            said.append(what[0])
            if what == ("end", 5):
                victim.kill()
    kill_controller()
    for other, here in others:
        said += [what[0] for what in received(here)]
        other.join()
        assert other.exitcode == 0
    begun, ended = said.count("begin"), said.count("end")
    total = int(tq.kv_batch_get("counter", "counts")["n"])
    assert ended <= total <= begun
    assert ended >= 2 * 5 + 2 * 20
