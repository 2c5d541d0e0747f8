"""The account of time: for each task its shares of waiting and work, its rates, its queue, and what it waited for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.events import AHEAD, TIMED_OUT, EventKind
from transfer_queue.timeline.recording import Recording
from transfer_queue.timeline.spans import Spans, SpanState, Workers, find_workers, measure_spans

SAME_TIME = 1e-6  # two events of one moment of the controller's loop differ by less, in seconds


@dataclass(frozen=True)
class TaskAccount:
    """One task in a window."""

    name: str
    """The name of the task; "" for clients that have no task."""
    workers: np.ndarray
    """The positions of its workers in `Workers`."""
    alive: int
    """The number of workers that are connected."""
    gone: int
    """The number of workers that were connected and are not, and that nothing replaces."""
    gone_since: float | None
    """When the last one of them ended, in Unix seconds; None if none did, or before the recording began."""
    waits: float
    """The share of the time of its connected workers for which they wait."""
    held: float
    """The share for which a put or reservation of theirs waits."""
    works: float
    """The share between the answer of a claim and the next claim."""
    idle: float
    """The share of the rest."""
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
    ages: tuple[float, float]
    """The median and the longest time for which claimed rows were ready before, in seconds; -1 if not known."""
    staleness: tuple[float, int]
    """The mean and the largest staleness of claimed rows in policy versions; -1 if not known."""

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
    bytes: float
    """Bytes per second, of all fields that are put together with this one."""


@dataclass(frozen=True)
class Account:
    """The account of time of all tasks in a window."""

    recording: Recording
    """What it is made of."""
    spans: Spans
    """What each worker did."""
    tasks: dict[str, TaskAccount]
    """The tasks by name."""
    missing: dict[str, dict[tuple[str, str | None], float]]
    """Task -> (field, task that puts it) -> the seconds for which it waited for this. The putting task is None if
    nobody puts the field; the field is "" if it is not known."""
    ended_by: dict[str, dict[int, float]]
    """Task -> worker -> the seconds of waiting that puts of this worker ended."""
    flows: list[FieldFlow]
    """Who puts which field at what rate."""
    policy_tasks: frozenset[str] = frozenset()
    """The tasks that set the policy version."""
    hold_causes: dict[str, str] = field(default_factory=dict)
    """Task that is held -> "policy" or "capacity"."""

    def producers_of(self, name: str) -> dict[str, float]:
        """Return the tasks that put a field, each with rows per second; 0 for one that puts it no longer."""
        found = {flow.task: flow.rows for flow in self.flows if flow.field == name}
        for task in self.recording.producers.get(name, {}):
            found.setdefault(task, 0.0)
        for account in self.tasks.values():
            if name in account.puts:
                found.setdefault(account.name, 0.0)
        return found


def make_account(recording: Recording, status: SystemStatus | None, start: float, end: float) -> Account:
    """Return the account of time between two moments in Unix seconds.

    Args:
        recording: The events.
        status: The progress of the partitions, of which the queues and missing fields are taken; None if not known.
        start: When the window begins.
        end: When the window ends.
    """
    workers = find_workers(recording)
    spans = measure_spans(recording, start, end, workers)
    tables = _Tables(recording, workers, start, max(end - start, 1e-9))
    missing, ended_by = tables.ended_waits()
    tables.add_open_waits(missing, status, start)
    accounts = _task_accounts(tables, spans, status)
    policy = {tables.task_name(number) for number in np.unique(tables.task[tables.of_kind(EventKind.POLICY)]).tolist()}
    return Account(
        recording, spans, accounts, missing, ended_by, tables.flows(), frozenset(policy), tables.hold_causes(status)
    )


def claim_steps(recording: Recording, workers: Workers, share: float = 0.5) -> dict[str, float]:
    """Return a quantile of the times between two claims of a worker, for each task, in seconds."""
    events = recording.events
    claims = events[events["kind"] == EventKind.CLAIM][-(1 << 16) :]
    worker = workers.of_lane[claims["lane"]]
    order = np.argsort(worker, kind="stable")
    worker, time = worker[order], claims["time"][order]
    follows = (worker[1:] == worker[:-1]) & (worker[1:] >= 0) & (time[1:] > time[:-1])
    steps, task = (time[1:] - time[:-1])[follows], workers.task[worker[1:][follows]]
    return {workers.tasks[n]: float(np.quantile(steps[task == n], share)) for n in np.unique(task).tolist()}


class _Tables:
    """The events of a window, with the task and worker of each."""

    def __init__(self, recording: Recording, workers: Workers, start: float, seconds: float) -> None:
        self.recording = recording
        self.workers = workers
        self.start = start
        self.seconds = seconds
        first = int(np.searchsorted(recording.events["time"], start))
        self.events = recording.events[first:]
        self.worker = workers.of_lane[self.events["lane"]]
        task_of = np.append(workers.task, -1)  # the worker -1 has no task
        self.task = task_of[self.worker]

    def task_name(self, number: int) -> str:
        return self.workers.tasks[number] if number >= 0 else ""

    def of_kind(self, kind: EventKind) -> np.ndarray:
        return self.events["kind"] == kind

    def sums(self, kind: EventKind, column: np.ndarray, weights: np.ndarray) -> list[tuple[str, int, float, int]]:
        """Return the sum of the weights for each task and value of the column, as (task, value, sum, count)."""
        chosen = self.of_kind(kind)
        cells = (self.task[chosen] + 1) << 32 | column[chosen].astype(np.int64)
        found, which, count = np.unique(cells, return_inverse=True, return_counts=True)
        total = np.bincount(which, weights[chosen].astype(np.float64), minlength=len(found))
        rows = zip(found.tolist(), total.tolist(), count.tolist())
        return [(self.task_name((cell >> 32) - 1), cell & 0xFFFFFFFF, value, many) for cell, value, many in rows]

    def flows(self) -> list[FieldFlow]:
        """Return who puts which field at what rate."""
        rows: dict[tuple[str, str], float] = defaultdict(float)
        nbytes: dict[tuple[str, str], float] = defaultdict(float)
        for into, name in ((rows, "rows"), (nbytes, "bytes")):
            for task, at, value, _ in self.sums(EventKind.PUT, self.events["fields"], self.events[name]):
                for each in self.recording.fields[at]:
                    into[each, task] += value / self.seconds
        return [FieldFlow(each, task, rate, nbytes[each, task]) for (each, task), rate in sorted(rows.items())]

    def takes(self) -> dict[str, tuple[str, ...]]:
        """Return the fields that the claims of each task name, from the whole recording."""
        events, lanes = self.recording.events, self.recording.lanes
        kinds = np.isin(events["kind"], (EventKind.CLAIM, EventKind.WAIT, EventKind.END))
        pairs = _unique_pairs(self._task_of(events[kinds]), events["fields"][kinds])
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for number, at in pairs:
            found[self.task_name(number)].update(dict.fromkeys(self.recording.fields[at]))
        for wait in self.recording.open:
            if not wait.holds:
                found[lanes[wait.lane].task].update(dict.fromkeys(wait.fields))
        return {task: tuple(fields) for task, fields in found.items()}

    def puts(self) -> dict[str, tuple[str, ...]]:
        """Return the fields that each task has put, from the whole recording and before."""
        events = self.recording.events
        put = events["kind"] == EventKind.PUT
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for number, at in _unique_pairs(self._task_of(events[put]), events["fields"][put]):
            found[self.task_name(number)].update(dict.fromkeys(self.recording.fields[at]))
        for name, tasks in self.recording.producers.items():
            for task in tasks:
                found[task][name] = None
        return {task: tuple(fields) for task, fields in found.items()}

    def _task_of(self, events: np.ndarray) -> np.ndarray:
        task_of = np.append(self.workers.task, -1)
        of_events: np.ndarray = task_of[self.workers.of_lane[events["lane"]]]
        return of_events

    def ended_waits(self) -> tuple[dict[str, dict[tuple[str, str | None], float]], dict[str, dict[int, float]]]:
        """Return for what each task waited, and whose puts ended it (`Account.missing`, `Account.ended_by`)."""
        waits = np.flatnonzero(self.of_kind(EventKind.WAIT) & (self.events["flags"] & (AHEAD | TIMED_OUT) == 0))
        ending = self._before(waits, EventKind.PUT)
        seconds = self.events["time"][waits] - np.maximum(self.events["since"][waits], self.start)
        by = np.where(ending >= 0, self.worker[ending], -1)
        wanted = self.events["fields"][waits].astype(np.int64)
        given = np.where(ending >= 0, self.events["fields"][ending], 0).astype(np.int64)
        pairs, pair = np.unique(wanted << 32 | given, return_inverse=True)
        demand = Counter(name for fields in self.takes().values() for name in fields)
        names = [self._common_field(cell >> 32, cell & 0xFFFFFFFF, demand) for cell in pairs.tolist()]
        missing: dict[str, dict[tuple[str, str | None], float]] = defaultdict(lambda: defaultdict(float))
        ended_by: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        producers = np.append(self.workers.task, -1)[by]
        for (task, at, producer), total in _totals(seconds, self.task[waits], pair, producers):
            name = names[at]
            missing[self.task_name(task)][name, self.task_name(producer) if name else None] += total
        for (task, worker), total in _totals(seconds, self.task[waits], by):
            ended_by[self.task_name(task)][worker] += total
        return missing, ended_by

    def _before(self, at: np.ndarray, *kinds: EventKind) -> np.ndarray:
        """Return the last event of these kinds before each event, of the same moment and partition; -1 if none."""
        wanted = np.isin(self.events["kind"], kinds)
        wanted[at] = True
        among = np.flatnonzero(wanted)
        among = among[np.argsort(self.events["partition"][among], kind="stable")]
        is_cause = np.isin(self.events["kind"][among], kinds)
        order = np.arange(len(among))
        last = np.maximum.accumulate(np.where(is_cause, order, -1)) if len(among) else order
        cause = np.full(len(self.events), -1, np.int64)
        cause[among] = np.where(last >= 0, among[last], -1)
        found = cause[at]
        same = self.events["partition"][found] == self.events["partition"][at]
        same &= self.events["time"][at] - self.events["time"][found] <= SAME_TIME
        return np.where((found >= 0) & same, found, -1)

    def _common_field(self, wanted: int, given: int, demand: Counter[str]) -> str:
        """Return the field of a put that a claim waited for; of several, the one that most tasks take."""
        fields = self.recording.fields[given]
        common = [name for name in self.recording.fields[wanted] if name in fields]
        return max(common, key=lambda name: demand[name], default="")

    def add_open_waits(
        self,
        missing: dict[str, dict[tuple[str, str | None], float]],
        status: SystemStatus | None,
        start: float,
    ) -> None:
        """Add the waits that have not ended. What they wait for is the field with the fewest rows."""
        open_ = [each for each in self.recording.open if not each.holds and not each.ahead and each.lane > 0]
        produced = _produced(status)
        wanted_by: dict[str, set[str]] = defaultdict(set)
        seconds: dict[tuple[str, str, tuple[str, ...]], float] = defaultdict(float)
        for wait in open_:
            task = self.recording.lanes[wait.lane].task
            seconds[task, wait.partition, tuple(wait.fields)] += max(self.recording.now - max(wait.since, start), 0.0)
            for name in wait.fields:
                wanted_by[name].add(task)
        puts = self.puts()
        latest = self._latest_producers()
        for (task, partition, fields), total in seconds.items():
            rows = produced.get(partition, {})
            # Where several fields have equally many rows, the one that most tasks wait for is made first.
            name = min(fields, key=lambda each: (rows.get(each, 0), -len(wanted_by[each])), default="")
            makers = [each for each in puts if name in puts[each] and each != task]
            producer = max(makers, key=lambda each: latest.get((each, name), 0.0), default=None)
            missing[task][name, producer] += total

    def _latest_producers(self) -> dict[tuple[str, str], float]:
        """Return the rows that each task put of each field in the window."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for task, at, value, _ in self.sums(EventKind.PUT, self.events["fields"], self.events["rows"]):
            for name in self.recording.fields[at]:
                found[task, name] += value
        return found

    def hold_causes(self, status: SystemStatus | None) -> dict[str, str]:
        """Return for each task that was held whether the policy version or the capacity held it for longer."""
        holds = np.flatnonzero(self.of_kind(EventKind.HOLD))
        ending = self._before(holds, EventKind.POLICY)
        seconds = self.events["time"][holds] - self.events["since"][holds]
        total: dict[tuple[str, bool], float] = defaultdict(float)
        for (task, policy), value in _totals(seconds, self.task[holds], (ending >= 0).astype(np.int64)):
            total[self.task_name(task), bool(policy)] += value
        full = _partitions_at_limit(status)
        for wait in self.recording.open:
            if wait.holds and wait.lane > 0:
                policy = full.get(wait.partition, -1) >= 0 and wait.rows > full[wait.partition]
                total[self.recording.lanes[wait.lane].task, policy] += self.recording.now - wait.since
        tasks = {task for task, _ in total}
        return {task: "policy" if total[task, True] > total[task, False] else "capacity" for task in tasks}

    def medians(self, column: str) -> dict[str, tuple[float, float, float]]:
        """Return the median, the mean and the largest value of a column of the claims, by task; -1 if not known."""
        chosen = self.of_kind(EventKind.CLAIM) & (self.events[column] >= 0)
        task, values = self.task[chosen], self.events[column][chosen]
        found = {}
        for number in np.unique(task).tolist():
            mine = values[task == number]
            found[self.task_name(number)] = float(np.median(mine)), float(mine.mean()), float(mine.max())
        return found


