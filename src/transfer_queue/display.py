"""Formats names, values, sizes and tables for people: as text, and as HTML for notebooks.

The HTML has no scripts, no classes and no references to other files. It inherits the colors and fonts of the notebook,
and every text in it is escaped and shortened.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Union

MAX_CHARACTERS = 60
"""The length of a name or value in a table."""
MAX_CHARACTERS_OF_TEXT = 160
"""The length of a text in a table."""
MAX_ROWS = 12
"""The rows of a table, unless the caller allows more."""
MAX_NAMES_LISTED = 4
"""The names that a `repr` lists."""
MAX_RANGES = 4
"""The ranges of integers that a text lists."""
MAX_WORKERS = 4
"""The ranks that a text names."""
CLIENT_CHARACTERS = 8
"""The characters of a client id that are shown."""

_GREY = "rgba(128,128,128,.35)"
_BOX = f"display:inline-block;max-width:100%;overflow-x:auto;padding:.4em .8em .6em;border:1px solid {_GREY};"
_TABLE = "border-collapse:collapse;border:none;margin:.5em 0 0;font-size:inherit;color:inherit;background:none"
_CELL = "padding:.15em .9em .15em 0;border:none;vertical-align:baseline;color:inherit;background:none"
_BAR = "display:inline-block;width:4em;height:.55em;margin-left:.6em;border-radius:.25em"


def printable_name(name: str) -> str:
    """Return a name in a form that is safe to print, because control characters could move the cursor."""
    return name if name.isprintable() else repr(name)


def short_text(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return a text with at most `most` characters. The middle of a longer one is replaced by an ellipsis."""
    if len(text) <= most:
        return text
    end = (most - 1) // 3
    return f"{text[: most - 1 - end]}…{text[len(text) - end :]}"


def short_name(name: object, most: int = MAX_CHARACTERS) -> str:
    """Return a printable, short form of a name; of the `repr` if it is not a str."""
    if not isinstance(name, str):
        return short_repr(name, most)
    return short_text(printable_name(short_text(name, 2 * most)), most)


class _ShortRepr(reprlib.Repr):
    """A `repr` that reads only the first entries of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 6
        self.maxstring = self.maxother = self.maxlong = MAX_CHARACTERS


_short_repr = _ShortRepr()


def short_repr(value: object, most: int = MAX_CHARACTERS) -> str:
    """Return the `repr` of any value, shortened. If the value's own `repr` fails, returns the name of its class."""
    try:
        return short_text(" ".join(printable_name(line.strip()) for line in _short_repr.repr(value).split("\n")), most)
    except Exception:  # a user's __repr__ may raise anything
        return f"<{short_text(type(value).__name__, most)}>"


def listed(names: Iterable[object], most: int = MAX_NAMES_LISTED, characters: int = 24) -> str:
    """Return names as a list in a `repr`, with the number of those that are left out."""
    every = list(names)
    shown = [
        repr(short_text(name, characters)) if isinstance(name, str) else short_repr(name, characters)
        for name in every[:most]
    ]
    left = len(every) - len(shown)
    return f"[{', '.join(shown + ([f'... {left:,} more'] if left else []))}]"


def listed_names(names: Iterable[object], most: int = MAX_ROWS, characters: int = 24) -> str:
    """Return names separated by commas, with the number of those that are left out; "none" if the list is empty."""
    every = list(names)
    left = len(every) - most
    shown = [short_name(name, characters) for name in every[:most]]
    return ", ".join(shown + ([f"… {left:,} more"] if left > 0 else [])) or "none"


