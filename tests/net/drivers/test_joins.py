"""Operations that travel together: when a flight begins, who is in it, and what each gets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from echo import CONTROLLER

from transfer_queue.errors import SealedError
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.net.calls import NOT_MADE, Call, Join, Request, Work
from transfer_queue.net.drivers.asyncio_driver import run_async, run_joining
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.drivers.join_queues import AT_ONCE, MAX_JOINED, JoinQueue
from transfer_queue.net.session import Session


class Numbers:
    """A joiner whose operations have a number each: it makes one request, and answers each with its number."""

    def __init__(self) -> None:
        self.flights: list[list[int]] = []
        self.gate: threading.Event | None = None

    def run(self, calls: Sequence[Call]) -> Generator[Call, AnyReply, None]:
        self.flights.append([call.part for call in calls])
        if self.gate is not None:
            yield Work(lambda: _wait(self.gate))
        yield Request(CONTROLLER, CreatePartition("joined"))
        for call in calls:
            if call.part < 0:
                call.outcome = SealedError(f"no {call.part}")
            else:
                call.outcome = Done(call.part)

    def operation(self, number: int, key: str = "k", alone: Any = None) -> Generator[Call, AnyReply, Any]:
        """Ask to join. If no other operation is under way, make a request alone, or `alone`."""
        asked = Join((self, (key,)), number)
        reply = yield asked
        if reply is not NOT_MADE:
            return "joined", reply.value
        try:
            yield Request(CONTROLLER, CreatePartition("alone")) if alone is None else alone
            return "alone", number
        finally:
            if asked.ended is not None:
                asked.ended()


def _wait(gate: threading.Event | None) -> None:
    assert gate.wait(60)


@pytest.fixture
def numbers() -> Numbers:
    return Numbers()


class _Entry:
    def __init__(self, number: int, left: bool = False) -> None:
        self.call = Join((None, ()), number)  # type: ignore[arg-type]
        self.left = left


def test_a_flight_takes_those_that_still_wait(numbers: Numbers) -> None:
    queue: JoinQueue[_Entry] = JoinQueue((numbers, ()))
    queue.waiting.extend(_Entry(n, n % 3 == 0) for n in range(2 * MAX_JOINED))
    first = queue.take()
    assert [entry.call.part for entry in first] == [n for n in range(2 * MAX_JOINED) if n % 3][:MAX_JOINED]
    assert queue.flights == 1
    queue.flights = AT_ONCE
    assert queue.take() == []
    assert queue.take(AT_ONCE + 1)
    assert not queue.waiting
    queue.flights = 0
    assert queue.idle


@pytest.mark.parametrize("run", [run_joining, run_async])
def test_tasks_of_a_loop(session: Session, numbers: Numbers, run: Any) -> None:
    async def main() -> list[Any]:
        return list(await asyncio.gather(*(run(session, numbers.operation(n)) for n in range(700))))

    found = asyncio.run(main())
    assert found == [("alone", 0), *(("joined", n) for n in range(1, 700))]
    assert [number for flight in numbers.flights for number in flight] == list(range(1, 700))
    if run is run_joining:
        assert len(numbers.flights) == 3


def test_one_after_the_other_all_go_alone(session: Session, numbers: Numbers) -> None:
    async def main() -> list[Any]:
        return [await run_joining(session, numbers.operation(n)) for n in range(5)]

    assert asyncio.run(main()) == [("alone", n) for n in range(5)]
    assert [run_blocking(session, numbers.operation(n)) for n in range(5)] == [("alone", n) for n in range(5)]
    assert not numbers.flights


def test_other_keys_do_not_wait(session: Session, numbers: Numbers) -> None:
    async def main() -> list[Any]:
        return list(await asyncio.gather(*(run_joining(session, numbers.operation(n, str(n))) for n in range(9))))

    assert asyncio.run(main()) == [("alone", n) for n in range(9)]


def test_each_task_gets_its_own_error(session: Session, numbers: Numbers) -> None:
    async def main() -> list[Any]:
        tasks = (run_joining(session, numbers.operation(n)) for n in (0, 1, -2, 3))
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    found = asyncio.run(main())
    assert [found[0], found[1], found[3]] == [("alone", 0), ("joined", 1), ("joined", 3)]
    assert isinstance(found[2], SealedError)


def test_a_task_that_is_cancelled_before_its_flight_is_not_in_it(session: Session, numbers: Numbers) -> None:
    async def main() -> list[Any]:
        tasks = [asyncio.ensure_future(run_joining(session, numbers.operation(n))) for n in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    found = asyncio.run(main())
    assert isinstance(found[2], asyncio.CancelledError)
    assert [found[at] for at in (0, 1, 3, 4)] == [("alone", 0), ("joined", 1), ("joined", 3), ("joined", 4)]
    assert numbers.flights == [[1, 3, 4]]


def test_a_task_that_is_cancelled_in_its_flight_does_not_end_the_others(session: Session, numbers: Numbers) -> None:
    numbers.gate = threading.Event()

    async def main() -> list[Any]:
        tasks = [asyncio.ensure_future(run_joining(session, numbers.operation(n))) for n in range(5)]
        while not numbers.flights:
            await asyncio.sleep(0.001)
        tasks[2].cancel()
        await asyncio.wait((tasks[2],))
        numbers.gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [*found, await run_joining(session, numbers.operation(9))]

    found = asyncio.run(main())
    assert isinstance(found[2], asyncio.CancelledError)
    assert [found[at] for at in (0, 1, 3, 4, 5)] == [
        ("alone", 0), ("joined", 1), ("joined", 3), ("joined", 4), ("alone", 9)
    ]  # fmt: skip
    assert numbers.flights == [[1, 2, 3, 4]]


def test_all_that_wait_are_cancelled(session: Session, numbers: Numbers) -> None:
    async def main() -> Any:
        tasks = [asyncio.ensure_future(run_joining(session, numbers.operation(n))) for n in range(5)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await run_joining(session, numbers.operation(7))

    assert asyncio.run(main()) == ("alone", 7)
    assert not numbers.flights


def test_a_flight_begins_although_the_one_that_goes_alone_takes_long(session: Session, numbers: Numbers) -> None:
    gate = threading.Event()
    slow = Work(lambda: _wait(gate))

    async def main() -> list[Any]:
        first = asyncio.ensure_future(run_joining(session, numbers.operation(0, alone=slow)))
        found = await asyncio.gather(*(run_joining(session, numbers.operation(n)) for n in range(1, 4)))
        gate.set()
        return [await first, *found]

    assert asyncio.run(main()) == [("alone", 0), ("joined", 1), ("joined", 2), ("joined", 3)]


def test_a_joiner_that_fails_ends_all_its_operations(
    session: Session, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(calls: Sequence[Call]) -> Generator[Call, AnyReply, None]:
        yield Request(CONTROLLER, CreatePartition("joined"))
        raise RuntimeError("a defect")

    monkeypatch.setattr(numbers, "run", run)

    async def main() -> list[Any]:
        tasks = (run_joining(session, numbers.operation(n)) for n in range(3))
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    found = asyncio.run(main())
    assert [type(each) for each in found] == [tuple, RuntimeError, RuntimeError]


def test_operations_of_threads_go_alone(session: Session, numbers: Numbers) -> None:
    ready = threading.Barrier(2, timeout=60)
    results: list[Any] = []

    def run(number: int) -> None:
        results.append(run_blocking(session, numbers.operation(number, alone=Work(ready.wait))))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [("alone", 0), ("alone", 1)]
    assert not numbers.flights
