"""What the screens of `tq top` have in common: the verdict in the first line, the state of the data, and the filter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer, Input, Static

from transfer_queue.cli.top.cells import SHAPES, Cell, duration, fitted, name_text, text_of
from transfer_queue.cli.top.follower import LiveState
from transfer_queue.cli.top.live_table import LiveTable
from transfer_queue.cli.top.picture import Picture
from transfer_queue.display import count_text, size_text

LOW = 33  # a terminal with fewer lines is low
ADVICE_HEIGHT = 30  # a terminal with at least this many lines also shows the advice of the verdict


def _with_names(text: str) -> Cell:
    """Return a text in which names are between backquotes, with these names in bold."""
    return [(part, "strong" if number % 2 else "") for number, part in enumerate(text.split("`"))]


class TopScreen(Screen[None]):
    """A screen that shows the state of the system.

    Args:
        state: What is known of the system.
    """

    DEFAULT_CSS = """
    TopScreen { layout: vertical; }
    TopScreen Static { width: 1fr; height: auto; padding: 0 1; }
    TopScreen #verdict { max-height: 6; }
    TopScreen #alarm { display: none; max-height: 3; }
    TopScreen LiveTable { height: 1fr; scrollbar-size: 0 0; background: $background; }
    TopScreen #input { display: none; height: 1; border: none; padding: 0 1; background: $panel; }
    TopScreen #input.-on { display: block; }
    """
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "back", "Back", key_display="esc")]

    def __init__(self, state: LiveState) -> None:
        super().__init__()
        self.state = state
        """What is known of the system."""
        self.input_line = Input(id="input", select_on_focus=False)
        """The line for filters and names. It is hidden unless it is used."""
        self._verdict_line = Static(id="verdict", markup=False)
        self._state_line = Static(id="line", markup=False)
        self._alarm_line = Static(id="alarm", markup=False)
        self._filtered: LiveTable[Any] | None = None
        self._submit: Callable[[str], None] | None = None

    # ------------------------------------------------------------ what a screen has

    def compose(self) -> ComposeResult:
        """Return the widgets of the screen."""
        yield self._verdict_line
        yield self._state_line
        yield self._alarm_line
        yield from self.compose_body()
        yield self.input_line
        yield Footer(show_command_palette=False, compact=True)

    def compose_body(self) -> Iterable[Widget]:
        """Return what is below the head."""
        raise NotImplementedError

    def show_picture(self, picture: Picture) -> None:
        """Show another state."""
        raise NotImplementedError

    def fit_tables(self) -> None:
        """Adapt the heights of the tables to the terminal and to what they show."""

    def place(self) -> str:
        """Return where the user is, as "task reward"; "" on the first screen."""
        return ""

    # ------------------------------------------------------------ refreshes

    def on_mount(self) -> None:
        """Show what is known already."""
        self.input_line.can_focus = False
        self.focus_first()
        self.refresh_all()

    def focus_first(self) -> None:
        """Give the keys to the first table, if there is one."""
        self.set_focus(next((table for table in self.tables() if table.display), None))

    def on_screen_resume(self) -> None:
        """Show what has changed while another screen was open."""
        self.refresh_all()

    def on_resize(self) -> None:
        """Adapt to another terminal."""
        self.set_class(self.is_low, "-low")
        self.refresh_head()
        self.fit_tables()

    @property
    def is_low(self) -> bool:
        """Whether the terminal has few lines."""
        return self.size.height < LOW

    def refresh_all(self) -> None:
        """Show the newest state."""
        self.refresh_head()
        if self.state.shown is not None and self.input_line.is_attached:
            self.show_picture(self.state.shown.picture)
            self.fit_tables()

    def refresh_head(self) -> None:
        """Show the verdict, the age of the data, and what is wrong."""
        self.put(self._verdict_line, self._verdict())
        self.put(self._state_line, self._line())
        alarms, alarm = self.state.alarms(), self._alarm_line
        alarm.display = bool(alarms)
        if alarms:
            self.put(alarm, [(f"! {'  ! '.join(alarms)}", "")])
            alarm.styles.background = self.app.theme_variables["error"]
            alarm.styles.color = self.app.theme_variables["background"]

    def put(self, widget: Static, content: Cell | Text) -> None:
        """Replace the text of a widget, unless the screen is being opened or closed."""
        if widget.is_attached:
            widget.update(content if isinstance(content, Text) else text_of(content))

    def _verdict(self) -> Cell:
        if self.state.shown is None:
            return [("Reading the timeline ...", "dim")]
        verdict = self.state.shown.picture.verdict
        pieces = [(f"{SHAPES.get(verdict.state, '')} ", verdict.state), *_with_names(verdict.text)]
        if verdict.advice and self.size.height >= ADVICE_HEIGHT:
            pieces.append((f"\n  {verdict.advice}", "dim"))
        return pieces

    def _line(self) -> Text:
        shown = self.state.shown
        if shown is None:
            return text_of([(self.place(), "strong")])
        picture, now = shown.picture, time.time()
        partitions = picture.partitions
        samples = sum(each.progress.rows for each in partitions)
        nbytes = sum(each.progress.nbytes for each in partitions)
        left = [(name_text(shown.name), "strong"), (f" up {duration(now - shown.started_at)}", "dim")]
        if self.place():
            left.append((f" › {self.place()}", "key"))
        if self.size.width >= 100 or not self.place():
            left.append((f" · {count_text(len(partitions), 'partition')}", "dim"))
            left.append((f", {count_text(samples, 'sample')}, {size_text(nbytes)}", "dim"))
        if self.size.width >= 110:
            left.append((f" · rates and shares of the last {duration(picture.window)}", "dim"))
        right = self._freshness()
        space = self.size.width - 2 - sum(cell_len(text) for text, _ in right)
        return Text.assemble(fitted(left, max(space - 1, 1)), " ", text_of(right))

    def _freshness(self) -> Cell:
        age = self.state.age
        age_text = f"{age:.0f} s old" if age >= 1 else "live"
        if self.state.news.ended:
            return [("× ended", "gone")]
        if self.state.paused:
            return [(f"‖ PAUSED, {age:.0f} s old", "held")]
        if self.state.is_old or self.state.news.silence:
            return [(f"! {age:.0f} s old", "gone")]
        return [(f"● {age_text}", "good" if age < 1 + self.state.every else "dim")]

    # ------------------------------------------------------------ keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the key that goes back on the first screen."""
        return not (action == "back" and not self.can_go_back)

    @property
    def can_go_back(self) -> bool:
        """Whether escape does something."""
        filters = isinstance(self.focused, LiveTable) and bool(self.focused.filter_text)
        return filters or bool(self.place()) or self.input_line.has_class("-on")

    def action_back(self) -> None:
        """Close the input or the filter, or go back to the previous screen."""
        field = self.input_line
        if field.has_class("-on"):
            if self._filtered is not None:
                self._filtered.set_filter("")
            self._close_input()
        elif isinstance(self.focused, LiveTable) and self.focused.filter_text:
            self.focused.set_filter("")
            self.fit_tables()
        elif len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    @on(LiveTable.FilterWanted)
    def open_filter(self, event: LiveTable.FilterWanted) -> None:
        """Let the user write what the rows have to contain."""
        self._filtered = event.table
        self.open_input("only rows that contain ...", event.table.filter_text, None)

    def open_input(self, hint: str, value: str, submit: Callable[[str], None] | None) -> None:
        """Open the line for input. `submit` gets what was written; None if it is a filter."""
        field = self.input_line
        self._submit = submit
        field.placeholder = hint
        field.add_class("-on")
        field.value = value
        field.cursor_position = len(value)
        field.can_focus = True
        self.set_focus(field)

    def _close_input(self) -> None:
        field, table = self.input_line, self._filtered
        field.remove_class("-on")
        field.can_focus = False
        self._filtered, self._submit = None, None
        if table is not None:
            self.set_focus(table)
        else:
            self.focus_first()
        self.fit_tables()

    def tables(self) -> Sequence[LiveTable[Any]]:
        """Return the tables of the screen."""
        return list(self.query(LiveTable))

    @on(Input.Changed)
    def apply_filter(self, event: Input.Changed) -> None:
        """Filter while the user writes."""
        if self._filtered is not None and self._submit is None:
            self._filtered.set_filter(event.value)

    @on(Input.Submitted)
    def finish_input(self, event: Input.Submitted) -> None:
        """Keep the filter, or use what was written."""
        submit = self._submit
        self._close_input()
        if submit is not None and event.value.strip():
            submit(event.value)
