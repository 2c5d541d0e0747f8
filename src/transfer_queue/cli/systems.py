"""`tq list`: the systems of this user on this machine, and the purpose of each."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from transfer_queue.cli.options import Commands
from transfer_queue.cli.shell.json_output import add_json, print_json
from transfer_queue.errors import TransferQueueError

if TYPE_CHECKING:
    from transfer_queue.cli.shell.terminal import Styles
    from transfer_queue.node.system.paths import SystemFolder

REPLY_SECONDS = 1.0  # how long to wait for the reply of a controller
PARALLEL = 8  # systems that are asked at the same time


class ListedSystem(msgspec.Struct, frozen=True):
    """What `tq list` knows about a system."""

    name: str
    """The name."""
    state: str
    """"running"; "silent": its controller did not reply within a second; "starting": it starts or ends; "crashed"; or
    "private": it cannot be read."""
    folder: str
    """The folder of the system."""
    words: str = ""
    """What is wrong with it; "" if nothing."""
    runtime: str = ""
    """"local" or "ray"; "" if it is not known."""
    backend: str = ""
    """Where values are stored, as `SimpleStorage`; "" if it is not known."""
    units: int | None = None
    """The number of storage units; None if it is not known."""
    pid: int | None = None
    """The process of the supervisor."""
    started_at: float | None = None
    """When the system was started, in Unix seconds."""
    starter: str = ""
    """The command that started it."""
    detached: bool = False
    """Whether it outlives the process that started it."""
    memory: int | None = None
    """The bytes of memory that its arenas hold; None if they cannot be read."""
    partitions: int | None = None
    """The number of partitions; None if the controller does not reply."""
    rows: int | None = None
    """The number of samples."""


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser(
        "list", help="the systems of this user on this machine",
        description="Prints each system of this user on this machine: whether it runs, when and by which command it "
        "was started, where it stores values, and how much memory it holds.",
    )  # fmt: skip
    add_json(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the systems."""
    found = find_systems()
    if options.json:
        print_json({"systems": found})
        return 0
    from transfer_queue.cli.shell.terminal import Styles, width_of_output

    print("\n".join(lines_of(found, time.time(), width_of_output(), Styles())))
    return 0


def find_systems() -> list[ListedSystem]:
    """Return the systems in the runtime folder, by name."""
    from transfer_queue.node.system.paths import SystemFolder, runtime_dir

    paths = [path for path in runtime_dir().iterdir() if not path.name.startswith(".") and path.is_dir()]
    folders = [SystemFolder(path) for path in sorted(paths)]
    with ThreadPoolExecutor(PARALLEL) as pool:
        return [each for each in pool.map(_look_at, folders) if each is not None]


def _look_at(system: SystemFolder) -> ListedSystem | None:
    """Return what is known of a system; None if the folder is not that of a system."""
    from transfer_queue.node.system.locks import is_alive

    name, folder = system.name, str(system.folder)
    try:
        system.check_private()
        description = system.read_description()
    except TransferQueueError as error:
        return ListedSystem(name, "private", folder, str(error))
    if not is_alive(system.alive):
        if system.key.exists():
            words = "all its processes were killed; its files remain until it is started again"
            return ListedSystem(name, "crashed", folder, words, memory=_held_memory(system))
        words = system.describe_crash().strip(" ()")
        return ListedSystem(name, "crashed", folder, words) if words else None
    if description is None:
        return ListedSystem(name, "starting", folder, "it starts or ends")
    known = ListedSystem(
        name, "silent", folder, pid=description.pid, started_at=description.started_at,
        starter=description.starter_command, detached=description.detached, memory=_held_memory(system),
        words=f"its controller did not reply within {REPLY_SECONDS:g} s; its log is {system.log('controller')}",
    )  # fmt: skip
    return _ask(known)


def _ask(known: ListedSystem) -> ListedSystem:
    """Return a system with what its controller says, if it replies in time."""
    from transfer_queue.client.control_client import ControlClient
    from transfer_queue.node.system.launcher import find

    try:
        running = find(known.folder)
        if running is None:
            return known
        with ControlClient(running) as onlooker:
            topology, settings = onlooker.topology(timeout=REPLY_SECONDS)
            status = onlooker.status(timeout=REPLY_SECONDS)
    except (TransferQueueError, OSError):
        return known
    return msgspec.structs.replace(
        known, state="running", words=status.trouble, runtime=_runtime(settings.runtime, running.node),
        backend=" ".join(settings.backends), units=len(topology.units), partitions=len(status.partitions),
        rows=sum(partition.rows for partition in status.partitions),
    )  # fmt: skip


def _runtime(setting: str, node: str) -> str:
    """Return where the system runs. A system under Ray has a name for each node."""
    return setting if setting != "auto" else "ray" if node else "local"


def _held_memory(system: SystemFolder) -> int | None:
    """Return the bytes that the arenas hold."""
    try:
        arenas = Path(os.readlink(system.arena))
    except OSError:
        return None
    nbytes = 0
    for path in arenas.rglob("*"):
        with contextlib.suppress(OSError):  # removed in the meantime
            nbytes += path.lstat().st_blocks * 512
    return nbytes


def lines_of(found: list[ListedSystem], now: float, width: int, style: Styles) -> list[str]:
    """Return the systems as text: a line for each, and a second one with its purpose and its folder."""
    from transfer_queue.cli.shell.terminal import columns_text, cut

    if not found:
        return ["no system of this user is running here; start one with `tq start`"]
    colors = {"running": "green", "silent": "red", "crashed": "red", "starting": "yellow", "private": "yellow"}
    lines: list[str] = []
    for each, line in zip(found, columns_text([_cells(each, now) for each in found], indent="")):
        before, _, after = cut(line, width).partition(f"  {each.state}")
        lines.append(f"{style(before, 'bold')}  {style(each.state, colors[each.state])}{after}")
        lines += [style(cut(f"    {text}", width), "dim") for text in _details(each)]
        if each.words:
            lines.append(style(cut(f"    {each.words}", width), "red" if each.state != "starting" else "yellow"))
    return lines


def _cells(system: ListedSystem, now: float) -> tuple[str, ...]:
    from transfer_queue.cli.shell.terminal import duration_text
    from transfer_queue.display import count_text, short_name, size_text

    rows = "" if system.partitions is None else f"{count_text(system.partitions, 'partition')}, "
    return (
        short_name(system.name, 24),
        system.state,
        "" if system.started_at is None else f"for {duration_text(now - system.started_at, units=1)}",
        "" if system.pid is None else f"pid {system.pid}",
        "" if system.memory is None else size_text(system.memory),
        rows + ("" if system.rows is None else count_text(system.rows, "sample")),
    )


def _details(system: ListedSystem) -> list[str]:
    from transfer_queue.display import count_text, printable_name

    lines = []
    parts = [system.runtime, system.backend, "" if system.units is None else count_text(system.units, "unit")]
    purpose = ", ".join(filter(None, parts))
    if system.starter:
        by = "started by `tq start`" if system.detached else f"of {printable_name(system.starter)}"
        purpose = f"{purpose}; {by}" if purpose else by
    if purpose:
        lines.append(purpose)
    lines.append(printable_name(system.folder))
    return lines
