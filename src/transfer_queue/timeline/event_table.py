"""The events of a recording by kind, as columns, with the worker and the task of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from transfer_queue.display import list_workers
from transfer_queue.messages.reports.timeline import Lane
from transfer_queue.timeline.events import EVENT, EventKind
from transfer_queue.timeline.recording import Recording

DENSE = 1 << 22  # sums over at most this many cells are computed without sorting


@dataclass(frozen=True)
class TaskWorkers:
    """The ranks of tasks. A client whose rank is not known is a worker of its own."""

    task: np.ndarray
    """The position in `tasks` for each worker."""
    rank: np.ndarray
    """The rank of each worker; -1 if it is not known."""
    lanes: list[Lane]
    """The newest lane of each worker, with its newest client."""
    tasks: list[str]
    """The names of the tasks; "" for clients that have neither claimed nor reported their task."""
    of_lane: np.ndarray
    """The worker of each lane; -1 for the lane that is not known."""

    def __len__(self) -> int:
        return len(self.lanes)

    @cached_property
    def clients(self) -> list[str]:
        """The newest client of each worker."""
        return [lane.client for lane in self.lanes]

    def describe_processes(self, workers: Iterable[int]) -> str:
        """Return which processes some workers are or were, for example "rank 0, pid 17, node-1; rank 1, pid 9, b"."""
        ranked = sorted(workers, key=lambda worker: (self.rank[worker] < 0, int(self.rank[worker])))
        return list_workers(self.lanes[worker].label for worker in ranked)


def find_workers(recording: Recording) -> TaskWorkers:
    """Return the workers that the lanes of a recording belong to."""
    numbers: dict[tuple[str, int, str], int] = {}
    tasks: dict[str, int] = {}
    lanes: list[Lane] = []
    task, rank, of_lane = [], [], [-1]
    for lane in recording.lanes[1:]:
        key = (lane.task, lane.rank, lane.client if lane.rank < 0 else "")
        worker = numbers.setdefault(key, len(numbers))
        of_lane.append(worker)
        if worker == len(lanes):
            task.append(tasks.setdefault(lane.task, len(tasks)))
            rank.append(lane.rank)
            lanes.append(lane)
        lanes[worker] = lane
    numbers_of = [np.array(column, np.int64) for column in (task, rank, of_lane)]
    return TaskWorkers(numbers_of[0], numbers_of[1], lanes, list(tasks), numbers_of[2])


def _column(name: str, kind: type[np.generic] | None = None) -> cached_property[np.ndarray]:
    """Return an attribute of `KindColumns`: a column of `EVENT`, as numbers of another kind if one is given."""
    return cached_property(lambda events: events.column(name).astype(kind or EVENT[name], copy=False))


class KindColumns:
    """The events of one kind, in order. Columns are copied when they are read first."""

    def __init__(self, table: EventTable, kind: EventKind) -> None:
        self._table = table
        self.kind = kind
        """Their kind."""
        self.position = np.flatnonzero(table.kind == kind)
        """The positions of the events in the recording."""

    def __len__(self) -> int:
        return len(self.position)

    def column(self, name: str) -> np.ndarray:
        """Return a column of `EVENT`."""
        column: np.ndarray = self._table.recording.events[name][self.position]
        return column

    time = _column("time")
    """When each event happened."""
    since = _column("since")
    """When each request arrived or was parked."""
    flags = _column("flags")
    """The flags of each event."""
    rows = _column("rows", np.float64)
    """The rows of each event."""
    fields = _column("fields", np.int64)
    """The position of the fields of each event."""
    partition = _column("partition", np.int64)
    """The position of the partition of each event."""
    lane = _column("lane", np.int64)
    """The position of the lane of each event."""

    @cached_property
    def worker(self) -> np.ndarray:
        """The worker of each event; -1 if its lane is not known."""
        worker: np.ndarray = self._table.workers.of_lane[self.lane]
        return worker

    @cached_property
    def task(self) -> np.ndarray:
        """The number of the task of each event; -1 if its lane is not known."""
        task: np.ndarray = self._table.task_of_worker[self.worker]
        return task

    @cached_property
    def by_lane(self) -> np.ndarray:
        """The order of the events by lane and then by time."""
        return order_of(self.lane)

    def first_after(self, start: float) -> int:
        """Return the position of the first event from a time on."""
        return int(np.searchsorted(self.time, start))


class EventTable:
    """The events of a recording by kind. It is valid until the recording gets the next reply."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        """The events."""
        self.workers = find_workers(recording)
        """The workers."""
        self.kind = np.array(recording.events["kind"])
        """The kind of each event."""
        self.task_of_worker = np.append(self.workers.task, -1)
        """The number of the task of each worker. That of the worker -1, which stands for unknown ones, is -1."""
        self._kinds: dict[EventKind, KindColumns] = {}

    def of(self, kind: EventKind) -> KindColumns:
        """Return the events of one kind."""
        if kind not in self._kinds:
            self._kinds[kind] = KindColumns(self, kind)
        return self._kinds[kind]

    def task_name(self, number: int) -> str:
        """Return the name of a task by its number; "" for -1."""
        return self.workers.tasks[number] if number >= 0 else ""

    def rows_over_time(self, kind: EventKind, start: float, step: float, count: int) -> np.ndarray:
        """Return the rows of the events of one kind from a time on, as an array of (task, part of `step` seconds)."""
        events = self.of(kind)
        place = ((events.time - start) / step).astype(np.int64)
        kept = (events.time >= start) & (place < count) & (events.task >= 0)
        cells = events.task[kept] * count + place[kept]
        sums = np.bincount(cells, events.rows[kept], len(self.workers.tasks) * count)
        return sums.astype(np.float64).reshape(-1, count)

    @cached_property
    def takes(self) -> dict[str, tuple[str, ...]]:
        """The fields that the claims of each task name."""
        fields_of: dict[str, dict[str, None]] = defaultdict(dict)
        for kind in (EventKind.CLAIM, EventKind.WAIT, EventKind.END):
            self._add_fields(fields_of, kind)
        for wait in self.recording.open:
            if not wait.holds:
                fields_of[self.recording.lanes[wait.lane].task].update(dict.fromkeys(wait.fields))
        return {task: tuple(fields) for task, fields in fields_of.items() if fields}

    @cached_property
    def puts(self) -> dict[str, tuple[str, ...]]:
        """The fields that each task puts, or has put before the events that are kept."""
        fields_of: dict[str, dict[str, None]] = defaultdict(dict)
        self._add_fields(fields_of, EventKind.PUT)
        for name, tasks in self.recording.producers.items():
            for task in tasks:
                fields_of[task][name] = None
        return {task: tuple(fields) for task, fields in fields_of.items()}

    @cached_property
    def producers(self) -> dict[str, list[str]]:
        """The tasks that put each field."""
        tasks: dict[str, list[str]] = defaultdict(list)
        for task, fields in self.puts.items():
            for name in fields:
                tasks[name].append(task)
        return dict(tasks)

    def _add_fields(self, fields_of: dict[str, dict[str, None]], kind: EventKind) -> None:
        events = self.of(kind)
        for (number, at), _ in sum_by(events.rows, events.task, events.fields):
            fields_of[self.task_name(number)].update(dict.fromkeys(self.recording.fields[at]))

    @cached_property
    def steps(self) -> dict[str, tuple[float, float]]:
        """The median and the 90th percentile of the times between two claims of a lane, by task, in seconds."""
        claims = self.of(EventKind.CLAIM)
        lane, time, task = claims.lane[claims.by_lane], claims.time[claims.by_lane], claims.task[claims.by_lane]
        steps = np.diff(time)
        follows = (lane[1:] == lane[:-1]) & (steps > 0) & (task[1:] >= 0)
        steps, task = steps[follows], task[1:][follows]
        quantiles = {}
        for number in np.flatnonzero(np.bincount(task)).tolist():
            of_task = steps[task == number]
            quantiles[self.task_name(number)] = quantile(of_task, 0.5), quantile(of_task, 0.9)
        return quantiles

    @cached_property
    def lanes(self) -> np.ndarray:
        """The position of the lane of each event."""
        return self.recording.events["lane"].astype(np.int64)

    @cached_property
    def first_seen(self) -> np.ndarray:
        """When the first of each worker is known, as a wait or as any other event; infinity if nothing is."""
        first = np.full(len(self.workers), np.inf)
        since = self.recording.events["since"]
        waits, holds = self.of(EventKind.WAIT), self.of(EventKind.HOLD)
        for lanes, times in ((self.lanes, since), (waits.lane, waits.since), (holds.lane, holds.since)):
            at = np.full(len(self.workers.of_lane), -1, np.int64)
            at[lanes[::-1]] = np.arange(len(lanes))[::-1]
            seen = np.flatnonzero((at >= 0) & (self.workers.of_lane >= 0))
            np.minimum.at(first, self.workers.of_lane[seen], times[at[seen]])
        for wait in self.recording.open:
            worker = self.workers.of_lane[wait.lane]
            if worker >= 0:
                first[worker] = min(first[worker], wait.since)
        return first

    @cached_property
    def connected(self) -> np.ndarray:
        """Whether a client of each worker is connected at the end; False for all if that is not known."""
        is_connected = np.zeros(len(self.workers), bool)
        lanes = np.array([lane.client in self.recording.connected for lane in self.recording.lanes], bool)
        is_connected[self.workers.of_lane[lanes & (self.workers.of_lane >= 0)]] = True
        return is_connected

    @cached_property
    def closed(self) -> np.ndarray:
        """Whether the newest client of each worker has closed in order."""
        closed = self.recording.closed
        return np.array([client in closed for client in self.workers.clients], bool)

    @cached_property
    def departed_at(self) -> np.ndarray:
        """When the newest client of each worker was gone; NaN if it is not, or if that is not known."""
        ended_at = self.recording.departed
        return np.array([ended_at.get(client, np.nan) for client in self.workers.clients], np.float64)

    @cached_property
    def last_left(self) -> np.ndarray:
        """When the connection of each worker ended last; NaN if it did not."""
        ends = self.of(EventKind.GONE)
        left = np.full(len(self.workers) + 1, np.nan)  # the last one is the worker -1
        left[ends.worker] = ends.time
        return left[:-1]


def order_by_flow(table: EventTable, names: Sequence[str]) -> list[str]:
    """Return tasks so that each comes after those whose fields it takes, and otherwise in the order of `names`."""
    makers: dict[str, set[str]] = defaultdict(set)
    for name in names:
        for field in table.puts.get(name, ()):
            makers[field].add(name)
    needs = {name: set().union(*(makers[field] for field in table.takes.get(name, ()))) - {name} for name in names}
    order: list[str] = []
    left = dict.fromkeys(names)
    while left:
        # In a circle of tasks, the one that needs the fewest of the others comes first.
        order.append(min(left, key=lambda name: len(needs[name] & left.keys())))
        del left[order[-1]]
    return order


def quantile(values: np.ndarray, share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    at = int(share * (len(values) - 1) + 0.5)
    return float(np.partition(values, at)[at])


def order_of(numbers: np.ndarray) -> np.ndarray:
    """Return the order that sorts natural numbers, and keeps the order of equal ones."""
    small = not len(numbers) or int(numbers.max()) < 1 << 16
    return np.argsort(numbers.astype(np.uint16) if small else numbers, kind="stable")


def sum_by(weights: np.ndarray, *keys: np.ndarray) -> list[tuple[tuple[int, ...], float]]:
    """Return the sum of the weights for each combination of keys, which are numbers from -1 on."""
    if not len(weights):
        return []
    cells, sizes, product = np.zeros(len(weights), np.int64), [], 1
    for key in keys:
        sizes.append(int(key.max()) + 2)
        product *= sizes[-1]
        cells = cells * sizes[-1] + (key + 1)
    if product <= DENSE:
        count = np.bincount(cells, minlength=product)
        cells_used = np.flatnonzero(count)
        total = np.bincount(cells, weights, minlength=product)[cells_used]
    else:
        cells_used, which = np.unique(cells, return_inverse=True)
        total = np.bincount(which, weights)
    parts = []
    for size in reversed(sizes):
        parts.append((cells_used % size - 1).tolist())
        cells_used = cells_used // size
    return list(zip(zip(*reversed(parts)), total.tolist()))
