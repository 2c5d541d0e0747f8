"""The live view in the terminal; without a terminal, a line every few seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from types import TracebackType

import transfer_queue as tq
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from figures import WORKERS, Figures, Piece, busy_seconds, without_overlaps
from settings import EVENTS, WEIGHTS

REDRAW, LINE = 0.5, 5.0
"""Seconds between two updates of the view, and between two lines without a terminal."""

MAX_COLUMNS, BAR = 4, 9
"""The number of partitions shown, and of characters in a bar, so that the view fits in 80 columns."""
WINDOW = 8.0
"""Seconds of the timelines."""
LABEL_WIDTH, WIDEST = 22, 140
"""Characters of the labels next to a timeline, and of the widest view."""
LEVELS = "·▁▂▃▄▅▆▇█"
WAITING = "grey35"
COLOURS = {
    "rollout": "blue", "sandbox": "plum3", "reward": "magenta", "reference": "yellow", "train": "green",
    "update": "cyan",
}  # fmt: skip


class View:
    """Shows the progress of a run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._heading = ""
        self._start = time.time()
        self._next = 0.0
        self._names: dict[str, str] = {}
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._console.print(f"[{time.time() - self._start:5.1f} s] {text}", highlight=False, soft_wrap=True)

    def warming(self, step: int, loss: float) -> None:
        """Show the progress of the supervised warm-up, if an update is due."""
        self._show(lambda: (f"step {step}   loss {loss:.2f}", []))

    def training(self, figures: Figures, queue: bool = False) -> None:
        """Show the progress of a run, if an update is due; `queue` also shows the partitions."""

        def made() -> tuple[str, list[RenderableType]]:
            parts: list[RenderableType] = [partitions(figures, self._names)] if queue else []
            now = time.time()
            parts.append(timelines(figures, now - WINDOW, now, cells(self._console)))
            return summary(figures), parts

        self._show(made)

    def begin(self, heading: str) -> None:
        """Begin a part of the run."""
        self._heading = heading
        self.note(heading)
        if self._live is not None:
            self._live.update(Text(heading, style="bold"), refresh=True)

    def _show(self, make: Callable[[], tuple[str, list[RenderableType]]]) -> None:
        if time.time() < self._next:
            return
        self._next = time.time() + (REDRAW if self._live else LINE)
        line, parts = make()
        if self._live is None:
            self.note(line)
        else:
            self._live.update(Group(Text(self._heading, style="bold"), Text(line), *parts), refresh=True)

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
    shown = [one for one in tq.get_client().status().partitions if one.name not in (EVENTS, WEIGHTS)][:MAX_COLUMNS]
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


def cells(console: Console) -> int:
    """Return the number of characters of a timeline."""
    return max(20, min(console.width, WIDEST) - LABEL_WIDTH)


def summary(figures: Figures) -> str:
    """Return the progress of a run as a line."""
    total = sum(figures.staleness.values()) or 1
    stale = "  ".join(f"{lag}: {count / total:.0%}" for lag, count in sorted(figures.staleness.items()))
    return (
        f"step {figures.version}   {figures.seconds_per_step():.2f} s/step   "
        f"reward {figures.recent(figures.rewards):.2f}   staleness {stale or '-'}"
    )


def timelines(figures: Figures, start: float, end: float, cells: int) -> Table:
    """Return a row for each worker: how much of each moment it worked, and its idle share."""
    pieces = [piece.within(start, end) for piece in figures.pieces(start) if piece.start < end]
    busy = busy_seconds(pieces)
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    for worker in WORKERS:
        mine = strip([piece for piece in pieces if piece.worker == worker], start, end, cells)
        table.add_row(worker, mine, f"{1 - busy.get(worker, 0.0) / (end - start):4.0%} idle")
    return table


def strip(pieces: Iterable[Piece], start: float, end: float, cells: int) -> Text:
    """Return the work of one worker between two moments: higher characters are more work, colours are stages."""
    width = (end - start) / cells
    seconds: list[dict[str, float]] = [{} for _ in range(cells)]
    for piece in without_overlaps(pieces):
        for cell in range(int((piece.start - start) / width), min(cells, math.ceil((piece.end - start) / width))):
            part = piece.within(start + cell * width, start + (cell + 1) * width)
            seconds[cell][piece.stage] = seconds[cell].get(piece.stage, 0.0) + part.end - part.start
    text = Text()
    for stages in seconds:
        level = math.ceil(min(sum(stages.values()) / width, 1.0) * (len(LEVELS) - 1))
        text.append(LEVELS[level], COLOURS[max(stages, key=lambda stage: stages[stage])] if level else WAITING)
    return text
