"""`tq explain`: why a sample is not handed out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from transfer_queue.cli.common import Commands, add_name, find_system
from transfer_queue.cli.status_table import shown
from transfer_queue.messages.progress import PartitionProgress


def add(commands: Commands) -> None:
    """Its words."""
    command = commands.add_parser(
        "explain", help="why a sample is not handed out",
        description="Says why a sample is not handed out; without --index or --key, which samples are nearest to "
        "ready for --task and --fields. Exit 1 where there is no such partition.",
    )  # fmt: skip
    command.add_argument("partition")
    sample = command.add_mutually_exclusive_group()
    sample.add_argument("--index", type=int, help="the sample's global index")
    sample.add_argument("--key", help="the sample's key")
    command.add_argument("--task", help="the task that waits for it")
    command.add_argument("--fields", type=_names, help="the fields that the task wants, separated by commas")
    add_name(command)
    command.set_defaults(run=run, usage_error=command.error)


def _names(text: str) -> list[str]:
    names = [name for name in map(str.strip, text.split(",")) if name]
    if not names:
        raise argparse.ArgumentTypeError("no field is named")
    return names


def run(options: argparse.Namespace) -> int:
    """Says it in a sentence, and which of the given names nobody has used yet."""
    from transfer_queue.client.control_client import ControlClient

    if options.index is None and options.key is None and (options.task is None or options.fields is None):
        options.usage_error("which sample? give --index or --key, or both --task and --fields")
    with ControlClient(find_system(options.name)) as onlooker:
        words = onlooker.explain(options.partition, options.index, options.key, options.task, options.fields)
        known = {partition.name: partition for partition in onlooker.status().partitions}
    if options.partition not in known:
        print(f"tq: {words}", file=sys.stderr)
        return 1
    print(words)
    for note in _unused(known[options.partition], options.task, options.fields or []):
        print(note)
    return 0


def _unused(partition: PartitionProgress, task: str | None, fields: list[str]) -> Iterator[str]:
    """A name that nobody has used yet is often a wrong one."""
    produced = [field.name for field in partition.fields]
    for name in fields:
        if name not in produced:
            yield f"No sample has had a field {name!r} yet; the fields are: {_list(produced)}."
    tasks = [found.name for found in partition.tasks]
    if task is not None and task not in tasks:
        yield f"Task {task!r} has taken no sample yet, and no claim of it waits; the tasks are: {_list(tasks)}."


def _list(names: list[str]) -> str:
    return ", ".join(map(shown, names)) or "none"
