"""MooncakeStore: blocks in the memory of a Mooncake store, over TCP or RDMA.

The library (`mooncake-transfer-engine`, or its build without CUDA) is imported at the first use. All memory that it
reads or writes is registered with it, as RDMA requires; over TCP a missing registration would not be noticed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.config.environment import process_environment
from transfer_queue.errors import CapacityError, ConnectionLostError, StartError
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.base import (
    FIRST_PAUSE,
    DevicePath,
    Forks,
    Piece,
    Store,
    retry_attempt,
    warn_of_host_copies,
)
from transfer_queue.utils.host_addresses import source_address

if TYPE_CHECKING:
    import torch

NO_SPACE, NOT_WHOLE, NOT_FOUND = -200, -703, -704
DEAD_OWNER = (-800, -600)  # the owner of the memory does not respond, or cannot be found
MIN_BUFFER = 64 * 1024
LARGE = 1024 * 1024  # destinations of at least this size are registered; smaller reads go through a buffer of the pool
DEAD_SECONDS = 2.0  # after which bytes that cannot be read from their owner count as lost
WRITE_SECONDS = 10.0  # for which a writer tries again if an owner is dead, until the store chooses another one
READ_SECONDS = 1.0  # for which a reader asks an owner that does not respond, before it asks the storage unit

_QUIET = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}  # otherwise it logs every connection to stderr

_forks = Forks("Mooncake")


def load() -> Any:
    """Return the library's module. Raises StartError, with what to install, if it cannot be loaded."""
    for name, value in _QUIET.items():
        process_environment().setdefault(name, value)
    try:
        from mooncake import store
    except ImportError as error:
        raise StartError(
            f"MooncakeStore needs the library of Mooncake, which cannot be loaded ({error}): pip install "
            f"'transfer_queue[mooncake]', and if libibverbs.so.1 is missing: apt-get install libibverbs1"
        ) from error
    return store


def own_address(master: str) -> str:
    """Return the address of this host that its peers can reach: the one from which it reaches the master."""
    return source_address(master.rpartition(":")[0] or "127.0.0.1") or "127.0.0.1"


