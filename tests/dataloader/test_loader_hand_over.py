"""Real loaders that break, are deleted, cancelled and killed: what was not yielded can still be claimed.

Each program is drawn by a seed. It only uses the public interface: it collects what loaders yield, then claims the rest
with `get_meta`. Together these are all rows, and no row twice, unless a process was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from device_driver import Driver
from omegaconf import OmegaConf
from tensordict import TensorDictBase

import transfer_queue as tq
import warm
from simulated import numbers
from transfer_queue.client.data import device_copies
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset, default_fetch_batch_fn
from transfer_queue.metadata import BatchMeta

FACTOR = int(os.environ.get("EXAMPLES_FACTOR", "1"))
ROWS, BATCH = 24, 3
SECONDS = 60

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module", params=["SequentialSampler", "PrioritySampler"])
def system(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The configuration of a system whose sampler deals rows for no rank."""
    controller: dict[str, Any] = {"sampler": request.param}
    if request.param == "PrioritySampler":
        controller["sampler_args"] = {"tag": "n"}
    yield tq.init(OmegaConf.create({"controller": controller}))
    tq.close()


@pytest.fixture(scope="module")
def sequential() -> Iterator[Any]:
    yield tq.init(OmegaConf.create({"controller": {"sampler": "SequentialSampler"}}))
    tq.close()


# ------------------------------------------------------------ functions of users


def same(batch: TensorDictBase, meta: BatchMeta, micro_batch_size: int) -> Iterator[tuple[TensorDictBase, BatchMeta]]:
    """A `process_batch_fn` that yields the samples one by one."""
    for at in range(len(meta)):
        yield batch[at : at + 1], meta.select_samples([at])


def fail_once(path: Path) -> None:
    """Raise the first time."""
    with contextlib.suppress(FileExistsError):
        path.touch(exist_ok=False)
        raise OSError("a function of the user fails")


def process_or_fail(
    batch: TensorDictBase, meta: BatchMeta, micro_batch_size: int, path: Path
) -> Iterator[tuple[TensorDictBase, BatchMeta]]:
    fail_once(path)
    yield from same(batch, meta, micro_batch_size)


def fetch_and_fail(*arguments: Any, path: Path, **more: Any) -> tuple[TensorDictBase | None, BatchMeta]:
    """Claim a batch, then raise the first time."""
    found = default_fetch_batch_fn(*arguments, **more)
    if len(found[1]):
        fail_once(path)
    return found


def fetch_in_two(
    tq_client: Any, data_fields: Sequence[str], batch_size: int, partition_id: str, task_name: str,
    sampling_config: Mapping[str, Any], batch_index: int,
) -> tuple[TensorDictBase | None, BatchMeta]:  # fmt: skip
    """Claim the batch in two parts, of which the second may fail."""

    def wanted(count: int) -> BatchMeta:
        sampling = dict(sampling_config)
        return tq_client.get_meta(
            list(data_fields), count, partition_id, task_name=task_name, sampling_config=sampling, timeout=1.0
        )

    first = wanted(1)
    if not len(first):
        return None, first
    both = BatchMeta.concat([first, wanted(batch_size - 1)])
    return tq_client.get_data(both), both


# ------------------------------------------------------------ programs


