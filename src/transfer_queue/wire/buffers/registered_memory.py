"""Memory of this process that is registered with the driver of a device, and copies between it and devices.

A device reads and writes registered memory by itself. A driver refuses a copy that meets two registered ranges, or one
and memory that is not registered, so all copies between this memory and a device are divided here.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from itertools import pairwise

import torch

from transfer_queue.wire.buffers.copies import U8, address_of

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
