"""Follows a system in a thread: reads timeline and status, answers screens, and keeps what they share of its state."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transfer_queue.cli.top.picture import Picture, make_picture
from transfer_queue.cli.watch import PAUSE, read_status
from transfer_queue.client.control_client import ControlClient
from transfer_queue.display import time_of_day
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.system import SystemStatus
from transfer_queue.node.system.launcher import RunningSystem, find_successor
from transfer_queue.system_folder.paths import SystemFolder
from transfer_queue.timeline.recording import Recording

EVENTS = 1 << 17
"""The number of newest events to keep. If a verdict is about more events, the older ones change little."""
RATE_SECONDS = 5.0  # rates are those of the last 5 to 10 s


@dataclass(frozen=True)
class Seen:
    """The state of the system was read."""

    name: str
    """The name of the system."""
    started_at: float
    """When the system was started, in Unix seconds."""
    log: str
    """Where the log of the controller is."""
    picture: Picture
    """The state."""
    read_at: float
    """When it was read, by `time.monotonic`."""


@dataclass(frozen=True)
class News:
    """What the reader knows of the system now."""

    seen: Seen | None = None
    """The newest state; None before the first one."""
    silence: str = ""
    """Why the controller does not reply, in a sentence; "" if it does."""
    ended: str = ""
    """When and why the system ended, in sentences; "" if it runs. The reader then waits for a new one of its name."""
    followed: str = ""
    """Which system is followed now and who started it, in a sentence; "" if it is the first one."""
    error: Exception | None = None
    """The unexpected error that has ended the thread."""


Question = Callable[[ControlClient], Any]
"""Makes the requests of a screen to the controller."""
Answer = Callable[[Any], object]
"""Gets the result of a question, or its error, in the thread that reads."""


class Follower:
    """Follows a system, and each one that is started in its place.

    Args:
        name: The name that was asked for; None for the default one.
        system: The system that runs now.
        every: The seconds between two refreshes.
    """

    def __init__(self, name: str | None, system: RunningSystem, every: float) -> None:
        self._name = name
        self._system = system
        self._every = every
        self._questions: queue.SimpleQueue[tuple[Question, Answer] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._news = News()
        self._deliver: Callable[[News], object] = lambda news: None

    def start(self, deliver: Callable[[News], object]) -> None:
        """Begin to deliver news, from another thread."""
        self._deliver = deliver
        # As a daemon, because a request to a stopped controller must not delay the end of the command.
        threading.Thread(target=self._run, name="tq-top-reader", daemon=True).start()

    def ask(self, question: Question, answer: Answer) -> None:
        """Ask the controller as soon as it can be reached."""
        self._questions.put((question, answer))

    def stop(self) -> None:
        """End the delivery."""
        self._stopped.set()
        self._questions.put(None)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._follow(self._system)
                if not self._stopped.is_set():
                    self._wait_for_successor()
        except Exception as error:  # the screen must not continue with old data without a message
            self._report(error=error)

    def _report(self, **changes: Any) -> None:
        """Deliver what has changed, together with what is known already."""
        self._news = replace(self._news, **changes)
        self._deliver(self._news)

    def _follow(self, system: RunningSystem) -> None:
        """Deliver what a system does until it ends."""
        recording, statuses = Recording(limit=EVENTS), _EarlierStatuses()
        with ControlClient(system) as client:
            while not self._stopped.is_set():
                begun = time.monotonic()
                status = read_status(system, client, recording)
                if status is None:
                    return
                if isinstance(status, str):
                    self._report(silence=f"{status[0].upper()}{status[1:]}.")
                else:
                    now = time.monotonic()
                    before, elapsed = statuses.add(status, now)
                    picture = make_picture(recording, status, before, elapsed)
                    log = system.log_of(("controller", 0))
                    seen = Seen(system.name, system.description.started_at, log, picture, now)
                    self._report(seen=seen, silence="", ended="")
                # On an overloaded machine a refresh may take long; it leaves at least as much time to other processes.
                pause = max(begun + self._every - time.monotonic(), min(time.monotonic() - begun, self._every))
                self._answer_questions(client, pause)
                if not system.is_alive():
                    return

    def _answer_questions(self, client: ControlClient, seconds: float) -> None:
        """Answer questions for this time."""
        limit = time.monotonic() + seconds
        while not self._stopped.is_set() and (left := limit - time.monotonic()) > 0:
            try:
                asked = self._questions.get(timeout=left)
            except queue.Empty:
                return
            if asked is not None:
                question, answer = asked
                try:
                    answer(question(client))
                except TransferQueueError as error:
                    answer(error)

    def _wait_for_successor(self) -> None:
        """Report that the system has ended, and wait for another one of its name."""
        old, when = self._system, time.strftime("%H:%M:%S")
        while not self._stopped.wait(PAUSE):
            reason = _why_ended(old, when)
            if reason != self._news.ended:  # the logs of a crash exist only after a moment
                self._report(ended=reason)
            later = find_successor(self._name, old)
            if later is not None:
                self._system = later
                self._report(ended="", followed=f"The system {later.name} is a new one, {later.describe()}.")
                return


class _EarlierStatuses:
    """Keeps a status of 5 to 10 s ago."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, SystemStatus]] = []

    def add(self, status: SystemStatus, now: float) -> tuple[SystemStatus | None, float]:
        """Return an earlier status, and the seconds since then; (None, 0) for the first one."""
        earlier = self._kept[0] if self._kept else None
        if not self._kept or now - self._kept[-1][0] >= RATE_SECONDS:
            self._kept = [*self._kept[-1:], (now, status)]
        return (None, 0.0) if earlier is None else (earlier[1], now - earlier[0])


