"""At which times each rank waited, worked or was held: spans of these states, and their shares of a window.

Intervals of many workers are merged on one line, on which each worker has its own stretch, so that one pass over an
array merges the intervals of all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from transfer_queue.timeline.event_table import EventTable, TaskWorkers, order_of
from transfer_queue.timeline.events import AHEAD, CLOSED, TIMED_OUT, EventKind


class SpanState(enum.IntEnum):
    """What a worker does. If several states apply, the one with the largest number counts."""

    UNKNOWN = 0
    """Nothing is known: the worker has not appeared yet, or has closed in order, or events are missing."""
    IDLE = 1
    """No other state applies, for example after the end of the partition. A worker that only puts is idle as well."""
    WORKS = 2
    """A claim was answered with rows, and the next claim has not begun."""
    HELD = 3
    """A producer waits for capacity, for a policy version, or for group demand."""
    WAITS = 4
    """A claim waits that the worker needs now."""
    GONE = 5
    """The connection has ended, and the client had not closed it."""


SAME_TIME = 1e-6  # events whose times differ by less, in seconds, belong to one step of the controller's loop
STATE_NAMES: dict[SpanState, str] = {state: state.name.lower() for state in SpanState if state != SpanState.UNKNOWN}
"""The names of the states in which something is known."""


@dataclass(frozen=True)
class WorkerSpans:
    """What the workers did in a window. The spans of a worker cover the window without overlap, except UNKNOWN."""

    workers: TaskWorkers
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

    @cached_property
    def seconds(self) -> np.ndarray:
        """The seconds of each worker in each state: an array of (worker, state)."""
        states = len(SpanState)
        cells = self.worker * states + self.state
        counted = np.bincount(cells, self.end - self.start, minlength=len(self.workers) * states)
        # Without spans, bincount counts integers.
        total = counted.astype(np.float64).reshape(len(self.workers), states)
        total[:, SpanState.UNKNOWN] = np.maximum(self.line.length - total.sum(axis=1), 0.0)
        return total

    @cached_property
    def newest(self) -> np.ndarray:
        """The position of the span of each worker that lasts until the end of the window; -1 if there is none."""
        newest = np.full(len(self.workers), -1, np.int64)
        lasting = np.flatnonzero(self.end >= self.line.end - SAME_TIME)
        newest[self.worker[lasting]] = lasting
        return newest

    def shares(self) -> np.ndarray:
        """Return the share of the window of each worker in each state. The shares of a worker add up to 1."""
        seconds = self.seconds
        shares: np.ndarray = seconds / np.maximum(seconds.sum(axis=1, keepdims=True), 1e-300)
        return shares


def measure_spans(table: EventTable, start: float, end: float) -> WorkerSpans:
    """Return what each worker did between two times.

    Args:
        table: The events.
        start: When the window begins, in Unix seconds.
        end: When the window ends, in Unix seconds.
    """
    line = Line(start, max(end, start), len(table.workers))
    lost, closed = _absence(table, line)
    layers = [
        merge(_presence(table, line)),
        merge(_work(table, line)),
        merge(_parked(table, line, holds=True)),
        merge(_parked(table, line, holds=False)),
        merge(lost),
        merge(closed),
    ]
    places, layer = paint(layers)
    shown = layer < len(layers) - 1  # the time after a close is not shown
    places = Intervals(places.start[shown], places.end[shown])
    return WorkerSpans(table.workers, line, *line.locate(places), layer[shown] + 1)


def _parked(table: EventTable, line: Line, *, holds: bool) -> Intervals:
    """Return the times for which claims waited that were needed immediately, or for which puts waited."""
    ended = table.of(EventKind.HOLD if holds else EventKind.WAIT)
    first = ended.first_after(line.start)
    needed = ended.flags[first:] & AHEAD == 0
    open_ = [each for each in table.recording.open if each.holds == holds and not each.ahead]
    at = table.workers.of_lane[[each.lane for each in open_]] if open_ else np.zeros(0, np.int64)
    since = np.array([each.since for each in open_], np.float64)
    return line.place(
        np.concatenate([ended.worker[first:][needed], at]),
        np.concatenate([ended.since[first:][needed], since]),
        np.concatenate([ended.time[first:][needed], np.full(len(open_), table.recording.now)]),
    )


def _work(table: EventTable, line: Line) -> Intervals:
    """Return the times from the answer of a claim until a claim of the lane ends without rows, or the lane ends.

    Waiting hides work (`SpanState`), so the waits that ended with rows need not end the work.
    """
    claims, beginning = table.of(EventKind.CLAIM), table.recording.start
    pitch = table.recording.now - beginning + 1.0  # lanes one after the other on one line, as in `Line`
    order = claims.by_lane[claims.rows[claims.by_lane] > 0]
    lane, time = claims.lane[order], claims.time[order]
    places = lane * pitch + (time - beginning)
    stop_lane, stop_time = _stops(table)
    stops = np.sort(stop_lane * pitch + np.clip(stop_time - beginning, 0.0, pitch - 1.0))
    # A run of work begins with the first claim of a lane, and with the first one after each stop.
    first = np.flatnonzero(np.diff(lane, prepend=-1) != 0)
    begins = np.union1d(first, np.searchsorted(places, stops, side="right"))
    begins = begins[begins < len(places)].astype(np.int64)
    if len(stops):
        # The end of a run is the next stop of its lane.
        at = np.searchsorted(stops, places[begins])
        end_of_work = stops[np.minimum(at, len(stops) - 1)]
        stopped = (at < len(stops)) & (end_of_work // pitch == lane[begins])
        end = np.where(stopped, end_of_work - lane[begins] * pitch + beginning, line.end)
    else:
        end = np.full(len(begins), line.end)
    return line.place(table.workers.of_lane[lane[begins]], time[begins], end)


def _stops(table: EventTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the lanes and times at which work ends."""
    recording, waits = table.recording, table.of(EventKind.WAIT)
    # A claim that waited and got nothing ended the work when it began.
    fails = (waits.flags & TIMED_OUT != 0) & (waits.flags & AHEAD == 0)
    ends, lost = table.of(EventKind.END), table.of(EventKind.GONE)
    lanes = np.arange(len(recording.lanes))
    gaps = np.array([gap.start for gap in recording.gaps], np.float64)
    return (
        np.concatenate([waits.lane[fails], ends.lane, lost.lane, np.tile(lanes, len(gaps))]),
        np.concatenate([waits.since[fails], ends.time, lost.time, np.repeat(gaps, len(lanes))]),
    )


