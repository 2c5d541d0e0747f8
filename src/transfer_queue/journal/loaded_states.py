"""The states of loaded checkpoints. Each is a file in the journal's folder.

    load-<32 hex digits>    a loaded state (`state_file.py`); a record names it (`core.events.records.StateLoaded`)

A thread beside the loop writes the whole file, and then the loop writes the record that names it. So the record is
small, however large the state is. If no record names a file, a controller died before it wrote the record; the next
start removes the file.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from transfer_queue.core.events.records import StateLoaded
from transfer_queue.core.state.serialization import load_state
from transfer_queue.core.state.state import State
from transfer_queue.errors import CheckpointError
from transfer_queue.journal import state_file
from transfer_queue.journal.segment import reserve_space, sync_folder

_PREFIX = "load-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")


class LoadedStates:
    """The files in one folder. If `sync` is set, a file that `add` has added survives a crash of the machine."""

    def __init__(self, folder: Path, sync: bool = True) -> None:
        self.folder = folder
        self._sync = sync

    def path(self, name: str) -> Path:
        """The path of a file."""
        return self.folder / name

    def add(self, source: Path) -> str:
        """Copy a file and return the name of the copy. A hard link is not enough: its writer may still have it open.

        Raises OSError if the file cannot be read, and CheckpointError if the copy cannot be written. Then no copy
        remains.
        """
        name = f"{_PREFIX}{uuid.uuid4().hex}"
        with open(source, "rb") as read:
            try:
                self._copy(read, self.path(name))
            except OSError as error:
                with suppress(OSError):  # then the next start removes it
                    self.remove(name)
                raise CheckpointError(
                    f"the journal in {self.folder} cannot keep a copy of it: {error}. Nothing was changed; free some "
                    f"space there and load it again"
                ) from error
        return name

    def _copy(self, source: BinaryIO, path: Path) -> None:
        with open(path, "xb", opener=_private) as file:
            reserve_space(file.fileno(), 0, max(1, os.fstat(source.fileno()).st_size))
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            if self._sync:
                os.fsync(file.fileno())
        if self._sync:
            sync_folder(self.folder)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        self.path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """The names of all files, including those that are not complete."""
        return [path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]

    def prepare(self, state: State, record: StateLoaded) -> None:
        """Read the file that a record names, if it names one, before the record is replayed on the state.

        Raises CheckpointError or OSError if the file cannot be read.
        """
        if not record.file:
            return  # the record of an older release contains the state itself
        if not _NAME.fullmatch(record.file):
            raise CheckpointError(f"{record.file[:80]!r} is not the name of a loaded state")
        tree = state_file.read(self.path(record.file))
        state.prepared = (record, tree, load_state(tree["state"], state.capacity, state.watched))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
