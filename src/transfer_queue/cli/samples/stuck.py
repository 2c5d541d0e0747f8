"""`tq stuck`: print the samples that have not changed for some time and are not finished."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from transfer_queue.cli.options import Commands, add_name, seconds_type
from transfer_queue.cli.shell.json_output import add_json, print_json
from transfer_queue.cli.system_search import find_system

if TYPE_CHECKING:
    from transfer_queue.cli.shell.terminal import Styles
    from transfer_queue.messages.reports.samples import StuckReport, StuckSample

SECONDS = 60.0  # default of --for
LIMIT = 20  # default of --limit
SOME = 3  # exit code if there are stuck samples; 1 says that the command failed


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser(
        "stuck", help="samples that have not changed for some time and are not finished",
        description="Prints the samples whose fields and tags have not changed for some time, and that a task has not "
        "consumed or that lack a field that other samples of their partition have. The samples of one prompt "
        f"are together, with the client that changed each of them last. The exit code is {SOME} if samples are stuck.",
    )  # fmt: skip
    command.add_argument(
        "--for", dest="seconds", default=SECONDS, metavar="SECONDS",
        type=seconds_type("a number of seconds from 0 to 1e9", lambda each: 0 <= each <= 1e9),
        help=f"how long a sample has not changed (default: {SECONDS:g})",
    )  # fmt: skip
    command.add_argument("--partition", help="only samples of this partition")
    command.add_argument(
        "--limit", type=_limit, default=LIMIT, metavar="N", help=f"how many samples to print (default: {LIMIT})"
    )
    add_json(command)
    add_name(command)
    command.set_defaults(run=run)


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 10000, got {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Print the samples."""
    from transfer_queue.cli.shell.terminal import Styles, width_of_output
    from transfer_queue.client.control_client import ControlClient
    from transfer_queue.names import did_you_mean

    with ControlClient(find_system(options.name)) as onlooker:
        if options.partition is not None:
            names = [partition.name for partition in onlooker.status().partitions]
            if options.partition not in names:
                nearest = did_you_mean(options.partition, names)
                print(f"tq: partition {options.partition!r} does not exist{nearest}", file=sys.stderr)
                return 1
        report = onlooker.find_stuck(options.partition, options.seconds, options.limit)
    if options.json:
        print_json(report)
    else:
        print("\n".join(lines_of(report, width_of_output(), Styles())))
    return SOME if report.total else 0


def lines_of(report: StuckReport, width: int, style: Styles) -> Iterator[str]:
    """Iterate over the lines of the text about stuck samples."""
    from transfer_queue.cli.shell.terminal import duration_text
    from transfer_queue.display import count_text, short_name

    words = f"for {duration_text(report.older_than)} or longer"
    if not report.total:
        yield f"no sample that is not finished has been unchanged {words}"
        return
    where = ", ".join(f"{count:,} in {short_name(name)}" for name, count in list(report.partitions.items())[:4])
    where += f", and {len(report.partitions) - 4} more partitions" if len(report.partitions) > 4 else ""
    be = "is" if report.total == 1 else "are"
    yield style(f"{count_text(report.total, 'sample')} {be} unchanged {words} and not finished: {where}", "bold")
    for (partition, prompt), some in groupby(report.samples, key=lambda each: (each.partition, each.prompt)):
        yield ""
        name = f", prompt {short_name(prompt)}" if prompt else ""
        yield style(f"{short_name(partition)}{name}", "cyan")
        yield from _group_lines(list(some), report.now, width)
    left = report.total - len(report.samples)
    if left > 0:
        yield ""
        yield f"{left:,} more {'is' if left == 1 else 'are'} not shown; --limit shows more"


def _group_lines(some: list[StuckSample], now: float, width: int) -> Iterator[str]:
    from transfer_queue.cli.samples.report_text import who
    from transfer_queue.cli.shell.terminal import columns_text, cut, duration_text
    from transfer_queue.display import short_name

    wide = width > 100
    rows = []
    for each in some:
        client = each.client if wide or not each.task else ""
        writer = who(each.task, each.rank, client, 36 if wide else 18)
        age = None if each.time is None else duration_text(now - each.time, 2 if wide else 1)
        rows.append(
            (
                short_name(each.key, 40 if wide else 20) if each.key is not None else str(each.index),
                age or "since the start",
                f"by {writer}" if each.client or each.task else "",
                _lacks(each),
            )
        )
    for line in columns_text(rows, right=frozenset({1})):
        yield cut(line, width)


def _lacks(sample: StuckSample) -> str:
    """Return what is missing of a sample: fields, and tasks that have not consumed it."""
    from transfer_queue.display import listed_names
    from transfer_queue.messages.reports.samples import CLAIMED

    held = [task.name for task in sample.tasks if task.state == CLAIMED]
    waits = [task.name for task in sample.tasks if task.state != CLAIMED]
    parts = [
        f"lacks {listed_names(sample.missing, 4)}" if sample.missing else "",
        f"claimed by {listed_names(held, 4)}, not acknowledged" if held else "",
        f"not consumed by {listed_names(waits, 4)}" if waits else "",
    ]
    return "; ".join(filter(None, parts))
