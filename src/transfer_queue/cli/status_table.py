"""Formats the status of a system as text for people and as JSON for scripts, and computes rates between two queries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.cli.shell.json_output import plain, system_as_json
from transfer_queue.core.claims.lease_decisions import POISON
from transfer_queue.display import printable_name, size_text
from transfer_queue.messages.descriptors import DISK
from transfer_queue.messages.reports.progress import MirrorProgress, PartitionProgress, UnitProgress
from transfer_queue.messages.reports.progress_text import notes_of, tier_name
from transfer_queue.messages.reports.store_reports import StoreServerProgress
from transfer_queue.messages.system import SystemStatus
from transfer_queue.metrics.timing import LOOP_BOUNDS, quantile

if TYPE_CHECKING:
    from transfer_queue.messages.reports.timeline import Verdict
    from transfer_queue.node.system.launcher import RunningSystem

Rates = dict[tuple[str, str, str], float]
"""(partition, "field" or "task", its name) -> rows per second that were produced or consumed."""

COSTLY = 5  # types of requests that are shown
REASONS = {POISON: "poison: delivered max_deliveries times, never acknowledged"}
"""Explanations of reasons to skip samples whose name alone is not clear."""


def rates(before: SystemStatus, after: SystemStatus, seconds: float) -> Rates:
    """Return the rows per second between two statuses that are `seconds` apart, for every field and task of the later.

    The rates come from counters that only grow, so clears do not lower them. Fields, tasks and partitions that the
    first status does not have, or that were dropped and created again, count from zero.
    """
    old, new = _counts(before), _counts(after)
    grown = {key: count - old.get(key, 0) for key, count in new.items()}
    return {key: (new[key] if growth < 0 else growth) / seconds for key, growth in grown.items()}


def _counts(status: SystemStatus) -> dict[tuple[str, str, str], int]:
    counts = {}
    for partition in status.partitions:
        for field in partition.fields:
            counts[partition.name, "field", field.name] = field.produced_ever
        for task in partition.tasks:
            counts[partition.name, "task", task.name] = task.consumed_ever
    return counts


def format_table(status: SystemStatus, speeds: Rates | None = None) -> str:
    """Return all partitions as text, with a line for each field and task, and with rates if they are given."""
    parts = ["\n".join(_lines(partition, speeds or {})) for partition in status.partitions] or ["no partitions"]
    if status.trouble:
        parts.insert(0, f"TROUBLE: {status.trouble}")
    if status.locks.held or status.locks.waiting:
        longest = f"; the longest: {printable_name(status.locks.longest)}" if status.locks.longest else ""
        parts.append(f"locks of keys: {status.locks.held} held, requests that wait: {status.locks.waiting}{longest}")
    if any(unit.tier == DISK for unit in status.units):
        parts.append("\n".join(_storage(status.units)))
    if any(unit.views or unit.viewed for unit in status.units):
        parts.append("\n".join(_views(status.units)))
    if status.stores:
        parts.append("\n".join(_stores(status.stores)))
    if status.mirror is not None:
        parts.append(_mirror(status.mirror))
    for cost in status.samplers:
        took = f"{cost.seconds:.2f} s, the longest {cost.longest * 1000:.1f} ms"
        again = f"; its process was restarted {cost.restarts} times" if cost.restarts else ""
        parts.append(f"sampler {cost.name}: called {cost.asked} times, {took}{again}")
    if status.requests:
        parts.append(_loop(status))
    return "\n\n".join(parts)


def _loop(status: SystemStatus) -> str:
    """Return a line with the types of requests that took most time of the controller's loop, and the longest event."""
    costly = sorted(status.requests, key=lambda timing: -timing.seconds)[:COSTLY]
    told = [f"{t.name} {quantile(LOOP_BOUNDS, t.counts, 0.99) * 1000:.2g} ms x {sum(t.counts)}" for t in costly]
    what, seconds = status.longest
    longest = f"; longest recent event {seconds * 1000:.1f} ms ({what})" if what else ""
    return f"controller, 99 % of requests within: {', '.join(told)}{longest}"


def _storage(units: Sequence[UnitProgress]) -> list[str]:
    """Return a line for each tier."""
    lines = []
    for tier in dict.fromkeys(unit.tier for unit in units):
        some = [unit for unit in units if unit.tier == tier]
        leased, capacity = (size_text(sum(getattr(unit, name) for unit in some)) for name in ("leased", "capacity"))
        drained = [str(unit.unit) for unit in some if unit.drained]
        more = f", being drained: {', '.join(drained)}" if drained else ""
        lines.append(f"storage {tier_name(tier)}: {leased} of {capacity} leased, units: {len(some)}{more}")
    return lines


