"""The actor that owns the blocks of a RayStore. They live as long as it, even if their writers die."""

from __future__ import annotations

import os
import socket
import struct
import threading
import uuid
from typing import Any

import msgspec

from transfer_queue.storage.stores.ray_store import BlockStoreRequest, BlockStoreResponse, message, receive


class BlockStore:
    """The common part of both kinds of store actors: the blocks, and the socket for storage units."""

    def __init__(self, listens: str) -> None:
        """Listen on the abstract socket of this name, at which storage units of this node make their requests."""
        self._life = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._held: dict[str, Any] = {}
        """Key -> the block, or a reference to it."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind("\0" + listens)
        self._socket.listen(64)
        threading.Thread(target=self._serve, name="keeper", daemon=True).start()

    def process(self) -> int:
        """Return the id of the actor's process on its node."""
        return os.getpid()

    def check(self) -> None:
        """Return when the actor is up. Raises StartError if it cannot store blocks."""

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", who)[1] != os.geteuid():
                return  # an abstract socket has no permissions of its own, so another user could connect
            try:
                asked = msgspec.msgpack.decode(receive(connection), type=BlockStoreRequest)
                connection.sendall(message(self._handle_request(asked)))
            except (OSError, msgspec.DecodeError):
                return

    def _handle_request(self, asked: BlockStoreRequest) -> BlockStoreResponse:
        with self._lock:
            gone = [self._held.pop(key, None) for key in asked.remove]
            missing = [key for key in asked.missing if key not in self._held]
        self._free_blocks(gone)  # outside of the lock, because freeing a reference calls its owner
        return BlockStoreResponse(missing, self._life)

    def _free_blocks(self, gone: list[Any]) -> None:
        """Free blocks that were removed; None stands for a block that did not exist."""
        gone.clear()


class KeeperActor(BlockStore):
    """Holds references to blocks in the object store."""

    def hold(self, key: str, reference: list[Any]) -> None:
        """Keep a block that the caller has put, by a copy within the object store.

        The reference is in a list, because Ray fetches the object of an argument that is a reference itself.
        """
        import ray

        own = ray.put(ray.get(reference[0]))
        with self._lock:
            self._held[key] = own

    def references(self, keys: list[str]) -> list[Any]:
        """Return the references to these blocks; None for a block that does not exist."""
        with self._lock:
            return [self._held.get(key) for key in keys]
