"""The folder on disk to which a system offloads blocks.

    <path>/transfer_queue-disk-<uid>-<name>-<hex>/   mode 0700; belongs to one system
        alive                                        locked by every process of the system (`node.system.locks`)
        unit-1/                                      the arena of a unit on disk
    <path>/.transfer_queue-disk-<uid>.lock           while a process creates or sweeps such folders

The system removes its folder when it stops. The folders of killed systems outlive even a boot of the machine, so every
start removes those of this user that no process has locked. The folder of a durable system has another name and stays
(`node.system.durable_folder`).
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from transfer_queue.errors import StartError
from transfer_queue.node.system.locks import StartLock, hold_liveness, is_alive
from transfer_queue.node.system.paths import DISK_PREFIX, SystemFolder, mount_of

KEY = "backend.SimpleStorage.offload.path"
IN_MEMORY = ("tmpfs", "ramfs")


def make_folder(system: SystemFolder, path: Path, seconds: float) -> tuple[Path, str | None]:
    """Create and lock the system's folder under this path. Returns it with a warning for the user, or None.

    `seconds` is the time to wait for other systems that start. Raises StartError if the path cannot be used.
    """
    warning = check_path(path)
    try:
        with StartLock(path / f".{_prefix()[:-1]}.lock", seconds):
            sweep(path)
            folder = system.create_offload_folder(path)
            hold_liveness(folder / "alive")
    except OSError as error:
        raise StartError(f"{KEY} is {path}, which cannot be used: {error}; choose another folder") from error
    return folder, warning


def check_path(path: Path) -> str | None:
    """Return a warning if the path is in memory, else None. Raises StartError if it cannot be used."""
    if not path.is_dir():
        raise StartError(f"{KEY} is {path}, which is not a folder; create it on an SSD, or choose another folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StartError(f"{KEY} is {path}, which this user cannot write to; change its mode, or choose another folder")
    kind, _ = mount_of(path)
    if kind not in IN_MEMORY:
        return None
    return f"{KEY} is {path}, which is a {kind}: offloaded blocks stay in memory; choose a folder on an SSD"


def sweep(path: Path) -> None:
    """Remove this user's folders under the path that belong to no running system. Needs the lock of the path."""
    for folder in path.glob(f"{_prefix()}*"):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not is_alive(folder / "alive"):
            shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    return f"{DISK_PREFIX}{os.geteuid()}-"