def size_text(nbytes: float) -> str:
    """Return a number of bytes with a unit, as `3.0 MiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    power = next((power for power in (1, 2, 3) if nbytes < 1023.95 * 1024**power), 4)
    return f"{nbytes / 1024**power:,.1f} {' KMGT'[power]}iB"


def count_text(count: int, noun: str) -> str:
    """Return a number with a noun, as `1 sample` and `2 samples`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def worker_text(
    task: str = "", rank: int = -1, pid: int = 0, host: str = "", client: str = "", most: int = MAX_CHARACTERS
) -> str:
    """Return who did something, as `train rank 0, pid 123, node-7`. This is the label of a rank everywhere.

    A text that would be too long first loses the host, then the process.

    Args:
        task: The task; "" if it is not known.
        rank: The rank in the task; -1 if it is not known.
        pid: The process id; 0 if it is not known.
        host: The host of the process; "" if it is not known.
        client: The client id. Its beginning is shown only if the process is not known.
        most: The maximum number of characters.
    """
    name = " ".join(filter(None, [printable_name(task), f"rank {rank}" if rank >= 0 else ""]))
    if pid:
        process = [f"pid {pid}", *filter(None, [printable_name(host)])]
    else:
        process = [f"client {printable_name(client)[:CLIENT_CHARACTERS]}"] if client and rank < 0 else []
    if not name and not process:
        return "the controller"
    parts = [name, *process] if name else process
    while len(parts) > 1 and len(", ".join(parts)) > most:
        parts.pop()
    return short_text(", ".join(parts), most)


def list_workers(labels: Iterable[str]) -> str:
    """Return the labels of several ranks, separated by semicolons, with the number of those that are left out."""
    names = list(dict.fromkeys(labels))
    more = f"; and {len(names) - MAX_WORKERS:,} more" if len(names) > MAX_WORKERS else ""
    return "; ".join(names[:MAX_WORKERS]) + more


def ranges_text(numbers: Iterable[int], most: int = MAX_RANGES) -> str:
    """Return integers as ascending ranges, as `0-7, 12, 1,024-2,047`, with the number of those that are left out."""
    ordered = sorted(set(numbers))
    starts = [at for at, number in enumerate(ordered) if at == 0 or number != ordered[at - 1] + 1]
    runs = [(ordered[start], ordered[end - 1]) for start, end in zip(starts, [*starts[1:], len(ordered)])]
    shown = [f"{first:,}" if first == last else f"{first:,}-{last:,}" for first, last in runs[:most]]
    left = sum(last - first + 1 for first, last in runs[most:])
    return ", ".join(shown + ([f"… {left:,} more"] if left else []))