def _why_ended(system: RunningSystem, when: str) -> str:
    crash = SystemFolder(system.folder).describe_crash()
    if crash:
        return f"The system {system.name} crashed at {when}{crash.replace('the last one crashed; ', '')}."
    return f"The system {system.name} was stopped at {when} (it was {system.describe()})."


OLD_AFTER = 3.0  # refreshes without a reply until the data counts as old
MIN_OLD = 3.0  # the same in seconds, at least
GAP_SHOWN = 60.0  # seconds for which the end of a gap, or a new system, is shown


class LiveState:
    """The state that the screens share.

    Args:
        every: The seconds between two refreshes.
        ask: Asks the controller without blocking.
        clock: The time in seconds, as in `Seen.read_at`.
    """

    def __init__(
        self, every: float, ask: Callable[[Question, Answer], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._begun = clock()
        self.every = every
        """The seconds between two refreshes."""
        self.ask = ask
        """Asks the controller without blocking."""
        self.news = News()
        """The newest of what is known."""
        self.shown: Seen | None = None
        """The state that the screens show: the newest one, unless they are paused."""
        self.paused = False
        """Whether the screens keep what they show."""

    def add(self, news: News) -> bool:
        """Add what the reader has found. Returns whether the screens have to show something else."""
        self.news = news
        if self.paused and self.shown is not None:
            return False
        before, self.shown = self.shown, news.seen
        return self.shown is not before

    def pause(self) -> None:
        """Pause, or continue with the newest state."""
        self.paused = not self.paused
        if not self.paused:
            self.shown = self.news.seen

    @property
    def age(self) -> float:
        """The age of what is shown, in seconds."""
        return self._clock() - self.shown.read_at if self.shown is not None else 0.0

    @property
    def silent_for(self) -> float:
        """The seconds since the newest state was read, or since the first one is waited for."""
        seen = self.news.seen
        return self._clock() - (self._begun if seen is None else seen.read_at)

    @property
    def is_old(self) -> bool:
        """Whether there should have been a newer state by now."""
        return self.silent_for > max(OLD_AFTER * self.every, MIN_OLD)

    def alarms(self) -> list[str]:
        """Return what is wrong, in sentences, the most important first."""
        news, seen = self.news, self.news.seen
        if news.ended:
            return [f"{news.ended} Waiting for a new system of this name."]
        alarms = []
        if news.silence or self.is_old:
            text = news.silence or "The controller does not reply."
            log = f" Its log is in {seen.log}." if seen is not None and seen.log else ""
            alarms.append(text if seen is None else f"{text} The newest data is {self.silent_for:.0f} s old.{log}")
        if self.shown is not None:
            alarms += self._alarms_of(self.shown)
        return alarms

    def _alarms_of(self, shown: Seen) -> list[str]:
        alarms, picture = [], shown.picture
        if picture.status.trouble:
            alarms.append(f"Changes are blocked: {picture.status.trouble}")
        gap = picture.gap
        if gap is not None and picture.now - gap.end < GAP_SHOWN:
            what = f"{gap.missed:,} events were missed" if gap.missed else "The controller restarted: no events"
            alarms.append(f"{what} between {time_of_day(gap.start)} and {time_of_day(gap.end)}.")
        if self.news.followed and picture.now - shown.started_at < GAP_SHOWN:
            alarms.append(self.news.followed)
        return alarms
