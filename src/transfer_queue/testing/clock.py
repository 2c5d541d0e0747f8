"""A clock that moves only when it is told to."""

from __future__ import annotations


class VirtualClock:
    """now: seconds, from 0."""

    def __init__(self) -> None:
        self.now = 0.0

    def move_to(self, when: float) -> None:
        """It is `when` now. Nothing happens by it: the cluster ticks its servers."""
        if when < self.now:
            raise ValueError(f"time does not go back: it is {self.now} s, and {when} s is asked for")
        self.now = when
