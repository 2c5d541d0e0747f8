"""The behavior of `tq.Queue` in one process: items, limits, batches, leases, prefetching, shutdown, exceptions."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import queue
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import transfer_queue as tq
from server_processes import until
from transfer_queue.errors import InvalidArgumentError, ProtocolError
from transfer_queue.queues import Empty, Full, LeasedItem, ShutDown
from transfer_queue.queues.handle import empty_error, full_error
from transfer_queue.wire.objects import object_encoder


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    tq.close()


@pytest.fixture(autouse=True)
def system() -> None:
    tq.init()


def waits(q: tq.Queue, kind: str = "claims") -> Callable[[], bool]:
    """A condition: a get of this queue (claims), or a put (puts), waits at the controller."""

    def found() -> bool:
        (partition,) = [p for p in tq.get_client().status().partitions if p.name == q.name]
        return bool(partition.waiting_puts if kind == "puts" else any(task.waiting for task in partition.tasks))

    return found


class Point:
    """An object that only pickle can carry."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x


# ---------------------------------------------------------------- items


@pytest.mark.parametrize(
    "item",
    [None, 0, "text", b"bytes", (1, "two", None), [1, [2]], {"a": {"b": 1}}, Point(3), {1, 2}, float("inf")],
    ids=lambda item: type(item).__name__,
)
def test_any_object_can_be_an_item(item: Any):
    q = tq.Queue()
    q.put(item)
    got = q.get()
    assert type(got) is type(item)
    assert got == item


def test_tensors_and_arrays_keep_dtype_shape_and_bits():
    q = tq.Queue()
    given = {
        "ids": torch.arange(5), "scalar": torch.tensor(2.5, dtype=torch.bfloat16), "none": torch.zeros(0, 3),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "large": torch.arange(100_000),
    }  # fmt: skip
    q.put(given)
    q.put(given["ids"])
    q.put("text")
    got = q.get()
    assert list(got) == list(given)
    for name, value in given.items():
        assert type(got[name]) is type(value)
        assert got[name].dtype == value.dtype
        assert got[name].shape == value.shape
        assert bool((got[name] == value).all())
    assert q.get().tolist() == [0, 1, 2, 3, 4]
    assert q.get() == "text", "items of different types follow each other"


