"""Compares small operations of two builds of the package, in turn, on the same machine.

    python -m benchmarks.two_builds BEFORE AFTER [--rounds N]

BEFORE and AFTER are folders that contain the package `transfer_queue` (such as `src` of a checkout), or interpreters of
environments in which it is installed. Each has a system and a client of its own; the rounds of the two alternate, and
those of a bare UNIX socket are between them. The result is the median of the rounds' medians.

On a virtual machine with few cores, start it as `taskset -c 1 python -m benchmarks.two_builds ...`. Otherwise the
kernel chooses, for seconds at a time, whether client and controller share a core. If they do not, a round trip and the
processor time of both take up to twice as long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GOALS = {
    "bare socket": None,
    "empty round trip": 40.0,
    "put of a row": 125.0,
    "put of 64 rows x 3 fields": 250.0,
    "get of 64 rows x 3 fields": 250.0,
    "claim of 32": 120.0,
    "first get of a client": 2000.0,
    "controller CPU, empty round trip": None,
    "client CPU, empty round trip": None,
    "controller CPU, put of a row": 35.0,
    "client CPU, put of a row": None,
}
"""What is measured, in microseconds, and the goal."""
Figures = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two builds and print a table.

    Args:
        arguments: The command line without the program's name. Default: that of this process.

    Returns:
        The exit code, 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_builds", description=__doc__)
    parser.add_argument("builds", nargs=2, metavar="BUILD", help="a folder with the package, or an interpreter")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each build (default: 8)")
    parser.add_argument("--quick", action="store_true", help="smoke test; its results are not meaningful")
    options = parser.parse_args(arguments)
    builds: list[Build] = []
    try:
        for path in options.builds:
            builds.append(Build(path, options.quick))
        for _ in range(options.rounds):
            for build in builds:
                build.run_round()
    finally:
        for build in builds:
            build.close()
    print(table([build.figures() for build in builds], [build.words for build in builds]))
    return 0


def table(figures: list[Figures], words: list[str]) -> str:
    """Return a Markdown table of the figures of both builds."""
    lines = [f"| us | {words[0]} | {words[1]} | ratio | goal |", "|---|---|---|---|---|"]
    for what, goal in GOALS.items():
        before, after = (each[what] for each in figures)
        lines.append(f"| {what} | {before:,.1f} | {after:,.1f} | {before / after:.2f} | {goal or ''} |")
    return "\n".join(lines)


class Build:
    """A process that measures one build on request."""

    def __init__(self, path: str, quick: bool) -> None:
        python, environment = sys.executable, dict(os.environ)
        if Path(path).is_dir():
            environment["PYTHONPATH"] = os.pathsep.join((str(Path(path).resolve()), os.getcwd()))
        else:
            python, environment["PYTHONPATH"] = path, os.getcwd()
        self._rounds: list[Figures] = []
        command = [python, "-W", "ignore", "-m", "benchmarks.two_builds_rounds", *(["--quick"] if quick else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.words = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError("the process of a build ended; its message is above")
        return json.loads(line)

    def run_round(self) -> None:
        """Measure everything once."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._rounds.append(self._read())

    def figures(self) -> Figures:
        """Return the medians of the rounds. The first one is a warm-up."""
        rounds = self._rounds[1:] or self._rounds
        return {what: statistics.median(each[what] for each in rounds) for what in rounds[0]}

    def close(self) -> None:
        """End the process and its system."""
        self._process.communicate()  # closes its input


if __name__ == "__main__":
    sys.exit(main())
