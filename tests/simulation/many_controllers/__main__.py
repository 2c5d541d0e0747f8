"""The command: `python -m tests.simulation.many_controllers --seeds 0..200 --controllers 1..4`.

Each seed runs with each number of controllers. The first run that fails ends the program with the command that replays
it.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter

import torch

from tests.simulation.many_controllers.run import run


def _range(words: str, inclusive: bool) -> range:
    first, _, last = words.partition("..")
    return range(int(first), int(last or first) + (inclusive or not last))


def main() -> int:
    """Run the seeds of the command line. Return the exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0..200", help="runs from the first to before the second; or one seed")
    parser.add_argument("--controllers", default="1..4", help="from the first to the second number; or one number")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for controllers in _range(given.controllers, True):
        happened, reads, runs = Counter[str](), 0, 0
        for seed in _range(given.seeds, False):
            try:
                one = run(seed, controllers)
            except Exception:
                command = f"python -m tests.simulation.many_controllers --seeds {seed} --controllers {controllers}"
                print(f"{traceback.format_exc()}seed {seed} failed; to replay it:\n    {command}", flush=True)
                return 1
            happened += one.happened
            reads += one.ledger.reads
            runs += 1
        print(f"{controllers} controllers: {runs} seeds passed; {reads} values read; {dict(sorted(happened.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
