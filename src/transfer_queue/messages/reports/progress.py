"""The parts of a `SystemStatus`: the progress of partitions and tasks, storage units, samplers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from transfer_queue.display import count_text, list_workers
from transfer_queue.messages.base import Finite, Message, Natural
from transfer_queue.messages.storage import ReadHold

MAX_RANKS = 8  # that a text names
_LOSS = re.compile(
    r" [\d,]+ samples? of partition (?:(?! may be lost to ).)+ may be lost to task .+?: "
    r"call (?P<remedy>reset_consumption\(.+?\)) to deliver .+? to avoid such losses\.",
    re.DOTALL,
)
"""A sentence of `describe_abandoned` in a verdict."""


def describe_held(task: str, held: Mapping[int, int], ranks: int) -> str:
    """Return a clause about rows that are held for ranks that have never asked; "" if there are none.

    Args:
        task: The task.
        held: dp_rank -> number of rows.
        ranks: The number of ranks of the task that have asked.
    """
    if not held:
        return ""
    task = task if task.isprintable() else repr(task)
    named = sorted(held)
    some = ", ".join(map(str, named[:MAX_RANKS])) + (", ..." if len(named) > MAX_RANKS else "")
    rows = count_text(sum(held.values()), "sample")
    are, holders = ("is" if sum(held.values()) == 1 else "are"), f"dp_rank{'s' if len(named) > 1 else ''} {some}"
    have = "have" if len(named) > 1 else "has"
    return (
        f"{rows} {are} held for {holders} of {task}, which {have} never asked; {task} has {count_text(ranks, 'rank')}: "
        f"pass dp_size={ranks} or a sampler to its StreamingDataset"
    )


def describe_abandoned(partition: str, task: str, abandoned: Mapping[str, int]) -> str:
    """Return a clause about samples that processes had claimed without a lease and not finished when they were gone.

    Args:
        partition: The partition.
        task: The task for which they had claimed them.
        abandoned: The process, for people -> number of samples. It must not be empty.
    """
    count = sum(abandoned.values())
    loss = describe_loss(partition, task, list(abandoned), count)
    return f"{count_text(count, 'sample')} of partition {partition!r} may be lost to {loss}"


def describe_loss(partition: str, task: str, processes: Sequence[str], count: int) -> str:
    """Return to which task samples may be lost, with the cause and the remedy. See `describe_abandoned`."""
    process, are = ("process", "is") if len(processes) == 1 else ("processes", "are")
    them = "it" if count == 1 else "them"
    return (
        f"task {task!r}, because the {process} that had claimed {them} without a lease {are} gone "
        f"({list_workers(processes)}): call reset_consumption({partition!r}, {task!r}) to deliver all samples to this "
        f"task again, and claim with lease= to avoid such losses"
    )


def without_repeated_losses(verdict: str, text: str) -> str:
    """Return the text of a verdict without the sentences about lost samples for which `text` names the same remedy."""
    for sentence in _LOSS.finditer(verdict):
        if sentence["remedy"] in text:
            verdict = verdict.replace(sentence[0], "")
    return verdict


class FieldProgress(Message, frozen=True):
    """The progress of one field of a partition."""

    name: str
    """The name of the field."""
    produced: int
    """The number of live rows that have the field."""
    type: str
    """The type of the field, for people."""
    produced_ever: int = 0
    """The number of rows that have had the field so far."""
    lost: int = 0
    """The number of live rows whose value was lost with its storage unit and not put again."""


class TaskProgress(Message, frozen=True):
    """The progress of one task of a partition."""

    name: str
    """The name of the task."""
    consumed: int
    """The number of live rows that the task has consumed."""
    waiting: int
    """The number of claims that wait."""
    longest_wait: float
    """The time in seconds for which the oldest of these claims has waited."""
    consumed_ever: int = 0
    """The number of rows consumed so far, including those cleared since. A row that is consumed again counts again."""
    claimed: int = 0
    """The number of live rows that are claimed under a lease."""
    held: dict[int, int] = {}
    """dp_rank -> number of live rows that are held for it, if the rank has never asked for a batch."""
    ranks: int = 0
    """The number of ranks that have asked for a batch, if the sampler deals to ranks."""
    abandoned: dict[str, int] = {}
    """A process that is gone, as `worker_text` names it -> number of live rows that it had claimed without a lease and
    that lack what the task puts, as far as the timeline shows it."""

    @property
    def held_text(self) -> str:
        """A clause about the rows that are held for ranks that have never asked; "" if there are none."""
        return describe_held(self.name, self.held, self.ranks)


class PolicyProgress(Message, frozen=True):
    """The flow control of a partition by policy version."""

    version: int
    """The policy version."""
    admitted: int
    """The number of rows accepted so far."""
    limit: int | None
    """The number of rows that may be accepted at this version; None for no limit."""
    max_staleness: int | None = None
    """By how many versions a row may be old when it is dealt; None for no limit."""


class PartitionProgress(Message, frozen=True):
    """One partition, as `tq status` shows it."""

    name: str
    """The name of the partition."""
    rows: int
    """The number of live rows."""
    reserved: int
    """The number of pre-allocated rows that no sample has taken yet."""
    sealed: bool
    """True if the partition is sealed."""
    group_size: int | None
    """The number of samples of each declared group; None if it is not declared."""
    nbytes: int
    """The number of bytes of the values, each counted once."""
    fields: list[FieldProgress]
    """The progress of each field."""
    tasks: list[TaskProgress]
    """The progress of each task."""
    orphaned_groups: int = 0
    """The number of groups that can never be complete."""
    dropped: dict[str, int] = {}
    """Reason -> number of samples dropped."""
    freed: int = 0
    """The number of rows that were cleared because the tasks of `free_when` have finished them."""
    policy: PolicyProgress | None = None
    """The flow control by policy version; None if the partition has none."""
    wanted: dict[str, tuple[int, int]] = {}
    """Task -> (groups wanted, groups missing)."""
    waiting_puts: int = 0
    """The number of puts and reservations that wait."""
    passed: dict[str, dict[str, int]] = {}
    """Task -> reason -> number of skipped rows, which the task will never be dealt."""
    stored: dict[str, int] = {}
    """Tier -> number of bytes there, every replica counted."""
    max_rows: int | None = None
    """The setting `max_rows`; None for no limit."""
    open_rows: int = 0
    """The number of rows that count for `max_rows`."""
    saved: int = 0
    """The number of bytes that the values would need more if equal ones were not stored once."""


class UnitProgress(Message, frozen=True):
    """A storage unit."""

    unit: int
    """The number of the unit."""
    tier: str
    """The tier of its blocks: memory, disk or an external store."""
    capacity: int
    """The capacity in bytes; 0 if it is not known."""
    leased: int
    """The number of bytes in extents that contain needed values."""
    drained: bool = False
    """True if everything is being moved off the unit."""
    viewed: int = 0
    """Bytes that are free when the last view of them ends."""
    views: list[ReadHold] = []
    """The clients that have views of its values (`get_data` with `copy=False`), of each process."""


class MirrorProgress(Message, frozen=True):
    """The mirror on disk, which has a copy of every value with `durability.values: machine`."""

    stored: int
    """Bytes of the copies on disk."""
    leased: int
    """Bytes of the extents that contain them."""
    behind_bytes: int
    """Bytes of published values that are not on disk yet."""
    behind_seconds: float
    """For how long the oldest of them has been published."""
    most_bytes: int
    """The most bytes that acknowledged puts may be behind; -1: every put waits until its values are on disk."""
    most_seconds: float
    """The same in seconds."""
    waiting: int
    """Puts that wait for the disk."""
    full: bool
    """Whether the disk had no space for the last values."""
    connected: bool
    """Whether the mirror is connected to the controller."""
    retired: int = 0
    """Bytes of the copies that are still in the mirrors of controllers before this one. They are moved out of them."""


class SamplerCost(Message, frozen=True):
    """The cost of a user's sampler.

    A sampler in its own process delays only the claims that use it; one in the controller's process delays all clients.
    """

    name: str
    """The name of the sampler."""
    calls: int
    """The number of its calls."""
    seconds: float
    """The total time of these calls in seconds."""
    longest: float
    """The time of the longest call in seconds."""
    restarts: int = 0
    """The number of restarts of its process."""


class Timing(Message, frozen=True):
    """A histogram of durations, over the bounds of `metrics.timing`."""

    name: str
    """The type of the request."""
    counts: list[Natural]
    """The number of durations in each bucket; the last bucket has those beyond all bounds."""
    seconds: Finite
    """The sum of the durations in seconds."""
    task: str = ""
    """The task, for requests that belong to one; "" for others."""
