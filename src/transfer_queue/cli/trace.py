"""`tq trace`: write what happened in the last seconds as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from transfer_queue.cli.options import Commands, find_system_that_replies, finish, seconds_type
from transfer_queue.cli.shell.terminal import print_json

LAST = 300.0  # default of --last, in seconds


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser(
        "trace", help="write what each rank waited for as a trace for Perfetto",
        description="Writes a trace of the last seconds: a track for each task and rank with the times in which it "
        "waited and worked, its claims, its puts and gets with their bytes, and how many samples queued. Open the file "
        "at https://ui.perfetto.dev or chrome://tracing.",
    )  # fmt: skip
    command.add_argument("file", type=Path, help="the file to write, for example trace.json; it is replaced")
    command.add_argument(
        "--last", default=LAST, metavar="SECONDS", help=f"how many seconds to write (default: {LAST:g})",
        type=seconds_type("a positive number of seconds", lambda each: each > 0),
    )  # fmt: skip
    finish(command, run, "print what was written as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Write the trace, completely or not at all."""
    from transfer_queue.client.control_client import ControlClient
    from transfer_queue.timeline.recording import Recording
    from transfer_queue.timeline.trace import trace_json

    recording = Recording(options.last)
    with ControlClient(find_system_that_replies(options.name)) as onlooker:
        onlooker.read_timeline(recording)
    written = options.file.with_name(f".{options.file.name}.{os.getpid()}")
    try:
        written.write_bytes(trace_json(recording))
        written.replace(options.file)
    finally:
        written.unlink(missing_ok=True)
    if options.json:
        print_json({"file": str(options.file), "events": len(recording.events), "gaps": len(recording.gaps)})
        return 0
    print(f"wrote {len(recording.events)} events to {options.file}; open it at https://ui.perfetto.dev")
    if recording.gaps:
        print(f"tq: the trace has {len(recording.gaps)} gaps, in which the controller restarted", file=sys.stderr)
    return 0
