"""The actors that own the blocks of a RayStore, and their start and end on this node.

Blocks live as long as their actor, even if their writers die. `KeeperActor` has references to blocks that Ray stores.
`DirectKeeperActor` has the blocks in its own registered memory: a writer offers its memory, and the actor reads it at
once. The actor offers its memory to a reader, which reads it without the actor, and then asks whether the blocks that
it read were still there. So a reader that is killed leaves no state behind. Processes without the transport call `keep`
and `pieces`.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from transfer_queue.errors import StartError
from transfer_queue.storage.arena.extent_table import GRANULE, ExtentTable, round_up
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.ray_direct import HOW, LEAST, NO_SPACE, NixlTransport, Offer, load, transport
from transfer_queue.storage.stores.ray_store import BlockStoreRequest, BlockStoreResponse, message, receive
from transfer_queue.wire.buffers.copies import allocate

Wanted = Sequence[tuple[str, int, int]]  # (key, start, length) of each piece


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
                request = msgspec.msgpack.decode(receive(connection), type=BlockStoreRequest)
                connection.sendall(message(self._handle_request(request)))
            except (OSError, msgspec.DecodeError):
                return

    def _handle_request(self, request: BlockStoreRequest) -> BlockStoreResponse:
        with self._lock:
            removed = [self._held.pop(key, None) for key in request.remove]
            missing = [key for key in request.missing if key not in self._held]
        self._free_blocks(removed)  # outside of the lock, because freeing a reference calls its owner
        return BlockStoreResponse(missing, self._life)

    def _free_blocks(self, blocks: list[Any]) -> None:
        """Free blocks that were removed; None stands for a block that did not exist."""
        blocks.clear()


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


@dataclass(frozen=True)
class RegisteredBlock:
    """A stored block."""

    memory: Bytes
    stamp: int
    """Identifies this content of the key."""
    attempt: int
    """The number of the writer's attempt."""
    extent: int | None = None
    """The number of its extent in the arena; None if it is not in the arena."""
    offset: int = 0
    """The offset of its extent."""


