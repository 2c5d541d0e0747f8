import asyncio
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from echo import CONTROLLER, Running, ask, in_threads, one, parked_claim, until

from transfer_queue.errors import AuthenticationError, NotInitializedError, StorageKeyNotFoundError, WaitTimeoutError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Cancel, ClaimReply
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, RequestEnvelope
from transfer_queue.messages.partitions import ListPartitions
from transfer_queue.messages.puts import Publish, PublishReply
from transfer_queue.messages.queries import CheckProduction
from transfer_queue.net.calls import NOT_MADE, Call, Pause, Request, Work
from transfer_queue.net.drivers.asyncio_driver import _Link, run_async
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.session import CLOCK_SLACK, Session


async def parked(running: Running, claims: int) -> None:
    """Wait until this number of claims waits at the server."""
    while len(running.service.parked) < claims:
        await asyncio.sleep(0.001)


def test_one_connection_carries_many_calls_at_once(running: Running, session: Session) -> None:
    async def main() -> list[object]:
        waiting = asyncio.ensure_future(run_async(session, one(parked_claim())))
        replies = await asyncio.gather(*(run_async(session, one(ask(f"p{i}"))) for i in range(500)))
        assert not waiting.done()
        running.answer_parked()
        assert await waiting == ClaimReply(rows=b"")
        return list(replies)

    assert asyncio.run(main()) == [Done(f"p{i}") for i in range(500)]
    assert running.server.counters["accepted"] == 1


def test_loops_in_several_threads_at_once(running: Running, session: Session) -> None:
    async def calls(number: int) -> list[AnyReply]:
        return [await run_async(session, one(ask(f"{number}-{i}"))) for i in range(100)]

    found = in_threads(lambda number: asyncio.run(calls(number)), 6)
    assert found == [[Done(f"{number}-{i}") for i in range(100)] for number in range(6)]


def test_a_loop_that_is_closed_with_a_call_outstanding(running: Running, session: Session) -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(run_async(session, one(ask("p"))))
    task = loop.create_task(run_async(session, one(parked_claim(100))))
    loop.run_until_complete(asyncio.sleep(0))
    until(lambda: running.service.parked)
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    assert asyncio.run(run_async(session, one(ask("q")))) == Done("q")


