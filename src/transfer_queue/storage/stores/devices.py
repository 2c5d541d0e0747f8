"""The device path of a store: it takes blocks from the memory of a device, and copies ranges of bytes to it.

The memory is a flat uint8 tensor of torch, of which this package needs only the address. Only processes that put or get
import torch, so a device path is made at its first use.
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
    """Transfers that bypass the memory of the host. Several threads may call its methods at once.

    Its methods raise the errors of those of `Store`.
    """

    kind: str
    """The type of device, as torch names it, for example "cuda"."""

    @abstractmethod
    def buffer(self, device: torch.device, nbytes: int) -> AbstractContextManager[torch.Tensor | None]:
        """Return memory of a device to write from or to read into, as a context manager.

        The caller leaves the context only after copies out of the memory have ended.

        Args:
            device: The device.
            nbytes: The number of bytes.

        Returns:
            The memory, uint8 [nbytes]; None if the memory of the host must be used.
        """

    @abstractmethod
    def write(self, key: str, data: torch.Tensor, within: float) -> None:
        """Store the content of a buffer; see `Store.write`.

        Args:
            key: The name.
            data: The memory that `buffer` returned, with its complete content.
            within: Seconds to wait for space.
        """

    @abstractmethod
    def read(self, pieces: Sequence[Piece], into: torch.Tensor, within: float) -> list[str]:
        """Copy ranges of bytes into a buffer; see `Store.read`.

        Args:
            pieces: The ranges.
            into: The memory that `buffer` returned.
            within: Seconds that the read may take.

        Returns:
            The keys that do not exist, or are not complete.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all memory. Nothing is used after this call."""


def through_the_host(wanted: str, found: str, advice: str) -> None:
    """Log that values use the memory of the host, although another way was requested."""
    said = "%s is set, but %s: values go through the memory of the host; %s"
    get_logger(__name__).warning(said, wanted, found, advice)
