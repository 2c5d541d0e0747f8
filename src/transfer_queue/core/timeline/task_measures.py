"""What metrics say of each task, counted from the events of the timeline: time waited, time in queue, staleness.

Events are counted many at a time, as arrays: at a scrape, and between scrapes before the ring overwrites them. A system
whose metrics are not scraped counts nothing.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Generator, Iterable

import numpy as np

from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.timeline.event_ring import MAX_LANES, EventRing, LaneTable
from transfer_queue.messages.reports.progress import Timing
from transfer_queue.metrics.timing import MAX_NAMES, OTHER, STALENESS_BOUNDS, WAIT_BOUNDS
from transfer_queue.timeline.events import AHEAD, DEMAND, EVENT, EventKind

AT_ONCE = 2_048
"""Events that are counted together: this many new events are counted without a scrape, after the first scrape."""
IN_A_STEP = 256
"""Waits, or clients, that one step of `TaskMeasures.measure` looks at."""
MAX_SPANS = 64
"""Spans of time that are remembered of one lane."""
MAX_KNOWN = 1 << 21
"""Lanes from this number on count for the task OTHER."""
REASONS = "samples", "capacity", "demand"
"""What a request waits for: a claim for samples; a put or reservation for capacity or a policy version; a producer for
group demand."""
SAMPLES, CAPACITY, DEMANDED = range(3)
"""The numbers of these reasons."""

Series = dict[str, dict[tuple[str, ...], float]]


class TaskMeasures:
    """Counters and histograms by task, since the controller started. They are not part of the state.

    Args:
        ring: The events.
        lanes: The clients and tasks that events name.
    """

    def __init__(self, ring: EventRing, lanes: LaneTable) -> None:
        self.due = math.inf
        """The position of the ring from which on `count_events` must be called before more events are written."""
        self._ring = ring
        self._lanes = lanes
        self._position = 0
        self._tasks: dict[str, int] = {}
        """Task -> its number in the histograms. At most MAX_NAMES tasks have one, and OTHER."""
        self._task_of_lane = np.full(1024, -1, np.int16)
        """The number of the task of each lane; -1 if the lane has not been seen yet."""
        self._queue = _TaskHistograms(WAIT_BOUNDS)
        self._staleness = _TaskHistograms(STALENESS_BOUNDS)
        self._waited = np.zeros((MAX_NAMES + 1) * len(REASONS))
        """The seconds of waits that have ended, for each task and reason."""
        self._reported: dict[tuple[str, ...], float] = {}
        """The seconds that the last scrape has reported. A counter must not decrease."""
        self._spans: dict[int, deque[float]] = {}
        """Lane and reason -> the start and end of each time in which it waited, ascending and disjoint."""

    # ------------------------------------------------------------ counting

    def count_events(self) -> Generator[None, None, None]:
        """Count the events that are new in the ring, in steps."""
        ring = self._ring
        between = min(AT_ONCE, max(ring.capacity // 2, 1))
        self.due = self._position + between
        while self._position < ring.end:
            position = max(self._position, ring.first)
            count = min(AT_ONCE, ring.end - position)
            self._position = position + count
            self.due = self._position + between
            self._count(np.frombuffer(ring.read(position, count), EVENT))
            yield

    def _count(self, events: np.ndarray) -> None:
        kinds, lanes = events["kind"], events["lane"]
        tasks = self._tasks_of(lanes)
        claims = kinds == EventKind.CLAIM
        age, staleness = events["age"].astype("f8"), events["staleness"]
        known = claims & (age >= 0)
        self._queue.add(tasks[known], age[known])
        known = claims & (staleness >= 0)
        self._staleness.add(tasks[known], staleness[known])
        holds = kinds == EventKind.HOLD
        waits = (holds | (kinds == EventKind.WAIT)) & (events["flags"] & AHEAD == 0)  # ahead: not needed yet
        reasons = np.where(holds, np.where(events["flags"] & DEMAND, DEMANDED, CAPACITY), SAMPLES)[waits]
        cells = lanes[waits].astype(np.int64) * len(REASONS) + reasons
        seconds = self._add_spans(cells, events["since"][waits], events["time"][waits])
        self._waited += np.bincount(
            tasks[waits] * len(REASONS) + reasons, seconds, minlength=len(self._waited)
        )  # fmt: skip
        for lane in lanes[kinds == EventKind.GONE].tolist():
            for reason in range(len(REASONS)):
                self._spans.pop(lane * len(REASONS) + reason, None)

    def _tasks_of(self, lanes: np.ndarray) -> np.ndarray:
        """Return the number of the task of each lane."""
        highest = min(int(lanes.max()), MAX_KNOWN)
        if highest >= len(self._task_of_lane):
            more = np.full(2 * highest + 1 - len(self._task_of_lane), -1, np.int16)
            self._task_of_lane = np.concatenate([self._task_of_lane, more])
        lanes = np.minimum(lanes, MAX_KNOWN)
        tasks = self._task_of_lane[lanes]
        if (tasks < 0).any():
            for lane in set(lanes[tasks < 0].tolist()):
                known = self._lanes.values.get(lane)
                task = OTHER if known is None or lane >= MAX_KNOWN else known[1].task
                self._task_of_lane[lane] = self._number_of(task)
            tasks = self._task_of_lane[lanes]
        numbers: np.ndarray = tasks.astype(np.int64)
        return numbers

    def _number_of(self, task: str) -> int:
        if task not in self._tasks and len(self._tasks) >= MAX_NAMES:
            task = OTHER
        return self._tasks.setdefault(task, len(self._tasks))

    def _add_spans(self, cells: np.ndarray, since: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Remember when lanes waited. Returns for how much of each time no other wait was counted.

        Args:
            cells: Lane and reason of each wait.
            since: When it began.
            time: When it ended, ascending.
        """
        seconds, all_spans = time - since, self._spans
        for at, (cell, start, end) in enumerate(zip(cells.tolist(), since.tolist(), time.tolist())):
            spans = all_spans.get(cell)
            if spans is None:
                if len(all_spans) >= len(REASONS) * MAX_LANES:
                    all_spans.clear()
                spans = all_spans[cell] = deque(maxlen=2 * MAX_SPANS)
            elif start <= spans[-1]:
                begun = start
                while spans and spans[-1] >= begun:  # waits end in order, so these spans end before `end`
                    last, first = spans.pop(), spans.pop()
                    seconds[at] -= min(last, end) - max(first, begun)
                    start = min(start, first)
            spans.append(start)
            spans.append(end)
        uncovered: np.ndarray = np.maximum(seconds, 0.0)
        return uncovered

    # ------------------------------------------------------------ reading

    def timings(self) -> dict[str, list[Timing]]:
        """Return histograms of each task, by their names in `metrics.samples.per_task_timing`."""
        return {"queue": self._queue.timings(self._tasks), "staleness": self._staleness.timings(self._tasks)}

    def measure(
        self, waiting: Iterable[ParkedRequest], clients: Iterable[str], now: float
    ) -> Generator[None, None, Series]:
        """Count the new events, and return what is measured of each task, by name and label values, in steps.

        Args:
            waiting: The requests that wait now.
            clients: The clients that are connected now.
            now: The time on the controller's clock.

        Returns:
            "task_wait_seconds": (task, reason) -> the seconds for which its clients have waited, including waits that
            have not ended. "task_clients": (task,) -> the connected clients that have worked for it.
        """
        open_since: dict[tuple[int, int], float] = {}
        for number, request in enumerate(waiting):
            wait = self._lanes.open_wait(request)
            if wait is not None and not wait.ahead:
                place = wait.lane, DEMANDED if wait.demand else CAPACITY if wait.holds else SAMPLES
                open_since[place] = min(wait.since, open_since.get(place, wait.since))
            if number % IN_A_STEP == IN_A_STEP - 1:
                yield
        counts: Counter[int] = Counter()
        for number, client in enumerate(clients):
            counts.update(map(self._number_of, self._lanes.tasks_of(client)))
            if number % IN_A_STEP == IN_A_STEP - 1:
                yield
        yield from self.count_events()
        waited = self._waited.copy()
        for number, ((lane, reason), since) in enumerate(open_since.items()):
            (task,) = self._tasks_of(np.array([lane]))
            waited[task * len(REASONS) + reason] += self._uncovered(lane * len(REASONS) + reason, since, now)
            if number % IN_A_STEP == IN_A_STEP - 1:
                yield
        names = list(self._tasks)
        for cell in np.flatnonzero(waited).tolist():
            key = names[cell // len(REASONS)], REASONS[cell % len(REASONS)]
            self._reported[key] = max(waited[cell].item(), self._reported.get(key, 0.0))
        clients_of: dict[tuple[str, ...], float] = {(names[task],): count for task, count in counts.items()}
        return {"task_wait_seconds": dict(self._reported), "task_clients": clients_of}

    def _uncovered(self, cell: int, since: float, now: float) -> float:
        """Return for how much of an open wait no other wait of this lane and reason was counted."""
        bounds = list(self._spans.get(cell, ()))
        spans = zip(bounds[::2], bounds[1::2])
        return max(0.0, now - since - sum(end - max(start, since) for start, end in spans if end > since))


class _TaskHistograms:
    """A histogram for each task."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = np.array(bounds)
        self._counts = np.zeros((MAX_NAMES + 1, len(bounds) + 1), np.int64)
        self._sums = np.zeros(MAX_NAMES + 1)

    def add(self, tasks: np.ndarray, values: np.ndarray) -> None:
        """Add a value of each of these tasks."""
        cells = tasks * self._counts.shape[1] + np.searchsorted(self._bounds, values)
        self._counts += np.bincount(cells, minlength=self._counts.size).reshape(self._counts.shape)
        self._sums += np.bincount(tasks, values, minlength=len(self._sums))

    def timings(self, tasks: dict[str, int]) -> list[Timing]:
        """Return the histograms that have values. tasks: the numbers of the tasks by name."""
        return [
            Timing("", self._counts[number].tolist(), self._sums[number].item(), task)
            for task, number in tasks.items()
            if self._counts[number].any()
        ]
