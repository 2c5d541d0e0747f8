"""Datasets and loaders with a timeout: the iteration ends with an error that says why no batch comes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf
from small_datasets import Build, small_dataset
from torch.utils.data import DataLoader

import transfer_queue as tq
from simulated import Start, introduce, numbers, values
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader, identity
from transfer_queue.dataloader.streaming_dataset import StreamingDataset, default_fetch_batch_fn
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.testing import Client

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]
_numbers = itertools.count()
NO_BATCH = (
    r"^Timeout: no batch came within 0\.5 s\. Task '.*' waits for 4 samples with fields \['x'\] in partition '.*' "
    r"\(batch 1 of dp_rank 0\); 1 available\. The only sample that task '.*' has not consumed is ready\. "
    r"\d more must come; if none will, call seal\('\w+'\)\.\n\w+: "
)


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    yield tq.init(OmegaConf.create({"controller": {"sampler": "RankAwareSampler"}}))
    tq.close()


@pytest.fixture
def partition(system: Any) -> str:
    """A partition with one batch and one more sample."""
    name = f"p{next(_numbers)}"
    tq.get_client().put(numbers(5), partition_id=name)
    return name


@pytest.fixture
def dataset(system: Any, partition: str) -> Build:
    names = {"partition_id": partition, "task_name": f"t{next(_numbers)}"}
    return lambda **more: small_dataset(system, **{**names, "micro_batch_size": 4, "timeout": 0.5, **more})


def iterate(items: Any, found: list[Any], is_async: bool) -> None:
    """Append the items to `found`."""

    async def collect() -> None:
        async for item in items:
            found.append(item)

    if is_async:
        asyncio.run(collect())
        return
    for item in items:
        found.append(item)


def fetch_of_short_patience(
    tq_client: Any,
    data_fields: Any,
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Any,
    batch_index: int,
) -> Any:
    """Fetch as `default_fetch_batch_fn` does, but wait only for 0.1 s."""
    sampling = {**sampling_config, "batch_index": batch_index}
    meta = tq_client.get_meta(
        data_fields, batch_size, partition_id, task_name=task_name, sampling_config=sampling, timeout=0.1
    )
    return tq_client.get_data(meta), meta


def fetch_that_stops(*arguments: Any, **named: Any) -> Any:
    return next(iter(()))


def fetch_with_fault(*arguments: Any, **named: Any) -> Any:
    raise KeyError("the reward model has no such prompt")


@pytest.mark.parametrize("fetch", [None, fetch_of_short_patience])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_wait_ends_with_the_reason_and_the_next_iteration_continues(
    dataset: Build, partition: str, workers: int, is_async: bool, fetch: Any
) -> None:
    loader = StreamingDataLoader(dataset(fetch_batch_fn=fetch), num_workers=workers)
    found: list[Any] = []
    with pytest.raises(WaitTimeoutError, match=NO_BATCH):
        iterate(loader, found, is_async)
    assert values(found) == [0, 1, 2, 3]
    tq.get_client().put(numbers(3, 5), partition_id=partition)
    tq.get_client().seal(partition)
    assert values(loader) == [4, 5, 6, 7]


def test_persistent_workers_start_again(dataset: Build, partition: str) -> None:
    loader = StreamingDataLoader(dataset(), num_workers=1, persistent_workers=True)
    with pytest.raises(WaitTimeoutError, match=NO_BATCH):
        list(loader)
    tq.get_client().put(numbers(3, 5), partition_id=partition)
    tq.get_client().seal(partition)
    assert values(loader) == [4, 5, 6, 7]


def test_the_worker_of_a_plain_loader_ends_with_the_reason(dataset: Build) -> None:
    loader = DataLoader(dataset(), batch_size=None, num_workers=1, collate_fn=identity)
    with pytest.raises(WaitTimeoutError, match=r"Timeout: no batch came within 0\.5 s"):
        list(loader)


@pytest.mark.parametrize(("fetch", "timeout", "error", "words"), [
    (fetch_with_fault, None, KeyError, "the reward model has no such prompt"),
    (fetch_with_fault, 60.0, KeyError, "the reward model has no such prompt"),
    (fetch_that_stops, 60.0, RuntimeError, "StopIteration"),  # which would end the loop as if all was read
])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_fault_of_a_custom_fetch_reaches_the_loop(
    dataset: Build, workers: int, is_async: bool, fetch: Any, timeout: float | None, error: Any, words: str
) -> None:
    loader = StreamingDataLoader(dataset(fetch_batch_fn=fetch, timeout=timeout), num_workers=workers)
    with pytest.raises(error, match=words):
        iterate(loader, [], is_async)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "1"])
def test_a_timeout_that_is_not_positive_is_refused(dataset: Build, timeout: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout must be a"):
        dataset(timeout=timeout)


class TestInVirtualTime:
    def simulated_dataset(self, a: Client, **more: Any) -> StreamingDataset:
        return small_dataset(a, **{"micro_batch_size": 4, "timeout": 100.5, **more})

    @pytest.mark.parametrize("interval", ["1", "70"])
    @pytest.mark.parametrize("fetch", [None, default_fetch_batch_fn])
    def test_it_ends_at_its_time_whatever_the_interval_is(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, interval: str, fetch: Any
    ) -> None:
        monkeypatch.setenv("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", interval)
        cluster = start(seed=1, conf={"controller": {"polling_mode": True}})
        with pytest.raises(WaitTimeoutError, match=r"within 100\.5 s\. Task 'train' waits for 4 samples"):
            next(iter(self.simulated_dataset(cluster.client("a"), fetch_batch_fn=fetch)))
        assert 100.5 <= cluster.clock.now < 100.6

    def test_it_names_the_producers_that_are_dead(self, start: Start) -> None:
        cluster = start(seed=1)
        a, rollout = cluster.client("a"), cluster.client("rollout")
        introduce(rollout, "rollout", 0)
        items = iter(self.simulated_dataset(a))
        for number in range(0, 8, 4):
            rollout.put(numbers(4, number), partition_id="p")
            assert values([next(items)]) == list(range(number, number + 4))
            cluster.advance(5.0)
        rollout.die()
        with pytest.raises(WaitTimeoutError, match=r"\nStopped: the only rollout worker is gone \(rank 0, pid "):
            next(items)

    def test_a_batch_in_time_starts_it_again(self, start: Start) -> None:
        cluster = start(seed=1)
        a, b = cluster.client("a"), cluster.client("b")
        items = iter(self.simulated_dataset(a))
        for number in range(0, 12, 4):
            cluster.later(100.0, lambda number=number: b.start(b.operations.put(numbers(4, number), partition_id="p")))
            assert values([next(items)]) == list(range(number, number + 4))