def _unique_pairs(task: np.ndarray, at: np.ndarray) -> list[tuple[int, int]]:
    cells = np.unique((task.astype(np.int64) + 1) << 32 | at)
    return [((cell >> 32) - 1, cell & 0xFFFFFFFF) for cell in cells.tolist()]


def _totals(seconds: np.ndarray, *keys: np.ndarray) -> Iterable[tuple[tuple[int, ...], float]]:
    """Return the sum of the seconds for each combination of keys, which are numbers from -1 on."""
    if not len(seconds):
        return []
    cells, sizes = np.zeros(len(seconds), np.int64), []
    for key in keys:
        sizes.append(int(key.max()) + 2)
        cells = cells * sizes[-1] + key + 1
    found, which = np.unique(cells, return_inverse=True)
    total = np.bincount(which, np.maximum(seconds, 0.0))
    parts = []
    for size in reversed(sizes):
        parts.append((found % size - 1).tolist())
        found = found // size
    return list(zip(zip(*reversed(parts)), total.tolist()))


def _produced(status: SystemStatus | None) -> dict[str, dict[str, int]]:
    partitions = [] if status is None else status.partitions
    return {each.name: {part.name: part.produced for part in each.fields} for each in partitions}


def _partitions_at_limit(status: SystemStatus | None) -> dict[str, int]:
    """Return how many rows each partition admits at its policy version, for those that have a limit."""
    limits = {}
    for each in [] if status is None else status.partitions:
        if each.policy is not None and each.policy.limit is not None:
            limits[each.name] = max(each.policy.limit - each.policy.admitted, 0)
    return limits


