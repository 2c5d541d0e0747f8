"""Several calls at once: all are asked before any is answered, and each has an outcome of its own, in both drivers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from echo import KEY, Driver, EchoService, Running, drivers, until
from test_session import envelope
from test_tls import ANY_PORT, MEMBER

from transfer_queue.errors import (
    ConnectionLostError,
    FieldTypeError,
    InvalidArgumentError,
    NotInitializedError,
    ProtocolError,
    WaitTimeoutError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.envelopes import AnyReply, RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition, ListPartitions
from transfer_queue.messages.queries import CheckProduction
from transfer_queue.net.calls import Call, Outcome, Pause, Request, Together, Work, replies_of
from transfer_queue.net.drivers import blocking_driver
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.server.server_loop import Outgoing
from transfer_queue.net.session import Session

SECONDS = 10.0


class Meeting(EchoService):
    """Answers CreatePartition("meet") when all servers have been asked; with a payload of so many bytes, each a 7."""

    def __init__(self, barrier: threading.Barrier, payload: int = 0) -> None:
        super().__init__()
        self._barrier = barrier
        self._payload = payload

    def reply(self, client: str, peer: int, envelope: RequestEnvelope, now: float) -> AnyReply | None:
        if isinstance(envelope.body, CreatePartition) and envelope.body.partition == "meet":
            self._barrier.wait(SECONDS)
        return super().reply(client, peer, envelope, now)

    def answer(self, peer: int, sequence: int, reply: AnyReply) -> Outgoing:
        outgoing = super().answer(peer, sequence, reply)
        return Outgoing(peer, outgoing.body, [memoryview(b"\7" * self._payload)]) if self._payload else outgoing


@pytest.fixture(params=[1, 4], autouse=True, ids=["one thread", "threads"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads of all calls, also small ones."""
    monkeypatch.setattr(blocking_driver, "max_streams", lambda: request.param)
    monkeypatch.setattr(blocking_driver, "LARGE_TRANSFER", 0)


class Servers:
    """These servers, which one session reaches as units."""

    def __init__(self, folder: Path, count: int, payload: int = 0, tls: bool = False) -> None:
        barrier = threading.Barrier(count)
        self._stack = ExitStack()
        self.running = [
            self._stack.enter_context(
                Running(
                    folder, Meeting(barrier, payload * (number + 1)), ANY_PORT if tls else None,
                    MEMBER.server if tls else None,
                )
            )
            for number in range(count)
        ]  # fmt: skip
        self.session = Session("c", KEY, lambda target: self.running[target[1]].address, tls=MEMBER.client)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self._stack.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Servers]:
    with Servers(tmp_path, 2) as servers:
        yield servers


def at_once(calls: Sequence[Call]) -> Generator[Call, AnyReply, list[Outcome | None]]:
    assert (yield Together(calls)) == Done()
    return [call.outcome for call in calls]


@drivers
def test_all_are_asked_before_any_is_answered(two: Servers, run: Driver) -> None:
    for _ in range(3):  # then over connections that are there
        calls = [Request(("unit", number), CreatePartition("meet")) for number in range(2)]
        assert run(two.session, at_once(calls)) == [Done("meet")] * 2
        assert len({call.sequence for call in calls}) == 2


@drivers
@pytest.mark.parametrize("tls", [False, True])
def test_payloads_go_to_their_places(tmp_path: Path, run: Driver, tls: bool) -> None:
    """Of 3 and 6 MiB, in parts of all sizes; nothing beside them is touched."""
    sizes = [1, 100, (1 << 20) - 101, 1 << 20, 1 << 20]
    with Servers(tmp_path, 2, 3 << 20, tls) as servers:
        buffers = [bytearray(len(sizes) * (number + 1) + (3 << 20) * (number + 1)) for number in range(2)]
        calls = []
        for number, buffer in enumerate(buffers):
            at, parts, memory = 0, [], memoryview(buffer)
            for size in sizes * (number + 1):
                parts.append(memory[at : at + size])
                at += size + 1
            calls.append(Request(("unit", number), CreatePartition("meet"), into=parts))
        assert run(servers.session, at_once(calls)) == [Done("meet")] * 2
        for call, buffer in zip(calls, buffers):
            assert all(part == b"\7" * len(part) for part in call.into)
            assert buffer.count(0) == len(call.into)


