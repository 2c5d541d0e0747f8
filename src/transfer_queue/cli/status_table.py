"""Formats the status of a system as text for people and as JSON for scripts, and computes rates between two queries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.cli.shell.terminal import (
    Styles,
    is_terminal,
    plain,
    system_as_json,
    table_lines,
    width_of_output,
    wrap,
)
from transfer_queue.core.claims.row_leases import POISON
from transfer_queue.display import count_text, printable_name, short_name, size_text, worker_text
from transfer_queue.messages.descriptors import DISK
from transfer_queue.messages.reports.progress import (
    FieldProgress,
    MirrorProgress,
    PartitionProgress,
    TaskProgress,
    UnitProgress,
)
from transfer_queue.messages.reports.progress_text import notes_of, tier_name
from transfer_queue.messages.reports.store_reports import StoreServerProgress
from transfer_queue.messages.reports.timeline import Verdict
from transfer_queue.messages.system import SystemStatus
from transfer_queue.metrics.timing import LOOP_BOUNDS, quantile

if TYPE_CHECKING:
    from transfer_queue.node.system.launcher import RunningSystem
    from transfer_queue.timeline.account import Account, Spread

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
        for each in partition.fields:
            counts[partition.name, "field", each.name] = each.produced_ever
        for task in partition.tasks:
            counts[partition.name, "task", task.name] = task.consumed_ever
    return counts


@dataclass(frozen=True)
class TimelineFacts:
    """What the table shows of the timeline."""

    producers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Field -> the tasks that put it."""
    staleness: Mapping[str, Spread] = field(default_factory=dict)
    """Task -> by how many policy versions the samples that it claimed were old."""
    clients: Mapping[str, str] = field(default_factory=dict)
    """Client -> its task, rank and process, for people."""

    @classmethod
    def of(cls, account: Account) -> TimelineFacts:
        """Return the facts in an account of time."""
        lanes = account.table.recording.lanes[1:]
        clients = {
            each.client: worker_text(each.task, each.rank, each.pid, each.host, each.client) for each in lanes
        }  # fmt: skip
        return cls(account.table.producers, account.staleness, clients)


@dataclass(frozen=True)
class Layout:
    """How a text is laid out."""

    width: int | None = None
    """The number of columns of the terminal; None for files and pipes, of which lines are not wrapped."""
    style: Styles = field(default_factory=lambda: Styles(False))
    """Adds colors."""

    @classmethod
    def of_output(cls) -> Layout:
        """Return the layout for standard output."""
        return cls(width_of_output() if is_terminal() else None, Styles())


NO_FACTS = TimelineFacts()
UNWRAPPED = Layout()


def format_table(
    status: SystemStatus, speeds: Rates | None = None, facts: TimelineFacts = NO_FACTS, layout: Layout = UNWRAPPED
) -> str:
    """Return all partitions as text, with a line for each field and task, and with rates if they are given."""
    parts = [
        "\n".join(_PartitionText(partition, speeds or {}, facts, layout).lines()) for partition in status.partitions
    ] or ["no partitions"]
    if status.trouble:
        parts.insert(0, "\n".join(wrap(f"TROUBLE: {status.trouble}", layout.width)))
    if status.locks.held or status.locks.waiting:
        longest = f"; the longest: {printable_name(status.locks.longest)}" if status.locks.longest else ""
        parts.append(f"locks of keys: {status.locks.held} held, requests that wait: {status.locks.waiting}{longest}")
    if any(unit.tier == DISK for unit in status.units):
        parts.append("\n".join(_storage(status.units)))
    if any(unit.views or unit.viewed for unit in status.units):
        parts.append("\n".join(_views(status.units, facts)))
    if status.stores:
        parts.append("\n".join(_stores(status.stores)))
    if status.mirror is not None:
        parts.append(_mirror(status.mirror))
    for cost in status.samplers:
        took = f"{cost.seconds:.2f} s, the longest {cost.longest * 1000:.1f} ms"
        again = f"; its process was restarted {_times(cost.restarts)}" if cost.restarts else ""
        parts.append(f"sampler {cost.name}: called {_times(cost.calls)}, {took}{again}")
    if status.requests:
        parts.append("\n".join(_loop(status, layout)))
    return "\n\n".join(parts)


