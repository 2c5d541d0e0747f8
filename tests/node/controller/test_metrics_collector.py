"""A scrape: it blocks the loop for short moments only, and does not wait long for a unit that does not reply."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.messages.reports.unit_reports import Measure, Measured, RegisterUnit, ServerMeasures, UnitMeasures
from transfer_queue.messages.storage import UnitStatusReply
from transfer_queue.metrics.exposition import exposition
from transfer_queue.metrics.samples import Snapshot
from transfer_queue.net.server.server_loop import Outgoing
from transfer_queue.node.controller import metrics_collector
from transfer_queue.node.controller.metrics_collector import Collector
from transfer_queue.sampler import SequentialSampler

UNITS = {0: 10, 1: 11}  # number -> connection


class Meter:
    def measures(self, waits: list[Any]) -> ServerMeasures:
        return ServerMeasures([], waits, {}, {}, {}, 0, 0, 0.0, 0, 0.0)


class Loop:
    """A controller's loop in a thread. `asked` has the questions that units received, oldest first."""

    def __init__(self) -> None:
        self.core = Controller(CoreConfig(SequentialSampler()))
        for number, peer in UNITS.items():
            self.core.on_connect(f"unit-{number}", peer)
            request = RegisterUnit(f"{number}.sock", f"/{number}", f"boot-{number}", f"unit-{number}")
            self.core.handle(f"unit-{number}", peer, RequestEnvelope(1, 0, request), 0.0)
        assert self.core.context.connections.units == UNITS
        self.asked: queue.Queue[tuple[int, int]] = queue.Queue()
        self.events = 0
        self._soon: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self.collector = Collector(self.core, self.call_soon, self.demand, Meter(), lambda: None)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def call_soon(self, function: Callable[[], Any]) -> None:
        self._soon.put(function)

    def demand(self, peer: int, request: Measure) -> Outgoing:
        return Outgoing(peer, b"%d" % request.number)

    def answer(self, unit: int, number: int) -> None:
        """Receive a unit's answer."""
        server = ServerMeasures([], [], {}, {}, {}, 0, 0, float(number), 0, 0.0)
        measured = Measured(number, unit, server, UnitMeasures(UnitStatusReply(1, 1, 0, 1), 0, 0, 0.0, False))
        self.call_soon(lambda: self.collector.units.take_answer(UNITS[unit], measured))

    def scrape(self) -> queue.Queue[Snapshot]:
        """Begin a scrape in another thread."""
        done: queue.Queue[Snapshot] = queue.Queue()
        threading.Thread(target=lambda: done.put(self.collector.collect())).start()
        return done

    def _run(self) -> None:
        while (function := self._soon.get()) is not None:
            self.events += 1
            for outgoing in function() or ():
                self.asked.put((outgoing.peer, int(outgoing.body)))

    def end(self) -> None:
        self._soon.put(None)
        self._thread.join()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.end()


def told(snapshot: Snapshot) -> dict[int, float | None]:
    """Unit -> the number of the question that it answered; None if it is not up."""
    return {unit: None if answer is None else answer.server.cpu for unit, answer in snapshot.units.items()}


def test_a_scrape_has_the_answers_of_all_units(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_collector, "UNITS_SECONDS", 600.0)
    done = loop.scrape()
    assert sorted(loop.asked.get() for _ in UNITS) == [(10, 1), (11, 1)]
    loop.answer(1, 1)
    loop.answer(0, 1)
    assert told(done.get()) == {0: 1.0, 1: 1.0}


def test_a_scrape_waits_only_once_for_a_unit_that_does_not_answer(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_collector, "UNITS_SECONDS", 0.05)
    done = loop.scrape()
    assert sorted(loop.asked.get() for _ in UNITS) == [(10, 1), (11, 1)]
    loop.answer(0, 1)
    assert told(done.get()) == {0: 1.0, 1: None}
    monkeypatch.setattr(metrics_collector, "UNITS_SECONDS", 600.0)
    done = loop.scrape()
    assert loop.asked.get() == (10, 2)
    loop.answer(0, 2)
    assert told(done.get()) == {0: 2.0, 1: None}, "within the time that the other one takes"
    assert loop.asked.empty(), "nothing piles up for the one that is stopped"
    loop.answer(1, 1)
    done = loop.scrape()
    assert sorted(loop.asked.get() for _ in UNITS) == [(10, 3), (11, 3)], "it has answered and is asked again"
    loop.answer(1, 3)
    loop.answer(0, 3)
    assert told(done.get()) == {0: 3.0, 1: 3.0}


def test_a_unit_whose_connection_ended_is_not_asked(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_collector, "UNITS_SECONDS", 600.0)
    loop.call_soon(lambda: loop.core.on_disconnect("unit-1", 11, 0.0) and None)
    done = loop.scrape()
    assert loop.asked.get() == (10, 1)
    loop.answer(0, 1)
    assert told(done.get()) == {0: 1.0, 1: None}


def test_a_large_state_is_measured_in_many_short_events(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_collector, "STEP_SECONDS", 0.0001)
    monkeypatch.setattr(metrics_collector, "UNITS_SECONDS", 0.0)
    for number in range(3000):
        loop.core.handle("c", 1, RequestEnvelope(number + 1, 0, CreatePartition(f"p{number}", 0)), 0.0)
    before = loop.events
    snapshot = loop.scrape().get()
    assert loop.events - before >= 10
    assert (snapshot.count, len(snapshot.partitions)) == (3000, 101)
    assert sum(text.count("tq_rows{") for text in exposition(snapshot)) == 101


def test_a_loop_that_does_not_respond_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_collector, "LOOP_SECONDS", 0.01)
    core = Controller(CoreConfig(SequentialSampler()))
    collector = Collector(core, lambda function: None, lambda peer, request: Outgoing(peer, b""), Meter(), lambda: None)  # type: ignore[arg-type]
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        collector.collect()
    assert time.monotonic() - begun < 60