def test_tensors_are_not_pickled(monkeypatch: pytest.MonkeyPatch):
    def refused(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("pickled")

    monkeypatch.setattr(object_encoder.pickle, "Pickler", refused)
    monkeypatch.setattr(object_encoder.pickle, "dumps", refused)
    q = tq.Queue()
    q.put({"ids": torch.arange(5), "mask": torch.ones(100_000), "nested": [(torch.zeros(2), "text")]})
    got = q.get()
    assert got["ids"].tolist() == [0, 1, 2, 3, 4]
    assert got["mask"].sum() == 100_000


def test_an_item_that_was_got_belongs_to_the_caller():
    q = tq.Queue()
    for _ in range(2):
        q.put(torch.zeros(20_000))
    first = q.get()
    first += 1
    assert q.get().sum() == 0
    assert first.sum() == 20_000


def test_an_item_that_cannot_be_stored_is_refused_and_leaves_nothing():
    q = tq.Queue()
    with pytest.raises(tq.UncarriableValueError):
        q.put(threading.Lock())
    with pytest.raises(tq.UncarriableValueError):
        q.put_many([1, threading.Lock()])
    assert q.empty()


def test_threads_read_large_items_at_the_same_time():
    q = tq.Queue()
    with ThreadPoolExecutor(4) as pool:
        gets = [pool.submit(q.get, True, 60) for _ in range(24)]
        for number in range(24):
            q.put(torch.full((50_000,), number))
        got = [get.result(60) for get in gets]
    assert all(bool((item == item[0]).all()) for item in got)
    assert sorted(int(item[0]) for item in got) == list(range(24))


# ---------------------------------------------------------------- order and limits


def test_an_idle_consumer_frees_space_before_it_returns():
    q = tq.Queue(maxsize=1)
    for number in range(3):
        q.put(number, timeout=30)
        assert q.get() == number
        assert not q.full()
        assert q.empty()


def test_batches_are_put_and_taken_wholly_or_not_at_all():
    q = tq.Queue(maxsize=3)
    with pytest.raises(Full):
        q.put_nowait_batch(range(4))
    q.put_nowait_batch(x for x in (1, 2))
    with pytest.raises(Full):
        q.put_nowait_batch([3, 4])
    with pytest.raises(Empty):
        q.get_nowait_batch(3)
    assert q.qsize() == 2
    assert q.get_nowait_batch(0) == []
    assert q.get_nowait_batch(2) == [1, 2]
    with pytest.raises(TypeError, match="Iterable"):
        q.put_nowait_batch(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int"):
        q.get_nowait_batch(1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nonnegative"):
        q.get_nowait_batch(-1)


def test_a_batch_of_a_queue_that_was_shut_down_is_taken_wholly_or_not_at_all():
    q = tq.Queue()
    q.put_many([1, 2])
    q.shutdown()
    with pytest.raises(Empty):
        q.get_nowait_batch(3)
    assert q.get_nowait_batch(2) == [1, 2]


def test_many_items_come_in_one_list_and_wait_for_the_first():
    q = tq.Queue(maxsize=2)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(q.get_many, 10)
        until(waits(q))
        q.put("a")
        assert got.result(60) == ["a"]
        put = pool.submit(q.put_many, range(5), True, 60)
        taken: list[int] = []
        while len(taken) < 5:
            taken += q.get_many(10, timeout=60)
        put.result(60)
    assert taken == list(range(5))
    with pytest.raises(Empty):
        q.get_many(2, block=False)
    with pytest.raises(ValueError, match="max_items must be a positive integer, got 0"):
        q.get_many(0)
    q.put_many([])
    assert q.empty()


def test_the_last_item_comes_first_out_of_a_lifo_queue():
    q = tq.LifoQueue(maxsize=3)
    q.put_many([1, 2])
    assert q.get() == 2
    q.put(3)
    assert [q.get(), q.get()] == [3, 1]


def test_a_priority_queue_gives_the_lowest_value_first_and_equal_ones_in_order():
    q = tq.PriorityQueue()
    entry = types.SimpleNamespace(priority=0.5, name="attribute")
    q.put_many([(2, "a"), (1, "b"), (2, "c"), 3, [-1, "d"], entry])
    got = q.get_many(3)
    assert got[:1] == [[-1, "d"]]
    assert got[1].name == "attribute"
    assert got[2] == (1, "b")
    assert [q.get() for _ in range(3)] == [(2, "a"), (2, "c"), 3]
    for bad in ("text", (None, 1), float("nan")):
        with pytest.raises(ValueError, match="priority of an item must be a number"):
            q.put(bad)


def test_a_name_names_one_queue():
    tq.Queue("named", 2).put("a")
    assert tq.Queue("named").get() == "a"
    with pytest.raises(InvalidArgumentError, match="max_rows"):
        tq.Queue("named", 3)
    with pytest.raises(InvalidArgumentError, match="order"):
        tq.LifoQueue("named")
    assert tq.Queue(8).maxsize == 8
    assert tq.Queue(maxsize=-1).maxsize == 0
    assert tq.Queue(8).name != tq.Queue(8).name


def test_a_queue_that_exists_is_opened_by_its_name_and_has_its_limit():
    tq.Queue("limited", 2).put("a")
    opened = tq.Queue("limited")
    assert repr(opened) == "Queue('limited', maxsize=2)"
    opened.put_nowait("b")
    assert opened.full()
    with pytest.raises(Full, match="3 items do not fit"):
        opened.put_nowait_batch([1, 2, 3])
    assert tq.Queue("limited", -1).maxsize == 2
    assert tq.Queue(tq.Queue().name).maxsize == 0


def test_an_argument_of_a_wrong_type_is_named():
    q = tq.Queue()
    with pytest.raises(InvalidArgumentError, match=r"timeout must be a number of seconds.*got '5'"):
        q.get(timeout="5")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"non-negative number of seconds, got -1"):
        q.put(0, timeout=-1)
    for wrong in ("3", [], 1e300):
        with pytest.raises(InvalidArgumentError, match="lease must be a number of seconds"):
            q.get(lease=wrong)  # type: ignore[arg-type]
    assert q.empty()


def test_a_queue_that_was_removed_accepts_no_items():
    q = tq.Queue("removed", 1)
    q.put("a")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(q.put, "b")
        until(waits(q, "puts"))
        tq.get_client().clear_partition(q.name)
        with pytest.raises(tq.UnknownPartitionError, match="was removed"):
            waiting.result(60)
    with pytest.raises(tq.UnknownPartitionError, match=r"Make it again: Queue\('removed', maxsize=1\)"):
        q.put_nowait("c")
    assert q.name not in tq.get_client().get_partition_list()
    tq.Queue("removed", 1).put("d")
    assert q.get() == "d"


def test_a_shutdown_of_a_queue_that_was_removed_leaves_a_queue():
    q = tq.Queue("removed before", 1)
    tq.get_client().clear_partition(q.name)
    q.shutdown()
    again = tq.Queue("removed before", 1)
    assert again.is_shutdown
    with pytest.raises(ShutDown):
        again.put("a")


def test_the_error_of_a_full_queue_says_how_long_the_put_waited_and_who_makes_room():
    q = tq.Queue(1)
    q.put("a")
    with pytest.raises(Full, match=r"maxsize=1\) is full; nothing was put. Consumers make space"):
        q.put_nowait("b")
    with pytest.raises(Full, match=r"is full, and no place became free within 0.01 s; nothing was put"):
        q.put("b", timeout=0.01)
    q.get()
    with pytest.raises(Full, match=r"within 0.01 s; only the first 1 items were put"):
        q.put_many(["c", "d", "e"], timeout=0.01)
    assert q.get_many(5) == ["c"]
    with pytest.raises(Full, match=r"only the first 1 items were put"):
        asyncio.run(q.put_many_async(["f", "g"], timeout=0.01))


# ---------------------------------------------------------------- waiting


def test_the_awaitable_forms_do_the_same():
    async def main() -> None:
        q = tq.Queue(maxsize=2)
        getters = [asyncio.create_task(q.get_async()) for _ in range(2)]
        await asyncio.to_thread(until, waits(q))
        await q.put_async("a")
        await q.put_async("b")
        assert sorted([await getter for getter in getters]) == ["a", "b"]
        await q.put_many_async(["c", "d"])
        with pytest.raises(Full):
            await q.put_async("e", timeout=0.01)
        with pytest.raises(Full):
            await q.put_async("e", block=False)
        assert await q.get_many_async(5) == ["c", "d"]
        with pytest.raises(Empty):
            await q.get_async(timeout=0.01)
        with pytest.raises(Empty):
            await q.get_async(block=False)
        with pytest.raises(tq.WaitTimeoutError):
            await q.join_async(timeout=0.01)
        await q.task_done_async(4)
        await q.join_async()
        await q.put_async("f")
        assert await (await q.get_async(lease=60)).ack_async()

    asyncio.run(main())


def test_a_join_waits_for_the_last_task():
    q = tq.Queue()
    q.put_many(range(3))
    assert q.unfinished_tasks == 3
    with pytest.raises(TimeoutError, match="task_done"):
        q.join(timeout=0.01)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(q.join)
        for _ in q.get_many(3):
            assert not joined.done()
            q.task_done()
        joined.result(60)
    with pytest.raises(ValueError, match="only 0"):
        q.task_done()


# ---------------------------------------------------------------- leases


def test_leased_items_are_consumed_by_an_ack_of_one_or_several():
    q = tq.Queue(maxsize=3)
    q.put_many(["a", "b", "c"])
    first, rest = q.get(lease=60), q.get_many(5, lease=60)
    assert [leased.item for leased in (first, *rest)] == ["a", "b", "c"]
    assert (q.qsize(), q.full()) == (0, True), "leased items may come back"
    assert q.ack([first, *rest])
    assert not q.ack(first), "it was acknowledged before"
    assert not q.ack([first, *rest])
    assert q.ack([])
    assert not q.full()
    with pytest.raises(InvalidArgumentError, match="a LeasedItem or several; got 'x'"):
        q.ack("x")  # type: ignore[arg-type]


def test_an_async_block_acknowledges_its_item_or_returns_it():
    q = tq.Queue()
    q.put_many(["a", "b"])

    async def work() -> list[Any]:
        async with await q.get_async(lease=60) as first:
            pass
        try:
            async with await q.get_async(lease=60) as second:
                raise KeyError
        except KeyError:
            pass
        return [first.item, second.item, await q.get_async(timeout=5, lease=60)]

    first, second, again = asyncio.run(work())
    assert (first, second, again.item, again.deliveries) == ("a", "b", "b", 2)


def test_an_item_under_a_lease_is_not_passed_to_another_process():
    q = tq.Queue()
    q.put("a")
    leased = q.get(lease=60)
    for call in (lambda: pickle.dumps(leased), lambda: q.put(leased)):
        with pytest.raises(tq.UncarriableValueError, match=r"its lease belongs to this process: pass leased.item"):
            call()


def test_an_item_that_is_returned_comes_again_at_its_place():
    q = tq.Queue()
    q.put_many(["a", "b"])
    leased = q.get(lease=60)
    assert leased.deliveries == 1
    with pytest.raises(RuntimeError, match="stop"), leased:
        raise RuntimeError("stop")
    again = q.get(lease=60)
    assert (again.item, again.deliveries, repr(again)) == ("a", 2, "LeasedItem('a')")
    with again:
        pass
    assert q.get() == "b"
    assert q.empty()


# ---------------------------------------------------------------- prefetching


def test_prefetched_items_keep_their_order_and_count():
    q = tq.Queue(prefetch=4)
    q.put_many(range(10))
    assert [q.get(), q.get()] == [0, 1]
    assert q.qsize() == 8
    assert not q.empty()
    assert [q.get() for _ in range(8)] == list(range(2, 10))
    with pytest.raises(Empty):
        q.get_nowait()
    with pytest.raises(Empty):
        q.get(timeout=0.01)
    with pytest.raises(InvalidArgumentError, match="prefetch must be a positive integer"):
        tq.Queue(prefetch=0)


def test_threads_share_what_one_of_them_prefetches():
    q = tq.Queue(prefetch=8)
    with ThreadPoolExecutor(4) as pool:
        gets = [pool.submit(q.get, True, 60) for _ in range(4)]
        until(waits(q))
        q.put_many(range(4))
        assert sorted(get.result(60) for get in gets) == [0, 1, 2, 3]


def test_tasks_of_an_event_loop_share_what_one_of_them_prefetches():
    async def main() -> None:
        q = tq.Queue(prefetch=8)
        gets = [asyncio.create_task(q.get_async(timeout=60)) for _ in range(4)]
        await asyncio.to_thread(until, waits(q))
        await q.put_many_async(range(4))
        assert sorted([await get for get in gets]) == [0, 1, 2, 3]
        with pytest.raises(Empty):
            await q.get_async(timeout=0.01)
        with pytest.raises(Empty):
            await q.get_async(block=False)

    asyncio.run(main())


def test_prefetched_leased_items_are_acknowledged_one_by_one():
    q = tq.Queue(prefetch=4)
    q.put_many(range(4))
    leased = [q.get(lease=60) for _ in range(4)]
    assert all(isinstance(item, LeasedItem) for item in leased)
    assert leased[1].ack()
    assert leased[2].nack()
    assert q.get(lease=60).item == 2
    assert leased[0].ack()


def test_a_forked_child_does_not_repeat_the_prefetched_items_of_its_parent():
    q = tq.Queue(prefetch=4)
    q.put_many(range(4))
    assert q.get() == 0
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: send.send((q.qsize(), q.empty())))
    child.start()
    child.join(60)
    assert receive.recv() == (0, True)
    assert [q.get_nowait() for _ in range(3)] == [1, 2, 3]


# ---------------------------------------------------------------- the end


def test_a_queue_that_was_shut_down_gives_what_is_left():
    q = tq.Queue()
    q.put_many(["a", "b"])
    assert not q.is_shutdown
    q.shutdown()
    assert q.is_shutdown
    for call in (lambda: q.put("c"), lambda: q.put_nowait("c"), lambda: q.put_nowait_batch(["c"])):
        with pytest.raises(ShutDown, match="accepts no items"):
            call()
    assert [q.get(), q.get_nowait()] == ["a", "b"]
    for call in (q.get, q.get_nowait, lambda: q.get_many(2)):
        with pytest.raises(ShutDown, match="no item is left"):
            call()


def test_a_shutdown_ends_calls_that_wait():
    empty, full = tq.Queue(), tq.Queue(maxsize=1)
    full.put("a")
    with ThreadPoolExecutor(2) as pool:
        get, put = pool.submit(empty.get), pool.submit(full.put, "b")
        until(lambda: waits(empty)() and waits(full, "puts")())
        empty.shutdown()
        full.shutdown()
        for call in (get, put):
            with pytest.raises(ShutDown):
                call.result(60)
    assert full.get() == "a"


@pytest.mark.parametrize("arguments", [{"immediate": True}, {"force": True}, {"grace_period_s": 0}])
def test_an_immediate_shutdown_discards_what_is_left(arguments: dict[str, Any]):
    q = tq.Queue()
    q.put_many(["a", "b", "c"])
    assert q.get() == "a"
    q.shutdown(**arguments)
    with pytest.raises(ShutDown):
        q.get()
    assert q.unfinished_tasks == 1, "of the item that was got"
    q.task_done()
    q.join()


def test_a_shutdown_with_a_grace_period_lets_consumers_take_what_is_left():
    q = tq.Queue()
    q.put_many(["a", "b"])
    taken: list[str] = []

    def consume() -> None:
        while True:
            taken.append(q.get())

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(consume)
        q.shutdown(grace_period_s=60)
        with pytest.raises(ShutDown):
            ended.result(60)
    assert taken == ["a", "b"]


def test_the_methods_of_a_queue_of_multiprocessing_are_there():
    q = tq.Queue("kept")
    q.put("a")
    q.close()
    q.join_thread()
    q.cancel_join_thread()
    with pytest.raises(ValueError, match="closed"):
        q.put("b")
    with pytest.raises(ValueError, match="closed"):
        q.get()
    assert tq.Queue("kept").get() == "a"


# ---------------------------------------------------------------- exceptions and pickling


def test_the_exceptions_are_those_of_the_standard_library():
    assert issubclass(Empty, queue.Empty)
    assert issubclass(Full, queue.Full)
    assert issubclass(ShutDown, getattr(queue, "ShutDown", Exception))
    assert issubclass(ShutDown, tq.SealedError)
    assert type(empty_error("x")) is Empty or "ray.util.queue" in sys.modules


def test_the_exceptions_are_those_of_ray_if_it_is_loaded(monkeypatch: pytest.MonkeyPatch):
    class RaysEmpty(queue.Empty):
        pass

    class RaysFull(Exception):  # as in old versions
        pass

    module = types.SimpleNamespace(Empty=RaysEmpty, Full=RaysFull)
    monkeypatch.setitem(sys.modules, "ray.util.queue", module)  # type: ignore[arg-type]
    q = tq.Queue(maxsize=1)
    with pytest.raises(RaysEmpty) as told:
        q.get_nowait()
    assert isinstance(told.value, Empty)
    q.put(1)
    with pytest.raises(RaysFull) as refused:
        q.put_nowait(2)
    assert isinstance(refused.value, Full)
    pickled = pickle.dumps(full_error("no space"))
    assert isinstance(pickle.loads(pickled), RaysFull)
    monkeypatch.delitem(sys.modules, "ray.util.queue")
    again = pickle.loads(pickled)
    assert type(again) is Full
    assert again.args == ("no space",)


def test_a_queue_pickles_without_its_prefetched_items():
    q = tq.Queue("pickled", 5, prefetch=3)
    q.put_many(range(3))
    assert q.get() == 0
    other = pickle.loads(pickle.dumps(q))
    assert (type(other), other.name, other.maxsize, other.prefetch) == (tq.Queue, "pickled", 5, 3)
    assert other.qsize() == 0
    assert q.qsize() == 2


def test_a_queue_has_a_length_and_is_true():
    q = tq.Queue()
    assert q
    assert len(q) == q.size() == 0


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an object whose class is in a module that this process cannot import any more after `monkeypatch.undo`."""
    module = types.ModuleType("module_of_the_producer")
    exec("class Foreign: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.Foreign()


@pytest.mark.parametrize("take", ["get_many", "prefetch"])
def test_an_item_that_cannot_be_loaded_takes_no_other_item_with_it(
    take: str, foreign: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    q = tq.Queue(prefetch=3 if take == "prefetch" else 1)
    q.put_many(["a", foreign, "b"])
    monkeypatch.undo()
    found = q.get_many(3) if take == "get_many" else [q.get(), q.get()]
    assert found == ["a", "b"]
    for words in ("1 of 3 items", "lost: ", "module_of_the_producer"):
        assert words in caplog.text
    q.task_done(2)
    q.join(timeout=30)  # the lost item counts as done


def test_a_leased_item_that_cannot_be_loaded_returns_to_the_queue(foreign: Any, monkeypatch: pytest.MonkeyPatch):
    q = tq.Queue()
    q.put_many([foreign, "b"])
    monkeypatch.undo()
    (leased,) = q.get_many(2, lease=60)
    assert leased.item == "b"
    assert q.qsize() == 1, "another consumer may be able to load it"
    with pytest.raises(ProtocolError, match="module_of_the_producer"):
        q.get(lease=60)
    assert q.qsize() == 1
    with pytest.raises(ProtocolError, match="module_of_the_producer"):
        q.get()
    assert leased.ack()
    q.task_done(2)
    q.join(timeout=30)


# The last one: it ends the system of the others.
def test_the_space_of_large_items_is_free_again_at_once():
    tq.close()
    tq.init({"backend": {"SimpleStorage": {"arena_bytes": 32 << 20, "num_data_storage_units": 1}}})
    q = tq.Queue()
    for number in range(12):  # 96 MiB
        q.put(torch.full((8 << 20,), number % 100, dtype=torch.uint8), timeout=30)
        assert int(q.get()[-1]) == number % 100
