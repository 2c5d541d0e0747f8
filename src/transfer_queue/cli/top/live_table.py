"""A table whose rows are replaced at each refresh: it draws only the lines that are visible, and keeps the cursor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from transfer_queue.cli.top.cells import Cell, Piece, fitted, text_of

R = TypeVar("R")
HEAD = 2  # lines above the rows: the title and the names of the columns
SPACE = 1  # between two columns


@dataclass(frozen=True)
class TableColumn(Generic[R]):
    """A column of a table."""

    title: str
    """Its name."""
    cell: Callable[[R, int], Cell]
    """Returns the cell of a row for a width."""
    width: int
    """The width that it has at least."""
    most: int = 0
    """The width that it has at most, if there is space; 0 for `width`."""
    rank: int = 0
    """Columns with the largest rank are left out first if the table is too narrow; 0 is never left out."""
    right: bool = False
    """True if its cells are aligned at the right."""
    sort: Callable[[R], Any] | None = None
    """Returns the value by which rows are sorted; None if they cannot be."""
    descending: bool = False
    """True if the largest value comes first."""
    fits: bool = False
    """True if it is as wide as its longest cell, up to `most`."""


@dataclass(frozen=True)
class TableDesign(Generic[R]):
    """What a table shows of its rows."""

    title: str
    """Its title."""
    columns: Sequence[TableColumn[R]]
    """Its columns."""
    key: Callable[[R], Hashable]
    """Identifies a row, so that the cursor stays on it."""
    text: Callable[[R], str]
    """The text in which the filter searches."""
    empty: str
    """The text of an empty table."""


class LiveTable(ScrollView, Generic[R], can_focus=True):
    """A table with a cursor, a filter and an order.

    Args:
        design: Its columns.
        number: The key that jumps to it; "" for none.
        id: Its identifier.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "move(-1000000000)", "First", show=False),
        Binding("end", "move(1000000000)", "Last", show=False),
        Binding("enter", "open", "Open", key_display="enter"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("S", "reverse", "Reverse", show=False),
    ]

    class TableMessage(Message):
        """A message about a table."""

        def __init__(self, table: LiveTable[Any]) -> None:
            super().__init__()
            self.table = table
            """The table."""

    class Opened(TableMessage):
        """Enter was pressed on a row, or a row was clicked twice."""

        def __init__(self, table: LiveTable[Any], row: Any) -> None:
            super().__init__(table)
            self.row = row
            """The row."""

    class FilterWanted(TableMessage):
        """The filter of a table is to be changed."""

    class EndReached(TableMessage):
        """The cursor is on the last row."""

    cursor: reactive[int] = reactive(0, repaint=True)

    def __init__(self, design: TableDesign[R], number: str = "", id: str | None = None) -> None:
        super().__init__(id=id)
        self.design = design
        """Its columns."""
        self.number = number
        """The key that jumps to it."""
        self.aside: Cell = ()
        """What the title says at its right end in addition."""
        self.note = ""
        """What the title says in addition."""
        self.filter_text = ""
        """The filter: only rows whose text contains it are shown."""
        self.sorted_by = -1
        """The position of the column by which the rows are sorted; -1 for the order in which they come."""
        self.reversed = False
        """True if the order is the opposite of the column's usual one."""
        self.known = False
        """Whether `set_rows` was called, even with no rows."""
        self.rows: Sequence[R] = ()
        """All rows."""
        self.shown: list[R] = []
        """The rows that match the filter, in their order."""
        self._columns_shown: list[tuple[TableColumn[R], int]] = []
        self._widest: dict[int, int] = {}

    # ------------------------------------------------------------ rows

    def set_rows(self, rows: Sequence[R], note: str = "") -> None:
        """Replace the rows. The cursor stays on the row that has the same key."""
        self.rows, self.note, self.known = rows, note, True
        self._rearrange()

    def set_filter(self, text: str) -> None:
        """Show only rows whose text contains this."""
        self.filter_text = text
        self._rearrange()

    def _rearrange(self) -> None:
        current = self.row
        key = self.design.key(current) if current is not None else None
        shown = list(self.rows)
        if self.filter_text:
            text = self.filter_text.casefold()
            shown = [row for row in shown if text in self.design.text(row).casefold()]
        if self.sorted_by >= 0:
            column = self.design.columns[self.sorted_by]
            assert column.sort is not None
            shown.sort(key=column.sort, reverse=column.descending != self.reversed)
        self.shown = shown
        at = min(self.cursor, max(len(shown) - 1, 0))
        if key is not None and not (shown and self.design.key(shown[at]) == key):
            at = next((number for number, row in enumerate(shown) if self.design.key(row) == key), at)
        self._fit_columns()
        self.cursor = at
        self.refresh()

    @property
    def row(self) -> R | None:
        """The row at the cursor; None if the table is empty."""
        return self.shown[self.cursor] if self.cursor < len(self.shown) else None

    @property
    def lines_wanted(self) -> int:
        """The number of lines with which everything is visible."""
        return HEAD + max(len(self.shown), 1)

    # ------------------------------------------------------------ keys

    def action_move(self, rows: int) -> None:
        """Move the cursor."""
        last = max(len(self.shown) - 1, 0)
        self.cursor = min(max(self.cursor + rows, 0), last)
        self._follow_cursor()
        if rows > 0 and self.cursor == last:
            self.post_message(self.EndReached(self))

    def action_page(self, pages: int) -> None:
        """Move the cursor by what is visible."""
        self.action_move(pages * max(self.size.height - HEAD, 1))

    def action_open(self) -> None:
        """Open the row at the cursor."""
        if self.row is not None:
            self.post_message(self.Opened(self, self.row))

    def action_filter(self) -> None:
        """Ask for the filter."""
        self.post_message(self.FilterWanted(self))

    def action_sort(self) -> None:
        """Sort by the next column that is visible, and after the last one by none."""
        visible = [self.design.columns.index(column) for column, _ in self._columns_shown if column.sort is not None]
        later = [at for at in visible if at > self.sorted_by]
        self.sorted_by, self.reversed = (later[0] if later else -1), False
        self._rearrange()
        self._follow_cursor()

    def action_reverse(self) -> None:
        """Sort in the opposite order."""
        if self.sorted_by >= 0:
            self.reversed = not self.reversed
            self._rearrange()
            self._follow_cursor()

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the row, and open it with the second click."""
        at = event.y - HEAD + self.scroll_offset.y
        if event.y >= HEAD and 0 <= at < len(self.shown):
            self.cursor = at
            if event.chain == 2:
                self.action_open()

    def _follow_cursor(self) -> None:
        height = max(self.size.height - HEAD, 1)
        top = self.scroll_offset.y
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)

    # ------------------------------------------------------------ drawing

    def on_resize(self) -> None:
        """Choose the columns for the new width."""
        self._fit_columns()
        self._follow_cursor()

    def _fit_columns(self) -> None:
        """Choose the columns that fit, and their widths."""
        width = self.size.width - 2
        self.virtual_size = Size(self.size.width, HEAD + len(self.shown))
        columns = list(self.design.columns)
        least = {at: self._least_width(at, column) for at, column in enumerate(columns)}
        kept = list(range(len(columns)))
        while sum(least[at] + SPACE for at in kept) - SPACE > width and any(columns[at].rank for at in kept):
            kept.remove(max(kept, key=lambda at: (columns[at].rank, at)))
        space = width - sum(least[at] + SPACE for at in kept) + SPACE
        # What is left over widens the columns that can use it, each by its part.
        growing = {at: max(columns[at].most - least[at], 0) if not columns[at].fits else 0 for at in kept}
        wanted = sum(growing.values())
        widths = dict(least)
        if space > 0 and wanted:
            for at in kept:
                widths[at] += min(growing[at], space * growing[at] // wanted)
        elif space < 0:
            widest = max(kept, key=lambda at: widths[at])
            widths[widest] = max(widths[widest] + space, 4)
        self._columns_shown = [(columns[at], widths[at]) for at in kept]

    def _least_width(self, at: int, column: TableColumn[R]) -> int:
        if not column.fits:
            return max(column.width, cell_len(column.title))
        widest = max((cell_len("".join(text for text, _ in column.cell(row, 0))) for row in self.rows[:200]), default=0)
        # It never becomes narrower, so that the columns do not jump at each refresh.
        self._widest[at] = min(max(widest, self._widest.get(at, 0), column.width, cell_len(column.title)), column.most)
        return self._widest[at]

    def render_line(self, y: int) -> Strip:
        """Return one visible line."""
        if y == 0:
            return self._strip(self._title(), "title focused" if self.has_focus else "title")
        if y == 1:
            return self._strip(self._head() if self.shown else text_of([(f"  {self._nothing()}", "dim")]))
        at = y - HEAD + self.scroll_offset.y
        if at >= len(self.shown):
            return self._strip(Text())
        row, shown = self.shown[at], self._columns_shown
        cells = (fitted(column.cell(row, width), width, column.right) for column, width in shown)
        return self._strip(_joined(cells), "cursor" if at == self.cursor and self.has_focus else "")

    def _title(self) -> Text:
        jump = [(f"{self.number} ", "key")] if self.number else []
        title: list[Piece] = [(" ", ""), *jump, (self.design.title, "strong")]
        if self.filter_text:
            title.append((f"  {len(self.shown):,} of {len(self.rows):,} contain {self.filter_text!r}", "waits"))
        elif self.rows:
            title.append((f"  {len(self.rows):,}", "dim"))
        if self.note:
            title.append((f"  {self.note}", "dim"))
        visible = max(self.size.height - HEAD, 1)
        right: list[Piece] = []
        if len(self.shown) > visible:
            top = self.scroll_offset.y
            right = [(f"{top + 1:,}-{min(top + visible, len(self.shown)):,} of {len(self.shown):,} ", "dim")]
        right += self.aside
        space = self.size.width - sum(cell_len(text) for text, _ in right)
        if not right or space <= 12:
            return text_of(title)
        return Text.assemble(fitted(title, max(space, 0)), text_of(right))

    def _nothing(self) -> str:
        if not self.known:
            return "..."
        return f"No row contains {self.filter_text!r}." if self.filter_text and self.rows else self.design.empty

    def _head(self) -> Text:
        titles = []
        for column, width in self._columns_shown:
            mark = ""
            if self.sorted_by >= 0 and self.design.columns[self.sorted_by] is column:
                mark = "▼" if column.descending != self.reversed else "▲"
            title = column.title[: width - 1] if mark else column.title
            titles.append(fitted([(title + mark, "strong" if mark else "head")], width, column.right))
        return _joined(titles)

    def _strip(self, line: Text, role: str = "") -> Strip:
        """Return a line with the width of the table."""
        console = self.app.console
        base = self.rich_style + console.get_style(role) if role else self.rich_style
        segments = Segment.apply_style(line.render(console), base)
        return Strip(segments).adjust_cell_length(self.size.width, base)


def _joined(cells: Iterable[Text]) -> Text:
    """Return the cells of a line, one beside the other."""
    return Text.assemble(" ", Text(" " * SPACE).join(cells))
