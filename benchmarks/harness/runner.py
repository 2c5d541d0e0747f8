"""`python -m benchmarks`: what the system costs on this machine, as ratios that are measured side by side in one run.

The suite has one module per benchmark. Each has QUESTION, a sentence, `run(scale)`, which returns rows of figures, and
optionally a NOTE for the page that `make bench` writes, and `missing()`, which returns what this machine lacks for the
benchmark. A benchmark never asserts a speed; it does assert that the contents are right.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness.report import Row, Scale, document, line, table

NAMES = (
    "kv",
    "small_operations",
    "tags",
    "queues",
    "memory",
    "claims",
    "balance",
    "wakeup",
    "rare_events",
    "pipeline",
    "trainings",
    "controller_limits",
    "durability",
    "restart",
    "loader",
    "equal_values",
    "timeline",
    "live_page",
    "gpu",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks, and print a table and a JSON line for each.

    Args:
        arguments: The command line without the program's name. Default: that of this process.

    Returns:
        The exit code, 0.

    Raises:
        SystemExit: The arguments are wrong (code 2), or help was requested (code 0).
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures what the system costs on this machine, next to memcpy, a bare socket and an empty round "
        "trip to the controller. Each benchmark starts a system of its own, and prints a table and a JSON line. Run it "
        "in the root folder of a checkout.",
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"benchmarks to run: {', '.join(NAMES)} (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="smoke test that takes seconds; its results are not meaningful"
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON lines")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.name) - set(NAMES))
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; the benchmarks are {', '.join(NAMES)}")
    for name, seconds, rows in results(options.name or NAMES, Scale(options.quick)):
        if not options.json:
            print(f"{name}: {module(name).QUESTION} ({seconds:.0f} s)\n\n{table(rows)}\n")
        print(line(document(name, options.quick, seconds, rows)), flush=True)
    return 0


def results(names: Sequence[str], scale: Scale) -> Iterator[tuple[str, float, list[Row]]]:
    """Run benchmarks in turn, and yield for each its name, the seconds that it took, and its rows.

    What this machine cannot run is skipped with a line to stderr.
    """
    for name in names:
        lacks = missing(name)
        if lacks is not None:
            print(f"{name}: skipped, {lacks}", file=sys.stderr)
            continue
        start = time.monotonic()
        rows = module(name).run(scale)
        yield name, time.monotonic() - start, rows
        gc.collect()


def missing(name: str) -> str | None:
    """Return what this machine lacks for a benchmark; None if nothing."""
    asked = module(name)
    lacks: str | None = asked.missing() if hasattr(asked, "missing") else None
    return lacks


def module(name: str) -> Any:
    """Return the module of a benchmark."""
    return importlib.import_module(f"benchmarks.suite.{name}")
