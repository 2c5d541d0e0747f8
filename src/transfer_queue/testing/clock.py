"""A clock that moves only when it is told to."""

from __future__ import annotations


class VirtualClock:
    """now: seconds, from 0."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        """Time passes. Nothing happens by it: the cluster ticks its servers."""
        if seconds < 0:
            raise ValueError(f"time does not go back, and {seconds} s is asked for")
        self.now += seconds
