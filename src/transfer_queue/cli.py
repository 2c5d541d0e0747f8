"""The command `tq`: demo, start, stop, status, explain."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from transfer_queue.errors import AttachError, TransferQueueError
from transfer_queue.messages import PartitionProgress, SystemStatus


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 where it went well, 1 where it did not, 2 for wrong words."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["demo"]:
        return _demo(given[1:])
    options = _parser().parse_args(given)
    try:
        return int(options.run(options))
    except TransferQueueError as error:
        print(f"tq: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tq", description="A streaming data system for LLM post-training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="a real asynchronous GRPO training through the system (--help for its options)")
    start = commands.add_parser("start", help="start a system that outlives this command")
    start.add_argument("--conf", type=Path, help="a YAML file to lay over the defaults")
    start.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one value of the conf")
    start.set_defaults(run=_start)
    stop = commands.add_parser("stop", help="stop a system")
    stop.set_defaults(run=_stop)
    status = commands.add_parser("status", help="partitions by field and task, and where the logs are")
    status.set_defaults(run=_status)
    explain = commands.add_parser("explain", help="why a sample is not handed out")
    explain.add_argument("partition")
    explain.add_argument("--index", type=int, help="the sample's global index")
    explain.add_argument("--key", help="the sample's key")
    explain.add_argument("--task", help="the task that waits for it")
    explain.add_argument("--fields", help="the fields that the task wants, separated by commas")
    explain.set_defaults(run=_explain)
    for command in (start, stop, status, explain):
        command.add_argument("--name", help="the system's name (TQ_SYSTEM, or your default one)")
    return parser


def _demo(arguments: list[str]) -> int:
    """Becomes the demo, so that Ctrl-C and its exit code are the demo's own; returns only where it is not there."""
    script = Path(__file__).resolve().parents[2] / "examples" / "grpo" / "run.py"
    if script.is_file():
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, str(script), *arguments])
    print(
        f"tq: the demo lies in examples/grpo of the source tree, and {script} is not there; clone the repository and "
        f"run `make demo` in it",
        file=sys.stderr,
    )
    return 1


def _start(options: argparse.Namespace) -> int:
    from omegaconf import DictConfig, OmegaConf

    from transfer_queue.config import Settings, merge, sampler_object
    from transfer_queue.interface import as_json
    from transfer_queue.node.launcher import start_local

    given: Any = OmegaConf.load(options.conf) if options.conf else {}
    conf = cast(DictConfig, OmegaConf.merge(given, OmegaConf.from_dotlist(options.set)))
    settings = Settings.from_config(conf)
    settings.refuse_unbuilt()
    system = start_local(
        options.name or settings.name,
        {"settings": settings.to_json(), "conf": as_json(merge(conf))},
        sampler_object(conf),
        detached=True,
        timeout=settings.start_timeout,
    )
    new = system.description.starter_pid == os.getpid()
    print(f"{'running' if new else 'runs already'}: {system.describe()}")
    print(f"attach with  TQ_ADDRESS={system.folder}  or by its name; logs in {system.folder / 'logs'}")
    return 0


def _stop(options: argparse.Namespace) -> int:
    system = _found(options.name)
    system.stop()
    print(f"stopped: {system.describe()}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from transfer_queue.client import TransferQueueClient

    system = _found(options.name)
    with TransferQueueClient(system) as client:
        print(table(client.status()))
    print(f"\n{system.describe()}\nlogs in {system.folder / 'logs'}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    from transfer_queue.client import TransferQueueClient

    fields = options.fields.split(",") if options.fields else None
    with TransferQueueClient(_found(options.name)) as client:
        print(client.explain(options.partition, options.index, options.key, options.task, fields))
    return 0


def _found(name: str | None) -> Any:
    from transfer_queue.node.launcher import find

    system = find(name)
    if system is None:
        raise AttachError("no system is running under this name; `tq start` starts one, `--name` names another")
    return system


def table(status: SystemStatus) -> str:
    """All partitions as text, one line a field and a task."""
    if not status.partitions:
        return "no partitions"
    return "\n\n".join("\n".join(_lines(partition)) for partition in status.partitions)


def _lines(partition: PartitionProgress) -> list[str]:
    notes = [f"{partition.rows} samples", f"{partition.nbytes / 2**20:.1f} MiB"]
    if partition.reserved:
        notes.append(f"{partition.reserved} pre-allocated")
    if partition.group_size is not None:
        notes.append(f"groups of {partition.group_size}")
    if partition.orphaned_groups:
        notes.append(f"{partition.orphaned_groups} orphaned groups")
    if partition.sealed:
        notes.append("sealed")
    lines = [f"{partition.name}: {', '.join(notes)}"]
    names = [field.name for field in partition.fields] + [task.name for task in partition.tasks]
    width = max(map(len, names), default=0)
    for field in partition.fields:
        lines.append(f"  field {field.name:<{width}}  produced {field.produced:>9}/{partition.rows}  {field.type}")
    for task in partition.tasks:
        waits = f"  {task.waiting} claims wait, the longest {task.longest_wait:.1f} s" if task.waiting else ""
        lines.append(f"  task  {task.name:<{width}}  consumed {task.consumed:>9}/{partition.rows}{waits}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
