"""The driver of operations that work with files: the event loop is free while they do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import Any, cast

import pytest

from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.queries import ListKeys
from transfer_queue.net.calls import CONTROLLER, Call, Request
from transfer_queue.net.drivers import threaded_driver
from transfer_queue.net.drivers.threaded_driver import run_threaded
from transfer_queue.net.session import Session

Asking = Generator[Call, AnyReply, Any]
SESSION = cast(Session, None)  # what calls would use


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What was asked; every call is answered by how many there were."""
    found: list[Call] = []

    async def exchange(session: Session, call: Call) -> AnyReply:
        found.append(call)
        if len(found) > 2:
            raise LookupError("no more")
        return Done(len(found))

    monkeypatch.setattr(threaded_driver, "exchange", exchange)
    return found


def test_steps_are_threads_and_calls_the_loop(calls: list[Call]) -> None:
    seen: list[threading.Thread] = []

    def work() -> Asking:
        seen.append(threading.current_thread())
        first = yield Request(CONTROLLER, ListKeys())
        seen.append(threading.current_thread())
        second = yield Request(CONTROLLER, ListKeys())
        try:
            yield Request(CONTROLLER, ListKeys())
        except LookupError as error:
            return first, second, str(error)

    assert asyncio.run(run_threaded(SESSION, work())) == (Done(1), Done(2), "no more")
    assert threading.main_thread() not in seen
    assert len(calls) == 3


def test_the_loop_goes_on_while_a_file_is_written(calls: list[Call]) -> None:
    """The step ends only when another coroutine of the same loop has said so."""
    go = threading.Event()

    def work() -> Asking:
        yield Request(CONTROLLER, ListKeys())
        assert go.wait(60)
        return "written"

    async def main() -> Any:
        task = asyncio.ensure_future(run_threaded(SESSION, work()))
        while not calls:
            await asyncio.sleep(0)
        go.set()
        return await task

    assert asyncio.run(main()) == "written"


def test_errors_of_the_work_come_out(calls: list[Call]) -> None:
    def work() -> Asking:
        yield Request(CONTROLLER, ListKeys())
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        asyncio.run(run_threaded(SESSION, work()))


@pytest.mark.parametrize("ends", [True, False])
def test_a_cancelled_coroutine_ends_its_step_and_tells_the_operation(calls: list[Call], ends: bool) -> None:
    inside, go = threading.Event(), threading.Event()
    told: list[str] = []

    def work() -> Asking:
        inside.set()
        assert go.wait(60)
        told.append("written")
        if ends:
            return "done"
        try:
            yield Request(CONTROLLER, ListKeys())
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def main() -> None:
        task = asyncio.ensure_future(run_threaded(SESSION, work()))
        await asyncio.get_running_loop().run_in_executor(None, inside.wait)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go.set()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert told == (["written"] if ends else ["written", "cancelled"])
    assert not calls