class Program:
    """A random program over one partition. yielded: the values of all items, in order."""

    def __init__(self, config: Any, seed: int, folder: Path, partition: str = "") -> None:
        self.draw = random.Random(seed)
        self.config = config
        self.partition = partition or f"p{seed}-{folder.name}"
        self.folder = folder
        self.yielded: list[int] = []
        self.client = tq.get_client()
        put = numbers(ROWS)
        keys = [f"k{at}" for at in range(ROWS)]
        self.client.kv_batch_put(keys, self.partition, put, tags=[{"n": -at} for at in range(ROWS)])
        self.client.seal(self.partition)

    def loader(self, workers: int | None = None) -> Any:
        draw = self.draw
        workers = draw.choice([0, 0, 1, 2]) if workers is None else workers
        path = self.folder / f"failed {draw.random()}"
        more: dict[str, Any] = draw.choice([
            {}, {"device": None if workers else "cpu"},
            {"process_batch_fn": same}, {"process_batch_fn": partial(process_or_fail, path=path)},
            {"fetch_batch_fn": default_fetch_batch_fn}, {"fetch_batch_fn": partial(fetch_and_fail, path=path)},
            {"fetch_batch_fn": fetch_in_two},
        ])  # fmt: skip
        if "process_batch_fn" not in more:
            more["micro_batch_size"] = draw.choice([1, BATCH])
        more["keep_batches"] = draw.choice([None, 0, 1])
        micro = more.pop("micro_batch_size", BATCH)
        dataset = StreamingDataset(self.config, BATCH, micro, ["x"], self.partition, "t", 0, **more)
        if not workers and draw.random() < 0.5:
            return dataset
        return StreamingDataLoader(dataset, num_workers=workers, persistent_workers=workers > 0 and draw.random() < 0.5)

    def note(self, item: Any) -> None:
        self.yielded += item[0]["x"].flatten().tolist()

    def run(self) -> None:
        for _ in range(self.draw.randint(1, 3)):
            loader = self.loader()
            for _ in range(self.draw.randint(1, 3)):
                self.draw.choice([self.some, self.some, self.untouched, self.cancelled, self.step_away])(loader)
            self.finish_batch(loader)
            del loader
            gc.collect()

    def finish_batch(self, loader: Any) -> None:
        """Take the rest of a batch of which some items were yielded: it was handed over with the first one."""
        dataset = getattr(loader, "dataset", loader)
        while dataset.state_dict()["items_given"]:
            self.take(loader, 1)

    def take(self, loader: Any, most: int) -> None:
        """Take some items in a `for` loop, and break. A function of the user may fail."""
        with contextlib.suppress(OSError, RuntimeError):  # torch reports the error of a worker as another one
            for count, item in enumerate(loader):
                self.note(item)
                if count + 1 == most:
                    break

    def some(self, loader: Any) -> None:
        self.take(loader, self.draw.choice([1, 2, 4, 100]))

    def untouched(self, loader: Any) -> None:
        """Begin an iteration of which no item is taken."""
        iter(loader)

    def cancelled(self, loader: Any) -> None:
        """Take some items in an `async for` loop, of which a wait is cancelled at a random moment."""
        turns = self.draw.randint(0, 60)

        async def take() -> None:
            with contextlib.suppress(OSError, RuntimeError):
                async for item in loader:
                    self.note(item)

        async def main() -> None:
            task = asyncio.ensure_future(take())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        asyncio.run(main())

    def step_away(self, loader: Any) -> None:
        """Take an item, look at another partition, and come back."""
        self.take(loader, 1)
        self.finish_batch(loader)
        dataset = getattr(loader, "dataset", loader)
        dataset.step("elsewhere")
        dataset.step(self.partition)

    def rest(self, timeout: float = SECONDS) -> list[int]:
        """Claim everything that can still be claimed."""
        found: list[int] = []
        while len(meta := self.client.get_meta(["x"], 1, self.partition, task_name="t", timeout=timeout)):
            found += self.client.get_data(meta)["x"].flatten().tolist()
        return found


@pytest.mark.parametrize("seed", range(6 * FACTOR))
def test_what_was_not_yielded_can_be_claimed(
    system: Any, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(device_copies, "driver_of", lambda device: driver)
    program = Program(system, seed, tmp_path)
    program.run()
    assert sorted(program.yielded + program.rest()) == list(range(ROWS))


# ------------------------------------------------------------ killed processes


def iterate(
    config: Any, partition: str, workers: int, device: str | None, most: int, told: Connection[Any, Any]
) -> None:
    """A process that reports items, and hangs with the last one of these."""
    driver = Driver()
    device_copies.driver_of = lambda device: driver
    dataset = StreamingDataset(config, BATCH, BATCH, ["x"], partition, "t", 0, device=device)
    loader = StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context="fork" if workers else None)
    for count, (data, _) in enumerate(loader):
        for thread in threading.enumerate():
            if thread.name == "transfer_queue fetch ahead":
                thread.join()  # the next batch is there
        told.send(data["x"].tolist())
        if count + 1 == most:
            signal.pause()


def claim_and_hang(config: Any, partition: str, told: Connection[Any, Any]) -> None:
    """A process that hangs between its claim and its first item."""

    def hang(*arguments: Any, **more: Any) -> tuple[TensorDictBase | None, BatchMeta]:
        found = default_fetch_batch_fn(*arguments, **more)
        told.send(found[1].global_indexes)
        signal.pause()
        return found

    next(iter(StreamingDataset(config, BATCH, BATCH, ["x"], partition, "t", 0, fetch_batch_fn=hang)))


def put(partition: str) -> Any:
    client = tq.get_client()
    client.put(numbers(ROWS), partition_id=partition)
    return client


def claim_all(client: Any, partition: str, yielded: list[int]) -> list[int]:
    """Claim row by row until all rows were yielded or claimed. What a killed process had comes back soon."""
    found: list[int] = []
    while len({*yielded, *found}) < ROWS:
        meta = client.get_meta(["x"], 1, partition, task_name="t", timeout=SECONDS)
        found += client.get_data(meta)["x"].flatten().tolist()
    return found


