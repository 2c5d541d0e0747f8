"""Datasets with `device=` fetch the next batch while this one is used. The device is the host, see `device_driver`."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import test_lost_units
import torch
from device_driver import Driver
from small_datasets import Build, small_dataset
from tensordict import TensorDict

import transfer_queue as tq
from server_processes import restart
from simulated import Start, await_result, numbers, ragged, take, values
from transfer_queue.attachment import CURRENT
from transfer_queue.client.data import device_copies
from transfer_queue.dataloader import batch_ahead
from transfer_queue.dataloader.batch_ahead import BatchAhead
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.sampler import RankAwareSampler, SequentialSampler
from transfer_queue.testing import Client, Cluster

ROWS = 12
WAYS = [
    (sampler, delivery)
    for sampler in (SequentialSampler, RankAwareSampler)
    for delivery in ("at_most_once", "at_least_once")
]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(device_copies, "driver_of", lambda device: made)
    return made


@pytest.fixture(scope="module")
def system() -> Iterator[Driver]:
    """The driver of a real system. Its sampler deals rows for no rank: a batch that is lost does not come again."""
    made = Driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "driver_of", lambda device: made)
        tq.init({"controller": {"sampler": "SequentialSampler", "polling_mode": True}})
        yield made
        tq.close()


class TestInVirtualTime:
    """Over the simulated system, whose clients fetch ahead at once instead of in a thread."""

    @pytest.fixture(params=WAYS, ids=lambda way: f"{way[0].__name__}, {way[1]}")
    def way(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    @pytest.fixture
    def cluster(self, start: Start, way: Any) -> Cluster:
        return start(seed=6, sampler=way[0]())

    @pytest.fixture
    def dataset(self, a: Client, b: Client, driver: Driver, way: Any) -> Build:
        a.put(numbers(ROWS), partition_id="p")
        return lambda client=b, **more: small_dataset(
            client, **{"delivery": way[1], "dp_size": 1, "device": "cpu", "timeout": 600, **more}
        )

    def test_the_next_batch_is_fetched_before_it_is_needed(self, a: Client, driver: Driver, dataset: Build) -> None:
        a.seal("p")
        seen: list[int] = []
        for data, _ in dataset():
            batch = len(seen) // 4
            seen += data["x"].tolist()
            assert len(driver.gathered) == min(3, 2 + batch)
            assert (data["x"].untyped_storage().data_ptr() in driver.adopted) == (batch > 0)
        assert seen == list(range(ROWS))
        assert a.check_consumption_status("train", "p")

    def test_a_batch_that_is_not_ready_is_tried_with_each_item(self, a: Client, driver: Driver, dataset: Build) -> None:
        items = iter(dataset())
        assert values(take(items, 5)) == list(range(10))
        assert len(driver.gathered) == 3
        a.put(numbers(4, ROWS), partition_id="p")
        assert values(take(items, 1)) == [10, 11]
        assert len(driver.gathered) == 4
        assert values(take(items, 2)) == list(range(12, 16))

    @pytest.mark.parametrize("end", ["close", "aclose", "delete", "step", "load"])
    def test_what_was_fetched_ahead_goes_back(
        self, a: Client, b: Client, cluster: Cluster, dataset: Build, end: str
    ) -> None:
        made = dataset()
        state, items = made.state_dict(), iter(made)

        async def take_and_close() -> list[Any]:
            items = aiter(made)
            taken = [await anext(items) for _ in range(2)]
            await items.aclose()
            return taken

        yielded = asyncio.run(take_and_close()) if end == "aclose" else take(items, 2)
        for _, meta in yielded if made.delivery == "at_least_once" else ():
            b.ack(meta)
        match end:
            case "close":
                items.close()  # type: ignore[attr-defined]
            case "delete":
                del items
            case "step":
                made.step("q")
            case "load":
                made.load_state_dict(state)
        gc.collect()
        batches = [item for item in gc.get_objects() if type(item) is BatchAhead]
        assert batches == [], "the memory of the device is free again"
        a.seal("p")
        other = dataset(cluster.client("c"))
        other.batch_index = 1
        assert values(yielded) + values(other) == list(range(ROWS))

    @pytest.mark.parametrize("end", ["close", "die"])
    @pytest.mark.parametrize("given", [1, 2, 3])
    def test_a_state_does_not_know_what_was_fetched_ahead(
        self, a: Client, b: Client, cluster: Cluster, dataset: Build, given: int, end: str
    ) -> None:
        made, same = dataset(), dataset(device=None, task_name="same")
        items, others = iter(made), iter(same)
        yielded = values(take(items, given))
        take(others, given)
        state, expected = made.state_dict(), same.state_dict()
        assert {name: state[name] for name in ("batch_index", "items_given", "received")} == {
            name: expected[name] for name in ("batch_index", "items_given", "received")
        }
        if end == "close":
            items.close()  # type: ignore[attr-defined]
        else:
            b.die()
            cluster.advance(60 if made.delivery == "at_most_once" else 0)  # then the process counts as gone
        again = dataset(cluster.client("c"))
        again.load_state_dict(state)
        a.seal("p")
        rest = values(again)
        assert yielded + (rest if end == "close" else sorted(rest)) == list(range(ROWS))

    @pytest.mark.parametrize("way", [(SequentialSampler, "at_most_once"), WAYS[1]], indirect=True)
    def test_a_consumer_that_waits_gets_what_was_fetched_ahead(
        self, a: Client, cluster: Cluster, dataset: Build, way: Any
    ) -> None:
        items = iter(dataset())
        seen = values(take(items, 4))
        other = cluster.client("c")
        waiting = other.start(other.operations.get_meta(["x"], 4, "p", task_name="train", timeout=60))
        cluster.run()
        assert not waiting.done
        items.close()  # type: ignore[attr-defined]
        assert seen + other.get_data(await_result(cluster, waiting))["x"].tolist() == list(range(ROWS))

    def test_what_is_acknowledged_is_that_of_a_loader_without_it(self, a: Client, dataset: Build, way: Any) -> None:
        """A claim without a lease acknowledges its batch, unless this goes back."""
        ahead = 4 if way[1] == "at_most_once" else 0
        made, same = iter(dataset()), iter(dataset(device=None, task_name="same"))
        for _ in range(4):
            assert next(made)[0]["x"].equal(next(same)[0]["x"])
            found, expected = (int(a.get_consumption_status(task, "p")[1].sum()) for task in ("train", "same"))
            assert found == expected + ahead

    @pytest.mark.parametrize("step", ["aside", "allocate"])
    @pytest.mark.parametrize("is_lost", [False, True])
    def test_a_unit_that_ends_while_a_batch_is_fetched_ahead(
        self, a: Client, cluster: Cluster, driver: Driver, dataset: Build, is_lost: bool, step: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """Before the values are looked up, or while they are copied. What is lost is awaited until it is put again."""
        do, ends = getattr(driver, step), [test_lost_units.lose if is_lost else test_lost_units.restart]
        items = iter(dataset())

        def end_the_unit(argument: Any) -> Any:
            if ends and (step == "aside" or driver.is_aside):
                ends.pop()(cluster)
            return do(argument)

        monkeypatch.setattr(driver, step, end_the_unit)
        seen = values(take(items, 2))
        assert not ends
        if is_lost:
            a.put(numbers(ROWS), tq.BatchMeta(range(ROWS), "p"))
        assert seen + values(take(items, 4)) == list(range(ROWS))

    def test_a_fetch_ahead_that_fails_is_made_again(
        self, driver: Driver, dataset: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocate = driver.allocate

        def fail_aside(nbytes: int) -> torch.Tensor:
            if driver.is_aside:
                raise torch.OutOfMemoryError("the device still has the batch before")
            return allocate(nbytes)

        monkeypatch.setattr(driver, "allocate", fail_aside)
        assert values(take(iter(dataset()), 6)) == list(range(ROWS))

    def test_an_error_is_raised_where_the_batch_is_needed(
        self, driver: Driver, dataset: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocate, broken = driver.allocate, threading.Event()

        def fail_later(nbytes: int) -> torch.Tensor:
            if broken.is_set():
                raise torch.OutOfMemoryError("the device has no memory")
            broken.set()
            return allocate(nbytes)

        monkeypatch.setattr(driver, "allocate", fail_later)
        made = dataset()
        items = iter(made)
        first = values(take(items, 2))
        with pytest.raises(torch.OutOfMemoryError, match="the device has no memory"):
            next(items)
        monkeypatch.undo()
        assert first + values(take(iter(made), 4)) == list(range(ROWS))

    def test_the_end_is_that_of_the_moment_at_which_the_next_batch_is_needed(self, a: Client, dataset: Build) -> None:
        """The task has consumed the whole partition when the last batch is used, and then more rows come."""
        for device in ("cpu", None):
            a.put(numbers(4), partition_id=f"of {device}")
            made = dataset(partition_id=f"of {device}", device=device, should_check_consumption_status=True)
            items = iter(made)
            assert values(take(items, 2)) == [0, 1, 2, 3]
            a.put(numbers(4, 4), partition_id=f"of {device}")
            assert values(take(items, 2)) == [4, 5, 6, 7]

    def test_samples_of_a_policy_version_are_not_fetched_ahead(self, a: Client, driver: Driver, dataset: Build) -> None:
        a.put(numbers(8), partition_id="v", tags=[{"policy_version": 1}] * 8)
        items = iter(dataset(partition_id="v"))
        assert values(take(items, 2)) == [0, 1, 2, 3]
        assert len(driver.gathered) == 1
        assert values(take(items, 2)) == [4, 5, 6, 7]

    def test_a_batch_is_freed_when_it_is_finished(self, a: Client, dataset: Build) -> None:
        a.create_partition("f", free_when=["train"])
        a.put(numbers(8), partition_id="f")
        made = dataset(partition_id="f")
        items, left = iter(made), []
        for _ in range(4):
            next(items)
            left.append(len(a.get_consumption_status("train", "f")[0]))
        assert left == [8, 8, 4, 4]

    def test_a_replay_takes_what_was_fetched_ahead_after_it(self, driver: Driver, dataset: Build) -> None:
        made = dataset(keep_batches=2)
        items = iter(made)
        assert values(take(items, 4)) == list(range(8))
        made.reset()
        assert values(take(items, 3)) == list(range(6))
        items.close()  # type: ignore[attr-defined]
        made.reset()
        count, items = len(driver.gathered), iter(made)
        assert values(take(items, 2)) == list(range(4))
        assert len(driver.gathered) == count, "the buffer has the next batch"
        assert values(take(items, 4)) == list(range(4, ROWS))

    @pytest.mark.parametrize("way", WAYS[2:], indirect=True)
    def test_batches_that_were_received_before_are_not_fetched_ahead(self, driver: Driver, dataset: Build) -> None:
        made = dataset()
        state, items = made.state_dict(), iter(made)
        assert values(take(items, 4)) == list(range(8))
        made.load_state_dict({**state, "received": 2})
        count, items = len(driver.gathered), iter(made)
        assert values(take(items, 2)) == list(range(4))
        assert len(driver.gathered) == count + 1
        assert values(take(items, 4)) == list(range(4, ROWS))

    def test_a_position_that_was_set_directly(self, a: Client, dataset: Build) -> None:
        a.put(numbers(4, 100), partition_id="q")
        made = dataset()
        items = iter(made)
        assert values(take(items, 2)) == list(range(4))
        made.partition_id = "q"
        assert values(take(items, 2)) == [100, 101, 102, 103]

    def test_all_tensors_are_adopted(self, a: Client, driver: Driver, dataset: Build) -> None:
        """torch could otherwise use their memory again while the consumer still uses it."""
        columns = {
            "x": torch.arange(4), "y": ragged(3, 5, 1, 4), "z": [torch.ones(2), torch.ones(2, 1)] * 2,
            "n": TensorDict({"leaf": torch.zeros(4, 2), "deep": {"y": ragged(2, 2, 9, 0)}}, batch_size=4),
            "o": [{"an": "object"}, "text", None, 3],
        }  # fmt: skip
        for _ in range(2):
            a.put(TensorDict(columns, batch_size=4), partition_id="t")
        items = iter(dataset(partition_id="t", data_fields=list(columns), micro_batch_size=4))
        next(items)
        batch = next(items)[0]
        assert storages_of(batch)
        assert storages_of(batch) <= set(driver.adopted)


class TestInThreads:
    """Over a real system. The fetch ahead waits until the test lets it go on."""

    @pytest.fixture
    def gate(self, system: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
        """Fetches ahead pass it when it is opened. No fetch is left at the end."""
        gate = Gate(system)
        monkeypatch.setattr(system, "allocate", gate.allocate)
        yield gate
        gate.open.set()
        for thread in fetches():
            thread.join()
        assert not gate.blocks_the_iteration

    @pytest.fixture
    def made(self, gate: Gate, partition: str, monkeypatch: pytest.MonkeyPatch) -> StreamingDataset:
        monkeypatch.setattr(batch_ahead, "BACK_SECONDS", 0.0)  # the end of an iteration does not wait for the fetch
        client = tq.get_client()
        client.put(numbers(ROWS), partition_id=partition)
        client.seal(partition)
        return small_dataset(None, partition_id=partition, device="cpu", timeout=60)

    def test_the_iteration_goes_on_meanwhile(self, made: StreamingDataset, gate: Gate) -> None:
        items = iter(made)
        seen = values(take(items, 1))
        gate.arrived.acquire()
        seen += values(take(items, 1))
        gate.open.set()
        assert seen + values(items) == list(range(ROWS))

    @pytest.mark.parametrize("is_async", [False, True])
    def test_an_iteration_after_one_that_ended_early_gets_the_same_batch(
        self, made: StreamingDataset, gate: Gate, is_async: bool
    ) -> None:
        async def two() -> list[int]:
            items = aiter(made)
            seen = [await anext(items), await anext(items)]
            await items.aclose()
            return values(seen)

        seen = asyncio.run(two()) if is_async else values(take(iter(made), 2))
        gate.arrived.acquire()
        gate.open.set()
        assert seen + values(made) == list(range(ROWS))

    def test_the_end_of_an_iteration_waits_for_the_fetch(
        self, made: StreamingDataset, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A consumer that claims what is left of a sealed partition would miss its batch."""
        monkeypatch.setattr(batch_ahead, "BACK_SECONDS", 60.0)
        items = iter(made)
        seen = values(take(items, 2))
        gate.arrived.acquire()
        threading.Timer(0.0, gate.open.set).start()
        del items
        other = small_dataset(None, partition_id=made.partition_id, timeout=60)
        assert seen + values(other) == list(range(ROWS))

    def test_a_unit_that_is_killed_while_a_batch_is_fetched_ahead(self, made: StreamingDataset, gate: Gate) -> None:
        items = iter(made)
        seen = values(take(items, 2))
        gate.arrived.acquire()
        restart("unit-0")
        gate.open.set()
        assert seen + values(items) == list(range(ROWS))

    def test_an_error_in_a_training_step_returns_the_next_batch(self, made: StreamingDataset, gate: Gate) -> None:
        seen: list[int] = []

        def train() -> None:
            for data, _ in made:
                seen.extend(data["x"].tolist())
                if len(seen) == 4:
                    gate.arrived.acquire()
                    raise ArithmeticError("the loss is not a number")

        with pytest.raises(ArithmeticError):
            train()
        gate.open.set()
        for thread in fetches():
            thread.join()
        other = small_dataset(None, partition_id=made.partition_id, timeout=60)
        assert seen + values(other) == list(range(ROWS))

    def test_a_client_that_closes_meanwhile(self, made: StreamingDataset, gate: Gate) -> None:
        """What it had is free when it has left, and the thread ends."""
        made._tq_client = client = tq.TransferQueueClient(CURRENT.system)
        items = iter(made)
        seen = values(take(items, 2))
        gate.arrived.acquire()
        client.close()
        gate.open.set()
        for thread in fetches():
            thread.join()
        items.close()  # type: ignore[attr-defined]
        other = small_dataset(None, partition_id=made.partition_id, timeout=60)
        assert seen + values(other) == list(range(ROWS))

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize("is_over", [False, True])
    def test_a_copy_and_a_child_have_no_fetch(self, made: StreamingDataset, gate: Gate, is_over: bool) -> None:
        items = iter(made)
        seen = values(take(items, 1))
        gate.arrived.acquire()
        if is_over:
            gate.open.set()
            for thread in fetches():
                thread.join()
        assert pickle.loads(pickle.dumps(made)), "neither a thread nor what it waits for could be pickled"
        child = os.fork()
        if not child:
            signal.alarm(60)  # ends a child that hangs
            try:
                ahead = made._ahead
                has_fetch = ahead is None or ahead.is_needed
                items.close()  # type: ignore[attr-defined]
            except BaseException:
                has_fetch = True
            os._exit(int(has_fetch))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.open.set()
        client = tq.get_client()
        consumed = client.get_consumption_status("train", made.partition_id)[1]
        assert int(consumed.sum()) == 8, "the child has not given the batch of its parent back"
        assert seen + values(items) == list(range(ROWS))


class Gate:
    """Memory for the first batch comes at once, and that for batches ahead when the gate is open."""

    def __init__(self, driver: Driver) -> None:
        self.arrived = threading.Semaphore(0)
        self.open = threading.Event()
        self.blocks_the_iteration = False
        self._driver = driver
        self._allocate = driver.allocate

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self._driver.is_aside:
            self.arrived.release()
            if threading.current_thread() is threading.main_thread():
                self.blocks_the_iteration = True
            else:
                assert self.open.wait(60)
        return self._allocate(nbytes)


class Tensors(pickle.Pickler):
    """Notes the memory of all tensors that an object consists of."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.storages: set[int] = set()

    def reducer_override(self, item: Any) -> Any:
        if type(item) is torch.Tensor and item.untyped_storage().nbytes():
            self.storages.add(item.untyped_storage().data_ptr())
        return NotImplemented


def storages_of(item: Any) -> set[int]:
    pickler = Tensors()
    pickler.dump(item)
    return pickler.storages


def fetches() -> list[threading.Thread]:
    """The threads that fetch ahead."""
    return [thread for thread in threading.enumerate() if thread.name == "transfer_queue fetch ahead"]
