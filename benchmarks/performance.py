"""Run the benchmarks, keep their results, and write the pages that are made of them.

    python -m benchmarks.performance [--peers] [--quick] [NAME ...]

The results of each benchmark are kept in benchmarks/measured, by machine, and `tools/make_figures.py` writes the pages
from all results there: a benchmark that is run alone replaces its part. Results of quick runs are kept in runs/bench,
and no page is made of them. With --peers, alternatives that a user could choose are measured, too (see
`tools/make_peers`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.harness.kept_results import MEASURED, ROOT
from benchmarks.harness.peer_process import peers
from benchmarks.harness.report import Scale, document, table
from benchmarks.harness.runner import NAMES, module, results
from transfer_queue.config.environment import usable_cores

QUICK = ROOT / "runs" / "bench"


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
    """Run benchmarks, keep their results, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", choices=[*NAMES, []], metavar="NAME", help="benchmarks to run (all)")
    parser.add_argument("--peers", action="store_true", help="also measure alternatives that a user could choose")
    parser.add_argument("--quick", action="store_true", help="smoke test; its results are not meaningful")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="keep the results in a folder like benchmarks/measured, and write no pages",
    )
    options = parser.parse_args()
    folder = options.into or (QUICK if options.quick else MEASURED)
    measure(options.name or list(NAMES), options.quick, options.peers, folder / machine_name())
    if folder == MEASURED:
        subprocess.run([sys.executable, str(ROOT / "tools" / "make_figures.py")], check=True)
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
