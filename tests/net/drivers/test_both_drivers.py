"""What an operation gets from either driver."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from echo import CONTROLLER, Driver, Running, ask, drivers, one, parked_claim, until

from transfer_queue.errors import (
    ConnectionLostError,
    FieldTypeError,
    NotInitializedError,
    StorageKeyNotFoundError,
    WaitTimeoutError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.queries import CheckProduction
from transfer_queue.net.calls import Call, Pause, Request, Work
from transfer_queue.net.session import Session


@drivers
def test_failures_are_thrown_into_the_operation(session: Session, run: Driver) -> None:
    def operation() -> Generator[Call, AnyReply, AnyReply]:
        with pytest.raises(StorageKeyNotFoundError, match="as asked"):
            yield Request(CONTROLLER, CheckProduction("StorageKeyNotFoundError", []))
        return (yield Request(CONTROLLER, ask("after")))

    assert run(session, operation()) == Done("after")
    with pytest.raises(FieldTypeError):
        run(session, one(CheckProduction("FieldTypeError", [])))


@drivers
def test_one_connection_serves_call_after_call(running: Running, session: Session, run: Driver) -> None:
    for i in range(50):
        assert run(session, one(ask(f"p{i}"))) == Done(f"p{i}")
    assert running.server.counters["accepted"] == 1


@drivers
def test_tcp(tmp_path: Path, run: Driver) -> None:
    with Running(tmp_path, address=("127.0.0.1", 0)) as running:
        assert running.address[1] > 0
        assert run(running.session(), one(ask("p"))) == Done("p")


@drivers
def test_a_server_that_is_gone_for_good_is_lost(running: Running, run: Driver) -> None:
    session = running.session(log_of=lambda target: "/logs/it.log")
    run(session, one(ask("p")))
    running.stop()
    start = time.monotonic()
    with pytest.raises(
        ConnectionLostError, match=r"controller at .*\.sock has not been reachable since .*it\.log\. Start it"
    ):
        run(session, one(ask("p")))
    assert time.monotonic() - start < 5


@drivers
def test_the_wait_for_a_server_that_accepts_and_says_nothing_is_reported(tmp_path: Path, run: Driver) -> None:
    """As that of a stopped controller, to which a thread or an event loop needs a new connection."""
    reported: list[float] = []

    def report(call: Request, waited: float) -> Generator[Call, AnyReply, None]:
        reported.append(waited)
        yield Pause(0.0)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.sock"))
        server.listen()
        session = Session("c", bytes(32), lambda target: str(tmp_path / "s.sock"), grace=0.1)
        session.report_wait, session.report = 0.2, report
        with pytest.raises(WaitTimeoutError, match="no reply to Claim within"):
            run(session, one(parked_claim(), timeout=1.0))
        session.close()
    assert len(reported) >= 2
    assert reported == sorted(reported)


@drivers
def test_a_server_that_does_not_answer_is_a_timeout(running: Running, run: Driver) -> None:
    session = running.session(grace=0.1)
    run(session, one(ask("p")))  # the time to connect is not a part of the timeout
    start = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"Timeout.*controller.*no reply to Claim within 0\.2 s"):
        run(session, one(parked_claim(), timeout=0.1))
    assert 0.2 <= time.monotonic() - start < 5
    until(lambda: not running.service.parked)
    assert run(session, one(ask("q"))) == Done("q")


@drivers
def test_a_full_listening_queue_or_silent_server_is_a_timeout(tmp_path: Path, run: Driver) -> None:
    """The deadline covers the time to connect."""
    path = str(tmp_path / "silent.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        start = time.monotonic()
        sessions = [Session("c", b"key", lambda target: path, grace=0.05) for _ in range(3)]
        for session in sessions:
            with pytest.raises(WaitTimeoutError):
                run(session, one(ask("p"), timeout=0.05))
            session.close()
        assert time.monotonic() - start < 15


@drivers
def test_closing_ends_calls_of_all_threads(running: Running, session: Session, run: Driver) -> None:
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(run, session, one(parked_claim(100), timeout=100)) for _ in range(3)]
        until(lambda: len(running.service.parked) == 3)
        session.close()
    assert [type(call.exception()) for call in calls] == [NotInitializedError] * 3
    with pytest.raises(NotInitializedError):
        run(session, one(ask("p")))


def running_future() -> Future[str]:
    future: Future[str] = Future()
    future.set_running_or_notify_cancel()
    return future


@drivers
@pytest.mark.parametrize("limit", [None, 60.0])
def test_a_pause_ends_with_its_future(session: Session, run: Driver, limit: float | None) -> None:
    future = running_future()

    def operation() -> Generator[Call, AnyReply, str]:
        threading.Thread(target=future.set_result, args=["arrived"]).start()
        yield Pause(limit, until=future)
        return future.result()

    assert run(session, operation()) == "arrived"


@drivers
def test_a_pause_ends_without_its_future(session: Session, run: Driver) -> None:
    future = running_future()

    def operation() -> Generator[Call, AnyReply, bool]:
        yield Pause(0.01, until=future)
        return future.done()

    assert run(session, operation()) is False
    future.set_result("later")
    assert run(session, operation()) is True


@drivers
def test_a_function_of_the_user_that_stops_is_an_error_of_the_operation(session: Session, run: Driver) -> None:
    def operation() -> Generator[Call, AnyReply, None]:
        yield Work(lambda: next(iter(())), is_users=True)

    with pytest.raises(RuntimeError, match="StopIteration"):
        run(session, operation())
