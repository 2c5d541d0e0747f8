"""Measures a server's process."""

from __future__ import annotations

import os
import time

from transfer_queue.messages.reports.progress import Timing
from transfer_queue.messages.reports.unit_reports import ServerMeasures
from transfer_queue.metrics.timing import Load
from transfer_queue.net.server.server_loop import ServerLoop

PAGE = os.sysconf("SC_PAGE_SIZE")
REASONS = {
    "rejected": "unauthenticated", "refused": "refused", "broken": "broken", "crowded": "crowded", "slow": "slow",
    "accept_errors": "descriptors", "errors": "error",
}  # fmt: skip
"""Counters of `net.server.server_loop.ServerLoop` -> their names in metrics."""

EVENTS = ("request", "tick", "work", "commit", "idle")
"""The kinds of events of a loop. The longest one is reported as 0.0 if none was notable."""


class ProcessMetrics:
    """Measures this process: its server loop and the load of its service."""

    def __init__(self, server: ServerLoop, load: Load) -> None:
        self._server = server
        self._load = load
        self._started = time.time()

    def measures(self, waits: list[Timing]) -> ServerMeasures:
        """Return all current measures."""
        rejected = {reason: self._server.counters[name] for name, reason in REASONS.items()}
        longest = self._load.longest.by_event(time.monotonic())
        return ServerMeasures(
            requests=self._load.timings(),
            waits=waits,
            failures=dict(self._load.failures),
            rejected={**rejected, "malformed": self._load.malformed},
            longest={event: longest.get(event, (0.0, ""))[0] for event in EVENTS},
            connections=self._server.connections,
            accepted=self._server.counters["accepted"],
            cpu=time.process_time(),
            resident=resident_bytes(),
            started=self._started,
        )


def resident_bytes() -> int:
    """Return the bytes of memory that this process uses; 0 if the operating system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:
        return 0
