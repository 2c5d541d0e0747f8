"""Ray's direct transport: one process offers memory, and another reads it without Ray's object store.

This uses the transport itself (`ray.experimental.TensorTransportManager`), and not references to tensors (`ray.put(...,
_tensor_transport=)`): Ray 2.60 never frees what a process knows of a reference that it borrowed (its issue 57962), and
a value ends with the process that has put it. NIXL is Ray's only transport that reads memory of the host without the
help of the other side, which is necessary because a writer does not know its readers.
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

LEAST = 4 << 20  # bytes of the smallest block that is transferred directly; below, a call that contains them is faster
PIECES = 64  # a direct read has at most this many pieces per LEAST bytes
SPARE_BYTES = 256 << 20  # of a writer's memory that stays registered
LOOK_SECONDS = 0.0005  # between two checks of a transfer
REST_SECONDS = 30.0  # after a failure of the transport, in which all blocks go through the object store
NO_SPACE = "no space"
HOW = "pip install 'transfer_queue[ray-direct]'"

logger = logging.getLogger(__name__)

_making = threading.Lock()
_transport: NixlTransport | None = None
_registered: list[Bytes] = []  # never freed
_abandoned: list[Any] = []  # never freed: a transfer that did not end in time may still write there


@dataclasses.dataclass(frozen=True)
class Offer:
    """Pieces of memory that another process may read. The offer may outlive the blocks in them."""

    name: str
    places: Any


def load() -> tuple[Any, Any]:
    """Return the functions of Ray. Raises ImportError if Ray or the package nixl is missing or too old."""
    importlib.import_module("nixl._api")
    from ray.experimental import register_nixl_memory
    from ray.experimental.rdt.util import get_tensor_transport_manager

    return register_nixl_memory, get_tensor_transport_manager


def transport() -> NixlTransport:
    """Return this process's transport. Raises ImportError, see `load`, or an error of the library."""
    global _transport
    with _making:
        if _transport is None:
            made = NixlTransport()
            made.register(allocate(1))  # this creates the library's agent, or fails
            _transport = made
        return _transport


