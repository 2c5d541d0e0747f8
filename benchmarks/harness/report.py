"""The results of a benchmark: rows of figures, as a table for people and a JSON line for scripts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

RATES = ("a second",)  # units of which more is better
SHARE = "of memcpy"  # the unit of a part of the rate of a memcpy, of which more is better

Peer = Callable[[str, dict[str, Any]], "dict[str, float] | None"]
"""peer(question, case) -> figures by name, in our unit; None if the peer does not support the case."""


@dataclass(frozen=True)
class Scale:
    """The size of a run."""

    quick: bool = False
    """True for a smoke test of some seconds."""
    peers: dict[str, Peer] = field(default_factory=dict)
    """The peers to measure, by name."""

    def pick(self, full: Any, quick: Any) -> Any:
        """Return one of the two values, depending on `quick`."""
        return quick if self.quick else full

    def ask_peers(self, question: str, **case: Any) -> dict[str, dict[str, float]]:
        """Return the figures of each peer that supports the case. Call this last, because peers keep cores busy."""
        found = {name: peer(question, case) for name, peer in self.peers.items()}
        return {name: figures for name, figures in found.items() if figures is not None}


@dataclass(frozen=True)
class Row:
    """One figure."""

    what: str
    ours: float
    """Our figure, in `unit`."""
    unit: str
    reference: float | None = None
    """The figure of `against`, in the same unit and run."""
    against: str = ""
    ratio: float | None = None
    """Ours divided by the reference; the median over the rounds."""
    target: float | None = None
    """The figure to reach."""
    then: float | None = None
    """The figure of the peer when the target was set."""
    peers: dict[str, float] = field(default_factory=dict)
    """The figures of the peers in this run."""
    more: dict[str, float] = field(default_factory=dict)
    """Other figures, by a name that ends in their unit."""

    @property
    def met(self) -> bool | None:
        """Return whether the target is reached; None without a target."""
        if self.target is None:
            return None
        return self.ours >= self.target if self.unit in (*RATES, SHARE) else self.ours <= self.target


def compared(
    what: str, unit: str, ours: Sequence[float], references: Sequence[float], against: str, **more: Any
) -> Row:
    """Return a row of medians over rounds, in each of which both were measured."""
    pairs = zip(ours, references, strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    return Row(what, statistics.median(ours), unit, statistics.median(references), against, ratio, **more)


def against(what: str, unit: str, ours: float, reference: float, words: str, **more: Any) -> Row:
    """Return a row of two figures."""
    return Row(what, ours, unit, reference, words, ours / reference, **more)


def quantiles(seconds: Sequence[float], factor: float = 1e3) -> dict[str, float]:
    """Return p50, p99 and max, multiplied by `factor`."""
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: ordered[min(int(len(ordered) * share), len(ordered) - 1)] * factor for name, share in at.items()}


def number(value: float | None) -> str:
    """Return a number with three significant digits."""
    if value is None:
        return "-"
    if 0 < abs(value - 1) < 0.01:
        return f"{value:.5f}"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"


def cells(row: Row) -> list[str]:
    """Return the cells of a row as text."""
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
    """Return all rows as a table of aligned columns."""
    lines = [HEAD, *map(cells, rows)]
    kept = [i for i in range(len(HEAD)) if i < 3 or any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in kept}
    return "\n".join("  ".join(line[i].ljust(widths[i]) for i in kept).rstrip() for line in lines)


def document(question: str, quick: bool, seconds: float, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the content of the JSON line."""
    return {
        "question": question,
        "quick": quick,
        "seconds": seconds,
        "rows": [{**asdict(r), "met": r.met} for r in rows],
    }


def line(document: dict[str, Any]) -> str:
    """Return one line of JSON."""
    return json.dumps(document, allow_nan=False)
