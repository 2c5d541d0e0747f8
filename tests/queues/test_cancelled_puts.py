"""A put that raises CancelledError has left nothing; one that consumers have used already returns normally."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.client import TransferQueueClient
from transfer_queue.net.drivers.asyncio_driver import _Link


@pytest.fixture(scope="module", autouse=True)
def system() -> Any:
    tq.init()
    yield
    tq.close()


async def cancelled_at(put: Coroutine[Any, Any, Any], turns: int) -> bool:
    """Cancel a put after this number of turns of the loop. Returns whether it raised CancelledError."""
    task = asyncio.ensure_future(put)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


async def cancelled_with_its_reply(put: Coroutine[Any, Any, Any], patch: pytest.MonkeyPatch) -> bool:
    """Cancel a put in the turn of the loop in which its reply arrives."""
    task = asyncio.ensure_future(put)
    answered = _Link._on_answer

    def cancel_after(link: _Link, body: bytes) -> None:
        answered(link, body)
        task.cancel()

    with patch.context() as patched:
        patched.setattr(_Link, "_on_answer", cancel_after)
        while not task.done():
            await asyncio.sleep(0)
    return task.cancelled()


QUEUES: dict[str, Callable[[], tq.Queue]] = {
    "fifo": tq.Queue,
    "maxsize": lambda: tq.Queue(maxsize=4),
    "priority": tq.PriorityQueue,
    "lifo": lambda: tq.LifoQueue(maxsize=4),
}


@pytest.mark.parametrize("kind", QUEUES)
def test_a_put_cancelled_at_any_turn_leaves_its_item_only_if_it_returns(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = QUEUES[kind]()

    async def main() -> None:
        raised = 0
        for turns in [*range(12), *range(12)]:
            if await cancelled_at(queue.put_async(turns), turns):
                raised += 1
            else:
                assert queue.get_nowait() == turns
                queue.task_done()
            assert (queue.qsize(), queue.unfinished_tasks) == (0, 0)
        assert raised
        assert await cancelled_with_its_reply(queue.put_async(1), monkeypatch), "it is withdrawn"
        assert (queue.qsize(), queue.unfinished_tasks) == (0, 0)
        await queue.join_async(timeout=10)

    asyncio.run(main())


@pytest.mark.parametrize("kind", QUEUES)
def test_items_of_cancelled_puts_that_race_with_gets_arrive_if_and_only_if_the_put_returned(kind: str) -> None:
    queue, draw = QUEUES[kind](), random.Random(7)

    async def main() -> None:
        got, put = [], []

        async def take() -> None:
            while True:
                item = await queue.get_async()
                if item == -1:
                    return
                got.append(item)
                await queue.task_done_async()

        taker = asyncio.ensure_future(take())
        for item in range(1, 60):
            if not await cancelled_at(queue.put_async(item), draw.randrange(30)):
                put.append(item)
        await queue.put_async(-1)
        await taker
        queue.task_done()
        assert sorted(got) == put
        await queue.join_async(timeout=10)

    asyncio.run(main())


def test_a_put_whose_item_is_taken_returns_normally() -> None:
    queue, late = tq.Queue(), 0

    async def attempt() -> bool:
        """Take the item before this loop reads the reply to the put; return whether it was so."""
        task = asyncio.ensure_future(queue.put_async("a"))
        while True:
            await asyncio.sleep(0)
            with contextlib.suppress(tq.QueueEmptyError):
                assert queue.get_nowait() == "a"
                break
        before = not task.done()
        task.cancel()
        await task
        queue.task_done()
        return before

    for _ in range(100):
        late += asyncio.run(attempt())
    assert late
    assert (queue.qsize(), queue.unfinished_tasks) == (0, 0)


def test_a_put_that_waits_for_space_is_withdrawn_by_wait_for() -> None:
    queue = tq.Queue(maxsize=1)

    async def main() -> None:
        await queue.put_async("a")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(queue.put_async("b"), 0.05)
        assert await queue.get_async() == "a"
        assert queue.qsize() == 0
        assert queue.unfinished_tasks == 1
        await asyncio.wait_for(queue.put_async("c"), 30)
        assert await queue.get_async() == "c"

    asyncio.run(main())


async def until_full(queue: tq.Queue) -> None:
    while queue.qsize() < queue.maxsize:
        await asyncio.sleep(0.005)


def test_parts_of_a_cancelled_put_many_are_removed() -> None:
    queue = tq.Queue(maxsize=3)

    async def main() -> None:
        task = asyncio.ensure_future(queue.put_many_async(range(10)))
        await until_full(queue)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as raised:
            await task
        assert not str(raised.value)
        assert (queue.qsize(), queue.unfinished_tasks) == (0, 0)

    asyncio.run(main())


def test_a_cancelled_put_many_says_what_consumers_have_taken(caplog: pytest.LogCaptureFixture) -> None:
    queue = tq.Queue(maxsize=3)

    async def main() -> None:
        task = asyncio.ensure_future(queue.put_many_async(range(10)))
        await until_full(queue)
        assert queue.get() == 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError, match=r"of 10 items .* after 3 .* have taken 1"):
            await task
        assert (queue.qsize(), queue.unfinished_tasks) == (0, 1)

    with caplog.at_level(logging.WARNING, "transfer_queue"):
        asyncio.run(main())
    assert "consumers have taken 1 of them; the others were removed" in caplog.text


def rows(count: int = 2) -> TensorDict:
    return TensorDict({"x": torch.ones(count, 3)}, batch_size=count)


def rows_in(client: TransferQueueClient, name: str) -> int:
    return next(partition.rows for partition in client.status().partitions if partition.name == name)


PUTS: dict[str, Callable[[TransferQueueClient, str], Coroutine[Any, Any, Any]]] = {
    "put": lambda client, name: client.async_put(rows(), partition_id=name),
    "put with groups": lambda client, name: client.async_put(rows(), partition_id=name, group_ids=["g", "g"]),
    "insert": lambda client, name: client.async_get_meta(["x"], 2, name, mode="insert"),
    "kv_put": lambda client, name: client.async_kv_put("a", name, {"x": torch.ones(3)}, {"n": 1}),
    "kv_batch_put": lambda client, name: client.async_kv_batch_put(["a", "b"], name, rows()),
    "kv_retrieve_meta": lambda client, name: client.async_kv_retrieve_meta(["a"], name, create=True),
    "tag": lambda client, name: client.async_kv_put("a", name, tag={"n": 1}),
}


@pytest.mark.parametrize("kind", PUTS)
def test_a_cancelled_put_of_new_samples_leaves_none(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client, name = tq.get_client(), f"new {kind}"
    client.create_partition(name)

    async def main() -> None:
        for turns in range(10):
            if not await cancelled_at(PUTS[kind](client, name), turns):
                client.clear_partition(name)
                client.create_partition(name)
            assert rows_in(client, name) == 0
        assert await cancelled_with_its_reply(PUTS[kind](client, name), monkeypatch)
        assert rows_in(client, name) == 0
        await PUTS[kind](client, name)
        assert rows_in(client, name) > 0

    asyncio.run(main())


def test_a_cancelled_put_into_samples_that_exist_returns_if_it_took_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    client, name = tq.get_client(), "existing"
    meta = client.put(rows(), partition_id=name)

    async def main() -> None:
        values = TensorDict({"y": torch.zeros(2)}, batch_size=2)
        assert not await cancelled_with_its_reply(client.async_put(values, meta), monkeypatch)
        assert meta.field_names == ["x", "y"]

    asyncio.run(main())


def test_joined_puts_leave_a_sample_if_and_only_if_they_return() -> None:
    client, name, draw = tq.get_client(), "joined", random.Random(3)

    async def main() -> None:
        put = set()
        for turn in range(12):
            keys = [f"{turn}-{at}" for at in range(20)]
            tasks = [
                asyncio.ensure_future(client.async_kv_put(key, name, {"x": torch.ones(3)}, {"n": turn})) for key in keys
            ]
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
            chosen = draw.sample(tasks, 10)
            for task in chosen:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            put |= {key for key, task in zip(keys, tasks) if not task.cancelled()}
            assert all(task in chosen for task in tasks if task.cancelled())
        assert set(client.kv_list(name)[name]) == put

    asyncio.run(main())
