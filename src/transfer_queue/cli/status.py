"""`tq status`: print the partitions with their fields and tasks, once or repeatedly."""

from __future__ import annotations

import argparse

from transfer_queue.cli.options import Commands, add_name, find_system_that_replies, seconds_type
from transfer_queue.cli.shell.terminal import wrap
from transfer_queue.cli.status_table import Layout, TimelineFacts, format_table, json_line

EVERY = 2.0  # default of --watch: seconds between two queries
STYLES = {
    "slow": ("bold", "yellow"),
    "stopped": ("bold", "red"),
    "flowing": ("bold", "green"),
    "idle": ("bold",),
    "starting": ("bold",),
}
"""The styles of a verdict on a terminal, by its state."""
LEAST = 0.1  # the minimum of --watch, in seconds


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser("status", help="show partitions with fields and tasks, and the logs' folder")
    command.add_argument(
        "--watch", nargs="?", const=EVERY, metavar="SECONDS",
        type=seconds_type(f"a number of seconds >= {LEAST}", lambda each: each >= LEAST),
        help=f"repeat every SECONDS (default: {EVERY:g}), with rates, until Ctrl-C; exit code 1 if the system ends",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON document; with --watch one on each line")
    add_name(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the status once, or until the system ends."""
    if options.watch is not None:
        from transfer_queue.cli.watch import watch

        return watch(options.name, options.watch, options.json)
    from transfer_queue.client.control_client import ControlClient
    from transfer_queue.timeline.recording import Recording
    from transfer_queue.timeline.verdict import judge_with_account

    system, recording = find_system_that_replies(options.name), Recording()
    with ControlClient(system) as onlooker:
        onlooker.read_timeline(recording)
        status = onlooker.status()
    verdict, account = judge_with_account(recording, status)
    facts = TimelineFacts.of(account)
    if options.json:
        print(json_line(system, status, verdict, facts=facts))
        return 0
    layout = Layout.of_output()
    colors = STYLES.get(verdict.state, ())
    headline = "\n".join(layout.style(line, *colors) for line in wrap(verdict.text, layout.width))
    print(f"{headline}\n\n{format_table(status, None, facts, layout)}\n")
    print("\n".join(wrap(system.describe(), layout.width, "  ")))
    print(f"logs in {system.folder / 'logs'}")
    if system.live_address:
        print(f"shown at {system.live_address}")
    return 0