def _loop(status: SystemStatus, layout: Layout) -> Iterator[str]:
    """Iterate over lines about the requests that took most time of the controller's loop, and the longest event."""
    costly = sorted(status.requests, key=lambda timing: -timing.seconds)[:COSTLY]
    what, seconds = status.longest
    longest = f", longest recent event {seconds * 1000:.1f} ms ({printable_name(what)})" if what else ""
    first, *more = wrap(f"controller: the requests that took most of its time{longest}", layout.width, "  ")
    yield layout.style("controller:", "bold") + first.removeprefix("controller:")
    yield from more
    rows = [
        (t.name, f"{sum(t.counts):,}", f"{quantile(LOOP_BOUNDS, t.counts, 0.99) * 1000:.2g} ms") for t in costly
    ]  # fmt: skip
    for lines in table_lines(("request", "served", "99 % within"), rows, layout.width, layout.style, frozenset({1, 2})):
        yield from lines


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


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


def _views(units: Sequence[UnitProgress], facts: TimelineFacts) -> list[str]:
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
            who = facts.clients.get(hold.client) or worker_text(pid=hold.pid, client=hold.client)
            views = count_text(hold.views, "view")
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
                again = f"{_times(server.ends)}, the last time {server.seconds:.1f} s ago"
                lines.append(f"  {server.place} was restarted {again}")
    return lines


def _mirror(mirror: MirrorProgress) -> str:
    """Return a line about the values on disk, and how far they are behind."""
    if mirror.most_bytes < 0:
        most = "puts wait for the disk"
    else:
        most = f"at most {size_text(mirror.most_bytes)} or {mirror.most_seconds:g} s for acknowledged puts"
    behind = f"{size_text(mirror.behind_bytes)}, {mirror.behind_seconds:.1f} s"
    wait = "waits" if mirror.waiting == 1 else "wait"
    waits = f"; {count_text(mirror.waiting, 'put')} {wait} for the disk" if mirror.waiting else ""
    full = "; THE DISK IS FULL: clear samples, or free some space there" if mirror.full else ""
    disconnected = "" if mirror.connected else "; ITS UNIT IS NOT CONNECTED"
    stored = f"{size_text(mirror.stored)} in {size_text(mirror.leased)}"
    retired = f"; {size_text(mirror.retired)} are in mirrors of earlier controllers" if mirror.retired else ""
    return f"copies on disk: {stored}; behind: {behind} ({most}){waits}{full}{disconnected}{retired}"


