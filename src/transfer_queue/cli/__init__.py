"""The command `tq`: one module a command, each with `add` (its words) and `run` (what it does).

`main` is the entry point. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from transfer_queue.cli import bench, dashboard, demo, doctor, explain, start, status, stop
from transfer_queue.errors import TransferQueueError

INTERRUPTED = 130  # what a shell gives a command that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 where it went well, 1 where it did not, 2 for wrong words, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["demo"]:
        return demo.run(given[1:])
    options = _parser().parse_args(given)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
    except TransferQueueError as error:
        print(f"tq: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # who read us (head, a pager) has had enough; the interpreter's own last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tq", description="A streaming data system for LLM post-training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, start, stop, status, explain, doctor, bench, dashboard):
        command.add(commands)
    return parser
