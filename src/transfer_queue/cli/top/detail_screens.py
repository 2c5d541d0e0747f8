"""The screens of `tq top` about one thing: a task, a wait, a partition, a sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from transfer_queue.cli.samples.report_text import lines_of
from transfer_queue.cli.shell.terminal import MIN_WIDTH, Styles, sentence_lines
from transfer_queue.cli.top.cells import (
    Cell,
    Piece,
    count,
    duration,
    name_text,
    percent,
    rate,
    state_piece,
    task_text,
)
from transfer_queue.cli.top.designs import FIELDS, MEMBERS, SAMPLES, TASKS, ranks_design
from transfer_queue.cli.top.follower import LiveState
from transfer_queue.cli.top.live_table import LiveTable
from transfer_queue.cli.top.picture import (
    FieldRow,
    PartitionRow,
    Picture,
    RankRow,
    SampleRow,
    StageRow,
    TaskRow,
    WaitRow,
    list_ranks,
    list_samples,
)
from transfer_queue.cli.top.top_screen import TopScreen
from transfer_queue.display import count_text, listed_names, time_of_day
from transfer_queue.messages.base import Done
from transfer_queue.messages.queries import Explain, SnapshotReply, TakeSnapshot
from transfer_queue.messages.reports.progress_text import notes_of

SAMPLES_EVERY = 5.0  # seconds after which the samples are read again, if one page contains all of them
MAX_QUEUES = 3  # the number of partitions that the screen of a task names


class DetailScreen(TopScreen):
    """A screen that is opened from another one, with some sentences, an explanation of the controller, and tables."""

    DEFAULT_CSS = """
    DetailScreen #facts { max-height: 12; margin: 1 0; }
    DetailScreen.-low #facts { margin: 0; }
    DetailScreen.-low #words { margin: 0; }
    DetailScreen #words { height: auto; max-height: 50%; margin-bottom: 1; scrollbar-size-vertical: 1; }
    DetailScreen #words Static { height: auto; }
    """

    def __init__(self, state: LiveState) -> None:
        super().__init__(state)
        self.facts = Static(id="facts", markup=False)
        """What is known in sentences."""
        self._explanation = Static(id="explanation", markup=False)
        self._is_waiting = False

    def explanation(self, can_focus: bool = False) -> Widget:
        """Return the widget that shows the explanation. can_focus: whether keys scroll it."""
        return VerticalScroll(self._explanation, id="words", can_focus=can_focus)

    def explain(self, question: Callable[[Any], str]) -> None:
        """Ask a `ControlClient` for the explanation, unless it is asked already."""
        if not self._is_waiting:
            self._is_waiting = True
            self.state.ask(question, self._show_text)

    def _show_text(self, text: Any) -> None:
        self._is_waiting = False
        self.put(self._explanation, [(str(text), "waits" if isinstance(text, Exception) else "")])

    def show_facts(self, pieces: Cell) -> None:
        """Show what is known in sentences."""
        self.put(self.facts, pieces)


def _labelled(pairs: Iterable[tuple[str, Cell]]) -> list[Piece]:
    """Return lines of a label and a text."""
    pieces: list[Piece] = []
    for number, (label, text) in enumerate(pairs):
        pieces += [("\n" if number else "", ""), (f"{label:<10} ", "dim"), *text]
    return pieces


class TaskScreen(DetailScreen):
    """A task: its rates and queues, what it waits for, and its ranks over time.

    Args:
        state: What is known of the system.
        task: The name of the task.
    """

    def __init__(self, state: LiveState, task: str) -> None:
        super().__init__(state)
        self.task_name = task
        """The name of the task."""
        self.ranks = LiveTable(ranks_design(0.0, 0.0), id="ranks")

    def place(self) -> str:
        """See `TopScreen`."""
        return f"task {task_text(self.task_name)}"

    def compose_body(self) -> Iterable[Widget]:
        """See `TopScreen`."""
        yield self.facts
        yield self.ranks

    def show_picture(self, picture: Picture) -> None:
        """See `TopScreen`."""
        row = picture.stage(self.task_name)
        line = picture.account.spans.line
        self.ranks.design = ranks_design(line.start, line.end)
        self.ranks.set_rows(list_ranks(picture, self.task_name))
        if row is None:
            self.show_facts([("The task has done nothing in the time that the timeline covers.", "dim")])
        else:
            self.show_facts(_labelled(_task_facts(row, picture)))

    @on(LiveTable.Opened)
    def open_wait(self, event: LiveTable.Opened) -> None:
        """Open what a rank waits for."""
        row = event.row
        waits = self.state.shown.picture.waits if self.state.shown is not None else ()
        if isinstance(row, RankRow):
            name, of_task = row.lane.name, (each for each in waits if each.task == self.task_name)
            wait = next((each for each in of_task if any(one.lane.name == name for one in each.members)), None)
            if wait is not None:
                self.app.push_screen(WaitScreen(self.state, wait))
            else:
                self.notify(f"{name} does not wait at this moment.", markup=False, timeout=3)


def _task_facts(row: StageRow, picture: Picture) -> Iterable[tuple[str, Cell]]:
    stage = row.account
    missing: list[Piece] = []
    if stage.lost:
        since = f" since {time_of_day(stage.lost_since)}" if stage.lost_since is not None else ""
        missing = [(f"  × {stage.lost:,} gone{since}", "gone")]
    slowest: list[Piece] = [("  ▲ the slowest stage", "slowest")] if row.slowest else []
    yield "ranks", [(f"{stage.alive:,} connected", ""), *missing, *slowest]
    shares: list[Piece] = []
    for state, share in (("works", stage.works), ("waits", stage.waits), ("held", stage.held), ("idle", stage.idle)):
        name = "puts or is idle" if state == "idle" and not stage.takes else state
        if share >= 0.005:
            shares += [state_piece(state), (f" {name} {percent(share)}   ", state)]
    yield "time", shares or [("nothing is known", "dim")]
    if stage.takes:
        growth = f", {rate(abs(stage.queue_growth))} {'more' if stage.queue_growth > 0 else 'fewer'} each second"
        taken = f"  {rate(stage.claim_rate)} samples each second"
        taken += f", a claim every {duration(stage.step)}" if stage.step else ""
        rest = (growth if abs(stage.queue_growth) >= 0.05 else "") + _queues(picture, row.name)
        yield "takes", [(listed_names(stage.takes), ""), (taken, "dim")]
        yield "ready", [(f"{stage.queue_rows:,} samples", ""), (rest, "dim")]
    if stage.puts:
        yield "puts", [(listed_names(stage.puts), ""), (f"  {rate(stage.put_rate)} samples each second", "dim")]
    waits: list[Piece] = []
    for field, maker, share in row.missing[:4]:
        by = "which no task puts" if maker is None else f"put by {task_text(maker)}"
        waits += [(f"{percent(share * stage.waits)} ", "waits"), (name_text(field), "strong"), (f" {by}   ", "dim")]
    if waits:
        yield "waits for", waits
    samples: list[Piece] = []
    if row.age is not None:
        known = f"{duration(row.age.median)} (median), {duration(row.age.largest)} at most"
        samples.append((f"were ready for {known}   ", ""))
    if row.staleness is not None:
        stale = row.staleness
        samples.append((f"{stale.mean:.1f} policy versions old (mean), {stale.largest:.0f} at most", ""))
    if samples:
        yield "samples", samples


def _queues(picture: Picture, task: str) -> str:
    """Return the partitions with the most samples that a task has not consumed."""
    progress = [(each.progress, one) for each in picture.partitions for one in each.progress.tasks if one.name == task]
    left = [(its.rows - one.consumed, its.name) for its, one in progress if its.rows > one.consumed]
    left.sort(key=lambda each: -each[0])
    queues = ", ".join(f"{count(rows)} in {name_text(name)}" for rows, name in left[:MAX_QUEUES])
    more = f", and in {len(left) - MAX_QUEUES:,} more partitions" if len(left) > MAX_QUEUES else ""
    return f"; not consumed: {queues}{more}" if queues else ""


class WaitScreen(DetailScreen):
    """What some ranks wait for, in words, and since when.

    Args:
        state: What is known of the system.
        row: The wait.
    """

    def __init__(self, state: LiveState, row: WaitRow) -> None:
        super().__init__(state)
        self.row = row
        """The wait."""
        self.members = LiveTable(MEMBERS, id="members")

    def place(self) -> str:
        """See `TopScreen`."""
        return f"wait of {task_text(self.row.task)}"

    def compose_body(self) -> Iterable[Widget]:
        """See `TopScreen`."""
        yield self.facts
        yield self.explanation()
        yield self.members

    def show_picture(self, picture: Picture) -> None:
        """See `TopScreen`."""
        now = next((each for each in picture.waits if each.key == self.row.key), None)
        members = () if now is None else now.members
        row = self.row = now or self.row
        self.members.set_rows(members)
        count = None if row.kind == "held" else row.rows
        request = Explain(row.partition, task=row.task, fields=list(row.fields), count=count)
        self.explain(lambda client: sentence_lines(str(client.request(request, Done).value)))
        number = count_text(len(members), "put" if row.kind == "held" else "claim")
        what: list[Piece] = [("space or a policy version", "held")]
        if row.fields:
            makers = ", ".join(map(task_text, row.producers)) or "no task yet"
            rarest = f"   {name_text(row.rarest)} is the rarest, put by"
            what = [(listed_names(row.fields), "strong"), (rarest, "dim"), (f" {makers}", "")]
        self.show_facts(
            _labelled(
                [
                    ("task", [(task_text(row.task), "strong"), (f"  {number} wait{'s' * (len(members) == 1)}", "")]),
                    ("partition", [(name_text(row.partition), "")]),
                    ("for", what),
                ]
            )
        )


class PartitionScreen(DetailScreen):
    """A partition: its fields, its tasks and its samples.

    Args:
        state: What is known of the system.
        partition: The name of the partition.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("g", "go", "Go to sample"),
        Binding("r", "read", "Read samples", show=False),
        *(Binding(str(key), f"choose({key - 1})", "", show=False) for key in range(1, 4)),
    ]

    def __init__(self, state: LiveState, partition: str) -> None:
        super().__init__(state)
        self.partition = partition
        """The name of the partition."""
        self.fields = LiveTable(FIELDS, "1", "fields")
        self.tasks_table = LiveTable(TASKS, "2", "tasks")
        self.samples = LiveTable(SAMPLES, "3", "samples")
        self._newest: SnapshotReply | None = None
        self._is_reading = False
        self._read_at = -math.inf
        self._has_more_pages = False

    def place(self) -> str:
        """See `TopScreen`."""
        return f"partition {name_text(self.partition)}"

    def compose_body(self) -> Iterable[Widget]:
        """See `TopScreen`."""
        yield self.facts
        yield self.fields
        yield self.tasks_table
        yield self.samples

    def show_picture(self, picture: Picture) -> None:
        """See `TopScreen`."""
        row = picture.partition(self.partition)
        if row is None:
            self.show_facts([("The partition does not exist any more.", "gone")])
            return
        self.show_facts(_partition_facts(row))
        speeds, its = picture.rates_of(row.progress), row.progress
        makers = picture.account.table.producers
        self.fields.set_rows([
            FieldRow(each, its.rows, speeds.get((its.name, "field", each.name)), makers.get(each.name, []))
            for each in its.fields
        ])  # fmt: skip
        self.tasks_table.set_rows([TaskRow(each, its, speeds.get((its.name, "task", each.name))) for each in its.tasks])
        if not self._has_more_pages and time.monotonic() - self._read_at >= SAMPLES_EVERY:
            self._read(None)

    def fit_tables(self) -> None:
        """See `TopScreen`."""
        height = self.size.height
        if height:
            self.fields.styles.height = min(self.fields.lines_wanted, max(height // 4, 6))
            self.tasks_table.styles.height = min(self.tasks_table.lines_wanted, max(height // 5, 6))

    # ------------------------------------------------------------ samples

    def _read(self, after: SnapshotReply | None) -> None:
        """Read the page of samples after another one; the first one if it is None."""
        if not self._is_reading:
            self._is_reading = True
            place = (None, 0) if after is None else (after.made, after.start or 0)
            request = TakeSnapshot(self.partition, *place)
            ask, show = (lambda client: client.request(request, SnapshotReply)), self._show_page
            self.state.ask(ask, lambda reply: show(reply, after))

    def _show_page(self, reply: Any, after: SnapshotReply | None) -> None:
        self._is_reading, self._read_at = False, time.monotonic()
        if not isinstance(reply, SnapshotReply) or not reply.known:
            return
        self._newest, self._has_more_pages = reply, after is not None and after.made == reply.made
        samples = [*(self.samples.rows if self._has_more_pages else ()), *list_samples(reply)]
        note = f"as of {time.strftime('%H:%M:%S')}; enter opens one, g goes to one"
        if reply.start is not None:
            note = f"the first {len(samples):,}, {note}"
        self.samples.set_rows(samples, note)
        self.fit_tables()

    @on(LiveTable.EndReached)
    def read_more(self, event: LiveTable.EndReached) -> None:
        """Read the next page of samples."""
        if event.table is self.samples and self._newest is not None and self._newest.start is not None:
            self._read(self._newest)

    def action_read(self) -> None:
        """Read the samples again, from the first one on."""
        self._read(None)

    def action_go(self) -> None:
        """Ask which sample to open."""
        self.open_input("a key, or a global index", "", self._open_named)

    def _open_named(self, text: str) -> None:
        text = text.strip()
        known = any(each.key == text for each in self.samples.rows)
        index = int(text) if text.isascii() and text.isdigit() and not known else None
        self.app.push_screen(SampleScreen(self.state, self.partition, index, None if index is not None else text))

    # ------------------------------------------------------------ keys

    def action_choose(self, at: int) -> None:
        """Go to a table by its number."""
        self.set_focus(self.tables()[at])

    @on(LiveTable.Opened)
    def open_row(self, event: LiveTable.Opened) -> None:
        """Open a sample, a task, or the task that puts a field."""
        row = event.row
        if isinstance(row, SampleRow):
            self.app.push_screen(SampleScreen(self.state, self.partition, row.index, None))
        elif isinstance(row, TaskRow):
            self.app.push_screen(TaskScreen(self.state, row.progress.name))
        elif isinstance(row, FieldRow) and row.producers:
            self.app.push_screen(TaskScreen(self.state, row.producers[0]))


def _partition_facts(row: PartitionRow) -> Cell:
    progress = row.progress
    pieces: list[Piece] = [(", ".join(notes_of(progress)), "")]
    if row.put_rate or row.claim_rate:
        pieces.append((f"\n{rate(row.put_rate)} rows are put each second, {rate(row.claim_rate)} are claimed", "dim"))
    return pieces


class SampleScreen(DetailScreen):
    """A sample: its fields, who put them, its state for each task, its history, and why it is not dealt.

    Args:
        state: What is known of the system.
        partition: The name of its partition.
        index: Its global index; None if `key` names it.
        key: Its key; None if `index` names it.
    """

    DEFAULT_CSS = """
    SampleScreen #words { height: 1fr; max-height: 100%; }
    """

    def __init__(self, state: LiveState, partition: str, index: int | None, key: str | None) -> None:
        super().__init__(state)
        self.partition = partition
        """The name of its partition."""
        self.index = index
        """Its global index; None if `key` names it."""
        self.key = key
        """Its key; None if `index` names it."""

    def place(self) -> str:
        """See `TopScreen`."""
        name = f"{self.index}" if self.index is not None else name_text(self.key or "")
        return f"sample {name} of {name_text(self.partition)}"

    def compose_body(self) -> Iterable[Widget]:
        """See `TopScreen`."""
        yield self.explanation(can_focus=True)

    def show_picture(self, picture: Picture) -> None:
        """See `TopScreen`."""
        partition, index, key, width = self.partition, self.index, self.key, max(MIN_WIDTH, self.size.width - 2)
        self.explain(
            lambda client: "\n".join(lines_of(client.describe_sample(partition, index, key), {}, width, Styles(False)))
        )
