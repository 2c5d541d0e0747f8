"""`tq dashboard`: print the dashboard for Grafana."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transfer_queue.cli.options import Commands

FILE = Path(__file__).resolve().parent.parent / "metrics" / "grafana.json"


def add(commands: Commands) -> None:
    """Its words."""
    command = commands.add_parser("dashboard", help="the Grafana dashboard as JSON (tq dashboard > tq.json)")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the dashboard."""
    sys.stdout.write(FILE.read_text())
    return 0
