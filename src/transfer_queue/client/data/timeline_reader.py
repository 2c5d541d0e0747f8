"""What one client knows of the timeline: the events of the last minutes, the last verdict, and the start of `stats`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from transfer_queue.messages.reports.timeline import TimelineReply, Verdict
from transfer_queue.messages.system import SystemStatus
from transfer_queue.net.calls import AskController, Operation
from transfer_queue.timeline.recording import EVENTS, Recording
from transfer_queue.timeline.stats import TaskLabels, make_stats
from transfer_queue.timeline.verdict import judge

VERDICT_SECONDS = 1.0
"""The largest age of the verdict of a status, so that frequent calls of `status` cost no more."""
EVENTS_OF_A_LONG_WAIT = 1 << 14
"""The events for the verdict in the log of a long wait: only four replies, because many ranks log at the same time."""


class TimelineReader:
    """The recording of one client. It grows by the events that are new, and keeps those of the last minutes.

    Several threads may read at the same time: they get the same replies, and each reply is added once.

    Args:
        clock: Seconds, for the age of the last verdict.
        limit: The number of events that are kept at most.
    """

    def __init__(self, clock: Callable[[], float], limit: int = EVENTS) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._recording = Recording(limit=limit)
        self.begun = False
        """Whether events were read already, so that only new ones must be read."""
        self._verdict: tuple[float, Verdict] | None = None
        self._labels = TaskLabels()
        self._stats_until: float | None = None

    def read(self, ask: AskController, timeout: float | None) -> Operation[None]:
        """Read what is new. `ask` makes the requests, each with this timeout."""
        caught_up = False
        while not caught_up:
            with self._lock:
                request = self._recording.request()
            reply = yield from ask(request, TimelineReply, timeout)
            with self._lock:
                if self._recording.request() == request:  # otherwise another thread has already added this reply
                    self._recording.add(reply)
                    self.begun = True
                    caught_up = self._recording.caught_up

    def recent_verdict(self) -> Verdict | None:
        """Return the last verdict; None if it is too old to be shown with a new status."""
        known = self._verdict
        return known[1] if known is not None and 0 <= self._clock() - known[0] < VERDICT_SECONDS else None

    def judge(self, status: SystemStatus) -> Verdict:
        """Return the verdict of the events that were read. `status` is as new as they are."""
        with self._lock:
            verdict = judge(self._recording, status)
            self._verdict = self._clock(), verdict
            return verdict

    def make_stats(self, status: SystemStatus) -> dict[str, float]:
        """Return the figures of the time since the previous call, or of the last minute in the first call."""
        with self._lock:
            recording, previous = self._recording, self._stats_until
            # Each event belongs to the time of one call only.
            since = None if previous is None else math.nextafter(previous, math.inf)
            stats = make_stats(recording, status, since, self._labels)
            self._stats_until = recording.now
            return stats
