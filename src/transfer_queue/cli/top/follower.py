"""Follows a system in a thread: reads timeline and status, answers screens, and keeps what they share of its state."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

from transfer_queue.cli.top.picture import Picture, make_picture
from transfer_queue.cli.watch import ANSWER_SECONDS, PAUSE
from transfer_queue.client.control_client import ENDED_ERRORS, ControlClient
from transfer_queue.display import time_of_day
from transfer_queue.errors import TransferQueueError, WaitTimeoutError
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
class Silent:
    """The controller does not reply."""

    text: str
    """What happened, in a sentence."""


@dataclass(frozen=True)
class SystemEnded:
    """The system has ended. The reader waits for a new one of the same name."""

    text: str
    """When and why, in sentences."""


@dataclass(frozen=True)
class Followed:
    """A new system of the same name was found."""

    text: str
    """Who started it, in a sentence."""


@dataclass(frozen=True)
class Broken:
    """The thread has ended because of an unexpected error."""

    error: Exception
    """The error."""


News = Union[Seen, Silent, SystemEnded, Followed, Broken]


@dataclass(frozen=True)
class ControllerQuestion:
    """What a screen asks the controller."""

    ask: Callable[[ControlClient], Any]
    """Makes the requests."""
    answer: Callable[[Any], None]
    """Gets the result, or the error, in the thread that reads."""


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
        self._questions: queue.SimpleQueue[ControllerQuestion | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._deliver: Callable[[News], None] = lambda news: None

    def start(self, deliver: Callable[[News], None]) -> None:
        """Begin to deliver news, from another thread."""
        self._deliver = deliver
        # As a daemon, because a request to a stopped controller must not delay the end of the command.
        threading.Thread(target=self._run, name="tq-top-reader", daemon=True).start()

    def ask(self, question: ControllerQuestion) -> None:
        """Ask the controller as soon as it can be reached."""
        self._questions.put(question)

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
            self._deliver(Broken(error))

    def _follow(self, system: RunningSystem) -> None:
        """Deliver what a system does until it ends."""
        recording, statuses = Recording(limit=EVENTS), _EarlierStatuses()
        with ControlClient(system) as client:
            while not self._stopped.is_set():
                begun = time.monotonic()
                try:
                    client.read_timeline(recording, timeout=ANSWER_SECONDS)
                    status = client.status(timeout=ANSWER_SECONDS)
                except WaitTimeoutError:
                    stopped = system.describe_stopped()
                    why = f" {stopped[0].upper()}{stopped[1:]}." if stopped else ""
                    self._deliver(Silent(f"The controller did not reply within {ANSWER_SECONDS:g} s.{why}"))
                except ENDED_ERRORS as error:
                    if not system.is_alive():
                        return
                    self._deliver(Silent(f"The controller cannot be reached: {error}"))
                else:
                    now = time.monotonic()
                    before, elapsed = statuses.add(status, now)
                    picture = make_picture(recording, status, before, elapsed)
                    log = system.log_of(("controller", 0))
                    self._deliver(Seen(system.name, system.description.started_at, log, picture, now))
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
                question = self._questions.get(timeout=left)
            except queue.Empty:
                return
            if question is not None:
                try:
                    question.answer(question.ask(client))
                except TransferQueueError as error:
                    question.answer(error)

    def _wait_for_successor(self) -> None:
        """Report that the system has ended, and wait for another one of its name."""
        old, when = self._system, time.strftime("%H:%M:%S")
        reported = ""
        while not self._stopped.wait(PAUSE):
            reason = _why_ended(old, when)
            if reason != reported:  # the logs of a crash exist only after a moment
                reported = reason
                self._deliver(SystemEnded(reason))
            later = find_successor(self._name, old)
            if later is not None:
                self._system = later
                self._deliver(Followed(f"The system {later.name} is a new one, {later.describe()}."))
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

Ask = Callable[[Callable[[Any], Any], Callable[[Any], None]], None]
"""Asks the controller: takes a function that makes the requests, and one that gets their result or their error."""


class LiveState:
    """The state that the screens share.

    Args:
        every: The seconds between two refreshes.
        ask: Asks the controller without blocking.
        clock: The time in seconds, as in `Seen.read_at`.
    """

    def __init__(self, every: float, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self.every = every
        """The seconds between two refreshes."""
        self.ask = ask
        """Asks the controller without blocking."""
        self.seen: Seen | None = None
        """The newest state; None before the first one."""
        self.shown: Seen | None = None
        """The state that the screens show: the newest one, unless they are paused."""
        self.paused = False
        """Whether the screens keep what they show."""
        self.silence = ""
        """Why the controller does not reply; "" if it does."""
        self.ended = ""
        """When and why the system ended; "" if it runs."""
        self.followed = ""
        """Which system is followed now; "" if it is the first one."""

    def add(self, news: News) -> bool:
        """Add what the reader has found. Returns whether the screens have to show something else."""
        if isinstance(news, Seen):
            self.seen, self.silence, self.ended = news, "", ""
            if not self.paused or self.shown is None:
                self.shown = news
                return True
        elif isinstance(news, Silent):
            self.silence = news.text
        elif isinstance(news, SystemEnded):
            self.ended = news.text
        elif isinstance(news, Followed):
            self.ended, self.followed = "", news.text
        return False

    def pause(self) -> None:
        """Pause, or continue with the newest state."""
        self.paused = not self.paused
        if not self.paused:
            self.shown = self.seen

    @property
    def age(self) -> float:
        """The age of what is shown, in seconds."""
        return self._clock() - self.shown.read_at if self.shown is not None else 0.0

    @property
    def silent_for(self) -> float:
        """The seconds since the newest state was read, or since the first one is waited for."""
        return self._clock() - (self.seen.read_at if self.seen is not None else self._begun)

    @property
    def is_old(self) -> bool:
        """Whether there should have been a newer state by now."""
        return self.silent_for > max(OLD_AFTER * self.every, MIN_OLD)

    def alarms(self) -> list[str]:
        """Return what is wrong, in sentences, the most important first."""
        if self.ended:
            return [f"{self.ended} Waiting for a new system of this name."]
        alarms = []
        if self.silence or self.is_old:
            text = self.silence or "The controller does not reply."
            log = f" Its log is in {self.seen.log}." if self.seen is not None and self.seen.log else ""
            alarms.append(f"{text} The newest data is {self.silent_for:.0f} s old.{log}" if self.seen else text)
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
        if self.followed and picture.now - shown.started_at < GAP_SHOWN:
            alarms.append(self.followed)
        return alarms
