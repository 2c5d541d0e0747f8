"""Styles, widths and times for what commands print, and JSON. Colors only on a terminal, never if NO_COLOR is set."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.config import environment

if TYPE_CHECKING:
    from transfer_queue.node.system.launcher import RunningSystem


WIDTH_OF_FILES = 160
"""The width of lines that do not go to a terminal."""
MIN_WIDTH = 40

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_SENTENCES = re.compile(r"(?<=\.) (?=Sample |[\d,]+ samples? |New samples |Dropped so far|The partition is sealed)")
_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))  # a unit, and the next smaller one


class Styles:
    """Adds colors to text, or leaves it unchanged.

    Args:
        colored: Whether to add colors. Default: if standard output is a terminal, and NO_COLOR is not set.
    """

    def __init__(self, colored: bool | None = None) -> None:
        self._colored = _has_colors() if colored is None else colored

    def __call__(self, text: str, *names: str) -> str:
        """Return a text in these styles: "bold", "dim", "red", "green", "yellow", "blue", "cyan"."""
        if not self._colored or not names or not text:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"


def _has_colors() -> bool:
    return sys.stdout.isatty() and environment.no_color() is None and environment.terminal() != "dumb"


def width_of_output() -> int:
    """Return the number of columns of standard output."""
    if not sys.stdout.isatty():
        return WIDTH_OF_FILES
    return max(MIN_WIDTH, shutil.get_terminal_size().columns)


def duration_text(seconds: float, units: int = 2) -> str:
    """Return a duration with its one or two largest units, as `12 s`, `3 min 5 s` and `2 d 4 h`."""
    left = max(0, round(seconds))
    if left < 1:
        return f"{max(seconds, 0.0) * 1000:.0f} ms" if seconds > 0.0005 else "0 s"
    for size, unit, below, smaller in _UNITS:
        if left >= size:
            rest = left % size // below
            return f"{left // size} {unit}" + (f" {rest} {smaller}" if rest and units > 1 else "")
    return f"{left} s"


def clock_text(when: float, now: float) -> str:
    """Return the local time of day with milliseconds, and the date if it is not today's."""
    local_time = time.localtime(when)
    text = f"{time.strftime('%H:%M:%S', local_time)}.{int(when % 1 * 1000):03d}"
    same = time.strftime("%Y-%m-%d", local_time) == time.strftime("%Y-%m-%d", time.localtime(now))
    return text if same else f"{time.strftime('%Y-%m-%d', local_time)} {text}"


def columns_text(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset(), indent: str = "  ") -> list[str]:
    """Return lines with aligned columns.

    Args:
        rows: The cells of each line, printable.
        right: The columns that are aligned to the right.
        indent: What each line begins with.
    """
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout.isatty()


def wrap(text: str, width: int | None, indent: str = "") -> list[str]:
    """Return the lines of a text, wrapped at `width`. The second line of a paragraph and those after it are indented.

    Args:
        text: The text. Its line feeds stay.
        width: The number of columns; None leaves each paragraph on one line, for pipes and files.
        indent: What each line but the first of a paragraph begins with, besides the paragraph's own indentation.
    """
    lines: list[str] = []
    for paragraph in text.splitlines():
        own = paragraph[: len(paragraph) - len(paragraph.lstrip(" "))]
        if width is None:
            lines.append(paragraph)
            continue
        lines += textwrap.wrap(
            paragraph, width, subsequent_indent=own + indent, break_on_hyphens=False, break_long_words=False
        ) or [""]
    return lines


def sentence_lines(text: str) -> str:
    """Return an explanation with a line for each clause and sample."""
    text = text.replace("; it ", ";\n  it ").replace("Nearest to ready: sample ", "Nearest to ready:\nSample ", 1)
    return _SENTENCES.sub("\n", text)


def table_lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    style: Styles,
    right: frozenset[int] = frozenset(),
) -> list[list[str]]:
    """Return a table as the lines of each row, first those of the headings. Columns without a cell are left out.

    The last column is wrapped below its heading if the table is wider than `width`.
    """
    used = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    cells = [[row[column] for column in used] for row in (headings, *rows)]
    aligned = frozenset(at for at, column in enumerate(used) if column in right)
    lines = columns_text(cells, aligned)
    if not lines or width is None or max(map(len, lines)) <= width or len(used) < 2 or len(used) - 1 in aligned:
        return [[style(lines[0], "dim")], *([line] for line in lines[1:])] if lines else []
    begin = columns_text([row[:-1] for row in cells], aligned)
    start = max(map(len, begin)) + 2
    padded_lines = []
    for head, row in zip(begin, cells):
        parts = textwrap.wrap(row[-1], max(width - start, 12), break_on_hyphens=False) or [""]
        padded = [f"{head if at == 0 else '':<{start}}{part}".rstrip() for at, part in enumerate(parts)]
        padded_lines.append(padded)
    return [[style(line, "dim") for line in padded_lines[0]], *padded_lines[1:]]


def cut(line: str, width: int) -> str:
    """Return a line with at most `width` characters; the end of a longer one is replaced by an ellipsis."""
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


# ---------------------------------------------------------------- JSON
# The option `--json`: one JSON document on standard output, with the attributes of the messages by name.


def add_json(command: argparse.ArgumentParser, summary: str = "print one JSON document") -> None:
    """Add the option `--json`."""
    command.add_argument("--json", action="store_true", help=summary)


def plain(value: Any) -> Any:
    """Return a message as JSON values. A number that JSON does not have (NaN) becomes null."""
    if isinstance(value, msgspec.Struct):  # on the wire it is an array: names make it readable
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def system_as_json(system: RunningSystem) -> dict[str, Any]:
    """Return what identifies a running system."""
    facts = system.description
    return {
        "name": system.name, "folder": str(system.folder), "logs": str(system.logs), "pid": facts.pid,
        "starter_pid": facts.starter_pid, "starter_command": facts.starter_command, "started_at": facts.started_at,
    }  # fmt: skip


def print_json(value: Any) -> None:
    """Print one JSON document on one line. An object that is not a JSON value is printed as its `repr`."""
    print(json.dumps(plain(value), default=repr))
