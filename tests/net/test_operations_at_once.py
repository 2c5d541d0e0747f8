"""The number of operations of an event loop under way at a time; no operation waits for its place for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest
from echo import CONTROLLER, Running, one, parked_claim
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.messages.queries import CheckProduction
from transfer_queue.net.calls import Call, Request
from transfer_queue.net.drivers import admission
from transfer_queue.net.drivers.admission import AT_ONCE, Admission
from transfer_queue.net.drivers.asyncio_driver import run_async
from transfer_queue.net.session import Session


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@given(st.lists(st.sampled_from(["enter", "leave", "cancel"]), max_size=60), st.integers(1, 4))
def test_places_are_handed_on_in_the_order_of_arrival(steps: list[str], places: int) -> None:
    """No more operations than places run, and none waits while a place is free, also if some are cancelled."""

    async def main() -> None:
        gate = Admission(asyncio.get_running_loop())
        gate._free = places
        inside: list[int] = []
        waiting: dict[int, asyncio.Task[None]] = {}

        async def wait(number: int) -> None:
            await gate.enter()
            inside.append(number)

        for number, step in enumerate(steps):
            if step == "enter" and gate.try_enter():
                inside.append(number)
            elif step == "enter":
                waiting[number] = asyncio.ensure_future(wait(number))
                await turns()
            elif step == "leave" and inside:
                inside.pop(0)
                gate.leave()
                if waiting and number % 2:
                    waiting.pop(next(iter(waiting))).cancel()  # in the same turn in which it got the place
                await turns()
            elif step == "cancel" and waiting:
                waiting.pop(list(waiting)[-1]).cancel()
                await turns()
            waiting = {n: task for n, task in waiting.items() if not task.done()}
            assert len(inside) == places if waiting else len(inside) <= places
            assert inside == sorted(inside)
        for task in waiting.values():
            task.cancel()
        await turns()

    asyncio.run(main())


def test_a_bounded_number_is_under_way_at_once_and_the_others_follow(session: Session) -> None:
    begun: list[int] = []

    def operation(number: int) -> Generator[Call, AnyReply, AnyReply]:
        begun.append(number)
        return (yield Request(CONTROLLER, CreatePartition(f"p{number}")))

    async def main() -> None:
        tasks = [asyncio.ensure_future(run_async(session, operation(i))) for i in range(10 * AT_ONCE)]
        await asyncio.sleep(0)
        assert begun == list(range(AT_ONCE))
        assert await asyncio.gather(*tasks) == [Done(f"p{i}") for i in range(10 * AT_ONCE)]

    asyncio.run(main())
    assert begun == list(range(10 * AT_ONCE))


def test_an_operation_that_waits_at_the_server_holds_no_place(running: Running, session: Session) -> None:
    async def main() -> None:
        claims = [asyncio.ensure_future(run_async(session, one(parked_claim()))) for _ in range(2 * AT_ONCE)]
        while len(running.service.parked) < len(claims):
            await asyncio.sleep(0)
        assert await run_async(session, one(CreatePartition("p"), None)) == Done("p")
        for claim in claims:
            claim.cancel()
        await asyncio.gather(*claims, return_exceptions=True)

    asyncio.run(main())


def test_an_operation_that_fails_or_is_cancelled_gives_its_place_back(session: Session) -> None:
    async def main() -> None:
        for _ in range(3 * AT_ONCE):
            with pytest.raises(StorageKeyNotFoundError):
                await run_async(session, one(CheckProduction("StorageKeyNotFoundError", []), None))
        tasks = [asyncio.ensure_future(run_async(session, one(CreatePartition("p"), None))) for _ in range(200)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [task.result() for task in tasks[1::2]] == [Done("p")] * 100

    asyncio.run(main())


def test_a_server_that_does_not_answer_does_not_hold_up_later_operations(
    running: Running, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "STALL_SECONDS", 0.01)

    async def main() -> None:
        stuck = [asyncio.ensure_future(run_async(session, one(parked_claim(), None))) for _ in range(AT_ONCE)]
        others = [asyncio.ensure_future(run_async(session, one(CreatePartition(f"p{i}"), None))) for i in range(100)]
        assert await asyncio.gather(*others) == [Done(f"p{i}") for i in range(100)]
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert await run_async(session, one(CreatePartition("p"), None)) == Done("p")

    asyncio.run(main())
