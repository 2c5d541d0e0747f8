"""What `tq top` shows at one moment: the rows of its tables, computed from a recording and a status."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from transfer_queue.cli.status_table import Rates, rates
from transfer_queue.messages.queries import SnapshotReply
from transfer_queue.messages.reports.progress import FieldProgress, PartitionProgress, TaskProgress, UnitProgress
from transfer_queue.messages.reports.timeline import Lane, Verdict
from transfer_queue.messages.system import SystemStatus
from transfer_queue.messages.tag_table import tag_rows
from transfer_queue.metrics.timing import LOOP_BOUNDS, quantile
from transfer_queue.timeline.account import Account, Spread, TaskAccount
from transfer_queue.timeline.event_table import order_by_flow
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.recording import Gap, Recording
from transfer_queue.timeline.spans import STATE_NAMES, SpanState
from transfer_queue.timeline.verdict import judge_with_account

MAX_ORDERED = 200  # stages that are put into the order of the pipeline
HISTORY_SECONDS = 60.0  # the length of the history of a rate
HISTORY_BINS = 30


@dataclass(frozen=True)
class Picture:
    """The state of a system at one moment."""

    verdict: Verdict
    """What slows the training."""
    account: Account
    """The account of time of the window that the verdict is about."""
    status: SystemStatus
    """The progress of the partitions, and the load of the controller."""
    before: SystemStatus | None
    """The status of some seconds before; None if it is not known."""
    elapsed: float
    """The seconds between the earlier status and this one."""
    stages: tuple[StageRow, ...]
    """The tasks, in the order of the pipeline."""
    waits: tuple[WaitRow, ...]
    """What waits, the oldest first; claims that are early come last."""
    partitions: tuple[PartitionRow, ...]
    """The partitions."""
    memory: tuple[MemoryRow, ...]
    """The tiers, each followed by its units."""
    load: tuple[LoadRow, ...]
    """The requests by the time that they take, and the samplers."""

    @property
    def now(self) -> float:
        """The moment, in Unix seconds by the controller's clock."""
        return self.account.table.recording.now

    @property
    def window(self) -> float:
        """The length of the window of rates and shares, in seconds."""
        return self.account.spans.line.length

    @property
    def gap(self) -> Gap | None:
        """The newest gap in the recording; None if there is none."""
        return next(reversed(self.account.table.recording.gaps), None)

    def partition(self, name: str) -> PartitionRow | None:
        """Return the partition of this name; None if it does not exist."""
        return next((each for each in self.partitions if each.progress.name == name), None)

    def stage(self, name: str) -> StageRow | None:
        """Return the task of this name; None if the recording has none."""
        return next((each for each in self.stages if each.name == name), None)

    def rates_of(self, partition: PartitionProgress) -> Rates:
        """Return the rates of the fields and tasks of one partition; empty if there is no earlier status."""
        if self.before is None or self.elapsed <= 0:
            return {}
        old = [each for each in self.before.partitions if each.name == partition.name]
        return rates(SystemStatus(old, {}), SystemStatus([partition], {}), self.elapsed)


def make_picture(
    recording: Recording, status: SystemStatus, before: SystemStatus | None = None, elapsed: float = 0.0
) -> Picture:
    """Return what the screen shows at the end of a recording.

    Args:
        recording: The timeline. The picture is valid until the recording gets the next reply.
        status: The status of the same time.
        before: A status of some seconds before. Default: none, so that rates of requests are not known.
        elapsed: The seconds between the two.
    """
    verdict, account = judge_with_account(recording, status)
    return Picture(
        verdict, account, status, before, elapsed,
        tuple(list_stages(account, verdict)), tuple(list_waits(account, status)),
        tuple(list_partitions(account, status)), tuple(list_memory(status)),
        tuple(list_load(status, before, elapsed)),
    )  # fmt: skip


# ---------------------------------------------------------------- stages


