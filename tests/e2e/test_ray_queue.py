"""The behavior of `ray.util.queue.Queue`, checked on that class and on `tq.Queue` by the same tests.

They cover what Ray's own tests of its queue cover (simple use, timeouts, concurrent puts and gets, batches, the number
of items, actors that share a queue, options), in this project's words. Left out is what looks into the actor.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import queue as rays

import transfer_queue as tq

SECONDS = 120.0
BOTH = pytest.mark.parametrize("kind", [rays.Queue, tq.Queue], ids=["ray", "transfer_queue"])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq.init()
    yield
    tq.close()
    ray.shutdown()


def call_in_thread(q: Any, name: str, *arguments: Any, **more: Any) -> Any:
    return getattr(q, name)(*arguments, **more)


def call_in_event_loop(q: Any, name: str, *arguments: Any, **more: Any) -> Any:
    async def call() -> Any:
        return await getattr(q, f"{name}_async")(*arguments, **more)

    return asyncio.run(call())


FORMS = pytest.mark.parametrize("call", [call_in_thread, call_in_event_loop])


@BOTH
@FORMS
def test_items_come_in_order(kind: Any, call: Any):
    q = kind()
    for item in range(10):
        call(q, "put", item)
    assert [call(q, "get") for _ in range(10)] == list(range(10))


@BOTH
@FORMS
def test_a_get_of_an_empty_queue_raises_empty(kind: Any, call: Any):
    q = kind()
    call(q, "put", 0)
    assert call(q, "get", block=False) == 0
    for limit in ({"block": False}, {"timeout": 0.2}):
        with pytest.raises(rays.Empty):
            call(q, "get", **limit)
    with pytest.raises(rays.Empty):
        q.get_nowait()
    with pytest.raises(ValueError, match="'timeout' must be a non-negative number"):
        call(q, "get", timeout=-1)


@BOTH
@FORMS
def test_a_put_to_a_full_queue_raises_full(kind: Any, call: Any):
    q = kind(1)
    call(q, "put", 0)
    for limit in ({"block": False}, {"timeout": 0.2}):
        with pytest.raises(rays.Full):
            call(q, "put", 1, **limit)
    with pytest.raises(rays.Full):
        q.put_nowait(1)
    with pytest.raises(ValueError, match="'timeout' must be a non-negative number"):
        call(q, "put", 1, timeout=-1)


@ray.remote(num_cpus=0)
def get_of(q: Any) -> Any:
    return q.get(timeout=SECONDS)


@ray.remote(num_cpus=0)
def put_into(q: Any, item: Any) -> bool:
    q.put(item, timeout=SECONDS)
    return True


@ray.remote(num_cpus=0)
class Worker:
    """An actor that keeps a queue."""

    def __init__(self, q: Any) -> None:
        self.q = q

    def move(self, count: int) -> list[Any]:
        return [self.q.get(timeout=SECONDS) for _ in range(count)]

    async def move_async(self, count: int) -> list[Any]:
        return [await self.q.get_async(timeout=SECONDS) for _ in range(count)]


@BOTH
def test_a_get_in_another_process_waits_for_an_item(kind: Any):
    q = kind()
    waits = get_of.remote(q)
    assert ray.wait([waits], timeout=0.5)[0] == []
    q.put(1)
    assert ray.get(waits, timeout=SECONDS) == 1


@BOTH
def test_a_put_in_another_process_waits_for_space(kind: Any):
    q = kind(1)
    q.put(1)
    waits = put_into.remote(q, 2)
    assert ray.wait([waits], timeout=0.5)[0] == []
    assert q.get() == 1
    assert ray.get(waits, timeout=SECONDS)
    assert q.get() == 2


@BOTH
def test_gets_and_puts_wait_together_in_an_event_loop(kind: Any):
    async def main() -> None:
        q = kind(1)
        get = asyncio.ensure_future(q.get_async())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(get), 0.2)
        await q.put_async("a")
        assert await get == "a"
        await q.put_async("b")
        put = asyncio.ensure_future(q.put_async("c"))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(put), 0.2)
        assert await q.get_async() == "b"
        await put
        assert await q.get_async() == "c"

    asyncio.run(main())


@BOTH
def test_a_batch_is_put_and_taken_as_a_whole(kind: Any):
    q = kind(maxsize=2)
    q.put_nowait_batch([0, 1])
    assert q.get_nowait_batch(2) == [0, 1]
    with pytest.raises(rays.Full):
        q.put_nowait_batch([0, 1, 2])
    assert q.empty()
    q.put_nowait_batch([0])
    with pytest.raises(rays.Empty):
        q.get_nowait_batch(2)
    with pytest.raises(rays.Full):
        q.put_nowait_batch([1, 2])
    assert q.get_nowait_batch(1) == [0]
    with pytest.raises(TypeError):
        q.put_nowait_batch(1)
    with pytest.raises(TypeError):
        q.get_nowait_batch("1")
    with pytest.raises(ValueError, match="nonnegative"):
        q.get_nowait_batch(-1)


@BOTH
def test_the_number_of_items_is_known(kind: Any):
    q = kind(3)
    for number in range(3):
        assert q.qsize() == q.size() == len(q) == number
        assert q.empty() == (number == 0)
        assert not q.full()
        q.put(number)
    assert q.full()
    for number in reversed(range(3)):
        q.get()
        assert q.qsize() == number
    assert q.empty()


@BOTH
def test_actors_share_a_queue(kind: Any):
    q = kind(actor_options={"num_cpus": 0})
    workers = [Worker.remote(q) for _ in range(2)]
    taken = [workers[0].move.remote(5), workers[1].move_async.remote(5)]
    for item in range(10):
        q.put((item, {"index": item}))
    got = [item for part in ray.get(taken, timeout=SECONDS) for item in part]
    assert sorted(number for number, _ in got) == list(range(10))


@BOTH
def test_a_queue_that_was_shut_down_takes_no_item(kind: Any):
    q = kind()
    q.put(1)
    q.shutdown(force=True)
    with pytest.raises((tq.QueueShutDownError, AttributeError)):  # Ray's queue has lost its actor
        q.put(2)


@BOTH
def test_both_accept_the_arguments_of_a_shutdown(kind: Any):
    q = kind()
    q.shutdown(False, grace_period_s=1)


def test_a_program_may_catch_the_exceptions_of_ray_or_of_the_standard_library():
    assert issubclass(rays.Empty, tq.queues.Empty.__mro__[2])
    with pytest.raises(rays.Empty) as told:
        tq.Queue().get_nowait()
    assert isinstance(told.value, tq.QueueEmptyError)


@ray.remote(num_cpus=0)
def fails(q: Any) -> None:
    q.get_nowait()


def test_the_exceptions_go_through_ray():
    with pytest.raises(rays.Empty):
        ray.get(fails.remote(tq.Queue()), timeout=SECONDS)
