"""What one scrape has collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.progress import PartitionProgress, SamplerCost, Timing
from transfer_queue.messages.unit_reports import Measured, ServerMeasures


@dataclass(frozen=True)
class JournalMeasures:
    """size: bytes of all files. records, nbytes: since the last snapshot, which is so many seconds old.

    last_commit: seconds that it took. failures: of commits. trouble: it cannot be written now.
    """

    size: int
    records: int
    nbytes: int
    age: float
    commits: Timing
    last_commit: float
    failures: int
    trouble: bool
    snapshot_failing: bool


@dataclass(frozen=True)
class Snapshot:
    """The system at one moment, or within some milliseconds: a large state is read in steps."""

    server: ServerMeasures
    """What the controller's process measured of itself."""
    counters: Mapping[str, float]
    """`Controller.counters`."""
    count: int
    """The number of all partitions."""
    partitions: list[PartitionProgress]
    """The partitions that are reported by name, and perhaps one that stands for all others."""
    samplers: list[SamplerCost]
    """What each user's sampler costs."""
    infos: list[UnitInfo]
    """All storage units."""
    units: Mapping[int, Measured | None]
    """Unit -> what it measured of itself; None if it did not answer."""
    live: Mapping[int, int]
    """Unit -> bytes of the blocks that are needed there."""
    series: Mapping[str, Mapping[tuple[str, ...], float]]
    """Name -> label values -> value, for `samples.series`."""
    journal: JournalMeasures | None
    """What the journal measured; None if the system has no journal."""
