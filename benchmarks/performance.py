"""Run the benchmarks and write docs/performance.md with its figures.

    python -m benchmarks.performance [--peers] [--quick] [NAME ...]

The results of each benchmark are kept in runs/bench, and the page is made of all results there: a benchmark that is run
alone replaces its part. The results of benchmarks that not every machine can run are kept in benchmarks/measured, which
belongs to the repository. With --peers, alternatives that a user could choose are measured, too (see
`tools/make_peers`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.peer_process import peers
from benchmarks.harness.plots import dots
from benchmarks.harness.report import RATES, Scale, document, number, table
from benchmarks.harness.runner import NAMES, module, results

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "bench"
MEASURED = ROOT / "benchmarks" / "measured"
PAGE = ROOT / "docs" / "performance.md"
FIGURES = ROOT / "docs" / "performance"
PEER = "TransferQueue 0.1.11"  # the peer whose figures are shown beside the targets
PACE = "put 64 rows"
"""The row of the benchmark kv whose peer tells the pace of the machine."""
OF_THE_RUN = (
    "get of 8192 rows x 5 x 128 f32 put one by one", "put of 32 rows, of a client", "claim of 32 rows, of a client",
    "put and claim, processor time of the servers",
)  # fmt: skip
"""The rows whose targets are multiples of other measurements of the same run, so that they are not scaled."""
TIMES = ("us", "ms", "s")
DRAWN = 24  # the maximum number of rows of a figure


def machine() -> str:
    """In words."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch", "msgspec"))
    cores, kernel = len(os.sched_getaffinity(0)), platform.release().partition("-")[0]
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cores} cores, {memory:.0f} GiB{gpu}, Linux {kernel}, Python {platform.python_version()}, {packages}"


def place_of(name: str) -> Path:
    """Return the file in which the results of a benchmark are kept."""
    return (MEASURED if hasattr(module(name), "missing") else RUNS) / f"{name}.json"


def main() -> int:
    """Run benchmarks, keep their results, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", choices=[*NAMES, []], metavar="NAME", help="benchmarks to run (all)")
    parser.add_argument("--peers", action="store_true", help="also measure alternatives that a user could choose")
    parser.add_argument("--quick", action="store_true", help="smoke test; its results are not meaningful")
    parser.add_argument("--page", action="store_true", help="only write the page, from the results that were kept")
    options = parser.parse_args()
    if not options.page:
        measure(options.name or list(NAMES), options.quick, options.peers)
    kept = {name: json.loads(path.read_text()) for name in NAMES if (path := place_of(name)).exists()}
    FIGURES.mkdir(exist_ok=True)
    PAGE.write_text(page(kept), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def measure(names: list[str], quick: bool, beside: bool) -> None:
    """Run benchmarks, print their tables, and keep their results."""
    RUNS.mkdir(parents=True, exist_ok=True)
    MEASURED.mkdir(exist_ok=True)
    for each in names:
        with peers() as asked:  # no peer is running during the next benchmark
            for name, seconds, rows in results([each], Scale(quick, dict(asked) if beside else {})):
                print(f"{name}: {module(name).QUESTION} ({seconds:.0f} s)\n\n{table(rows)}\n", flush=True)
                found = document(name, quick, seconds, rows)
                found |= {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[1]}
                place_of(name).write_text(json.dumps(found))


# ---------------------------------------------------------------- the page


def page(kept: dict[str, dict[str, Any]]) -> str:
    """Return the page, and write the figures that it shows."""
    parts = [INTRODUCTION, *_how(kept), "## Targets\n", _targets(kept)]
    for name, found in kept.items():
        asked = module(name)
        parts += [f"## {name}: {asked.QUESTION}\n", *([f"{asked.NOTE}\n"] if hasattr(asked, "NOTE") else [])]
        parts += [*_drawn(name, found["rows"]), _rows(found["rows"])]
    return "\n".join(parts)


INTRODUCTION = """# Performance

`make bench` writes this page (`make bench-peer` also measures the peers). `python -m benchmarks NAME` in a checkout
repeats one benchmark on your machine.

Every number is compared with others of the same run, because machines differ: with this machine (a memcpy of the same
number of bytes in one thread, a bare UNIX socket that carries them, an empty round trip to the controller), and with
what a user could use instead: Ray's object store, and the PyPI package TransferQueue 0.1.11 behind the same public
calls. Times are medians. Contents are compared byte for byte; a run in which they differ reports no numbers. "cpu_us"
is the processor time of one operation in microseconds, which other work on the machine changes least.

