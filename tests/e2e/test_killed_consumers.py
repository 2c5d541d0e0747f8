"""A consumer that is killed in the middle of its work: what it has not acknowledged is done by another, once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from omegaconf import OmegaConf

import transfer_queue as tq
import warm
from simulated import numbers
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

ROWS, BATCH, MICRO = 24, 4, 2


def train(config: Any, workers: int, told: Connection[Any, Any], most: int | None) -> None:
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
        here, there = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(2)), strict=True)
        for end, workers, most in zip(there, (1, 0), (3, None), strict=True):
            processes.append(warm.process(train, config, workers, end, most, daemon=False))
        processes[0].start()
        there[0].close()  # so that its end is one of the pipe
        first = [here[0].recv() for _ in range(3)]
        assert first == [[0, 1], [2, 3], [4, 5]]
        processes[0].kill()
        processes[0].join()
        processes[1].start()
        there[1].close()
        second: list[int] = []
        while (item := here[1].recv()) is not None:
            second += item
        assert sorted(second) == list(range(4, ROWS)), "all but the batch that was acknowledged"
        (progress,) = client.status().partitions[0].tasks
        assert (progress.consumed, progress.claimed, progress.consumed_ever) == (ROWS, 0, ROWS)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        tq.close()
