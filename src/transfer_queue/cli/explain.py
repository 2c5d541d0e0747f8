"""`tq explain`: print why a task does not get a sample."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from transfer_queue.cli.options import Commands, find_system_that_replies, finish
from transfer_queue.cli.shell.terminal import is_terminal, print_json, sentence_lines, width_of_output, wrap
from transfer_queue.display import printable_name
from transfer_queue.messages.reports.progress import PartitionProgress, without_repeated_losses
from transfer_queue.names import nearest


def add(commands: Commands) -> None:
    """Its words."""
    command = commands.add_parser(
        "explain", help="why a task does not get a sample",
        description="Prints why a task does not get a sample. Without --index or --key: which samples are nearest to "
        "ready for --task. If a stage is slow or has stopped, the last line is the verdict. Exit code 1 "
        "if the partition does not exist.",
    )  # fmt: skip
    command.add_argument("partition")
    sample = command.add_mutually_exclusive_group()
    sample.add_argument("--index", type=int, help="the sample's global index")
    sample.add_argument("--key", help="the sample's key")
    command.add_argument("--task", help="the task that waits for it")
    command.add_argument(
        "--fields",
        type=_names,
        help="the fields that the task asks for, separated by commas (default: those of its waiting claim)",
    )
    finish(command, run)


def _names(text: str) -> list[str]:
    names = [name for name in map(str.strip, text.split(",")) if name]
    if not names:
        raise argparse.ArgumentTypeError("must contain at least one field name, got none")
    return names


def run(options: argparse.Namespace) -> int:
    """Print the reason, which of the given names are unknown in the partition, and the verdict if it names a cause."""
    from transfer_queue.client.control_client import ControlClient
    from transfer_queue.timeline.recording import Recording
    from transfer_queue.timeline.verdict import SLOW, STOPPED, judge

    if options.index is None and options.key is None and options.task is None:
        options.parser.error("names no sample and no task: give --index or --key for a sample, or --task for a claim")
    recording = Recording()
    with ControlClient(find_system_that_replies(options.name)) as onlooker:
        explanation = onlooker.explain(options.partition, options.index, options.key, options.task, options.fields)
        onlooker.read_timeline(recording)
        status = onlooker.status()
    known = {partition.name: partition for partition in status.partitions}
    exists = options.partition in known
    notes = list(_unused(known[options.partition], options.task, options.fields or [])) if exists else []
    verdict = judge(recording, status)
    notes += [without_repeated_losses(verdict.text, explanation)] if verdict.state in (SLOW, STOPPED) else []
    if options.json:
        print_json({"partition": options.partition, "exists": exists, "explanation": explanation, "notes": notes})
    elif exists:
        width = width_of_output() if is_terminal() else None
        lines = explanation if width is None else sentence_lines(explanation)
        print("\n".join(line for part in [lines, *notes] for line in wrap(part, width, "  ")))
    else:
        print(f"tq: {explanation}", file=sys.stderr)
    return 0 if exists else 1


def _unused(partition: PartitionProgress, task: str | None, fields: list[str]) -> Iterator[str]:
    """Yield a sentence for each name that was never used, because it is often a wrong one."""
    produced = [field.name for field in partition.fields]
    for name in fields:
        if name not in produced:
            yield f"No sample has a field {name!r}{_meant(name, produced)}; the fields are: {_list(produced)}."
    tasks = [each.name for each in partition.tasks]
    if task is not None and task not in tasks:
        begin = f"Task {task!r}{_meant(task, tasks)} has not received a sample yet, and no claim of it waits"
        yield f"{begin}; the tasks are: {_list(tasks)}."


def _meant(name: str, known: list[str]) -> str:
    """Return a question in parentheses that names the known name that is nearest to an unknown one; "" if none is."""
    similar = nearest(name, known)
    return f" (did you mean {similar[0]!r}?)" if similar else ""


def _list(names: list[str]) -> str:
    return ", ".join(map(printable_name, names)) or "none"
