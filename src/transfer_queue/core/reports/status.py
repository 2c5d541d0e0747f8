"""The status of the system: the progress of every partition, and the counters of the controller."""

from __future__ import annotations

from collections import Counter

import msgspec

from transfer_queue.core import locks
from transfer_queue.core.claims.consumption_handlers import missing_groups
from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.puts import limits
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.timeline.abandoned_samples import AbandonedSamples
from transfer_queue.core.units.mirror_writer import MirrorWriter
from transfer_queue.core.units.store_servers import StoreServers
from transfer_queue.messages.descriptors import MEMORY
from transfer_queue.messages.reports.overview import MOST_PARTITIONS, ProgressReply, ReadProgress
from transfer_queue.messages.reports.progress import (
    FieldProgress,
    PartitionProgress,
    PolicyProgress,
    TaskProgress,
    UnitProgress,
)
from transfer_queue.messages.reports.store_reports import StoreServerProgress
from transfer_queue.messages.system import Status, SystemStatus, Topology, TopologyReply


@handles(Status, reads=True)
def handle_status(context: Context, caller: Caller, request: Status) -> SystemStatus:
    """Reply with the progress of every partition, and the counters including those of the connections."""
    partitions = context.state.partitions.values()
    return _collect(context, [progress(context, each, context.now) for each in partitions], context.now)


def _collect(context: Context, partitions: list[PartitionProgress], now: float) -> SystemStatus:
    around = {f"connections_{name}": value for name, value in context.measures.server_counters.items()}
    costs = list(context.samplers.costs.values())
    counters = {**context.measures.counters, **around}
    mirror = context.services.get(MirrorWriter)
    found = SystemStatus(partitions, counters, costs, context.journal_error, unit_progress(context.state))
    return msgspec.structs.replace(
        found,
        requests=context.measures.load.timings(),
        longest=context.measures.load.longest.longest(now),
        locks=locks.summarize(context.state, now),
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
    newest = names[::-1][: min(request.newest, MOST_PARTITIONS)]
    chosen = dict.fromkeys([*request.partitions[:MOST_PARTITIONS], *newest][:MOST_PARTITIONS])
    found = {name: state.partitions[name] for name in chosen if name in state.partitions}
    rows = nbytes = 0
    others: list[Partition] = []
    space = min(request.page, MOST_PARTITIONS - len(found))
    following = 0
    for partition in state.partitions.values():  # in the order of their numbers
        rows, nbytes = rows + partition.row_count, nbytes + partition.nbytes
        if partition.number > request.after and partition.name not in found:
            if len(others) < space:
                others.append(partition)
            elif others:
                following = others[-1].number
    found.update((partition.name, partition) for partition in others)
    listed = list(found.values())
    status = _collect(context, [progress(context, each, context.now) for each in listed], context.now)
    return ProgressReply(status, [each.number for each in listed], newest, len(names), rows, nbytes, following)


@handles(Topology, reads=True)
def handle_topology(context: Context, caller: Caller, request: Topology) -> TopologyReply:
    """Reply with the storage units and the configuration for a client that attaches."""
    return TopologyReply(list(context.state.units.values()), context.client_config, _stores(context))


def unit_progress(state: State) -> list[UnitProgress]:
    """Return the storage units."""
    leased = state.blocks.leased_in
    return [
        UnitProgress(number, unit.told_tier, unit.capacity, leased.get(number, 0), number in state.draining)
        for number, unit in sorted(state.units.items())
    ]


def progress(context: Context, partition: Partition, now: float) -> PartitionProgress:
    """Return the progress of one partition."""
    state = context.state
    queues = state.waiting.claim_queues(partition.name)
    abandoned = {each.task: each.counts for each in context.services[AbandonedSamples].find(partition.name)}
    tasks = []
    for task in sorted({*partition.tasks, *queues}):
        waiting = list(queues[task].claims.values()) if task in queues else []
        longest = max((now - w.since for w in waiting), default=0.0)
        ever = partition.consumed_ever.get(task, 0)
        consumed, claimed = partition.tasks.get(task, 0), partition.claimed.get(task, 0)
        dealt = partition.dealt.get(task)
        held, ranks = ({}, 0) if dealt is None else (dealt.held_for_unasked(), dealt.rank_count)
        lost = abandoned.get(task, {})
        tasks.append(TaskProgress(task, consumed, len(waiting), longest, ever, claimed, held, ranks, lost))
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
        passed={task: found for task in partition.tasks if (found := partition.passed.counts_of(task))},
        stored=dict(stored_bytes(state, partition)),
        max_rows=partition.options.max_rows, open_rows=partition.open_rows,
        saved=state.blocks.saved[partition.number],
    )  # fmt: skip


def stored_bytes(state: State, partition: Partition) -> Counter[str]:
    """Return tier -> bytes of a partition there, including copies."""
    found: Counter[str] = Counter()
    for number, nbytes in state.blocks.stored.get(partition.number, {}).items():
        if nbytes:
            found[tier_of(state, number)] += nbytes
    return found


def tier_of(state: State, number: int) -> str:
    """Return the tier of a storage unit as it is reported to people."""
    unit = state.units.get(number)
    return MEMORY if unit is None else unit.told_tier
