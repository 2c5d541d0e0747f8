"""The folder through which the controller's states get to clients that save and come from clients that load.

Requests contain names of files, which the core has checked: 32 hex digits, no path. The folder belongs to the system.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from transfer_queue.core.checkpoints import SavedState, build_saved_state, check_file_name
from transfer_queue.journal import state_file
from transfer_queue.journal.loaded_states import LoadedStates


class StateFiles:
    """State files by name, in an existing folder. Files that killed clients leave are removed with the system.

    `loaded` has the journal's files of loaded states; None: there is no journal.
    """

    def __init__(self, folder: Path, loaded: LoadedStates | None = None) -> None:
        self.folder = folder
        self._loaded = loaded

    def path(self, name: str) -> Path:
        """Return the path of a file."""
        return self.folder / name

    def read(self, name: str, watched: Iterable[str] = ()) -> SavedState | Exception:
        """Return the state in a file, or the exception that reading it raised: CheckpointError for an invalid state.

        Any client with the key may have written the file. This thread copies it for the journal and checks it, because
        that takes seconds for a million rows. If the file cannot be read, no copy remains.
        """
        kept = ""
        try:
            path = self.folder / name
            if self._loaded is not None:
                kept = self._loaded.add(path)
                path = self._loaded.path(kept)
            return build_saved_state(state_file.read(path), kept, watched)
        except Exception as error:
            if kept:
                self.forget(kept)
            return error

    def forget(self, kept: str) -> None:
        """Remove the journal's copy of a file whose state is not loaded."""
        assert self._loaded is not None
        with suppress(OSError):  # the next start removes it
            self._loaded.remove(kept)

    def piece(self, name: str, start: int, length: int) -> tuple[int | None, bytes]:
        """Return how many bytes a file has from `start` on, None if it does not exist, and `length` of these bytes."""
        try:
            with open(self.folder / check_file_name(name), "rb") as file:
                left = os.fstat(file.fileno()).st_size - start
                return max(0, left), os.pread(file.fileno(), length, start) if length > 0 else b""
        except FileNotFoundError:
            return None, b""

    def put(self, name: str, start: int, data: memoryview | bytes) -> None:
        """Write into a file, which is created if it does not exist. Raises OSError as the file system does."""
        file = os.open(
            self.folder / check_file_name(name), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(file, data[written:], start + written)
        finally:
            os.close(file)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        (self.folder / name).unlink(missing_ok=True)
