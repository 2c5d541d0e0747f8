"""The rows of the tables of `tq top`: stages, waits, partitions, memory, load, ranks and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from transfer_queue.messages.reports.progress import FieldProgress, PartitionProgress, TaskProgress, UnitProgress
from transfer_queue.timeline.account import Spread, TaskAccount

UNKNOWN = Spread(-1.0, -1.0, -1.0)
"""The age or staleness of rows if it is not known."""


@dataclass(frozen=True)
class StageRow:
    """A task, as a line of the table of stages."""

    account: TaskAccount
    """Its shares, rates, ranks and queue."""
    slowest: bool
    """True if the verdict names it."""
    missing: tuple[tuple[str, str | None, float], ...]
    """(field, task that puts it, share of the waiting) of what it waits for, the largest share first."""
    age: Spread
    """For how many seconds claimed rows were ready before; `UNKNOWN` if this is not known."""
    staleness: Spread
    """By how many policy versions claimed rows were old; `UNKNOWN` if this is not known."""
    nbytes: float
    """The bytes that it puts, in bytes per second."""
    history: tuple[float, ...]
    """The rows per second that it claimed, or put if it claims none, in equal parts of the last minute."""
    hold_cause: str
    """What holds its puts back, as in `Account.hold_causes`; "" if nothing does, or it is not known."""

    @property
    def name(self) -> str:
        """The name of the task; "" for clients without a task."""
        return self.account.name

    @property
    def state(self) -> str:
        """What it does for the largest part of its time: waits, held, works, idle; or gone, if no rank is left."""
        account = self.account
        if not account.alive:
            return "gone" if account.lost else "ended"
        shares = {"waits": account.waits, "held": account.held, "works": account.works, "idle": account.idle}
        state = max(shares, key=lambda name: shares[name])
        return "works" if state == "idle" and not account.takes else state


@dataclass(frozen=True)
class WaitMember:
    """A request that waits."""

    rank: str
    """The name of its rank."""
    process: str
    """Its process, for people; "" if it is not known, or if it is the name already."""
    seconds: float
    """For how many seconds it has waited."""
    rows: int
    """The number of rows that it waits to get, or to put."""


@dataclass(frozen=True)
class WaitRow:
    """The requests of one task that wait for the same fields."""

    task: str
    """The task; "" for clients without one."""
    partition: str
    """The partition."""
    fields: tuple[str, ...]
    """The fields of the claims; empty for puts."""
    kind: str
    """"waits": claims. "held": puts and reservations. "early": claims for a batch that the rank does not need yet."""
    seconds: float
    """For how many seconds the oldest of them has waited."""
    rows: int
    """The number of rows that the oldest one waits to get, or to put."""
    members: tuple[WaitMember, ...]
    """Each request, the oldest first."""
    rarest: str
    """The field among them that the fewest samples of the partition have; "" for puts."""
    producers: tuple[str, ...]
    """The tasks that put the rarest field."""
    demand: bool = False
    """True if producers wait for group demand."""


@dataclass(frozen=True)
class PartitionRow:
    """A partition, as a line of the table of partitions."""

    progress: PartitionProgress
    """Its progress."""
    put_rate: float
    """The rows of its puts, in rows per second."""
    claim_rate: float
    """The rows of its claims, in rows per second."""
    rarest: tuple[str, int]
    """The field that the fewest samples have, and their number; ("", 0) without fields."""
    slowest: tuple[str, int]
    """The task that has consumed the fewest samples, and their number; ("", 0) without tasks."""
    waiting: int
    """The number of claims and puts that wait."""


@dataclass(frozen=True)
class FieldRow:
    """A field of a partition."""

    progress: FieldProgress
    """Its progress."""
    rows: int
    """The samples of the partition."""
    speed: float | None
    """The rows per second that get it; None if this is not known."""
    producers: Sequence[str]
    """The tasks that put it."""


@dataclass(frozen=True)
class TaskRow:
    """A task of a partition."""

    progress: TaskProgress
    """Its progress."""
    partition: PartitionProgress
    """The partition."""
    speed: float | None
    """The rows per second that it consumes; None if this is not known."""


@dataclass(frozen=True)
class MemoryRow:
    """A tier, or one storage unit of it."""

    tier: str
    """The tier."""
    unit: UnitProgress | None
    """The unit; None for the sum of the tier."""
    units: int
    """The number of units."""
    held: int | None
    """The bytes of values that partitions have, every replica counted; None for a single unit, for which they are not
    known."""
    leased: int
    """The bytes of extents that contain needed values."""
    capacity: int
    """The capacity in bytes; 0 if it is not known."""


@dataclass(frozen=True)
class LoadRow:
    """A type of request of the controller, or a user's sampler."""

    name: str
    """The type of the request, or the name of the sampler."""
    rate: float | None
    """Requests per second since the previous refresh; None at the first one."""
    busy: float | None
    """The share of the time since the previous refresh for which they kept the loop busy; None at the first one."""
    typical: float
    """The time of one in seconds, on average."""
    slow: float
    """The seconds within which 99 % were served; for a sampler, its longest call."""
    total: int
    """The number of all."""
    sampler: bool = False
    """True for a sampler."""


@dataclass(frozen=True)
class RankRow:
    """A rank of a task, with what it did in the window."""

    worker: int
    """Its position in `TaskWorkers`."""
    name: str
    """Its name, for people."""
    number: int
    """The rank; -1 if it is not known."""
    client: str
    """The id of its newest client."""
    process: str
    """The process of its newest client, for people; "" if it is not known, or if it is the name already."""
    state: str
    """What it does now: waits, held, works, idle, gone, or "" if that is not known."""
    seconds: float
    """For how many seconds it has done so; NaN if that is not known."""
    shares: Mapping[str, float]
    """State -> share of the window."""
    rate: float
    """The rows that it claims, or puts if its task claims none, in rows per second."""
    spans: tuple[np.ndarray, np.ndarray, np.ndarray]
    """The start, the end and the `SpanState` of each of its spans in the window."""


@dataclass(frozen=True)
class SampleRow:
    """A sample of a partition."""

    index: int
    """Its global index."""
    key: str | None
    """Its key; None if it has none."""
    tag: Mapping[str, object]
    """Its tag."""
    fields: tuple[str, ...]
    """The fields of the partition."""
    produced: tuple[bool, ...]
    """Whether it has each of these fields."""
    tasks: tuple[str, ...]
    """The tasks of the partition."""
    consumed: tuple[bool, ...]
    """Whether each of these tasks has consumed it."""

    @property
    def missing(self) -> list[str]:
        """The fields that it does not have."""
        return [name for name, has in zip(self.fields, self.produced) if not has]

    @property
    def consumers(self) -> list[str]:
        """The tasks that have consumed it."""
        return [name for name, took in zip(self.tasks, self.consumed) if took]
