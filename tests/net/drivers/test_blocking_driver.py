import asyncio
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from echo import KEY, Running, ask, in_threads, one, parked_claim, until

from leftovers import descriptors, opened_for
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import ListPartitions
from transfer_queue.net.calls import Call, Work
from transfer_queue.net.drivers import blocking_driver
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.session import Session


def test_an_operation_without_calls(session: Session) -> None:
    def operation() -> Generator[Call, AnyReply, int]:
        return 3
        yield

    assert run_blocking(session, operation()) == 3


def test_threads_do_not_wait_for_each_other(running: Running, session: Session) -> None:
    def work(number: int) -> list[AnyReply]:
        return [run_blocking(session, one(ask(f"{number}-{i}"))) for i in range(100)]

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(run_blocking, session, one(parked_claim())) for _ in range(4)]
        until(lambda: len(running.service.parked) == 4)
        assert in_threads(work, 4) == [[Done(f"{number}-{i}") for i in range(100)] for number in range(4)]
        running.answer_parked()
        assert [call.result(10) for call in waiting] == [ClaimReply(rows=b"")] * 4


def test_inside_a_running_loop_it_just_blocks(session: Session) -> None:
    async def main() -> object:
        return run_blocking(session, one(ask("p")))

    assert asyncio.run(main()) == Done("p")


def test_an_interrupted_call_closes_its_connection(running: Running, session: Session) -> None:
    def interrupt() -> None:
        until(lambda: running.service.parked)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_blocking(session, one(parked_claim(30), timeout=30))
    thread.join()
    until(lambda: not running.service.parked)
    assert run_blocking(session, one(ask("p"))) == Done("p")


def test_a_broken_connection_is_made_anew_and_the_request_sent_again(running: Running, session: Session) -> None:
    run_blocking(session, one(ask("p")))
    running.service.drops = 3
    assert run_blocking(session, one(ListPartitions())) == Done(4)  # the fourth time the same sequence came
    assert [e.sequence for _, e in running.service.envelopes] == [1, 2, 2, 2, 2]


def test_calls_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    before = descriptors()
    with Running(tmp_path) as running:
        session = running.session()
        in_threads(lambda _: run_blocking(session, one(parked_claim(0.05))), 5)
        running.stop()
        restart = threading.Timer(0.1, running.start)
        restart.start()
        assert run_blocking(session, one(ask("p"))) == Done("p")
        restart.join()
    assert opened_for(before) == []


def test_a_dropped_session_closes_its_sockets(running: Running) -> None:
    gc.collect()  # what earlier tests have left to it
    before = descriptors()
    session = Session("c", KEY, lambda target: running.address)
    run_blocking(session, one(ask("p")))
    del session
    until(lambda: not running.service.peers)
    assert opened_for(before) == []


def forked_child(session: Session, running: Running, results: "multiprocessing.Queue[object]") -> None:
    inherited = descriptors()
    session.after_fork()
    closed = len(inherited - descriptors())
    own = running.session("child")
    results.put((closed, run_blocking(own, one(ask("child"))), own.begin_request(ask("x"))[0]))
    own.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_connections_alone(running: Running, session: Session) -> None:
    claim = threading.Thread(target=run_blocking, args=(session, one(parked_claim())))
    claim.start()
    until(lambda: running.service.parked)
    run_blocking(session, one(ask("parent")))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=forked_child, args=(session, running, results))
    child.start()
    assert results.get(timeout=10) == (2, Done("child"), 2)
    child.join()
    assert child.exitcode == 0
    assert running.service.parked  # the parent's claim still waits
    accepted = running.server.counters["accepted"]
    assert run_blocking(session, one(ask("parent"))) == Done("parent")
    assert running.server.counters["accepted"] == accepted
    running.answer_parked()
    claim.join(10)
    assert not claim.is_alive()


def test_long_replies_arrive_whole(running: Running, session: Session) -> None:
    name = "x" * (5 << 20)
    assert run_blocking(session, one(ask(name))) == Done(name)


def test_calls_that_block_an_event_loop_together_are_logged(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocking_driver, "BLOCKED_SECONDS", 0.0)
    monkeypatch.setattr(blocking_driver, "_warned", set())

    def operation() -> Generator[Call, AnyReply, None]:
        yield Work(lambda: None)
        yield Work(lambda: None)

    async def main() -> None:
        run_blocking(session, operation())

    run_blocking(session, operation())
    assert caplog.messages == []
    asyncio.run(main())
    assert ["has blocked the event loop" in message for message in caplog.messages] == [True]
