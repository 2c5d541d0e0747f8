"""The help of `tq top`: its keys, shapes and columns."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from transfer_queue.cli.top.tables.cells import SHAPES, Piece
from transfer_queue.cli.top.tables.theme import style_of

KEYS = (
    ("1 ... 5, tab", "go to a table: stages, waits, partitions, memory, controller"),
    ("up, down, j, k", "move; page up, page down, home and end as well"),
    ("enter", "open the task, the wait, the partition or the sample at the cursor"),
    ("esc", "go back; close the filter"),
    ("/", "show only the rows that contain a text"),
    ("s, S", "sort by the next column; in the opposite order"),
    ("g", "in a partition: go to a sample by its key or global index"),
    ("p", "pause, or continue"),
    ("t", "light or dark"),
    ("?", "this help"),
    ("q", "quit"),
)
MEANINGS = (
    ("slowest", "the slowest stage, according to the verdict"),
    ("works", "works: between the samples of a claim and the next claim"),
    ("waits", "waits: a claim is open, and the samples for it are not ready"),
    ("held", "held: a put waits for space or for a policy version"),
    ("early", "early: the claim is for a batch that its rank does not need yet"),
    ("idle", "idle: in no other state"),
    ("gone", "gone: the connection ended before the end of the partition"),
)
WORDS = (
    ("ranks", "connected ranks; × ranks that are gone and were not replaced"),
    ("ready", "samples that have all fields that the task takes, and that it has not claimed"),
    ("+/s", "by how many samples that queue grows each second"),
    ("waits for ← from", "the missing field for which it waits most, and the task that puts it"),
    ("was ready", "for how long claimed samples were ready before (median)"),
    ("staleness", "by how many policy versions claimed samples were old: the mean and the largest"),
    ("rarest field", "the field that the fewest samples of the partition have"),
    ("held, leased", "bytes of values; bytes of the memory that contains them"),
)


class HelpScreen(ModalScreen[None]):
    """The keys, and what shapes and columns mean."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; background: $background 60%; }
    HelpScreen VerticalScroll { width: 90; max-width: 100%; height: auto; max-height: 100%; background: $panel;
        padding: 1 2; scrollbar-size-vertical: 1; }
    HelpScreen Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,enter,space", "dismiss", "Close"),
    ]

    def compose(self) -> ComposeResult:
        """Return the text."""
        lines: list[tuple[Piece, str]] = [(("tq top", "strong"), "where a training waits"), (("", ""), "")]
        lines += [((key, "key"), meaning) for key, meaning in KEYS]
        lines.append((("", ""), ""))
        lines += [((SHAPES[state], state), meaning) for state, meaning in MEANINGS]
        lines.append((("", ""), ""))
        lines += [((word, "strong"), meaning) for word, meaning in WORDS]
        grid = Table.grid(padding=(0, 2))
        for (words, role), meaning in lines:
            grid.add_row(Text(words, style_of(self.app, role) if role else "", no_wrap=True), Text(meaning))
        with VerticalScroll():
            yield Static(grid)
