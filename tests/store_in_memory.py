"""An external store in the memory of this process, for simulated systems, whose writes can be made to fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from transfer_queue.errors import CapacityError
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.base import Piece, Store

KIND = "store_in_memory:MemoryStore"


class MemoryStore(Store):
    """All instances have the same objects."""

    objects: ClassVar[dict[str, Bytes]] = {}
    failure: ClassVar[Exception | None] = None
    """What the next writes raise, after the bytes were written."""
    unreachable: ClassVar[Exception | None] = None
    """What `missing` raises."""
    reads: ClassVar[list[int]] = []
    """The number of pieces of each read."""
    written: ClassVar[int] = 0

    def __init__(self, most: int = 0) -> None:
        self._most = most

    @property
    def capacity(self) -> int:
        return self._most

    @contextlib.contextmanager
    def buffer(self, key: str, nbytes: int) -> Iterator[Bytes]:
        yield np.empty(nbytes, np.uint8)

    def write(self, key: str, memory: Bytes, within: float) -> None:
        MemoryStore.objects[key] = memory.copy()
        MemoryStore.written += 1
        if MemoryStore.failure is not None:
            raise MemoryStore.failure

    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        MemoryStore.reads.append(len(pieces))
        names = dict.fromkeys(piece.key for piece in pieces)
        missing = [name for name in names if name not in MemoryStore.objects]
        for piece in pieces:
            if piece.key not in missing:
                found = MemoryStore.objects[piece.key][piece.start : piece.start + piece.length]
                into[piece.at : piece.at + piece.length] = found
        return missing

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            MemoryStore.objects.pop(key, None)

    def missing(self, keys: Sequence[str]) -> list[str]:
        if MemoryStore.unreachable is not None:
            raise MemoryStore.unreachable
        return [key for key in keys if key not in MemoryStore.objects]


__all__ = ["KIND", "CapacityError", "MemoryStore"]
