"""Describes the progress of a system for people: the texts that `tq status` prints, and the page of a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from transfer_queue.display import (
    GroupHeading,
    HtmlPage,
    HtmlTable,
    ProgressCell,
    Row,
    SizeCell,
    count_text,
    listed,
    short_name,
    short_repr,
    short_text,
    size_text,
)
from transfer_queue.messages.descriptors import DISK, MIRROR
from transfer_queue.messages.reports.progress import PartitionProgress, PolicyProgress, UnitProgress

NOTES: tuple[Callable[[PartitionProgress], str | None], ...] = (
    lambda p: count_text(p.rows, "sample"),
    lambda p: f"{size_text(p.nbytes)}{_tiers(p)}",
    lambda p: f"{size_text(p.saved)} saved by storing equal values once" if p.saved else None,
    lambda p: f"{p.reserved:,} pre-allocated" if p.reserved else None,
    lambda p: f"groups of {p.group_size}" if p.group_size is not None else None,
    lambda p: count_text(p.orphaned_groups, "orphaned group") if p.orphaned_groups else None,
    lambda p: "sealed" if p.sealed else None,
    lambda p: f"{p.freed:,} freed" if p.freed else None,
    lambda p: ", ".join(f"{rows:,} dropped ({short_name(reason)})" for reason, rows in p.dropped.items()),
    lambda p: _policy(p.policy) if p.policy is not None else None,
    lambda p: ", ".join(
        f"task {short_repr(task)} needs {less} more of {groups} groups" for task, (groups, less) in p.wanted.items()
    ),
    lambda p: _limit(p) if p.max_rows is not None else None,
    lambda p: f"{count_text(p.waiting_puts, 'put')} {_wait(p.waiting_puts)} for space" if p.waiting_puts else None,
)
"""The texts after a partition's name, in this order. A function that returns None or "" adds nothing."""

MAX_LINES = 40
"""The lines about partitions in a notebook."""
MAX_OF_PARTITION = 8
"""The fields, and the tasks, of one partition in a notebook."""
MAX_UNITS = 8
"""The storage units in a notebook."""


def notes_of(partition: PartitionProgress) -> list[str]:
    """Return the texts that describe a partition."""
    return [text for text in (note(partition) for note in NOTES) if text]


def tier_name(tier: str) -> str:
    """Return where values of a tier are, as people say it."""
    named = {DISK: "on disk", MIRROR: "in the mirror"}
    return named.get(tier, f"in {short_name(tier)}")


def _limit(partition: PartitionProgress) -> str:
    """Return how full a partition with `max_rows` is."""
    full = "full, " if partition.open_rows >= (partition.max_rows or 0) else ""
    return f"{full}{partition.open_rows:,} of at most {count_text(partition.max_rows or 0, 'row')} (max_rows)"


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"


def _tiers(partition: PartitionProgress) -> str:
    """Return the bytes by tier, or "" if all of them are in one tier."""
    if len(partition.stored) < 2:
        return ""
    return f" ({', '.join(f'{size_text(nbytes)} {tier_name(tier)}' for tier, nbytes in partition.stored.items())})"


def _policy(policy: PolicyProgress) -> str:
    stale = "" if policy.max_staleness is None else f", staleness at most {policy.max_staleness}"
    most = "" if policy.limit is None else f", {policy.admitted:,} of {policy.limit:,} samples admitted"
    return f"policy version {policy.version}{stale}{most}"


def summary_of(partitions: Sequence[PartitionProgress]) -> str:
    """Return the number of partitions, samples and bytes."""
    samples = count_text(sum(partition.rows for partition in partitions), "sample")
    nbytes = size_text(sum(partition.nbytes for partition in partitions))
    return f"{count_text(len(partitions), 'partition')}, {samples}, {nbytes}"


def status_line(partitions: Sequence[PartitionProgress], trouble: str, verdict: str = "") -> str:
    """Return a status as one line. It begins with the verdict, if there is one."""
    names = listed([partition.name for partition in partitions])
    blocked = f", trouble: {short_repr(trouble, 100)}" if trouble else ""
    judged = f"{short_text(verdict, 240)!r}, " if verdict else ""
    return f"SystemStatus({judged}{summary_of(partitions)}, partitions {names}{blocked})"


def status_page(
    partitions: Sequence[PartitionProgress],
    units: Sequence[UnitProgress],
    trouble: str,
    title: str,
    verdict: str = "",
) -> HtmlPage:
    """Return what a status shows in a notebook. Below the title it has the verdict, if there is one."""
    page = HtmlPage(title, summary_of(partitions), lead=verdict)
    if trouble:
        page.alarms.append(f"Changes are blocked: {trouble}")
    page.tables.append(_partition_table(partitions))
    page.tables.append(_unit_table(units))
    return page


def _partition_table(partitions: Sequence[PartitionProgress]) -> HtmlTable:
    """Return a table with a line for each field and task of the first partitions."""
    rows: list[Row] = []
    shown = 0
    for partition in partitions:
        lines = [GroupHeading(partition.name, ", ".join(notes_of(partition))), *_lines(partition)]
        if rows and len(rows) + len(lines) > MAX_LINES:
            break
        rows += lines
        shown += 1
    left = len(partitions) - shown
    return HtmlTable(["", "", "", ""], rows, f"{count_text(left, 'more partition')}" if left else "")


def _lines(partition: PartitionProgress) -> Iterator[Row]:
    for field in partition.fields[:MAX_OF_PARTITION]:
        lost = f", {field.lost:,} LOST with their storage unit; put them again" if field.lost else ""
        progress = ProgressCell(field.produced, partition.rows)
        yield ["field", field.name, progress, f"{short_name(field.type)}{lost}"]
    yield from _left(len(partition.fields), "field")
    for task in partition.tasks[:MAX_OF_PARTITION]:
        skipped = sum(partition.passed.get(task.name, {}).values())
        texts = [
            f"{task.claimed:,} claimed, not acknowledged yet" if task.claimed else "",
            f"{count_text(skipped, 'sample')} skipped" if skipped else "",
            f"{count_text(task.waiting, 'claim')} waiting, the longest {task.longest_wait:.1f} s"
            if task.waiting
            else "",
            task.held_text,
        ]
        yield ["task", task.name, ProgressCell(task.consumed, partition.rows), ", ".join(filter(None, texts))]
    yield from _left(len(partition.tasks), "task")


def _left(every: int, noun: str) -> Iterator[Row]:
    if every > MAX_OF_PARTITION:
        yield ["", f"… {count_text(every - MAX_OF_PARTITION, 'more ' + noun)}", None, ""]


def _unit_table(units: Sequence[UnitProgress]) -> HtmlTable:
    rows: list[Row] = [
        [
            unit.unit, tier_name(unit.tier), SizeCell(unit.leased), SizeCell(unit.capacity) if unit.capacity else None,
            "being drained" if unit.drained else "",
        ]
        for unit in units[:MAX_UNITS]
    ]  # fmt: skip
    left = len(units) - len(rows)
    more = count_text(left, "more storage unit") if left else ""
    return HtmlTable(["storage unit", "values", "leased", "capacity", ""], rows, more)
