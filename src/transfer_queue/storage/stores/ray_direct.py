"""Ray's direct transport: memory that one process offers, and another reads past Ray's object store.

Used is the transport itself (`ray.experimental.TensorTransportManager`), and not references to tensors (`ray.put(...,
_tensor_transport=)`): what a process was told of a reference that it borrowed Ray 2.60 keeps for ever (its issue
57962), and what is put ends with who has put it. NIXL is the one transport of Ray's that reads memory of the host
without the other side taking part, as it must be where a writer does not know its readers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.base import Piece
from transfer_queue.wire.buffers.copies import allocate

LEAST = 4 << 20  # bytes from which on a block goes directly; below, a call with the bytes in it is quicker
PIECES = 64  # of a direct read have as many bytes together as the least block, at most
SPARE_BYTES = 256 << 20  # of a writer's memory that is registered for good
LOOK_SECONDS = 0.0005  # between two looks at a transfer
REST_SECONDS = 30.0  # for which everything goes through the object store after the transport has failed
NO_ROOM = "no room"
HOW = "pip install 'transfer_queue[ray-direct]'"

logger = logging.getLogger(__name__)

_making = threading.Lock()
_transport: NixlTransport | None = None
_registered: list[Bytes] = []  # kept for good
_abandoned: list[Any] = []  # kept for good: a transfer that did not end in time may still write there


@dataclasses.dataclass(frozen=True)
class Offer:
    """Pieces of memory that another process may read. It names places, and outlives what lies there."""

    name: str
    places: Any


def load() -> tuple[Any, Any]:
    """What is needed of Ray. ImportError where that or the package nixl is missing or too old."""
    importlib.import_module("nixl._api")
    from ray.experimental import register_nixl_memory
    from ray.experimental.rdt.util import get_tensor_transport_manager

    return register_nixl_memory, get_tensor_transport_manager


def transport() -> NixlTransport:
    """This process's. ImportError where Ray or the package nixl is missing or too old, others as the library does."""
    global _transport
    with _making:
        if _transport is None:
            made = NixlTransport()
            made.register(allocate(1))  # makes the library's agent, or fails
            _transport = made
        return _transport


class NixlTransport:
    """A process's end of the transport: one for all, as Ray has one. A thread of NIXL's waits for others, at a core."""

    def __init__(self) -> None:
        register_nixl_memory, get_tensor_transport_manager = load()
        self._register = register_nixl_memory
        self._manager: Any = get_tensor_transport_manager("NIXL")
        self._life = uuid.uuid4().hex
        self._lock = threading.Lock()
        """Held in each call of Ray's manager, which is not made for several threads at once."""
        self._others: dict[str, threading.Lock] = {}
        """Other process -> held while it is read from: once it registers anew, what was known of it is dropped."""
        self.spares = Spares(self.register)

    def register(self, memory: Bytes) -> None:
        """Registers memory for the life of the process: what is offered of it needs no registration then."""
        with self._lock:
            self._register(_tensor(memory))
            _registered.append(memory)

    @contextlib.contextmanager
    def offering(self, memory: Bytes, pieces: Sequence[tuple[int, int]]) -> Iterator[Offer]:
        """Pieces (start, length) of memory: offered meanwhile, and on if it is registered."""
        name, whole = uuid.uuid4().hex, _tensor(memory)
        tensors = [whole[start : start + length] for start, length in pieces]
        with self._lock:
            places = self._manager.extract_tensor_transport_metadata(name, tensors)
        try:
            # a process that is started anew in the place of another has its name, and counts its versions from the same
            version = f"{self._life}/{places.nixl_agent_meta_version}"
            yield Offer(name, dataclasses.replace(places, nixl_agent_meta_version=version))
        finally:
            with self._lock:
                self._manager.garbage_collect(name, places, tensors)

    def fetch(self, offer: Offer, memory: Bytes, pieces: Sequence[tuple[int, int]], within: float) -> None:
        """Reads what is offered into pieces (start, length) of memory.

        TimeoutError after so many seconds; the memory is then not to be used for anything else ever. InterruptedError
        where it was not begun by then; other errors as Ray has them: the bytes may be anything.
        """
        whole = _tensor(memory)
        tensors = [whole[start : start + length] for start, length in pieces]
        end = time.monotonic() + within
        with self._lock:
            other = self._others.setdefault(offer.places.nixl_agent_name, threading.Lock())
        if not other.acquire(timeout=within):
            raise InterruptedError(f"another transfer from there has not ended within {within:g} s")
        try:
            with self._lock:
                among = self._manager.get_communicator_metadata(None, None, "NIXL")
                request = self._manager.fetch_multiple_tensors(offer.name, offer.places, among, tensors)
            while not self._is_done(request):
                if time.monotonic() >= end:
                    _abandoned.append((request, memory))
                    raise TimeoutError(f"a transfer has not ended within {within:g} s")
                time.sleep(LOOK_SECONDS)
            with self._lock:
                del request  # gives back what the library holds for it
        finally:
            other.release()

    def _is_done(self, request: Any) -> bool:
        with self._lock:
            try:
                self._manager.wait_fetch_complete(request, 0)
            except TimeoutError:
                return False
            return True


def _tensor(memory: Bytes) -> Any:
    import torch

    return torch.from_numpy(memory)


