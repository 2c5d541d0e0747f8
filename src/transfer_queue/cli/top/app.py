"""The application `tq top`: receives news about the system, and shows them, or the help, on the open screen."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.filter import LineFilter, NoColor
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Static

from transfer_queue.cli.top.cells import SHAPES, Cell, Piece, duration
from transfer_queue.cli.top.designs import LOAD, MEMORY, PARTITIONS, STAGES, WAITS
from transfer_queue.cli.top.detail_screens import PartitionScreen, TaskScreen, WaitScreen
from transfer_queue.cli.top.follower import Answer, Follower, LiveState, News, Question
from transfer_queue.cli.top.live_table import LiveTable
from transfer_queue.cli.top.picture import PartitionRow, Picture, StageRow, WaitRow
from transfer_queue.cli.top.theme import DARK, LIGHT, make_styles, make_themes
from transfer_queue.cli.top.top_screen import TopScreen
from transfer_queue.display import printable_name

# ---------------------------------------------------------------- the overview
# The first screen of `tq top`: stages, waiting ranks, partitions, memory, and the load of the controller.

LOWEST = 22  # a terminal with fewer lines shows one table below the stages
HEAD_LINES = 6  # lines of the verdict, the state of the data, and the keys
WIDE = 150  # a terminal with more columns shows tables side by side
NAMES = {"waits": "Waits", "partitions": "Partitions", "memory": "Memory", "load": "Controller"}


class OverviewScreen(TopScreen):
    """All tables, or in a low terminal the stages and one of the others.

    Args:
        state: What is known of the system.
    """

    DEFAULT_CSS = """
    OverviewScreen #stages { height: 8; }
    OverviewScreen #middle { height: 1fr; layout: vertical; }
    OverviewScreen #bottom { height: 8; layout: horizontal; }
    OverviewScreen.-wide #middle { layout: horizontal; }
    OverviewScreen.-wide #middle LiveTable { width: 1fr; margin-right: 1; }
    OverviewScreen #bottom LiveTable { width: 1fr; margin-right: 1; }
    OverviewScreen.-low #bottom { layout: vertical; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(key), f"choose({key - 1})", "", show=False) for key in range(1, 6)),
        Binding("tab", "next(1)", "Next table"),
        Binding("shift+tab", "next(-1)", "Previous", show=False),
    ]

    def __init__(self, state: LiveState) -> None:
        super().__init__(state)
        self.stages = LiveTable(STAGES, "1", "stages")
        self.waits = LiveTable(WAITS, "2", "waits")
        self.partitions = LiveTable(PARTITIONS, "3", "partitions")
        self.memory = LiveTable(MEMORY, "4", "memory")
        self.load = LiveTable(LOAD, "5", "load")
        self._every: list[LiveTable[Any]] = [self.stages, self.waits, self.partitions, self.memory, self.load]
        self._low_table: LiveTable[Any] = self.waits

    def compose_body(self) -> Iterable[Widget]:
        """Return the tables."""
        yield self.stages
        yield Container(self.waits, self.partitions, id="middle")
        yield Container(self.memory, self.load, id="bottom")

    def show_picture(self, picture: Picture) -> None:
        """Show another state."""
        self.stages.set_rows(picture.stages)
        early = sum(len(each.members) for each in picture.waits if each.kind == "early")
        self.waits.set_rows(picture.waits, f"{early:,} early claims need nothing yet" if early else "")
        self.partitions.set_rows(picture.partitions)
        self.memory.set_rows(picture.memory)
        what, seconds = picture.status.longest
        busy = [each.busy for each in picture.load if each.busy is not None]
        notes = [f"loop busy {100 * sum(busy):.0f} %"] if busy else []
        notes += [f"longest event {duration(seconds)} ({printable_name(what)})"] if what else []
        self.load.set_rows(picture.load, ", ".join(notes))
        self.fit_tables()

    # ------------------------------------------------------------ layout

    def fit_tables(self) -> None:
        """Give each table the space that the terminal has for it."""
        height, is_wide = self.size.height, self.size.width >= WIDE
        if not self.is_mounted or not height:
            return
        low = self.is_low
        self.set_class(is_wide and not low, "-wide")
        self.stages.styles.height = min(self.stages.lines_wanted, max(height * (36 if low else 30) // 100, 5))
        middle, bottom = self.query_one("#middle"), self.query_one("#bottom")
        middle.display = not low or self._low_table in (self.waits, self.partitions)
        bottom.display = not low or self._low_table in (self.memory, self.load)
        for table in self._every[1:]:
            table.display = height >= LOWEST or table is self._low_table
            table.aside = []
        # The lines at the bottom are those that the middle does not need, but at least a quarter.
        wanted = max(self.memory.lines_wanted, self.load.lines_wanted)
        upper, lower = self.waits.lines_wanted, self.partitions.lines_wanted
        left = height - HEAD_LINES - self.stages.lines_wanted - (max(upper, lower) if is_wide else upper + lower)
        bottom.styles.height = "1fr" if low else min(wanted, max(height // 4, left, 6))
        both = height >= LOWEST and not (is_wide and not low)
        self.waits.styles.height = min(upper, max(height // 4, 6)) if both else "1fr"
        self.memory.styles.height = min(self.memory.lines_wanted, max(height // 3, 6)) if low and both else "1fr"
        if low:
            shown = [table for table in self._every[1:] if table.display and (table.parent or self).display]
            shown[0].aside = self._names_of([table for table in self._every[1:] if table not in shown])

    def _names_of(self, hidden: list[LiveTable[Any]]) -> Cell:
        """Return the names of the tables that the terminal has no space for, with their keys."""
        pieces: list[Piece] = []
        for table in hidden:
            pieces += [(f"  {table.number} ", "key"), (NAMES[table.id or ""], "dim")]
        return [*pieces, (" ", "")]

    def action_choose(self, at: int) -> None:
        """Go to a table by its number."""
        table = self._every[at]
        if at:
            self._low_table = table
        self.fit_tables()
        self.set_focus(table)

    def action_next(self, step: int) -> None:
        """Go to the next table."""
        current = self._every.index(self.focused) if self.focused in self._every else 0
        self.action_choose((current + step) % len(self._every))

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Draw the titles again, which show where the focus is."""
        for table in self._every:
            table.refresh()

    # ------------------------------------------------------------ opening

    @on(LiveTable.Opened)
    def open_row(self, event: LiveTable.Opened) -> None:
        """Open the screen about a row."""
        row = event.row
        if isinstance(row, StageRow):
            self.app.push_screen(TaskScreen(self.state, row.name))
        elif isinstance(row, WaitRow):
            self.app.push_screen(WaitScreen(self.state, row))
        elif isinstance(row, PartitionRow):
            self.app.push_screen(PartitionScreen(self.state, row.progress.name))


# ---------------------------------------------------------------- help

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
TERMS = (
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
        lines += [((term, "strong"), meaning) for term, meaning in TERMS]
        grid = Table.grid(padding=(0, 2))
        for (text, role), meaning in lines:
            grid.add_row(Text(text, role, no_wrap=True), Text(meaning))
        with VerticalScroll():
            yield Static(grid)


CLOCK = 0.5  # seconds between two refreshes of the age of the data


class TopApp(App[int]):
    """The screens of `tq top`.

    Args:
        source: Where the state of the system comes from.
        every: The seconds between two refreshes.
        light: Whether the terminal is light.
        clock: The time in seconds, as in `Seen.read_at`.
    """

    TITLE = "tq top"
    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: $background; color: $foreground; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause"),
        Binding("t", "theme", "Light/dark", show=False),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "leave", "Quit"),
        Binding("ctrl+c", "leave", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False),
    ]

    def __init__(
        self,
        source: Follower,
        every: float = 1.0,
        light: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.source = source
        """Where the state of the system comes from."""
        self.state = LiveState(every, self._ask, clock)
        """What is known of the system."""
        for theme in make_themes():
            self.register_theme(theme)
        self._use_theme(LIGHT if light else DARK)

    def _use_theme(self, name: str) -> None:
        self.theme = name
        self.console.push_theme(make_styles(name, self.no_color))

    def get_line_filters(self) -> list[LineFilter]:
        """Return a filter that removes colors, if NO_COLOR is set."""
        return [NoColor()] if self.no_color else []

    def on_mount(self) -> None:
        """Open the first screen, and begin to read."""
        loop = asyncio.get_running_loop()
        # It fails in a thread that is not the main one.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGTERM, self.exit, 128 + signal.SIGTERM)
        self.push_screen(OverviewScreen(self.state))
        self.source.start(lambda news: self.call_later(self._receive, news))
        self.set_interval(CLOCK, self._refresh)

    def on_unmount(self) -> None:
        """End the thread that reads."""
        self.source.stop()

    def _receive(self, news: News) -> None:
        if news.error is not None:
            raise news.error
        self._refresh(self.state.add(news))

    def _refresh(self, has_changed: bool = False) -> None:
        """Draw the head of the open screen again, and all of it if what it shows has changed."""
        if self.screen_stack and isinstance(self.screen, TopScreen):  # timers still run when no screen is left
            draw = self.screen.refresh_all if has_changed else self.screen.refresh_head
            draw()

    def _ask(self, question: Question, answer: Answer) -> None:
        self.source.ask(question, lambda result: self.call_later(answer, result))

    # ------------------------------------------------------------ keys

    def action_pause(self) -> None:
        """Pause, or continue."""
        self.state.pause()
        self._refresh(True)

    def action_theme(self) -> None:
        """Change between light and dark."""
        self.console.pop_theme()
        self._use_theme(LIGHT if self.theme == DARK else DARK)
        self._refresh(True)

    def action_help(self) -> None:
        """Show the keys, and what shapes and columns mean."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def action_leave(self) -> None:
        """End the command."""
        self.exit(0)
