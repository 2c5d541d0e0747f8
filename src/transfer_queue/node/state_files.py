"""The folder through which states of the controller go to clients that save, and come from those that load.

Requests name the files and the core has looked at the names: 32 hex digits, no path. The folder is the system's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transfer_queue.core.saving import trusted
from transfer_queue.errors import CheckpointError
from transfer_queue.journal import state_file


class StateFiles:
    """State files by name, in a folder that is there. What killed clients have left goes with the system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Where a file lies."""
        return self.folder / name

    def read(self, name: str) -> Any:
        """The tree in a file, or the exception that reading it raised; CheckpointError where its state is none.

        Anybody with the key may have written the file. It is looked at here, in the thread that reads, as that takes
        seconds for a million rows.
        """
        try:
            tree = state_file.read(self.folder / name)
            if not isinstance(tree, dict) or "state" not in tree:
                raise CheckpointError("it holds no state of a controller")
            trusted(tree["state"])
        except Exception as error:
            return error
        return tree

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        (self.folder / name).unlink(missing_ok=True)