def _presence(table: EventTable, line: Line) -> Intervals:
    """Return the time from the first that is known of each worker on, without the gaps of the recording."""
    gaps = table.recording.gaps
    edges = [line.start, *(edge for gap in gaps for edge in (gap.start, gap.end)), line.end]
    starts, ends = np.array(edges[::2]), np.array(edges[1::2])
    workers = np.repeat(np.arange(len(table.workers)), len(starts))
    starts, ends = np.tile(starts, len(table.workers)), np.tile(ends, len(table.workers))
    return line.place(workers, np.maximum(starts, table.first_seen[workers]), ends)


def _absence(table: EventTable, line: Line) -> tuple[Intervals, Intervals]:
    """Return the times from the end of a worker's connection until it is back: of those that are gone, and of others.

    A worker whose end was in order (CLOSED) is not gone.
    """
    left = np.flatnonzero(np.isfinite(table.last_left))
    if not len(left):
        none = line.place(*np.zeros((3, 0)))
        return none, none
    concerned = np.zeros(len(table.workers) + 1, bool)
    concerned[left] = True
    worker = table.workers.of_lane[table.lanes]
    chosen = np.flatnonzero(concerned[worker])
    chosen = chosen[order_of(worker[chosen])]
    at, events = worker[chosen], table.recording.events
    time, since, kind = events["time"][chosen], events["since"][chosen], table.kind[chosen]
    leaving = kind == EventKind.GONE
    order = np.arange(len(at))
    begin = np.searchsorted(at, at)  # where the events of the same worker begin
    last = np.maximum.accumulate(np.where(leaving, order, -1))
    away = last >= begin
    returns = ~leaving & (~away | (since > time[last]))  # an older request does not count
    back = np.minimum.accumulate(np.where(returns, order, len(at))[::-1])[::-1]
    back = np.where(back < len(at), back, 0)
    until = np.where((back > order) & (at[back] == at), since[back], line.end)
    finished = events["flags"][chosen] & CLOSED != 0
    returned = table.connected[at] & (until >= line.end)
    lost, closed = leaving & ~finished & ~returned, leaving & finished & ~returned
    return line.place(at[lost], time[lost], until[lost]), line.place(at[closed], time[closed], until[closed])


