"""The contents of the cells of `tq top`: numbers, shares, bars and strips as pieces of text with a role.

A role is the name of a style, which the theme decides. No text is markup, so a name of a user is always shown as text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from transfer_queue.display import printable_name
from transfer_queue.timeline.spans import STATE_NAMES, SpanState

Piece = tuple[str, str]
"""A text and its role: "" for normal text, "dim", "strong", or the name of a state."""
Cell = Sequence[Piece]

SHAPES = {
    "slowest": "▲", "waits": "◌", "held": "‖", "works": "●", "idle": "○", "gone": "×", "ended": "·", "early": "›",
    "starting": "○", "flowing": "●", "slow": "▲", "stopped": "■", "": " ",
}  # fmt: skip
"""The shape of each state, so that users do not need to see its color."""
FILLS = {SpanState.WORKS: "█", SpanState.HELD: "▒", SpanState.WAITS: "░", SpanState.IDLE: "·", SpanState.GONE: "×"}
"""How a strip shows each state of a rank."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_HEIGHTS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class BarPart:
    """A part of a bar."""

    share: float
    """Its share of the whole bar, from 0 to 1."""
    fill: str
    """The character that fills it."""
    role: str
    """Its role."""


def safe_text(text: str) -> str:
    """Return a text without control characters, which could move the cursor; line feeds stay."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def name_text(name: str) -> str:
    """Return a name as it is shown: printable, and "(none)" if it is empty."""
    return printable_name(name) if name else "(none)"


def task_text(name: str) -> str:
    """Return the name of a task; "(no task)" for clients that have none."""
    return printable_name(name) if name else "(no task)"


def state_piece(state: str) -> Piece:
    """Return the shape of a state."""
    return SHAPES.get(state, " "), state


def count(number: float) -> str:
    """Return a number of rows in at most 7 characters, as `1,048`, `123,456` and `12.3M`."""
    if number < 999_999.5:
        return f"{number:,.0f}"
    power = min(int(math.log10(number) / 3), 5)
    return f"{number / 1000**power:.1f}{' kMGTP'[power]}"


def rate(rows: float) -> str:
    """Return a rate in at most 7 characters, "0" for nothing."""
    if rows <= 0:
        return "0"
    if rows >= 99.95:
        return count(rows)
    return f"{rows:.1f}" if rows >= 0.095 else f"{rows:.2g}" if rows >= 0.001 else "<0.001"


def percent(share: float) -> str:
    """Return a share as `63 %`."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Return a duration in at most 8 characters, as `12.3 s`, `4 min` and `2 h 5 m`."""
    if not math.isfinite(seconds):
        return ""
    if seconds <= 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 5970:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(int(seconds / 60 + 0.5), 60)
    return f"{hours} h {minutes} m" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def bar(share: float, width: int, role: str) -> Cell:
    """Return a bar of a share from 0 to 1, in eighths of a character."""
    share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    eighths = round(share * width * 8)
    if share > 0 and width > 0:
        eighths = max(eighths, 1)  # a share above zero is visible
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[rest] if rest else "")
    return [(filled, role), ("·" * (width - len(filled)), "faint")]


def stacked_bar(parts: Sequence[BarPart], width: int) -> Cell:
    """Return a bar of several parts, each with a fill of its own. What is left of the width is empty."""
    pieces, done, begin = [], 0.0, 0
    for part in parts:
        done += min(max(part.share, 0.0), 1.0) if math.isfinite(part.share) else 0.0
        end = min(round(done * width), width)
        pieces.append((part.fill * (end - begin), part.role))
        begin = max(end, begin)
    pieces.append((" " * (width - begin), ""))
    return pieces


def sparkline(values: Sequence[float], width: int, role: str) -> Cell:
    """Return the newest values as columns of eight heights. Zero has no column."""
    shown = values[-width:] if width > 0 else ()
    largest = max(shown, default=0.0)
    text = "".join("▁" if value <= 0 else _HEIGHTS[min(int(8 * value / largest), 7)] for value in shown)
    marks: list[Piece] = []
    for value, mark in zip(shown, text):
        each = role if value > 0 else "faint"
        if marks and marks[-1][1] == each:
            marks[-1] = marks[-1][0] + mark, each
        else:
            marks.append((mark, each))
    return [(" " * (width - len(shown)), ""), *marks]


def strip(spans: tuple[np.ndarray, np.ndarray, np.ndarray], start: float, end: float, width: int) -> Cell:
    """Return what a rank did over time, one character for each part of the window: the state of its largest share."""
    if width <= 0 or not end > start:
        return []
    edges = np.linspace(start, end, width + 1)
    share = np.zeros((len(SpanState), width))
    begins, ends, states = spans
    for state in FILLS:
        is_in_state = states == state
        if is_in_state.any():
            # The seconds of the state before each edge: spans do not overlap.
            lengths = np.clip(edges[:, None] - begins[is_in_state], 0.0, (ends[is_in_state] - begins[is_in_state]))
            share[state] = np.diff(lengths.sum(axis=1))
    best = np.where(share.sum(axis=0) > 1e-9, share.argmax(axis=0), SpanState.UNKNOWN)
    pieces: list[Piece] = []
    changes = np.flatnonzero(np.diff(best)) + 1
    for first, last in zip([0, *changes.tolist()], [*changes.tolist(), width]):
        state = SpanState(int(best[first]))
        pieces.append((FILLS.get(state, " ") * (last - first), STATE_NAMES.get(state, "")))
    return pieces


def text_of(cell: Cell) -> Text:
    """Return pieces as text, whose styles are the roles. Nothing in it is markup."""
    return Text.assemble(*((safe_text(text), role) for text, role in cell))


def fitted(cell: Cell, width: int, right: bool = False) -> Text:
    """Return a cell as text with exactly this width. The end of a longer one is replaced by an ellipsis."""
    text = text_of(cell)
    text.truncate(width, overflow="ellipsis")
    text.align("right" if right else "left", width)
    return text
