"""Bytes in the memory of a device, and memory of this process from which a device reads by itself.

Blocks are written and read on a device without a copy to the host.

A device is one of torch, and its memory a flat uint8 tensor. Copies run in order on the current stream of the calling
thread. Call `tensors.synchronize` before a library that does not use streams accesses the memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from transfer_queue.wire.blocks.remote_ranges import ALIGNMENT, HERE, RangePieces
from transfer_queue.wire.buffers.copies import U8, address_of, join_runs
from transfer_queue.wire.buffers.tensors import BITS, synchronize

I4 = NDArray[np.int32]
I8 = NDArray[np.int64]

KINDS = frozenset({"cuda", "npu"})
"""The kinds of devices whose tensors are copied only when their destination is known."""


def allocate_on_device(device: torch.device, nbytes: int) -> torch.Tensor | None:
    """Return memory of a device with undefined content that no kernel uses; None if the device has no memory left."""
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError:  # also torch.OutOfMemoryError, which not all devices raise
        return None
    synchronize(device)  # torch may return memory that earlier kernels still use
    return memory


def flat_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in C order on its device: its own memory if it is contiguous."""
    # torch copies integers on every device, but its rare dtypes not even on the host
    return tensor.view(BITS[tensor.element_size()]).contiguous().reshape(-1).view(torch.uint8)


class DeviceBlock:
    """The places of pieces of a buffer in memory that has no gaps between them."""

    def __init__(self, pieces: RangePieces) -> None:
        padded = -(-pieces.lengths // ALIGNMENT) * ALIGNMENT
        ends = np.cumsum(padded)
        self.nbytes = int(ends[-1])
        """The length of that memory in bytes."""
        self._at, self._shifts = pieces.at, ends - padded - pieces.at

    def packed_places(self, at: I8) -> I8:
        """Return the places in that memory of these places in the buffer, which are inside pieces."""
        places: I8 = at + self._shifts[np.searchsorted(self._at, at, "right") - 1]
        return places


class DeviceArena(ABC):
    """Arenas out of which tensors are made on a device.

    As a `Memory` it returns an array of the length of each arena, which need not have the content.
    """

    device: torch.device
    """The device."""

    @abstractmethod
    def __call__(self, unit: int) -> U8:
        """Return an array of the length of the arena of a unit."""

    @abstractmethod
    def gather_bytes(self, units: I4, starts: I8, lengths: I8) -> torch.Tensor:
        """Return these bytes one after the other, in new memory of the device.

        Args:
            units: The unit of each piece.
            starts: The start of each piece in its arena.
            lengths: The length of each piece in bytes.
        """


class ReceivedArena(DeviceArena):
    """The buffer of a lookup of which pieces were received on a device.

    Args:
        memory: The received pieces, without gaps.
        nbytes: The length of the buffer in bytes.
        packed: The places of the pieces.
    """

    def __init__(self, memory: torch.Tensor, nbytes: int, packed: DeviceBlock) -> None:
        self.device = memory.device
        self._memory = memory
        self._length: U8 = np.broadcast_to(np.uint8(0), (nbytes,))
        self._packed = packed

    @classmethod
    def of_memory(cls, memory: torch.Tensor) -> ReceivedArena:
        """Return the arena of all of this memory."""
        none, size = np.zeros(1, np.int64), np.array([len(memory)])
        return cls(memory, len(memory), DeviceBlock(RangePieces(HERE, none, size, none)))

    def __call__(self, unit: int) -> U8:
        """See `DeviceArena`: an array without the content."""
        return self._length

    def gather_bytes(self, units: I4, starts: I8, lengths: I8) -> torch.Tensor:
        """See `DeviceArena.gather_bytes`."""
        some = lengths > 0
        if not some.any():
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        begins, sizes = join_runs(self._packed.packed_places(starts[some]), lengths[some])
        ends = begins + sizes
        return torch.cat([self._memory[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)])


# ---------------------------------------------------------------- registered memory of this process
# Memory of this process that is registered with the driver of a device, and copies between it and devices.
#
# A device reads and writes registered memory by itself. A driver refuses a copy that meets two registered ranges, or
# one and memory that is not registered, so all copies between this memory and a device are divided here.


_lock = threading.Lock()
_starts: list[int] = []
_ends: list[int] = []
"""The addresses of the registered ranges, ascending; no two of them overlap."""


def add_range(address: int, nbytes: int) -> None:
    """Note that memory was registered."""
    with _lock:
        at = bisect_left(_starts, address)
        _starts.insert(at, address)
        _ends.insert(at, address + nbytes)


def remove_range(address: int) -> None:
    """Note that the range that began at this address is not registered any more."""
    with _lock:
        at = bisect_left(_starts, address)
        del _starts[at], _ends[at]


def pieces(address: int, nbytes: int) -> list[slice]:
    """Divide memory where registered ranges begin and end. Returns the pieces, counted from the address."""
    end = address + nbytes
    edges = {address, end}
    with _lock:
        for at in range(bisect_right(_ends, address), bisect_left(_starts, end)):
            edges.update((max(address, _starts[at]), min(end, _ends[at])))
    return [slice(low - address, high - address) for low, high in pairwise(sorted(edges))]


def host_to_device(into: torch.Tensor, memory: U8, wait: bool = False) -> None:
    """Copy memory to flat uint8 memory of a device, on its current stream.

    Without `wait`, the caller keeps the content of registered memory until the copy has ended. Of other memory the
    driver has a copy when this returns.
    """
    source = torch.from_numpy(memory)
    for piece in pieces(address_of(memory), len(memory)):
        into[piece].copy_(source[piece], non_blocking=not wait)


def device_to_host(memory: U8, source: torch.Tensor) -> None:
    """Copy flat uint8 memory of a device to memory of this process."""
    into = torch.from_numpy(memory)
    for piece in pieces(address_of(memory), len(memory)):
        into[piece].copy_(source[piece])
