"""`async for` over datasets and loaders of a real system: order, no blocking of the event loop, cancelled waits."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from omegaconf import OmegaConf
from small_datasets import Build

import transfer_queue as tq
from simulated import numbers
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import default_fetch_batch_fn
from transfer_queue.errors import InvalidArgumentError, StorageKeyNotFoundError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]
SECONDS = 60


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    """Its sampler forgets what it has dealt, so that a batch that is lost does not come again."""
    yield tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    tq.close()


@pytest.fixture(autouse=True)
def nothing_is_left(system: Any) -> Iterator[None]:
    """Check that no thread of a loader and no worker process runs."""
    yield
    gc.collect()
    for thread in users_threads():  # it has given its result and is about to end
        thread.join(1)
    assert threads() == []
    assert multiprocessing.active_children() == []


def users_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "transfer_queue user function"]


def threads() -> list[str]:
    return [thread.name for thread in users_threads()]


def put(partition: str, rows: int, start: int = 0, *, seal: bool = False) -> None:
    tq.get_client().put(numbers(rows, start), partition_id=partition)
    if seal:
        tq.get_client().seal(partition)


async def values(items: Any) -> list[int]:
    return [value async for data, _ in items for value in data["x"].tolist()]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def claim_waits(partition: str) -> bool:
    """Whether a claim of the partition is parked at the controller."""
    shown = tq.get_client().status().partitions
    return any(task.waiting for found in shown if found.name == partition for task in found.tasks)


async def start_wait(partition: str, work: Awaitable[Any]) -> asyncio.Task[Any]:
    """Start a task, and return it when its claim of the partition is parked."""
    tq.get_client().create_partition(partition)
    task = asyncio.ensure_future(work)
    await until(lambda: claim_waits(partition))
    return task  # type: ignore[return-value]


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def run(main: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, SECONDS))  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1])
def test_other_tasks_run_while_a_batch_is_awaited(dataset: Build, partition: str, workers: int) -> None:
    """The producer is a task of the same event loop: a wait that blocked it would never end."""

    async def produce() -> None:
        for start in (0, 4):
            await until(lambda: claim_waits(partition))
            await tq.get_client().async_put(numbers(4, start), partition_id=partition)
        tq.get_client().seal(partition)

    async def main() -> Any:
        tq.get_client().create_partition(partition)
        producer = asyncio.ensure_future(produce())
        found = await values(StreamingDataLoader(dataset(), num_workers=workers))
        await producer
        return found

    assert run(main()) == list(range(8))


def test_other_tasks_run_between_the_items_of_a_batch(dataset: Build, partition: str) -> None:
    put(partition, 4, seal=True)

    async def main() -> list[str]:
        seen: list[str] = []

        async def other() -> None:
            while len(seen) < 8:
                seen.append("other")
                await asyncio.sleep(0)

        items = aiter(dataset(micro_batch_size=1))
        await anext(items)
        task = asyncio.ensure_future(other())
        async for _ in items:
            seen.append("item")
        task.cancel()
        return seen

    found = run(main())
    assert found.count("item") == 3
    assert found[:4].count("other") >= 1


class TestCancellation:
    def test_a_cancelled_wait_ends_immediately_and_its_claim_is_withdrawn(self, dataset: Build, partition: str) -> None:
        async def main() -> None:
            task = await start_wait(partition, values(dataset()))
            assert threads() == []
            await cancel(task)
            assert not claim_waits(partition)

        run(main())

    @pytest.mark.parametrize("workers", [0, 1])
    def test_the_iterator_continues_after_a_timeout(self, dataset: Build, partition: str, workers: int) -> None:
        async def main() -> Any:
            tq.get_client().create_partition(partition)
            async with aclosing(aiter(StreamingDataLoader(dataset(), num_workers=workers))) as items:
                for _ in range(5):
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(anext(items), 0.05)
                put(partition, 4, seal=True)
                return await values(items)

        assert run(main()) == [0, 1, 2, 3]

    @pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
    def test_no_samples_are_lost_when_they_arrive_at_the_same_time(
        self, dataset: Build, partition: str, delivery: str
    ) -> None:
        """The put and the cancellation race. In both orders, the next iteration has every sample once."""
        loader = StreamingDataLoader(dataset(delivery=delivery))

        async def main() -> list[int]:
            found: list[int] = []

            async def consume() -> None:
                async for data, _ in loader:
                    found.extend(data["x"].tolist())

            for round_ in range(40):
                task = await start_wait(partition, consume())
                answer = asyncio.ensure_future(
                    tq.get_client().async_put(numbers(4, 4 * round_), partition_id=partition)
                )
                for _ in range(round_ % 8):
                    await asyncio.sleep(0)
                if round_ % 3 == 0:
                    await asyncio.sleep(0.0002 * (round_ % 7))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await answer
            tq.get_client().seal(partition)
            await consume()
            return found

        assert run(main()) == list(range(160))

    def test_a_users_function_runs_to_its_end_and_its_batch_is_kept(self, dataset: Build, partition: str) -> None:
        put(partition, 4, seal=True)
        entered, leave = threading.Event(), threading.Event()

        def fetch(**arguments: Any) -> Any:
            entered.set()
            assert leave.wait(SECONDS)
            return default_fetch_batch_fn(**arguments)

        own = dataset(fetch_batch_fn=fetch)

        async def main() -> Any:
            task = asyncio.ensure_future(values(own))
            await until(entered.is_set)
            assert len(threads()) == 1
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done()
            leave.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await values(own)

        assert run(main()) == [0, 1, 2, 3]

    def test_a_users_function_that_fails_does_not_hide_the_cancellation(self, dataset: Build, partition: str) -> None:
        entered, leave = threading.Event(), threading.Event()

        def fetch(**arguments: Any) -> Any:
            entered.set()
            assert leave.wait(SECONDS)
            raise tq.WaitTimeoutError("nothing")

        async def main() -> None:
            task = asyncio.ensure_future(values(dataset(fetch_batch_fn=fetch)))
            await until(entered.is_set)
            task.cancel()
            await asyncio.sleep(0)
            leave.set()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(main())

    def test_workers_end_with_the_cancelled_iteration(self, dataset: Build, partition: str) -> None:
        async def main() -> None:
            task = await start_wait(partition, values(StreamingDataLoader(dataset(), num_workers=2)))
            assert len(multiprocessing.active_children()) == 2
            await cancel(task)
            del task
            await asyncio.sleep(0)  # asyncio refers to the task until here
            assert multiprocessing.active_children() == []

        run(main())

    @pytest.mark.parametrize("plain", [True, False])
    def test_persistent_workers_deliver_to_the_next_iteration(
        self, dataset: Build, partition: str, plain: bool
    ) -> None:
        loader = StreamingDataLoader(dataset(), num_workers=1, persistent_workers=True)

        async def wait_for_nothing() -> list[int]:
            task = await start_wait(partition, values(loader))
            there = [child.pid for child in multiprocessing.active_children()]
            await cancel(task)
            assert [child.pid for child in multiprocessing.active_children()] == there
            return there

        run(wait_for_nothing())
        put(partition, 8, seal=True)
        if plain:
            found = [value for data, _ in loader for value in data["x"].tolist()]
        else:
            found = run(values(loader))
        assert found == list(range(8))

    def test_deleting_the_loader_ends_persistent_workers_and_their_thread(self, dataset: Build, partition: str) -> None:
        async def main() -> None:
            loader = StreamingDataLoader(dataset(), num_workers=1, persistent_workers=True)
            await cancel(await start_wait(partition, values(loader)))

        run(main())


class TestEnds:
    def test_an_error_ends_the_iteration(self, dataset: Build, partition: str) -> None:
        put(partition, 4, seal=True)

        def broken(data: Any, meta: Any, micro_batch_size: int) -> Any:
            raise StorageKeyNotFoundError("broken")

        async def main(workers: int) -> None:
            own = dataset(process_batch_fn=broken, task_name=f"t{workers}")
            items = aiter(StreamingDataLoader(own, num_workers=workers))
            with pytest.raises(StorageKeyNotFoundError, match="broken"):
                await anext(items)
            with pytest.raises(StopAsyncIteration):
                await anext(items)
            assert multiprocessing.active_children() == []

        run(main(0))
        run(main(1))

    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
    def test_what_a_users_function_raises_does_not_look_like_the_end(
        self, dataset: Build, partition: str, kind: type[Exception], workers: int
    ) -> None:
        """The rest of the batch, or of the stream, would be left out without an error."""
        put(partition, 8, seal=True)

        def collate(item: Any) -> Any:
            if item[0]["x"][0] == 2:
                raise kind("mine")
            return item

        with pytest.raises(RuntimeError, match=r"StopIteration|mine"):
            run(values(StreamingDataLoader(dataset(), num_workers=workers, collate_fn=collate)))

    def test_wrong_sizes_are_an_error_before_the_first_item(self, dataset: Build) -> None:
        with pytest.raises(InvalidArgumentError, match="micro_batch_size"):
            aiter(dataset(micro_batch_size=5))
        with pytest.raises(InvalidArgumentError, match="micro_batch_size"):
            aiter(StreamingDataLoader(dataset(micro_batch_size=5), num_workers=1))

    def test_leaving_the_loop_keeps_the_position(self, dataset: Build, partition: str) -> None:
        put(partition, 8, seal=True)
        loader = StreamingDataLoader(dataset())

        async def first() -> Any:
            async for data, _ in loader:
                return data["x"].tolist()
            return None

        assert run(first()) == [0, 1]
        assert run(values(loader)) == list(range(2, 8))
        loader.reset()
        assert run(values(loader)) == list(range(8))

    def test_aclose_ends_the_iterator(self, dataset: Build, partition: str) -> None:
        put(partition, 8)

        async def main(workers: int) -> None:
            items = aiter(StreamingDataLoader(dataset(task_name=f"t{workers}"), num_workers=workers))
            await anext(items)
            await items.aclose()
            await items.aclose()
            assert multiprocessing.active_children() == []
            with pytest.raises(StopAsyncIteration):
                await anext(items)

        run(main(0))
        run(main(1))

    def test_two_tasks_cannot_share_an_iterator(self, dataset: Build, partition: str) -> None:
        async def main() -> None:
            items: AsyncIterator[Any] = aiter(dataset())
            task = await start_wait(partition, anext(items))
            with pytest.raises(RuntimeError, match="another task"):
                await anext(items)
            await cancel(task)

        run(main())
