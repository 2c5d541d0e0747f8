"""When a wait is long enough for a line in the log: after a while, and then whenever it has doubled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfer_queue.utils.logging_utils import get_logger


class LongWait:
    """A wait for one thing after the other, each of which may take many requests. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._awaited: Any = None
        self._since = 0.0
        self._reported = 0.0

    def begin(self, awaited: Any) -> None:
        """Something is waited for; if it is the same as before, the wait goes on."""
        if awaited != self._awaited:
            self._awaited, self._since, self._reported = awaited, self._clock(), 0.0

    def due(self, first: float | None) -> float | None:
        """Seconds of the wait if they are to be reported now, else None.

        first: seconds after which a wait is reported for the first time; None: never.
        """
        waited = self._clock() - self._since
        if first is None or waited < (2 * self._reported or first):
            return None
        self._reported = waited
        return waited


def report(name: str, waited: float, words: str) -> None:
    """Logs what a caller waits for. name: of the logger. words: what `explain` says."""
    get_logger(name).warning(f"Still waiting after {waited:.3g} s. {words}")
