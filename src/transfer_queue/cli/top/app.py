"""The application `tq top`: receives news about the system, and shows them, or the help, on the open screen."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.filter import LineFilter
from textual.screen import ModalScreen
from textual.widgets import Static

from transfer_queue.cli.top.cells import SHAPES, Piece
from transfer_queue.cli.top.follower import Broken, ControllerQuestion, LiveState, News, NewsSource
from transfer_queue.cli.top.overview_screen import OverviewScreen
from transfer_queue.cli.top.theme import DARK, LIGHT, WithoutColors, make_themes, style_of
from transfer_queue.cli.top.top_screen import TopScreen

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
        source: NewsSource,
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
        self.theme = LIGHT if light else DARK

    def get_line_filters(self) -> list[LineFilter]:
        """Return a filter that removes colors, if NO_COLOR is set."""
        return [WithoutColors()] if self.no_color else []

    def on_mount(self) -> None:
        """Open the first screen, and begin to read."""
        loop = asyncio.get_running_loop()
        # It fails in a thread that is not the main one.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGTERM, self.exit, 128 + signal.SIGTERM)
        self.push_screen(OverviewScreen(self.state))
        self.source.start(self._deliver)
        self.set_interval(CLOCK, self._refresh_head)

    def on_unmount(self) -> None:
        """End the thread that reads."""
        self.source.stop()

    def _deliver(self, news: News) -> None:
        """Receive news in the thread that reads."""
        self.call_later(self._receive, news)

    def _receive(self, news: News) -> None:
        if isinstance(news, Broken):
            raise news.error
        if self.state.add(news):
            self._refresh()
        else:
            self._refresh_head()

    def _refresh(self) -> None:
        if isinstance(self.screen, TopScreen):
            self.screen.refresh_all()

    def _refresh_head(self) -> None:
        if isinstance(self.screen, TopScreen):
            self.screen.refresh_head()

    def _ask(self, ask: Callable[[Any], Any], answer: Callable[[Any], None]) -> None:
        def deliver(result: Any) -> None:
            self.call_later(answer, result)

        self.source.ask(ControllerQuestion(ask, deliver))

    # ------------------------------------------------------------ keys

    def action_pause(self) -> None:
        """Pause, or continue."""
        self.state.pause()
        self._refresh()

    def action_theme(self) -> None:
        """Change between light and dark."""
        self.theme = LIGHT if self.theme == DARK else DARK
        self._refresh()

    def action_help(self) -> None:
        """Show the keys, and what shapes and columns mean."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def action_leave(self) -> None:
        """End the command."""
        self.exit(0)
