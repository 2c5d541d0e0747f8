"""Files that only this user can access, and files and folders that survive a failure of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def no_link(path: str, flags: int) -> int:
    """Open a file of a system: refuses a link, and creates files that only this user can access."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def write_private(path: Path, content: bytes, mode: str = "xb", sync: bool = False) -> None:
    """Write a private file. `sync`: it is on the disk when this returns, but maybe not its name."""
    with open(path, mode, opener=no_link) as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def replace_private(path: Path, content: bytes, draft: str = "", sync: bool = False) -> None:
    """Write a private file atomically in place of the one that is there.

    Args:
        path: The file.
        content: Its content.
        draft: The name under which it is written. A file of this name is removed. Default: a name of this process.
        sync: Whether the file and its name are on the disk when this returns.
    """
    written = path.with_name(draft or f"{path.stem}.{os.getpid()}")
    written.unlink(missing_ok=True)
    try:
        write_private(written, content, sync=sync)
        written.replace(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the folder's entries are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
