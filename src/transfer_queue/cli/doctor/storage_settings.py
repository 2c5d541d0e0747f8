"""Checks whether the storage that a file of settings describes fits this machine or container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transfer_queue.cli.doctor import machine, shared_memory
from transfer_queue.cli.doctor.report import OK, PROBLEM, WARNING, Finding
from transfer_queue.cli.options import read_conf
from transfer_queue.config.settings import Settings
from transfer_queue.display import size_text


def check(path: Path) -> Iterator[Finding]:
    """Check that the folder of the arenas exists, and that it and the memory hold one storage unit of full size."""
    settings = Settings.from_config(read_conf(path))
    chosen = shared_memory.choice()
    folder = chosen.folder if settings.arena_folder is None else Path(settings.arena_folder)
    if not folder.is_dir():
        advice = "create it, or set backend.SimpleStorage.arena_folder to a folder in memory"
        yield Finding("arena folder", PROBLEM, f"{folder} does not exist", advice, {"folder": str(folder)})
        return
    size, limit = shared_memory.file_system_space(folder)[0], machine.memory_limit()
    values = {"folder": str(folder), "size": size, "arena_bytes": settings.arena_bytes, "limit": limit}
    if settings.arena_bytes is None:
        yield Finding(
            "arena size", WARNING, f"arena_bytes is not set, so a storage unit may fill {folder} ({size_text(size)})",
            "set backend.SimpleStorage.arena_bytes below the memory of this container", values,
        )  # fmt: skip
        return
    needs = f"a storage unit may grow to {size_text(settings.arena_bytes)} (arena_bytes)"
    if settings.arena_bytes > size:
        advice = "enlarge it (the sizeLimit of the emptyDir, docker run --shm-size), or lower arena_bytes"
        yield Finding("arena size", PROBLEM, f"{needs}, but {folder} has {size_text(size)}", advice, values)
    elif limit is not None and settings.arena_bytes >= limit:
        advice = "allow more memory, or lower arena_bytes: a container that exceeds its limit is killed"
        words = f"{needs}, but this control group may only use {size_text(limit)} for all its processes"
        yield Finding("arena size", PROBLEM, words, advice, values)
    else:
        yield Finding("arena size", OK, f"{needs}; {folder} has {size_text(size)}", values=values)
