"""What the controller counts and times for status and metrics. None of it is part of the state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from transfer_queue.metrics.timing import Load, Waits


class ControllerMeasures:
    """The counters and timings of the controller and of the server around it."""

    def __init__(self) -> None:
        self.counters = defaultdict[str, float](float, requests=0, failures=0, dealt_rows=0, published_rows=0)
        self.server_counters: Mapping[str, float] = {}
        """The counters of the server's connections. The server sets them."""
        self.load = Load()
        """What the server's loop has had to do. The server sets and measures it."""
        self.waits = Waits()
        """How long requests were parked."""
