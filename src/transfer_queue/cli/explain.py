"""`tq explain`: why a sample is not handed out."""

from __future__ import annotations

import argparse

from transfer_queue.cli.common import Commands, add_name, found


def add(commands: Commands) -> None:
    """Its words."""
    command = commands.add_parser("explain", help="why a sample is not handed out")
    command.add_argument("partition")
    command.add_argument("--index", type=int, help="the sample's global index")
    command.add_argument("--key", help="the sample's key")
    command.add_argument("--task", help="the task that waits for it")
    command.add_argument("--fields", help="the fields that the task wants, separated by commas")
    add_name(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Says it in a sentence."""
    from transfer_queue.client import TransferQueueClient

    fields = options.fields.split(",") if options.fields else None
    with TransferQueueClient(found(options.name)) as client:
        print(client.explain(options.partition, options.index, options.key, options.task, fields))
    return 0
