"""A get that is cancelled, interrupted or killed swallows no item: it was handed over, or another get gets it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest

import transfer_queue as tq
import warm
from transfer_queue.client.operations.queue_operations import QueueOperations
from transfer_queue.net.drivers.connection import Connection
from transfer_queue.queues import Empty

FACTOR = int(os.environ.get("EXAMPLES_FACTOR", "1"))
SECONDS = 60
ITEMS = 4


@pytest.fixture(scope="module", autouse=True)
def system() -> Iterator[None]:
    tq.init()
    yield
    tq.close()


async def one(q: Any) -> list[Any]:
    return [await q.get_async(timeout=SECONDS)]


async def in_time(q: Any) -> list[Any]:
    return [await asyncio.wait_for(q.get_async(), SECONDS)]


async def many(q: Any) -> list[Any]:
    found: list[Any] = await q.get_many_async(2, timeout=SECONDS)
    return found


WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any], Awaitable[list[Any]]]]] = {
    "get": (tq.Queue, one),
    "wait_for": (tq.Queue, in_time),
    "get_many": (tq.Queue, many),
    "priority": (tq.PriorityQueue, one),
    "prefetch": (lambda: tq.Queue(prefetch=3), one),
}


def rest(q: Any) -> list[Any]:
    """Everything that a later get gets."""
    found: list[Any] = []
    while True:
        try:
            found.append(q.get(timeout=0.05))
        except Empty:
            return found


def finish(q: Any, taken: list[Any], expected: list[Any]) -> None:
    """Check that these and the rest are all items, once, and that a join ends."""
    assert sorted(taken + rest(q)) == expected
    q.task_done(len(expected))
    q.join(timeout=SECONDS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(8 * FACTOR))
def test_a_cancelled_get_loses_nothing(way: str, seed: int) -> None:
    draw = random.Random(f"{way} {seed}")
    make, get = WAYS[way]
    q = make()
    items = list(range(ITEMS))
    taken: list[Any] = []

    async def turns(most: int) -> None:
        for _ in range(draw.randint(0, most)):
            await asyncio.sleep(0)

    async def main() -> None:
        for item in items:
            getting = asyncio.ensure_future(get(q))
            await turns(8)
            putting = asyncio.ensure_future(q.put_async(item))
            if draw.random() < 0.5:
                await putting
            await turns(30)
            getting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                taken.extend(await getting)
            await putting

    asyncio.run(main())
    finish(q, taken, items)


@pytest.mark.parametrize("seed", range(4 * FACTOR))
def test_a_cancelled_fetch_loses_nothing(seed: int) -> None:
    draw, partition, client = random.Random(seed), f"fetched {seed}", tq.get_client()
    taken: list[int] = []

    async def main() -> None:
        for at in range(ITEMS):
            fetch = client.async_get_meta(["x"], 1, partition, task_name="t", timeout=SECONDS)
            getting = asyncio.ensure_future(fetch)
            for _ in range(draw.randint(0, 8)):
                await asyncio.sleep(0)
            await client.async_kv_put(str(at), partition, {"x": at})
            for _ in range(draw.randint(0, 3)):
                await asyncio.sleep(0)
            getting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                taken.extend((await getting).global_indexes)

    asyncio.run(main())
    left = ITEMS - len(taken)
    if left:
        taken += client.get_meta(["x"], left, partition, task_name="t", timeout=SECONDS).global_indexes
    assert len(set(taken)) == len(taken) == ITEMS


def test_an_interrupted_get_takes_no_later_item() -> None:
    q = tq.Queue()

    def interrupt() -> None:
        while not any(task.waiting for p in tq.get_client().status().partitions for task in p.tasks):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        q.get(timeout=SECONDS)
    thread.join()
    q.put("a")
    finish(q, [], ["a"])


@pytest.mark.parametrize("count", [1, 3])
def test_an_interruption_with_the_reply_in_hand_loses_nothing(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    q = tq.Queue()
    q.put_many(["a", "b", "c"])
    receive = Connection.receive_reply

    def interrupted(self: Connection, *arguments: Any, **more: Any) -> Any:
        reply = receive(self, *arguments, **more)
        if threading.current_thread() is threading.main_thread():  # and not the one that renews leases
            raise KeyboardInterrupt
        return reply

    monkeypatch.setattr(Connection, "receive_reply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        q.get() if count == 1 else q.get_many(count)
    monkeypatch.undo()
    finish(q, [], ["a", "b", "c"])


def test_a_get_that_fails_after_its_claim_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q = tq.Queue()
    q.put("a")

    def fail(*arguments: Any) -> Iterator[Any]:
        yield from ()
        raise OSError("the value cannot be read")

    monkeypatch.setattr(QueueOperations, "_items_of", fail)
    with pytest.raises(OSError, match="cannot be read"):
        q.get()
    monkeypatch.undo()
    finish(q, [], ["a"])


def hang_after_claim(q: Any, told: Pipe) -> None:
    def hang(*arguments: Any) -> Any:
        told.send("claimed")
        signal.pause()

    QueueOperations._items_of = hang  # type: ignore[method-assign]
    q.get(timeout=SECONDS)


def test_a_consumer_that_is_killed_between_claim_and_return_loses_nothing() -> None:
    q = tq.Queue()
    q.put("a")
    process, here = warm.reporting(hang_after_claim, q)
    assert here.recv() == "claimed"
    process.kill()
    process.join()
    assert q.get(timeout=SECONDS) == "a"
    q.task_done()
    q.join(timeout=SECONDS)
