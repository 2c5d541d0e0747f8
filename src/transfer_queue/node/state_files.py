"""The folder through which states of the controller go to clients that save, and come from those that load.

Requests name the files and the core has looked at the names: 32 hex digits, no path. The folder is the system's own.
"""

from __future__ import annotations

import os
from pathlib import Path

from transfer_queue.core.checkpoints import SavedState, built, checked_name
from transfer_queue.journal import state_file


class StateFiles:
    """State files by name, in a folder that is there. What killed clients have left goes with the system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Where a file lies."""
        return self.folder / name

    def read(self, name: str) -> SavedState | Exception:
        """Return the state in a file, or the exception that reading it raised: CheckpointError for an invalid state.

        Anybody with the key may have written the file. It is looked at here, in the thread that reads, as that takes
        seconds for a million rows.
        """
        try:
            return built(state_file.read(self.folder / name))
        except Exception as error:
            return error

    def piece(self, name: str, start: int, length: int) -> tuple[int | None, bytes]:
        """How many bytes a file has from `start` on, None where it is not there, and `length` of them."""
        try:
            with open(self.folder / checked_name(name), "rb") as file:
                left = os.fstat(file.fileno()).st_size - start
                return max(0, left), os.pread(file.fileno(), length, start) if length > 0 else b""
        except FileNotFoundError:
            return None, b""

    def put(self, name: str, start: int, data: memoryview | bytes) -> None:
        """Writes into a file, which is made where it is not there. OSError where the disk refuses."""
        file = os.open(self.folder / checked_name(name), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(file, data[written:], start + written)
        finally:
            os.close(file)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        (self.folder / name).unlink(missing_ok=True)