@drivers
def test_each_has_an_outcome_of_its_own(two: Servers, run: Driver) -> None:
    done: list[int] = []
    calls = [
        Request(("unit", 0), CheckProduction("FieldTypeError", [])),
        Request(("unit", 1), CreatePartition("x")),
        Request(("unit", 0), Claim("p", "t", ["f"], 1), within=0.05),
        Request(("unit", 1), CreatePartition("y" * 3), within=SECONDS),
        Request(("unit", 0), CreatePartition("no text: \udcff")),
        Work(lambda: done.append(1)),
        Pause(0.001),
    ]
    refused, named, late, other, unsendable, worked, paused = run(two.session, at_once(calls))
    assert isinstance(refused, FieldTypeError)
    assert (named, other, worked, done) == (Done("x"), Done("yyy"), Done(), [1])
    assert paused == Done(), "a pause sends nothing"
    assert isinstance(late, WaitTimeoutError)
    assert isinstance(unsendable, InvalidArgumentError)
    assert run(two.session, at_once(calls[1:2])) == [Done("x")], "what came late disturbs nobody"
    sequence, frame = two.session.begin_request(ListPartitions())
    assert envelope(frame).acknowledged == sequence - 1, "all others are finished"


@drivers
def test_what_breaks_is_tried_again_by_itself(two: Servers, run: Driver) -> None:
    two.running[0].service.drops = 1
    calls = [Request(("unit", 0), ListPartitions()), Request(("unit", 1), ListPartitions())]
    assert run(two.session, at_once(calls)) == [Done(2), Done(1)], "the first was asked twice, under one sequence"


@drivers
def test_a_server_that_is_gone_fails_alone(two: Servers, run: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_queue.net.session.RETRY_DELAYS", (0.0, 0.0))
    calls = [Request(("unit", number), CreatePartition("x")) for number in range(2)]
    assert run(two.session, at_once(calls)) == [Done("x")] * 2
    two.running[0].stop()
    try:
        lost, there = run(two.session, at_once(calls))
    finally:
        two.running[0].start()
    assert isinstance(lost, ConnectionLostError)
    assert "storage unit 0" in str(lost)
    assert there == Done("x")
    assert run(two.session, at_once(calls)) == [Done("x")] * 2


def test_a_closed_session_ends_all_of_them(two: Servers) -> None:
    calls = [Request(("unit", number), Claim("p", "t", ["f"], 1), 100.0) for number in range(2)]
    thread = threading.Thread(target=lambda: run_blocking(two.session, at_once(calls)))
    thread.start()
    until(lambda: all(running.service.parked for running in two.running))
    two.session.close()
    thread.join(SECONDS)
    assert all(isinstance(call.outcome, NotInitializedError) for call in calls)


def test_who_is_interrupted_leaves_nothing_open(two: Servers) -> None:
    """Of a call in another thread, too, which waits for its reply at that time."""

    def interrupt() -> None:
        until(lambda: all(running.service.parked for running in two.running))
        os.kill(os.getpid(), signal.SIGINT)

    waiting = [Request(("unit", number), Claim("p", "t", ["f"], 1), 100.0) for number in range(2)]
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_blocking(two.session, at_once(waiting))
    thread.join()
    calls = [Request(("unit", number), CreatePartition("x")) for number in range(2)]
    sequence, frame = two.session.begin_request(ListPartitions())
    assert envelope(frame).acknowledged == sequence - 1
    two.session.finish(sequence)
    until(lambda: not any(running.service.peers for running in two.running))
    assert run_blocking(two.session, at_once(calls)) == [Done("x")] * 2


def test_an_error_of_a_thread_is_the_callers(two: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(tries: Sequence[Any]) -> None:
        if len(tries) == 2 or threading.current_thread() is not threading.main_thread():
            raise MemoryError

    calls = [Request(("unit", number), CreatePartition("x")) for number in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(blocking_driver, "_transfer", failing)
        with pytest.raises(MemoryError):
            run_blocking(two.session, at_once(calls))
    assert run_blocking(two.session, at_once(calls)) == [Done("x")] * 2


def test_calls_end_also_if_no_thread_can_be_started(two: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = [Request(("unit", number % 2), CreatePartition(f"{number}")) for number in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        assert run_blocking(two.session, at_once(calls)) == [Done(f"{number}") for number in range(5)]


def test_a_payload_of_another_length_is_an_error_of_the_server(tmp_path: Path) -> None:
    with Servers(tmp_path, 2, 100) as servers:
        calls = [
            Request(("unit", number), CreatePartition("x"), into=[memoryview(bytearray(100))]) for number in range(2)
        ]
        good, bad = run_blocking(servers.session, at_once(calls))
        assert good == Done("x")
        assert isinstance(bad, ProtocolError)
        assert "expected a reply with 100 bytes of payload or none, got one that announces 200 bytes" in str(bad)


def test_answers_are_the_replies_or_the_first_error(two: Servers) -> None:
    good = [Request(("unit", number), CreatePartition(f"{number}")) for number in range(2)]
    assert run_blocking(two.session, replies_of(good)) == [Done("0"), Done("1")]
    assert run_blocking(two.session, replies_of(good[1:])) == [Done("1")]
    with pytest.raises(FieldTypeError):
        run_blocking(two.session, replies_of([*good, Request(("unit", 0), CheckProduction("FieldTypeError", []))]))
