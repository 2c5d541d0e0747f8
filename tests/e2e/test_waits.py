"""Calls that wait for long in a real system: what is logged of them, in threads and in event loops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import transfer_queue as tq
from server_processes import server_process
from transfer_queue.net.drivers import blocking_driver

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
REPORT_SECONDS = 0.3
WAIT = 2.0
BLOCKING = 2.5
SECONDS = 60


@pytest.fixture(scope="module")
def client() -> Iterator[tq.TransferQueueClient]:
    tq.init({"timeouts": {"report_wait": REPORT_SECONDS, "call": 4}})
    made = tq.get_client()
    made.create_partition("full", max_rows=1)
    made.kv_put("a", "full", {"x": torch.tensor(1)})
    yield made
    tq.close()


def run_all(calls: list[Callable[[], object]]) -> None:
    """Run each of these calls in a thread of its own, at the same time. They end with a timeout."""

    def run(call: Callable[[], object]) -> None:
        with contextlib.suppress(tq.TransferQueueError):
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(run, calls, timeout=SECONDS))


def logged(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(start)]


@pytest.mark.parametrize("is_async", [False, True])
def test_waits_are_logged_while_they_last(
    client: tq.TransferQueueClient, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    empty, full = tq.Queue(f"empty-{is_async}"), tq.Queue(f"full-{is_async}", maxsize=1)
    full.put(1)

    def lock_twice() -> None:
        with client.kv_lock("key", f"p-{is_async}"), client.kv_lock("key", f"p-{is_async}", timeout=WAIT):
            pass

    async def lock_twice_async() -> None:
        held, again = (client.async_kv_lock("key", f"p-{is_async}", timeout=WAIT) for _ in range(2))
        async with held, again:
            pass

    blocking: list[Callable[[], object]] = [
        partial(empty.get, timeout=WAIT), partial(full.put, 2, timeout=WAIT), partial(full.join, timeout=WAIT),
        lock_twice, partial(client.wanted, "full", "t", timeout=WAIT),
    ]  # fmt: skip
    waiting: list[Callable[[], Awaitable[object]]] = [
        partial(empty.get_async, timeout=WAIT), partial(full.put_async, 2, timeout=WAIT),
        partial(full.join_async, timeout=WAIT), lock_twice_async,
        partial(client.async_wanted, "full", "t", timeout=WAIT),
    ]  # fmt: skip

    async def together() -> None:
        await asyncio.gather(*(wait() for wait in waiting), return_exceptions=True)

    if is_async:
        asyncio.run(together())
    else:
        run_all(blocking)
    starts = {text.split(" s. ")[1].split(" (")[0][:20] for text in logged(caplog, "Still waiting after ")}
    assert starts == {
        "Task 'get' waits for", "A put of 1 sample in", "A join", f"A request of pid {os.getpid()}"[:20], "A producer",
    }  # fmt: skip


@pytest.mark.parametrize("is_async", [False, True])
def test_a_controller_that_does_not_respond_is_named(
    client: tq.TransferQueueClient, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    def fetch() -> object:
        arguments = "x", 9, "full", "fetch", "t"
        if is_async:
            return asyncio.run(client.async_get_meta(*arguments, timeout=WAIT))
        return client.get_meta(*arguments, timeout=WAIT)

    controller = server_process("controller")
    controller.suspend()
    try:
        with pytest.raises(tq.WaitTimeoutError, match=r"the controller at .* gave no reply to Claim within"):
            fetch()
    finally:
        controller.resume()
    (first, *_) = logged(caplog, "Still waiting after ")
    assert "The controller did not say why Claim waits: Timeout: the controller at " in first


# ---------------------------------------------------------------- blocked event loops


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was logged of this process before."""
    monkeypatch.setattr(blocking_driver, "_warned", set())


def in_loop(call: Callable[[], object]) -> Callable[[], object]:
    """Return a function that makes a blocking call in a coroutine."""

    async def coroutine() -> object:
        return call()

    return lambda: asyncio.run(coroutine())


def blocking_calls(client: tq.TransferQueueClient) -> dict[str, Callable[[], object]]:
    """Return calls that block for a little more than a second, by the start of the message about them."""
    queue = tq.Queue(f"queue-{threading.get_ident()}")
    dataset = partial(tq.StreamingDataset, client, 2, 2, ["x"], "nothing", dp_rank=0, timeout=BLOCKING)

    def lock_twice() -> None:
        with client.kv_lock("other", "p"), client.kv_lock("other", "p", timeout=BLOCKING):
            pass

    return {
        "TransferQueueClient.get_meta has blocked the event loop": partial(
            client.get_meta, "x", 9, "full", task_name="t", timeout=BLOCKING
        ),
        "Queue.get has blocked the event loop": partial(queue.get, timeout=BLOCKING),
        "`with` of a KVLock has blocked the event loop": lock_twice,
        "kv_put() has blocked the event loop": partial(
            tq.kv_put, "b", "full", {"x": torch.tensor(1)}, timeout=BLOCKING
        ),
        "`for` over a StreamingDataset has blocked the event loop": lambda: list(dataset(task_name="dataset")),
        "`for` over a StreamingDataLoader has blocked the event loop": lambda: list(
            tq.StreamingDataLoader(dataset(task_name="loader"), num_workers=1)
        ),
    }


INSTEAD = [
    "`async for`", "`async for`", "`async with`", "`await Queue.get_async(...)`",
    "`await TransferQueueClient.async_get_meta(...)`", "`await async_kv_put(...)`",
]  # fmt: skip


def test_a_blocked_event_loop_is_logged_once_with_the_asynchronous_form(
    client: tq.TransferQueueClient, caplog: pytest.LogCaptureFixture, unwarned: None
) -> None:
    calls = blocking_calls(client)
    # a put and claims that wait for each other are refused
    run_all([in_loop(call) for start, call in calls.items() if start.startswith("kv_put")])
    run_all([in_loop(call) for start, call in calls.items() if not start.startswith("kv_put")])
    warned = [record.getMessage() for record in caplog.records if record.name == blocking_driver.__name__]
    assert sorted(text.removesuffix(".").split("In a coroutine, use ")[1] for text in warned) == sorted(INSTEAD)
    for text in warned:
        assert sum(text.startswith(start) for start in calls) == 1
        assert "of this thread for 1 s, so that none of its other tasks can run." in text
    caplog.clear()
    in_loop(partial(client.await_batch, "x", 9, "full", "t", timeout=BLOCKING))()
    run_all([in_loop(calls["Queue.get has blocked the event loop"])])
    warned = [record.getMessage() for record in caplog.records if record.name == blocking_driver.__name__]
    assert [text.split(" has")[0] for text in warned] == ["TransferQueueClient.await_batch"]


def test_what_blocks_no_event_loop_is_not_logged(
    client: tq.TransferQueueClient, caplog: pytest.LogCaptureFixture, unwarned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = partial(client.await_batch, "x", 9, "full", "t", timeout=BLOCKING)

    async def in_thread() -> None:
        await asyncio.to_thread(call)

    async def awaited() -> None:
        await client.async_await_batch("x", 9, "full", "t", timeout=BLOCKING)

    run_all([call, lambda: asyncio.run(in_thread()), lambda: asyncio.run(awaited())])
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    in_loop(call)()
    assert [record for record in caplog.records if record.name == blocking_driver.__name__] == []
    assert all(record.levelno == logging.WARNING for record in caplog.records)
