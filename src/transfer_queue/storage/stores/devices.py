"""What a store may offer beside `Store`: to take blocks from the memory of a device, and give pieces to it.

The memory is a flat uint8 tensor of torch's, of which this package needs no more than where it lies. Only processes
that put or get import torch: all of this is made at their first use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from transfer_queue.storage.stores.base import Piece
from transfer_queue.utils.logging_utils import get_logger

if TYPE_CHECKING:
    import torch


class DevicePath(ABC):
    """Past the memory of the host. Its methods may be called by several threads at once; errors as those of `Store`.

    kind: of device, as torch names it. `buffer` and what is done with it are of one device.
    """

    kind: str

    @abstractmethod
    def buffer(self, device: torch.device, nbytes: int) -> AbstractContextManager[torch.Tensor | None]:
        """Memory of so many bytes to be written from, or read into; None where the host's is to be taken instead.

        Whoever leaves it has waited for what was to be copied out of it.
        """

    @abstractmethod
    def write(self, key: str, data: torch.Tensor, within: float) -> None:
        """See `Store.write`. data: what `buffer` gave, complete."""

    @abstractmethod
    def read(self, pieces: Sequence[Piece], into: torch.Tensor, within: float) -> list[str]:
        """See `Store.read`. into: what `buffer` gave."""

    @abstractmethod
    def close(self) -> None:
        """Gives all memory back; nothing is used after it."""


def through_the_host(wanted: str, found: str, advice: str) -> None:
    """Says that values go through the host, though something else is wanted."""
    said = "%s is set, but %s: values go through the memory of the host; %s"
    get_logger(__name__).warning(said, wanted, found, advice)