def _queue_rows(status: SystemStatus | None, task: str, takes: tuple[str, ...]) -> int:
    """Return the rows that are ready for a task and that it has not claimed."""
    total = 0
    for each in [] if status is None or not takes else status.partitions:
        progress = next((part for part in each.tasks if part.name == task), None)
        produced = {part.name: part.produced for part in each.fields}
        if progress is not None:
            ready = min(produced.get(name, 0) for name in takes)
            passed = sum(each.passed.get(task, {}).values())
            total += max(ready - progress.consumed - progress.claimed - passed, 0)
    return total


def _task_accounts(tables: _Tables, spans: Spans, status: SystemStatus | None) -> dict[str, TaskAccount]:
    workers, seconds = tables.workers, spans.seconds()
    takes, puts, flows = tables.takes(), tables.puts(), tables.flows()
    steps = claim_steps(tables.recording, workers)
    ages, staleness = tables.medians("age"), tables.medians("staleness")
    claimed: dict[str, float] = defaultdict(float)
    for task, _, value, _ in tables.sums(EventKind.CLAIM, tables.events["partition"], tables.events["rows"]):
        claimed[task] += value / tables.seconds
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for flow in flows:
        rates[flow.field][flow.task] = flow.rows
    attendance = _Attendance(tables.recording, spans)
    found = {}
    for number, name in enumerate(workers.tasks):
        mine = np.flatnonzero(workers.task == number)
        total = seconds[mine].sum(axis=0)
        alive = max(float(total[SpanState.IDLE : SpanState.GONE].sum()), 1e-300)
        share = {state: float(total[state]) / alive for state in SpanState}
        arrivals = [rate for each in takes.get(name, ()) if (rate := sum(rates[each].values())) > 0]
        mid_age, stale = ages.get(name, (-1.0,) * 3), staleness.get(name, (-1.0,) * 3)
        found[name] = TaskAccount(
            name, mine, *attendance.of(mine),
            share[SpanState.WAITS], share[SpanState.HELD], share[SpanState.WORKS], share[SpanState.IDLE],
            takes.get(name, ()), puts.get(name, ()), claimed[name],
            max((rates[each].get(name, 0.0) for each in puts.get(name, ())), default=0.0),
            min(arrivals, default=0.0), _queue_rows(status, name, takes.get(name, ())), steps.get(name, 0.0),
            (mid_age[0], mid_age[2]), (stale[1], int(stale[2])),
        )  # fmt: skip
    return found