class NixlTransport:
    """A process's end of the transport. There is one per process, as in Ray. A thread of NIXL uses one core to poll."""

    def __init__(self) -> None:
        register_nixl_memory, get_tensor_transport_manager = load()
        self._register = register_nixl_memory
        self._manager: Any = get_tensor_transport_manager("NIXL")
        self._life = uuid.uuid4().hex
        self._lock = threading.Lock()
        """Held in each call of Ray's manager, which is not thread-safe."""
        self._others: dict[str, threading.Lock] = {}
        """Other process -> held while reading from it, because a new registration of it drops its earlier data."""
        self.spares = Spares(self.register)

    def register(self, memory: Bytes) -> None:
        """Register memory for the life of the process, so that offers of it need no registration."""
        with self._lock:
            self._register(_tensor(memory))
            _registered.append(memory)

    @contextlib.contextmanager
    def offering(self, memory: Bytes, pieces: Sequence[tuple[int, int]]) -> Iterator[Offer]:
        """Offer pieces (start, length) of memory, meanwhile, or permanently if the memory is registered."""
        name, whole = uuid.uuid4().hex, _tensor(memory)
        tensors = [whole[start : start + length] for start, length in pieces]
        with self._lock:
            places = self._manager.extract_tensor_transport_metadata(name, tensors)
        try:
            # a restarted process has the same name, and begins to count its versions at the same number
            version = f"{self._life}/{places.nixl_agent_meta_version}"
            yield Offer(name, dataclasses.replace(places, nixl_agent_meta_version=version))
        finally:
            with self._lock:
                self._manager.garbage_collect(name, places, tensors)

    def fetch(self, offer: Offer, memory: Bytes, pieces: Sequence[tuple[int, int]], within: float) -> None:
        """Read the offered memory into pieces (start, length) of memory.

        Raises TimeoutError if it does not end in time; the memory must then never be used again. Raises
        InterruptedError if it was not begun in time. After another error of Ray the bytes are undefined.
        """
        whole = _tensor(memory)
        tensors = [whole[start : start + length] for start, length in pieces]
        end = time.monotonic() + within
        with self._lock:
            other = self._others.setdefault(offer.places.nixl_agent_name, threading.Lock())
        if not other.acquire(timeout=within):
            raise InterruptedError(f"the previous transfer from this process did not end within {within:g} s")
        try:
            with self._lock:
                among = self._manager.get_communicator_metadata(None, None, "NIXL")
                request = self._manager.fetch_multiple_tensors(offer.name, offer.places, among, tensors)
            while not self._is_done(request):
                if time.monotonic() >= end:
                    _abandoned.append((request, memory))
                    raise TimeoutError(f"a direct transfer did not end within {within:g} s")
                time.sleep(LOOK_SECONDS)
            with self._lock:
                del request  # frees what the library holds for it
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
    """Reusable registered memory of a writer, in sizes of powers of two, of at most SPARE_BYTES."""

    def __init__(self, register: Callable[[Bytes], None]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._made = 0
        self._free: dict[int, list[Bytes]] = {}
        """Size -> unused memory of that size."""

    @contextlib.contextmanager
    def buffer(self, nbytes: int) -> Iterator[Bytes]:
        """Yield memory of this many bytes."""
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            memory = self._free[size].pop() if self._free.get(size) else None
            if memory is None and self._made + size <= SPARE_BYTES:
                memory = allocate(size)
                self._made += size
                self._register(memory)
        if memory is None:
            yield allocate(nbytes)  # it is registered while it is offered
            return
        try:
            yield memory[:nbytes]
        finally:
            with self._lock:
                self._free.setdefault(size, []).append(memory)


class DirectClient:
    """Writes to and reads from an actor that has blocks in its own memory (`ray_runtime.store_actors`).

    An actor that was created with `enable_tensor_transport=True` transfers large blocks directly. In all other cases
    blocks are arguments and results of calls, which Ray carries, in its object store if they are large.
    """

    def __init__(self, least: int) -> None:
        """Make a client that transfers blocks of at least `least` bytes directly."""
        self._least = least
        self._lock = threading.Lock()
        self._is_set_up = False
        self._transport: NixlTransport | None = None
        self._rests_until = 0.0

    def _direct(self, ray: Any) -> NixlTransport | None:
        """Return the transport; None if this process does not have it, or if it has just failed."""
        with self._lock:
            if not self._is_set_up:
                self._is_set_up = True
                if _is_enabled(ray):
                    try:
                        self._transport = transport()
                    except Exception as error:  # ImportError, or an error of the library
                        logger.warning(
                            "this actor has no direct transport, so all its blocks go by calls: %s; %s", error, HOW
                        )
        return None if time.monotonic() < self._rests_until else self._transport

    def _pause(self, why: object) -> None:
        logger.warning(
            "a direct transfer of this process failed; all its blocks go by calls for %g s: %s", REST_SECONDS, why
        )
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
        """Write a block. Returns False if the actor has no space. `seconds` is the time for a transfer."""
        attempt = time.time_ns()
        direct = self._direct(ray) if data.nbytes >= self._least else None
        if direct is not None:
            with direct.offering(data, [(0, data.nbytes)]) as offer:
                call = keeper.fetch.remote(key, data.nbytes, offer, attempt, seconds)
                outcome: str = ray.get(call, timeout=2 * seconds)
            if outcome in ("", NO_SPACE):
                return not outcome
            self._pause(outcome)
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
        content, missing = ray.get(keeper.pieces.remote(wanted), timeout=seconds)
        absent, at = set(missing), 0
        for piece in pieces:
            if piece.key not in absent:
                into[piece.at : piece.at + piece.length] = content[at : at + piece.length]
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
        """Return the keys that are missing; None if the direct read failed and the caller must use a call."""
        offer, stamps, missing = ray.get(keeper.offer.remote(wanted), timeout=seconds)
        if offer is None:
            return list(missing) if missing else None
        absent = set(missing)
        places = [(piece.at, piece.length) for piece in pieces if piece.key not in absent]
        try:
            direct.fetch(offer, into, places, seconds)
        except TimeoutError as error:
            self._pause(error)
            raise
        except Exception as error:  # an error of Ray or of the library
            self._pause(error)
            return None
        # compared after the copy, because freed memory may have been overwritten meanwhile
        return [*missing, *ray.get(keeper.changed.remote(stamps), timeout=seconds)]


def _is_enabled(ray: Any) -> bool:
    """Whether this process is an actor whose class was created with enable_tensor_transport=True."""
    try:
        actor = ray.get_runtime_context().current_actor
    except RuntimeError:  # this process is not an actor
        return False
    return bool(getattr(actor, "_ray_enable_tensor_transport", False))
