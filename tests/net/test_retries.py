"""How long a call is tried again, and with what: while the system lives, and with what is left of its wait."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from echo import CONTROLLER, Driver, Running, drivers, one, parked_claim, until

from transfer_queue.errors import ConnectionLostError, WaitTimeoutError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition, ListPartitions
from transfer_queue.net.calls import Request
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.framing import FrameReader
from transfer_queue.net.session import LONGEST_DELAY, MIN_WAIT, RETRY_DELAYS, RetryPolicy, Session

ERROR = ConnectionResetError("gone")


def new_session(now: list[float], **options: Any) -> Session:
    session = Session("c", b"key", lambda target: "/somewhere/controller.sock", **options)
    session.clock = lambda: now[0]
    return session


def request_in(frame: bytes) -> RequestEnvelope:
    ((body, _),) = FrameReader().feed(frame)
    return msgspec.msgpack.decode(bytes(body), type=RequestEnvelope)


def test_tries_go_on_until_the_deadline_while_the_system_lives() -> None:
    now = [0.0]
    session = new_session(now, alive=lambda _: True, grace=60.0)
    attempts = RetryPolicy(session, Request(CONTROLLER, ListPartitions()))
    delays: list[float] = []

    def again() -> None:
        while True:
            delays.append(attempts.next_delay(ERROR))
            now[0] += delays[-1]

    with pytest.raises(WaitTimeoutError, match="no reply to ListPartitions within 60 s"):
        again()
    assert delays[: len(RETRY_DELAYS) + 1] == [*RETRY_DELAYS, LONGEST_DELAY]
    assert sum(delays) >= 60.0
    assert len(delays) < 70


def test_a_call_fails_at_once_when_the_system_has_ended() -> None:
    attempts = RetryPolicy(new_session([0.0], alive=lambda _: False), Request(CONTROLLER, ListPartitions()))
    with pytest.raises(ConnectionLostError, match=r"attempts of \w+: 1\)"):
        attempts.next_delay(ERROR)


def test_only_what_is_left_of_a_wait_is_asked_for_again() -> None:
    now = [100.0]
    session = new_session(now)
    call = Request(CONTROLLER, parked_claim(10.0), 10.0)
    attempts = RetryPolicy(session, call)
    session.finish(session.begin_request(ListPartitions())[0])
    sequence, frame = session.begin_request(call.body)
    for time_now, left in ((103.0, 7.0), (109.5, 0.5), (200.0, MIN_WAIT)):
        now[0] = time_now
        again = request_in(attempts.frame_to_retry(sequence, frame))
        assert isinstance(again.body, Claim)
        assert (again.sequence, again.acknowledged, again.body.wait) == (sequence, sequence - 1, left)
        assert again.body.waited == time_now - 100.0  # the message of a timeout includes them
    assert msgspec.structs.replace(again.body, wait=10.0, waited=0.0) == call.body


@pytest.mark.parametrize("request_", [ListPartitions(), CreatePartition("p"), parked_claim(None)])
def test_what_does_not_wait_is_sent_as_it_was(request_: Any) -> None:
    session = new_session([0.0])
    attempts = RetryPolicy(session, Request(CONTROLLER, request_))
    sequence, frame = session.begin_request(request_)
    assert attempts.frame_to_retry(sequence, frame) is frame


@drivers
def test_a_wait_over_a_restart_is_no_longer_than_asked_for(running: Running, run: Driver) -> None:
    session = running.session(alive=lambda _: True)
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run, session, one(parked_claim(1.5), timeout=1.5))
        until(lambda: running.service.parked)
        running.stop()
        running.service.parked.clear()
        running.start()
        assert waiting.result(30) == ClaimReply(rows=b"")
    assert time.monotonic() - begun >= 1.4
    first, *_, last = [envelope for _, envelope in running.service.envelopes]
    assert last.sequence == first.sequence
    assert isinstance(last.body, Claim)
    assert last.body.wait < 1.5


def test_a_server_that_comes_back_late_is_waited_for(running: Running) -> None:
    """Longer than all the short delays: the system lives, so that a server will come."""
    session = running.session(alive=lambda _: True)
    assert run_blocking(session, one(CreatePartition("a"))) == Done("a")
    running.stop()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run_blocking, session, one(CreatePartition("b")))
        with pytest.raises(TimeoutError):
            waiting.result(sum(RETRY_DELAYS) + 0.2)
        running.start()
        assert waiting.result(30) == Done("b")
