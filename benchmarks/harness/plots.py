"""The figure of docs/performance.md, as an SVG: how many times as long other systems take, on a logarithmic axis.

It takes the colors of the page in the documentation site (`--tq-...` in docs/assets/site.css), and has light ones
elsewhere. It is narrow, so that it can be read on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT = 520, 24, 66
TOP, ROW, BOTTOM = 118, 56, 16
COLORS = {"text": "#1f2933", "muted": "#52606d", "panel": "#ffffff", "border": "#cbd2d9", "blue-line": "#3b82c4",
          "amber-line": "#c98a1b", "purple-line": "#8157c2", "green-line": "#2f9556"}  # fmt: skip
MARKS = ("amber-line", "green-line", "purple-line")
"""The colors of the systems, in the order of the legend."""
CHARACTER = 9  # about the width of one, so that labels do not overlap

Factors = Mapping[str, float]
"""System -> how many times as long as ours it takes."""


def comparison(title: str, rows: Sequence[tuple[str, Factors]], systems: Sequence[str]) -> str:
    """Return a figure with a line for each row, on which each system has a mark."""
    values = [1.0, *(factor for _, factors in rows for factor in factors.values())]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    height = TOP + ROW * len(rows) + BOTTOM

    def x(factor: float) -> float:
        return LEFT + (math.log10(factor) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    words = "; ".join(
        f"{label}: {', '.join(f'{name} {times(factor)}' for name, factor in factors.items())}"
        for label, factors in rows
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="peers-title peers-desc" font-family="Helvetica, Arial, sans-serif" font-size="16" '
        f'style="min-width:0;max-width:640px;{_fill("text")}">',
        f'<title id="peers-title">{escape(title)}</title>',
        f'<desc id="peers-desc">{escape(words)}</desc>',
        f'<rect class="background" width="{WIDTH}" height="{height}" rx="12" style="{_fill("panel")}"/>',
        _text(LEFT, 28, title, "text", bold=True),
    ]
    at = float(LEFT)
    for system, color in zip(systems, MARKS):
        parts += [_mark(at + 7, 50, color), _text(at + 20, 56, system, "text")]
        at += 40 + 8.2 * len(system)
    for power in range(low, high + 1):
        parts.append(_line(x(10.0**power), TOP - 14, x(10.0**power), height - BOTTOM, "border"))
        if power:
            parts.append(_text(x(10.0**power), TOP - 20, times(10.0**power), "muted", anchor="middle"))
    parts.append(_line(x(1), TOP - 14, x(1), height - BOTTOM, "blue-line", 3))
    parts.append(_text(x(1), TOP - 20, "TransferQueue", "blue-line", anchor="middle", bold=True))
    for number, (label, factors) in enumerate(rows):
        y = TOP + ROW * number
        parts.append(_text(LEFT, y + 12, label, "text"))
        parts.append(_line(x(1), y + 32, x(max(factors.values())), y + 32, "border"))
        parts += _marks(factors, systems, y + 32, x)
    return "\n".join([*parts, "</svg>", ""])


def _marks(factors: Factors, systems: Sequence[str], y: float, x: Callable[[float], float]) -> list[str]:
    """Return the marks of a row, and beside each its number unless another mark is there."""
    parts = []
    ordered = sorted(factors.items(), key=lambda item: item[1])
    for (name, factor), following in zip(ordered, [*ordered[1:], None], strict=True):
        at, text = x(factor), times(factor)
        parts.append(_mark(at, y, MARKS[list(systems).index(name)]))
        if following is None or x(following[1]) - at > 24 + CHARACTER * len(text):
            parts.append(_text(at + 11, y + 6, text, "muted"))
    return parts


def times(factor: float) -> str:
    """Return a factor with two significant digits."""
    digits = max(0, 1 - math.floor(math.log10(factor)))
    text = f"{round(factor, 1 - math.floor(math.log10(factor))):,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}x"


def _mark(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" style="{_fill(color)}"/>'


def _line(x: float, y: float, to_x: float, to_y: float, color: str, width: float = 1) -> str:
    place = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {place} stroke-width="{width:g}" style="stroke:var(--tq-{color},{COLORS[color]})"/>'


def _text(x: float, y: float, text: str, color: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    halo = f"paint-order:stroke;stroke-width:5;stroke:var(--tq-panel,{COLORS['panel']})"  # hides lines behind the text
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place}{weight} style="{_fill(color)};{halo}">{escape(text)}</text>'


def _fill(color: str) -> str:
    return f"fill:var(--tq-{color},{COLORS[color]})"
