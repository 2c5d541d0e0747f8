"""How long things take: cheap enough to be measured always."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from transfer_queue.messages.base import Message, name_of
from transfer_queue.messages.progress import Timing

LOOP_BOUNDS = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
"""Upper ends, in seconds, of the buckets of what happens in a loop. No event should hold it for more than 5 ms."""
WAIT_BOUNDS = (1e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""The same of waits."""
NOTEWORTHY = 1e-3  # seconds of an event
WINDOW = 60.0
MOST_NAMES = 64  # of tasks, in what is counted by task; beyond it they are counted together
OTHER = "other"


class Histogram:
    """How many values fell into each bucket; a value that is just an upper end belongs below it."""

    __slots__ = ("bounds", "counts", "seconds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0

    def note(self, seconds: float) -> None:
        """Something took so long."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    def timing(self, name: str, task: str = "") -> Timing:
        """As it travels."""
        return Timing(name, self.counts.copy(), self.seconds, task)


def quantile(bounds: tuple[float, ...], counts: list[int], share: float) -> float:
    """Seconds that this share of all values took at most, a straight line drawn through each bucket.

    Of those beyond all bounds no more is known than that: the last bound. 0.0 where there are none.
    """
    wanted = share * sum(counts)
    below = 0.0
    for count, upper, lower in zip(counts, bounds, (0.0, *bounds)):
        if count and below + count >= wanted:
            return lower + (upper - lower) * (wanted - below) / count
        below += count
    return bounds[-1] if wanted else 0.0


class Longest:
    """The longest event since the last full minute but one began: long enough for every scrape to see each once.

    What is shorter than NOTEWORTHY need not be told of.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._last: dict[str, tuple[float, str]] = {}
        self._this: dict[str, tuple[float, str]] = {}

    def note(self, event: str, seconds: float, now: float, what: str = "") -> None:
        """An event of this kind took so long and ended now. what: it was, if that says more."""
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
        """Kind of event -> (seconds, what it was)."""
        if now >= self._until:
            self._turn(now)
        both = [*self._last.items(), *self._this.items()]
        return dict(sorted(both, key=lambda item: item[1][0]))  # of the same kind the longer one is later

    def of_all(self, now: float) -> tuple[str, float]:
        """The longest of any kind: what it was, and its seconds; "" and 0.0 where there was none."""
        seconds, what = max(self.by_event(now).values(), default=(0.0, ""))
        return what, seconds


class Load:
    """What the loop of one server has had to do. malformed: messages that were no request which it could read.

    Every request is told to it, so a call costs less than a microsecond. ended: when the last one did.
    """

    def __init__(self) -> None:
        self.requests: dict[type[Message], Histogram] = {}
        self.failures: dict[str, int] = {}
        self.malformed = 0
        self.ended = 0.0
        self.longest = Longest()

    def served(self, kind: type[Message], began: float, ended: float) -> None:
        """A request of this type has had its turn. began: the first of its connection's turn; it came after others."""
        seconds = ended - (began if began > self.ended else self.ended)
        self.ended = ended
        histogram = self.requests.get(kind)
        if histogram is None:
            histogram = self.requests[kind] = Histogram(LOOP_BOUNDS)
        histogram.counts[bisect_left(LOOP_BOUNDS, seconds)] += 1  # `note`, but for the call
        histogram.seconds += seconds
        if seconds >= NOTEWORTHY:
            self.longest.note("request", seconds, ended, name_of(kind))

    def failed(self, error: str) -> None:
        """A request was answered with this error."""
        self.failures[error] = self.failures.get(error, 0) + 1

    def timings(self) -> list[Timing]:
        """By type of request, in order of the first of each."""
        return [histogram.timing(name_of(kind)) for kind, histogram in self.requests.items()]


class Waits:
    """For how long requests waited that could not be met at once."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def note(self, name: str, task: str, seconds: float) -> None:
        """A request of this type, and for this task ("" of none), was answered, or given up, after so long."""
        key = bounded((name, task), self._histograms)
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = Histogram(WAIT_BOUNDS)
        histogram.note(seconds)

    def timings(self) -> list[Timing]:
        """By type and task."""
        return [histogram.timing(name, task) for (name, task), histogram in self._histograms.items()]


def bounded(key: tuple[str, str], known: Collection[tuple[str, str]]) -> tuple[str, str]:
    """The key itself, or, where MOST_NAMES are known and it is not among them, one for all others."""
    if key in known or len(known) < MOST_NAMES:
        return key
    return key[0], OTHER
