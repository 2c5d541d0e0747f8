"""The actor that owns the blocks of a RayStore: they live as long as it, whatever becomes of their writers."""

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
    """What all keepers have in common: what they hold, and the socket.

    listens: the name of the socket at which storage units ask (`ray_store.Asked`): abstract, of this node.
    """

    def __init__(self, listens: str) -> None:
        self._life = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._held: dict[str, Any] = {}
        """Key -> the block, or what stands for it."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind("\0" + listens)
        self._socket.listen(64)
        threading.Thread(target=self._serve, name="keeper", daemon=True).start()

    def process(self) -> int:
        """The number of the actor's process on its node."""
        return os.getpid()

    def check(self) -> None:
        """The actor is up. StartError where it cannot do what it is for."""

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", who)[1] != os.geteuid():
                return  # an abstract socket has no permissions of its own
            try:
                asked = msgspec.msgpack.decode(receive(connection), type=BlockStoreRequest)
                connection.sendall(message(self._told(asked)))
            except (OSError, msgspec.DecodeError):
                return

    def _told(self, asked: BlockStoreRequest) -> BlockStoreResponse:
        with self._lock:
            gone = [self._held.pop(key, None) for key in asked.remove]
            missing = [key for key in asked.missing if key not in self._held]
        self._let_go(gone)  # outside of the lock, as references call home
        return BlockStoreResponse(missing, self._life)

    def _let_go(self, gone: list[Any]) -> None:
        """What was held, None where nothing was, is held no more."""
        gone.clear()


class KeeperActor(BlockStore):
    """Holds references to what lies in the object store."""

    def hold(self, key: str, reference: list[Any]) -> None:
        """Keeps a block that the caller has put: it is copied, from one place of the object store to another.

        The reference comes in a list, as Ray would fetch by itself what is named outright.
        """
        import ray

        own = ray.put(ray.get(reference[0]))
        with self._lock:
            self._held[key] = own

    def references(self, keys: list[str]) -> list[Any]:
        """Of these blocks; None for what is not there."""
        with self._lock:
            return [self._held.get(key) for key in keys]
