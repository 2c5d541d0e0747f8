"""Collects measures: from the controller's state, in short steps of its loop, and from every unit.

The controller asks each unit over the connection that the unit has made to it, on whatever node the unit is, so that
one endpoint serves all. A unit that does not reply in time is reported as not up, and is not waited for until it has
answered.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from transfer_queue.core.claims.row_leases import Leases
from transfer_queue.core.controller import Controller
from transfer_queue.core.reports.status import StateMeasures, UnitLoads, measure, measure_units
from transfer_queue.messages.reports.overview import JournalSummary, ServersReply, UnitServer, UnitViews, ViewsReply
from transfer_queue.messages.reports.unit_reports import Measure, Measured
from transfer_queue.metrics.samples import JournalMeasures, Snapshot
from transfer_queue.net.server.server_loop import Outgoing
from transfer_queue.node.controller.controller_service import CallSoon
from transfer_queue.node.hosting.service_base import ProcessMetrics

LOOP_SECONDS = 5.0  # within which the loop must run a step
STEP_SECONDS = 0.001  # of one step in the loop
UNITS_SECONDS = 1.0  # within which the units should answer

T = TypeVar("T")
R = TypeVar("R")
Demand = Callable[[int, Measure], Outgoing]


class UnitScraper:
    """Asks the units for their measures. Everything runs in the loop."""

    def __init__(self, controller: Controller, demand: Demand) -> None:
        self._controller = controller
        self._demand = demand
        self._number = 0
        self._pending: dict[int, int] = {}
        """Connection -> the number of the question that it has not answered."""
        self.answers: dict[int, Measured | None] = {}
        """Unit -> its answer; None until it has answered."""
        self.complete = threading.Event()
        """Set when the units that were asked have answered. Other threads wait for it."""

    def ask(self) -> list[Outgoing]:
        """Ask the units that have answered the last question; `wait` then waits for these."""
        self._number += 1
        self.answers = dict.fromkeys(self._controller.state.units)
        self.complete.clear()
        peers = self._controller.context.connections.units
        self._pending = {peer: number for peer, number in self._pending.items() if peer in peers.values()}
        idle = [peer for peer in peers.values() if peer not in self._pending]
        self._pending.update(dict.fromkeys(idle, self._number))
        self._check()
        return [self._demand(peer, Measure(self._number)) for peer in idle]

    def take_answer(self, peer: int, measured: Measured) -> None:
        """Take a unit's answer."""
        self._pending.pop(peer, None)
        if measured.number == self._number and self._controller.context.connections.units.get(measured.unit) == peer:
            self.answers[measured.unit] = measured
        self._check()

    def _check(self) -> None:
        if self._number not in self._pending.values():
            self.complete.set()


class Collector:
    """Collects what `node.controller.metrics_http` serves."""

    def __init__(
        self,
        controller: Controller,
        call_soon: CallSoon,
        demand: Demand,
        meter: ProcessMetrics,
        journal: Callable[[], JournalMeasures | None],
    ) -> None:
        """Make the collector.

        Args:
            controller: The core.
            call_soon: Runs a function in the server's loop.
            demand: Makes the frame that asks a unit.
            meter: Measures the controller's process.
            journal: Returns the measures of the journal; None if there is no journal.
        """
        self.units = UnitScraper(controller, demand)
        self._controller = controller
        self._call_soon = call_soon
        self._meter = meter
        self._journal = journal
        self._one_at_a_time = threading.Lock()

    def collect(self) -> Snapshot:
        """Return one scrape. Call it in any thread but the loop's. Raises TimeoutError if the loop does not respond."""
        return self._ask_units(measure(self._controller.context, time.monotonic()), self._make_snapshot)

    def measure_servers(self) -> ServersReply:
        """Return the measures of all servers. Otherwise like `collect`."""
        return self._ask_units(measure_units(self._controller.context, time.monotonic()), self._make_reply)

    def show_views(self) -> ViewsReply:
        """Return the views of readers in all units. Otherwise like `collect`."""
        return self._ask_units(_nothing(), self._make_views)

    def _ask_units(self, steps: Generator[None, None, T], make: Callable[[T], R]) -> R:
        """Ask the units, do these steps in the loop meanwhile, and return what `make` makes of their result there."""
        with self._one_at_a_time:
            self._in_loop(self.units.ask, sends=True)
            units = self._steps(steps)
            self.units.complete.wait(UNITS_SECONDS)
            return self._in_loop(lambda: make(units))

    def _make_views(self, nothing: None) -> ViewsReply:
        answers = [(number, answer) for number, answer in sorted(self.units.answers.items()) if answer is not None]
        return ViewsReply([UnitViews(n, each.storage.space.viewed, each.storage.holds) for n, each in answers])

    def _make_reply(self, loads: UnitLoads) -> ServersReply:
        core, answers, journal = self._controller.context, self.units.answers, self._journal()
        live, leases = loads
        units = []
        for number, unit in sorted(core.state.units.items()):
            answer = answers.get(number)
            units.append(
                UnitServer(
                    number, unit.node, unit.report_tier, unit.capacity, live[number], number in core.state.draining,
                    None if answer is None else answer.server, None if answer is None else answer.storage,
                )
            )  # fmt: skip
        return ServersReply(
            self._meter.measures([]),
            units,
            list(leases.values()),
            core.services[Leases].redelivered.total(),
            None if journal is None else JournalSummary(journal.records, journal.nbytes, journal.age, journal.trouble),
        )

    def _in_loop(self, function: Callable[[], T], sends: bool = False) -> T:
        """Run a function in the loop and return its result, which is sent as frames if `sends` is set."""
        future: Future[T] = Future()

        def run() -> Any:
            try:
                outcome = function()
            except BaseException as error:  # raised in the thread that waits
                future.set_exception(error)
                return ()
            future.set_result(outcome)
            return outcome if sends else ()

        self._call_soon(run)
        try:
            return future.result(LOOP_SECONDS)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(
                f"the controller's loop did not respond within {LOOP_SECONDS:g} s; see its log, and scrape less often"
            ) from None

    def _steps(self, steps: Generator[None, None, T]) -> T:
        while True:
            done = self._in_loop(lambda: _run_some_steps(steps))
            if done:
                return done[0]

    def _make_snapshot(self, state: StateMeasures) -> Snapshot:
        core = self._controller.context
        return Snapshot(
            server=self._meter.measures(core.measures.waits.timings()),
            counters=dict(core.measures.counters),
            count=state.count,
            partitions=state.partitions,
            samplers=list(core.samplers.costs.values()),
            infos=list(core.state.units.values()),
            units=dict(self.units.answers),
            live=state.live,
            series={**state.series, **core.services[Leases].series()},
            journal=self._journal(),
            timings=state.timings,
            time=time.time(),
        )


def _nothing() -> Generator[None, None, None]:
    """Return what has no steps."""
    yield from ()


def _run_some_steps(steps: Generator[None, None, T]) -> list[T]:
    """Run steps for a moment. Returns their result in a list when they are finished, else an empty list."""
    until = time.monotonic() + STEP_SECONDS
    try:
        while time.monotonic() < until:
            next(steps)
    except StopIteration as end:
        return [end.value]
    return []
