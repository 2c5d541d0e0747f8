"""`tq stop`: the end of a system."""

from __future__ import annotations

import argparse

from transfer_queue.cli.common import Commands, add_name, found


def add(commands: Commands) -> None:
    """Its words."""
    command = commands.add_parser("stop", help="stop a system")
    add_name(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Stops it, whoever started it."""
    system = found(options.name)
    system.stop()
    print(f"stopped: {system.describe()}")
    return 0