@dataclass(frozen=True)
class StageRow:
    """A task, as a line of the table of stages."""

    account: TaskAccount
    """Its shares, rates, ranks and queue."""
    slowest: bool
    """True if the verdict names it."""
    missing: tuple[tuple[str, str | None, float], ...]
    """(field, task that puts it, share of the waiting) of what it waits for, the largest share first."""
    age: Spread | None
    """For how many seconds claimed rows were ready before; None if this is not known."""
    staleness: Spread | None
    """By how many policy versions claimed rows were old; None if this is not known."""
    nbytes: float
    """The bytes that it puts, in bytes per second."""
    history: Sequence[float]
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


def list_stages(account: Account, verdict: Verdict) -> Iterator[StageRow]:
    """Return the tasks in the order of the pipeline."""
    table, seconds = account.table, max(account.spans.line.length, 1e-9)
    puts, tasks = table.of(EventKind.PUT), table.workers.tasks
    first = puts.first_after(account.spans.line.start)
    nbytes = np.bincount(puts.task[first:] + 1, puts.column("bytes")[first:].astype(np.float64), len(tasks) + 1)
    start, step = table.recording.now - HISTORY_SECONDS, HISTORY_SECONDS / HISTORY_BINS
    histories = {kind: table.rows_over_time(kind, start, step, HISTORY_BINS) / step for kind in (_CLAIM, _PUT)}
    names = list(account.tasks)
    for name in names if len(names) > MAX_ORDERED else order_by_flow(table, names):
        task, number = account.tasks[name], tasks.index(name)
        missing = sorted(account.missing.get(name, {}).items(), key=lambda each: -each[1])
        total = sum(share for _, share in missing)
        yield StageRow(
            task, verdict.stage == name,
            tuple((field, maker, share / total) for (field, maker), share in missing if field and share > 0),
            account.ages.get(name), account.staleness.get(name), float(nbytes[number + 1]) / seconds,
            histories[_CLAIM if task.takes else _PUT][number].tolist(), account.hold_causes.get(name, ""),
        )  # fmt: skip


_CLAIM, _PUT = EventKind.CLAIM, EventKind.PUT


# ---------------------------------------------------------------- waits


@dataclass(frozen=True)
class WaitMember:
    """A request that waits."""

    lane: Lane
    """Its client."""
    seconds: float
    """For how many seconds it has waited."""
    rows: int
    """The number of rows that it waits to get, or to put."""


@dataclass(frozen=True)
class WaitRow:
    """The requests of one task that wait for the same fields."""

    kind: str
    """"waits": claims. "held": puts and reservations. "early": claims for a batch that the rank does not need yet."""
    task: str
    """The task; "" for clients without one."""
    partition: str
    """The partition."""
    fields: tuple[str, ...]
    """The fields of the claims; empty for puts."""
    demand: bool
    """True if producers wait for group demand."""
    members: Sequence[WaitMember]
    """Each request, the oldest first."""
    rarest: str
    """The field among them that the fewest samples of the partition have; "" for puts."""
    producers: tuple[str, ...]
    """The tasks that put the rarest field."""

    @property
    def key(self) -> tuple[str, str, str, tuple[str, ...]]:
        """Identifies the wait."""
        return self.kind, self.task, self.partition, self.fields

    @property
    def seconds(self) -> float:
        """For how many seconds the oldest of them has waited."""
        return self.members[0].seconds

    @property
    def rows(self) -> int:
        """The number of rows that the oldest one waits to get, or to put."""
        return self.members[0].rows