@pytest.mark.parametrize(("workers", "device"), [(0, None), (0, "cpu"), (2, None)])
@pytest.mark.parametrize("most", [1, 3])
def test_a_killed_loader_has_handed_over_what_it_yielded(
    sequential: Any, workers: int, device: str | None, most: int
) -> None:
    partition = f"killed {workers} {device} {most}"
    client = put(partition)
    here, there = multiprocessing.Pipe(duplex=False)
    process = warm.process(iterate, sequential, partition, workers, device, most, there, daemon=False)
    process.start()
    there.close()
    yielded = [value for _ in range(most) for value in here.recv()]
    process.kill()
    process.join()
    claimed = claim_all(client, partition, yielded)
    assert sorted(yielded + claimed) == list(range(ROWS))


def test_a_loader_that_is_killed_before_its_first_item_has_handed_over_nothing(sequential: Any) -> None:
    client = put("unseen")
    here, there = multiprocessing.Pipe(duplex=False)
    process = warm.process(claim_and_hang, sequential, "unseen", there, daemon=False)
    process.start()
    there.close()
    assert len(here.recv()) == BATCH
    process.kill()
    process.join()
    assert sorted(claim_all(client, "unseen", [])) == list(range(ROWS))


def drop(datasets: list[StreamingDataset]) -> None:
    """A forked process in which the copy of a dataset becomes garbage."""
    tq.get_client().get_partition_list()
    datasets.clear()
    gc.collect()


def test_a_forked_child_gives_back_no_batch_of_its_parent(sequential: Any, tmp_path: Path) -> None:
    """Otherwise another consumer would get the samples that the parent is going to yield."""
    client = put("forked")
    client.seal("forked")
    broken = partial(process_or_fail, path=tmp_path / "failed")
    datasets = [StreamingDataset(sequential, BATCH, BATCH, ["x"], "forked", "t", 0, process_batch_fn=broken)]
    with contextlib.suppress(OSError):
        next(iter(datasets[0]))
    child = multiprocessing.get_context("fork").Process(target=drop, args=(datasets,))
    child.start()
    child.join()
    assert child.exitcode == 0
    others = client.get_data(client.get_meta(["x"], ROWS - BATCH, "forked", task_name="t"))["x"].flatten().tolist()
    yielded = [value for data, _ in datasets[0] for value in data["x"].flatten().tolist()]
    assert (yielded, others) == ([*range(BATCH)], [*range(BATCH, ROWS)])


def test_what_a_function_claims_and_leaves_out_is_consumed(sequential: Any) -> None:
    """It has seen these samples, and returns no batch for them."""
    client = put("left out")
    client.seal("left out")

    def without_the_first(*arguments: Any, **more: Any) -> tuple[TensorDictBase | None, BatchMeta]:
        data, meta = default_fetch_batch_fn(*arguments, **more)
        return (None, meta) if data is not None and data["x"][0] == 0 else (data, meta)

    dataset = StreamingDataset(
        sequential, BATCH, BATCH, ["x"], "left out", "t", 0, True, fetch_batch_fn=without_the_first
    )
    assert [value for data, _ in dataset for value in data["x"].tolist()] == list(range(BATCH, ROWS))
    assert client.check_consumption_status("t", "left out")


# torch's handler of SIGCHLD raises an exception wherever the program is, also where torch has just opened a file.
@pytest.mark.filterwarnings("ignore:unclosed file <_io.BufferedRandom:ResourceWarning")
@pytest.mark.parametrize("workers", [1, 2])
def test_what_killed_workers_have_fetched_can_be_claimed(sequential: Any, workers: int) -> None:
    partition = f"workers {workers}"
    client = put(partition)
    before = {process.pid for process in psutil.Process().children()}
    dataset = StreamingDataset(sequential, BATCH, BATCH, ["x"], partition, "t", 0)
    items = iter(StreamingDataLoader(dataset, num_workers=workers))
    yielded = next(items)[0]["x"].tolist()
    for process in psutil.Process().children():
        if process.pid not in before:
            process.kill()
    # torch finds that they are dead, perhaps in the middle of an item or of the handshake for one
    with contextlib.suppress(RuntimeError, OSError, EOFError):
        for data, _ in items:
            yielded += data["x"].tolist()
            assert len(yielded) < ROWS, "the killed workers have fetched everything"
    del items, dataset
    gc.collect()
    assert {*yielded, *claim_all(client, partition, yielded)} == set(range(ROWS))