class _PartitionText:
    """The text about one partition: its notes, a table of its fields, and a table of its tasks."""

    def __init__(self, partition: PartitionProgress, speeds: Rates, facts: TimelineFacts, layout: Layout) -> None:
        self._partition = partition
        self._speeds = speeds
        self._facts = facts
        self._layout = layout
        names = [field.name for field in partition.fields] + [task.name for task in partition.tasks]
        self._names = max((len(self._name(name)) for name in names), default=0)

    def lines(self) -> Iterator[str]:
        """Iterate over the lines."""
        partition, layout = self._partition, self._layout
        first, *more = wrap(f"{printable_name(partition.name)}: {', '.join(notes_of(partition))}", layout.width, "  ")
        name, colon, rest = first.partition(f"{printable_name(partition.name)}:")
        yield f"{name}{layout.style(colon, 'bold')}{rest}"
        yield from more
        yield from self._table(
            ("field", "produced", "per second", "type", "put by"),
            [self._field(field) for field in partition.fields],
            [self._field_notes(field) for field in partition.fields],
        )
        yield from self._table(
            ("task", "consumed", "per second", "claimed", "waiting", "longest", "staleness"),
            [self._task(task) for task in partition.tasks],
            [self._task_notes(task) for task in partition.tasks],
        )

    def _table(self, headings: Sequence[str], rows: list[tuple[str, ...]], notes: list[list[str]]) -> Iterator[str]:
        if not rows:
            return
        padded = [(f"{row[0]:<{self._names}}", *row[1:]) for row in rows]
        right = frozenset({1, 2}) if headings[0] == "field" else frozenset({1, 2, 3, 4, 5})
        first, *tables = table_lines(headings, padded, self._layout.width, self._layout.style, right)
        yield from first
        for lines, some in zip(tables, notes):
            yield from lines
            for note in some:
                yield from wrap(f"      {note}", self._layout.width, "  ")

    def _name(self, name: str) -> str:
        return short_name(name, 24 if (self._layout.width or 160) < 120 else 40)

    def _of_rows(self, count: int) -> str:
        return f"{count:,} of {self._partition.rows:,}"

    def _field(self, field: FieldProgress) -> tuple[str, ...]:
        return (
            self._name(field.name),
            self._of_rows(field.produced),
            _speed(self._speeds.get((self._partition.name, "field", field.name))),
            printable_name(field.type),
            ", ".join(printable_name(task) for task in self._facts.producers.get(field.name, ()) if task),
        )

    def _field_notes(self, field: FieldProgress) -> list[str]:
        if not field.lost:
            return []
        their, them = ("its", "it") if field.lost == 1 else ("their", "them")
        return [f"{count_text(field.lost, 'value')} LOST with {their} storage unit; put {them} again"]

    def _task(self, task: TaskProgress) -> tuple[str, ...]:
        stale = self._facts.staleness.get(task.name)
        return (
            self._name(task.name),
            self._of_rows(task.consumed),
            _speed(self._speeds.get((self._partition.name, "task", task.name))),
            f"{task.claimed:,}" if task.claimed else "",
            f"{task.waiting:,}" if task.waiting else "",
            f"{task.longest_wait:,.1f} s" if task.waiting else "",
            "" if stale is None or self._partition.policy is None else f"{staleness_text(stale)} versions",
        )

    def _task_notes(self, task: TaskProgress) -> list[str]:
        over = self._partition.passed.get(task.name, {}).items()
        notes = [f"{count:,} skipped ({printable_name(REASONS.get(reason, reason))})" for reason, count in over]
        return [*notes, *filter(None, [task.held_text])]


def staleness_text(spread: Spread) -> str:
    """Return the staleness of claimed samples in policy versions, as `mean 0.5, max 2`."""
    return f"mean {spread.mean:.1f}, max {spread.largest:.0f}"


def _speed(speed: float | None) -> str:
    return "" if speed is None else f"{speed:,.1f}"


def status_as_json(
    status: SystemStatus, speeds: Rates | None = None, facts: TimelineFacts = NO_FACTS
) -> dict[str, Any]:
    """Return the status as JSON values: every field of the messages by its name, the rates, and what the timeline says.

    What is not known is null.
    """
    values: dict[str, Any] = plain(status)
    known = speeds or {}
    for partition in values["partitions"]:
        for each in partition["fields"]:
            each["produced_per_second"] = known.get((partition["name"], "field", each["name"]))
            each["producers"] = list(facts.producers.get(each["name"], ()))
        for task in partition["tasks"]:
            task["consumed_per_second"] = known.get((partition["name"], "task", task["name"]))
            stale = facts.staleness.get(task["name"])
            task["staleness"] = None if stale is None else {"mean": stale.mean, "max": stale.largest}
    return values


def json_line(
    system: RunningSystem,
    status: SystemStatus,
    verdict: Verdict,
    speeds: Rates | None = None,
    facts: TimelineFacts = NO_FACTS,
) -> str:
    """Return one line of JSON with the system, the verdict, the progress and the rates."""
    judged = msgspec.structs.replace(status, verdict=verdict)
    return json.dumps({"system": system_as_json(system), **status_as_json(judged, speeds, facts)})
