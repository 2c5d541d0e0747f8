"""Checks of the folder in which a system would store samples, and of its file system."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transfer_queue.cli.doctor import machine
from transfer_queue.cli.doctor.report import OK, PROBLEM, WARNING, Finding
from transfer_queue.display import size_text
from transfer_queue.node.system.paths import ARENA_PREFIX, DURABLE_PREFIX, allocated_bytes, mount_of
from transfer_queue.storage.arena.arena import LEAST_SHARED_MEMORY, FolderChoice, choose_folder

_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
SHARED_MEMORY = Path("/dev/shm")
_PROBE = 64 * 1024  # bytes that are allocated to see whether that works


def choice() -> FolderChoice:
    """Return the folder that a system of this user would choose, by the system's own rule."""
    return choose_folder()


def file_system_space(folder: Path) -> tuple[int, int]:
    """Return the total and the free bytes of the file system for this user. A tmpfs without a size has all memory."""
    found = os.statvfs(folder)
    if found.f_blocks == 0:
        return machine.memory()
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def held(folder: Path) -> int:
    """Return the bytes that arenas of this user hold in a folder."""
    nbytes = 0
    for pattern in (f"{ARENA_PREFIX}{os.geteuid()}-*", f"{DURABLE_PREFIX}*"):
        for arenas in folder.glob(pattern):
            with contextlib.suppress(OSError):  # removed in the meantime
                nbytes += allocated_bytes(arenas) if arenas.lstat().st_uid == os.geteuid() else 0
    return nbytes


def allocation_error(folder: Path) -> OSError | None:
    """Return the error of allocating space ahead in this folder; None if it works. No file is left."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, _PROBE)
    except OSError as error:
        return error
    return None


def huge_pages() -> str:
    """Return the kernel's setting of huge pages in shared memory: "never", "advise", ..., or "unknown"."""
    try:
        chosen = re.search(r"\[(\w+)\]", _HUGE.read_text("ascii"))
    except OSError:
        return "unknown"
    return chosen[1] if chosen else "unknown"


def check() -> Iterator[Finding]:
    """Check the folder, its size against the memory that may be used, allocation, and huge pages."""
    chosen = choice()
    folder = chosen.folder
    if not folder.is_dir():
        yield Finding(
            "folder", PROBLEM, f"{folder} does not exist", "set TMPDIR, or backend.SimpleStorage.arena_folder"
        )
        return
    full = _full_of_samples()
    if full is not None:
        yield full
        return
    kind, options = mount_of(folder)
    size, free = file_system_space(folder)
    yield _folder(chosen, kind, size, free)
    limit = machine.memory_limit()
    if chosen.warning is None and limit is not None and limit < size:
        yield Finding(
            "folder against memory", WARNING,
            f"samples may grow to {size_text(size)}, but this control group may only use {size_text(limit)}",
            "a system that grows beyond that is killed: set backend.SimpleStorage.arena_bytes to less",
            {"size": size, "limit": limit},
        )  # fmt: skip
    yield _allocation(folder)
    mounted = next((option[5:] for option in options if option.startswith("huge=")), "never")
    words = f"the mount says {mounted}, the kernel {huge_pages()}"
    yield Finding("huge pages", OK, f"{words} (not needed)", values={"mount": mounted, "kernel": huge_pages()})


def _full_of_samples() -> Finding | None:
    """Return a warning if shared memory has little space only because running systems use it; None if not.

    That is no problem of this machine: a container that is restarted for it loses the samples.
    """
    if not SHARED_MEMORY.is_dir():
        return None
    (size, free), samples = file_system_space(SHARED_MEMORY), held(SHARED_MEMORY)
    if free >= LEAST_SHARED_MEMORY or free + samples < LEAST_SHARED_MEMORY:
        return None
    words = f"{SHARED_MEMORY}, {size_text(size)}, {size_text(free)} free, {size_text(samples)} used by systems"
    values = {"folder": str(SHARED_MEMORY), "size": size, "free": free, "held": samples}
    return Finding("folder", WARNING, words, "tq status shows which samples could be cleared", values)


def _folder(chosen: FolderChoice, kind: str, size: int, free: int) -> Finding:
    words = f"{chosen.folder} ({kind}), {size_text(size)}, {size_text(free)} free"
    values = {"folder": str(chosen.folder), "type": kind, "size": size, "free": free, "fallback": bool(chosen.warning)}
    if free < LEAST_SHARED_MEMORY:
        little = f"samples need at least {size_text(LEAST_SHARED_MEMORY)}: free some, or set TMPDIR"
        advice = "; ".join(filter(None, (chosen.warning, little)))
        return Finding("folder", PROBLEM, words, advice, values)
    if chosen.warning is not None:
        return Finding("folder", WARNING, words, chosen.warning, values)
    return Finding("folder", OK, words, values=values)


def _allocation(folder: Path) -> Finding:
    error = allocation_error(folder)
    if error is None:
        return Finding("allocation ahead", OK, "posix_fallocate works there", values={"works": True})
    advice = "if it is not supported, zeros are written instead, which is slower; otherwise follow the error"
    return Finding("allocation ahead", WARNING, f"posix_fallocate fails there: {error}", advice, {"works": False})


def temporary() -> Path:
    """Return the folder of temporary files."""
    return Path(tempfile.gettempdir())
