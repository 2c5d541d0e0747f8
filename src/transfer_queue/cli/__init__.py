"""The command `tq`: `main` is the entry point, and each module in COMMANDS has one or two commands.

A module's `add` adds the parsers of its commands, and sets as `run` the function that executes the command. Nothing
heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from transfer_queue.cli import dashboard, demo, doctor, durable, explain, live, start_stop, status, systems, top, trace
from transfer_queue.cli.samples import show, stuck
from transfer_queue.cli.shell import completion
from transfer_queue.errors import TransferQueueError
from transfer_queue.names import did_you_mean

COMMANDS = (
    demo,
    start_stop,
    durable,
    systems,
    status,
    top,
    show,
    stuck,
    explain,
    trace,
    live,
    doctor,
    dashboard,
    completion,
)
"""The modules of the commands, in the order of `tq --help`."""

INTERRUPTED = 130  # what a shell gives a command that Ctrl-C ended
REMOVED = {"bench": "the package has no benchmarks; run `python -m benchmarks` in a checkout of the repository"}
"""Commands of earlier versions, and what to do instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line without the program's name. Default: that of this process.

    Returns:
        The exit code: 0 if the command succeeded, 1 if it failed, 2 for a usage error, 130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["demo"]:
        return demo.run(given[1:])
    parser = _parser()
    if given and given[0] in REMOVED:
        parser.error(f"unknown command {given[0]!r}: {REMOVED[given[0]]}")
    if given and not given[0].startswith("-") and given[0] not in _names(parser):
        names = _names(parser)
        nearest = did_you_mean(given[0], names)
        parser.error(f"unknown command {given[0]!r}{nearest} (the commands are: {', '.join(names)})")
    options, unknown = parser.parse_known_args(given)
    if unknown:
        _refuse(options.parser, unknown)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
    except TransferQueueError as error:
        print(f"tq: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of the pipe (head, a pager) has ended; the interpreter's own last flush must not raise an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"tq: {error}", file=sys.stderr)
        return 1
    return code


def _refuse(command: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    """Exit with a usage error that names the unknown arguments and suggests an option for the first of them."""
    known = [option for action in command._actions for option in action.option_strings]
    command.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(unknown[0], known)}")


def _names(parser: argparse.ArgumentParser) -> list[str]:
    """Return the names of all commands."""
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return list(commands.choices)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tq", description="A streaming data system for LLM post-training.")
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version of the package and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    for each in commands.choices.values():
        each.set_defaults(parser=each, top_parser=parser)
    return parser


class _ShowVersion(argparse.Action):
    """Print the version. It is looked up only then, because that takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from transfer_queue.utils.installations import version_of

        print(f"tq {version_of('transfer_queue') or '(from a source tree)'}")
        parser.exit()
