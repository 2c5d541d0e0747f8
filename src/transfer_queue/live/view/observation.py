"""What one read of a system has found: the input of all parts of a view."""

from __future__ import annotations

from dataclasses import dataclass, field

from transfer_queue.live.reading.partition_counter import GroupCounts
from transfer_queue.messages.reports.overview import ServersReply
from transfer_queue.messages.reports.progress import PartitionProgress
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.recording import Recording

IN_FULL = 3
"""Partitions that are shown in full."""


@dataclass
class Explained:
    """What the controller said about the claims of a task."""

    text: str = ""
    sample: int | None = None
    """The sample that is nearest to ready."""


@dataclass
class Observation:
    """The state of a system at the end of a recording."""

    recording: Recording
    """What happened."""
    status: SystemStatus
    """The progress of the partitions in which something happens, and the counters."""
    partitions: dict[str, PartitionProgress] = field(default_factory=dict)
    """The progress of all partitions that are known so far, the newest last."""
    newest: list[str] = field(default_factory=list)
    """The partitions that were created last, the newest first."""
    active: list[str] = field(default_factory=list)
    """The partitions that are claimed or put into, the most recent first."""
    count: int = 0
    """The number of all partitions."""
    rows: int = 0
    """The live rows of all partitions."""
    nbytes: int = 0
    """The bytes of all values."""
    servers: ServersReply | None = None
    """The measures of the servers; None if they are not known yet."""
    before: ServersReply | None = None
    """The measures before these."""
    between: float = 0.0
    """The seconds between these measures and those before."""
    explained: dict[tuple[str, str, tuple[str, ...]], Explained] = field(default_factory=dict)
    """(task, partition, fields) -> why its claims wait."""
    groups: dict[str, GroupCounts] = field(default_factory=dict)
    """Partition -> the groups that the last task takes."""
    logs: str = ""
    """The folder of the logs."""
    own_clients: int = 1
    """The connected clients that belong to this process."""

    @property
    def shown(self) -> list[str]:
        """The partitions that are shown in full, the oldest first."""
        chosen = set(self.active[:IN_FULL]) or set(self.newest[:IN_FULL])
        return [name for name in self.partitions if name in chosen]
