"""A loader with a worker over a system that is full while the worker waits for more."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

import transfer_queue as tq
from simulated import numbers
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

CAPACITY, ROWS, BATCH = 8, 24, 4


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    simple = {"total_storage_size": CAPACITY}
    conf = {"controller": {"sampler": "RankAwareSampler"}, "backend": {"SimpleStorage": simple}}
    yield tq.init(OmegaConf.create(conf))
    tq.close()


def produce() -> None:
    try:
        for start in range(0, ROWS, BATCH):
            tq.get_client().put(numbers(BATCH, start), partition_id="p", timeout=60)
    finally:
        tq.get_client().seal("p")


def all_wait() -> bool:
    """Whether the producer waits for space and the worker for rows."""
    shown = tq.get_client().status().partitions
    return any(partition.waiting_puts and any(task.waiting for task in partition.tasks) for partition in shown)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_producers_that_wait_for_space_are_told_of_no_deadlock(system: Any) -> None:
    """The process that iterates may still clear what it was given."""
    producer = multiprocessing.get_context("fork").Process(target=produce)
    producer.start()
    loader = StreamingDataLoader(StreamingDataset(system, BATCH, BATCH, ["x"], "p", "t", 0), num_workers=1)
    found: list[int] = []
    for data, meta in loader:
        deadline = time.monotonic() + 30
        while not found and producer.is_alive() and not all_wait():
            assert time.monotonic() < deadline
        found += data["x"].tolist()
        tq.get_client().clear_samples(meta)
    producer.join()
    assert (producer.exitcode, found) == (0, list(range(ROWS)))
