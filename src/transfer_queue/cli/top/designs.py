"""The columns of the tables of `tq top`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfer_queue.cli.status_table import staleness_text
from transfer_queue.cli.top.cells import (
    FILLS,
    BarPart,
    Cell,
    bar,
    count,
    duration,
    name_text,
    percent,
    rate,
    sparkline,
    stacked_bar,
    state_piece,
    strip,
    task_text,
)
from transfer_queue.cli.top.live_table import R, TableColumn, TableDesign
from transfer_queue.cli.top.picture import (
    FieldRow,
    LoadRow,
    MemoryRow,
    PartitionRow,
    RankRow,
    SampleRow,
    StageRow,
    TaskRow,
    WaitMember,
    WaitRow,
)
from transfer_queue.core.claims.row_leases import POISON
from transfer_queue.display import count_text, printable_name, short_repr, size_text
from transfer_queue.messages.reports.progress_text import notes_of, tier_name
from transfer_queue.timeline.spans import SpanState
from transfer_queue.timeline.verdict import HOLDS

NOTICED = 0.02  # a task that waits for a smaller share has nothing in the column "waits for"
WIDE = 60  # the width of a column for texts, at most


def _share(share: float, width: int, role: str) -> Cell:
    """Return a bar with the share as a number."""
    return [*bar(share, max(width - 6, 1), role), (f" {percent(share):>5}", role if share >= 0.005 else "dim")]


def _progress(done: int, total: int, width: int, role: str) -> Cell:
    """Return a bar with a number out of another."""
    numbers = f" {count(done)}/{count(total)}"
    return [*bar(done / total if total else 0.0, max(width - 16, 2), role), (f"{numbers:>15}", "")]


def _numbers(
    title: str, value: Callable[[R], Any], text: Callable[[Any], str], width: int, role: str = "", rank: int = 0
) -> TableColumn[R]:
    """Return a column of numbers, or of None. The largest one comes first when the rows are sorted by it."""

    def cell(row: R, width: int) -> Cell:
        number = value(row)
        return [("" if number is None else text(number), role)]

    def order(row: R) -> Any:
        number = value(row)
        return -1.0 if number is None else number

    return TableColumn(title, cell, width, rank=rank, right=True, sort=order, descending=True)


def _names(title: str, name: Callable[[R], str], text: Callable[[str], str], width: int, most: int) -> TableColumn[R]:
    """Return a column of names that is as wide as the longest one."""
    return TableColumn(title, lambda row, _: [(text(name(row)), "")], width, most, fits=True, sort=name)


# ---------------------------------------------------------------- stages


def _ranks(row: StageRow, width: int) -> Cell:
    stage = row.account
    missing = [(f" ×{stage.lost:,}", "gone")] if stage.lost else []
    return [(f"{stage.alive:,}", "" if stage.alive else "gone"), *missing]


def _where_time_goes(row: StageRow, width: int) -> Cell:
    stage = row.account
    rest = max(1.0 - stage.works - stage.held - stage.waits, 0.0)
    only_puts = not stage.takes  # a task that only puts works whenever it does not wait
    return stacked_bar(
        [
            BarPart(stage.works + (rest if only_puts else 0.0), FILLS[SpanState.WORKS], "works"),
            BarPart(stage.held, FILLS[SpanState.HELD], "held"),
            BarPart(stage.waits, FILLS[SpanState.WAITS], "waits"),
            BarPart(0.0 if only_puts else rest, FILLS[SpanState.IDLE], "faint"),
        ],
        width,
    )


def _waiting(row: StageRow, width: int) -> Cell:
    stage = row.account
    return _share(stage.held, width, "held") if stage.held > stage.waits else _share(stage.waits, width, "waits")


def _growth(row: StageRow, width: int) -> Cell:
    growth = row.account.queue_growth
    if not row.account.takes or abs(growth) < 0.05:
        return [("", "")]
    return [(f"{'+' if growth > 0 else '-'}{rate(abs(growth))}", "waits" if growth > 0 else "dim")]


def _waits_for(row: StageRow, width: int) -> Cell:
    stage = row.account
    if stage.held > stage.waits and stage.held >= NOTICED:
        return [(f"held: {HOLDS.get(row.hold_cause, 'capacity or policy version')}", "held")]
    if stage.waits < NOTICED or not row.missing:
        return [("", "")]
    field, maker, _ = row.missing[0]
    more = [(f" +{len(row.missing) - 1}", "dim")] if len(row.missing) > 1 and row.missing[1][2] >= 0.1 else []
    by = "no task" if maker is None else task_text(maker)
    return [(name_text(field), ""), (" ← ", "dim"), (by, "strong"), *more]


STAGES: TableDesign[StageRow] = TableDesign(
    "Stages",
    [
        TableColumn("", lambda row, _: [state_piece("slowest" if row.slowest else row.state)], 1),
        TableColumn("stage", lambda row, _: [(task_text(row.name), "strong" if row.slowest else "")], 8, 24, fits=True,
               sort=lambda row: row.name),
        TableColumn("ranks", _ranks, 5, 10, right=True, fits=True, sort=lambda row: row.account.lost, descending=True),
        TableColumn("waiting", _waiting, 12, 24, sort=lambda row: max(row.account.waits, row.account.held),
                    descending=True),
        TableColumn("works █ held ▒ waits ░", _where_time_goes, 22, 40, rank=4),
        _numbers("ready", lambda row: row.account.queue_rows if row.account.takes else None, count, 7),
        TableColumn("+/s", _growth, 7, rank=2, right=True, sort=lambda row: row.account.queue_growth, descending=True),
        _numbers("takes/s", lambda row: row.account.claim_rate if row.account.takes else None, rate, 7),
        _numbers("puts/s", lambda row: row.account.put_rate if row.account.puts else None, rate, 7),
        TableColumn("waits for ← from", _waits_for, 16, 44),
        TableColumn("last minute", lambda row, width: sparkline(row.history, width, "works"), 16, 30, rank=5),
        _numbers("bytes/s", lambda row: row.nbytes or None, size_text, 10, rank=6),
        _numbers("step", lambda row: row.account.step or None, duration, 8, rank=7),
        _numbers("was ready", lambda row: row.age and row.age.median, duration, 9, rank=8),
        TableColumn("staleness", lambda row, _: [(staleness_text(row.staleness) if row.staleness else "", "")], 12,
               rank=7, right=True, sort=lambda row: row.staleness.mean if row.staleness else -1.0, descending=True),
    ],
    key=lambda row: row.name,
    text=lambda row: f"{task_text(row.name)} {' '.join(row.account.takes)} {' '.join(row.account.puts)}",
    empty="No task has claimed or put anything in the time that the timeline covers.",
)  # fmt: skip


# ---------------------------------------------------------------- waits


def _wait_fields(row: WaitRow, width: int) -> Cell:
    if row.kind == "held":
        return [(HOLDS["demand"] if row.demand else "capacity or policy version", "held")]
    others = [name for name in row.fields if name != row.rarest]
    rest = [(", " + ", ".join(map(name_text, others)), "dim")] if others else []
    return [(name_text(row.rarest), "strong"), *rest]


def _put_by(row: WaitRow, width: int) -> Cell:
    if row.kind == "held":
        return [("", "")]
    return [(", ".join(map(task_text, row.producers)), "")] if row.producers else [("no task yet", "gone")]


WAITS: TableDesign[WaitRow] = TableDesign(
    "Who waits for what",
    [
        TableColumn("", lambda row, _: [state_piece(row.kind)], 1),
        _names("task", lambda row: row.task, task_text, 8, 24),
        _numbers("ranks", lambda row: len(row.members), "{:,}".format, 5),
        TableColumn("for", lambda row, _: [(duration(row.seconds), "waits" if row.seconds >= 10 else "")], 8,
                    right=True, sort=lambda row: row.seconds, descending=True),
        TableColumn("waits for", _wait_fields, 16, WIDE, sort=lambda row: row.rarest),
        TableColumn("put by", _put_by, 10, 24, sort=lambda row: row.producers),
        _names("partition", lambda row: row.partition, name_text, 9, 24),
        _numbers("rows", lambda row: row.rows, count, 7, rank=1),
    ],
    key=lambda row: row.key,
    text=lambda row: f"{task_text(row.task)} {row.partition} {' '.join(row.fields)} {' '.join(row.producers)}",
    empty="Nothing waits at this moment.",
)  # fmt: skip

MEMBERS: TableDesign[WaitMember] = TableDesign(
    "Ranks that wait",
    [
        _names("rank", lambda row: row.lane.name, name_text, 12, 48),
        TableColumn("process", lambda row, _: [(row.lane.process, "dim")], 12, 32, fits=True, rank=1),
        _numbers("for", lambda row: row.seconds, duration, 8),
        _numbers("rows", lambda row: row.rows, count, 8),
    ],
    key=lambda row: row.lane.name,
    text=lambda row: f"{row.lane.name} {row.lane.process}",
    empty="The task does not wait any more.",
)  # fmt: skip


# ---------------------------------------------------------------- partitions


def _rarest(row: PartitionRow, width: int) -> Cell:
    rarest, rows = row.rarest, row.progress.rows
    if rarest is None:
        return [("no fields", "dim")]
    label = name_text(rarest.name) if rarest.produced < rows else count_text(len(row.progress.fields), "field")
    return [*_share(rarest.produced / rows if rows else 0.0, 12, "works"), (f" {label}", "dim")]


def _slowest(row: PartitionRow, width: int) -> Cell:
    slowest, rows = row.slowest, row.progress.rows
    if slowest is None:
        return [("no task", "dim")]
    label = task_text(slowest.name) if slowest.consumed < rows else count_text(len(row.progress.tasks), "task")
    return [*_share(slowest.consumed / rows if rows else 0.0, 12, "good"), (f" {label}", "dim")]


def _notes(row: PartitionRow, width: int) -> Cell:
    entry = row.progress
    lost = sum(field.lost for field in entry.fields)
    alarm = [(f"{lost:,} LOST ", "gone")] if lost else []
    # The first two notes are the number of samples and bytes, which have columns of their own.
    return [*alarm, (", ".join(note for note in notes_of(entry)[2:] if not note.startswith("policy version")), "dim")]


PARTITIONS: TableDesign[PartitionRow] = TableDesign(
    "Partitions",
    [
        _names("partition", lambda row: row.progress.name, name_text, 9, 32),
        _numbers("samples", lambda row: row.progress.rows, count, 7),
        _numbers("size", lambda row: row.progress.nbytes, size_text, 9, "dim", rank=2),
        TableColumn("rarest field", _rarest, 23, 32,
               sort=lambda row: row.rarest.produced / row.progress.rows if row.rarest and row.progress.rows else 1.0),
        TableColumn("slowest task", _slowest, 21, 32, rank=1,
               sort=lambda row: row.slowest.consumed / row.progress.rows if row.slowest and row.progress.rows else 1.0),
        _numbers("wait", lambda row: row.waiting or None, "{:,}".format, 4, "waits"),
        _numbers("policy", lambda row: row.progress.policy and row.progress.policy.version, "{:,}".format, 6, rank=3),
        _numbers("puts/s", lambda row: row.put_rate, rate, 7, rank=4),
        _numbers("takes/s", lambda row: row.claim_rate, rate, 7, rank=4),
        TableColumn("notes", _notes, 12, WIDE, rank=5),
    ],
    key=lambda row: row.progress.name,
    text=lambda row: row.progress.name,
    empty="The system has no partitions.",
)  # fmt: skip


def _field_notes(row: FieldRow, width: int) -> Cell:
    lost = [(f"  {row.progress.lost:,} LOST with their storage unit; put them again", "gone")]
    return [(printable_name(row.progress.type), "dim"), *(lost if row.progress.lost else [])]


FIELDS: TableDesign[FieldRow] = TableDesign(
    "Fields",
    [
        _names("field", lambda row: row.progress.name, name_text, 8, 32),
        TableColumn("samples that have it", lambda row, width: _progress(row.progress.produced, row.rows, width,
               "works"), 28, 48, sort=lambda row: row.progress.produced),
        _numbers("puts/s", lambda row: row.speed, rate, 7),
        TableColumn("put by", lambda row, _: [(", ".join(map(task_text, row.producers)), "")], 8, 24,
               sort=lambda row: row.producers),
        TableColumn("type", _field_notes, 12, WIDE, rank=1, sort=lambda row: row.progress.type),
    ],
    key=lambda row: row.progress.name,
    text=lambda row: row.progress.name,
    empty="The partition has no fields.",
)  # fmt: skip


def _task_notes(row: TaskRow, width: int) -> Cell:
    progress, notes = row.progress, []
    if progress.claimed:
        notes.append(f"{progress.claimed:,} claimed, not acknowledged")
    if progress.held:
        notes.append(progress.held_text)
    for reason, number in row.partition.passed.get(progress.name, {}).items():
        notes.append(f"{number:,} skipped ({'poison' if reason == POISON else printable_name(reason)})")
    waits = [(f"{progress.waiting:,} wait, {duration(progress.longest_wait)}  ", "waits")] if progress.waiting else []
    return [*waits, (", ".join(notes), "dim")]


TASKS: TableDesign[TaskRow] = TableDesign(
    "Tasks",
    [
        _names("task", lambda row: row.progress.name, task_text, 8, 32),
        TableColumn("samples consumed", lambda row, width: _progress(row.progress.consumed, row.partition.rows, width,
               "good"), 28, 48, sort=lambda row: row.progress.consumed),
        _numbers("takes/s", lambda row: row.speed, rate, 7),
        TableColumn("waiting, claimed, skipped", _task_notes, 20, WIDE, sort=lambda row: row.progress.longest_wait,
               descending=True),
    ],
    key=lambda row: row.progress.name,
    text=lambda row: row.progress.name,
    empty="No task has claimed samples of the partition.",
)  # fmt: skip


def _has(row: SampleRow, width: int) -> Cell:
    return [("".join("●" if has else "○" for has in row.produced), "works")]


def _missing(row: SampleRow, width: int) -> Cell:
    return [(", ".join(map(name_text, row.missing)), "waits")] if row.missing else [("complete", "good")]


SAMPLES: TableDesign[SampleRow] = TableDesign(
    "Samples",
    [
        TableColumn("index", lambda row, _: [(str(row.index), "")], 7, 12, fits=True, right=True,
               sort=lambda row: row.index),
        TableColumn("key", lambda row, _: [(name_text(row.key) if row.key is not None else "", "")], 6, 32, fits=True,
               sort=lambda row: row.key or ""),
        TableColumn("fields", _has, 6, 50, fits=True, rank=2),
        TableColumn("missing", _missing, 16, WIDE, sort=lambda row: len(row.missing), descending=True),
        TableColumn("consumed by", lambda row, _: [(", ".join(map(task_text, row.consumers)), "")], 12, 40,
               sort=lambda row: len(row.consumers)),
        TableColumn("tag", lambda row, _: [(short_repr(dict(row.tag)) if row.tag else "", "dim")], 10, WIDE, rank=1),
    ],
    key=lambda row: row.index,
    text=lambda row: f"{row.index} {row.key or ''} {' '.join(row.missing)}",
    empty="The partition has no samples.",
)  # fmt: skip


# ---------------------------------------------------------------- memory and load


def _memory_name(row: MemoryRow, width: int) -> Cell:
    if row.unit is None:
        return [(tier_name(row.tier), "strong")]
    return [(f"  unit {row.unit.unit}", "")]


def _memory_bar(row: MemoryRow, width: int) -> Cell:
    if not row.capacity:
        return [("", "")]
    held = row.held if row.held is not None else 0
    leased = max(row.leased - held, 0)
    parts = [BarPart(held / row.capacity, "█", "works"), BarPart(leased / row.capacity, "▒", "held")]
    used = max(row.leased, held) / row.capacity
    pieces = stacked_bar(parts, max(width - 6, 1))
    return [*pieces[:-1], ("·" * len(pieces[-1][0]), "faint"), (f" {percent(used):>5}", "gone" if used > 0.9 else "")]


def _memory_note(row: MemoryRow, width: int) -> Cell:
    if row.unit is None:
        return [(f"{row.units:,} {'unit' if row.units == 1 else 'units'}", "dim")]
    return [("being drained" if row.unit.drained else "", "held")]


MEMORY: TableDesign[MemoryRow] = TableDesign(
    "Memory",
    [
        TableColumn("values", _memory_name, 9, 24, fits=True, sort=lambda row: (row.tier, row.unit is not None)),
        TableColumn("held █ leased ▒", _memory_bar, 15, 40, sort=lambda row: row.leased, descending=True),
        _numbers("held", lambda row: row.held, size_text, 9),
        _numbers("leased", lambda row: row.leased, size_text, 9),
        _numbers("capacity", lambda row: row.capacity, lambda nbytes: size_text(nbytes) if nbytes else "not known", 9),
        TableColumn("", _memory_note, 13, rank=1),
    ],
    key=lambda row: (row.tier, None if row.unit is None else row.unit.unit),
    text=lambda row: f"{tier_name(row.tier)} unit {'' if row.unit is None else row.unit.unit}",
    empty="The system has no storage units.",
)  # fmt: skip


def _busy(row: LoadRow, width: int) -> Cell:
    return [("", "")] if row.busy is None else _share(row.busy, width, "gone" if row.busy > 0.7 else "works")


LOAD: TableDesign[LoadRow] = TableDesign(
    "Controller",
    [
        TableColumn("request", lambda row, _: [("sampler " if row.sampler else "", "dim"), (name_text(row.name), "")],
               12, 28, fits=True, sort=lambda row: row.name),
        _numbers("each s", lambda row: row.rate, rate, 7),
        TableColumn("busy", _busy, 12, 24, sort=lambda row: row.busy or 0.0, descending=True),
        _numbers("mean", lambda row: row.typical, duration, 8),
        _numbers("99 %", lambda row: row.slow, duration, 8),
        _numbers("total", lambda row: row.total, count, 7, "dim", rank=1),
    ],
    key=lambda row: (row.sampler, row.name),
    text=lambda row: row.name,
    empty="The controller has served no requests yet.",
)  # fmt: skip


# ---------------------------------------------------------------- ranks


def ranks_design(start: float, end: float) -> TableDesign[RankRow]:
    """Return the columns of the ranks of a task in a window.

    Args:
        start: When the window begins, in Unix seconds.
        end: When it ends.
    """
    return TableDesign(
        "Ranks",
        [
            TableColumn("", lambda row, _: [state_piece(row.state)], 1),
            TableColumn("rank", lambda row, _: [(name_text(row.lane.name), "")], 8, 40, fits=True,
                   sort=lambda row: (row.lane.rank, row.lane.client)),
            TableColumn("now", lambda row, _: [(row.state, row.state)], 5, sort=lambda row: row.state),
            _numbers("for", lambda row: row.seconds, duration, 8),
            TableColumn("waits", lambda row, width: _share(row.shares["waits"], width, "waits"), 12, 16,
                   sort=lambda row: row.shares["waits"], descending=True),
            _numbers("works", lambda row: row.shares["works"], percent, 5, "works", rank=1),
            _numbers("rows/s", lambda row: row.rate, rate, 7),
            TableColumn(f"the last {duration(end - start)}: works █ held ▒ waits ░",
                   lambda row, width: strip(row.spans, start, end, width), 20, 200),
            TableColumn("process", lambda row, _: [(row.lane.process, "dim")], 12, 32, fits=True, rank=2),
        ],
        key=lambda row: (row.lane.rank, row.lane.client if row.lane.rank < 0 else ""),
        text=lambda row: f"{row.lane.name} {row.state} {row.lane.process}",
        empty="No rank of this task is known.",
    )  # fmt: skip
