"""When a server that has ended is restarted, and when it is given up."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from transfer_queue.node.hosting import child_process
from transfer_queue.node.hosting.child_process import LONGEST_PAUSE, READY, STEADY_SECONDS, ChildServer


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(child_process, "time", clock)
    return clock


def child(patience: float = 60.0) -> ChildServer:
    def build() -> None:
        raise AssertionError

    return ChildServer("controller", build, True, patience)  # type: ignore[arg-type]


def forked(each: ChildServer, up: bool) -> None:
    """A process that comes up or fails to."""
    ready, say = os.pipe()
    each.record_fork(1, ready, 0.0)
    if up:
        os.write(say, READY)
    os.close(say)
    while each.ready is not None:
        each.read_report()


def test_a_server_is_given_up_by_time_and_not_by_the_number_of_its_failures(clock: Clock) -> None:
    each, begun, tries = child(), clock.now, 0
    forked(each, up=True)
    assert each.record_end(-signal.SIGKILL)
    while True:
        forked(each, up=False)
        tries += 1
        if not each.record_end(-signal.SIGKILL if tries % 2 else 1):
            break
        assert clock.now < each.due <= clock.now + LONGEST_PAUSE
        clock.now = each.due
    assert 60.0 <= clock.now - begun <= 60.0 + LONGEST_PAUSE
    assert tries > 10


def test_failures_are_counted_from_0_after_a_long_time_up(clock: Clock) -> None:
    each = child(patience=5.0)
    for _ in range(10):
        forked(each, up=True)
        clock.now += STEADY_SECONDS
        assert each.record_end(1)
        assert each.due == clock.now
    forked(each, up=False)
    clock.now += 1.0
    assert each.record_end(1)
    assert each.failing_since == clock.now


def test_a_server_that_ends_by_itself_soon_after_it_is_up_is_given_up_too(clock: Clock) -> None:
    each = child(patience=5.0)
    for _ in range(100):
        forked(each, up=True)
        clock.now += 1.0
        if not each.record_end(1):
            break
    else:
        pytest.fail("it is tried for ever")


def test_a_server_that_is_killed_while_it_serves_is_restarted_at_once(clock: Clock) -> None:
    each = child()
    for _ in range(100):
        forked(each, up=True)
        assert each.record_end(-signal.SIGKILL)
        assert each.due == clock.now


def test_nobody_waits_for_a_server_that_is_not_needed_any_more() -> None:
    """Although another process has its socket, too."""
    each, listener = child(), socket.create_server(("127.0.0.1", 0))
    assert each.needed()
    inherited = socket.socket(fileno=os.dup(listener.fileno()))
    each.listeners = [listener]
    each.refuse_connections()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(inherited.getsockname(), timeout=10)
    inherited.close()
    listener.close()
