"""The account of time: for each task its shares of waiting and work, its rates, its queue, and what it waited for."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from transfer_queue.messages.reports.progress import PartitionProgress
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.event_table import EventTable, KindColumns, quantile, sum_by
from transfer_queue.timeline.events import AHEAD, DEMAND, TIMED_OUT, EventKind
from transfer_queue.timeline.spans import SAME_TIME, SpanState, WorkerSpans, measure_spans

HOLD_CAUSES = ("capacity", "policy", "demand")
MAX_CAUSES = 16


@dataclass(frozen=True)
class TaskAccount:
    """One task in a window."""

    name: str
    """The name of the task; "" for clients that have no task."""
    workers: np.ndarray
    """The positions of its workers in `TaskWorkers`."""
    alive: int
    """The number of workers that are connected."""
    lost_workers: np.ndarray
    """The positions of the workers whose connection has ended, that did not close, and that were not replaced."""
    lost_since: float | None
    """When the last one of them ended, in Unix seconds; None if none did."""
    waits: float
    """The share of the time of its connected workers for which they wait."""
    held: float
    """The share for which a put or reservation of theirs waits."""
    works: float
    """The share between the answer of a claim and the next claim."""
    idle: float
    """The share of the remaining time."""
    takes: tuple[str, ...]
    """The fields that its claims name."""
    puts: tuple[str, ...]
    """The fields that it puts."""
    claim_rate: float
    """The rows that it claims, in rows per second."""
    put_rate: float
    """The rows that it puts, in rows per second."""
    arrival_rate: float
    """The rows that become ready for it, in rows per second."""
    queue_rows: int
    """The rows that are ready for it and not claimed."""
    step: float
    """The median time between two claims of a worker, in seconds; 0 if it is not known."""
    closed: int = 0
    """The number of workers that have closed in order."""

    @property
    def lost(self) -> int:
        """The number of workers that are gone."""
        return len(self.lost_workers)

    @property
    def busy(self) -> float:
        """The share for which it works. A task that only puts works whenever it does not wait."""
        return self.works if self.takes else self.works + self.idle

    @property
    def queue_growth(self) -> float:
        """The rows by which its queue grows, in rows per second."""
        return self.arrival_rate - self.claim_rate


@dataclass(frozen=True)
class FieldFlow:
    """What one task puts of one field."""

    field: str
    """The name of the field."""
    task: str
    """The task that puts it."""
    rows: float
    """Rows per second."""


@dataclass(frozen=True)
class Spread:
    """Values of many claims."""

    median: float
    """The median."""
    mean: float
    """The mean."""
    largest: float
    """The largest value."""


@dataclass(frozen=True)
class Account:
    """The account of time of all tasks in a window."""

    table: EventTable
    """The events from which it was computed."""
    spans: WorkerSpans
    """What each worker did."""
    tasks: dict[str, TaskAccount]
    """The tasks by name."""
    missing: dict[str, dict[tuple[str, str | None], float]]
    """Task -> (field, task that puts it) -> the seconds for which it waited for this. The putting task is None if
    no task puts the field; the field is "" if it is not known."""
    ended_by: dict[str, dict[int, float]]
    """Task -> worker -> the seconds of waiting that puts of this worker ended."""
    flows: list[FieldFlow]
    """Which task puts which field at what rate."""
    policy_tasks: frozenset[str] = frozenset()
    """The tasks that set the policy version."""
    hold_causes: dict[str, str] = field(default_factory=dict)
    """Task that is held -> "policy", "capacity" or "demand"."""

    @cached_property
    def ages(self) -> dict[str, Spread]:
        """For how many seconds claimed rows were ready before, by task, where this is known."""
        return self._spreads("age")

    @cached_property
    def staleness(self) -> dict[str, Spread]:
        """By how many policy versions claimed rows were old, by task, where this is known."""
        return self._spreads("staleness")

    def _spreads(self, column: str) -> dict[str, Spread]:
        claims = self.table.of(EventKind.CLAIM)
        first = claims.first_after(self.spans.line.start)
        values, task = claims.column(column)[first:], claims.task[first:]
        known = (values >= 0) & (task >= 0)
        values, task = values[known], task[known]
        spreads = {}
        for number in np.flatnonzero(np.bincount(task)).tolist():
            part = values[task == number]
            spreads[self.table.task_name(number)] = Spread(quantile(part, 0.5), float(part.mean()), float(part.max()))
        return spreads

    def rows_of(self, kind: EventKind) -> np.ndarray:
        """Return the rows of the events of one kind in the window, for each worker."""
        events = self.table.of(kind)
        first = events.first_after(self.spans.line.start)
        worker = events.worker[first:] + 1
        return np.bincount(worker, events.rows[first:], minlength=len(self.table.workers) + 1)[1:]

    def usual_rows(self, kind: EventKind, task: str) -> float:
        """Return the median of the rows of the events of one kind of a task; 1 without such events."""
        events = self.table.of(kind)
        rows = events.rows[events.task == self.table.workers.tasks.index(task)]
        return max(quantile(rows, 0.5), 1.0) if len(rows) else 1.0

    def producers_of(self, name: str) -> dict[str, float]:
        """Return the tasks that put a field, each with rows per second; 0 for one that puts it no longer."""
        rates = {flow.task: flow.rows for flow in self.flows if flow.field == name}
        for task in self.table.recording.producers.get(name, {}):
            rates.setdefault(task, 0.0)
        for account in self.tasks.values():
            if name in account.puts:
                rates.setdefault(account.name, 0.0)
        return rates


def make_account(table: EventTable, status: SystemStatus | None, start: float, end: float) -> Account:
    """Return the account of time between two moments in Unix seconds.

    Args:
        table: The events.
        status: The progress of the partitions, of which the queues and missing fields are taken; None if not known.
        start: When the window begins.
        end: When the window ends.
    """
    spans = measure_spans(table, start, end)
    window = _Window(table, [] if status is None else status.partitions, start, max(end - start, 1e-9))
    missing, ended_by = window.ended_waits()
    window.add_pending_waits(missing)
    accounts = _task_accounts(window, spans)
    setters = table.of(EventKind.POLICY)
    policy = {table.task_name(number) for number in np.unique(setters.task[setters.first_after(start) :]).tolist()}
    return Account(table, spans, accounts, missing, ended_by, window.flows, frozenset(policy), window.hold_causes())


Missing = dict[str, dict[tuple[str, str | None], float]]
Produced = dict[str, dict[str, int]]
"""Partition -> field -> the number of rows that have it."""


class _Window:
    """Sums over the events of a window."""

    def __init__(self, table: EventTable, partitions: list[PartitionProgress], start: float, seconds: float) -> None:
        self.table = table
        self.partitions = partitions
        self.produced: Produced = {
            partition.name: {each.name: each.produced for each in partition.fields} for partition in partitions
        }
        self.recording = table.recording
        self.start = start
        self.seconds = seconds

    @cached_property
    def flows(self) -> list[FieldFlow]:
        """Which task puts which field at what rate."""
        puts = self.table.of(EventKind.PUT)
        first = puts.first_after(self.start)
        rows: dict[tuple[str, str], float] = defaultdict(float)
        for (number, at), total in sum_by(puts.rows[first:], puts.task[first:], puts.fields[first:]):
            for each in self.recording.fields[at]:
                rows[each, self.table.task_name(number)] += total / self.seconds
        return [FieldFlow(each, task, rate) for (each, task), rate in sorted(rows.items())]

    def claimed(self) -> dict[str, float]:
        """Return the rows per second that each task claims."""
        claims = self.table.of(EventKind.CLAIM)
        first = claims.first_after(self.start)
        sums = sum_by(claims.rows[first:], claims.task[first:])
        return {self.table.task_name(number): total / self.seconds for (number,), total in sums}

    def ended_waits(self) -> tuple[Missing, dict[str, dict[int, float]]]:
        """Return what each task waited for, and whose puts ended the wait (`Account.missing`, `Account.ended_by`)."""
        waits, puts, table = self.table.of(EventKind.WAIT), self.table.of(EventKind.PUT), self.table
        chosen = np.flatnonzero(waits.flags & (AHEAD | TIMED_OUT) == 0)
        chosen = chosen[np.searchsorted(chosen, waits.first_after(self.start)) :]
        ending = self._before(waits, chosen, puts)
        seconds = waits.time[chosen] - np.maximum(waits.since[chosen], self.start)
        seconds = np.maximum(seconds, 0.0)
        given, by, producer = (
            _take(puts.fields, ending, 0),
            _take(puts.worker, ending, -1),
            _take(puts.task, ending, -1),
        )
        task = waits.task[chosen]
        demand = Counter(name for fields in self.table.takes.values() for name in fields)
        missing: Missing = defaultdict(lambda: defaultdict(float))
        for (number, wanted, put, maker), total in sum_by(seconds, task, waits.fields[chosen], given, producer):
            name = self._common_field(wanted, put, demand)
            missing[table.task_name(number)][name, table.task_name(maker) if name else None] += total
        ended_by: dict[str, dict[int, float]] = defaultdict(dict)
        for (number, worker), total in sum_by(seconds, task, by):
            ended_by[table.task_name(number)][worker] = total
        return missing, ended_by

    def _before(self, ended: KindColumns, chosen: np.ndarray, causes: KindColumns) -> np.ndarray:
        """Return for each event its cause: the last one before it of the same moment and partition; -1 without one."""
        last = np.searchsorted(causes.position, ended.position[chosen]) - 1
        time, partition = ended.time[chosen], ended.partition[chosen]
        before = np.full(len(chosen), -1, np.int64)
        # Causes of other partitions may lie between, but they are few: most often there is one cause in a moment.
        for _ in range(MAX_CAUSES):
            among = last >= 0
            among &= time - _take(causes.time, last, 0) <= SAME_TIME
            same = among & (_take(causes.partition, last, 0) == partition)
            before = np.where((before < 0) & same, last, before)
            last = np.where(among & ~same & (before < 0), last - 1, -1)
            if not (last >= 0).any():
                break
        return before

    def _common_field(self, wanted: int, given: int, demand: Counter[str]) -> str:
        """Return the field of a put that a claim waited for; of several, the one that most tasks take."""
        fields = self.recording.fields[given]
        common = [name for name in self.recording.fields[wanted] if name in fields]
        return max(common, key=lambda name: demand[name], default="")

    def add_pending_waits(self, missing: Missing) -> None:
        """Add the waits that have not ended, or got nothing. What they wait for is the field with the fewest rows."""
        wanted_by: dict[str, set[str]] = defaultdict(set)
        seconds: dict[tuple[str, str, tuple[str, ...]], float] = defaultdict(float)
        for wait, total in self._pending_waits():
            seconds[wait] += total
            task, _, fields = wait
            for name in fields:
                wanted_by[name].add(task)
        rates = {(flow.task, flow.field): flow.rows for flow in self.flows}
        put = {flow.field: flow.rows * self.seconds for flow in self.flows}
        for (task, partition, fields), total in seconds.items():
            produced = self.produced.get(partition, put)
            rows = {name: produced.get(name, 0) for name in fields}
            # If several fields have equally many rows, the one that most tasks wait for is made first.
            name = min(fields, key=lambda each: (rows[each], -len(wanted_by[each])), default="")
            makers = [each for each, fields in self.table.puts.items() if name in fields and each != task]
            producer = max(makers, key=lambda each: rates.get((each, name), 0.0), default=None)
            missing[task][name, producer] += total

    def _pending_waits(self) -> Iterator[tuple[tuple[str, str, tuple[str, ...]], float]]:
        """Return (task, partition, fields) and the seconds of the waits that have not ended, or got nothing."""
        for wait in self.recording.open:
            if not wait.holds and not wait.ahead and wait.lane > 0:
                task, open_for = self.recording.lanes[wait.lane].task, self.recording.now - max(wait.since, self.start)
                yield (task, wait.partition, tuple(wait.fields)), max(open_for, 0.0)
        waits, table = self.table.of(EventKind.WAIT), self.table
        chosen = np.flatnonzero((waits.flags & TIMED_OUT != 0) & (waits.flags & AHEAD == 0) & (waits.task >= 0))
        chosen = chosen[np.searchsorted(chosen, waits.first_after(self.start)) :]
        seconds = np.maximum(waits.time[chosen] - np.maximum(waits.since[chosen], self.start), 0.0)
        columns = waits.task[chosen], waits.partition[chosen], waits.fields[chosen]
        for (number, partition, fields), total in sum_by(seconds, *columns):
            key = table.task_name(number), self.recording.partitions[partition], self.recording.fields[fields]
            yield key, total

    def hold_causes(self) -> dict[str, str]:
        """Return for each task that was held what held it for the longest time."""
        holds, table = self.table.of(EventKind.HOLD), self.table
        chosen = np.arange(holds.first_after(self.start), len(holds))
        policy_set = self._before(holds, chosen, table.of(EventKind.POLICY)) >= 0
        seconds = np.maximum(holds.time[chosen] - holds.since[chosen], 0.0)
        causes = np.where(holds.flags[chosen] & DEMAND != 0, HOLD_CAUSES.index("demand"), policy_set.astype(np.int64))
        total: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(HOLD_CAUSES, 0.0))
        for (number, cause), value in sum_by(seconds, holds.task[chosen], causes):
            total[table.task_name(number)][HOLD_CAUSES[cause]] += value
        left = {
            each.name: max(each.policy.limit - each.policy.admitted, 0)
            for each in self.partitions
            if each.policy is not None and each.policy.limit is not None
        }
        for wait in self.recording.open:
            if wait.holds and wait.lane > 0:
                at_limit = wait.rows > left.get(wait.partition, math.inf)
                name = "demand" if wait.demand else "policy" if at_limit else "capacity"
                total[self.recording.lanes[wait.lane].task][name] += self.recording.now - max(wait.since, self.start)
        return {task: max(seconds, key=lambda cause: seconds[cause]) for task, seconds in total.items()}


def _take(column: np.ndarray, at: np.ndarray, unknown: int) -> np.ndarray:
    """Return the elements of a column at some positions, and another value at the position -1."""
    return np.where(at >= 0, column[at], unknown) if len(column) else np.full(len(at), unknown, column.dtype)


def _queue_rows(partitions: list[PartitionProgress], produced: Produced, task: str, takes: tuple[str, ...]) -> int:
    """Return the rows that are ready for a task and that it has not claimed.

    A partition from which the task has not claimed yet counts if a task claims from it that shares other partitions
    with this one: the task will come to it. Partitions of other pipelines, such as an evaluation, do not count.
    """
    partitions = partitions if takes else []
    own = [{each.name: each for each in partition.tasks} for partition in partitions]
    companions = set().union(*(tasks for tasks in own if task in tasks))
    total = 0
    for partition, tasks in zip(partitions, own):
        progress = tasks.get(task)
        if progress is not None or not companions.isdisjoint(tasks):
            ready = min(produced[partition.name].get(name, 0) for name in takes)
            passed = sum(partition.passed.get(task, {}).values())
            taken = 0 if progress is None else progress.consumed + progress.claimed
            total += max(ready - taken - passed, 0)
    return total


def _task_accounts(window: _Window, spans: WorkerSpans) -> dict[str, TaskAccount]:
    workers, seconds = window.table.workers, spans.seconds
    takes, puts, steps = window.table.takes, window.table.puts, window.table.steps
    flows, claimed = window.flows, window.claimed()
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for flow in flows:
        rates[flow.field][flow.task] = flow.rows
    attendance = _Attendance(window.table, spans)
    accounts = {}
    for number, name in enumerate(workers.tasks):
        positions = np.flatnonzero(workers.task == number)
        total = seconds[positions].sum(axis=0)
        alive = max(float(total[SpanState.IDLE : SpanState.GONE].sum()), 1e-300)
        share = {state: float(total[state]) / alive for state in SpanState}
        arrivals = [rate for each in takes.get(name, ()) if (rate := sum(rates[each].values())) > 0]
        accounts[name] = TaskAccount(
            name, positions, *attendance.of(positions),
            share[SpanState.WAITS], share[SpanState.HELD], share[SpanState.WORKS], share[SpanState.IDLE],
            takes.get(name, ()), puts.get(name, ()), claimed.get(name, 0.0),
            max((rates[each].get(name, 0.0) for each in puts.get(name, ())), default=0.0),
            min(arrivals, default=0.0),
            _queue_rows(window.partitions, window.produced, name, takes.get(name, ())),
            steps.get(name, (0.0, 0.0))[0], int(attendance.closed[positions].sum()),
        )  # fmt: skip
    return accounts


class _Attendance:
    """Which workers are connected, and which are gone."""

    def __init__(self, table: EventTable, spans: WorkerSpans) -> None:
        is_present = _take(spans.state, spans.newest, SpanState.GONE) != SpanState.GONE
        self.alive = table.connected if table.recording.connected else is_present
        """The workers that are connected."""
        self.lost = np.isfinite(table.departed_at) & ~self.alive
        """The workers whose newest client is gone."""
        self.closed = table.closed & ~self.alive
        """The workers that have closed in order."""
        self.ranks = table.workers.rank
        known = np.isfinite(table.first_seen)
        self.first = np.where(known, table.first_seen, -np.inf)
        """When each worker came; minus infinity if that was before the recording."""
        left = np.where(self.lost, table.departed_at, table.last_left)
        self.left = np.where(self.alive, np.inf, np.where(np.isfinite(left), left, np.where(known, np.inf, -np.inf)))
        """When each worker left; infinity if it did not."""

    def of(self, workers: np.ndarray) -> tuple[int, np.ndarray, float | None]:
        """Return how many workers are connected, which are gone, and when the last of the latter ended."""
        alive, missing = int(self.alive[workers].sum()), workers[self.lost[workers]]
        if len(missing) and (self.ranks[missing] < 0).all():  # clients without a rank replace each other
            count = min(len(missing), max(self._most(workers) - alive, 0))
            missing = missing[np.argsort(self.left[missing], kind="stable")][len(missing) - count :]
        return alive, missing, float(self.left[missing].max()) if len(missing) else None

    def _most(self, workers: np.ndarray) -> int:
        """Return how many of these workers were connected at most at one time."""
        times = np.concatenate([self.left[workers], self.first[workers]])
        steps = np.repeat([-1, 1], len(workers))
        return int(np.cumsum(steps[np.lexsort((steps, times))]).max(initial=0))
