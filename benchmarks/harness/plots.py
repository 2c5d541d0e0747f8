"""Figures as small SVG files, written by hand: dots on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

LINE, LEFT, WIDTH, TOP = 22, 430, 420, 64  # pixels
COLORS = ("#c2410c", "#7c3aed", "#15803d")  # of peers

Marks = Mapping[str, float]
"""The values of a row: "ours" and, if they exist, "reference", "target" and peers by their names."""


def dots(title: str, unit: str, rows: Sequence[tuple[str, Marks]]) -> str:
    """Return an SVG in which each row has its marks: our figure, the reference, the target, and peers."""
    values = [value for _, marks in rows for value in marks.values() if value > 0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    peers = sorted({name for _, marks in rows for name in marks} - {"ours", "reference", "target"})
    colors = dict(zip(peers, COLORS))
    height = TOP + LINE * len(rows) + 14

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - low) / (high - low) * WIDTH

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{height}" '
        f'viewBox="0 0 {LEFT + WIDTH + 40} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{LEFT + WIDTH + 40}" height="{height}" fill="white"/>',
        f'<text x="8" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{height - 10}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{at:.1f}" y="{TOP - 10}" text-anchor="middle" fill="#6b7280">{10.0**power:g}</text>')
    parts.append(f'<text x="{LEFT + WIDTH + 36}" y="18" text-anchor="end" fill="#6b7280">{escape(unit)}</text>')
    legend = LEFT
    for name in ("ours", "reference", "target", *peers):
        parts.append(_mark(name, legend, 31, colors))
        parts.append(f'<text x="{legend + 9}" y="35" fill="#374151">{escape(name)}</text>')
        legend += 24 + 7 * len(name)
    for number, (label, marks) in enumerate(rows):
        y = TOP + LINE * number + LINE / 2
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(_short(label))}</text>')
        parts += [_mark(name, x(value), y, colors) for name, value in marks.items() if value > 0]
    return "\n".join([*parts, "</svg>", ""])


def _short(label: str) -> str:
    return label if len(label) <= 68 else f"{label[:33]} ... {label[-30:]}"


def _mark(name: str, x: float, y: float, colors: Mapping[str, str]) -> str:
    if name == "ours":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#2563eb"/>'
    if name == "reference":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="white" stroke="#6b7280" stroke-width="1.5"/>'
    if name == "target":
        return f'<line x1="{x:.1f}" y1="{y - 8:.1f}" x2="{x:.1f}" y2="{y + 8:.1f}" stroke="#111827" stroke-width="2"/>'
    points = f"{x - 5:.1f},{y:.1f} {x:.1f},{y - 5:.1f} {x + 5:.1f},{y:.1f} {x:.1f},{y + 5:.1f}"
    return f'<polygon points="{points}" fill="{colors[name]}"/>'