def _views(units: Sequence[UnitProgress]) -> list[str]:
    """Return a line for the views of readers in each unit, and one for each client that has some."""
    lines = []
    for unit in units:
        if not unit.views and not unit.viewed:
            continue
        held = size_text(sum(hold.nbytes for hold in unit.views))
        waits = f"; {size_text(unit.viewed)} were cleared, and become free when the views end" if unit.viewed else ""
        lines.append(f"unit {unit.unit}: readers have views of {held}{waits}")
        for hold in sorted(unit.views, key=lambda hold: hold.since):
            began = datetime.fromtimestamp(hold.since).astimezone().isoformat(" ", "seconds")
            who = f"client {printable_name(hold.client)}, process {hold.pid}"
            views = "1 view" if hold.views == 1 else f"{hold.views} views"
            lines.append(f"  {who}: {views}, {size_text(hold.nbytes)}, the oldest since {began}")
    return lines


def _stores(servers: Sequence[StoreServerProgress]) -> list[str]:
    """Return a line for each external store, and one for each of its servers that is down or has ended before."""
    lines = []
    for backend in dict.fromkeys(server.backend for server in servers):
        some = [server for server in servers if server.backend == backend]
        lines.append(f"servers of {backend}: {sum(server.up for server in some)} of {len(some)} run")
        for server in some:
            if not server.up:
                lines.append(f"  DOWN: {server.place} ended {server.seconds:.1f} s ago; what it had is lost")
            elif server.ends:
                lines.append(f"  {server.place} was restarted {server.ends} times, {server.seconds:.1f} s ago")
    return lines


def _mirror(mirror: MirrorProgress) -> str:
    """Return a line about the values on disk, and how far they are behind."""
    if mirror.most_bytes < 0:
        most = "puts wait for the disk"
    else:
        most = f"at most {size_text(mirror.most_bytes)} or {mirror.most_seconds:g} s for acknowledged puts"
    behind = f"{size_text(mirror.behind_bytes)}, {mirror.behind_seconds:.1f} s"
    waits = f"; {mirror.waiting} puts wait for the disk" if mirror.waiting else ""
    full = "; THE DISK IS FULL: clear samples, or free some space there" if mirror.full else ""
    gone = "" if mirror.connected else "; ITS UNIT IS NOT CONNECTED"
    stored = f"{size_text(mirror.stored)} in {size_text(mirror.leased)}"
    retired = f"; {size_text(mirror.retired)} are in mirrors of earlier controllers" if mirror.retired else ""
    return f"copies on disk: {stored}; behind: {behind} ({most}){waits}{full}{gone}{retired}"


def _lines(partition: PartitionProgress, speeds: Rates) -> list[str]:
    lines = [f"{printable_name(partition.name)}: {', '.join(notes_of(partition))}"]
    names = [field.name for field in partition.fields] + [task.name for task in partition.tasks]
    width = max((len(printable_name(name)) for name in names), default=0)
    for field in partition.fields:
        name, speed = (
            f"{printable_name(field.name):<{width}}",
            _speed(speeds.get((partition.name, "field", field.name))),
        )
        lost = f"  {field.lost} LOST with their storage unit; put them again" if field.lost else ""
        lines.append(f"  field {name}  produced {field.produced:>9}/{partition.rows}{speed}  {field.type}{lost}")
    for task in partition.tasks:
        name, speed = f"{printable_name(task.name):<{width}}", _speed(speeds.get((partition.name, "task", task.name)))
        claimed = f"  {task.claimed} claimed, not acknowledged yet" if task.claimed else ""
        waits = f"  {task.waiting} claims wait, the longest {task.longest_wait:.1f} s" if task.waiting else ""
        over = partition.passed.get(task.name, {}).items()
        passed = "".join(f"  {count} skipped ({printable_name(REASONS.get(reason, reason))})" for reason, count in over)
        lines.append(f"  task  {name}  consumed {task.consumed:>9}/{partition.rows}{speed}{claimed}{waits}{passed}")
        lines += [f"        {task.held_text}"] if task.held else []
    return lines


def _speed(speed: float | None) -> str:
    return "" if speed is None else f"  {speed:>9.1f}/s"


def status_as_json(status: SystemStatus, speeds: Rates | None = None) -> dict[str, Any]:
    """Return the status as JSON values: every field of the messages by its name, and the rates; null if unknown."""
    values: dict[str, Any] = plain(status)
    known = speeds or {}
    for partition in values["partitions"]:
        for field in partition["fields"]:
            field["produced_per_second"] = known.get((partition["name"], "field", field["name"]))
        for task in partition["tasks"]:
            task["consumed_per_second"] = known.get((partition["name"], "task", task["name"]))
    return values


def json_line(system: RunningSystem, status: SystemStatus, verdict: Verdict, speeds: Rates | None = None) -> str:
    """Return one line of JSON with the system, the verdict, the progress and the rates."""
    judged = msgspec.structs.replace(status, verdict=verdict)
    return json.dumps({"system": system_as_json(system), **status_as_json(judged, speeds)})
