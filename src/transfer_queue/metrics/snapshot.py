"""The measurements that one scrape has collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.reports.progress import PartitionProgress, SamplerCost, Timing
from transfer_queue.messages.reports.unit_reports import Measured, ServerMeasures


@dataclass(frozen=True)
class JournalMeasures:
    """Measurements of the journal."""

    size: int
    """The length of all files in bytes."""
    records: int
    """The number of records since the last snapshot."""
    nbytes: int
    """The length of these records in bytes."""
    age: float
    """The time in seconds since the last snapshot."""
    commits: Timing
    """The time of commits."""
    last_commit: float
    """The time of the last commit in seconds."""
    failures: int
    """The number of failed commits."""
    trouble: bool
    """Whether the journal cannot be written now."""
    snapshot_failing: bool
    """Whether the last snapshot could not be written."""


@dataclass(frozen=True)
class Snapshot:
    """The system at one moment, or within some milliseconds, because a large state is read in steps."""

    server: ServerMeasures
    """The measurements of the controller's process."""
    counters: Mapping[str, float]
    """`ControllerMeasures.counters`."""
    count: int
    """The number of all partitions."""
    partitions: list[PartitionProgress]
    """The partitions that are reported by name, and if there are more, one with the sums of all others."""
    samplers: list[SamplerCost]
    """The cost of each user's sampler."""
    infos: list[UnitInfo]
    """All storage units."""
    units: Mapping[int, Measured | None]
    """Unit -> its measurements; None if it did not reply."""
    live: Mapping[int, int]
    """Unit -> bytes of its blocks that are needed."""
    series: Mapping[str, Mapping[tuple[str, ...], float]]
    """Name -> label values -> value, for `samples.series`."""
    journal: JournalMeasures | None
    """The measurements of the journal; None if the system has no journal."""
    timings: Mapping[str, list[Timing]] = field(default_factory=dict)
    """Name -> histograms of tasks, for `samples.per_task_timing`."""
    time: float = 0.0
    """The time of the scrape, in seconds since the epoch."""
