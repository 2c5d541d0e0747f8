"""The folders of the mirrors in a durable folder, with the arenas in them.

    <durability.folder>/mirror/unit-1/                 of a system whose controller no other node may take over
    <durability.folder>/mirror-<term>-<hex>/unit-0/    of one term of the controller (`journal.terms`)

A term writes to its own mirror only. The unit of an earlier one may still write to its arena, so those of earlier terms
are *retired*: they are read until the mirror of the present term has their blocks, and then removed.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from transfer_queue.journal.terms import Term
from transfer_queue.storage.arena.arena import boot_id_of
from transfer_queue.system_folder.paths import allocated_bytes

PLAIN = "mirror"
_OF_A_TERM = re.compile(r"mirror-(\d+)-[0-9a-f]+")


def mirror_folder(folder: Path, term: Term | None) -> Path:
    """Return the folder of the mirror of a term; None: of a system without terms."""
    if term is None:
        return folder / PLAIN
    return folder / f"{PLAIN}-{term.number}-{term.mark.rpartition('-')[2]}"  # the number of a failed term may be reused


def list_mirrors(folder: Path) -> list[Path]:
    """Return the folders of all mirrors in a durable folder."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and _term_of(path) is not None)


def list_arenas(folder: Path) -> list[Path]:
    """Return the folders of the complete arenas of all mirrors."""
    return [path for mirror in list_mirrors(folder) for path in sorted(mirror.glob("unit-*")) if _is_complete(path)]


def boot_ids(folder: Path) -> set[str]:
    """Return the boot ids of these arenas. Raises AttachError or OSError if one cannot be read."""
    ids = set()
    for arena in list_arenas(folder):
        with contextlib.suppress(FileNotFoundError):  # its unit has removed it in the meantime
            ids.add(boot_id_of(arena))
    return ids


def retire_arenas(folder: Path, term: Term) -> list[Path]:
    """Return the arenas of the mirrors of earlier terms than this one. Removes folders of mirrors without an arena."""
    retired: list[Path] = []
    for mirror in list_mirrors(folder):
        if (_term_of(mirror) or 0) < term.number:
            arenas = [path for path in sorted(mirror.glob("unit-*")) if _is_complete(path)]
            if not arenas:
                shutil.rmtree(mirror, ignore_errors=True)
            retired += arenas
    return retired


def mirror_bytes(folder: Path) -> int:
    """Return the bytes that the mirrors in a durable folder take on disk; 0 if there is none."""
    return sum(allocated_bytes(mirror) for mirror in list_mirrors(folder))


def remove_mirrors(folder: Path) -> None:
    """Remove all mirrors of a durable folder, which no system uses."""
    for mirror in list_mirrors(folder):
        shutil.rmtree(mirror, ignore_errors=True)


def _term_of(path: Path) -> int | None:
    """Return the number of the term of a mirror, 0 without terms; None if the path is not that of a mirror."""
    if path.name == PLAIN:
        return 0
    match = _OF_A_TERM.fullmatch(path.name)
    return None if match is None else int(match[1])


def _is_complete(arena: Path) -> bool:
    return (arena / "header").exists()
