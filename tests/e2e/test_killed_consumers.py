"""A consumer that is killed in the middle of its work: what it has not acknowledged is done by another, once."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
from omegaconf import OmegaConf

import transfer_queue as tq
import warm
from server_processes import until
from simulated import numbers
from transfer_queue.cli import main
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

ROWS, BATCH, MICRO = 24, 4, 2


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


def test_what_a_killed_consumer_had_is_done_by_another_once() -> None:
    config = tq.init(OmegaConf.create({"controller": {"sampler": "SequentialSampler"}}))
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
        tq.close()


def reward(told: Connection[Any, Any]) -> None:
    """A worker that finishes two samples, and is then in the middle of two others."""
    tq.init(attach="require")
    client = tq.get_client()
    meta = client.get_meta(["x"], 2, "p", task_name="reward", timeout=60)
    client.put(numbers(2, name="score"), metadata=meta)
    client.get_meta(["x"], 2, "p", task_name="reward", timeout=60)
    told.send(os.getpid())
    signal.pause()


def test_killed_workers_and_the_samples_that_they_had_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_SYSTEM", "killed")
    tq.init(OmegaConf.create({"controller": {"sampler": "SequentialSampler"}}))
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
        tq.close()
