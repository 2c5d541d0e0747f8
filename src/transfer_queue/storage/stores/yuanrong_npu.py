"""Blocks of an openYuanrong worker that NPUs send to each other: a reader's NPU gets them from the writer's NPU.

What the library sends between NPUs is in memory of the process that has written it, ends with that process, and cannot
be read by another process on the same NPU, nor by one without an NPU. So each block is also written to the worker. The
writer's NPU has a copy, of the newest and large blocks, which may be dropped at any time. A reader that cannot get the
copy, or had a failure recently, reads from the worker.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from transfer_queue.storage.stores.base import DevicePath, Piece, Store, warn_of_host_copies
from transfer_queue.utils.logging_utils import get_logger

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# constants of the library, used also without NPUs
CONNECT_SECONDS = 2.0
REQUEST_SECONDS = 2.0
MAX_KEYS = 1000  # of one request
MISSING = ("[Key not found]", "no object copy exists")
"""What errors say of a key that does not exist, and of one whose worker has died: it stays recorded without a place."""

SETTING = "backend.Yuanrong.enable_yr_npu_transport"
LEAST = 64 << 10  # bytes of the smallest block of which a copy is made
MOST = 1 << 30  # bytes of copies that a process keeps on its NPU
REST_SECONDS = 60.0  # after a failure, in which values come from the worker
MAX_ROUNDS = 8  # requests for the pieces of one block, because a request can contain a block only once
MAX_OFFSET = 2**31 - 1  # in a copy: the library uses 32 bits

_FAILURES = (ImportError, RuntimeError, TypeError, ValueError)  # errors of the library


def npu_transport(store: Store, where: tuple[str, int]) -> NpuTransport | None:
    """Return the path; None, with a log line, if this process cannot have it. `where` is the worker's host and port."""
    problem = obstacle()
    if problem is None:
        return NpuTransport(store, where)
    warn_of_host_copies(SETTING, *problem)
    return None


