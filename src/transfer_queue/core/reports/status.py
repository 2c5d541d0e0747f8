"""The status of the system: progress of every partition, counters of the controller, and what metrics measure.

Measurements for metrics are made in short steps, so that a large state does not delay other requests. The state may
change between two steps, so a measurement describes some milliseconds and not one moment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from transfer_queue.core import locks
from transfer_queue.core.claims.consumption_handlers import missing_groups
from transfer_queue.core.claims.row_leases import Leases
from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.puts import limits
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.blocks import BlockChunk, pair_sums
from transfer_queue.core.timeline.abandoned_samples import AbandonedSamples
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.core.units.mirror_writer import MirrorWriter
from transfer_queue.core.units.store_servers import StoreServers
from transfer_queue.messages.descriptors import MEMORY
from transfer_queue.messages.reports.overview import MAX_PARTITIONS, LeaseSummary, ProgressReply, ReadProgress
from transfer_queue.messages.reports.progress import (
    FieldProgress,
    PartitionProgress,
    PolicyProgress,
    TaskProgress,
    Timing,
    UnitProgress,
)
from transfer_queue.messages.reports.store_reports import StoreServerProgress
from transfer_queue.messages.system import Status, SystemStatus, Topology, TopologyReply
from transfer_queue.metrics.samples import MAX_OF_A_PARTITION
from transfer_queue.metrics.timing import OTHER

NAMED = 100  # partitions that metrics report by name, those created last; the others are reported together
AT_ONCE = 64  # other partitions, or units, in one step of a measurement


@handles(Status, reads=True)
def handle_status(context: Context, caller: Caller, request: Status) -> SystemStatus:
    """Reply with the progress of every partition, and the counters including those of the connections."""
    partitions = context.state.partitions.values()
    return _collect(context, [progress(context, each) for each in partitions])


def _collect(context: Context, partitions: list[PartitionProgress]) -> SystemStatus:
    around = {f"connections_{name}": value for name, value in context.measures.server_counters.items()}
    costs = list(context.samplers.costs.values())
    counters = {**context.measures.counters, **around}
    mirror = context.services.get(MirrorWriter)
    status = SystemStatus(partitions, counters, costs, context.journal_error, unit_progress(context.state))
    return msgspec.structs.replace(
        status,
        requests=context.measures.load.timings(),
        longest=context.measures.load.longest.longest(context.now),
        locks=locks.summarize(context.state, context.now),
        mirror=None if mirror is None else mirror.progress(),
        stores=_stores(context),
    )


def _stores(context: Context) -> list[StoreServerProgress]:
    """Return the servers of external stores."""
    stores = context.services.get(StoreServers)
    return [] if stores is None else stores.progress(context.now)


@handles(ReadProgress, reads=True)
def handle_read_progress(context: Context, caller: Caller, request: ReadProgress) -> ProgressReply:
    """Reply with the progress of some partitions, and with the totals of all."""
    state = context.state
    names = list(state.partitions)
    newest = names[::-1][: min(request.newest, MAX_PARTITIONS)]
    chosen = dict.fromkeys([*request.partitions[:MAX_PARTITIONS], *newest][:MAX_PARTITIONS])
    named = {name: state.partitions[name] for name in chosen if name in state.partitions}
    rows = nbytes = 0
    others: list[Partition] = []
    space = min(request.page, MAX_PARTITIONS - len(named))
    following = 0
    for partition in state.partitions.values():  # in the order of their numbers
        rows, nbytes = rows + partition.row_count, nbytes + partition.nbytes
        if partition.number > request.after and partition.name not in named:
            if len(others) < space:
                others.append(partition)
            elif others:
                following = others[-1].number
    named.update((partition.name, partition) for partition in others)
    listed = list(named.values())
    status = _collect(context, [progress(context, each) for each in listed])
    return ProgressReply(status, [each.number for each in listed], newest, len(names), rows, nbytes, following)


@handles(Topology, reads=True)
def handle_topology(context: Context, caller: Caller, request: Topology) -> TopologyReply:
    """Reply with the storage units and the configuration for a client that attaches."""
    return TopologyReply(list(context.state.units.values()), context.client_config, _stores(context))


def unit_progress(state: State) -> list[UnitProgress]:
    """Return the storage units."""
    leased = state.blocks.leased_in
    return [
        UnitProgress(number, unit.report_tier, unit.capacity, leased.get(number, 0), number in state.draining)
        for number, unit in sorted(state.units.items())
    ]


def progress(context: Context, partition: Partition) -> PartitionProgress:
    """Return the progress of one partition."""
    state = context.state
    queues = state.waiting.claim_queues(partition.name)
    abandoned = {each.task: each.counts for each in context.services[AbandonedSamples].find(partition.name)}
    tasks = []
    for task in sorted({*partition.tasks, *queues}):
        waiting = list(queues[task].claims.values()) if task in queues else []
        longest = max((context.now - w.since for w in waiting), default=0.0)
        consumed_ever = partition.consumed_ever.get(task, 0)
        consumed, claimed = partition.tasks.get(task, 0), partition.claimed.get(task, 0)
        dealt = partition.dealt.get(task)
        held, ranks = ({}, 0) if dealt is None else (dealt.held_for_unasked(), dealt.rank_count)
        lost = abandoned.get(task, {})
        tasks.append(TaskProgress(task, consumed, len(waiting), longest, consumed_ever, claimed, held, ranks, lost))
    losses = partition.losses.counts
    fields = [
        FieldProgress(name, f.live, f.describe(), f.ever, losses.get(name, 0)) for name, f in partition.fields.items()
    ]
    orphaned = partition.groups.count_orphaned(partition.sealed)
    policy = None
    if partition.options.max_staleness is not None or partition.policy_version:
        limit = limits.row_limit(partition)
        policy = PolicyProgress(partition.policy_version, partition.admitted, limit, partition.options.max_staleness)
    wanted = {
        task: (groups, missing_groups(partition, task, context.group_size_of(partition.name, task) or 1))
        for task, groups in partition.wants.groups.items()
    }
    puts = sum(1 for waiting in state.waiting.space.values() if waiting.request.partition == partition.name)
    return PartitionProgress(
        partition.name, partition.row_count, len(partition.waiting), partition.sealed, partition.groups.size,
        partition.nbytes, fields, tasks, orphaned, dict(partition.drops.rows), partition.freed, policy, wanted, puts,
        passed={task: counts for task in partition.tasks if (counts := partition.passed.counts_of(task))},
        stored=dict(stored_bytes(state, partition)),
        max_rows=partition.options.max_rows, open_rows=partition.open_rows,
        saved=state.blocks.saved[partition.number],
    )  # fmt: skip


def stored_bytes(state: State, partition: Partition) -> Counter[str]:
    """Return tier -> bytes of a partition there, including copies."""
    stored: Counter[str] = Counter()
    for number, nbytes in state.blocks.stored.get(partition.number, {}).items():
        if nbytes:
            stored[tier_of(state, number)] += nbytes
    return stored


def tier_of(state: State, number: int) -> str:
    """Return the tier of a storage unit as it is reported to people."""
    unit = state.units.get(number)
    return MEMORY if unit is None else unit.report_tier


# ------------------------------------------------------------ metrics


@dataclass
class StateMeasures:
    """The measurements of one scrape."""

    count: int = 0
    """The number of all partitions."""
    partitions: list[PartitionProgress] = field(default_factory=list)
    """The partitions that are reported by name, and one that stands for the others if there are any."""
    live: Counter[int] = field(default_factory=Counter)
    """Unit -> bytes of its live blocks."""
    series: defaultdict[str, Counter[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(Counter))
    """Name -> label values -> value, which `metrics.samples.series` passes to a metric.

    leases: (partition, task) -> leases in force. stored_values: (partition, tier) -> values there, including copies.
    unit_values: (unit,) -> values there. ready_rows: (partition, task) -> rows that the task could fetch.
    global_indexes: () -> indexes that were allocated. cleared_rows: () -> rows that were removed. mirror_lag_bytes,
    mirror_lag_milliseconds, mirror_waiting, mirror_full and mirror_copied: () -> see the metrics of the mirror.
    store_server_up, store_server_ends: (backend, node) -> see the metrics of store servers. Those of
    `TaskMeasures.measure`.
    """
    timings: dict[str, list[Timing]] = field(default_factory=dict)
    """`TaskMeasures.timings`."""


UnitLoads = tuple[Counter[int], dict[str, LeaseSummary]]
"""Unit -> bytes of its live blocks, and task -> its leases."""


def measure_units(context: Context, now: float) -> Generator[None, None, UnitLoads]:
    """Measure what the units store, and the leases, in short steps like `measure`."""
    live, leased, leases = Counter[int](), dict[str, LeaseSummary](), context.services[Leases]
    yield from _add_live(context.state, live)
    partitions = list(context.state.partitions.values())
    for start in range(0, len(partitions), AT_ONCE):
        for each in partitions[start : start + AT_ONCE]:
            for lease in each.leases.by_token.values():
                leases.summarize(lease, leased, now)
        yield
    return live, leased


def _add_live(state: State, live: Counter[int]) -> Generator[None, None, None]:
    """Add up the bytes of the live blocks of each unit."""
    stored = list(state.blocks.stored.values())
    for start in range(0, len(stored), AT_ONCE):
        for each in stored[start : start + AT_ONCE]:
            live.update(each)
        yield


def measure(context: Context, now: float) -> Generator[None, None, StateMeasures]:
    """Measure the state. The caller serves other requests between two of its short steps.

    The time of each step is that of the last event, of which the beginning of the measurement is one, so that no
    request has begun to wait after it.
    """
    context.log.now = max(now, context.now)
    measures = StateMeasures(len(context.state.partitions))
    names = list(context.state.partitions)
    measures.series["global_indexes"][()] = context.state.next_index
    existing = sum(partition.rows.count for partition in context.state.partitions.values())
    measures.series["cleared_rows"][()] = context.state.next_index - existing
    writer = context.services.get(MirrorWriter)
    if writer is not None:
        mirror = writer.progress()
        measures.series["mirror_lag_bytes"][()] = mirror.behind_bytes
        measures.series["mirror_lag_milliseconds"][()] = int(mirror.behind_seconds * 1000)
        measures.series["mirror_waiting"][()] = mirror.waiting
        measures.series["mirror_full"][()] = int(mirror.full)
        measures.series["mirror_copied"][()] = writer.copied_bytes
    for server in _stores(context):
        labels = server.backend, server.host or server.node
        up = measures.series["store_server_up"]  # several nodes may share an address
        up[labels] = min(up.get(labels, 1), int(server.up))
        measures.series["store_server_ends"][labels] += server.ends
    yield
    for name in reversed(names[-NAMED:]):
        partition = context.state.partitions.get(name)
        if partition is not None:
            measures.partitions.append(progress(context, partition))
            measures.series["leases"].update((name, lease.task) for lease in partition.leases.by_token.values())
            measures.series["ready_rows"].update(_ready_rows(partition))
        yield
    if len(names) > NAMED:
        measures.partitions.append((yield from _others(context, names[:-NAMED])))
    yield from _add_live(context.state, measures.live)
    by_number = {p.number: name for name in names[-NAMED:] if (p := context.state.partitions.get(name)) is not None}
    for key in list(context.state.blocks.chunks):
        chunk = context.state.blocks.chunks.get(key)
        if chunk is not None:
            _add_values(context.state, measures.series, chunk, by_number)
        yield
    yield from _add_tasks(context, measures)
    return measures


def _ready_rows(partition: Partition) -> dict[tuple[str, ...], int]:
    """Return (partition, task) -> the rows that are ready for the fields that the task fetched last."""
    rows: dict[str, int] = {}
    for ready in list(partition.ready.values()):  # the one that was requested last is at the end
        if not ready.unbuilt:
            partition.unseen.apply_to(ready)
            rows[ready.task] = ready.total
    counts: Counter[tuple[str, ...]] = Counter()
    for number, task in enumerate(sorted(rows)):
        counts[partition.name, task if number < MAX_OF_A_PARTITION else OTHER] += rows[task]
    return counts


def _add_tasks(context: Context, measures: StateMeasures) -> Generator[None, None, None]:
    timeline = context.services[TimelineRecorder]
    if not timeline.ring.capacity:
        return
    timeline.flush()
    waiting = list(context.state.waiting.by_waiter.values())
    clients = [client for client, connections in context.connections.peers.items() if connections]
    for name, values in (yield from timeline.tasks.measure(waiting, clients, context.now)).items():
        measures.series[name].update(values)
    measures.timings = timeline.tasks.timings()


def _others(context: Context, names: list[str]) -> Generator[None, None, PartitionProgress]:
    """Sum up these partitions: rows, bytes and waiting claims."""
    rows = nbytes = saved = 0
    tiers: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    longest: dict[str, float] = {}
    for start in range(0, len(names), AT_ONCE):
        for name in names[start : start + AT_ONCE]:
            partition = context.state.partitions.get(name)
            if partition is None:
                continue
            rows, nbytes = rows + partition.row_count, nbytes + partition.nbytes
            tiers += stored_bytes(context.state, partition)
            saved += context.state.blocks.saved[partition.number]
            for task, queue in context.state.waiting.claim_queues(name).items():
                first = next(iter(queue.claims.values()))
                waiting[task] += len(queue.claims)
                longest[task] = max(longest.get(task, 0.0), context.now - first.since)
        yield
    tasks = [TaskProgress(task, 0, count, longest[task]) for task, count in waiting.items()]
    return PartitionProgress(OTHER, rows, 0, False, None, nbytes, [], tasks, stored=dict(tiers), saved=saved)


def _add_values(
    state: State, series: Mapping[str, Counter[tuple[str, ...]]], chunk: BlockChunk, by_number: Mapping[int, str]
) -> None:
    values, of_units = series["stored_values"], series["unit_values"]
    first, second = chunk.columns, chunk.second
    at = np.flatnonzero(first["live"])
    places = [(first, at), (second, at[second["extent"][at] > 0])] if second else [(first, at)]
    for columns, some in places:
        for number, unit, count in pair_sums(first["owner"][some], columns["unit"][some], first["live"][some]):
            values[by_number.get(number, OTHER), tier_of(state, unit)] += count
            of_units[(str(unit),)] += count
