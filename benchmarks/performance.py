"""Run the benchmarks and write docs/performance.md with its figures.

    python -m benchmarks.performance [--peers] [--quick] [NAME ...]

The results of each benchmark are kept in benchmarks/measured, by machine, and the page is made of all results there: a
benchmark that is run alone replaces its part. Those of quick runs are kept in runs/bench. With --peers, alternatives
that a user could choose are measured, too (see `tools/make_peers`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
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
from transfer_queue.utils.usable_cores import usable_cores

Results = dict[str, dict[str, Any]]
"""Benchmark -> its document, of one machine."""

ROOT = Path(__file__).resolve().parents[1]
QUICK = ROOT / "runs" / "bench"
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
    cores, kernel = usable_cores(), platform.release().partition("-")[0]
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cores} cores, {memory:.0f} GiB{gpu}, Linux {kernel}, Python {platform.python_version()}, {packages}"


def machine_name() -> str:
    """Return the name of this machine, under which its results are kept: its cores, and its GPU if it has one."""
    gpu = re.search(r"[A-Z]+\d+", torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return f"{usable_cores()}-cores" + (f"-{gpu.group().lower()}" if gpu else "")


def main() -> int:
    """Run benchmarks, keep their results, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", choices=[*NAMES, []], metavar="NAME", help="benchmarks to run (all)")
    parser.add_argument("--peers", action="store_true", help="also measure alternatives that a user could choose")
    parser.add_argument("--quick", action="store_true", help="smoke test; its results are not meaningful")
    parser.add_argument("--page", action="store_true", help="only write the page, from the results that were kept")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="keep the results in a folder, like benchmarks/measured, and write no page",
    )
    options = parser.parse_args()
    folder = options.into or (QUICK if options.quick else MEASURED)
    if not options.page:
        measure(options.name or list(NAMES), options.quick, options.peers, folder / machine_name())
    if options.into is not None:
        return 0
    FIGURES.mkdir(exist_ok=True)
    PAGE.write_text(page(read(folder)), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def read(folder: Path) -> dict[str, Results]:
    """Return the results of each machine, those of the machine with the most benchmarks first."""
    found = {
        each.name: {name: json.loads(path.read_text()) for name in NAMES if (path := each / f"{name}.json").exists()}
        for each in sorted(folder.iterdir())
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def measure(names: list[str], quick: bool, beside: bool, folder: Path) -> None:
    """Run benchmarks, print their tables, and keep their results in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in names:
        with peers() as asked:  # no peer is running during the next benchmark
            for name, seconds, rows in results([each], Scale(quick, dict(asked) if beside else {})):
                print(f"{name}: {module(name).QUESTION} ({seconds:.0f} s)\n\n{table(rows)}\n", flush=True)
                found = document(name, quick, seconds, rows)
                found |= {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[1]}
                (folder / f"{name}.json").write_text(json.dumps(found))


# ---------------------------------------------------------------- the page


def page(machines: dict[str, Results]) -> str:
    """Return the page, and write the figures that it shows. The targets are those of the first machine."""
    kept = next(iter(machines.values()), {})
    parts = [INTRODUCTION, *_how(machines), "## Targets\n", _targets(kept)]
    for name in NAMES:
        found = {machine: results[name]["rows"] for machine, results in machines.items() if name in results}
        if not found:
            continue
        asked = module(name)
        parts += [f"## {name}: {asked.QUESTION}\n", *([f"{asked.NOTE}\n"] if hasattr(asked, "NOTE") else [])]
        parts += _drawn(name, next(iter(found.values())))
        for machine, rows in found.items():
            parts += [*([f"On {machine}:\n"] if list(found) != list(machines)[:1] else []), _rows(rows)]
    return "\n".join(parts)


INTRODUCTION = """# Performance

`make bench` writes this page (`make bench-peer` also measures the peers). `python -m benchmarks NAME` in a checkout
repeats one benchmark on your machine.

Every number is compared with others of the same run, because machines differ: with this machine (a memcpy of the same
number of bytes in one thread, copies by several threads into shared memory, a bare UNIX socket that carries them, an
empty round trip to the controller), and with what a user could use instead: Ray's object store, and the PyPI package
TransferQueue 0.1.11 behind the same public calls. Times are medians. Contents are compared byte for byte; a run in
which they differ reports no numbers. "cpu_us" is the processor time of one operation in microseconds, which other work
on the machine changes least.

A target was set beside the measurement of a peer, on a machine of this kind. Such machines differ by a factor of two
and more. So "scaled target" is the target, multiplied by how much longer the same peer took in this run than it took
then. Of what no peer was measured for, the target of a time or a rate is scaled by the pace of the machine: by how much
longer TransferQueue 0.1.11 took for its put of 64 rows in this run than the 6.6 ms for which these targets were set. It
is then marked "by pace".
"""


def _how(machines: dict[str, Results]) -> list[str]:
    parts = []
    for machine, kept in machines.items():
        words: dict[str, list[str]] = {}
        for name, each in kept.items():
            words.setdefault(f"{each['machine']}, {each['date']}", []).append(name)
        for here, names in words.items():
            took = ", ".join(f"{name} {kept[name]['seconds']:.0f}" for name in names)
            load = max(kept[name]["load"] for name in names)
            quick = (
                " Quick runs, whose results are not meaningful." if any(kept[name]["quick"] for name in names) else ""
            )
            parts.append(
                f"- **{machine}**: {here}. Duration of each benchmark in seconds: {took}. Highest load average during "
                f"the run: {load:.1f}.{quick}"
            )
    return ["Measured on:\n", *parts, ""]


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