def obstacle() -> tuple[str, str] | None:
    """Return what prevents it, and what to do about it; None if nothing does."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is missing", "install it if this process has an NPU"
    import torch_npu

    if not torch_npu.npu.is_available():
        return "this process has no NPU (torch.npu.is_available() is false)", "this is correct if it needs no NPU"
    return None


class NpuTransport(DevicePath):
    """See `DevicePath`."""

    kind = "npu"

    def __init__(self, store: Store, where: tuple[str, int]) -> None:
        self._store = store
        self._where = where
        self._lock = threading.Lock()
        self._clients: dict[int, Any] = {}
        """Number of an NPU -> the library's client for it."""
        self._copies: dict[str, torch.Tensor] = {}
        """Key -> the copy of its block in this process, oldest first; at most MOST bytes in total."""
        self._bytes = 0
        self._rests_until = 0.0

    @contextlib.contextmanager
    def buffer(self, device: torch.device, nbytes: int) -> Iterator[torch.Tensor | None]:
        """See `DevicePath.buffer`. If the NPU is full, it drops copies."""
        from transfer_queue.wire.blocks.device_memory import allocate_on_device

        memory = allocate_on_device(device, nbytes)
        if memory is None and self._copies:
            self._forget(list(self._copies))
            memory = allocate_on_device(device, nbytes)
        yield memory

    # ------------------------------------------------------------ blocks

    def write(self, key: str, data: torch.Tensor, within: float) -> None:
        """See `DevicePath.write`: writes to the worker, and keeps a copy for readers on other NPUs."""
        import torch

        with self._store.buffer(key, data.numel()) as memory:
            torch.from_numpy(memory).copy_(data)
            self._store.write(key, memory, within)
        if not LEAST <= data.numel() <= MOST:
            return
        if self._try_call(lambda: self._client(data.device).dev_mset([_copy_of(key)], [data])) == []:
            with self._lock:
                self._copies[key] = data
                self._bytes += data.numel()
            self._drop_copies()

    def read(self, pieces: Sequence[Piece], into: torch.Tensor, within: float) -> list[str]:
        """See `DevicePath.read`: reads from other NPUs if possible, and the rest from the worker."""
        from transfer_queue.wire.buffers.tensors import synchronize

        left: list[Piece] = []
        for piece in pieces:
            copy = self._copies.get(piece.key)
            if copy is None:
                left.append(piece)
            else:  # the library does not send within one NPU
                into[piece.at : piece.at + piece.length].copy_(copy[piece.start : piece.start + piece.length])
        left = self._read_copies(left, into)
        missing = self._read_from_worker(left, into, within) if left else []
        synchronize(into.device)
        return missing

    def _read_copies(self, pieces: Sequence[Piece], into: torch.Tensor) -> list[Piece]:
        """Read from other NPUs. Returns the pieces that are left to read."""
        from yr.datasystem.ds_tensor_client import CopyRange

        rounds: list[list[Piece]] = []
        left: list[Piece] = []
        for _, group in groupby(pieces, key=lambda piece: piece.key):
            some = list(group)
            if len(some) > MAX_ROUNDS or max(piece.start for piece in some) > MAX_OFFSET:
                left += some
                continue
            for number, piece in enumerate(some):
                if number == len(rounds):
                    rounds.append([])
                rounds[number].append(piece)
        for one in rounds:
            for first in range(0, len(one), MAX_KEYS):
                part = one[first : first + MAX_KEYS]
                names = [_copy_of(piece.key) for piece in part]
                ranges = [CopyRange(piece.start, piece.at, piece.length) for piece in part]
                failed = self._try_call(partial(self._get, names, into, ranges))
                absent = set(names if failed is None else failed)
                left += [piece for piece, name in zip(part, names, strict=True) if name in absent]
        return sorted(left)  # so that pieces of one key are adjacent

    def _get(self, names: list[str], into: torch.Tensor, ranges: list[Any]) -> list[str]:
        failed: list[str] = self._client(into.device).dev_mget_into_tensor(names, into, ranges, 0)
        return failed

    def _read_from_worker(self, pieces: Sequence[Piece], into: torch.Tensor, within: float) -> list[str]:
        import torch

        from transfer_queue.wire.buffers.copies import allocate

        end, staged = 0, []
        for piece in pieces:
            staged.append(piece._replace(at=end))
            end += piece.length
        memory = allocate(end)
        missing = self._store.read(staged, memory, within)
        received = torch.from_numpy(memory)
        for piece, here in zip(pieces, staged, strict=True):
            into[piece.at : piece.at + piece.length].copy_(received[here.at : here.at + here.length])
        return missing

    # ------------------------------------------------------------ copies

    def _drop_copies(self) -> None:
        """If there are more than MOST bytes, drop the copies of removed blocks, then the oldest down to half of it."""
        if self._bytes <= MOST:
            return
        with self._lock:
            keys = list(self._copies)
        self._forget(self._store.missing(keys))
        with self._lock:
            sizes = [(key, copy.numel()) for key, copy in self._copies.items()]
            over = self._bytes - MOST // 2 if self._bytes > MOST else 0
        oldest = []
        for key, nbytes in sizes:
            if over <= 0:
                break
            oldest.append(key)
            over -= nbytes
        self._forget(oldest)

    def _forget(self, keys: Sequence[str]) -> None:
        """Drop copies: first they cannot be found any more, then their memory is freed."""
        with self._lock:
            removed = {key: self._copies.pop(key) for key in keys if key in self._copies}
            self._bytes -= sum(copy.numel() for copy in removed.values())
        for device in {copy.device for copy in removed.values()}:
            names = [_copy_of(key) for key, copy in removed.items() if copy.device == device]
            for first in range(0, len(names), MAX_KEYS):
                self._try_call(partial(self._delete, device, names[first : first + MAX_KEYS]))

    def _delete(self, device: torch.device, names: list[str]) -> None:
        self._client(device).dev_local_delete(names)

    # ------------------------------------------------------------ the library

    def _client(self, device: torch.device) -> Any:
        """Return the library's client for an NPU, which connects at the first use."""
        number = device.index or 0
        with self._lock:
            client = self._clients.get(number)
            if client is None:
                from yr.datasystem.ds_tensor_client import DsTensorClient

                milliseconds = int(CONNECT_SECONDS * 1000), int(REQUEST_SECONDS * 1000)
                client = DsTensorClient(
                    *self._where, number, connect_timeout_ms=milliseconds[0], req_timeout_ms=milliseconds[1]
                )
                client.init()
                self._clients[number] = client
        return client

    def _try_call(self, call: Callable[[], T]) -> T | None:
        """Return the result of a call of the library; None if it fails, and for REST_SECONDS after that."""
        if time.monotonic() < self._rests_until:
            return None
        try:
            return call()
        except _FAILURES as error:
            if not is_missing(error):
                self._rests_until = time.monotonic() + REST_SECONDS
                message = str(error).partition("\n")[0][:300]
                get_logger(__name__).warning(
                    "NPUs do not send blocks to each other (%s): values come from the worker for %g s; check that the "
                    "library is built for NPUs, or set %s: false", message, REST_SECONDS, SETTING,
                )  # fmt: skip
            return None

    def close(self) -> None:
        """See `DevicePath.close`."""
        self._forget(list(self._copies))
        with self._lock:
            self._clients.clear()


def is_missing(error: Exception) -> bool:
    """Whether an error of the library says that a key, or the content of it, does not exist."""
    return any(phrase in str(error) for phrase in MISSING)


def name_of(key: str) -> str:
    """Return the key in characters that the worker accepts."""
    return key.replace("/", ":")


def _copy_of(key: str) -> str:
    """Return the name of the copy of a block."""
    return name_of(f"{key}/npu")
