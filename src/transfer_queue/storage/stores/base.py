"""What a store has to offer: bytes under names, written once, read in pieces, removed.

A name (`key`) stands for one content for ever: it is written by one process, read by any number of them, and removed by
the storage unit when nobody needs it any more. A store that was written by somebody else is used by its import path,
`backend.storage_backend: "package.module:Class"`; the class is made with `backend.options` in every process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue.errors import InvalidArgumentError, StartError
from transfer_queue.storage.protocols import Bytes

if TYPE_CHECKING:
    pass


from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from transfer_queue.utils.logging_utils import get_logger

if TYPE_CHECKING:
    import torch


BUILT_IN = {
    "MooncakeStore": "transfer_queue.storage.stores.mooncake:MooncakeStore",
    "Yuanrong": "transfer_queue.storage.stores.yuanrong:YuanrongStore",
    "RayStore": "transfer_queue.storage.stores.ray_store:RayStore",
}

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25  # seconds between two tries


class Piece(NamedTuple):
    """Bytes that a reader wants: `length` of them from `start` on of what is called `key`, to go to `at`."""

    key: str
    start: int
    length: int
    at: int


class Store(ABC):
    """A connection of this process to a store. Its methods may be called by several threads at once.

    capacity: most bytes of all blocks; 0 where the store alone knows when it is full.

    Errors, for all methods: ConnectionLostError where the store cannot be reached for as long as was given.
    """

    capacity: int = 0

    @contextlib.contextmanager
    def buffer(self, key: str, nbytes: int) -> Iterator[Bytes]:
        """Memory of so many bytes, at least one, to be filled and given to `write` under this key."""
        yield np.empty(nbytes, np.uint8)

    @abstractmethod
    def write(self, key: str, data: Bytes, within: float) -> None:
        """Stores what `buffer` gave; when this returns, every process can read it.

        The same key again replaces what was there. CapacityError where there is no room for so many seconds.
        """

    @abstractmethod
    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        """Copies all pieces into a buffer; the keys that are not there, or not whole, whose pieces are then anything.

        Pieces of one key follow one another. within: seconds.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Removes these; those that are not there are fine, and readers in the middle of one hold nobody up."""

    @abstractmethod
    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of these keys that will certainly never be read again. It may take seconds to be certain."""

    def device_path(self) -> DevicePath | None:
        """How values of a device come and go past the host's memory; None where they do not."""
        return None

    def life(self) -> str:
        """Another text in each life of what keeps the bytes, where these end with it. To be told without waiting."""
        return ""

    def close(self) -> None:  # noqa: B027 - not every store has something to end
        """Ends the connection. What was written stays. Idempotent."""


class StoreAddress(msgspec.Struct, frozen=True):
    """What a process needs to reach a store. kind: a built-in name or an import path; options: of its class.

    life: of what keeps the bytes; another one has none of those of before. capacity: bytes; 0 where the store alone
    knows. join: "host:port" at which keepers on other nodes join it, where they can.
    """

    kind: str
    options: dict[str, Any] = {}
    life: str = ""
    capacity: int = 0
    join: str = ""


def connect(address: StoreAddress) -> Store:
    """A connection to the store. StartError, saying what to do, where its library or class cannot be used."""
    path = BUILT_IN.get(address.kind, address.kind)
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
        raise StartError(f"the store {address.kind} cannot be made with {address.options}: {error}") from error
    if not isinstance(store, Store):
        raise InvalidArgumentError(f"{path} is no transfer_queue.storage.stores.base.Store")
    return store


class Forks:
    """Whether this process was forked from one that had used a library which does not survive that."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._used_by: int | None = None

    def use(self) -> None:
        """The library is about to be used. StartError in a child of a process that used it."""
        if self._used_by not in (None, os.getpid()):
            raise StartError(
                f"{self._library} does not work in a process that was forked from one that used it (process "
                f"{self._used_by}): start this one by spawn (multiprocessing_context='spawn' of a DataLoader), or fork "
                f"it before the first put or get"
            )
        self._used_by = os.getpid()


def again_and_again(within: float, attempt: Callable[[], Exception | None]) -> None:
    """Tries until nothing is in the way, for so many seconds, with pauses that grow; raises what was in the way last.

    attempt: answers what is in the way, None where nothing is; what it raises ends the tries.
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
