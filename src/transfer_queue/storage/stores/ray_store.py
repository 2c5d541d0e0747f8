"""RayStore: blocks in Ray's object store, owned by an actor, so that they outlive their writers.

The actor is in `ray_runtime.store_actors`. A writer puts a block and passes the reference to the actor, which puts
it once more: an object ends with the process that has put it, and since version 2.56 Ray has no other way to transfer
its ownership. A reader asks the actor for all references of a batch at once, and copies out of the object store's
memory. The storage unit, a process without Ray, removes blocks through a socket of the actor, which is on the same
node.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from transfer_queue.errors import CapacityError, ConnectionLostError, StartError
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.base import Forks, Piece, Store, retry_attempt
from transfer_queue.storage.stores.ray_direct import DirectClient

ASK_SECONDS = 5.0  # for a reply over the socket

_forks = Forks("Ray")


class BlockStoreRequest(msgspec.Struct, frozen=True):
    """A request over the actor's socket: blocks to remove, and blocks to check."""

    remove: list[str] = []
    missing: list[str] = []


class BlockStoreResponse(msgspec.Struct, frozen=True):
    """The reply to a `BlockStoreRequest`."""

    missing: list[str]
    """The checked blocks that do not exist."""
    life: str
    """The life of the actor."""


def message(body: msgspec.Struct) -> bytes:
    """Return a message as it is sent over the socket: its length, then its bytes."""
    packed = msgspec.msgpack.encode(body)
    return len(packed).to_bytes(8, "little") + packed


def receive(connection: socket.socket) -> bytes:
    """Return one message's body; b"" at the end of the connection."""
    head = _exactly(connection, 8)
    return _exactly(connection, int.from_bytes(head, "little")) if head else b""


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(min(count - len(received), 1 << 20))
        if not piece:
            return b""
        received += piece
    return bytes(received)


class RayStore(Store):
    """See `Store`.

    Args:
        address: The Ray cluster.
        namespace: The actor's namespace.
        actor: The name of the actor that owns the blocks.
        listens: The name of its socket.
        capacity: The largest total size of all blocks in bytes; 0: Ray decides, and spills to disk when memory is full.
        direct: Bytes of the smallest block for Ray's direct transport, see `ray_direct`; 0: it is not used.
    """

    def __init__(
        self, address: str, namespace: str, actor: str, listens: str, capacity: int = 0, direct: int = 0
    ) -> None:
        self.capacity = capacity
        self._address = address
        self._namespace = namespace
        self._actor = actor
        self._listens = listens
        self._lock = threading.Lock()
        self._keeper: Any = None
        self._closed = False
        self._life = ""
        self._direct = DirectClient(direct) if direct else None

    def _connected(self) -> tuple[Any, Any]:
        """Return Ray and the actor."""
        with self._lock:
            if self._closed:
                raise ConnectionLostError("this connection to Ray's object store was closed")
            _forks.use()
            try:
                import ray
            except ImportError as error:
                raise StartError(
                    f"RayStore needs Ray, which is not installed ({error}): pip install 'transfer_queue[ray]'"
                ) from error
            if not ray.is_initialized():
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
            if self._keeper is None:
                try:
                    self._keeper = ray.get_actor(self._actor, namespace=self._namespace)
                except ValueError as error:
                    raise self._lost(error) from error
            return ray, self._keeper

    def _lost(self, error: object) -> ConnectionLostError:
        return ConnectionLostError(
            f"the actor {self._actor}, which owns the blocks, does not respond: {error}; check that the system runs"
        )

    @contextlib.contextmanager
    def buffer(self, key: str, nbytes: int) -> Iterator[Bytes]:
        """See `Store.buffer`."""
        if self._direct is None:
            with super().buffer(key, nbytes) as memory:
                yield memory
        else:
            with self._direct.buffer(self._connected()[0], nbytes) as memory:
                yield memory

    def write(self, key: str, data: Bytes, within: float) -> None:
        """See `Store.write`."""
        ray, keeper = self._connected()
        seconds = max(within, ASK_SECONDS)

        def attempt() -> Exception | None:
            try:
                if self._direct is None:
                    ray.get(keeper.hold.remote(key, [ray.put(data)]), timeout=seconds)
                elif not self._direct.write(ray, keeper, key, data, seconds):
                    return CapacityError(
                        f"no capacity for {data.nbytes} bytes in one piece in the actor {self._actor}; clear "
                        f"samples, let consumers catch up, or raise backend.RayStore.capacity"
                    )
            except ray.exceptions.ObjectStoreFullError as error:
                return CapacityError(
                    f"no capacity in Ray's object store for {data.nbytes} bytes ({error}); clear samples, let "
                    f"consumers catch up, or start Ray with a larger object_store_memory"
                )
            except (ray.exceptions.RayError, RuntimeError) as error:
                return self._lost(error)
            return None

        retry_attempt(within, attempt)

    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        """See `Store.read`."""
        ray, keeper = self._connected()
        seconds = max(within, ASK_SECONDS)
        missing: list[str] = []

        def attempt() -> Exception | None:
            try:
                if self._direct is None:
                    missing[:] = _read_references(ray, keeper, pieces, into, seconds)
                else:
                    missing[:] = self._direct.read(ray, keeper, pieces, into, seconds)
            except (ray.exceptions.RayError, RuntimeError) as error:
                return self._lost(error)
            except TimeoutError as error:  # late bytes may still arrive: do not try again with the same memory
                raise self._lost(error) from error
            return None

        retry_attempt(within, attempt)
        return missing

    def remove(self, keys: Sequence[str]) -> None:
        """See `Store.remove`."""
        self._ask(BlockStoreRequest(remove=list(keys)))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """See `Store.missing`."""
        return self._ask(BlockStoreRequest(missing=list(keys))).missing

    def life(self) -> str:
        """See `Store.life`."""
        with contextlib.suppress(ConnectionLostError):  # until the actor responds again, its life is not known
            self._life = self._ask(BlockStoreRequest(), 0.0).life
        return self._life

    def _ask(self, request: BlockStoreRequest, within: float = ASK_SECONDS) -> BlockStoreResponse:
        responses: list[BlockStoreResponse] = []

        def attempt() -> Exception | None:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(max(within, 1.0))
                    connection.connect("\0" + self._listens)
                    connection.sendall(message(request))
                    responses.append(msgspec.msgpack.decode(receive(connection), type=BlockStoreResponse))
            except (OSError, msgspec.DecodeError) as error:
                return self._lost(error)
            return None

        retry_attempt(within, attempt)
        return responses[-1]

    def close(self) -> None:
        """See `Store.close`. Ray itself stays connected, because it belongs to the program."""
        with self._lock:
            self._keeper, self._closed = None, True


def _read_references(ray: Any, keeper: Any, pieces: Sequence[Piece], into: Bytes, seconds: float) -> list[str]:
    """Read from the object store. Returns the keys that are missing."""
    wanted = {key: list(some) for key, some in groupby(pieces, key=lambda piece: piece.key)}
    references = ray.get(keeper.references.remote(list(wanted)), timeout=seconds)
    missing: list[str] = []
    for key, reference in zip(wanted, references, strict=True):
        try:
            content: Bytes | None = None if reference is None else ray.get(reference, timeout=seconds)
        except ray.exceptions.RayError:  # the owner or its node has died
            content = None
        if content is None:
            missing.append(key)
            continue
        for piece in wanted[key]:
            into[piece.at : piece.at + piece.length] = content[piece.start : piece.start + piece.length]
    return missing
