"""`tq status`: partitions by field and task."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from transfer_queue.cli.common import Commands, add_name, found
from transfer_queue.messages import PartitionProgress, SystemStatus


def add(commands: Commands) -> None:
    """Its words."""
    command = commands.add_parser("status", help="partitions by field and task, and where the logs are")
    add_name(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Shows the system once."""
    from transfer_queue.client import TransferQueueClient

    system = found(options.name)
    with TransferQueueClient(system) as client:
        print(table(client.status()))
    print(f"\n{system.describe()}\nlogs in {system.folder / 'logs'}")
    return 0


def table(status: SystemStatus) -> str:
    """All partitions as text, one line a field and a task."""
    if not status.partitions:
        return "no partitions"
    return "\n\n".join("\n".join(_lines(partition)) for partition in status.partitions)


NOTES: tuple[Callable[[PartitionProgress], str | None], ...] = (
    lambda p: f"{p.rows} samples",
    lambda p: f"{p.nbytes / 2**20:.1f} MiB",
    lambda p: f"{p.reserved} pre-allocated" if p.reserved else None,
    lambda p: f"groups of {p.group_size}" if p.group_size is not None else None,
    lambda p: f"{p.orphaned_groups} orphaned groups" if p.orphaned_groups else None,
    lambda p: "sealed" if p.sealed else None,
)
"""What stands beside a partition's name, in this order; None: there is nothing to say of it."""


def _lines(partition: PartitionProgress) -> list[str]:
    notes = [words for words in (note(partition) for note in NOTES) if words]
    lines = [f"{partition.name}: {', '.join(notes)}"]
    names = [field.name for field in partition.fields] + [task.name for task in partition.tasks]
    width = max(map(len, names), default=0)
    for field in partition.fields:
        lines.append(f"  field {field.name:<{width}}  produced {field.produced:>9}/{partition.rows}  {field.type}")
    for task in partition.tasks:
        waits = f"  {task.waiting} claims wait, the longest {task.longest_wait:.1f} s" if task.waiting else ""
        lines.append(f"  task  {task.name:<{width}}  consumed {task.consumed:>9}/{partition.rows}{waits}")
    return lines
