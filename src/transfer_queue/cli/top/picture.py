"""What `tq top` shows at one moment: the state of a system, computed from a recording and a status."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from transfer_queue.cli.status_table import rates
from transfer_queue.cli.top.rows import (
    UNKNOWN,
    LoadRow,
    MemoryRow,
    PartitionRow,
    RankRow,
    SampleRow,
    StageRow,
    WaitMember,
    WaitRow,
)
from transfer_queue.display import worker_text
from transfer_queue.messages.queries import SnapshotReply
from transfer_queue.messages.reports.progress import PartitionProgress
from transfer_queue.messages.reports.timeline import Verdict
from transfer_queue.messages.system import SystemStatus
from transfer_queue.messages.tag_table import tag_rows
from transfer_queue.metrics.timing import LOOP_BOUNDS, quantile
from transfer_queue.timeline.account import Account
from transfer_queue.timeline.event_table import TaskWorkers, order_by_flow
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
        gaps = self.account.table.recording.gaps
        return gaps[-1] if gaps else None

    def partition(self, name: str) -> PartitionRow | None:
        """Return the partition of this name; None if it does not exist."""
        return next((each for each in self.partitions if each.progress.name == name), None)

    def stage(self, name: str) -> StageRow | None:
        """Return the task of this name; None if the recording has none."""
        return next((each for each in self.stages if each.name == name), None)

    def rates_of(self, partition: PartitionProgress) -> Mapping[tuple[str, str, str], float]:
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


def list_stages(account: Account, verdict: Verdict) -> Iterator[StageRow]:
    """Return the tasks in the order of the pipeline."""
    table, start, seconds = account.table, account.spans.line.start, max(account.spans.line.length, 1e-9)
    puts = table.of(EventKind.PUT)
    first = puts.first_after(start)
    nbytes = np.bincount(
        puts.task[first:] + 1, puts.column("bytes")[first:].astype(np.float64), len(table.workers.tasks) + 1
    )
    numbers = {name: number for number, name in enumerate(table.workers.tasks)}
    histories = {kind: _histories(account, kind) for kind in (EventKind.CLAIM, EventKind.PUT)}
    for name in _pipeline_order(account):
        task = account.tasks[name]
        missing = sorted(account.missing.get(name, {}).items(), key=lambda each: -each[1])
        total = sum(share for _, share in missing)
        history = histories[EventKind.CLAIM if task.takes else EventKind.PUT][numbers[name]]
        yield StageRow(
            task, verdict.stage == name,
            tuple((field, maker, share / total) for (field, maker), share in missing if field and share > 0),
            account.ages.get(name, UNKNOWN), account.staleness.get(name, UNKNOWN),
            float(nbytes[numbers[name] + 1]) / seconds, tuple(history.tolist()), account.hold_causes.get(name, ""),
        )  # fmt: skip


def _histories(account: Account, kind: EventKind) -> np.ndarray:
    """Return the rows per second of the events of one kind, as an array of (task, part of the last minute)."""
    table, now = account.table, account.table.recording.now
    events, tasks = table.of(kind), len(table.workers.tasks)
    first = events.first_after(now - HISTORY_SECONDS)
    part = HISTORY_SECONDS / HISTORY_BINS
    at = np.clip(((events.time[first:] - (now - HISTORY_SECONDS)) / part).astype(np.int64), 0, HISTORY_BINS - 1)
    cells = (events.task[first:] + 1) * HISTORY_BINS + at
    sums = np.bincount(cells, events.rows[first:], (tasks + 1) * HISTORY_BINS)
    return sums.reshape(tasks + 1, HISTORY_BINS)[1:] / part


def _pipeline_order(account: Account) -> list[str]:
    names = list(account.tasks)
    return names if len(names) > MAX_ORDERED else order_by_flow(account.table, names)


def _process(workers: TaskWorkers, worker: int) -> str:
    """Return the process of a rank, for people; "" if its name says it already."""
    lane = workers.lanes[worker]
    return worker_text(pid=lane.pid, host=lane.host) if workers.rank[worker] >= 0 and lane.pid else ""


def list_waits(account: Account, status: SystemStatus) -> Iterator[WaitRow]:
    """Return the open claims, puts and reservations, grouped by what they wait for."""
    recording, workers = account.table.recording, account.table.workers
    groups: dict[tuple[str, str, str, tuple[str, ...], bool], list[WaitMember]] = defaultdict(list)
    for wait in recording.open:
        worker = int(workers.of_lane[wait.lane])
        kind = "held" if wait.holds else "early" if wait.ahead else "waits"
        key = kind, recording.lanes[wait.lane].task, wait.partition, tuple(wait.fields), wait.demand
        name = workers.name(worker) if worker >= 0 else ""
        process = _process(workers, worker) if worker >= 0 else ""
        groups[key].append(WaitMember(name, process, max(recording.now - wait.since, 0.0), wait.rows))
    progress = {each.name: each for each in status.partitions}
    rows = []
    for (kind, task, partition, fields, demand), members in groups.items():
        members.sort(key=lambda each: -each.seconds)
        entry = progress.get(partition)
        produced = {} if entry is None else {each.name: each.produced for each in entry.fields if each.name in fields}
        rarest = min(fields, key=lambda name: produced.get(name, 0), default="")
        others = tuple(maker for maker in account.table.producers.get(rarest, ()) if maker != task)
        oldest = members[0]
        rows.append(
            WaitRow(task, partition, fields, kind, oldest.seconds, oldest.rows, tuple(members), rarest, others, demand)
        )
    yield from sorted(rows, key=lambda row: (row.kind == "early", -row.seconds))


def list_partitions(account: Account, status: SystemStatus) -> Iterator[PartitionRow]:
    """Return the partitions in the order of the status."""
    put, claimed = _rates_by_partition(account, EventKind.PUT), _rates_by_partition(account, EventKind.CLAIM)
    for each in status.partitions:
        rarest = min(each.fields, key=_produced, default=None)
        slowest = min(each.tasks, key=_consumed, default=None)
        yield PartitionRow(
            each, put.get(each.name, 0.0), claimed.get(each.name, 0.0),
            ("", 0) if rarest is None else (rarest.name, rarest.produced),
            ("", 0) if slowest is None else (slowest.name, slowest.consumed),
            sum(task.waiting for task in each.tasks) + each.waiting_puts,
        )  # fmt: skip


_produced, _consumed = operator.attrgetter("produced"), operator.attrgetter("consumed")


def _rates_by_partition(account: Account, kind: EventKind) -> dict[str, float]:
    """Return the rows per second of the events of one kind in each partition that has some."""
    events, names = account.table.of(kind), account.table.recording.partitions
    first = events.first_after(account.spans.line.start)
    sums = np.bincount(events.partition[first:], events.rows[first:], len(names))
    seconds = max(account.spans.line.length, 1e-9)
    return {names[at]: float(sums[at]) / seconds for at in np.flatnonzero(sums).tolist()}


def list_memory(status: SystemStatus) -> Iterator[MemoryRow]:
    """Return each tier, followed by its units."""
    held: dict[str, int] = defaultdict(int)
    for partition in status.partitions:
        for tier, nbytes in partition.stored.items():
            held[tier] += nbytes
    for tier in dict.fromkeys(unit.tier for unit in status.units):
        units = [unit for unit in status.units if unit.tier == tier]
        leased, capacity = sum(unit.leased for unit in units), sum(unit.capacity for unit in units)
        yield MemoryRow(tier, None, len(units), held.pop(tier, 0), leased, capacity)
        yield from (MemoryRow(tier, unit, 1, None, unit.leased, unit.capacity) for unit in units)
    for tier, nbytes in held.items():
        yield MemoryRow(tier, None, 0, nbytes, 0, 0)


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
        name = f"{each.name} {each.task}".rstrip()
        rows.append(
            LoadRow(
                name, more / elapsed if known else None, longer / elapsed if known else None,
                seconds / max(count, 1), quantile(LOOP_BOUNDS, each.counts, 0.99), count,
            )
        )  # fmt: skip
    yield from sorted(rows, key=lambda row: (-(row.busy or 0.0), -row.typical * row.total))
    for cost in status.samplers:
        yield LoadRow(cost.name, None, None, cost.seconds / max(cost.calls, 1), cost.longest, cost.calls, True)


def list_ranks(picture: Picture, task: str) -> list[RankRow]:
    """Return the ranks of a task, in order, with what they did in the window."""
    account = picture.account
    if task not in account.tasks:
        return []
    stage, spans, workers = account.tasks[task], account.spans, account.table.workers
    of_task, seconds = stage.workers, max(spans.line.length, 1e-9)
    rows = account.rows_of(EventKind.CLAIM if stage.takes else EventKind.PUT)
    first, last = np.searchsorted(spans.worker, of_task), np.searchsorted(spans.worker, of_task, side="right")
    ranks = []
    for worker, begin, end in zip(of_task.tolist(), first.tolist(), last.tolist()):
        rank_spans = spans.start[begin:end], spans.end[begin:end], spans.state[begin:end]
        current = end > begin and spans.end[end - 1] >= spans.line.end - 1e-3
        present = max(float(spans.seconds[worker, SpanState.IDLE :].sum()), 1e-300)
        shares = {name: float(spans.seconds[worker, state]) / present for state, name in STATE_NAMES.items()}
        ranks.append(
            RankRow(
                worker, workers.name(worker), int(workers.rank[worker]), workers.clients[worker],
                _process(workers, worker),
                STATE_NAMES.get(SpanState(int(spans.state[end - 1])), "") if current else "",
                spans.line.end - float(spans.start[end - 1]) if current else float("nan"),
                shares, float(rows[worker]) / seconds, rank_spans,
            )
        )  # fmt: skip
    return sorted(ranks, key=lambda row: (row.number < 0, row.number, row.client))


def queues_of(picture: Picture, task: str) -> list[tuple[str, int, int]]:
    """Return (partition, rows that the task has consumed, rows) of each partition that the task has claimed from."""
    return [
        (each.progress.name, progress.consumed, each.progress.rows)
        for each in picture.partitions
        for progress in each.progress.tasks
        if progress.name == task
    ]


@dataclass(frozen=True)
class SamplePage:
    """Some samples of a partition."""

    samples: tuple[SampleRow, ...]
    """The samples by global index."""
    next_start: int | None
    """The position at which the next page starts; None if this is the last one."""
    made: int
    """Identifies the partition, as `SnapshotReply.made`."""


def make_page(reply: SnapshotReply) -> SamplePage:
    """Return the samples of a reply."""
    indexes = np.frombuffer(reply.rows, np.int64).tolist()
    produced = np.frombuffer(reply.produced, np.int8).reshape(len(indexes), len(reply.fields)).astype(bool)
    consumed = np.zeros((len(indexes), len(reply.consumed)), bool)
    for at, column in enumerate(reply.consumed.values()):
        consumed[:, at] = np.frombuffer(column, np.int8) != 0
    keys: Sequence[str | None] = reply.keys or [None] * len(indexes)
    tags = tag_rows(reply.tags, len(indexes))
    rows = zip(indexes, keys, tags, produced.tolist(), consumed.tolist())
    fields, tasks = tuple(reply.fields), tuple(reply.consumed)
    samples = tuple(
        SampleRow(index, key, tag, fields, tuple(has), tasks, tuple(took)) for index, key, tag, has, took in rows
    )
    return SamplePage(samples, reply.start, reply.made)
