"""Subscriptions between real processes: a controller loop is told what others put."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import transfer_queue as tq
import warm

SECONDS = 120
KEYS = 12


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    tq.init({"system": {"name": "subscriptions"}})
    yield tq
    tq.close()


def in_child(target: Callable[..., None], *arguments: Any) -> Any:
    process = warm.process(target, *arguments)
    process.start()
    return process


def work(partition: str) -> None:
    """A worker: takes each job that the controller loop has made, and says that it is done."""
    for event in tq.get_client().subscribe(partition, {"status": "new"}):
        if event.kind == "changed":
            tq.kv_put(event.key or "", partition, tag={"status": "done", "pid": os.getpid()})


def test_a_controller_loop_and_a_worker_tell_each_other(system: Any) -> None:
    """Each sees every change of the other's, with no list and no pause in between; the drop ends the worker's loop."""
    partition = "jobs"
    worker = in_child(work, partition)
    done: list[str] = []
    tq.kv_put("job0", partition, tag={"status": "new"})
    for event in tq.get_client().subscribe(partition, {"status": "done"}):
        assert event.tag == {"status": "done", "pid": worker.pid}
        done.append(event.key or "")
        if len(done) == KEYS:
            break
        tq.kv_put(f"job{len(done)}", partition, tag={"status": "new"})
    assert done == [f"job{i}" for i in range(KEYS)]
    assert tq.kv_list(partition, where={"status": "new"}) == {partition: {}}
    assert list(tq.kv_list(partition, where={"pid": worker.pid})[partition]) == done
    tq.get_client().clear_partition(partition)
    worker.join(SECONDS)
    assert worker.exitcode == 0


def follow(partition: str, pipe: Any) -> None:
    """Keeps a copy of the tags; sends it when told that the last key is there."""
    tags: dict[str, Any] = {}
    for event in tq.get_client().subscribe(partition):
        if event.kind == "cleared":
            tags.pop(str(event.key), None)
        else:
            tags[str(event.key)] = event.tag
        if event.key == "last":
            pipe.send(tags)
            return


def test_many_writers_and_followers(system: Any) -> None:
    """Whoever follows has in the end what a list says."""
    partition = "many"
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    followers = [in_child(follow, partition, theirs) for _, theirs in pipes]

    def write(who: int) -> None:
        for i in range(40):
            tq.kv_put(f"{who}-{i % 10}", partition, tag={"n": i})
            if i % 7 == 0:
                tq.kv_clear(f"{who}-{i % 10}", partition)

    writers = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    tq.kv_put("last", partition, tag={})
    listed = tq.kv_list(partition)[partition]
    for ours, _ in pipes:
        assert ours.poll(SECONDS)
        assert ours.recv() == listed
    for follower in followers:
        follower.join(SECONDS)


def test_awaited_subscriptions_are_cancelled(system: Any) -> None:
    """Several in one loop; a cancelled one ends, and the others go on."""
    partition = "awaited"

    async def follow(status: str, seen: asyncio.Queue[tuple[str, str | None]]) -> None:
        async for event in tq.get_client().async_subscribe(partition, {"status": status}):
            await seen.put((status, event.key))

    async def main() -> None:
        seen: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue()
        tasks = {status: asyncio.create_task(follow(status, seen)) for status in ("new", "done")}
        await tq.async_kv_put("a", partition, tag={"status": "new"})
        assert await asyncio.wait_for(seen.get(), SECONDS) == ("new", "a")
        await tq.async_kv_put("a", partition, tag={"status": "done"})
        assert await asyncio.wait_for(seen.get(), SECONDS) == ("done", "a")
        tasks["new"].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tasks["new"]
        await tq.async_kv_put("b", partition, tag={"status": "new"})
        await tq.async_kv_put("b", partition, tag={"status": "done"})
        assert await asyncio.wait_for(seen.get(), SECONDS) == ("done", "b")
        await tq.get_client().async_clear_partition(partition)
        await asyncio.wait_for(tasks["done"], SECONDS)

    asyncio.run(main())
