"""What a benchmark tells: rows of figures, as a table for people and a JSON line for scripts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

RATES = ("a second",)  # units of which more is better

Peer = Callable[[str, dict[str, Any]], "dict[str, float] | None"]
"""peer(question, case) -> figures by name, in the unit of ours; None where that peer cannot do it."""


@dataclass(frozen=True)
class Scale:
    """How big a run is. quick: seconds in all, to see that it works. peers: by name, measured beside ours."""

    quick: bool = False
    peers: dict[str, Peer] = field(default_factory=dict)

    def pick(self, full: Any, quick: Any) -> Any:
        """One of the two."""
        return quick if self.quick else full

    def ask_peers(self, question: str, **case: Any) -> dict[str, dict[str, float]]:
        """Name of each peer that can do it -> its figures. Asked once ours are measured: peers leave processes busy."""
        found = {name: peer(question, case) for name, peer in self.peers.items()}
        return {name: figures for name, figures in found.items() if figures is not None}


@dataclass(frozen=True)
class Row:
    """One figure.

    ours: in `unit`. reference: what `against` took or gave in the same unit and run. ratio: ours to it, the median
    over the rounds where there are rounds. target: what to reach. then: what the peer named in the issue gave when
    the target was set. peers: measured in this run. more: other figures, by a name that ends in their unit.
    """

    what: str
    ours: float
    unit: str
    reference: float | None = None
    against: str = ""
    ratio: float | None = None
    target: float | None = None
    then: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    more: dict[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return self.ours >= self.target if self.unit in RATES else self.ours <= self.target


def compared(
    what: str, unit: str, ours: Sequence[float], references: Sequence[float], against: str, **more: Any
) -> Row:
    """A row of medians over rounds in each of which both were measured."""
    pairs = zip(ours, references, strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    return Row(what, statistics.median(ours), unit, statistics.median(references), against, ratio, **more)


def against(what: str, unit: str, ours: float, reference: float, words: str, **more: Any) -> Row:
    """A row of two figures."""
    return Row(what, ours, unit, reference, words, ours / reference, **more)


def quantiles(seconds: Sequence[float], factor: float = 1e3) -> dict[str, float]:
    """p50, p99 and max, times `factor`."""
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: ordered[min(int(len(ordered) * share), len(ordered) - 1)] * factor for name, share in at.items()}


def number(value: float | None) -> str:
    """With three digits that count."""
    if value is None:
        return "-"
    if 0 < abs(value - 1) < 0.01:
        return f"{value:.5f}"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"


def cells(row: Row) -> list[str]:
    """The row as words."""
    met = {None: "", True: "yes", False: "no"}[row.met]
    peers = ", ".join(f"{name} {number(value)}" for name, value in row.peers.items())
    more = ", ".join(f"{name} {number(value)}" for name, value in row.more.items())
    return [
        row.what, f"{number(row.ours)} {row.unit}", "" if row.ratio is None else number(row.ratio),
        "" if row.reference is None else f"{row.against} {number(row.reference)}",
        "" if row.target is None else number(row.target), met, peers, more,
    ]  # fmt: skip


HEAD = ["what", "ours", "ratio", "to", "target", "met", "peers", "more"]


def table(rows: Iterable[Row]) -> str:
    """All rows, in columns as wide as they need."""
    lines = [HEAD, *map(cells, rows)]
    kept = [i for i in range(len(HEAD)) if i < 3 or any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in kept}
    return "\n".join("  ".join(line[i].ljust(widths[i]) for i in kept).rstrip() for line in lines)


def document(question: str, quick: bool, seconds: float, rows: Sequence[Row]) -> dict[str, Any]:
    """What the JSON line holds."""
    return {
        "question": question,
        "quick": quick,
        "seconds": seconds,
        "rows": [{**asdict(r), "met": r.met} for r in rows],
    }


def line(document: dict[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(document, allow_nan=False)