class MooncakeStore(Store):
    """See `Store`. Arguments as in config.yaml; `segment` is the memory in bytes that this process provides."""

    def __init__(
        self,
        master_server_address: str,
        metadata_server: str = "P2PHANDSHAKE",
        local_hostname: str | None = None,
        protocol: str = "tcp",
        device_name: str = "",
        local_buffer_size: int = 1 << 30,
        hard_pin: bool = True,
        use_gdr: bool = False,
        segment: int = 0,
    ) -> None:
        self._master = master_server_address
        self._setup = (
            local_hostname or own_address(master_server_address), metadata_server, segment, 0, protocol, device_name,
            master_server_address,
        )  # fmt: skip
        self._hard_pin = hard_pin
        self._protocol = protocol
        self._wants_gdr = use_gdr
        self._gdr: DevicePath | None = None
        self._lock = threading.Lock()
        self._store: Any = None
        self._closed = False
        self._most = local_buffer_size
        self._pool: dict[int, list[Bytes]] = {}
        """Size -> unused registered buffers of that size, at most `_most` bytes in total."""
        self._pooled = 0

    def connect(self) -> Any:
        """Return the library's store, which is set up at the first use."""
        with self._lock:
            if self._closed:
                raise ConnectionLostError("this connection to the Mooncake store was closed")
            if self._store is None:
                _forks.use()
                library = load()
                store = library.MooncakeDistributedStore()
                code = store.setup(*self._setup)
                if code:
                    raise ConnectionLostError(
                        f"the Mooncake store at {self._master} cannot be joined (code {code}); check that its master "
                        f"runs, and that protocol and device_name are correct (backend.MooncakeStore)"
                    )
                self._config = library.ReplicateConfig()
                self._config.with_hard_pin = self._hard_pin
                self._store = store
        return self._store

    def device_path(self) -> DevicePath | None:
        """See `Store.device_path`: for GPUs, with `use_gdr`."""
        with self._lock:
            if self._wants_gdr:
                self._wants_gdr = False
                self._gdr = gpu_direct(self, self._protocol, self._most)
            return self._gdr

    # ------------------------------------------------------------ registered memory

    @contextlib.contextmanager
    def buffer(self, key: str, nbytes: int) -> Iterator[Bytes]:
        """See `Store.buffer`: registered memory of a pool."""
        memory = self._take(max(MIN_BUFFER, 1 << (nbytes - 1).bit_length()))
        try:
            yield memory[:nbytes]
        finally:
            self._give(memory)

    def _take(self, size: int) -> Bytes:
        store = self.connect()
        with self._lock:
            free = self._pool.get(size)
            if free:
                self._pooled -= size
                return free.pop()
        memory = np.empty(size, np.uint8)
        _check(store.register_buffer(memory.ctypes.data, size), f"{size} bytes cannot be registered")
        return memory

    def _give(self, memory: Bytes) -> None:
        with self._lock:
            if self._store is not None and self._pooled + memory.size <= self._most:
                self._pool.setdefault(memory.size, []).append(memory)
                self._pooled += memory.size
            elif self._store is not None:
                self._store.unregister_buffer(memory.ctypes.data)

    @contextlib.contextmanager
    def _registered(self, memory: Bytes) -> Iterator[Bytes]:
        """Yield the memory itself, registered meanwhile; or a buffer of the pool if it is small."""
        if memory.size < LARGE:
            with self.buffer("", max(1, memory.size)) as staged:
                yield staged
            return
        store = self.connect()
        _check(store.register_buffer(memory.ctypes.data, memory.size), f"{memory.size} bytes cannot be registered")
        try:
            yield memory
        finally:
            store.unregister_buffer(memory.ctypes.data)

    # ------------------------------------------------------------ blocks

    def write(self, key: str, data: Bytes, within: float) -> None:
        """See `Store.write`."""
        self.write_from(key, data.ctypes.data, data.size, within)

    def write_from(self, key: str, address: int, nbytes: int, within: float) -> None:
        """Do `Store.write` from registered memory."""
        store = self.connect()

        def attempt() -> Exception | None:
            code = store.upsert_from(key, address, nbytes, self._config)
            while code in DEAD_OWNER and time.monotonic() < patient:
                time.sleep(FIRST_PAUSE)
                code = store.upsert_from(key, address, nbytes, self._config)
            if not code:
                return None
            if code == NO_SPACE:
                return CapacityError(
                    f"no capacity in the Mooncake store at {self._master} for {nbytes} bytes; clear samples, let "
                    f"consumers catch up, or raise backend.MooncakeStore.global_segment_size"
                )
            return self._lost(f"{nbytes} bytes cannot be written", code)

        patient = time.monotonic() + WRITE_SECONDS
        retry_attempt(within, attempt)

    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        """See `Store.read`."""
        with self._registered(into) as memory:
            missing = self.read_to(pieces, memory.ctypes.data, within)
            if memory is not into:
                for piece in pieces:
                    into[piece.at : piece.at + piece.length] = memory[piece.at : piece.at + piece.length]
        return missing

    def read_to(self, pieces: Sequence[Piece], address: int, within: float) -> list[str]:
        """Do `Store.read` into registered memory that begins at this address."""
        store = self.connect()
        keys: list[str] = []
        starts: list[list[int]] = []
        lengths: list[list[int]] = []
        places: list[list[int]] = []
        for key, group in groupby(pieces, key=lambda piece: piece.key):
            some = list(group)
            keys.append(key)
            starts.append([piece.start for piece in some])
            lengths.append([piece.length for piece in some])
            places.append([piece.at for piece in some])
        missing: list[str] = []

        def attempt() -> Exception | None:
            results = store.get_into_ranges([address], [keys], [places], [starts], [lengths])
            codes = [min((got for got in parts if got < 0), default=0) for parts in results[0]]
            missing[:] = [key for key, code in zip(keys, codes, strict=True) if code]
            failed = [code for code in codes if code not in (0, NOT_FOUND)]
            if not failed or (set(failed) <= set(DEAD_OWNER) and time.monotonic() >= patient):
                return None
            return self._lost(f"{len(failed)} blocks cannot be read", failed[0])

        patient = time.monotonic() + READ_SECONDS
        retry_attempt(within, attempt)
        return missing

    def remove(self, keys: Sequence[str]) -> None:
        """See `Store.remove`. Removes by force, although a reader may have a lease of the store on the block."""
        store = self.connect()
        codes = dict(zip(keys, store.batch_remove(list(keys), True), strict=True))
        begun = [key for key, code in codes.items() if code == NOT_WHOLE]
        if begun:  # incomplete blocks of a dead writer: only complete blocks can be removed
            with self.buffer("", 1) as memory:
                for key in begun:
                    store.upsert_from(key, memory.ctypes.data, 1, self._config)
            codes.update(zip(begun, store.batch_remove(begun, True), strict=True))
        failed = [code for code in codes.values() if code not in (0, NOT_FOUND)]
        if failed:
            raise self._lost(f"{len(failed)} blocks cannot be removed", failed[0])

    def missing(self, keys: Sequence[str]) -> list[str]:
        """See `Store.missing`. Blocks of a dead owner are gone, although the master lists them for a while."""
        missing: list[str] = []
        probe = np.empty(1, np.uint8)
        left, end = list(keys), time.monotonic() + DEAD_SECONDS
        with self._registered(probe) as memory:
            while left:
                results = self.connect().get_into_ranges(
                    [memory.ctypes.data], [left], [[[0]] * len(left)], [[[0]] * len(left)], [[[1]] * len(left)]
                )
                codes = dict(zip(left, [parts[0] for parts in results[0]], strict=True))
                over = time.monotonic() >= end
                lost = [key for key, code in codes.items() if code == NOT_FOUND or (over and code in DEAD_OWNER)]
                missing += lost
                left = [key for key, code in codes.items() if code < 0 and key not in set(lost)]
                if left and over:
                    raise self._lost(f"{len(left)} blocks cannot be checked", codes[left[0]])
                if left:
                    time.sleep(DEAD_SECONDS / 8)
        return missing

    def _lost(self, what: str, code: int) -> ConnectionLostError:
        return ConnectionLostError(
            f"{what} in the Mooncake store at {self._master} (code {code}): its master or the owner of the memory "
            f"does not respond; check that they are running"
        )

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            store, self._store, self._closed = self._store, None, True
            path, self._gdr, self._wants_gdr = self._gdr, None, False
            self._pool.clear()
        if path is not None:
            path.close()
        if store is not None:
            store.close()


