"""The interface of a store: bytes under names, written once, read in pieces, and removed.

A name (`key`) stands for one content: one process writes it, any number of processes read it, and the storage unit
removes it when it is not needed any more. To use a store of your own, set `backend.storage_backend` to its import path,
`"package.module:Class"`. Every process makes an instance of the class with `backend.options`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue.errors import InvalidArgumentError, StartError
from transfer_queue.storage.protocols import Bytes
from transfer_queue.utils.logging_utils import get_logger

if TYPE_CHECKING:
    import torch

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25  # seconds between two attempts


class Piece(NamedTuple):
    """A range of bytes that a reader requests.

    Example:
        >>> from transfer_queue.storage.stores.base import Piece
        >>> Piece(key="unit/7", start=64, length=128, at=0).length
        128
    """

    key: str
    """The name under which the bytes were written."""
    start: int
    """The first byte of the range."""
    length: int
    """The number of bytes."""
    at: int
    """The position in the destination, in bytes."""


class Store(ABC):
    """A connection of this process to a store. Several threads may call its methods at once.

    Every method raises ConnectionLostError if the store cannot be reached for the given time.

    Example:
        >>> from transfer_queue.storage.stores.base import Store
        >>> class MemoryStore(Store):
        ...     def __init__(self):
        ...         self.blocks = {}
        ...     def write(self, key, data, within):
        ...         self.blocks[key] = bytes(data)
        ...     def read(self, pieces, into, within):
        ...         for piece in pieces:
        ...             if piece.key in self.blocks:
        ...                 source = self.blocks[piece.key][piece.start : piece.start + piece.length]
        ...                 into[piece.at : piece.at + piece.length] = np.frombuffer(source, np.uint8)
        ...         return self.missing([piece.key for piece in pieces])
        ...     def remove(self, keys):
        ...         for key in keys:
        ...             self.blocks.pop(key, None)
        ...     def missing(self, keys):
        ...         return [key for key in keys if key not in self.blocks]
        >>> store = MemoryStore()
        >>> with store.buffer("unit/7", 4) as memory:
        ...     memory[:] = [1, 2, 3, 4]
        ...     store.write("unit/7", memory, within=10.0)
        >>> store.missing(["unit/7", "unit/8"])
        ['unit/8']
    """

    capacity: int = 0
    """The maximum number of bytes of all blocks; 0 if only the store knows when it is full."""

    @contextlib.contextmanager
    def buffer(self, key: str, nbytes: int) -> Iterator[Bytes]:
        """Return memory to fill and to pass to `write` under the same key, as a context manager.

        Args:
            key: The name.
            nbytes: The number of bytes, at least 1.

        Yields:
            The memory, uint8 [nbytes].

        Raises:
            CapacityError: The store has no space.
        """
        yield np.empty(nbytes, np.uint8)

    @abstractmethod
    def write(self, key: str, data: Bytes, within: float) -> None:
        """Store the content of a buffer. When this method returns, every process can read it.

        Writing the same key again replaces the content.

        Args:
            key: The name.
            data: The memory that `buffer` returned.
            within: Seconds to wait for space.

        Raises:
            CapacityError: There was no space during this time.
        """

    @abstractmethod
    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        """Copy ranges of bytes into a buffer.

        Args:
            pieces: The ranges. Those of one key follow one another.
            into: The destination, uint8 [n].
            within: Seconds that the read may take.

        Returns:
            The keys that do not exist, or are not complete. The bytes of their pieces are undefined.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove keys. Keys that do not exist are ignored, and a reader in the middle of one does not delay the call.

        Args:
            keys: The names.
        """

    @abstractmethod
    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that can certainly never be read again. It may take seconds to be certain.

        Args:
            keys: The names.

        Returns:
            Those of them that are gone.
        """

    def rewrite(self, keys: Sequence[str]) -> None:  # noqa: B027 - most stores answer the same on every node
        """Write blocks once more that this connection can read, but a connection on another node cannot.

        Keys that this connection cannot read are ignored. Does nothing by default.

        Args:
            keys: The names.

        Raises:
            CapacityError: There is no space to do it.
        """

    def device_path(self) -> DevicePath | None:
        """Return how values in the memory of a device bypass the host's memory; None if they do not.

        Returns:
            The device path, or None.
        """
        return None

    def life(self) -> str:
        """Return a text that is different in each life of the process that holds the bytes, if they end with it.

        The method must return without waiting.

        Returns:
            The text; "" if the bytes outlive processes.
        """
        return ""

    def close(self) -> None:  # noqa: B027 - not every store has something to close
        """Close the connection. What was written stays. Further calls do nothing."""


@dataclass(frozen=True)
class BuiltInStore:
    """Where a built-in store is implemented. Both paths have the form "package.module:Class"."""

    path: str
    """The subclass of `Store`."""
    server: str = ""
    """The class of its store server, if the system starts one; see `store_server`."""


