"""Collects what one scrape tells: of the controller's state in short steps of its loop, and of every unit.

A unit is asked over the connection that it has made to its controller, wherever it is, so that one endpoint serves
all. Who does not answer soon is told as not up, and is not waited for again until it has answered.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from transfer_queue.core.controller import Controller
from transfer_queue.core.reports.state_metrics import StateMeasures, measure
from transfer_queue.messages.unit_reports import Measure, Measured
from transfer_queue.metrics.snapshot import JournalMeasures, Snapshot
from transfer_queue.net.server.server_loop import Outgoing
from transfer_queue.node.controller.controller_service import CallSoon
from transfer_queue.node.hosting.process_metrics import ProcessMetrics

LOOP_SECONDS = 5.0  # for the loop to come to a step
STEP_SECONDS = 0.001  # of the loop at a time
UNITS_SECONDS = 1.0  # for the units to answer

T = TypeVar("T")
Demand = Callable[[int, Measure], Outgoing]


class Units:
    """Asks the units. All of it but `wait` happens in the loop."""

    def __init__(self, controller: Controller, demand: Demand) -> None:
        self._controller = controller
        self._demand = demand
        self._number = 0
        self._asked: dict[int, int] = {}  # connection -> number of the question without an answer
        self._answers: dict[int, Measured | None] = {}
        self._complete = threading.Event()

    def ask(self) -> list[Outgoing]:
        """Asks those that are not still busy with the last question; `wait` then waits for these."""
        self._number += 1
        self._answers = dict.fromkeys(self._controller.state.units)
        self._complete.clear()
        peers = self._controller.context.connections.units
        self._asked = {peer: number for peer, number in self._asked.items() if peer in peers.values()}
        idle = [peer for peer in peers.values() if peer not in self._asked]
        self._asked.update(dict.fromkeys(idle, self._number))
        self._check()
        return [self._demand(peer, Measure(self._number)) for peer in idle]

    def told(self, peer: int, measured: Measured) -> None:
        """A unit has answered."""
        self._asked.pop(peer, None)
        if measured.number == self._number and self._controller.context.connections.units.get(measured.unit) == peer:
            self._answers[measured.unit] = measured
        self._check()

    def _check(self) -> None:
        if self._number not in self._asked.values():
            self._complete.set()

    def wait(self, seconds: float) -> None:
        """In another thread: until those that were asked have answered, or so long."""
        self._complete.wait(seconds)

    def answers(self) -> dict[int, Measured | None]:
        """Unit -> its answer, None where there is none."""
        return dict(self._answers)


class Collector:
    """What `node.controller.metrics_http` serves. call_soon, demand: of the controller's server and service.

    meter: of its process. journal: gives what the journal measures, None where there is none.
    """

    def __init__(
        self,
        controller: Controller,
        call_soon: CallSoon,
        demand: Demand,
        meter: ProcessMetrics,
        journal: Callable[[], JournalMeasures | None],
    ) -> None:
        self.units = Units(controller, demand)
        self._controller = controller
        self._call_soon = call_soon
        self._meter = meter
        self._journal = journal
        self._one_at_a_time = threading.Lock()

    def collect(self) -> Snapshot:
        """One scrape; called in any thread but the loop's. TimeoutError where the loop does not come to it."""
        with self._one_at_a_time:
            self._in_loop(self.units.ask, sends=True)
            state = self._steps(measure(self._controller.context, time.monotonic()))
            self.units.wait(UNITS_SECONDS)
            return self._in_loop(lambda: self._whole(state))

    def _in_loop(self, function: Callable[[], T], sends: bool = False) -> T:
        """The outcome of a function that runs in the loop. sends: which is what to send."""
        future: Future[T] = Future()

        def run() -> Any:
            try:
                outcome = function()
            except BaseException as error:  # who waits gets it
                future.set_exception(error)
                return ()
            future.set_result(outcome)
            return outcome if sends else ()

        self._call_soon(run)
        try:
            return future.result(LOOP_SECONDS)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"the controller did not come to it within {LOOP_SECONDS:g} s") from None

    def _steps(self, steps: Generator[None, None, T]) -> T:
        while True:
            done = self._in_loop(lambda: _some(steps))
            if done:
                return done[0]

    def _whole(self, state: StateMeasures) -> Snapshot:
        core = self._controller.context
        return Snapshot(
            server=self._meter.measures(core.measures.waits.timings()),
            counters=dict(core.measures.counters),
            count=state.count,
            partitions=state.partitions,
            samplers=list(core.samplers.costs.values()),
            infos=list(core.state.units.values()),
            units=self.units.answers(),
            live=state.live,
            series={**state.series, **core.measures.lease_counts.series()},
            journal=self._journal(),
        )


def _some(steps: Generator[None, None, T]) -> list[T]:
    """Some steps, for a moment; what they have come to in the end, else nothing."""
    until = time.monotonic() + STEP_SECONDS
    try:
        while time.monotonic() < until:
            next(steps)
    except StopIteration as end:
        return [end.value]
    return []
