"""`tq list`: the systems of this user on this machine, and the durable folders of systems that do not run."""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from transfer_queue.cli.options import Commands
from transfer_queue.cli.shell.terminal import (
    Styles,
    add_json,
    columns_text,
    cut,
    duration_text,
    print_json,
    width_of_output,
)
from transfer_queue.display import count_text, printable_name, short_name, size_text
from transfer_queue.errors import TransferQueueError

if TYPE_CHECKING:
    from transfer_queue.node.system.durable_folder import Identity
    from transfer_queue.system_folder.paths import SystemFolder

REPLY_SECONDS = 1.0  # how long to wait for the reply of a controller
PARALLEL = 8  # systems that are asked at the same time


class ListedSystem(msgspec.Struct, frozen=True):
    """What `tq list` knows about a system."""

    name: str
    """The name."""
    state: str
    """"running"; "silent": its controller did not reply within a second; "starting": it starts or ends; "crashed";
    "kept": it does not run, and its durable folder keeps its values; or "private": it cannot be read."""
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
    durable: str = ""
    """The durable folder, which keeps its values; "" if none does."""
    journal: int | None = None
    """The bytes of the journal in the durable folder; None if there is no durable folder."""
    used_at: float | None = None
    """When its durable folder was used last, in Unix seconds; None if the system runs."""
    partitions: int | None = None
    """The number of partitions; None if the controller does not reply."""
    rows: int | None = None
    """The number of samples."""
    mirror: int | None = None
    """The bytes of the copies of values on disk, in the durable folder; None if there is no durable folder."""


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser(
        "list", help="the systems of this user on this machine",
        description="Prints each system of this user on this machine: whether it runs, when and by which command it "
        "was started, where it stores values, and how much memory it holds. The list includes durable folders that "
        "keep the values of systems that do not run (durability.values), with their size and age.",
    )  # fmt: skip
    add_json(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the systems."""
    systems = find_systems()
    if options.json:
        print_json({"systems": systems})
        return 0
    print("\n".join(lines_of(systems, time.time(), width_of_output(), Styles())))
    return 0


def find_systems() -> list[ListedSystem]:
    """Return the systems in the runtime folder, by name, and the durable folders of systems that do not run."""
    from transfer_queue.node.system.durable_folder import known_folders
    from transfer_queue.system_folder.paths import SystemFolder, runtime_dir

    paths = [path for path in runtime_dir().iterdir() if not path.name.startswith(".") and path.is_dir()]
    folders = [SystemFolder(path) for path in sorted(paths)]
    with ThreadPoolExecutor(PARALLEL) as pool:
        running = [each for each in pool.map(_look_at, folders) if each is not None]
    used = {each.durable for each in running}
    kept = [identity for identity in known_folders() if identity.folder not in used and not identity.is_in_use()]
    return running + [_kept(identity) for identity in kept]


def _kept(identity: Identity) -> ListedSystem:
    """Return a system that does not run, and whose durable folder keeps its values."""
    from transfer_queue.node.system.durable_folder import arena_bytes, journal_bytes, used_at
    from transfer_queue.node.unit.mirror_folders import mirror_bytes

    folder, remove = Path(identity.folder), f"`tq stop --discard --folder {identity.folder}`"
    if not (folder / "identity.json").exists():
        text = (
            f"its durable folder does not exist any more: if it was moved, `tq adopt` its new path; otherwise {remove} "
            f"removes its values"
        )
    elif mirror_bytes(folder):
        text = f"start it with durability.folder to continue, or remove it with {remove}"
    elif not Path(identity.arenas).is_dir():
        text = f"its values are lost, because {identity.arenas} does not exist any more; its state continues"
    else:
        text = f"start it with durability.folder to continue, or remove it with {remove}"
    return ListedSystem(
        identity.name, "kept", identity.folder, text, units=identity.units, memory=arena_bytes(identity),
        durable=identity.folder, journal=journal_bytes(folder), used_at=used_at(identity),
        mirror=mirror_bytes(folder),
    )  # fmt: skip


def _look_at(system: SystemFolder) -> ListedSystem | None:
    """Return what is known of a system; None if the folder is not that of a system."""
    from transfer_queue.node.system.durable_folder import journal_bytes
    from transfer_queue.node.unit.mirror_folders import mirror_bytes
    from transfer_queue.system_folder.liveness import is_alive

    name, folder = system.name, str(system.folder)
    try:
        system.check_private()
        description = system.read_description()
    except TransferQueueError as error:
        return ListedSystem(name, "private", folder, str(error))
    durable = description.durable if description is not None else ""
    if not is_alive(system.alive):
        if durable:
            return None  # `find_systems` lists it by its durable folder
        if system.key.exists():
            text = "all its processes were killed; its files remain until it is started again"
            return ListedSystem(name, "crashed", folder, text, memory=_held_memory(system))
        text = system.describe_crash().strip(" ()")
        return ListedSystem(name, "crashed", folder, text) if text else None
    if description is None:
        return ListedSystem(name, "starting", folder, "it starts or ends")
    known = ListedSystem(
        name, "silent", folder, pid=description.pid, started_at=description.started_at,
        starter=description.starter_command, detached=description.detached, memory=_held_memory(system),
        words=f"its controller did not reply within {REPLY_SECONDS:g} s; its log is {system.log('controller')}",
        durable=os.path.realpath(durable) if durable else "", journal=journal_bytes(Path(durable)) if durable else None,
        mirror=mirror_bytes(Path(durable)) if durable else None,
    )  # fmt: skip
    return _ask(known)


def _ask(known: ListedSystem) -> ListedSystem:
    """Return a system with what its controller says, if it replies in time."""
    from transfer_queue.client.control_client import ControlClient
    from transfer_queue.node.system.launcher import find

    running = None
    try:
        running = find(known.folder)
        if running is None:
            return known
        with ControlClient(running) as onlooker:
            topology, settings = onlooker.topology(timeout=REPLY_SECONDS)
            status = onlooker.status(timeout=REPLY_SECONDS)
    except (TransferQueueError, OSError):
        stopped = "" if running is None else running.describe_stopped()
        return msgspec.structs.replace(known, words=stopped) if stopped else known
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
    from transfer_queue.system_folder.paths import allocated_bytes

    try:
        arenas = Path(os.readlink(system.arena))
    except OSError:
        return None
    return allocated_bytes(arenas)


def lines_of(systems: list[ListedSystem], now: float, width: int, style: Styles) -> list[str]:
    """Return the systems as text: a line for each, and a second one with its purpose and its folder."""
    if not systems:
        return ["no system of this user is running here; start one with `tq start`"]
    colors = {"running": "green", "silent": "red", "crashed": "red", "starting": "yellow", "private": "yellow"}
    colors["kept"] = "cyan"
    lines: list[str] = []
    for each, line in zip(systems, columns_text([_cells(each, now) for each in systems], indent="")):
        before, _, after = cut(line, width).partition(f"  {each.state}")
        lines.append(f"{style(before, 'bold')}  {style(each.state, colors[each.state])}{after}")
        lines += [style(cut(f"    {text}", width), "dim") for text in _details(each)]
        if each.words:
            lines.append(style(cut(f"    {each.words}", width), "red" if each.state != "starting" else "yellow"))
    return lines


def _age(system: ListedSystem, now: float) -> str:
    if system.started_at is not None:
        return f"for {duration_text(now - system.started_at, units=1)}"
    return "" if system.used_at is None else f"used {duration_text(now - system.used_at, units=1)} ago"


def _cells(system: ListedSystem, now: float) -> tuple[str, ...]:
    rows = "" if system.partitions is None else f"{count_text(system.partitions, 'partition')}, "
    return (
        short_name(system.name, 24),
        system.state,
        _age(system, now),
        "" if system.pid is None else f"pid {system.pid}",
        "" if system.memory is None else size_text(system.memory),
        rows + ("" if system.rows is None else count_text(system.rows, "sample")),
    )


def _details(system: ListedSystem) -> list[str]:
    lines = []
    parts = [system.runtime, system.backend, "" if system.units is None else count_text(system.units, "unit")]
    purpose = ", ".join(filter(None, parts))
    if system.starter:
        by = "started by `tq start`" if system.detached else f"of {printable_name(system.starter)}"
        purpose = f"{purpose}; {by}" if purpose else by
    if purpose:
        lines.append(purpose)
    lines.append(printable_name(system.folder))
    if system.durable:
        journal = "" if system.journal is None else f", {size_text(system.journal)} of journal"
        copies = f", {size_text(system.mirror)} of copies on disk" if system.mirror else ""
        lines.append(f"durable folder {printable_name(system.durable)}{journal}{copies}")
    return lines
