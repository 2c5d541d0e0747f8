"""What each rank of a task did when: spans of waiting, work and back-pressure, and their shares of a window."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from transfer_queue.timeline.events import AHEAD, TIMED_OUT, EventKind
from transfer_queue.timeline.intervals import Intervals, Line, merge, paint
from transfer_queue.timeline.recording import Recording


class SpanState(enum.IntEnum):
    """What a worker does. Where several are true, the one with the largest number counts."""

    UNKNOWN = 0
    """Nothing is known: the worker has not appeared yet, or events are missing."""
    IDLE = 1
    """None of the others, for example after the end of the partition. A worker that only puts is idle as well."""
    WORKS = 2
    """A claim was answered with rows, and the next claim has not begun."""
    HELD = 3
    """A put or reservation waits for capacity or for a policy version."""
    WAITS = 4
    """A claim waits that the worker needs now."""
    GONE = 5
    """The connection has ended."""


@dataclass(frozen=True)
class Workers:
    """The ranks of tasks. A client whose rank is not known is a worker of its own."""

    task: np.ndarray
    """The position in `tasks` for each worker."""
    rank: np.ndarray
    """The rank of each worker; -1 if it is not known."""
    clients: list[str]
    """The newest client of each worker."""
    tasks: list[str]
    """The names of the tasks; "" for clients that have neither claimed nor said their task."""
    of_lane: np.ndarray
    """The worker of each lane; -1 for the lane that is not known."""

    def __len__(self) -> int:
        return len(self.clients)

    def name(self, worker: int) -> str:
        """Return the name of a worker, for people."""
        rank = int(self.rank[worker])
        return f"rank {rank}" if rank >= 0 else f"client {self.clients[worker]}"


def find_workers(recording: Recording) -> Workers:
    """Return the workers that the lanes of a recording belong to."""
    numbers: dict[tuple[str, int, str], int] = {}
    tasks: dict[str, int] = {}
    clients: list[str] = []
    task, rank, of_lane = [], [], [-1]
    for lane in recording.lanes[1:]:
        key = (lane.task, lane.rank, lane.client if lane.rank < 0 else "")
        worker = numbers.setdefault(key, len(numbers))
        of_lane.append(worker)
        if worker == len(clients):
            task.append(tasks.setdefault(lane.task, len(tasks)))
            rank.append(lane.rank)
            clients.append(lane.client)
        clients[worker] = lane.client
    numbers_of = [np.array(column, np.int64) for column in (task, rank, of_lane)]
    return Workers(numbers_of[0], numbers_of[1], clients, list(tasks), numbers_of[2])


@dataclass(frozen=True)
class Spans:
    """What the workers did in a window. The spans of a worker cover the window without overlap, but for UNKNOWN."""

    workers: Workers
    """The workers."""
    line: Line
    """The window."""
    worker: np.ndarray
    """The worker of each span, in ascending order."""
    start: np.ndarray
    """When each span starts, in Unix seconds."""
    end: np.ndarray
    """When each span ends, in Unix seconds."""
    state: np.ndarray
    """The `SpanState` of each span."""

    def seconds(self) -> np.ndarray:
        """Return the seconds of each worker in each state: an array of (worker, state)."""
        states = len(SpanState)
        cells = self.worker * states + self.state
        total = np.bincount(cells, self.end - self.start, minlength=len(self.workers) * states)
        total = total.reshape(len(self.workers), states)
        total[:, SpanState.UNKNOWN] = np.maximum(self.line.length - total.sum(axis=1), 0.0)
        return total

    def shares(self) -> np.ndarray:
        """Return the share of the window of each worker in each state. The shares of a worker add up to 1."""
        seconds = self.seconds()
        shares: np.ndarray = seconds / np.maximum(seconds.sum(axis=1, keepdims=True), 1e-300)
        return shares


def measure_spans(recording: Recording, start: float, end: float, workers: Workers | None = None) -> Spans:
    """Return what each worker did between two times.

    Args:
        recording: The events.
        start: When the window begins, in Unix seconds.
        end: When the window ends, in Unix seconds.
        workers: The workers of the recording, if the caller has them already.
    """
    workers = find_workers(recording) if workers is None else workers
    line = Line(start, max(end, start), len(workers))
    events = _needed(recording, start)
    lane = events["lane"]
    worker = workers.of_lane[lane]
    layers = [
        merge(_presence(recording, events, worker, workers, line)),
        merge(_work(recording, events, lane, workers, line)),
        merge(_parked(recording, events, worker, workers, line, holds=True)),
        merge(_parked(recording, events, worker, workers, line, holds=False)),
        merge(_absence(recording, events, worker, workers, line)),
    ]
    places, layer = paint(layers)
    return Spans(workers, line, *line.locate(places), layer + 1)


def _needed(recording: Recording, start: float) -> np.ndarray:
    """Return the events of the window, and from before it the last one of each lane and kind."""
    events = recording.events
    first = int(np.searchsorted(events["time"], start))
    cells = events["lane"][:first].astype(np.int64) << 4 | np.minimum(events["kind"][:first], 15)
    last = np.full(len(recording.lanes) << 4, -1, np.int64)
    last[cells] = np.arange(first)
    before = np.sort(last[last >= 0])
    return np.concatenate([events[before], events[first:]])


def _parked(
    recording: Recording, events: np.ndarray, worker: np.ndarray, workers: Workers, line: Line, *, holds: bool
) -> Intervals:
    """Return the times for which claims waited that were needed at once, or for which puts waited."""
    kind = EventKind.HOLD if holds else EventKind.WAIT
    ended = (events["kind"] == kind) & (events["flags"] & AHEAD == 0)
    open_ = [each for each in recording.open if each.holds == holds and not each.ahead]
    at = workers.of_lane[[each.lane for each in open_]] if open_ else np.zeros(0, np.int64)
    since = np.array([each.since for each in open_], np.float64)
    return line.place(
        np.concatenate([worker[ended], at]),
        np.concatenate([events["since"][ended], since]),
        np.concatenate([events["time"][ended], np.full(len(open_), recording.now)]),
    )


def _work(recording: Recording, events: np.ndarray, lane: np.ndarray, workers: Workers, line: Line) -> Intervals:
    """Return the times from the answer of a claim until a claim of the lane ends without rows, or the lane ends.

    Waiting hides work (`SpanState`), so the waits that ended with rows need not end the work.
    """
    kind, late = events["kind"], (events["flags"] & TIMED_OUT) != 0
    starts = (kind == EventKind.CLAIM) & (events["rows"] > 0)
    fails = (kind == EventKind.WAIT) & late & (events["flags"] & AHEAD == 0)
    stops = fails | (kind == EventKind.END) | (kind == EventKind.GONE)
    gap_lane, gap_time = _every_lane_at_gaps(recording)
    lanes = np.concatenate([lane[starts], lane[stops], gap_lane])
    # A wait that timed out ends the work when it begins; events of other kinds do so when they happen.
    when = np.where(fails, events["since"], events["time"])
    times = np.concatenate([events["time"][starts], when[stops], gap_time])
    begins = np.arange(len(lanes)) < np.count_nonzero(starts)
    order = np.lexsort((~begins, times, lanes))
    lanes, times, begins = lanes[order], times[order], begins[order]
    follows = np.zeros(len(lanes), bool)
    follows[1:] = lanes[1:] == lanes[:-1]
    first = begins & ~(follows & np.append(False, begins[:-1]))
    # Between two kept entries of a lane there is work if the first one is a start.
    kept = first | ~begins
    lanes, times, begins = lanes[kept], times[kept], begins[kept]
    end = np.full(len(lanes), line.end)
    same = lanes[1:] == lanes[:-1]
    end[:-1][same] = times[1:][same]
    return line.place(workers.of_lane[lanes[begins]], times[begins], end[begins])


def _every_lane_at_gaps(recording: Recording) -> tuple[np.ndarray, np.ndarray]:
    lanes = np.arange(len(recording.lanes), dtype=np.uint32)
    gaps = np.array([gap.start for gap in recording.gaps], np.float64)
    return np.tile(lanes, len(gaps)), np.repeat(gaps, len(lanes))


def _presence(recording: Recording, events: np.ndarray, worker: np.ndarray, workers: Workers, line: Line) -> Intervals:
    """Return the time from the first that is known of each worker on, without the gaps of the recording."""
    first = np.full(len(workers), np.inf)
    known = worker >= 0
    np.minimum.at(first, worker[known], events["since"][known])
    for wait in recording.open:
        if workers.of_lane[wait.lane] >= 0:
            first[workers.of_lane[wait.lane]] = min(first[workers.of_lane[wait.lane]], wait.since)
    edges = [line.start, *(edge for gap in recording.gaps for edge in (gap.start, gap.end)), line.end]
    starts, ends = np.array(edges[::2]), np.array(edges[1::2])
    everyone = np.repeat(np.arange(len(workers)), len(starts))
    starts, ends = np.tile(starts, len(workers)), np.tile(ends, len(workers))
    return line.place(everyone, np.maximum(starts, first[everyone]), ends)


def _absence(recording: Recording, events: np.ndarray, worker: np.ndarray, workers: Workers, line: Line) -> Intervals:
    """Return the times from the end of a worker's connection until it is back.

    A worker whose last claim was answered with the end of its partition is finished, and not gone.
    """
    leaving = events["kind"] == EventKind.GONE
    if not leaving.any():
        return line.place(*np.zeros((3, 0)))
    there = np.flatnonzero(np.isin(worker, worker[leaving]) & (worker >= 0))
    there = there[np.argsort(worker[there], kind="stable")]
    at, leaving = worker[there], leaving[there]
    time, since, kind = events["time"][there], events["since"][there], events["kind"][there]
    order = np.arange(len(at))
    begin = np.searchsorted(at, at)  # where the events of the same worker begin
    left = np.maximum.accumulate(np.where(leaving, order, -1))
    away = left >= begin
    returns = ~leaving & (~away | (since > time[left]))  # an older request that ends now is no sign of life
    back = np.minimum.accumulate(np.where(returns, order, len(at))[::-1])[::-1]
    back = np.where(back < len(at), back, 0)
    until = np.where((back > order) & (at[back] == at), since[back], line.end)
    asked = np.maximum.accumulate(np.where((kind == EventKind.CLAIM) | (kind == EventKind.END), order, -1))
    finished = (asked >= begin) & (kind[asked] == EventKind.END)
    connected = np.zeros(len(workers), bool)
    for lane, number in zip(recording.lanes, workers.of_lane.tolist()):
        if number >= 0 and lane.client in recording.connected:
            connected[number] = True
    returned = connected[at] & (until >= line.end)
    gone = leaving & ~finished & ~returned
    return line.place(at[gone], time[gone], until[gone])
