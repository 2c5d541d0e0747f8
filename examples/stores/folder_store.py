"""A complete store: each block is a file of a folder that all processes can use.

Use it as `backend: {storage_backend: "folder_store:FolderStore", options: {folder: /mnt/blocks}}`, with this file where
every process of the system can import it (PYTHONPATH).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from transfer_queue.errors import CapacityError
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.base import Piece, Store


class FolderStore(Store):
    """Blocks as files of a folder that all processes of the system can use.

    Args:
        folder: The folder; it must exist.
        capacity: The limit in bytes. Default: 0, no limit.
    """

    def __init__(self, folder: str, capacity: int = 0) -> None:
        self.folder = Path(folder)
        self.capacity = capacity

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "-")

    def write(self, key: str, data: Bytes, within: float) -> None:
        """Store one block completely, or not at all."""
        path = self._path(key)
        draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
        try:
            draft.write_bytes(data.data)
            draft.replace(path)  # complete or absent
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise CapacityError(f"{len(data)} bytes cannot be written to {path}: {error}; clear samples") from error

    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        """Copy pieces into a buffer; return the keys that are missing."""
        missing: dict[str, None] = {}
        for key, start, length, at in pieces:
            try:
                with open(self._path(key), "rb") as file:
                    file.seek(start)
                    if file.readinto(into[at : at + length].data) != length:
                        missing[key] = None
            except FileNotFoundError:
                missing[key] = None
        return list(missing)

    def remove(self, keys: Sequence[str]) -> None:
        """Remove blocks."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys whose blocks are lost."""
        return [key for key in keys if not self._path(key).exists()]
