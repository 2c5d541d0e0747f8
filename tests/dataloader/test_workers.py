"""Orders from the loader's process to its workers, and how workers share a rank's batches."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from transfer_queue.client.surface import Surface
from transfer_queue.dataloader import streaming_dataset
from transfer_queue.dataloader.orders import MAX_NAME, Order, Orders
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.metadata import BatchMeta


class Shelf(Surface):
    """A system with everything in it: batch i of partition p holds start(p) + 4i and the three after; it can fork."""

    def __init__(self, batches: int = 2) -> None:
        self.starts = {"p": 0, "q": 100}
        self.batches = batches

    @property
    def _operations(self) -> Any:
        raise AssertionError("not asked for here")

    def _run(self, operation: Any) -> Any:
        raise AssertionError("not asked for here")

    async def _run_async(self, operation: Any) -> Any:
        raise AssertionError("not asked for here")

    def await_batch(self, *arguments: Any, **more: Any) -> tuple[BatchMeta, bool]:
        _, size, partition, _, sampling, _ = arguments
        number = sampling["batch_index"]
        if number >= self.batches:
            return BatchMeta(), True
        first = self.starts[partition] + size * number
        return BatchMeta(list(range(first, first + size)), [partition] * size, {}), False

    def get_data(self, metadata: BatchMeta, **more: Any) -> TensorDict:
        return TensorDict({"x": torch.tensor(metadata.global_indexes)}, batch_size=[len(metadata)])


def dataset(batches: int = 2, **more: Any) -> StreamingDataset:
    arguments: dict[str, Any] = {
        "config": Shelf(batches), "batch_size": 4, "micro_batch_size": 2, "data_fields": ["x"], "partition_id": "p",
        "task_name": "train", "dp_rank": 0,
    }  # fmt: skip
    return StreamingDataset(**{**arguments, **more})


def values(items: Any) -> list[int]:
    return [value for data, _ in items for value in data["x"].tolist()]


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    """Torch's workers end with their loader."""
    yield
    for child in multiprocessing.active_children():
        child.join(10)
    assert multiprocessing.active_children() == []


class TestOrders:
    def test_read(self) -> None:
        orders = Orders()
        assert orders.read() == Order(0, 0, "")
        assert orders.reset() == Order(1, 0, "")
        assert orders.step("ünï/1") == Order(1, 1, "ünï/1")
        assert orders.step("") == orders.read() == Order(1, 2, "")

    def test_names(self) -> None:
        orders = Orders()
        assert orders.step("x" * MAX_NAME).partition_id == "x" * MAX_NAME
        with pytest.raises(InvalidArgumentError, match="4096 at most"):
            orders.step("ü" * (MAX_NAME // 2 + 1))
        assert orders.read() == Order(0, 1, "x" * MAX_NAME)

    def test_half_written(self) -> None:
        orders = Orders()
        orders.step("p")
        orders._memory[0] += 1
        assert orders.read() is None
        orders._memory[0] += 1
        assert orders.read() == Order(0, 1, "p")

    def test_reaches_a_copy_in_another_process(self) -> None:
        orders = Orders()
        context = multiprocessing.get_context("fork")
        go, done = context.Event(), context.SimpleQueue()

        def child() -> None:
            go.wait(30)
            done.put(orders.read())

        process = context.Process(target=child)
        process.start()
        orders.step("q")
        go.set()
        assert done.get() == Order(0, 1, "q")
        process.join()

    def test_pickled_otherwise_it_is_a_copy(self) -> None:
        orders = Orders()
        orders.step("p")
        assert pickle.loads(pickle.dumps(orders)).read() == Order(0, 1, "p")


class TestObeying:
    """A copy as a worker has it: it shares the orders, and nothing else."""

    def copied(self, stream: StreamingDataset) -> StreamingDataset:
        stream.share()
        twin = pickle.loads(pickle.dumps({**vars(stream), "_orders": None}))
        copy = object.__new__(StreamingDataset)
        vars(copy).update({**twin, "_orders": stream._orders})
        return copy

    def test_reset(self) -> None:
        stream = dataset()
        copy = self.copied(stream)
        assert values(copy) == list(range(8))
        assert values(copy) == []
        stream.reset()
        assert values(copy) == list(range(8))

    def test_step(self) -> None:
        stream = dataset()
        copy = self.copied(stream)
        items = iter(copy)
        assert values([next(items)]) == [0, 1]
        stream.step("q")
        assert values(items) == [2, 3, *range(100, 108)]
        assert (copy.partition_id, len(copy.buffer)) == ("q", 2)

    def test_step_then_reset(self) -> None:
        stream = dataset()
        copy = self.copied(stream)
        assert values(copy) == list(range(8))
        stream.step("q")
        stream.reset()
        assert values(copy) == list(range(100, 108))

    def test_what_was_ordered_before_the_copy_is_not_obeyed_again(self) -> None:
        stream = dataset()
        stream.share()
        stream.step("q")
        stream.reset()
        copy = self.copied(stream)
        items = iter(copy)
        assert values([next(items)]) == [100, 101]
        assert values(items) == list(range(102, 108))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning")
class TestWorkers:
    def test_one(self) -> None:
        items = list(StreamingDataLoader(dataset(), num_workers=1))
        assert [len(meta) for _, meta in items] == [2] * 4
        assert values(items) == list(range(8))

    @pytest.mark.parametrize("workers", [2, 3])
    def test_several_share_the_batches(self, workers: int) -> None:
        assert sorted(values(StreamingDataLoader(dataset(batches=5), num_workers=workers))) == list(range(20))

    def test_persistent_ones_hear_of_reset_and_step(self) -> None:
        loader = StreamingDataLoader(dataset(), num_workers=1, persistent_workers=True)
        assert values(loader) == list(range(8))
        assert values(loader) == []
        loader.reset()
        assert values(loader) == list(range(8))
        loader.step("q")
        assert values(loader) == list(range(100, 108))
        del loader

    def test_the_others_begin_anew(self) -> None:
        loader = StreamingDataLoader(dataset(), num_workers=1)
        assert values(loader) == list(range(8))
        loader.step("q")
        assert values(loader) == list(range(100, 108))


def test_an_orphan_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of a loader whose process was killed does not wait for ever."""

    class Gone:
        def is_alive(self) -> bool:
            return False

    class Waiting(Shelf):
        def await_batch(self, *arguments: Any, **more: Any) -> tuple[BatchMeta, bool]:
            return BatchMeta(), False

    monkeypatch.setattr(streaming_dataset, "get_worker_info", lambda: type("Info", (), {"id": 0, "num_workers": 1}))
    monkeypatch.setattr(multiprocessing, "parent_process", Gone)
    assert list(dataset(config=Waiting())) == []
