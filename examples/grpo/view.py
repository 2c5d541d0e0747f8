"""The live view in the terminal; without a terminal, a line every few seconds."""

from __future__ import annotations

import time
from types import TracebackType

import transfer_queue as tq
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from figures import Figures
from settings import EVENTS, WEIGHTS

REDRAW, LINE = 0.25, 5.0
"""Seconds between two updates of the view, and between two lines without a terminal."""

MOST_COLUMNS, BAR = 4, 9
"""The number of partitions shown, and of characters in a bar, so that the view fits in 80 columns."""


class View:
    """Shows the progress of a run."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._start = self._window = time.time()
        self._counted, self._rate = 0, 0.0
        self._next = 0.0
        self._names: dict[str, str] = {}
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._console.print(f"[{time.time() - self._start:5.1f} s] {text}", highlight=False, soft_wrap=True)

    def warming(self, figures: Figures) -> None:
        """Update the progress of the supervised warm-up, if an update is due."""
        if not self._due(REDRAW if self._live else LINE):
            return
        line = f"supervised warm-up, step {figures.warmup_steps}: held-out accuracy {figures.warmup_accuracy:.1%}"
        if self._live is None:
            self.note(line)
        else:
            self._live.update(Group(Text(self._title, style="bold"), Text(line)), refresh=True)

    def training(self, figures: Figures, alive: dict[str, int]) -> None:
        """Update the progress of GRPO, if an update is due."""
        if not self._due(REDRAW if self._live else LINE):
            return
        now = time.time()
        if now - self._window >= 1.0:
            self._rate = (figures.trained - self._counted) / (now - self._window)
            self._counted, self._window = figures.trained, now
        summary = self._summary(figures)
        if self._live is None:
            self.note(summary)
        else:
            workers = "  ".join(f"{name} ({pid})" for name, pid in alive.items())
            parts: list[RenderableType] = [
                Text(self._title, style="bold"),
                Text(summary),
                partitions(figures, self._names),
            ]
            self._live.update(Group(*parts, Text(workers, style="dim")), refresh=True)

    def _summary(self, figures: Figures) -> str:
        total = sum(figures.staleness.values()) or 1
        stale = "  ".join(f"{lag}: {count / total:.0%}" for lag, count in sorted(figures.staleness.items()))
        return (
            f"step {figures.version}/{figures.settings.steps}   {self._rate:.0f} samples/s   "
            f"reward {figures.recent(figures.rewards):.3f}   sampled right {figures.recent(figures.correct):.1%}   "
            f"staleness {stale or '-'}"
        )

    def _due(self, interval: float) -> bool:
        if time.time() < self._next:
            return False
        self._next = time.time() + interval
        return True

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def partitions(figures: Figures, names: dict[str, str]) -> Table:
    """Return a table with a column for each partition and a row for each field (produced) and task (consumed).

    `names` collects fields and tasks with their colors in the order of their first appearance, so that rows keep their
    order.
    """
    shown = [one for one in tq.get_client().status().partitions if one.name not in (EVENTS, WEIGHTS)][:MOST_COLUMNS]
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("field, > task")
    columns: list[dict[str, int]] = []
    for partition in shown:
        table.add_column(partition.name)
        names |= dict.fromkeys((field.name for field in partition.fields if field.name not in names), "cyan")
        columns.append({field.name: field.produced for field in partition.fields})
        columns[-1] |= {f"> {task.name}": task.consumed for task in partition.tasks}
    for partition in shown:
        names |= dict.fromkeys((f"> {task.name}" for task in partition.tasks if f"> {task.name}" not in names), "green")
    for name, colour in names.items():
        cells = []
        for partition, counts in zip(shown, columns, strict=True):
            whole = figures.settings.samples if partition.name.startswith("train_") else partition.rows
            cells.append(bar(counts[name], whole, colour) if name in counts else Text(""))
        table.add_row(name, *cells)
    return table


def bar(count: int, whole: int, colour: str) -> Text:
    """Return a bar for the share `count` of `whole`, and the count."""
    full = BAR * min(count, whole) // max(whole, 1)
    return Text.assemble(("━" * full, colour), ("━" * (BAR - full), "grey23"), f" {count:<4}")
