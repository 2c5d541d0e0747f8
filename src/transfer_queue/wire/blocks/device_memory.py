"""Bytes in the memory of a device: blocks are put together there and taken apart there, without going through the host.

A device is one of torch's, its memory a flat uint8 tensor. Copies run in order on the current stream of the calling
thread; a library that knows no streams is given the memory after `tensors.settle`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from transfer_queue.wire.blocks.remote_ranges import ALIGNMENT, HERE, RangePieces
from transfer_queue.wire.buffers.copies import U8, joined_runs
from transfer_queue.wire.buffers.tensors import BITS, settle

I8 = NDArray[np.int64]

KINDS = frozenset({"cuda", "npu"})
"""The devices whose tensors are not brought to the host before it is known where they go."""


def allocated(device: torch.device, nbytes: int) -> torch.Tensor | None:
    """Memory of a device, its content undefined, that nothing on the device uses; None where it has none left."""
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError:  # torch.OutOfMemoryError is one, and other devices have none of their own
        return None
    settle(device)  # torch hands out anew what kernels of before may still be at work with
    return memory


def flat_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a carriable tensor in C order, where it lies: its own memory where it is contiguous."""
    # torch has copies of integers on every device, of its rarer dtypes not even on the host
    return tensor.view(BITS[tensor.element_size()]).contiguous().reshape(-1).view(torch.uint8)


class DeviceBlock:
    """Where pieces of a buffer lie in memory that has no holes between them. nbytes: of that memory."""

    def __init__(self, pieces: RangePieces) -> None:
        room = -(-pieces.lengths // ALIGNMENT) * ALIGNMENT
        ends = np.cumsum(room)
        self.nbytes = int(ends[-1])
        self._at, self._shifts = pieces.at, ends - room - pieces.at

    def places(self, at: I8) -> I8:
        """Where these places in pieces of the buffer lie."""
        places: I8 = at + self._shifts[np.searchsorted(self._at, at, "right") - 1]
        return places


class DeviceArena:
    """A buffer that a lookup names, of which pieces were received on a device: its length, as `locate.Memory`.

    memory: what was received. nbytes: of the buffer.
    """

    def __init__(self, memory: torch.Tensor, nbytes: int, packed: DeviceBlock) -> None:
        self._memory = memory
        self._length: U8 = np.broadcast_to(np.uint8(0), (nbytes,))
        self._packed = packed

    @classmethod
    def whole(cls, memory: torch.Tensor) -> DeviceArena:
        """All of this memory, without holes."""
        none, size = np.zeros(1, np.int64), np.array([len(memory)])
        return cls(memory, len(memory), DeviceBlock(RangePieces(HERE, none, size, none)))

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._memory.device

    def __call__(self, unit: int) -> U8:
        """An array as long as the buffer, without its content."""
        return self._length

    def taken(self, starts: I8, lengths: I8) -> torch.Tensor:
        """These bytes of the buffer one after the other, in fresh memory of the device."""
        some = lengths > 0
        if not some.any():
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        begins, sizes = joined_runs(self._packed.places(starts[some]), lengths[some])
        ends = begins + sizes
        return torch.cat([self._memory[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)])