def test_cancelling_a_task_cancels_its_claim_at_the_server(running: Running, session: Session) -> None:
    async def main() -> None:
        await run_async(session, one(ask("p")))
        task = asyncio.ensure_future(run_async(session, one(parked_claim(100))))
        await parked(running, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while running.service.parked:
            await asyncio.sleep(0.001)
        assert await run_async(session, one(ask("q"))) == Done("q")

    asyncio.run(main())
    assert running.service.cancelled == [("c", 2)]
    assert running.server.counters["accepted"] == 1
    # every sequence is accounted for: the claim's, its Cancel's, and those around them
    run_blocking(session, one(ask("r")))
    assert running.service.envelopes[-1][1].acknowledged == 4


def test_a_task_cancelled_in_the_turn_in_which_its_reply_comes(
    running: Running, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has seen the reply: the server is told, so that what it gave goes back."""
    answered = _Link._on_answer

    async def main() -> None:
        await run_async(session, one(ask("p")))
        task = asyncio.ensure_future(run_async(session, one(parked_claim(0.01))))

        def at_once(link: _Link, body: bytes) -> None:
            answered(link, body)
            task.cancel()

        with monkeypatch.context() as patch:
            patch.setattr(_Link, "_on_answer", at_once)
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await run_async(session, one(ask("q"))) == Done("q")

    asyncio.run(main())
    assert running.service.cancelled == [("c", 2)]


def test_the_first_caller_may_be_cancelled_while_it_connects(running: Running, session: Session) -> None:
    async def main() -> None:
        first = asyncio.ensure_future(run_async(session, one(ask("first"))))
        second = asyncio.ensure_future(run_async(session, one(ask("second"))))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == Done("second")
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(main())
    assert running.server.counters["accepted"] == 1


def test_broken_connections_are_made_anew_for_everyone(running: Running, session: Session) -> None:
    async def main() -> None:
        await run_async(session, one(ask("p")))
        claims = [asyncio.ensure_future(run_async(session, one(parked_claim()))) for _ in range(5)]
        await parked(running, 5)
        running.service.drops = 2
        assert await run_async(session, one(ListPartitions())) == Done(3)
        await parked(running, 5)
        running.answer_parked()
        assert await asyncio.gather(*claims) == [ClaimReply(rows=b"")] * 5

    asyncio.run(main())


def test_wrong_keys_are_told_to_everyone_who_waits(running: Running) -> None:
    session = running.session(key=b"x" * 32)

    async def main() -> list[object]:
        calls = (run_async(session, one(ask("p"))) for _ in range(5))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    assert [type(error) for error in asyncio.run(main())] == [AuthenticationError] * 5


def test_frames_larger_than_the_socket_takes(session: Session) -> None:
    names = [f"{i}" * (1 << 20) for i in range(8)]

    async def main() -> list[object]:
        return list(await asyncio.gather(*(run_async(session, one(ask(name))) for name in names)))

    assert asyncio.run(main()) == [Done(name) for name in names]


def test_closing_with_a_loop_that_rests(running: Running, session: Session) -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(run_async(session, one(ask("p"))))
    session.close()
    # the loop forgot the descriptor: its number can be used again
    left, right = socket.socketpair()
    loop.add_reader(left.fileno(), lambda: None)
    loop.remove_reader(left.fileno())
    left.close()
    right.close()
    loop.close()


def test_closing_inside_the_loop(running: Running, session: Session) -> None:
    async def main() -> None:
        claim = asyncio.ensure_future(run_async(session, one(parked_claim(100), timeout=100)))
        await parked(running, 1)
        session.close()
        with pytest.raises(NotInitializedError):
            await claim

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_inside_a_loop_leaves_the_parents_link_alone(running: Running, session: Session) -> None:
    async def main() -> None:
        claim = asyncio.ensure_future(run_async(session, one(parked_claim())))
        await parked(running, 1)
        child = os.fork()
        if not child:
            try:
                session.after_fork()
                own = running.session("child")
                code = 0 if run_blocking(own, one(ask("child"))) == Done("child") else 1
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert await run_async(session, one(ask("parent"))) == Done("parent")
        running.answer_parked()
        assert await claim == ClaimReply(rows=b"")

    asyncio.run(main())
    assert running.server.counters["accepted"] == 2


def fresh_loops(running: Running, count: int) -> None:
    session = running.session(f"child-{os.getpid()}")
    for _ in range(count):
        assert asyncio.run(run_async(session, one(ask("p")))) == Done("p")
    session.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_many_processes_with_fresh_loops(running: Running) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=fresh_loops, args=(running, 20)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4


def test_of_calls_of_one_turn_only_the_first_is_made(running: Running, session: Session) -> None:
    """The others are informed that it has its reply, and may not need a call of their own any more."""

    def need(name: str) -> Generator[Call, AnyReply, AnyReply]:
        return (yield Request(CONTROLLER, ask(name), 10.0, turn="t"))

    async def main() -> list[AnyReply]:
        return list(await asyncio.gather(*(run_async(session, need(f"p{i}")) for i in range(100))))

    replies = asyncio.run(main())
    assert replies[0] == Done("p0")
    assert all(reply is NOT_MADE for reply in replies[1:])
    assert [envelope.body for _, envelope in running.service.envelopes] == [ask("p0")]
    assert asyncio.run(main())[0] == Done("p0")  # the turn is over


def test_after_a_call_that_failed_the_others_of_its_turn_are_made(running: Running, session: Session) -> None:
    def need(request: AnyRequest) -> Generator[Call, AnyReply, AnyReply]:
        return (yield Request(CONTROLLER, request, 10.0, turn="t"))

    async def main() -> list[object]:
        failing = asyncio.ensure_future(run_async(session, need(CheckProduction("StorageKeyNotFoundError", []))))
        others = [asyncio.ensure_future(run_async(session, need(ask(f"p{i}")))) for i in range(5)]
        others[0].cancel()
        await asyncio.gather(failing, *others, return_exceptions=True)
        with pytest.raises(StorageKeyNotFoundError):
            failing.result()
        assert others[0].cancelled()
        return [other.result() for other in others[1:]]

    assert asyncio.run(main()) == [Done(f"p{i}") for i in range(1, 5)]


def test_every_call_ends_at_its_own_deadline(running: Running) -> None:
    """One timer serves all calls of a connection: it is set to an earlier deadline, and then to the next one."""
    session = running.session(grace=0.0)

    async def wait(seconds: float) -> None:
        start = time.monotonic()
        with pytest.raises(WaitTimeoutError):
            await run_async(session, one(parked_claim(), seconds))
        assert time.monotonic() - start >= seconds - CLOCK_SLACK

    async def main() -> None:
        await run_async(session, one(ask("p")))
        late = asyncio.ensure_future(wait(1000.0))
        await asyncio.gather(wait(0.2), wait(0.1), wait(0.3))
        assert not late.done()
        late.cancel()

    asyncio.run(main())


PUT = Publish("p", 1, tags=[{}])
DONE = PublishReply(rows=b"")


class Answers:
    """Puts that are cancelled when the server has them. It answers requests in turn; None: not at all."""

    def __init__(self, running: Running, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[type] = []
        self.answers: Iterator[Any] = iter(())
        self._session = session
        monkeypatch.setattr(running.service, "reply", self._reply)

    def _reply(self, client: str, peer: int, envelope: RequestEnvelope, now: float) -> AnyReply | None:
        self.kinds.append(type(envelope.body))
        answer = next(self.answers, None)
        return answer(peer) if callable(answer) else answer

    async def begin(self, operation: Generator[Call, AnyReply, Any], *answers: Any) -> asyncio.Task[Any]:
        """Begin an operation, and cancel it when the server has its first request."""
        self.kinds.clear()
        self.answers = iter(answers)
        task = asyncio.ensure_future(run_async(self._session, operation))
        while not self.kinds:
            await asyncio.sleep(0.001)
        task.cancel()
        return task

    def outcome(self, *answers: Any) -> AnyReply | BaseException:
        """The outcome of a put that is cancelled, with these answers of the server."""

        async def main() -> list[Any]:
            return await asyncio.gather(await self.begin(one(PUT), *answers), return_exceptions=True)

        return asyncio.run(main())[0]


@pytest.fixture
def server(running: Running, session: Session, monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(running, session, monkeypatch)


def test_a_cancelled_put_ends_as_the_server_says(server: Answers) -> None:
    assert isinstance(server.outcome(None, Done(True)), asyncio.CancelledError)
    assert server.kinds == [Publish, Cancel]
    assert server.outcome(None, Done(False), DONE) == DONE
    assert server.kinds == [Publish, Cancel, Publish]


def test_a_put_that_the_server_refused_stays_cancelled(server: Answers) -> None:
    refused = Failure("ProtocolError", "acknowledged before")
    assert isinstance(server.outcome(None, Done(False), refused), asyncio.CancelledError)


def test_a_put_whose_connection_broke_is_cancelled_on_another_one(running: Running, server: Answers) -> None:
    assert server.outcome(None, running.service.drop, Done(False), DONE) == DONE
    assert server.kinds == [Publish, Cancel, Cancel, Publish]


def test_a_cancelled_put_waits_for_a_silent_server_for_a_limited_time(
    server: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_queue.net.drivers.asyncio_driver.CANCEL_SECONDS", 0.1)

    async def main() -> None:
        task = await server.begin(one(PUT))
        await asyncio.sleep(0)
        task.cancel()  # a second cancellation changes nothing
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_cancelled_request_is_not_finished_before_its_cancel_is_answered(running: Running, session: Session) -> None:
    """Otherwise another request could let the server forget what the cancelled one did."""

    async def main() -> None:
        await run_async(session, one(ask("p")))
        task = asyncio.ensure_future(run_async(session, one(parked_claim(100))))
        await parked(running, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        run_blocking(session, one(ask("q")))  # this loop has not read the reply to the Cancel
        assert running.service.envelopes[-1][1].acknowledged == 1
        assert running.service.envelopes[-1][1].finished == []
        await run_async(session, one(ask("r")))
        await run_async(session, one(ask("s")))
        assert running.service.envelopes[-1][1].acknowledged >= 3

    asyncio.run(main())


def test_an_operation_ends_at_the_call_after_one_whose_cancellation_came_too_late(server: Answers) -> None:
    made = []

    def two() -> Generator[Call, AnyReply, None]:
        made.append((yield Request(CONTROLLER, PUT)))
        made.append((yield Request(CONTROLLER, PUT)))

    async def main() -> None:
        task = await server.begin(two(), None, Done(False), DONE, DONE)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert made == [DONE]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_function_of_the_user_gives_its_result_to_a_cancelled_operation(session: Session, goes_on: bool) -> None:
    """The next call raises the cancellation, or the end of the operation."""
    entered, leave = threading.Event(), threading.Event()
    results: list[str] = []

    def function() -> None:
        entered.set()
        assert leave.wait(60)
        results.append("fetched")

    def operation() -> Generator[Call, AnyReply, None]:
        yield Work(function, is_users=True)
        results.append("kept")
        if goes_on:
            yield Pause(60.0)
            results.append("not reached")

    async def main() -> None:
        task = asyncio.ensure_future(run_async(session, operation()))
        await asyncio.to_thread(entered.wait)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert results == ["fetched", "kept"]


def test_a_function_of_the_user_that_fails_does_not_hide_the_cancellation(session: Session) -> None:
    entered, leave = threading.Event(), threading.Event()

    def function() -> None:
        entered.set()
        assert leave.wait(60)
        raise LookupError("nothing")

    async def main() -> None:
        task = asyncio.ensure_future(run_async(session, work(function)))
        await asyncio.to_thread(entered.wait)
        task.cancel()
        await asyncio.sleep(0)
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(LookupError, match="nothing"):
            await run_async(session, work(function))

    asyncio.run(main())


def work(function: Callable[[], object]) -> Generator[Call, AnyReply, None]:
    yield Work(function, is_users=True)


def test_functions_of_users_do_not_fill_the_executor(session: Session) -> None:
    functions = 40
    barrier = threading.Barrier(functions)

    async def main() -> None:
        await asyncio.gather(*(run_async(session, work(lambda: barrier.wait(60))) for _ in range(functions)))

    asyncio.run(main())


def test_a_pause_that_is_cancelled_leaves_its_future(session: Session) -> None:
    future: Future[str] = Future()
    future.set_running_or_notify_cancel()

    def operation() -> Generator[Call, AnyReply, None]:
        yield Pause(None, until=future)

    async def main() -> None:
        task = asyncio.ensure_future(run_async(session, operation()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        future.set_result("later")
        await run_async(session, operation())

    asyncio.run(main())
