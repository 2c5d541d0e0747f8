"""Sets of intervals of many workers on one line.

Each worker has its own stretch of the line, so that one pass over an array merges the intervals of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
