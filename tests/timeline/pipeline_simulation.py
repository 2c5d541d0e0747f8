"""Makes the timeline of a scenario: the events, open waits and status that a controller would have at one time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pipeline_scenarios import Scenario, Stage

from transfer_queue.messages.reports.progress import FieldProgress, PartitionProgress, PolicyProgress, TaskProgress
from transfer_queue.messages.reports.timeline import Lane, OpenWait, TimelineReply
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.events import CLOSED, DEMAND, EVENT, TIMED_OUT, EventKind
from transfer_queue.timeline.recording import Recording

BOOTED = 5000.0  # the controller's time when a scenario begins
WALL = 1_700_000_000.0  # Unix seconds minus the controller's time
PARTITION = "train_0"


@dataclass
class Worker:
    stage: Stage
    rank: int
    lane: int
    alive: bool = True

    @property
    def client(self) -> str:
        return f"{self.stage.name}-{self.rank:x}"


class Pipeline:
    """A discrete simulation of one scenario."""

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self.scenario = scenario
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float | int, ...]] = []
        self.calendar: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.fields = [(), *dict.fromkeys(f for s in scenario.stages for f in (s.takes, s.puts) if f)]
        self.ready: dict[str, deque[int]] = {stage.name: deque() for stage in scenario.stages}
        self.ready_at: dict[tuple[str, int], tuple[float, int]] = {}
        self.waiting: dict[str, deque[tuple[Worker, float]]] = {stage.name: deque() for stage in scenario.stages}
        self.held: deque[tuple[Worker, float]] = deque()
        self.has: dict[int, set[str]] = {}
        self.made_with: dict[int, int] = {}
        self.produced: dict[str, int] = {}
        self.gone: dict[str, float] = {}
        self.consumed = {stage.name: 0 for stage in scenario.stages}
        self.rows = self.live = self.trained = self.version = self.block = 0
        self.workers = [
            Worker(stage, rank, number)
            for number, (stage, rank) in enumerate(
                (stage, rank) for stage in scenario.stages for rank in range(stage.ranks)
            )
        ]
        for worker in self.workers:
            self.at(worker.stage.begins, lambda worker=worker: self.begin(worker))
            if worker.rank in worker.stage.gone:
                self.at(worker.stage.gone[worker.rank], lambda worker=worker: self.end(worker))
            if worker.rank in worker.stage.closed:
                self.at(worker.stage.closed[worker.rank], lambda worker=worker: self.end(worker, CLOSED))

    def run(self, until: float) -> Pipeline:
        while self.calendar and self.calendar[0][0] <= until:
            self.now, _, act = heapq.heappop(self.calendar)
            act()
        self.now = until
        return self

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.calendar, (when, next(self.order), act))

    def write(self, kind: EventKind, worker: Worker, since: float, fields: tuple[str, ...], rows: int, **more) -> None:
        block, age, staleness = more.get("block", 0), more.get("age", -1.0), more.get("staleness", -1)
        number = self.fields.index(fields)
        self.events.append(
            (BOOTED + self.now, BOOTED + since, kind, more.get("flags", 0), 0, worker.lane, 1, number, rows, 0,
             rows * 4096, block, age, staleness)
        )  # fmt: skip

    def begin(self, worker: Worker) -> None:
        """Claim a batch, or begin to make one."""
        stage = worker.stage
        if not worker.alive:
            return
        if stage.pause[0] <= self.now < stage.pause[1]:
            self.at(stage.pause[1], lambda: self.begin(worker))
        elif not stage.takes:
            self.at(self.now + self.duration(worker), lambda: self.offer(worker))
        else:
            self.waiting[stage.name].append((worker, self.now))
            self.deal(stage)
            if stage.timeout < math.inf and (worker, self.now) in self.waiting[stage.name]:
                since = self.now
                self.at(self.now + stage.timeout, lambda: self.time_out(worker, since))

    def time_out(self, worker: Worker, since: float) -> None:
        waiting = self.waiting[worker.stage.name]
        if (worker, since) in waiting:
            waiting.remove((worker, since))
            self.write(EventKind.WAIT, worker, since, worker.stage.takes, worker.stage.batch, flags=TIMED_OUT)
            self.at(self.now + 0.001, lambda: self.begin(worker))

    def duration(self, worker: Worker) -> float:
        stage = worker.stage
        if self.now >= stage.hangs:
            return 1e9
        jitter = 1 + stage.spread * (2 * self.random.random() - 1)
        return stage.seconds * jitter * stage.slow.get(worker.rank, 1.0)

    def deal(self, stage: Stage) -> None:
        ready, waiting = self.ready[stage.name], self.waiting[stage.name]
        while waiting and len(ready) >= stage.batch:
            worker, since = waiting.popleft()
            rows = [ready.popleft() for _ in range(stage.batch)]
            self.consumed[stage.name] += len(rows)
            if since < self.now:
                self.write(EventKind.WAIT, worker, since, stage.takes, len(rows))
            when, block = self.ready_at[stage.name, rows[0]]
            age, old = self.now - when, self.version - self.made_with[rows[0]]
            self.write(EventKind.CLAIM, worker, since, stage.takes, len(rows), block=block, age=age, staleness=old)
            self.at(self.now + self.duration(worker), lambda worker=worker, rows=rows: self.finish(worker, rows))

    def finish(self, worker: Worker, rows: list[int]) -> None:
        if not worker.alive:
            return
        if worker.stage.puts:
            self.put(worker, rows, self.now)
        else:
            self.live -= len(rows)
            self.trained += len(rows)
            self.write(EventKind.ACK, worker, self.now, (), len(rows))
            self.admit_held()
            while self.trained >= (self.version + 1) * self.scenario.step:
                self.version += 1
                self.write(EventKind.POLICY, worker, self.now, (), self.version)
                self.admit_held()
        self.begin(worker)

    def offer(self, worker: Worker) -> None:
        """Put new rows, or wait until they are admitted."""
        if worker.alive:
            self.held.append((worker, self.now))
            self.admit_held()

    def admitted(self, rows: int) -> bool:
        scenario = self.scenario
        if scenario.capacity is not None and self.live + rows > scenario.capacity:
            return False
        if scenario.demand is not None and self.live + rows > scenario.demand:
            return False
        return scenario.staleness is None or self.rows + rows <= self.limit()

    def limit(self) -> int:
        return (self.version + 1 + self.scenario.staleness) * self.scenario.step

    def admit_held(self) -> None:
        while self.held and self.admitted(self.held[0][0].stage.batch):
            worker, since = self.held.popleft()
            batch = worker.stage.batch
            if since < self.now:
                self.write(EventKind.HOLD, worker, since, (), batch, flags=DEMAND if self.scenario.demand else 0)
            rows = list(range(self.rows, self.rows + batch))
            self.rows += batch
            self.live += batch
            for row in rows:
                self.has[row] = set()
                self.made_with[row] = self.version
            self.put(worker, rows, since)
            self.begin(worker)

    def put(self, worker: Worker, rows: list[int], since: float) -> None:
        self.block += 1
        self.write(EventKind.PUT, worker, since, worker.stage.puts, len(rows), block=self.block)
        for field in worker.stage.puts:
            self.produced[field] = self.produced.get(field, 0) + len(rows)
        for row in rows:
            self.has[row].update(worker.stage.puts)
        for stage in self.scenario.stages:
            if set(stage.takes) & set(worker.stage.puts):
                for row in rows:
                    if self.has[row] >= set(stage.takes):
                        self.ready[stage.name].append(row)
                        self.ready_at[stage.name, row] = self.now, self.block
                self.deal(stage)

    def end(self, worker: Worker, flags: int = 0) -> None:
        worker.alive = False
        name = worker.stage.name
        self.waiting[name] = deque(each for each in self.waiting[name] if each[0] is not worker)
        self.held = deque(each for each in self.held if each[0] is not worker)
        self.write(EventKind.GONE, worker, self.now, (), 0, flags=flags)
        if not flags:
            self.gone[worker.client] = BOOTED + self.now

    def lanes(self) -> list[Lane]:
        return [
            Lane(
                each.lane, each.client, each.stage.name, each.rank if each.stage.known else -1, "node", 100 + each.lane
            )
            for each in self.workers
        ]

    def reply(self, position: int = 0, size: int = 1 << 30) -> TimelineReply:
        """Return the reply to a reader that has read this many events."""
        chosen = self.events[position : position + size]
        end = position + len(chosen)
        open_ = []
        for name, waiting in self.waiting.items():
            stage = next(each for each in self.scenario.stages if each.name == name)
            takes = list(stage.takes)
            open_ += [OpenWait(w.lane, BOOTED + since, PARTITION, takes, stage.batch) for w, since in waiting]
        demand = self.scenario.demand is not None
        open_ += [
            OpenWait(w.lane, BOOTED + since, PARTITION, [], w.stage.batch, holds=True, demand=demand)
            for w, since in self.held
        ]
        caught_up = end == len(self.events)
        return TimelineReply(
            "boot", BOOTED + self.now, WALL, end, len(self.events), 0, np.array(chosen, EVENT).tobytes(),
            self.lanes() if position == 0 else [], {1: PARTITION} if position == 0 else {},
            {at: list(names) for at, names in enumerate(self.fields)} if position == 0 else {},
            open_ if caught_up else [],
            [w.client for w in self.workers if w.alive] if caught_up else [],
            self.gone if caught_up else {},
        )  # fmt: skip

    def recording(self, seconds: float = 300.0) -> Recording:
        made = Recording(seconds)
        made.add(self.reply())
        return made

    def status(self) -> SystemStatus:
        fields = [FieldProgress(name, rows, "tensor", rows) for name, rows in self.produced.items()]
        tasks = [
            TaskProgress(stage.name, self.consumed[stage.name], len(self.waiting[stage.name]), 0.0)
            for stage in self.scenario.stages
            if stage.takes
        ]
        policy = None
        if self.scenario.staleness is not None:
            policy = PolicyProgress(self.version, self.rows, self.limit())
        partition = PartitionProgress(
            PARTITION, self.rows, 0, False, None, 0, fields, tasks, policy=policy, waiting_puts=len(self.held)
        )
        return SystemStatus([partition], {})


def simulate(scenario: Scenario, seed: int, until: float) -> tuple[Recording, SystemStatus]:
    pipeline = Pipeline(scenario, seed).run(until)
    return pipeline.recording(), pipeline.status()