BUILT_IN: dict[str, BuiltInStore] = {
    "MooncakeStore": BuiltInStore(
        "transfer_queue.storage.stores.mooncake:MooncakeStore",
        server="transfer_queue.storage.stores.mooncake_server:MooncakeKeeper",
    ),
    "Yuanrong": BuiltInStore(
        "transfer_queue.storage.stores.yuanrong:YuanrongStore",
        server="transfer_queue.storage.stores.yuanrong_server:YuanrongKeeper",
    ),
    "RayStore": BuiltInStore("transfer_queue.storage.stores.ray_store:RayStore"),
}
"""The stores that `backend.storage_backend` may name without an import path.

Their options are declared in `config.store_options`, so that a configuration is checked without the modules here. A
module of a store is imported only by the processes that use the store.
"""


def has_server(backend: str) -> bool:
    """Whether the system starts a store server for this backend."""
    return backend in BUILT_IN and BUILT_IN[backend].server != ""


class StoreAddress(msgspec.Struct, frozen=True):
    """What a process needs to connect to a store.

    Example:
        >>> from transfer_queue.storage.stores.base import StoreAddress
        >>> StoreAddress("my_package.my_store:MyStore", {"host": "localhost"}).capacity
        0
    """

    kind: str
    """A built-in name or an import path."""
    options: dict[str, Any] = {}
    """The keyword arguments of its class."""
    life: str = ""
    """The life of the process that holds the bytes. Another life has none of the earlier bytes."""
    capacity: int = 0
    """The maximum number of bytes; 0 if only the store knows it."""
    join: str = ""
    """"host:port" at which store servers on other nodes join the store, if they can."""


def connect(address: StoreAddress) -> Store:
    """Connect to a store.

    Args:
        address: Its address.

    Returns:
        The connection.

    Raises:
        StartError: The library or class of the store cannot be used. The message says what to do.
        InvalidArgumentError: The class is not a subclass of `Store`.

    Example:
        >>> from transfer_queue.storage.stores.base import StoreAddress, connect
        >>> connect(StoreAddress("no_such_package:Store"))
        Traceback (most recent call last):
        transfer_queue.errors.StartError: the store no_such_package:Store ... cannot be used: ...
    """
    path = BUILT_IN[address.kind].path if address.kind in BUILT_IN else address.kind
    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StartError(
            f"the store {address.kind} (backend.storage_backend) cannot be used: {error}; install its library where "
            f"every process of the system finds it, see docs/backends.md"
        ) from error
    try:
        store = kind(**address.options)
    except TypeError as error:
        raise StartError(
            f"the store {address.kind} cannot be created with {address.options}: {error}; correct backend.options"
        ) from error
    if not isinstance(store, Store):
        raise InvalidArgumentError(
            f"{path} must be a subclass of transfer_queue.storage.stores.base.Store, got a {type(store).__name__}"
        )
    return store


class Forks:
    """Detects that this process was forked from one that had used a library that does not survive a fork.

    Args:
        library: The name of the library, for messages.

    Example:
        >>> from transfer_queue.storage.stores.base import Forks
        >>> Forks("my_store").use()
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._used_by: int | None = None

    def use(self) -> None:
        """Declare that the library is about to be used.

        Raises:
            StartError: This process was forked from one that had used the library.

        Example:
            >>> from transfer_queue.storage.stores.base import Forks
            >>> Forks("my_store").use()
        """
        if self._used_by not in (None, os.getpid()):
            raise StartError(
                f"{self._library} does not work in a process that was forked from one that used it (process "
                f"{self._used_by}): start this one by spawn (multiprocessing_context='spawn' of a DataLoader), or fork "
                f"it before the first put or get"
            )
        self._used_by = os.getpid()


def retry_attempt(within: float, attempt: Callable[[], Exception | None]) -> None:
    """Repeat an attempt until it succeeds, with growing pauses. Raise its last error when the time is over.

    Args:
        within: The time in seconds.
        attempt: Returns the error to repeat after; None for success. What it raises ends the attempts.

    Raises:
        Exception: The last error of `attempt`.

    Example:
        >>> from transfer_queue.storage.stores.base import retry_attempt
        >>> errors = [OSError("not yet")]
        >>> retry_attempt(1.0, lambda: errors.pop() if errors else None)
    """
    end, pause = time.monotonic() + within, FIRST_PAUSE
    while True:
        error = attempt()
        if error is None:
            return
        left = end - time.monotonic()
        if left <= 0:
            raise error
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)


class DevicePath(ABC):
    """Moves values between a device and a store without the memory of the host.

    Several threads may call its methods at once. They raise the same errors as those of `Store`. All buffers of one
    call are of one device.
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


def warn_of_host_copies(wanted: str, obstacle: str, advice: str) -> None:
    """Log that values use the memory of the host, although another way was requested."""
    message = "%s is set, but %s: values are copied through the memory of the host; %s"
    get_logger(__name__).warning(message, wanted, obstacle, advice)
