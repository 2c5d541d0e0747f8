"""The parts of a view about partitions, policy versions, groups, memory and servers."""

from __future__ import annotations

from collections.abc import Mapping

from transfer_queue.core.claims.row_leases import POISON
from transfer_queue.live import payload
from transfer_queue.live.view.observation import Observation
from transfer_queue.messages.reports.overview import ServersReply
from transfer_queue.messages.reports.progress import PartitionProgress, Timing
from transfer_queue.messages.reports.unit_reports import ServerMeasures
from transfer_queue.metrics.timing import LOOP_BOUNDS, quantile

LISTED = 20
"""Partitions that are listed in addition to those that are shown."""
MAX_LEASES = 16


def partitions_part(seen: Observation, waits: list[payload.WaitView]) -> payload.PartitionsView:
    """Return the partitions that are shown, and those that were created last."""
    shown = seen.shown
    others = [name for name in seen.newest if name not in shown and name in seen.partitions][:LISTED]
    parts = [_partition_part(seen.partitions[name], name in shown, waits) for name in [*shown, *others]]
    rest = max(seen.count - len(parts), 0)
    rest_rows = max(seen.rows - sum(each.rows for each in parts), 0) if rest else 0
    return payload.PartitionsView(seen.count, seen.rows, seen.nbytes, parts, rest, rest_rows)


def _partition_part(entry: PartitionProgress, shown: bool, waits: list[payload.WaitView]) -> payload.ListedPartition:
    wait = next((each for each in waits if each.kind == "wait" and each.partition == entry.name and each.field), None)
    field = "" if wait is None else wait.field
    have = next((each.produced for each in entry.fields if each.name == field), 0)
    return payload.ListedPartition(
        entry.name, entry.rows, entry.sealed, shown, max(entry.rows - have, 0) if field else 0, field,
        None if wait is None else wait.sample,
    )  # fmt: skip


def policy_part(seen: Observation, since: float | None) -> payload.PolicyView | None:
    """Return the policy version; None if no partition has one."""
    partitions = [each for each in seen.partitions.values() if each.policy is not None]
    policies = [(each.policy, each.name) for each in partitions if each.policy is not None]
    if not policies:
        return None
    version = max(policy.version for policy, _ in policies)
    newest, name = max(policies, key=lambda each: (each[0].version, each[0].admitted))
    limits = [policy.max_staleness for policy, _ in policies if policy.max_staleness is not None]
    return payload.PolicyView(version, since, max(limits, default=None), name, newest.admitted, newest.limit)


def group_parts(seen: Observation, task: str) -> list[payload.GroupView]:
    """Return the groups of the partitions that are shown."""
    views = []
    for name in seen.shown:
        if name in seen.groups and name in seen.partitions:
            groups, progress = seen.groups[name], seen.partitions[name]
            passed = sum(progress.passed.get(task, {}).values())
            views.append(
                payload.GroupView(
                    name, groups.size, task, groups.complete, groups.lack_field, groups.lack_member,
                    progress.orphaned_groups, passed, sum(progress.dropped.values()),
                )
            )  # fmt: skip
    return views


def memory_part(seen: Observation) -> payload.MemoryView:
    """Return the storage units, the leases and what was lost."""
    progress = seen.partitions.values()
    lost = sum(field.lost for each in progress for field in each.fields)
    poison = sum(reasons.get(POISON, 0) for each in progress for reasons in each.passed.values())
    return payload.MemoryView(
        _units(seen), _leases(seen), 0 if seen.servers is None else seen.servers.redelivered, lost, poison,
        sum(each.waiting_puts for each in progress),
    )  # fmt: skip


def _units(seen: Observation) -> list[payload.UnitView]:
    if seen.servers is None:
        return [
            payload.UnitView(each.unit, "", each.tier, each.capacity, 0, each.leased, -1, 0.0, 0, each.drained)
            for each in seen.status.units
        ]
    views = []
    for unit in seen.servers.units:
        storage = unit.storage
        held = leased = waiting = 0
        longest = 0.0
        if storage is not None:
            held, leased, waiting = storage.space.held, storage.space.leased, storage.waiting
            longest = round(storage.longest_wait, 1)
        views.append(
            payload.UnitView(
                unit.unit, unit.node, unit.tier, unit.capacity or (0 if storage is None else storage.space.capacity),
                held, leased, unit.live, longest, waiting, unit.drained,
            )
        )  # fmt: skip
    return views


def _leases(seen: Observation) -> list[payload.LeaseView]:
    if seen.servers is not None:
        listed = sorted(seen.servers.leases, key=lambda each: -each.rows)[:MAX_LEASES]
        return [
            payload.LeaseView(each.task, each.count, each.rows, None if each.oldest is None else round(each.oldest, 1))
            for each in listed
        ]
    rows: dict[str, int] = {}
    for partition in seen.partitions.values():
        for task in partition.tasks:
            if task.claimed:
                rows[task.name] = rows.get(task.name, 0) + task.claimed
    return [payload.LeaseView(task, -1, count) for task, count in list(rows.items())[:MAX_LEASES]]


def servers_part(seen: Observation) -> payload.ServersView:
    """Return the server processes."""
    now, before = seen.servers, seen.before
    failed = int(seen.status.counters.get("failures", 0))
    if now is None:
        return payload.ServersView([], 0, 1 + len(seen.status.units), None, failed, seen.logs)
    old = {} if before is None else {unit.unit: unit.server for unit in before.units}
    servers = [_server("controller", now.controller, None if before is None else before.controller, seen.between)]
    servers += [_server(f"unit {unit.unit}", unit.server, old.get(unit.unit), seen.between) for unit in now.units]
    up = sum(1 for each in servers if each.up)
    return payload.ServersView(servers, up, len(servers), _journal(now, seen.status.trouble), failed, seen.logs)


def _journal(measured: ServersReply, trouble: str) -> payload.JournalView | None:
    journal = measured.journal
    if journal is None:
        return None
    text = trouble or ("the journal cannot be written" if journal.trouble else "")
    return payload.JournalView(round(journal.age, 1), journal.records, text)


def _server(name: str, now: ServerMeasures | None, before: ServerMeasures | None, seconds: float) -> payload.ServerView:
    if now is None:
        return payload.ServerView(name, False, None, None, 0.0, 0, 0)
    same = before is not None and before.started == now.started and seconds > 0
    cpu = None if not same or before is None else round(max(now.cpu - before.cpu, 0.0) / seconds, 3)
    p99 = None if not same or before is None else _slowest(now.requests, before.requests)
    return payload.ServerView(
        name, True, cpu, p99, round(max(now.longest.values(), default=0.0), 5), now.connections,
        max(now.accepted - now.connections, 0),
    )  # fmt: skip


def _slowest(now: list[Timing], before: list[Timing]) -> float | None:
    """Return the time that 99 % of the requests since the measurement before took at most."""
    old: Mapping[str, Timing] = {each.name: each for each in before}
    total = [0] * (len(LOOP_BOUNDS) + 1)
    for each in now:
        earlier = old[each.name].counts if each.name in old else [0] * len(each.counts)
        for at, (count, was) in enumerate(zip(each.counts, earlier)):
            total[at] += max(count - was, 0)
    return round(quantile(LOOP_BOUNDS, total, 0.99), 6) if sum(total) else None