class Spares:
    """Registered memory of a writer, in sizes of powers of two, used again and again; of SPARE_BYTES at most."""

    def __init__(self, register: Callable[[Bytes], None]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._made = 0
        self._free: dict[int, list[Bytes]] = {}
        """Size -> memory of it that nobody uses."""

    @contextlib.contextmanager
    def buffer(self, nbytes: int) -> Iterator[Bytes]:
        """So many bytes."""
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            memory = self._free[size].pop() if self._free.get(size) else None
            if memory is None and self._made + size <= SPARE_BYTES:
                memory = allocate(size)
                self._made += size
                self._register(memory)
        if memory is None:
            yield allocate(nbytes)  # registered while it is offered
            return
        try:
            yield memory[:nbytes]
        finally:
            with self._lock:
                self._free.setdefault(size, []).append(memory)


class DirectClient:
    """How a process writes to and reads from an actor that has blocks in its own memory.

    The actor is in `ray_runtime.direct_store_actor`.

    An actor that was made with `enable_tensor_transport=True` transfers directly. Everybody else, and all that is
    small, goes by calls of the keeper, whose arguments and answers Ray carries, by its object store where they are big.
    least: bytes from which on a block goes directly.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._lock = threading.Lock()
        self._asked = False
        self._transport: NixlTransport | None = None
        self._rests_until = 0.0

    def _direct(self, ray: Any) -> NixlTransport | None:
        """The transport; None where this process does not have it, or it has just failed."""
        with self._lock:
            if not self._asked:
                self._asked = True
                if _is_enabled(ray):
                    try:
                        self._transport = transport()
                    except Exception as error:  # ImportError, or what the library does not find here
                        logger.warning("no direct transport in this actor, all goes by calls (%s): %s", error, HOW)
        return None if time.monotonic() < self._rests_until else self._transport

    def _rest(self, why: object) -> None:
        logger.warning("a direct transfer failed; for %g s all goes by calls: %s", REST_SECONDS, why)
        self._rests_until = time.monotonic() + REST_SECONDS

    @contextlib.contextmanager
    def buffer(self, ray: Any, nbytes: int) -> Iterator[Bytes]:
        """See `Store.buffer`."""
        direct = self._direct(ray) if nbytes >= self._least else None
        if direct is None:
            yield allocate(nbytes)
            return
        with direct.spares.buffer(nbytes) as memory:
            yield memory

    def write(self, ray: Any, keeper: Any, key: str, data: Bytes, seconds: float) -> bool:
        """False where the keeper has no room. seconds: for a transfer."""
        attempt = time.time_ns()
        direct = self._direct(ray) if data.nbytes >= self._least else None
        if direct is not None:
            with direct.offering(data, [(0, data.nbytes)]) as offer:
                call = keeper.fetch.remote(key, data.nbytes, offer, attempt, seconds)
                outcome: str = ray.get(call, timeout=2 * seconds)
            if outcome in ("", NO_ROOM):
                return not outcome
            self._rest(outcome)
        return bool(ray.get(keeper.keep.remote(key, data, attempt), timeout=seconds))

    def read(self, ray: Any, keeper: Any, pieces: Sequence[Piece], into: Bytes, seconds: float) -> list[str]:
        """See `Store.read`."""
        wanted = [(piece.key, piece.start, piece.length) for piece in pieces]
        nbytes = sum(piece.length for piece in pieces)
        large = nbytes >= self._least and nbytes * PIECES >= self._least * len(pieces)
        direct = self._direct(ray) if large else None
        if direct is not None:
            missing = self._read_directly(direct, ray, keeper, wanted, pieces, into, seconds)
            if missing is not None:
                return missing
        found, missing = ray.get(keeper.pieces.remote(wanted), timeout=seconds)
        gone, at = set(missing), 0
        for piece in pieces:
            if piece.key not in gone:
                into[piece.at : piece.at + piece.length] = found[at : at + piece.length]
                at += piece.length
        return list(missing)

    def _read_directly(
        self,
        direct: NixlTransport,
        ray: Any,
        keeper: Any,
        wanted: list[tuple[str, int, int]],
        pieces: Sequence[Piece],
        into: Bytes,
        seconds: float,
    ) -> list[str] | None:
        """The keys that are missing; None where it is to be read another way."""
        offer, stamps, missing = ray.get(keeper.offer.remote(wanted), timeout=seconds)
        if offer is None:
            return list(missing) if missing else None
        gone = set(missing)
        places = [(piece.at, piece.length) for piece in pieces if piece.key not in gone]
        try:
            direct.fetch(offer, into, places, seconds)
        except TimeoutError as error:
            self._rest(error)
            raise
        except Exception as error:  # Ray's, or the library's
            self._rest(error)
            return None
        # copied first, compared then: what was freed meanwhile may have been written over
        return [*missing, *ray.get(keeper.changed.remote(stamps), timeout=seconds)]


def _is_enabled(ray: Any) -> bool:
    """Whether this process is an actor whose class was made with enable_tensor_transport=True."""
    try:
        actor = ray.get_runtime_context().current_actor
    except RuntimeError:  # no actor
        return False
    return bool(getattr(actor, "_ray_enable_tensor_transport", False))
