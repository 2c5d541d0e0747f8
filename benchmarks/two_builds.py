"""Compares small operations of two builds of the package, in turn, on the same machine.

    python -m benchmarks.two_builds BEFORE AFTER [--only WORD ...] [--starts N] [--pairs N]

BEFORE and AFTER are folders that contain the package `transfer_queue` (such as `src` of a checkout), or interpreters of
environments in which it is installed. The program itself is that of the current folder for both.

The speed of a machine with other work changes by a factor of two within seconds. So the builds measure an operation in
short windows in turn, each with a system and a client of its own, and the result is the median of the ratios of
neighbouring windows (above 1: AFTER takes longer), with its 95 % confidence interval and the number of pairs. The
systems are started several times, because a process may be a few percent slower than another one with the same program
as long as it lives; the column "starts" has the smallest and the largest median of a start.

The processor time is that of the client and of all servers and workers. It depends less on other work than the time.
With --instructions the program counts the bytecode instructions of the client and of all servers and workers instead,
which do not depend on other work at all: two pairs of one start are enough (`--starts 1 --pairs 2`).

On a virtual machine with few cores, start it as `taskset -c 1 python -m benchmarks.two_builds ...`. Otherwise the
kernel chooses, for seconds at a time, whether client and controller share a core. If they do not, a round trip and the
processor time of both take up to twice as long.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GOALS = {
    "empty round trip": 40.0,
    "put of a row": 125.0,
    "put of 64 rows x 3 fields": 250.0,
    "get of 64 rows x 3 fields": 250.0,
    "claim of 32": 120.0,
    "first get of a client": 2000.0,
}
"""Operations with a goal for the time, in microseconds."""
COUNTED = Path(__file__).parent / "harness" / "counted"
UNCOUNTED = {"first get of a client"}
"""Operations in processes whose instructions are not counted. A build that counts has no bare socket."""
RARE = {
    "first get of a client": 5, "1,024 ranks woken by one put": 4, "save of 1,000 rows": 2, "load of 1,000 rows": 2,
    "drop of 10,000 partitions": 8,
}  # fmt: skip
"""Operations whose windows take long. One of this number of pairs measures them."""
Pair = tuple[dict[str, float], dict[str, float]]
"""The figures of two neighbouring windows, of BEFORE and of AFTER."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two builds and print a table.

    Args:
        arguments: The command line without the program's name. Default: that of this process.

    Returns:
        The exit code, 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_builds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("builds", nargs=2, metavar="BUILD", help="a folder with the package, or an interpreter")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="only operations with one of these words"
    )
    parser.add_argument("--starts", type=int, default=4, help="how often the systems are started (default: 4)")
    parser.add_argument("--pairs", type=int, default=24, help="pairs of windows of a start (default: 24)")
    parser.add_argument("--instructions", action="store_true", help="count bytecode instructions instead of time")
    parser.add_argument("--quick", action="store_true", help="smoke test; its results are not meaningful")
    options = parser.parse_args(arguments)
    starts: list[dict[str, list[Pair]]] = []
    for number in range(options.starts):
        builds: list[Build] = []
        try:
            for path in options.builds[:: 1 if number % 2 else -1]:
                builds.append(Build(path, options.quick, options.instructions))
            builds = builds if number % 2 else builds[::-1]
            chosen = [name for name in builds[1].measures if any(word in name for word in options.only)]
            chosen = [name for name in chosen if not options.instructions or name not in UNCOUNTED]
            if not chosen:
                parser.error(f"no operation contains {options.only}; there are: {', '.join(builds[1].measures)}")
            starts.append(measure(builds, chosen, options.pairs, "count" if options.instructions else "window"))
        finally:
            for build in builds:
                build.close()
    print(f"before: {builds[0].path}\nafter: {builds[1].path}\n")
    print(table(starts))
    return 0


def measure(builds: list[Build], names: list[str], pairs: int, act: str = "window") -> dict[str, list[Pair]]:
    """Return the pairs of neighbouring windows of each operation in one start. The first pairs are a warm-up."""
    found: dict[str, list[Pair]] = {name: [] for name in names}
    for number in range(-1, pairs):
        for name in names:
            if number % RARE.get(name, 1):
                continue
            order = builds if number % 2 else builds[::-1]
            for build in order:
                build.ask("prepare", name)
            windows = {build: build.ask(act, name) for build in order}
            if number >= 0:
                found[name].append((windows[builds[0]], windows[builds[1]]))
    return found


def table(starts: list[dict[str, list[Pair]]]) -> str:
    """Return a Markdown table of the pairs of all starts."""
    figures = [figure for figure in ("time", "cpu", "instructions") if figure in next(iter(starts[0].values()))[0][0]]
    head = [
        "us" if "time" in figures else "bytecode instructions",
        "pairs",
        "before",
        "after",
        "ratio",
        "95 %",
        "starts",
    ]
    head += ["CPU before", "CPU after", "ratio", "95 %", "goal"] if "time" in figures else []
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in starts[0]:
        pairs = [pair for start in starts for pair in start[name]]
        cells = [name, f"{len(pairs)}"]
        for figure in figures:
            cells += [f"{statistics.median(pair[which][figure] for pair in pairs):,.1f}" for which in (0, 1)]
            all_ratios = ratios(pairs, figure)
            low, high = interval(all_ratios)
            cells += [f"{statistics.median(all_ratios):.3f}", f"{low:.3f} to {high:.3f}"]
            if figure != "cpu":
                medians = [statistics.median(ratios(start[name], figure)) for start in starts]
                cells.append(f"{min(medians):.3f} to {max(medians):.3f}")
        cells += [f"{GOALS[name]:g}" if name in GOALS else ""] if "time" in figures else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(pairs: list[Pair], figure: str) -> list[float]:
    """Return the ratios of AFTER to BEFORE, sorted."""
    return sorted(after[figure] / max(before[figure], 1e-3) for before, after in pairs)


def interval(ordered: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of sorted numbers, by their order."""
    reach = 0.98 * math.sqrt(len(ordered))
    middle = (len(ordered) - 1) / 2
    return ordered[max(0, math.floor(middle - reach))], ordered[min(len(ordered) - 1, math.ceil(middle + reach))]


class Build:
    """A process that measures one build on request."""

    def __init__(self, path: str, quick: bool, counts: bool = False) -> None:
        python, environment = sys.executable, {**os.environ, "PYTHONHASHSEED": "0"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if Path(path).is_dir():
            # A module that is compiled when it is imported runs up to 7 % slower than one that is loaded from its file.
            subprocess.run([python, "-m", "compileall", "-q", path], env=environment, check=False)
            environment["PYTHONPATH"] = os.pathsep.join((str(Path(path).resolve()), os.getcwd()))
        else:
            python, environment["PYTHONPATH"] = path, os.getcwd()
        command = [python, "-W", "ignore", "-m", "benchmarks.two_builds_windows", *(["--quick"] if quick else [])]
        if counts:
            environment["PYTHONPATH"] += os.pathsep + str(COUNTED)
            command.append("--instructions")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        head = self._read()
        self.path: str = head["build"]
        self.measures: list[str] = head["measures"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError("the process of a build ended; its message is above")
        return json.loads(line)

    def ask(self, act: str, name: str) -> Any:
        """Let the process `prepare` an operation, or measure a `window` of it, and return the figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([act, name]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process and its system."""
        self._process.communicate()  # closes its input


if __name__ == "__main__":
    sys.exit(main())
