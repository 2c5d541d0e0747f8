"""`tq show`: print everything about one sample: its values, where they are, and what happened to it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import msgspec

from transfer_queue.cli.options import Commands, add_tokenizer, find_system_that_replies, finish
from transfer_queue.cli.shell.terminal import Styles, plain, print_json, width_of_output
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.reports.samples import LIVE, UNKNOWN, SampleReport

if TYPE_CHECKING:
    from transfer_queue.client.control_client import ControlClient
    from transfer_queue.token_text import TokenText


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser(
        "show", help="show one sample: its values, where they are, and what happened to it",
        description="Prints the fields of a sample with types, sizes and first values, which client put them and "
        "where they are stored; its tags, its group, its state for each task, and its history. The exit code is 1 if "
        "nothing is known about the sample.",
    )  # fmt: skip
    command.add_argument("partition")
    command.add_argument("sample", metavar="KEY|INDEX", help="the sample's key, or its global index")
    command.add_argument("--no-values", action="store_true", help="do not read the values, which takes some seconds")
    add_tokenizer(command, "token ids are shown as numbers")
    finish(command, run)


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    from transfer_queue.client.control_client import ControlClient

    if options.tokenizer is not None and options.no_values:
        options.parser.error(f"--tokenizer is {options.tokenizer!r}, but --no-values hides values: give only one")
    tokens = None if options.tokenizer is None else _load_tokenizer(options)
    system = find_system_that_replies(options.name)
    with ControlClient(system) as onlooker:
        _, settings = onlooker.topology()
        report = _describe(onlooker, options.partition, options.sample, settings.allow_pickle)
    if report.state == UNKNOWN and not report.history:
        print(f"tq: {report.explanation}", file=sys.stderr)
        if options.json:
            print_json({**plain(report), "values": {}})
        return 1
    values = {}
    if report.state == LIVE and report.fields and not options.no_values:
        from transfer_queue.cli.samples.report_text import read_values

        values = read_values(system, report, tokens)
    if options.json:
        print_json({**plain(report), "values": plain(values)})
        return 0
    from transfer_queue.cli.samples.report_text import lines_of

    print("\n".join(lines_of(report, values, width_of_output(), Styles())))
    return 0


def _load_tokenizer(options: argparse.Namespace) -> TokenText:
    """Return the tokenizer. Exits with a usage error if it cannot be used."""
    from transfer_queue.token_text import load_tokenizer

    try:
        return load_tokenizer(options.tokenizer)
    except InvalidArgumentError as error:
        parser: argparse.ArgumentParser = options.parser
        parser.error(str(error))


def _describe(onlooker: ControlClient, partition: str, sample: str, allow_pickle: bool) -> SampleReport:
    """Return the report about the sample with this key, or if no sample has it, with this global index."""
    report = onlooker.describe_sample(partition, None, sample, allow_pickle)
    is_index = sample.isdecimal() and sample.isascii() and int(sample) < 1 << 63
    if report.state != UNKNOWN or not is_index:
        return report
    sample_report = onlooker.describe_sample(partition, int(sample), None, allow_pickle)
    return msgspec.structs.replace(sample_report, key=sample_report.key)
