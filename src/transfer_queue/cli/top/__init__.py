"""`tq top`: show on the full terminal where a training waits, and refresh it every second."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import threading

from transfer_queue.cli.options import Commands, add_name, find_system_that_replies, seconds_type

EVERY = 1.0  # default of --every: seconds between two refreshes
HANG_UP = 128 + signal.SIGHUP  # exit code if the terminal is closed
LEAST = 0.2  # the minimum of --every, in seconds


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser(
        "top", help="show where a training waits, every second: verdict, stages, waits, partitions, memory, load",
        description="Shows on the full terminal where a training waits: the verdict, the stages with their rates, "
        "ranks and queues, the fields that they wait for, the partitions, the memory, and the load of the controller. "
        "Enter opens a row, ? shows all keys, q quits. Needs the extra [top].",
    )  # fmt: skip
    command.add_argument(
        "--every", default=EVERY, metavar="SECONDS", help=f"seconds between refreshes ({EVERY:g})",
        type=seconds_type(f"a number of seconds >= {LEAST}", lambda each: each >= LEAST),
    )  # fmt: skip
    command.add_argument("--light", action="store_true", help="begin with colors for a light terminal; t changes them")
    add_name(command)
    command.set_defaults(run=run)


def _end_without_terminal(failure: threading.ExceptHookArgs) -> None:
    """End the process if the thread that writes to the terminal fails. The main thread would wait for it forever."""
    if isinstance(failure.exc_value, OSError):
        os._exit(HANG_UP)
    threading.__excepthook__(failure)


def run(options: argparse.Namespace) -> int:
    """Show the system until the user quits."""
    if importlib.util.find_spec("textual") is None:
        print(
            "tq: tq top needs Textual, which is not installed; run: pip install 'transfer_queue[top]'", file=sys.stderr
        )
        return 1
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        print("tq: tq top needs a terminal; for a pipe or a file use `tq status --watch`", file=sys.stderr)
        return 1
    system = find_system_that_replies(options.name)
    from transfer_queue.cli.top.app import TopApp
    from transfer_queue.cli.top.follower import Follower

    signal.signal(signal.SIGHUP, lambda *_: os._exit(HANG_UP))
    threading.excepthook = _end_without_terminal
    app = TopApp(Follower(options.name, system, options.every), options.every, options.light)
    code = app.run()
    return int(app.return_code or 0) if code is None else code
