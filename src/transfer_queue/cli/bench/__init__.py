"""`tq bench`: what the system costs on this machine, as ratios taken side by side in one run.

A module a question. Each has QUESTION, a sentence, `run(scale)`, which gives rows, and maybe a NOTE for the page that
`make bench` writes. Nothing is asserted about speed; that contents are right is.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transfer_queue.cli.common import Commands

if TYPE_CHECKING:
    from transfer_queue.cli.bench.report import Scale

QUESTIONS = (
    "kv",
    "small",
    "memory",
    "claims",
    "balance",
    "wakeup",
    "pipeline",
    "scale",
    "journal",
    "restart",
    "loader",
    "codec",
)


def add(commands: Commands) -> None:
    """Its words."""
    command = commands.add_parser(
        "bench", help="what the system costs on this machine, beside memcpy, a bare socket and an empty round trip",
        description="Runs benchmarks, each in a system of its own, and prints for each a table and a JSON line.",
    )  # fmt: skip
    command.add_argument("question", nargs="*", metavar="QUESTION", help=f"some of {', '.join(QUESTIONS)} (all)")
    command.add_argument("--quick", action="store_true", help="seconds: shows that each works; its figures mean little")
    command.add_argument("--json", action="store_true", help="only the JSON lines")
    command.set_defaults(run=run, parser=command)


def run(options: argparse.Namespace) -> int:
    """Asks the questions in turn."""
    from transfer_queue.cli.bench.report import Scale, document, line, table

    unknown = set(options.question) - set(QUESTIONS)
    if unknown:
        options.parser.error(f"no question {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    for name, seconds, rows in answers(options.question or QUESTIONS, Scale(options.quick)):
        if not options.json:
            print(f"{name}: {module(name).QUESTION} ({seconds:.0f} s)\n\n{table(rows)}\n")
        print(line(document(name, options.quick, seconds, rows)), flush=True)
    return 0


def answers(questions: list[str] | tuple[str, ...], scale: Scale) -> Iterator[tuple[str, float, list[Any]]]:
    """(question, seconds it took, rows) of each."""
    for name in questions:
        start = time.monotonic()
        rows = module(name).run(scale)
        yield name, time.monotonic() - start, rows
        gc.collect()


def module(question: str) -> Any:
    """The module of a question."""
    return importlib.import_module(f"transfer_queue.cli.bench.{question}")