A target was set beside the measurement of a peer, on a machine of this kind. Such machines differ by a factor of two
and more. So "scaled target" is the target, multiplied by how much longer the same peer took in this run than it took
then. Of what no peer was measured for, the target of a time or a rate is scaled by the pace of the machine: by how much
longer TransferQueue 0.1.11 took for its put of 64 rows in this run than the 6.6 ms for which these targets were set. It
is then marked "by pace".
"""


def _how(kept: dict[str, dict[str, Any]]) -> list[str]:
    machines: dict[str, list[str]] = {}
    for name, each in kept.items():
        machines.setdefault(f"{each['machine']}, {each['date']}", []).append(name)
    usual = max(machines, key=lambda words: len(machines[words]), default="")
    load = max((each["load"] for each in kept.values()), default=0.0)
    words = [f"Measured on: {usual}."] if usual else []
    for here, names in machines.items():
        if here != usual:
            several = len(names) > 1
            what = f"The benchmarks {', '.join(names)} were" if several else f"The benchmark {names[0]} was"
            words.append(f"{what} measured on: {here}.")
    quick = [name for name, each in kept.items() if each["quick"]]
    if quick:
        words.append(f"Quick runs, whose results are not meaningful: {', '.join(quick)}.")
    took = ", ".join(f"{name} {each['seconds']:.0f}" for name, each in kept.items())
    return [
        *words,
        f"Duration of each benchmark in seconds: {took}. Highest load average during the run: {load:.1f}.\n",
    ]


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _targets(kept: dict[str, dict[str, Any]]) -> str:
    lines = [
        _cells(
            "what", "peer when the target was set", "peers in this run", "target", "measured", "met", "scaled target"
        ),
        _cells(*["---"] * 7),
    ]
    pace = _pace(kept)
    for found in kept.values():
        for row in found["rows"]:
            if row["target"] is not None:
                unit = row["unit"]
                lines.append(_cells(
                    row["what"], number(row["then"]), _peers(row), f"{number(row['target'])} {unit}",
                    f"{number(row['ours'])} {unit}", "yes" if row["met"] else "**no**", _scaled(row, pace),
                ))  # fmt: skip
    return "\n".join([*lines, ""])


def _pace(kept: dict[str, dict[str, Any]]) -> float | None:
    """Return how much longer the peer took in this run than when the targets were set; None if it was not measured."""
    rows = kept["kv"]["rows"] if "kv" in kept else []
    for row in rows:
        if row["what"].startswith(PACE) and row["then"] and PEER in row["peers"]:
            return float(row["peers"][PEER] / row["then"])
    return None


def _scaled(row: dict[str, Any], pace: float | None) -> str:
    """Return the target scaled to this machine, and whether it is met; "" if this has no meaning or is not known."""
    peer, unit = row["peers"].get(PEER), row["unit"]
    own = peer / row["then"] if peer is not None and row["then"] is not None else None
    factor = pace if own is None else own
    if factor is None or unit not in (*RATES, *TIMES) or row["what"] in OF_THE_RUN:
        return ""
    if own is None and unit in RATES:
        factor = 1 / factor  # a slower machine has a lower rate
    target = row["target"] * factor
    met = row["ours"] >= target if unit in RATES else row["ours"] <= target
    return f"{number(target)}{' by pace' if own is None else ''}: {'yes' if met else '**no**'}"


def _peers(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in row["peers"].items())


def _rows(rows: list[dict[str, Any]]) -> str:
    lines = [_cells("what", "ours", "ratio", "to", "peers", "more"), _cells(*["---"] * 6)]
    for row in rows:
        more = ", ".join(f"{name} {number(value)}" for name, value in row["more"].items())
        against = "" if row["reference"] is None else f"{row['against']} {number(row['reference'])}"
        ratio = "" if row["ratio"] is None else number(row["ratio"])
        lines.append(_cells(row["what"], f"{number(row['ours'])} {row['unit']}", ratio, against, _peers(row), more))
    return "\n".join([*lines, ""])


def _drawn(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Draw a figure for each unit; rows with a target or a peer come first."""
    found = []
    for unit in dict.fromkeys(row["unit"] for row in rows):
        shown = [row for row in rows if row["unit"] == unit and row["ours"] > 0]
        if unit and len(shown) > 2:
            telling = sorted(shown, key=lambda row: row["target"] is None and not row["peers"])[:DRAWN]
            shown = [row for row in shown if row in telling]
            path = FIGURES / f"{name}-{unit.replace(' ', '-').replace('%', 'percent')}.svg"
            marks = []
            for row in shown:
                known = {"ours": row["ours"], "reference": row["reference"], "target": row["target"], **row["peers"]}
                marks.append((row["what"], {who: value for who, value in known.items() if value is not None}))
            path.write_text(dots(name, unit, marks), "utf-8")
            found.append(f"![{name}, {unit}](performance/{path.name})\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
