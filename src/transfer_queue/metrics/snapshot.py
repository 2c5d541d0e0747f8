"""What one scrape has collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transfer_queue.messages import (
    Measured,
    PartitionProgress,
    SamplerCost,
    ServerMeasures,
    Timing,
    UnitInfo,
)


@dataclass(frozen=True)
class LeaseMeasures:
    """in_force: (partition, task) -> leases. granted, acknowledged: task -> leases and rows, so far.

    redelivered: (task, reason) -> rows.
    """

    in_force: Mapping[tuple[str, str], int] = field(default_factory=dict)
    granted: Mapping[str, int] = field(default_factory=dict)
    acknowledged: Mapping[str, int] = field(default_factory=dict)
    redelivered: Mapping[tuple[str, str], int] = field(default_factory=dict)


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
    """The system at one moment, or within some milliseconds: a large state is looked at in steps.

    partitions: those that are told by name, and perhaps one that stands for all others; count: of all. infos: all
    units. units: number -> what the unit said of itself, None where it has not answered. live: unit -> bytes that are
    needed there. values: (partition, tier) -> values there.
    """

    server: ServerMeasures
    counters: Mapping[str, float]
    count: int
    partitions: list[PartitionProgress]
    samplers: list[SamplerCost]
    leases: LeaseMeasures
    infos: list[UnitInfo]
    units: Mapping[int, Measured | None]
    live: Mapping[int, int]
    values: Mapping[tuple[str, str], int]
    journal: JournalMeasures | None
