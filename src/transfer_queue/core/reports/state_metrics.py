"""Measures the state for metrics, in short steps, so that a large state does not delay other requests.

The state may change between two steps, so a measurement describes some milliseconds and not one moment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from transfer_queue.core.claims.row_leases import Leases
from transfer_queue.core.context import Context
from transfer_queue.core.reports.status import progress, stored_bytes, tier_of
from transfer_queue.core.tables.blocks import BlockChunk, pair_sums
from transfer_queue.core.tables.leases import RowLease
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.core.units.mirror_writer import MirrorWriter
from transfer_queue.core.units.store_servers import StoreServers
from transfer_queue.messages.reports.overview import LeaseSummary
from transfer_queue.messages.reports.progress import PartitionProgress, TaskProgress, Timing
from transfer_queue.metrics.samples import MOST_OF_A_PARTITION
from transfer_queue.metrics.timing import MOST_NAMES, OTHER

if TYPE_CHECKING:
    from transfer_queue.core.state.partition import Partition
    from transfer_queue.core.state.state import State

NAMED = 100  # partitions that are reported by name, those created last; the others are reported together
AT_ONCE = 64  # other partitions, or units, in one step


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


@dataclass
class UnitLoads:
    """What the units store and what the tasks have claimed."""

    live: Counter[int] = field(default_factory=Counter)
    """Unit -> bytes of its live blocks."""
    leases: dict[str, LeaseSummary] = field(default_factory=dict)
    """Task -> its leases."""


def measure_units(context: Context, now: float) -> Generator[None, None, UnitLoads]:
    """Measure what the units store, and the leases, in short steps like `measure`."""
    found = UnitLoads()
    yield from _add_live(context.state, found.live)
    partitions = list(context.state.partitions.values())
    for start in range(0, len(partitions), AT_ONCE):
        for each in partitions[start : start + AT_ONCE]:
            for lease in each.leases.by_token.values():
                _add_lease(context, found.leases, lease, now)
        yield
    return found


def _add_lease(context: Context, leases: dict[str, LeaseSummary], lease: RowLease, now: float) -> None:
    task = lease.task if lease.task in leases or len(leases) < MOST_NAMES else OTHER
    known = leases.get(task, LeaseSummary(task, 0, 0))
    age = context.services[Leases].deadlines.age_of(lease, now)
    ages = [each for each in (known.oldest, age) if each is not None]
    leases[task] = LeaseSummary(task, known.count + 1, known.rows + len(lease.rows), max(ages, default=None))


def _add_live(state: State, live: Counter[int]) -> Generator[None, None, None]:
    """Add up the bytes of the live blocks of each unit."""
    stored = list(state.blocks.stored.values())
    for start in range(0, len(stored), AT_ONCE):
        for each in stored[start : start + AT_ONCE]:
            live.update(each)
        yield


def measure(context: Context, now: float) -> Generator[None, None, StateMeasures]:
    """Measure the state. The caller serves other requests between two of its short steps."""
    found = StateMeasures(len(context.state.partitions))
    names = list(context.state.partitions)
    found.series["global_indexes"][()] = context.state.next_index
    existing = sum(partition.rows.count for partition in context.state.partitions.values())
    found.series["cleared_rows"][()] = context.state.next_index - existing
    writer = context.services.get(MirrorWriter)
    if writer is not None:
        mirror = writer.progress()
        found.series["mirror_lag_bytes"][()] = mirror.behind_bytes
        found.series["mirror_lag_milliseconds"][()] = int(mirror.behind_seconds * 1000)
        found.series["mirror_waiting"][()] = mirror.waiting
        found.series["mirror_full"][()] = int(mirror.full)
        found.series["mirror_copied"][()] = writer.copied_bytes
    stores = context.services.get(StoreServers)
    for server in () if stores is None else stores.progress(now):
        labels = server.backend, server.host or server.node
        up = found.series["store_server_up"]  # several nodes may share an address
        up[labels] = min(up.get(labels, 1), int(server.up))
        found.series["store_server_ends"][labels] += server.ends
    yield
    for name in reversed(names[-NAMED:]):
        partition = context.state.partitions.get(name)
        if partition is not None:
            found.partitions.append(progress(context, partition, now))
            found.series["leases"].update((name, lease.task) for lease in partition.leases.by_token.values())
            found.series["ready_rows"].update(_ready_rows(partition))
        yield
    if len(names) > NAMED:
        found.partitions.append((yield from _others(context, names[:-NAMED], now)))
    yield from _add_live(context.state, found.live)
    by_number = {p.number: name for name in names[-NAMED:] if (p := context.state.partitions.get(name)) is not None}
    for key in list(context.state.blocks.chunks):
        chunk = context.state.blocks.chunks.get(key)
        if chunk is not None:
            _add_values(context.state, found.series, chunk, by_number)
        yield
    yield from _add_tasks(context, found, now)
    return found


def _ready_rows(partition: Partition) -> dict[tuple[str, ...], int]:
    """Return (partition, task) -> the rows that are ready for the fields that the task fetched last."""
    rows: dict[str, int] = {}
    for ready in list(partition.ready.values()):  # the one that was requested last is at the end
        if not ready.unbuilt:
            partition.unseen.apply_to(ready)
            rows[ready.task] = ready.total
    found: Counter[tuple[str, ...]] = Counter()
    for number, task in enumerate(sorted(rows)):
        found[partition.name, task if number < MOST_OF_A_PARTITION else OTHER] += rows[task]
    return found


def _add_tasks(context: Context, found: StateMeasures, now: float) -> Generator[None, None, None]:
    timeline = context.services[TimelineRecorder]
    if not timeline.ring.capacity:
        return
    timeline.flush()
    waiting = list(context.state.waiting.by_waiter.values())
    clients = [client for client, connections in context.connections.peers.items() if connections]
    for name, values in (yield from timeline.tasks.measure(waiting, clients, now)).items():
        found.series[name].update(values)
    found.timings = timeline.tasks.timings()


def _others(context: Context, names: list[str], now: float) -> Generator[None, None, PartitionProgress]:
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
                longest[task] = max(longest.get(task, 0.0), now - first.since)
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
