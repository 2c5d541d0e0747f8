"""How far everything is: what `SystemStatus` is made of."""

from __future__ import annotations

from transfer_queue.messages.base import Finite, Message, Natural


class FieldProgress(Message, frozen=True):
    """A field of a partition: how many live rows have it, its type in words, and how many rows have had it so far.

    lost: live rows whose value was lost with its storage, and not put again.
    """

    name: str
    produced: int
    type: str
    produced_ever: int = 0
    lost: int = 0


class TaskProgress(Message, frozen=True):
    """A task of a partition: live rows consumed, claims waiting and for how long the longest has.

    consumed_ever: rows consumed so far, those cleared since included; rows consumed anew count anew.
    claimed: live rows that were given under a lease and wait for an ack.
    """

    name: str
    consumed: int
    waiting: int
    longest_wait: float
    consumed_ever: int = 0
    claimed: int = 0


class PolicyProgress(Message, frozen=True):
    """Admission to a partition: the policy's version, rows taken in, and how many may be by now (None: any)."""

    version: int
    admitted: int
    limit: int | None


class PartitionProgress(Message, frozen=True):
    """One partition as `tq status` shows it.

    dropped: reason -> samples. freed: rows cleared because the tasks of `free_when` have finished them.
    wanted: task -> (groups wanted, groups missing). waiting_puts: puts and reservations that wait.
    passed: task -> reason -> samples passed over, which the task was not dealt and never will be.
    nbytes: of the values, each counted once; stored: tier -> bytes there, every copy counted.
    """

    name: str
    rows: int
    reserved: int
    sealed: bool
    group_size: int | None
    nbytes: int
    fields: list[FieldProgress]
    tasks: list[TaskProgress]
    orphaned_groups: int = 0
    dropped: dict[str, int] = {}
    freed: int = 0
    policy: PolicyProgress | None = None
    wanted: dict[str, tuple[int, int]] = {}
    waiting_puts: int = 0
    passed: dict[str, dict[str, int]] = {}
    stored: dict[str, int] = {}


class UnitProgress(Message, frozen=True):
    """A storage unit. tier: see `UnitInfo.told_tier`. drained: everything is being moved off it.

    Bytes: capacity (0: not known), leased (of extents that hold needed values, as the controller knows it).
    """

    unit: int
    tier: str
    capacity: int
    leased: int
    drained: bool = False


class SamplerCost(Message, frozen=True):
    """A user's sampler: the number of its calls, their time in seconds, and the restarts of its process.

    A sampler in its own process holds up only the claims that use it; one in the controller's process holds up all
    clients.
    """

    name: str
    asked: int
    seconds: float
    longest: float
    restarts: int = 0


class Timing(Message, frozen=True):
    """How long something took, each time: a histogram over the bounds of `metrics.timing`. seconds: all together.

    name: the type of a request. task: of those that belong to one. counts: of each bucket; the last is for those
    beyond all bounds.
    """

    name: str
    counts: list[Natural]
    seconds: Finite
    task: str = ""
