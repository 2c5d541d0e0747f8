"""`tq adopt`, and what `tq stop --discard` removes: the durable folders of systems."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfer_queue.cli.options import Commands, finish
from transfer_queue.cli.shell.terminal import duration_text, print_json
from transfer_queue.config import environment
from transfer_queue.display import count_text, printable_name, size_text
from transfer_queue.errors import AttachError, StartError

if TYPE_CHECKING:
    from transfer_queue.node.system.durable_folder import Identity


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser(
        "adopt", help="take over a durable folder that was moved or whose owner was changed",
        description="Takes over a durable folder (durability.folder) that was moved, or whose owner was changed: the "
        "next system with this folder continues with its values. Prints what the folder keeps.",
    )  # fmt: skip
    command.add_argument("folder", type=Path, metavar="FOLDER", help="the durable folder")
    finish(command, adopt)


def adopt(options: argparse.Namespace) -> int:
    """Take over a folder, and print what it keeps."""
    from transfer_queue.node.system.durable_folder import DurableFolder

    durable = DurableFolder(Path(os.path.abspath(options.folder)))
    with durable.adopt(options.name) as identity:
        content = _content(durable.folder, identity)
    if options.json:
        print_json(content)
        return 0
    print("\n".join(_lines(identity, content)))
    return 0


def _content(folder: Path, identity: Identity) -> dict[str, Any]:
    """Return what a durable folder that is not in use keeps. Reads its journal like a start."""
    from transfer_queue.journal.journal import recover
    from transfer_queue.journal.segment import ClockIdentity
    from transfer_queue.journal.terms import Terms
    from transfer_queue.node.system.durable_folder import arena_bytes, journal_bytes, used_at
    from transfer_queue.node.unit.mirror_folders import mirror_bytes

    term = Terms(folder).newest()
    partitions = recover(folder if term is None else term.folder, ClockIdentity.now()).state.partitions
    return {
        "name": identity.name, "folder": identity.folder, "arenas": identity.arenas, "disk": identity.disk,
        "units": identity.units, "created_at": identity.created_at, "used_at": used_at(identity),
        "memory": arena_bytes(identity), "journal": journal_bytes(folder), "mirror": mirror_bytes(folder),
        "partitions": {name: partition.row_count for name, partition in partitions.items()},
    }  # fmt: skip


def _lines(identity: Identity, content: dict[str, Any]) -> list[str]:
    now = time.time()
    fate = "are read from the copies on disk" if content["mirror"] else "are lost"
    missing = "" if Path(identity.arenas).is_dir() else f", which do not exist any more: their values {fate}"
    memory = f"{size_text(content['memory'])} in the arenas {identity.arenas}{missing}"
    lines = [
        f"adopted: {printable_name(identity.folder)}, of the system {printable_name(identity.name)}",
        f"  made {duration_text(now - identity.created_at, units=1)} ago, used last "
        f"{duration_text(now - content['used_at'], units=1)} ago",
        f"  {memory if identity.arenas else 'the memory of its nodes is not kept'}",
        f"  {size_text(content['journal'])} of journal"
        + (f", {size_text(content['mirror'])} of copies on disk" if content["mirror"] else ""),
        *(
            f"  partition {printable_name(name)}: {count_text(rows, 'sample')}"
            for name, rows in content["partitions"].items()
        ),
    ]
    folder = shlex.quote(f"durability.folder={identity.folder}")
    units = f" --set backend.SimpleStorage.num_data_storage_units={identity.units}" if identity.units > 1 else ""
    level = "machine" if content["mirror"] else "processes"
    start = f"tq start --name {identity.name} --set durability.values={level} --set {folder}{units}"
    return [*lines, f"start it with  {start}"]


def discard(folder: Path | None, name: str | None) -> tuple[str, int]:
    """Remove what a durable system keeps that does not run, named by its durable folder or by its name.

    Returns the folder and the number of bytes that were removed.
    """
    from transfer_queue.node.system.durable_folder import DurableFolder, arena_bytes, known_folders, remove_arenas

    if folder is None:
        folder = _folder_of(name)
    path = os.path.realpath(folder)
    durable = DurableFolder(Path(path))
    if durable.identity() is not None or durable.has_journal():
        return path, durable.discard()
    known = [identity for identity in known_folders() if identity.folder == path]
    if not known:
        raise StartError(f"{path} is not a durable folder: it has no identity.json and no journal; nothing was removed")
    nbytes = sum(arena_bytes(identity) for identity in known)  # the folder is gone, and its arenas remain
    for identity in known:
        remove_arenas(identity)
    return path, nbytes


def _folder_of(name: str | None) -> Path:
    """Return the durable folder that the system of this name used last."""
    from transfer_queue.node.system.durable_folder import known_folders
    from transfer_queue.system_folder.paths import DEFAULT_NAME

    wanted = name or environment.system_name() or DEFAULT_NAME
    folders = [identity.folder for identity in known_folders() if identity.name == wanted]
    if len(folders) == 1:
        return Path(folders[0])
    if folders:
        raise StartError(
            f"several durable folders were used by systems named {wanted!r}: {', '.join(folders)}; choose one with "
            f"--folder"
        )
    raise AttachError(
        f"no system is running under the name {wanted!r}, and no durable folder of such a system is known (tq list "
        f"shows them); name the system with --name, or its folder with --folder"
    )