def arena_bytes(capacity: int) -> int:
    """Return the arena's size for blocks of `capacity` bytes: an eighth more, because free space is fragmented."""
    return round_up(capacity + capacity // 8)


class DirectKeeperActor(BlockStore):
    """A `BlockStore` whose blocks are in memory that other processes read directly."""

    def __init__(self, listens: str, capacity: int, least: int = LEAST) -> None:
        """Make a store for `capacity` bytes, of which blocks of at least `least` bytes are read directly."""
        super().__init__(listens)
        self._least = least
        self._stamps = itertools.count(1)
        self._table = ExtentTable()
        self._table.grow(arena_bytes(capacity) // GRANULE)
        self._making = threading.Lock()
        self._transport: NixlTransport | None = None
        self._failure = ""
        try:
            load()
            self._arena = allocate(self._table.held)
        except MemoryError as error:
            self._failure = f"{error}; lower backend.RayStore.capacity"
        except ImportError as error:
            self._failure = f"nixl cannot be used ({error}): {HOW}"

    def check(self) -> None:
        """Raise StartError if the transport or the memory is not available."""
        if self._failure:
            raise StartError(f"backend.RayStore.direct_transport: {self._failure}")

    def _nixl(self) -> NixlTransport:
        """Return the transport. It is created at its first use, because it takes a core from then on."""
        with self._making:
            if self._transport is None:
                made = transport()
                made.register(self._arena)
                self._transport = made
            return self._transport

    def keep(self, key: str, data: Bytes, attempt: int) -> bool:
        """Store a copy of a block. Returns False if there is no space."""
        if data.nbytes < self._least:
            self._hold(key, RegisteredBlock(np.array(data), next(self._stamps), attempt))
            return True
        block = self._lease(data.nbytes, attempt)
        if block is None:
            return False
        block.memory[:] = data
        self._hold(key, block)
        return True

    def fetch(self, key: str, nbytes: int, offer: Offer, attempt: int, within: float) -> str:
        """Store the block that a writer offers. Returns "", NO_SPACE, or why it could not be read within this time."""
        block = self._lease(nbytes, attempt)
        if block is None:
            return NO_SPACE
        try:
            self._nixl().fetch(offer, self._arena, [(block.offset, nbytes)], within)
        except TimeoutError as error:  # late bytes may still arrive, so this space is not used again
            return f"the actor received nothing from the writer: {error}"
        except Exception as error:  # an error of Ray or of the library
            self._free_blocks([block])
            return f"the actor cannot read the writer's memory: {error}"
        self._hold(key, block)
        return ""

    def _lease(self, nbytes: int, attempt: int) -> RegisteredBlock | None:
        with self._lock:
            extent = self._table.lease(1, nbytes)
        if extent is None:
            return None
        memory = self._arena[extent.offset : extent.offset + nbytes]
        return RegisteredBlock(memory, next(self._stamps), attempt, extent.number, extent.offset)

    def _hold(self, key: str, block: RegisteredBlock) -> None:
        """Store a block, unless a later attempt of its writer ended earlier."""
        with self._lock:
            held = self._held.get(key)
            stale = held is not None and held.attempt > block.attempt
            if not stale:
                self._held[key] = block
        self._free_blocks([block if stale else held])

    def _free_blocks(self, blocks: list[Any]) -> None:
        with self._lock:
            for block in blocks:
                if block is not None and block.extent is not None:
                    self._table.free(block.extent)

    def _find(self, wanted: Wanted) -> tuple[dict[str, RegisteredBlock], list[str]]:
        with self._lock:
            blocks = {key: self._held.get(key) for key in dict.fromkeys(key for key, _, _ in wanted)}
        return (
            {key: block for key, block in blocks.items() if block is not None},
            [key for key, block in blocks.items() if block is None],
        )

    def pieces(self, wanted: Wanted) -> tuple[Bytes, list[str]]:
        """Return the bytes of all pieces whose keys exist, one after the other; and the keys that do not exist."""
        while True:
            blocks, missing = self._find(wanted)
            parts = [blocks[key].memory[start : start + length] for key, start, length in wanted if key in blocks]
            content: Bytes = np.concatenate(parts) if parts else np.empty(0, np.uint8)
            if not self.changed([(key, block.stamp) for key, block in blocks.items()]):
                return content, missing

    def offer(self, wanted: Wanted) -> tuple[Offer | None, list[tuple[str, int]], list[str]]:
        """Offer pieces. Returns the offer, the argument of `changed` for after the read, and the missing keys.

        The offer is None if no key exists, or if a block is too small to be in the arena.
        """
        blocks, missing = self._find(wanted)
        if not blocks or any(block.extent is None for block in blocks.values()):
            return None, [], missing if not blocks else []
        places = [(blocks[key].offset + start, length) for key, start, length in wanted if key in blocks]
        with self._nixl().offering(self._arena, places) as offer:
            return offer, [(key, block.stamp) for key, block in blocks.items()], missing

    def changed(self, stamps: Sequence[tuple[str, int]]) -> list[str]:
        """Return the keys of these whose block was replaced or removed."""
        with self._lock:
            blocks = [(key, stamp, self._held.get(key)) for key, stamp in stamps]
        return [key for key, stamp, block in blocks if block is None or block.stamp != stamp]


CALLS_AT_ONCE = 16


def start_store_actor(
    ray: Any, name: str, namespace: str, detached: bool, seconds: float, capacity: int = 0, direct: int = 0
) -> tuple[Any, dict[str, Any]]:
    """Start the actor of a RayStore on this node. Returns its handle, and the arguments of `RayStore`.

    Args:
        ray: The module.
        name: The name of the actor.
        namespace: Its namespace.
        detached: It outlives this process.
        seconds: The time in which it must be up.
        capacity: Bytes of all blocks; 0: as many as Ray has space for.
        direct: Bytes of the smallest block for Ray's direct transport, with which all blocks are in the actor's own
            memory; 0: it is not used.

    Raises:
        StartError: If the actor cannot have the transport or the memory.
    """
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    context = ray.get_runtime_context()
    listens = f"tq-ray-{uuid.uuid4().hex}"
    memory, available = arena_bytes(capacity) if direct else 0, ray.available_resources().get("memory", 0)
    if memory > available:
        raise StartError(
            f"backend.RayStore.capacity of {capacity} needs {memory} bytes of memory, but Ray has only {available:g} "
            f"unreserved bytes: lower it, or start Ray with more memory"
        )
    if direct:
        # set with the class, because Ray 2.60 ignores it in `options`; older releases do not know it
        kind = ray.remote(num_cpus=0, memory=memory, enable_tensor_transport=True)(DirectKeeperActor)
    else:
        kind = ray.remote(num_cpus=0)(KeeperActor)
    keeper = kind.options(
        name=name, namespace=namespace, max_restarts=-1, max_concurrency=CALLS_AT_ONCE,
        lifetime="detached" if detached else None,
        scheduling_strategy=strategy(context.get_node_id(), soft=False),
    ).remote(listens, *([capacity, direct] if direct else []))  # fmt: skip
    options = {
        "address": context.gcs_address, "namespace": namespace, "actor": name, "listens": listens,
        "capacity": capacity, "direct": direct,
    }  # fmt: skip
    try:
        ray.get(keeper.check.remote(), timeout=seconds)
    except BaseException as error:
        end_store_actor(ray, options)
        if isinstance(error, StartError):  # the actor's error, wrapped in a traceback
            raise StartError(str(getattr(error, "cause", error))) from None
        raise
    return keeper, options


def end_store_actor(ray: Any, options: Mapping[str, Any]) -> None:
    """End the actor of a `RayStore` with these arguments, and all its blocks."""
    try:
        ray.kill(ray.get_actor(options["actor"], namespace=options["namespace"]), no_restart=True)
    except (ValueError, KeyError, ray.exceptions.RayError):
        return  # it has already ended
