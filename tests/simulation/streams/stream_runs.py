"""The command line of `tests.simulation.streams`."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.simulation import streams
from tests.simulation.streams.controller_driver import drive
from tests.simulation.streams.stream_comparison import Stream, first_difference, read_streams, write_streams

KINDS = ("ordinary", "takeovers", "locks", "stores", "faults")
"""See `stream_recorder.RUNS`. Only recording needs torch, which takes seconds to import."""


def record_seed(kind: str, seed: int) -> Stream:
    """Record a seed of a kind, and what the present build answers."""
    from tests.simulation.streams.stream_recorder import record

    events = record(kind, seed)
    return Stream(kind, seed, events, drive(events))


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the command line. Return the exit code: 1 if a stream differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.streams",
        description=streams.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("act", choices=["record", "replay"])
    parser.add_argument("file", type=Path, help="the file of the streams, outside the repository")
    parser.add_argument("--seeds", default="0..20", help="to record, of each kind, from the first to before the second")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="default: all")
    parser.add_argument("--differences", type=int, default=1, help="stop after this number of streams that differ")
    parser.add_argument("--build", type=Path, help="the folder with the package, such as src of another checkout")
    options = parser.parse_args(arguments)
    if options.build is not None:
        return run_with_build(options.build.resolve(), options)
    if options.act == "replay":
        return _replay(options)
    first, _, last = options.seeds.partition("..")
    named = [(kind, seed) for kind in options.kinds for seed in range(int(first), int(last))]
    write_streams(options.file, (record_seed(kind, seed) for kind, seed in named))
    print(f"{len(named)} streams recorded in {options.file}, {options.file.stat().st_size / 1e6:.1f} MB")
    return 0


def _replay(options: argparse.Namespace) -> int:
    equal: Counter[str] = Counter()
    differing = 0
    chosen = (stream for stream in read_streams(options.file) if stream.kind in options.kinds)
    for stream in chosen:
        difference = first_difference(stream, drive(stream.events, stream.outcome.orders))
        equal[stream.kind] += not difference
        differing += bool(difference)
        if difference:
            print(difference, flush=True)
        if differing == options.differences:
            break
    print(f"{equal.total()} streams are answered equally ({dict(equal)}), {differing} are not")
    return 1 if differing or not equal else 0


def quieten() -> None:
    """Hide the log lines of the runs in this process, whose faults cause many."""
    logging.disable(logging.CRITICAL)


def run_with_build(build: Path, options: argparse.Namespace) -> int:
    """Run the same command with another build, and with the tool of its checkout if it has one."""
    has_tool = (build.parent / "tests/simulation/streams/__main__.py").exists()
    root = build.parent if has_tool else Path.cwd()
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.simulation.streams",
        options.act,
        str(options.file.resolve()),
    ]
    command += ["--seeds", options.seeds, "--kinds", *options.kinds]
    command += ["--differences", str(options.differences)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(build), str(root)))}
    return subprocess.run(command, cwd=root, env=environment, check=False).returncode
