"""What metrics say of each task, counted from the events of the timeline: time waited, time in queue, staleness.

Events are counted many at a time, as arrays, before the ring overwrites them. So a put or claim costs nothing more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable

import numpy as np

from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.timeline.event_ring import EventRing
from transfer_queue.core.timeline.number_tables import MAX_LANES, LaneTable
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.progress import Timing
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.metrics.timing import MOST_NAMES, OTHER, STALENESS_BOUNDS, WAIT_BOUNDS
from transfer_queue.timeline.events import AHEAD, EVENT, EventKind

AT_ONCE = 2_048
"""Events that are counted together, and the number of new events after which they are."""
IN_A_STEP = 256
"""Waits, or clients, that one step of `TaskMeasures.measure` looks at."""
MAX_SPANS = 64
"""Spans of time that are remembered of one lane."""
SAMPLES, CAPACITY = "samples", "capacity"
"""What a request waits for: a claim for samples; a put or reservation for capacity or a policy version."""

Series = dict[str, dict[tuple[str, ...], float]]


class TaskMeasures:
    """Counters and histograms by task, since the controller started. They are not part of the state.

    Args:
        ring: The events.
        lanes: The clients and tasks that events name.
    """

    def __init__(self, ring: EventRing, lanes: LaneTable) -> None:
        self.due = 0
        """The position of the ring from which on `count_events` must be called before more events are written."""
        self._ring = ring
        self._lanes = lanes
        self._position = 0
        self._tasks: dict[str, int] = {}
        """Task -> its number in the histograms. At most MOST_NAMES tasks have one, and OTHER."""
        self._task_of_lane: dict[int, int] = {}
        self._queue = _TaskHistograms(WAIT_BOUNDS)
        self._staleness = _TaskHistograms(STALENESS_BOUNDS)
        self._waited = defaultdict[tuple[int, str], float](float)
        """(number of the task, SAMPLES or CAPACITY) -> seconds of waits that have ended."""
        self._reported: dict[tuple[str, ...], float] = {}
        """The seconds that the last scrape has reported. A counter must not decrease."""
        self._spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
        """(lane, SAMPLES or CAPACITY) -> times in which it waited, ascending and disjoint, the last MAX_SPANS."""
        self._schedule()

    def _schedule(self) -> None:
        self.due = self._position + min(AT_ONCE, max(self._ring.capacity // 2, 1))

    # ------------------------------------------------------------ counting

    def count_events(self) -> None:
        """Count the events that are new in the ring."""
        ring, position = self._ring, max(self._position, self._ring.first)
        while position < ring.end:
            count = min(AT_ONCE, ring.end - position)
            self._count(np.frombuffer(ring.read(position, count), EVENT))
            position += count
        self._position = position
        self._schedule()

    def _count(self, events: np.ndarray) -> None:
        kinds = events["kind"]
        claims = events[kinds == EventKind.CLAIM]
        if len(claims):
            tasks = self._tasks_of(claims["lane"])
            age, staleness = claims["age"].astype("f8"), claims["staleness"]
            self._queue.add(tasks[age >= 0], age[age >= 0])
            self._staleness.add(tasks[staleness >= 0], staleness[staleness >= 0])
        waits = events[(kinds == EventKind.WAIT) | (kinds == EventKind.HOLD)]
        waits = waits[waits["flags"] & AHEAD == 0]  # these ranks have what they need
        reasons = np.where(waits["kind"] == EventKind.WAIT, SAMPLES, CAPACITY).tolist()
        columns = (waits[name].tolist() for name in ("lane", "since", "time"))
        for task, reason, lane, since, time in zip(self._tasks_of(waits["lane"]).tolist(), reasons, *columns):
            self._waited[task, reason] += self._add_span(lane, reason, since, time)
        for lane in events["lane"][kinds == EventKind.GONE].tolist():
            for reason in (SAMPLES, CAPACITY):
                self._spans.pop((lane, reason), None)

    def _tasks_of(self, lanes: np.ndarray) -> np.ndarray:
        """Return the number of the task of each lane."""
        distinct, where = np.unique(lanes, return_inverse=True)
        return np.array([self._task_of(lane) for lane in distinct.tolist()], np.int64)[where]

    def _task_of(self, lane: int) -> int:
        found = self._task_of_lane.get(lane)
        if found is None:
            if len(self._task_of_lane) >= 4 * MAX_LANES:
                self._task_of_lane.clear()
            known = self._lanes.values.get(lane)
            found = self._task_of_lane[lane] = self._number_of(OTHER if known is None else known[1].task)
        return found

    def _number_of(self, task: str) -> int:
        if task not in self._tasks and len(self._tasks) >= MOST_NAMES:
            task = OTHER
        return self._tasks.setdefault(task, len(self._tasks))

    def _add_span(self, lane: int, reason: str, since: float, time: float) -> float:
        """Remember that a lane waited from `since` to `time`. Returns for how much of it no other wait was counted."""
        spans = self._spans.get((lane, reason))
        if spans is None:
            if len(self._spans) >= 2 * MAX_LANES:
                self._spans.clear()
            spans = self._spans[lane, reason] = []
        covered = 0.0
        while spans and spans[-1][1] >= since:  # waits end in order, so these spans end before `time`
            start, end = spans.pop()
            covered += end - start
            since = min(since, start)
        spans.append((since, time))
        if len(spans) > MAX_SPANS:
            del spans[0]
        return max(0.0, time - since - covered)

    # ------------------------------------------------------------ reading

    def timings(self) -> dict[str, list[Timing]]:
        """Return histograms of each task, by their names in `metrics.samples.per_task_timing`."""
        return {"queue": self._queue.timings(self._tasks), "staleness": self._staleness.timings(self._tasks)}

    def measure(
        self, waiting: Iterable[ParkedRequest], clients: Iterable[str], now: float
    ) -> Generator[None, None, Series]:
        """Return what is measured of each task, by name and label values. The caller does other work between steps.

        `events` of the ring must have been counted.

        Args:
            waiting: The requests that wait now.
            clients: The clients that are connected now.
            now: The time on the controller's clock.

        Returns:
            "task_wait_seconds": (task, what it waits for) -> the seconds for which its clients have waited, including
            waits that have not ended. "task_clients": (task,) -> the connected clients that have worked for it.
        """
        open_since: dict[tuple[int, str], float] = {}
        for number, request in enumerate(waiting):
            wait = self._open_wait(request)
            if wait is not None:
                open_since[wait] = min(request.since, open_since.get(wait, request.since))
            if number % IN_A_STEP == IN_A_STEP - 1:
                yield
        counts: Counter[int] = Counter()
        for number, client in enumerate(clients):
            counts.update(map(self._number_of, self._lanes.tasks_of(client)))
            if number % IN_A_STEP == IN_A_STEP - 1:
                yield
        waited = self._waited.copy()
        for (lane, reason), since in open_since.items():
            spans = [span for span in self._spans.get((lane, reason), ()) if span[1] > since]
            covered = sum(end - max(start, since) for start, end in spans)
            waited[self._task_of(lane), reason] += max(0.0, now - since - covered)
        names = list(self._tasks)
        for (task, reason), seconds in waited.items():
            key = names[task], reason
            self._reported[key] = max(seconds, self._reported.get(key, 0.0))
        clients_of: dict[tuple[str, ...], float] = {(names[task],): count for task, count in counts.items()}
        return {"task_wait_seconds": dict(self._reported), "task_clients": clients_of}

    def _open_wait(self, waiting: ParkedRequest) -> tuple[int, str] | None:
        """Return the lane that waits, and what for; None if a client does not wait for it."""
        request = waiting.request
        if isinstance(request, Claim):
            lane = self._lanes.of_task(waiting.client, request.task, request.sampling.get("dp_rank"))
            return None if request.ahead else (lane, SAMPLES)
        if isinstance(request, (Publish, Reserve)):
            return self._lanes.of_client(waiting.client), CAPACITY
        return None


class _TaskHistograms:
    """A histogram for each task."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = np.array(bounds)
        self._counts = np.zeros((MOST_NAMES + 1, len(bounds) + 1), np.int64)
        self._sums = np.zeros(MOST_NAMES + 1)

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
