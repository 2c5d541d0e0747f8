"""The results in benchmarks/measured, by machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.report import RATES
from benchmarks.harness.runner import NAMES

Results = dict[str, dict[str, Any]]
"""Benchmark -> its document, of one machine."""

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "benchmarks" / "measured"
TIMES = ("us", "ms", "s")


def read(folder: Path = MEASURED) -> dict[str, Results]:
    """Return the results of each machine, first those of the one with the most results of peers, then of benchmarks."""
    kept = {
        each.name: {name: json.loads(path.read_text()) for name in NAMES if (path := each / f"{name}.json").exists()}
        for each in sorted(folder.iterdir())
    }
    return dict(sorted(kept.items(), key=lambda item: (-_beside_peers(item[1]), -len(item[1]))))


def _beside_peers(results: Results) -> int:
    return sum(bool(row["peers"]) for each in results.values() for row in each["rows"])


def row_of(results: Results, benchmark: str, begin: str) -> dict[str, Any]:
    """Return the row of a benchmark that begins with these words."""
    row: dict[str, Any] = next(row for row in results[benchmark]["rows"] if row["what"].startswith(begin))
    return row


def factors(row: dict[str, Any]) -> dict[str, float]:
    """Return by peer how many times as long as ours its work takes, or how many times as much it needs."""
    is_rate = row["unit"] in RATES
    return {name: row["ours"] / value if is_rate else value / row["ours"] for name, value in row["peers"].items()}
