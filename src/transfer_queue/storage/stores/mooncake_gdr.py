"""GPUDirect RDMA with a Mooncake store: blocks are read from and written to the memory of a GPU without the host.

The library reads and writes only memory of the device that is registered with it. A registration takes milliseconds,
because the driver maps the memory for the network card. So registered memory is kept, and values are copied within the
device.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from transfer_queue.errors import ConnectionLostError
from transfer_queue.storage.stores.base import DevicePath, Piece, warn_of_host_copies

if TYPE_CHECKING:
    import torch

SETTING = "backend.MooncakeStore.use_gdr"
WITHOUT_CUDA = "mooncake-transfer-engine-non-cuda"
LEAST = 1 << 20  # bytes of the smallest registration


class RegisteredMemoryStore(Protocol):
    """A store that writes from and reads into registered memory: `mooncake.MooncakeStore`."""

    def connect(self) -> Any:
        """Return the library's store, with which memory is registered."""

    def write_from(self, key: str, address: int, nbytes: int, within: float) -> None:
        """Write a block from registered memory that begins at an address; see `Store.write`."""

    def read_to(self, pieces: Sequence[Piece], address: int, within: float) -> list[str]:
        """Read into registered memory that begins at an address; see `Store.read`."""


def gpu_direct(store: RegisteredMemoryStore, protocol: str, most: int) -> GpuDirect | None:
    """Return the path, which keeps `most` bytes of registered memory; None, with a log line, if it is impossible."""
    found = obstacle(protocol)
    if found is None:
        return GpuDirect(store, most)
    warn_of_host_copies(SETTING, *found)
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

    def __init__(self, store: RegisteredMemoryStore, most: int) -> None:
        self._store = store
        self._most = most
        self._lock = threading.Lock()
        self._pool: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        """(Device, size) -> unused registered memory of that size, at most `_most` bytes in total."""
        self._pooled = 0
        self._refused = False
        """Whether the library failed to register memory of a device. It is not asked again then."""

    @contextlib.contextmanager
    def buffer(self, device: torch.device, nbytes: int) -> Iterator[torch.Tensor | None]:
        """See `DevicePath.buffer`: registered memory of a pool."""
        memory = self._take(device, max(LEAST, 1 << (nbytes - 1).bit_length()))
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
            if self._refused:
                return None
        memory = allocate_on_device(device, size)
        if memory is None:
            return None
        code = self._store.connect().register_buffer(memory.data_ptr(), size)
        if not code:
            return memory
        with self._lock:
            told, self._refused = self._refused, True
        if not told:
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
