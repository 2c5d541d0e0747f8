"""The thread beside a loop: in order, with errors as outcomes."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from transfer_queue.node.hosting.service_base import SWITCH_SECONDS, BackgroundThread

SECONDS = 30


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_outcomes_come_in_order() -> None:
    worker, outcomes, gate = BackgroundThread(), queue.SimpleQueue[tuple[Any, str]](), threading.Event()

    def done(outcome: Any) -> None:
        outcomes.put((outcome, threading.current_thread().name))

    worker.begin(lambda: gate.wait(SECONDS), done)
    worker.begin(lambda: 1 / 0, done)
    worker.begin(lambda: 3, done)
    assert outcomes.empty(), "nobody waited for it"
    gate.set()
    assert outcomes.get(timeout=SECONDS) == (True, "worker")
    error, _ = outcomes.get(timeout=SECONDS)
    assert isinstance(error, ZeroDivisionError)
    assert outcomes.get(timeout=SECONDS) == (3, "worker")


def test_the_loop_gets_the_interpreter_back_soon() -> None:
    sys.setswitchinterval(0.005)
    worker, outcomes = BackgroundThread(), queue.SimpleQueue[Any]()
    assert sys.getswitchinterval() == 0.005, "not before there is work"
    worker.begin(lambda: None, outcomes.put)
    outcomes.get(timeout=SECONDS)
    assert sys.getswitchinterval() <= SWITCH_SECONDS