def list_waits(account: Account, status: SystemStatus) -> list[WaitRow]:
    """Return the open claims, puts and reservations, grouped by what they wait for."""
    recording = account.table.recording
    groups: dict[tuple[str, str, str, tuple[str, ...], bool], list[WaitMember]] = defaultdict(list)
    for wait in recording.open:
        lane = recording.lanes[wait.lane]
        kind = "held" if wait.holds else "early" if wait.ahead else "waits"
        member = WaitMember(lane, max(recording.now - wait.since, 0.0), wait.rows)
        groups[kind, lane.task, wait.partition, tuple(wait.fields), wait.demand].append(member)
    progress = {each.name: each for each in status.partitions}
    rows = []
    for (kind, task, partition, fields, demand), members in groups.items():
        produced = {each.name: each.produced for each in progress[partition].fields} if partition in progress else {}
        rarest = min(fields, key=lambda name: produced.get(name, 0), default="")
        others = tuple(maker for maker in account.table.producers.get(rarest, ()) if maker != task)
        members.sort(key=lambda each: -each.seconds)
        rows.append(WaitRow(kind, task, partition, fields, demand, members, rarest, others))
    return sorted(rows, key=lambda row: (row.kind == "early", -row.seconds))


# ---------------------------------------------------------------- partitions


@dataclass(frozen=True)
class PartitionRow:
    """A partition, as a line of the table of partitions."""

    progress: PartitionProgress
    """Its progress."""
    put_rate: float
    """The rows of its puts, in rows per second."""
    claim_rate: float
    """The rows of its claims, in rows per second."""

    @property
    def rarest(self) -> FieldProgress | None:
        """The field that the fewest samples have; None without fields."""
        return min(self.progress.fields, key=lambda each: each.produced, default=None)

    @property
    def slowest(self) -> TaskProgress | None:
        """The task that has consumed the fewest samples; None without tasks."""
        return min(self.progress.tasks, key=lambda each: each.consumed, default=None)

    @property
    def waiting(self) -> int:
        """The number of claims and puts that wait."""
        return sum(task.waiting for task in self.progress.tasks) + self.progress.waiting_puts


def list_partitions(account: Account, status: SystemStatus) -> Iterator[PartitionRow]:
    """Return the partitions in the order of the status."""
    put, claimed = _rates_by_partition(account, _PUT), _rates_by_partition(account, _CLAIM)
    for each in status.partitions:
        yield PartitionRow(each, put.get(each.name, 0.0), claimed.get(each.name, 0.0))


def _rates_by_partition(account: Account, kind: EventKind) -> dict[str, float]:
    """Return the rows per second of the events of one kind in each partition that has some."""
    events, names = account.table.of(kind), account.table.recording.partitions
    first = events.first_after(account.spans.line.start)
    sums = np.bincount(events.partition[first:], events.rows[first:], len(names))
    seconds = max(account.spans.line.length, 1e-9)
    return {names[at]: float(sums[at]) / seconds for at in np.flatnonzero(sums).tolist()}


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


# ---------------------------------------------------------------- memory and load


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


def list_memory(status: SystemStatus) -> Iterator[MemoryRow]:
    """Return each tier, followed by its units."""
    held: dict[str, int] = defaultdict(int)
    for partition in status.partitions:
        for tier, nbytes in partition.stored.items():
            held[tier] += nbytes
    for tier in dict.fromkeys([*(unit.tier for unit in status.units), *held]):
        units = [unit for unit in status.units if unit.tier == tier]
        leased, capacity = sum(unit.leased for unit in units), sum(unit.capacity for unit in units)
        yield MemoryRow(tier, None, len(units), held[tier], leased, capacity)
        yield from (MemoryRow(tier, unit, 1, None, unit.leased, unit.capacity) for unit in units)


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


def list_load(status: SystemStatus, before: SystemStatus | None, elapsed: float) -> Iterator[LoadRow]:
    """Return the types of requests by the time that they took, the busiest first, and the samplers."""
    old = {} if before is None else {(each.name, each.task): each for each in before.requests}
    known = before is not None and elapsed > 0
    rows = []
    for each in status.requests:
        was = old.get((each.name, each.task))
        count, seconds = sum(each.counts), each.seconds
        more, longer = count - (sum(was.counts) if was else 0), seconds - (was.seconds if was else 0.0)
        if more < 0 or longer < 0:  # the controller has restarted
            more, longer = count, seconds
        rows.append(
            LoadRow(
                f"{each.name} {each.task}".rstrip(), more / elapsed if known else None,
                longer / elapsed if known else None, seconds / max(count, 1),
                quantile(LOOP_BOUNDS, each.counts, 0.99), count,
            )
        )  # fmt: skip
    yield from sorted(rows, key=lambda row: (-(row.busy or 0.0), -row.typical * row.total))
    for cost in status.samplers:
        yield LoadRow(cost.name, None, None, cost.seconds / max(cost.calls, 1), cost.longest, cost.calls, True)


