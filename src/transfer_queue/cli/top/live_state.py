"""What is known of the followed system: its newest state, the state that is shown, and what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transfer_queue.cli.top.follower import Followed, News, Seen, Silent, SystemEnded
from transfer_queue.display import time_of_day

OLD_AFTER = 3.0  # refreshes without a reply until the data counts as old
LEAST_OLD = 3.0  # the same in seconds, at least
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
            self.silence = news.words
        elif isinstance(news, SystemEnded):
            self.ended = news.words
        elif isinstance(news, Followed):
            self.ended, self.followed = "", news.words
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
        return self.silent_for > max(OLD_AFTER * self.every, LEAST_OLD)

    def alarms(self) -> list[str]:
        """Return what is wrong, in sentences, the most important first."""
        if self.ended:
            return [f"{self.ended} Waiting for a new system of this name."]
        found = []
        if self.silence or self.is_old:
            words = self.silence or "The controller does not reply."
            log = f" Its log is in {self.seen.log}." if self.seen is not None and self.seen.log else ""
            found.append(f"{words} The newest data is {self.silent_for:.0f} s old.{log}" if self.seen else words)
        if self.shown is not None:
            found += self._alarms_of(self.shown)
        return found

    def _alarms_of(self, shown: Seen) -> list[str]:
        found, picture = [], shown.picture
        if picture.status.trouble:
            found.append(f"Changes are blocked: {picture.status.trouble}")
        gap = picture.gap
        if gap is not None and picture.now - gap.end < GAP_SHOWN:
            what = f"{gap.missed:,} events were missed" if gap.missed else "The controller restarted: no events"
            found.append(f"{what} between {time_of_day(gap.start)} and {time_of_day(gap.end)}.")
        if self.followed and picture.now - shown.started_at < GAP_SHOWN:
            found.append(self.followed)
        return found
