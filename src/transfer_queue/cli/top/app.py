"""The application `tq top`: receives news about the system, and shows them on the open screen."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.filter import LineFilter

from transfer_queue.cli.top.follower import Broken, ControllerQuestion, News, NewsSource
from transfer_queue.cli.top.live_state import LiveState
from transfer_queue.cli.top.screens.help_screen import HelpScreen
from transfer_queue.cli.top.screens.overview_screen import OverviewScreen
from transfer_queue.cli.top.screens.top_screen import TopScreen
from transfer_queue.cli.top.tables.theme import DARK, LIGHT, WithoutColors, make_themes

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
