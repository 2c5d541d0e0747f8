"""What servers have measured of themselves: for metrics and status.

A histogram travels as how many of its values fell into each bucket of `metrics.timing`, the last one being for those
beyond all bounds, and as their sum. Seconds and bytes throughout.
"""

from __future__ import annotations

from transfer_queue.messages.base import Finite, Message, Natural
from transfer_queue.messages.progress import Timing
from transfer_queue.messages.replies import UnitStatusReply


class ServerMeasures(Message, frozen=True):
    """One server's process and its loop.

    requests: type -> time in the loop. waits: of what could not be answered at once, until it was. failures: name of
    an error -> answers with it. rejected: reason -> connections, or messages, that were not served. longest: kind of
    event -> the longest of late (`metrics.timing.Longest`). connections: open now; accepted: so far. cpu, resident:
    of the process; started: when it was, since the epoch.
    """

    requests: list[Timing]
    waits: list[Timing]
    failures: dict[str, Natural]
    rejected: dict[str, Natural]
    longest: dict[str, Finite]
    connections: Natural
    accepted: Natural
    cpu: Finite
    resident: Natural
    started: Finite


class UnitMeasures(Message, frozen=True):
    """One storage unit.

    waiting: leases that wait for space, and for how long the longest has. counters: of the unit, by name.
    """

    space: UnitStatusReply
    extents: Natural
    waiting: Natural
    longest_wait: Finite
    draining: bool
    counters: dict[str, Finite] = {}
