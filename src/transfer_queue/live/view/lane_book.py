"""The timeline of the page: what each rank did in the last 300 s, updated with each view instead of computed again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from transfer_queue.live.payload import HISTORY_SECONDS, STATES, GapView, LaneView, Tick, Timeline
from transfer_queue.timeline.account import Account
from transfer_queue.timeline.event_table import EventTable, order_by_flow
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.spans import STATE_NAMES, SpanState, WorkerSpans, measure_spans

MAX_LANES = 64
OWN_LANES = 3  # of the ranks of a task that is joined to a band
MAX_TASKS = 16
FINEST = 0.05  # seconds of a bin; with many lanes, bins are wider
BIN_LANES = 16  # at most this many lanes have bins of the finest width
SLICE = 30.0  # seconds that are binned in one step, to bound the memory
KEPT_LANES = 30.0  # seconds for which the same ranks keep a lane of their own

STATE_NUMBERS: dict[SpanState, int] = {state: STATES.index(name) for state, name in STATE_NAMES.items()}
SHOWN_NUMBERS = [STATE_NUMBERS.get(state, 0) for state in SpanState]  # by the number of the `SpanState`
Key = tuple[str, int, str]  # task, rank, and the client if it has no rank


@dataclass
class _Lane:
    """A rank with its spans, or a band with its points."""

    id: int
    key: Key
    ranks: int = 1
    spans: list[tuple[float, float, int, int]] = field(default_factory=list)
    band: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    due: list[float] = field(default_factory=lambda: [0.0] * len(SpanState))
    """The seconds of each state that the spans do not show yet, because a span has one state."""


class LaneBook:
    """The lanes, their numbers and their spans.

    Time is divided into bins. The span of a bin shows one state. What a bin has of others is carried to the next bins,
    so that the lengths of all spans of a state are right even if the state changes faster.
    """

    def __init__(self, start: float) -> None:
        self.origin = math.floor(start)
        """Unix seconds to which all times are relative."""
        self._until = 0.0
        self._lanes: dict[Key, _Lane] = {}
        self._next = 1
        self._bin = FINEST
        self._own: tuple[float, frozenset[Key]] = (-math.inf, frozenset())
        self.joined: dict[str, list[Key]] = {}
        """The ranks of each band, by the task of its lane."""
        self.renewed = True
        """Whether the lanes differ from the previous ones, so that a viewer needs all of them."""

    def update(self, account: Account) -> Timeline:
        """Add the time until the end of a recording, and return what is new."""
        table = account.table
        now = table.recording.now - self.origin
        groups = self._group(account, now)
        self.joined = {
            key[0]: [worker_key(account, worker) for worker in workers]
            for key, workers in groups.items()
            if key[2] == "*"
        }
        self.renewed = groups.keys() != self._lanes.keys()
        if self.renewed:
            self._begin(groups)
        bin_ = self._bin
        since = max(self._until, math.floor((now - HISTORY_SECONDS) / bin_) * bin_, 0.0)
        until = max(math.floor(now / bin_) * bin_, since)
        why = self._reasons(account)
        if until > since:
            spans = measure_spans(table, self.origin + since, self.origin + until)
            for start in np.arange(since, until - bin_ / 2, SLICE):
                self._add(table, spans, groups, float(start), min(float(start) + SLICE, until), why)
        self._until = until
        self._forget(now - HISTORY_SECONDS)
        return self.timeline(account, since)

    def timeline(self, account: Account, since: float = 0.0) -> Timeline:
        """Return the timeline from a time on."""
        recording, workers = account.table.recording, account.table.workers
        of_key = {worker_key(account, worker): worker for worker in range(len(workers))}
        left = account.table.last_left
        lanes = []
        for lane in self._lanes.values():
            worker = of_key.get(lane.key) if lane.ranks == 1 else None
            label = "" if worker is None else workers.lanes[worker].label
            is_gone = lane.spans[-1][2] == STATE_NUMBERS[SpanState.GONE] if lane.spans else False
            at = None if worker is None or not is_gone or math.isnan(left[worker]) else round(float(left[worker]), 2)
            lanes.append(
                LaneView(
                    lane.id, lane.key[0], lane.key[1] if lane.ranks == 1 else -1, lane.ranks, label, at,
                    [(max(span[0], round(since, 2)), *span[1:]) for span in lane.spans if span[1] > since],
                    [point for point in lane.band if point[0] > since],
                )
            )  # fmt: skip
        policies = account.table.of(EventKind.POLICY)
        ticks = zip(policies.time.tolist(), policies.rows.tolist())
        versions = [Tick(round(time, 2), int(version)) for time, version in ticks]
        gaps = [GapView(round(gap.start, 2), round(gap.end, 2)) for gap in recording.gaps]
        return Timeline(
            self.origin, round(since, 2), round(self._until, 2), [lane.id for lane in lanes], lanes,
            _reason_names(account), versions[-100:], gaps[-16:],
        )  # fmt: skip

    # ------------------------------------------------------------ which lanes there are

    def _group(self, account: Account, now: float) -> dict[Key, list[int]]:
        """Return the workers of each lane, in the order of the lanes."""
        workers = account.table.workers
        seen = _seen(account, HISTORY_SECONDS)
        order = task_order(account)
        tasks: dict[str, list[int]] = {}
        for worker in np.flatnonzero(seen).tolist():
            tasks.setdefault(workers.tasks[workers.task[worker]], []).append(worker)
        tasks = {task: sorted(tasks[task], key=lambda at: _rank_order(account, at)) for task in order if task in tasks}
        if sum(map(len, tasks.values())) <= MAX_LANES:
            return {worker_key(account, worker): [worker] for task in tasks for worker in tasks[task]}
        if now - self._own[0] >= KEPT_LANES:
            self._own = now, frozenset(self._worst(account, tasks))
        groups: dict[Key, list[int]] = {}
        for number, (task, all_) in enumerate(tasks.items()):
            own = [worker for worker in all_ if worker_key(account, worker) in self._own[1]]
            rest = [worker for worker in all_ if worker_key(account, worker) not in self._own[1]]
            name = task if number < MAX_TASKS - 1 or len(tasks) <= MAX_TASKS else "other"
            if rest:
                groups.setdefault((name, -1, "*"), []).extend(rest)
            groups.update({worker_key(account, worker): [worker] for worker in own})
        return groups

    def _worst(self, account: Account, by_task: Mapping[str, list[int]]) -> list[Key]:
        """Return the workers that keep a lane of their own: of each task those that wait most, gone ones first."""
        shares = account.spans.shares()
        badness = shares[:, SpanState.WAITS] + shares[:, SpanState.HELD] + 2.0 * shares[:, SpanState.GONE]
        keys = []
        for task in list(by_task)[: MAX_TASKS - 1]:
            worst = sorted(by_task[task], key=lambda worker: -badness[worker])[:OWN_LANES]
            keys += [worker_key(account, worker) for worker in worst]
        return keys

    def _begin(self, groups: Mapping[Key, list[int]]) -> None:
        """Begin with other lanes: everything is measured again from the recording."""
        known = {key: lane.id for key, lane in self._lanes.items()}
        self._lanes = {}
        for key, workers in groups.items():
            number = known.get(key)
            if number is None:
                number, self._next = self._next, self._next + 1
            self._lanes[key] = _Lane(number, key, max(len(workers), 2) if key[2] == "*" else 1)
        self._bin = FINEST * math.ceil(max(len(groups), 1) / BIN_LANES)
        self._until = 0.0

    # ------------------------------------------------------------ what they did

    def _add(
        self, table: EventTable, spans: WorkerSpans, groups: Mapping[Key, list[int]], start: float, end: float,
        why: Mapping[str, int],
    ) -> None:  # fmt: skip
        """Add the bins between two times."""
        count = max(round((end - start) / self._bin), 1)
        seconds = _binned(spans, self.origin + start, self._bin, count)
        _mark_puts(table, seconds, self.origin + start, self._bin)
        for key, workers in groups.items():
            lane = self._lanes[key]
            if lane.key[2] == "*":
                lane.ranks = max(len(workers), 2)
                _add_points(lane, seconds[workers], start, self._bin)
            else:
                _add_spans(lane, seconds[workers[0]], start, self._bin, why.get(key[0], 0))

    def _forget(self, before: float) -> None:
        for lane in self._lanes.values():
            old = next((at for at, span in enumerate(lane.spans) if span[1] > before), len(lane.spans))
            del lane.spans[:old]
            past = next((at for at, point in enumerate(lane.band) if point[0] > before), len(lane.band))
            del lane.band[:past]

    def _reasons(self, account: Account) -> dict[str, int]:
        """Return for each task the number of what it waits for now."""
        names = _reason_names(account)
        return {task: names.index(reason) for task, reason in _reason_of(account).items()}


def task_order(account: Account) -> list[str]:
    """Return the tasks in the order of the flow: a task comes after those whose fields it takes."""
    table = account.table
    return order_by_flow(table, sorted(table.workers.tasks, key=lambda name: (bool(table.takes.get(name)), name)))


def reason_of_waiting(account: Account, task: str) -> tuple[str, str | None]:
    """Return the field for which a task waits longest and the task that puts it; "" and None if it is not known."""
    missing = account.missing.get(task, {})
    return max(missing, key=lambda each: missing[each], default=("", None))


def _reason_of(account: Account) -> dict[str, str]:
    names = {}
    for task in account.tasks:
        name = reason_of_waiting(account, task)[0] or account.hold_causes.get(task, "")
        if name:
            names[task] = name
    return names


def _reason_names(account: Account) -> list[str]:
    return ["", *dict.fromkeys(_reason_of(account).values())]


def worker_key(account: Account, worker: int) -> Key:
    """Return what identifies a worker in every recording of a system."""
    workers = account.table.workers
    rank = int(workers.rank[worker])
    return workers.tasks[workers.task[worker]], rank, "" if rank >= 0 else workers.clients[worker]


def _rank_order(account: Account, worker: int) -> tuple[bool, int, str]:
    workers = account.table.workers
    return workers.rank[worker] < 0, int(workers.rank[worker]), workers.clients[worker]


def _seen(account: Account, seconds: float) -> np.ndarray:
    """Return which workers are connected, or were within some seconds."""
    table, recording = account.table, account.table.recording
    seen = np.zeros(len(table.workers) + 1, bool)
    seen[table.workers.of_lane[table.lanes]] = True
    for wait in recording.open:
        seen[table.workers.of_lane[wait.lane]] = True
    seen = seen[:-1] | table.connected
    left = table.last_left
    old = np.isfinite(left) & (left < recording.now - seconds) & ~table.connected
    result: np.ndarray = seen & ~old
    return result


def _binned(spans: WorkerSpans, start: float, width: float, count: int) -> np.ndarray:
    """Return the seconds of each worker in each bin and state: an array of (worker, bin, state)."""
    workers, states = len(spans.workers), len(SpanState)
    begin = np.clip((spans.start - start) / width, 0.0, count)
    end = np.clip((spans.end - start) / width, 0.0, count)
    kept = np.flatnonzero(end > begin)
    begin, end = begin[kept], end[kept]
    first = np.floor(begin).astype(np.int64)
    bins = np.maximum(np.ceil(end).astype(np.int64) - first, 1)
    which = np.repeat(np.arange(len(kept)), bins)
    place = np.arange(len(which)) - np.repeat(np.cumsum(bins) - bins, bins) + first[which]
    within = np.minimum(end[which], place + 1.0) - np.maximum(begin[which], place)
    place = np.minimum(place, count - 1)
    cells = (spans.worker[kept][which] * count + place) * states + spans.state[kept][which]
    total = np.bincount(cells, np.maximum(within, 0.0) * width, minlength=workers * count * states)
    return total.reshape(workers, count, states)


def _mark_puts(table: EventTable, seconds: np.ndarray, start: float, width: float) -> None:
    """Show a put of a worker that is idle otherwise, because it takes nothing, as a bin of work."""
    puts, count = table.of(EventKind.PUT), seconds.shape[1]
    first = puts.first_after(start)
    worker, place = puts.worker[first:], ((puts.time[first:] - start) / width).astype(np.int64)
    kept = (worker >= 0) & (place < count)
    worker, place = worker[kept], place[kept]
    idle = seconds[worker, place, SpanState.IDLE]
    seconds[worker, place, SpanState.WORKS] += idle
    seconds[worker, place, SpanState.IDLE] = 0.0


def _add_spans(lane: _Lane, seconds: np.ndarray, start: float, width: float, why: int) -> None:
    """Add the bins of one worker as spans."""
    due, spans = lane.due, lane.spans
    # Numbers of Python are several times faster here than arrays of six.
    for number, (bins, total) in enumerate(zip(seconds.tolist(), seconds.sum(axis=1).tolist())):
        if total <= width * 0.01:
            due[:] = [0.0] * len(due)
            continue
        for state, part in enumerate(bins):
            due[state] += part
        state = due.index(max(due[1:]), 1)
        due[state] -= total
        begin, end = round(start + number * width, 2), round(start + (number + 1) * width, 2)
        shown = SHOWN_NUMBERS[state]
        reason = why if shown in (2, 3) else 0
        if spans and spans[-1][1:] == (begin, shown, reason):
            spans[-1] = (spans[-1][0], end, shown, reason)
        else:
            spans.append((begin, end, shown, reason))


def _add_points(lane: _Lane, seconds: np.ndarray, start: float, width: float) -> None:
    """Add the bins of several workers as points, one for about a second."""
    step = max(round(1.0 / width), 1)
    for number in range(0, seconds.shape[1], step):
        total = seconds[:, number : number + step].sum(axis=(0, 1))
        known = total.sum()
        if known <= 0:
            continue
        shares = np.round(100 * total / known).astype(int)
        end = round(start + min(number + step, seconds.shape[1]) * width, 2)
        chosen = (SpanState.WORKS, SpanState.WAITS, SpanState.HELD, SpanState.GONE)
        works, waits, held, missing = (int(shares[state]) for state in chosen)
        lane.band.append((end, works, waits, held, missing))
