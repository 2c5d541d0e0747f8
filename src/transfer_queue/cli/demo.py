"""`tq demo`: a real asynchronous GRPO training through the system."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from transfer_queue.cli.common import Commands


def add(commands: Commands) -> None:
    """Its line in the help; `main` hands all its words over to the demo."""
    commands.add_parser("demo", help="a real asynchronous GRPO training through the system (--help for its options)")


def run(arguments: list[str]) -> int:
    """Becomes the demo, so that Ctrl-C and its exit code are the demo's own; returns only where it is not there."""
    script = Path(__file__).resolve().parents[3] / "examples" / "grpo" / "run.py"
    if script.is_file():
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, str(script), *arguments])
    print(
        f"tq: the demo lies in examples/grpo of the source tree, and {script} is not there; clone the repository and "
        f"run `make demo` in it",
        file=sys.stderr,
    )
    return 1