def _check(code: int, what: str) -> None:
    if code:
        raise ConnectionLostError(f"{what} with the Mooncake store (code {code})")


# ---------------------------------------------------------------- GPUDirect RDMA
# Blocks are read from and written to the memory of a GPU without the host.
#
# The library reads and writes only memory of the device that is registered with it. A registration takes milliseconds,
# because the driver maps the memory for the network card. So registered memory is kept, and values are copied within
# the device.

SETTING = "backend.MooncakeStore.use_gdr"
WITHOUT_CUDA = "mooncake-transfer-engine-non-cuda"
MIN_REGISTERED = 1 << 20  # bytes of the smallest registration


def gpu_direct(store: MooncakeStore, protocol: str, most: int) -> GpuDirect | None:
    """Return the path, which keeps `most` bytes of registered memory; None, with a log line, if it is impossible."""
    problem = obstacle(protocol)
    if problem is None:
        return GpuDirect(store, most)
    warn_of_host_copies(SETTING, *problem)
    return None


def obstacle(protocol: str) -> tuple[str, str] | None:
    """Return what prevents it, and what to do about it; None if nothing does."""
    if protocol != "rdma":
        return f"protocol is {protocol}", "set backend.MooncakeStore.protocol: rdma, with device_name"
    try:
        importlib.metadata.version(WITHOUT_CUDA)
        return (
            f"the library is its build without CUDA ({WITHOUT_CUDA})",
            "install mooncake-transfer-engine instead",
        )
    except importlib.metadata.PackageNotFoundError:
        pass
    import torch

    if not torch.cuda.is_available():
        return "this process has no GPU (torch.cuda.is_available() is false)", "this is correct if it needs no GPU"
    return None


class GpuDirect(DevicePath):
    """See `DevicePath`. Keeps at most `most` bytes of registered memory, over all devices."""

    kind = "cuda"

    def __init__(self, store: MooncakeStore, most: int) -> None:
        self._store = store
        self._most = most
        self._lock = threading.Lock()
        self._pool: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        """(Device, size) -> unused registered memory of that size, at most `_most` bytes in total."""
        self._pooled = 0
        self._is_refused = False
        """Whether the library failed to register memory of a device. It is not asked again then."""

    @contextlib.contextmanager
    def buffer(self, device: torch.device, nbytes: int) -> Iterator[torch.Tensor | None]:
        """See `DevicePath.buffer`: registered memory of a pool."""
        memory = self._take(device, max(MIN_REGISTERED, 1 << (nbytes - 1).bit_length()))
        try:
            yield None if memory is None else memory[:nbytes]
        finally:
            if memory is not None:
                self._give(memory)

    def _take(self, device: torch.device, size: int) -> torch.Tensor | None:
        from transfer_queue.wire.blocks.device_memory import allocate_on_device

        with self._lock:
            free = self._pool.get((device, size))
            if free:
                self._pooled -= size
                return free.pop()
            if self._is_refused:
                return None
        memory = allocate_on_device(device, size)
        if memory is None:
            return None
        code = self._store.connect().register_buffer(memory.data_ptr(), size)
        if not code:
            return memory
        with self._lock:
            was_refused, self._is_refused = self._is_refused, True
        if not was_refused:
            warn_of_host_copies(
                SETTING, f"{size} bytes of {device} cannot be registered (code {code})",
                "load nvidia-peermem, or check that the driver exports memory by dma-buf",
            )  # fmt: skip
        return None

    def _give(self, memory: torch.Tensor) -> None:
        size = memory.numel()
        with self._lock:
            if self._pooled + size <= self._most:
                self._pool.setdefault((memory.device, size), []).append(memory)
                self._pooled += size
                return
        with contextlib.suppress(ConnectionLostError):  # a closed library has dropped its registrations
            self._store.connect().unregister_buffer(memory.data_ptr())

    def write(self, key: str, data: torch.Tensor, within: float) -> None:
        """See `DevicePath.write`."""
        self._store.write_from(key, data.data_ptr(), data.numel(), within)

    def read(self, pieces: Sequence[Piece], into: torch.Tensor, within: float) -> list[str]:
        """See `DevicePath.read`."""
        return self._store.read_to(pieces, into.data_ptr(), within)

    def close(self) -> None:
        """See `DevicePath.close`. The registrations end with the library."""
        with self._lock:
            self._pool.clear()
            self._most = 0
