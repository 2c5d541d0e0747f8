"""`tq status`: partitions by field and task, once or over and over."""

from __future__ import annotations

import argparse
import math

from transfer_queue.cli.common import Commands, add_name, find_system
from transfer_queue.cli.status_table import as_line, table

EVERY = 2.0  # seconds between two looks of --watch
LEAST = 0.1


def add(commands: Commands) -> None:
    """Its words."""
    command = commands.add_parser("status", help="partitions by field and task, and where the logs are")
    command.add_argument(
        "--watch", nargs="?", type=_seconds, const=EVERY, metavar="SECONDS",
        help=f"look again every so often (every {EVERY:g} s), with rates, until Ctrl-C; exit 1 when the system ends",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="one JSON document; with --watch one a line")
    add_name(command)
    command.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds >= {LEAST}")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Shows the system once, or until it ends."""
    if options.watch is not None:
        from transfer_queue.cli.watch import watch

        return watch(options.name, options.watch, options.json)
    from transfer_queue.client.control_client import ControlClient

    system = find_system(options.name)
    with ControlClient(system) as onlooker:
        status = onlooker.status()
    if options.json:
        print(as_line(system, status))
    else:
        print(f"{table(status)}\n\n{system.describe()}\nlogs in {system.folder / 'logs'}")
    return 0
