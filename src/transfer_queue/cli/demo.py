"""`tq demo`: run a GRPO training stage after stage, then streamed through a system."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from transfer_queue.cli.options import Commands


def add(commands: Commands) -> None:
    """Add the command to the help. `main` passes all arguments to the demo unchanged."""
    commands.add_parser("demo", help="a GRPO training stage after stage, then streamed (--help for its options)")


def run(arguments: list[str]) -> int:
    """Replace this process by the demo, so that Ctrl-C and the exit code are the demo's own.

    Returns only if the demo does not exist.
    """
    script = Path(__file__).resolve().parents[3] / "examples" / "grpo" / "run.py"
    if script.is_file():
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, str(script), *arguments])
    print(
        f"tq: the demo is in examples/grpo of the source tree, but {script} does not exist; clone the repository and "
        f"run `make demo` in it",
        file=sys.stderr,
    )
    return 1
