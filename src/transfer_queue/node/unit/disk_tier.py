"""The folder on disk to which a system moves what is cold.

    <path>/transfer_queue-disk-<uid>-<name>-<hex>/   0700; a system's own
        alive                                        locked by every process of the system (`node.system.locks`)
        unit-1/                                      the arena of a unit on disk
    <path>/.transfer_queue-disk-<uid>.lock           while somebody makes or sweeps such folders

The system removes its folder when it ends. What killed ones have left outlives even the machine's boots, so every start
removes those of this user that nobody has locked.
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
_IN_MEMORY = ("tmpfs", "ramfs")


def make_folder(system: SystemFolder, path: Path, seconds: float) -> tuple[Path, str | None]:
    """The system's folder under this path, locked; and what to warn of, if anything.

    seconds: to wait for others that start. StartError where the path cannot be used.
    """
    if not path.is_dir():
        raise StartError(f"{KEY} is {path}, which is no folder; make it, on an SSD, or choose another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StartError(f"{KEY} is {path}, which this user cannot write to; change its mode, or choose another")
    try:
        with StartLock(path / f".{_prefix()[:-1]}.lock", seconds):
            sweep(path)
            folder = system.create_offload_folder(path)
            hold_liveness(folder / "alive")
    except OSError as error:
        raise StartError(f"{KEY} is {path}, which cannot be used: {error}; choose another") from error
    kind, _ = mount_of(path)
    if kind not in _IN_MEMORY:
        return folder, None
    return folder, f"{KEY} is {path}, which is a {kind}: what is moved there stays in memory; choose a folder on an SSD"


def sweep(path: Path) -> None:
    """Removes this user's folders under the path of which no system lives. Under the lock of the path."""
    for folder in path.glob(f"{_prefix()}*"):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not is_alive(folder / "alive"):
            shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    return f"{DISK_PREFIX}{os.geteuid()}-"