# ---------------------------------------------------------------- ranks


@dataclass(frozen=True)
class RankRow:
    """A rank of a task, with what it did in the window."""

    lane: Lane
    """The rank with its newest client."""
    state: str
    """What it does now: waits, held, works, idle, gone, or "" if that is not known."""
    seconds: float | None
    """For how many seconds it has done so; None if that is not known."""
    shares: Mapping[str, float]
    """State -> share of the window."""
    rate: float
    """The rows that it claims, or puts if its task claims none, in rows per second."""
    spans: tuple[np.ndarray, np.ndarray, np.ndarray]
    """The start, the end and the `SpanState` of each of its spans in the window."""


def list_ranks(picture: Picture, task: str) -> list[RankRow]:
    """Return the ranks of a task, in order, with what they did in the window."""
    account = picture.account
    if task not in account.tasks:
        return []
    stage, spans, lanes = account.tasks[task], account.spans, account.table.workers.lanes
    seconds = max(spans.line.length, 1e-9)
    rows = account.rows_of(_CLAIM if stage.takes else _PUT)
    first, last = (np.searchsorted(spans.worker, stage.workers, side=side) for side in ("left", "right"))
    ranks = []
    for worker, begin, end in zip(stage.workers.tolist(), first.tolist(), last.tolist()):
        now = int(spans.newest[worker])
        present = max(float(spans.seconds[worker, SpanState.IDLE :].sum()), 1e-300)
        ranks.append(
            RankRow(
                lanes[worker], "" if now < 0 else STATE_NAMES.get(SpanState(int(spans.state[now])), ""),
                None if now < 0 else spans.line.end - float(spans.start[now]),
                {name: float(spans.seconds[worker, state]) / present for state, name in STATE_NAMES.items()},
                float(rows[worker]) / seconds, (spans.start[begin:end], spans.end[begin:end], spans.state[begin:end]),
            )
        )  # fmt: skip
    return sorted(ranks, key=lambda row: (row.lane.rank < 0, row.lane.rank, row.lane.client))


# ---------------------------------------------------------------- samples


@dataclass(frozen=True)
class SampleRow:
    """A sample of a partition."""

    index: int
    """Its global index."""
    key: str | None
    """Its key; None if it has none."""
    tag: Mapping[str, object]
    """Its tag."""
    produced: Sequence[bool]
    """Whether it has each of the fields of the partition."""
    missing: Sequence[str]
    """The fields that it does not have."""
    consumers: Sequence[str]
    """The tasks that have consumed it."""


def list_samples(reply: SnapshotReply) -> list[SampleRow]:
    """Return the samples of a page of a snapshot."""
    indexes = np.frombuffer(reply.rows, np.int64).tolist()
    produced = np.frombuffer(reply.produced, np.int8).reshape(len(indexes), len(reply.fields)).astype(bool)
    consumed = [np.frombuffer(column, np.int8).astype(bool) for column in reply.consumed.values()]
    keys: Sequence[str | None] = reply.keys or [None] * len(indexes)
    return [
        SampleRow(
            index, key, tag, has, [name for name, is_there in zip(reply.fields, has) if not is_there],
            [task for task, took in zip(reply.consumed, consumed) if took[at]],
        )
        for at, (index, key, tag, has) in enumerate(
            zip(indexes, keys, tag_rows(reply.tags, len(indexes)), produced.tolist())
        )
    ]  # fmt: skip
