"""Measures how long events take, cheaply enough that servers always do it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from transfer_queue.messages.base import Message, name_of
from transfer_queue.messages.reports.progress import Timing

LOOP_BOUNDS = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
"""The upper bounds, in seconds, of the buckets for events in a loop. An event should take at most 5 ms."""
WAIT_BOUNDS = (1e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""The upper bounds, in seconds, of the buckets for waits."""
STALENESS_BOUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)
"""The upper bounds, in policy versions, of the buckets for the staleness of samples."""
NOTEWORTHY = 1e-3
"""Requests that take fewer seconds are not compared with the longest event."""
WINDOW = 60.0
MAX_NAMES = 64
"""The number of (type, task) with their own histogram of waits. The tasks beyond it are counted together."""
OTHER = "other"


class Histogram:
    """The number of values in each bucket. A value that is equal to an upper bound is in the bucket below it."""

    __slots__ = ("bounds", "counts", "seconds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Add a value."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    def to_timing(self, name: str, task: str = "") -> Timing:
        """Return the histogram as a message."""
        return Timing(name, self.counts.copy(), self.seconds, task)


def quantile(bounds: tuple[float, ...], counts: list[int], share: float) -> float:
    """Return the seconds that this share of all values does not exceed, interpolated linearly within its bucket.

    Returns the last bound for values beyond all bounds, and 0.0 if there are no values.
    """
    wanted = share * sum(counts)
    below = 0.0
    for count, upper, lower in zip(counts, bounds, (0.0, *bounds)):
        if count and below + count >= wanted:
            return lower + (upper - lower) * (wanted - below) / count
        below += count
    return bounds[-1] if wanted else 0.0


class Longest:
    """The longest event of this minute and the minute before, so that every scrape sees each of them.

    Events that are shorter than NOTEWORTHY need not be recorded.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._last: dict[str, tuple[float, str]] = {}
        self._this: dict[str, tuple[float, str]] = {}

    def record(self, event: str, seconds: float, now: float, what: str = "") -> None:
        """Record an event of this kind that ended now. `what` describes it, if this says more than its kind."""
        if now >= self._until:
            self._turn(now)
        longest = self._this.get(event)
        if longest is None or seconds > longest[0]:
            self._this[event] = seconds, what or event

    def _turn(self, now: float) -> None:
        self._last = self._this if now < self._until + WINDOW else {}
        self._this = {}
        self._until = now + WINDOW

    def by_event(self, now: float) -> dict[str, tuple[float, str]]:
        """Return kind of event -> (seconds, description)."""
        if now >= self._until:
            self._turn(now)
        both = [*self._last.items(), *self._this.items()]
        return dict(sorted(both, key=lambda item: item[1][0]))  # the longer one of the same kind is later

    def longest(self, now: float) -> tuple[str, float]:
        """Return the description and the seconds of the longest event of all kinds; "" and 0.0 if there was none."""
        seconds, what = max(self.by_event(now).values(), default=(0.0, ""))
        return what, seconds


class Load:
    """The load of the loop of one server.

    It records every request, so a call costs less than a microsecond.
    """

    def __init__(self) -> None:
        self.requests: dict[type[Message], Histogram] = {}
        self.failures: dict[str, int] = {}
        self.malformed = 0
        """The number of messages that were not a valid request."""
        self.ended = 0.0
        """The time at which the last request ended."""
        self.longest = Longest()

    def record_request(self, kind: type[Message], began: float, ended: float) -> None:
        """Record a request. `began` is the start of its connection's turn, in which earlier requests may have run."""
        seconds = ended - (began if began > self.ended else self.ended)
        self.ended = ended
        histogram = self.requests.get(kind)
        if histogram is None:
            histogram = self.requests[kind] = Histogram(LOOP_BOUNDS)
        histogram.counts[bisect_left(LOOP_BOUNDS, seconds)] += 1  # the code of `Histogram.add` without its call
        histogram.seconds += seconds
        if seconds >= NOTEWORTHY:
            self.longest.record("request", seconds, ended, name_of(kind))

    def record_failure(self, error: str) -> None:
        """Count a reply with this error."""
        self.failures[error] = self.failures.get(error, 0) + 1

    def timings(self) -> list[Timing]:
        """Return the histogram of each type of request, in the order of their first requests."""
        return [histogram.to_timing(name_of(kind)) for kind, histogram in self.requests.items()]


class Waits:
    """How long requests waited that could not be answered at once."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def record(self, name: str, task: str, *seconds: float) -> None:
        """Record the ends of waits. `name` is the type of the requests, and `task` their task ("" for none)."""
        key = bounded_key((name, task), self._histograms)
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = Histogram(WAIT_BOUNDS)
        for each in seconds:
            histogram.add(each)

    def timings(self) -> list[Timing]:
        """Return the histogram of each type and task."""
        return [histogram.to_timing(name, task) for (name, task), histogram in self._histograms.items()]


def bounded_key(key: tuple[str, str], known: Collection[tuple[str, str]]) -> tuple[str, str]:
    """Return the key, or the key for all others if it is not among the known ones and these are MAX_NAMES."""
    if key in known or len(known) < MAX_NAMES:
        return key
    return key[0], OTHER