class _Attendance:
    """Which workers are connected, and which are gone."""

    def __init__(self, recording: Recording, spans: Spans) -> None:
        workers, events = spans.workers, recording.events
        last = spans.end >= spans.line.end - SAME_TIME
        self.gone = np.zeros(len(workers), bool)
        """The workers whose connection has ended before the end of their partition."""
        self.gone[spans.worker[last & (spans.state == SpanState.GONE)]] = True
        there = np.zeros(len(workers), bool)
        there[spans.worker[last]] = True
        self.ranks = workers.rank
        self.alive = there & ~self.gone
        """The workers that are connected."""
        if recording.connected:
            self.alive = np.zeros(len(workers), bool)
            lanes = [lane.client in recording.connected for lane in recording.lanes]
            self.alive[workers.of_lane[np.array(lanes, bool) & (workers.of_lane >= 0)]] = True
        # A rank without an event that is kept, and without a connection, ended before the recording began.
        self.lost = ~there & ~self.alive & bool(recording.connected)
        self.left = np.full(len(workers), np.nan)
        self.first = np.full(len(workers), np.inf)
        worker = workers.of_lane[events["lane"]]
        known = worker >= 0
        np.minimum.at(self.first, worker[known], events["since"][known])
        ends = known & (events["kind"] == EventKind.GONE)
        self.left[worker[ends]] = events["time"][ends]

    def of(self, mine: np.ndarray) -> tuple[int, int, float | None]:
        """Return how many workers are connected, how many are gone, and when the last of the latter ended."""
        alive, gone, lost = int(self.alive[mine].sum()), mine[self.gone[mine]], mine[self.lost[mine]]
        lost = lost[self.ranks[lost] >= 0] if alive or len(gone) else lost
        count = len(gone)
        if count and (self.ranks[gone] < 0).all():
            count = min(count, max(self._most(mine) - alive, 0))  # clients without a rank replace each other
        since = float(self.left[gone].max()) if count else np.nan
        return alive, count + len(lost), since if np.isfinite(since) else None

    def _most(self, mine: np.ndarray) -> int:
        """Return how many of these workers were connected at most at one time."""
        mine = mine[np.isfinite(self.first[mine])]
        ends = np.where(self.gone[mine], self.left[mine], np.inf)
        times = np.concatenate([ends, self.first[mine]])
        steps = np.repeat([-1, 1], len(mine))
        return int(np.cumsum(steps[np.lexsort((steps, times))]).max(initial=0))
