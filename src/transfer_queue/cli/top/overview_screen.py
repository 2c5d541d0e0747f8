"""The first screen of `tq top`: stages, waiting ranks, partitions, memory, and the load of the controller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from textual import events, on
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.widget import Widget

from transfer_queue.cli.top.cells import Cell, Piece, duration
from transfer_queue.cli.top.designs import LOAD, MEMORY, PARTITIONS, STAGES, WAITS
from transfer_queue.cli.top.detail_screens import PartitionScreen, TaskScreen, WaitScreen
from transfer_queue.cli.top.follower import LiveState
from transfer_queue.cli.top.live_table import LiveTable
from transfer_queue.cli.top.picture import Picture
from transfer_queue.cli.top.rows import PartitionRow, StageRow, WaitRow
from transfer_queue.cli.top.top_screen import TopScreen
from transfer_queue.display import printable_name

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
        height, wide = self.size.height, self.size.width >= WIDE
        if not self.is_mounted or not height:
            return
        low = self.is_low
        self.set_class(wide and not low, "-wide")
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
        left = height - HEAD_LINES - self.stages.lines_wanted - (max(upper, lower) if wide else upper + lower)
        bottom.styles.height = "1fr" if low else min(wanted, max(height // 4, left, 6))
        both = height >= LOWEST and not (wide and not low)
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
