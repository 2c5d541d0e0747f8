"""What a test run leaves behind: processes, descriptors and files, mostly counted from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

OWNER = "system"  # in a folder of arenas: a link to the folder of its system

# multiprocessing keeps these two until its process ends.
_OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def processes_of(runtime_dir: Path) -> list[psutil.Process]:
    """The processes that were started with this TQ_RUNTIME_DIR, and those forked from here."""
    here = psutil.Process()
    own = {here.pid, *(parent.pid for parent in here.parents())}
    mine = {child.pid: child for child in here.children(recursive=True)}
    variable = f"TQ_RUNTIME_DIR={runtime_dir}".encode()
    for pid in psutil.pids():  # read here, as psutil takes several times as long for each
        with contextlib.suppress(OSError, psutil.Error):  # it ended, or is not ours to look at
            if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                mine[pid] = psutil.Process(pid)
    return [process for pid, process in mine.items() if pid not in own and _counts(process)]


def _counts(process: psutil.Process) -> bool:
    try:
        # what has ended and waits for its parent to ask holds nothing any more
        dead = process.status() == psutil.STATUS_ZOMBIE
        return not dead and not (_is_of_python(process) and not _is_of_python(process.parent()))
    except psutil.Error:
        return False


def _is_of_python(process: psutil.Process | None) -> bool:
    """What the fork server has forked looks like it, and is none of Python's: its parent looks so, too."""
    return process is not None and any(part in argument for argument in process.cmdline() for part in _OF_PYTHON)


def wait_for_none(runtime_dir: Path, seconds: float) -> list[str]:
    """The processes still there after so long, as text; they are ended."""
    _, alive = psutil.wait_procs(processes_of(runtime_dir), timeout=seconds)
    shown = [f"{process.pid} {_line(process)}" for process in alive]
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=seconds)
    return shown


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:300]
    except psutil.Error:
        return "(ended)"


def arenas(folder: Path) -> set[Path]:
    """The folders of arenas in shared memory that were made by the systems in this folder, and no others.

    folder: of one system, or a TQ_RUNTIME_DIR.
    """
    owners = {path: path / OWNER for path in Path("/dev/shm").glob("transfer_queue-*")}
    return {path for path, owner in owners.items() if _is_within(owner, folder)}


def _is_within(link: Path, folder: Path) -> bool:
    try:
        target = Path(os.readlink(link))
    except OSError:  # it is not one of ours, or has gone meanwhile
        return False
    return folder in (target, *target.parents)


def abandoned_for(folders: Callable[[], set[Path]], seconds: float) -> list[str]:
    """Those of the folders that are abandoned for so long: one that another run is just making is not."""
    limit = time.monotonic() + seconds
    left = set(abandoned(folders()))
    while left and time.monotonic() < limit:
        time.sleep(0.1)
        left &= set(abandoned(folders()))
    return sorted(left)


def abandoned(folders: set[Path]) -> list[str]:
    """Those of the folders that still exist and that no living process maps."""
    maps = []
    for process in psutil.process_iter():
        try:
            maps.append(Path(f"/proc/{process.pid}/maps").read_text("utf-8", "replace"))
        except OSError:  # it ended, or is not ours to look at
            continue
    return sorted(
        str(folder) for folder in folders if folder.exists() and not any(f"{folder}/" in text for text in maps)
    )


def descriptors() -> set[tuple[str, str]]:
    """The descriptors of this process: the number and the file or socket of each."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, as that of the folder was
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def opened_for(before: set[tuple[str, str]], seconds: float = 10.0) -> list[tuple[str, str]]:
    """The descriptors that were opened since, and that stay open for so long.

    What other tests have left does not change it: neither garbage that closes descriptors, nor a thread that opens one
    and closes it again.
    """
    limit = time.monotonic() + seconds
    left = descriptors() - before
    while left and time.monotonic() < limit:
        time.sleep(0.002)
        left &= descriptors()
    return sorted(left)


def files_in(folder: Path) -> list[str]:
    """Every file, socket and folder below the folder, relative to it."""
    return sorted(os.path.relpath(path, folder) for path in folder.rglob("*"))
