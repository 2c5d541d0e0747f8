"""The actor that owns the blocks of a RayStore: they live as long as it, whatever becomes of their writers."""

from __future__ import annotations

import os
import socket
import struct
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from transfer_queue.storage.stores.ray_store import Asked, Told, message, receive

CALLS_AT_ONCE = 16


class KeeperActor:
    """listens: the name of the socket at which storage units ask (`ray_store.Asked`): abstract, of this node."""

    def __init__(self, listens: str) -> None:
        self._life = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._held: dict[str, Any] = {}
        """Key -> reference of the block."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind("\0" + listens)
        self._socket.listen(64)
        threading.Thread(target=self._serve, name="keeper", daemon=True).start()

    def process(self) -> int:
        """The number of the actor's process on its node: it is up."""
        return os.getpid()

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
                asked = msgspec.msgpack.decode(receive(connection), type=Asked)
                connection.sendall(message(self._told(asked)))
            except (OSError, msgspec.DecodeError):
                return

    def _told(self, asked: Asked) -> Told:
        with self._lock:
            gone = [self._held.pop(key, None) for key in asked.remove]
            missing = [key for key in asked.missing if key not in self._held]
        del gone  # outside of the lock, as references call home
        return Told(missing, self._life)


def start_keeper(ray: Any, name: str, namespace: str, detached: bool, seconds: float) -> tuple[Any, dict[str, Any]]:
    """A keeper on this node; its handle, and what a `RayStore` is made with."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    context = ray.get_runtime_context()
    listens = f"tq-ray-{uuid.uuid4().hex}"
    keeper = (
        ray.remote(KeeperActor)
        .options(
            name=name, namespace=namespace, num_cpus=0, max_restarts=-1, max_concurrency=CALLS_AT_ONCE,
            lifetime="detached" if detached else None,
            scheduling_strategy=strategy(context.get_node_id(), soft=False),
        )
        .remote(listens)
    )  # fmt: skip
    ray.get(keeper.process.remote(), timeout=seconds)
    return keeper, {"address": context.gcs_address, "namespace": namespace, "actor": name, "listens": listens}


def end_keeper(ray: Any, options: Mapping[str, Any]) -> None:
    """Ends the keeper that a `RayStore` is made with, and all blocks with it."""
    try:
        ray.kill(ray.get_actor(options["actor"], namespace=options["namespace"]), no_restart=True)
    except (ValueError, KeyError, ray.exceptions.RayError):
        return  # it has ended before