def time_of_day(when: float) -> str:
    """Return a time in Unix seconds as the local time of day, as `03:11:26`."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(when))
    except (OverflowError, OSError, ValueError):
        return "an unknown time"


@dataclass(frozen=True)
class ProgressCell:
    """A cell that shows how many of all are done, as numbers with a bar."""

    done: int
    total: int


@dataclass(frozen=True)
class SizeCell:
    """A cell that shows a number of bytes with a unit."""

    nbytes: int


@dataclass(frozen=True)
class GroupHeading:
    """A row that spans the table: the name of what the rows below it belong to, and a description."""

    name: str
    text: str = ""


Cell = Union[str, int, float, ProgressCell, SizeCell, None]
Row = Union[GroupHeading, Sequence[Cell]]


@dataclass(frozen=True)
class HtmlTable:
    """A table. It shows as many rows as it has, and says how many more there are."""

    columns: Sequence[str]
    """The headers of the columns."""
    rows: Sequence[Row]
    """The rows to show."""
    left: str = ""
    """What the table does not show, as "988 more samples"; "" if it shows everything."""

    def html(self) -> str:
        """Return the table as HTML."""
        numbers = {
            column
            for row in self.rows
            if not isinstance(row, GroupHeading)
            for column, cell in enumerate(row)
            if isinstance(cell, (int, float, ProgressCell, SizeCell))
        }
        head = "".join(
            f'<th scope="col" style="{_CELL};{_alignment(column in numbers)};font-weight:600;opacity:.75">'
            f"{_escaped(title)}</th>"
            for column, title in enumerate(self.columns)
        )
        lines = [
            f'<tr style="background:none;border-bottom:1px solid {_GREY}">{head}</tr>' if any(self.columns) else ""
        ]
        lines += [self._row(row, numbers) for row in self.rows]
        if self.left:
            lines.append(_spanning(len(self.columns), f'<span style="opacity:.75">… {_escaped(self.left)}</span>'))
        return f'<table style="{_TABLE}">{"".join(lines)}</table>'

    def _row(self, row: Row, numbers: set[int]) -> str:
        if isinstance(row, GroupHeading):
            text = f' <span style="opacity:.75">{_escaped(row.text, 300)}</span>' if row.text else ""
            return _spanning(len(self.columns), f"<b>{_escaped(row.name)}</b>{text}", ";padding-top:.6em")
        cells = "".join(
            f'<td style="{_CELL};{_alignment(column in numbers)}">{_cell(cell)}</td>' for column, cell in enumerate(row)
        )
        return f'<tr style="background:none">{cells}</tr>'


def table_of(columns: Sequence[str], rows: Iterable[Row], total: int, noun: str, most: int = MAX_ROWS) -> HtmlTable:
    """Return a table of the first rows.

    Args:
        columns: The headers.
        rows: The rows. Only the first `most` are read.
        total: The number of all rows.
        noun: What a row is, as "sample".
        most: The maximum number of rows that are shown.
    """
    shown = [row for _, row in zip(range(most), rows)]
    left = total - len(shown)
    return HtmlTable(columns, shown, f"{left:,} more {noun}{'' if left == 1 else 's'}" if left > 0 else "")


@dataclass
class HtmlPage:
    """What an object shows in a notebook: a title with a summary, notes, alarms and tables."""

    title: str
    """The name of the class."""
    summary: str = ""
    """The most important facts, in one line."""
    alarms: list[str] = field(default_factory=list)
    """What needs attention."""
    notes: list[str] = field(default_factory=list)
    """Other facts, one on each line."""
    tables: list[HtmlTable] = field(default_factory=list)
    """The tables. Those without rows are left out."""
    lead: str = ""
    """A sentence below the title, before everything else."""

    def html(self) -> str:
        """Return the page as HTML."""
        summary = f' <span style="opacity:.8">{_escaped(self.summary, 400)}</span>' if self.summary else ""
        parts = [f"<div><b>{_escaped(self.title)}</b>{summary}</div>"]
        parts += [f'<div style="margin-top:.3em">{_escaped(self.lead, 600)}</div>'] if self.lead else []
        parts += [
            f'<div role="alert" style="border-left:.3em solid #e5534b;padding-left:.6em;margin-top:.4em;'
            f'font-weight:600">{_escaped(alarm, 600)}</div>'
            for alarm in self.alarms
        ]
        parts += [f'<div style="opacity:.8;margin-top:.2em">{_escaped(note, 400)}</div>' for note in self.notes]
        parts += [table.html() for table in self.tables if table.rows or table.left]
        return f'<div style="{_BOX}border-radius:.4em;line-height:1.5;text-align:left">{"".join(parts)}</div>'


def _alignment(is_number: bool) -> str:
    return "text-align:right;font-variant-numeric:tabular-nums" if is_number else "text-align:left"


def _spanning(columns: int, content: str, more: str = "") -> str:
    return (
        f'<tr style="background:none"><td colspan="{columns}" style="{_CELL};text-align:left{more}">{content}</td></tr>'
    )


def _escaped(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return text as HTML: printable, shortened, then escaped."""
    return escape(short_name(text, most))


def _cell(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, ProgressCell):
        percent = 100 * min(cell.done, cell.total) / cell.total if cell.total else 0
        fill = f"linear-gradient(90deg,#4c8bf5 {percent:.0f}%,{_GREY} {percent:.0f}%)"
        return f'{cell.done:,} / {cell.total:,}<span style="{_BAR};background:{fill}"></span>'
    if isinstance(cell, SizeCell):
        return size_text(cell.nbytes)
    return _escaped(str(cell), MAX_CHARACTERS_OF_TEXT)