@dataclass(frozen=True)
class Line:
    """A window of time of several workers, laid end to end on one line."""

    start: float
    """When the window begins."""
    end: float
    """When the window ends."""
    workers: int
    """The number of workers."""

    @property
    def length(self) -> float:
        """The length of the window in seconds."""
        return max(self.end - self.start, 0.0)

    @property
    def pitch(self) -> float:
        """The distance between the stretches of two workers. A space between them keeps their intervals apart."""
        return self.length + 1.0

    def place(self, worker: np.ndarray, start: np.ndarray, end: np.ndarray) -> Intervals:
        """Clip intervals of workers to the window and place them on the line. Empty ones are left out."""
        start = np.clip(start - self.start, 0.0, self.length)
        end = np.clip(end - self.start, 0.0, self.length)
        kept = (end > start) & (worker >= 0) & (worker < self.workers)
        base = worker[kept] * self.pitch
        return Intervals(base + start[kept], base + end[kept])

    def locate(self, places: Intervals) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the worker, the start and the end of intervals that lie in the stretch of one worker each."""
        worker = (places.start // self.pitch).astype(np.int64)
        base = worker * self.pitch - self.start
        return worker, places.start - base, places.end - base


@dataclass(frozen=True)
class Intervals:
    """Intervals on a line."""

    start: np.ndarray
    """Where each interval starts."""
    end: np.ndarray
    """Where each interval ends."""

    def __len__(self) -> int:
        return len(self.start)


def merge(intervals: Intervals) -> Intervals:
    """Return the union: sorted intervals that neither overlap nor touch."""
    if not len(intervals):
        return intervals
    order = np.argsort(intervals.start, kind="stable")
    start, end = intervals.start[order], np.maximum.accumulate(intervals.end[order])
    first = np.append(True, start[1:] > end[:-1])
    last = np.append(first[1:], True)
    return Intervals(start[first], end[last])


def paint(layers: Sequence[Intervals]) -> tuple[Intervals, np.ndarray]:
    """Lay merged sets of intervals over each other.

    Args:
        layers: The sets, each the result of `merge`. A later one hides the earlier ones.

    Returns:
        The visible intervals in order, and for each the position of its layer.
    """
    edges = np.concatenate([edge for layer in layers for edge in (layer.start, layer.end)])
    counts = [len(layer) for layer in layers]
    steps = np.concatenate(
        [np.full(count, sign * (1 << at), np.int64) for at, count in enumerate(counts) for sign in (1, -1)]
    )
    order = np.argsort(edges, kind="stable")
    edges, covered = edges[order], np.cumsum(steps[order])[:-1]
    start, end = edges[:-1], edges[1:]
    seen = (covered > 0) & (end > start)
    top = np.frexp(covered[seen].astype(np.float64))[1] - 1  # the highest bit, which is the last of the layers
    start, end = start[seen], end[seen]
    first = np.ones(len(top), bool)
    first[1:] = (top[1:] != top[:-1]) | (start[1:] > end[:-1])
    last = np.append(first[1:], True) if len(top) else first
    return Intervals(start[first], end[last]), top[first]
