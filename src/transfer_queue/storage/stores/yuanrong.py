"""YuanrongStore: blocks in the shared memory of an openYuanrong worker, written and read there without another copy.

The library (`openyuanrong-datasystem`) is imported at the first use, after that of Mooncake if there is one. By default
it would repeat requests to a full or dead worker for a minute. So its timeouts are short here, and this module repeats
the requests.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from transfer_queue.errors import CapacityError, ConnectionLostError, StartError, TransferQueueError
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores import mooncake
from transfer_queue.storage.stores.base import DevicePath, Forks, Piece, Store, retry_attempt
from transfer_queue.storage.stores.yuanrong_npu import (
    CONNECT_SECONDS,
    MAX_KEYS,
    REQUEST_SECONDS,
    is_missing,
    name_of,
    npu_transport,
)

_forks = Forks("openYuanrong")
REWRITE_SECONDS = 5.0  # for all blocks that are written again, if it fails for some
_FULL = ("[Out of memory]", "[Out of range]", "[RPC_RECV_TIMEOUT]")


class YuanrongStore(Store):
    """See `Store`. `host` and `port` are the node's worker's. `npu_transport`: NPUs send blocks to each other."""

    def __init__(self, host: str, port: int, npu_transport: bool = False) -> None:
        with contextlib.suppress(StartError):  # it is not installed
            mooncake.load()  # Mooncake's library crashes the process if it is loaded after this one
        self._where = host, port
        self._wants_npus = npu_transport
        self._npus: DevicePath | None = None
        self._lock = threading.Lock()
        self._client: Any = None
        self._closed = False
        self._created: dict[int, Any] = {}
        """Address -> the worker's buffer of each block that is being written."""

    def connect(self) -> Any:
        """Return the library's client, which connects at the first use."""
        with self._lock:
            if self._closed:
                raise ConnectionLostError("this connection to the Yuanrong worker was closed")
            if self._client is None:
                _forks.use()
                try:
                    from yr.datasystem.kv_client import KVClient
                except ImportError as error:
                    raise StartError(
                        f"Yuanrong needs its library, which cannot be loaded ({error}): pip install "
                        f"'transfer_queue[yuanrong]'"
                    ) from error
                milliseconds = int(CONNECT_SECONDS * 1000), int(REQUEST_SECONDS * 1000)
                client = KVClient(*self._where, connect_timeout_ms=milliseconds[0], req_timeout_ms=milliseconds[1])
                try:
                    client.init()
                except RuntimeError as error:
                    raise self._lost("cannot be joined", error) from error
                self._client = client
        return self._client

    def device_path(self) -> DevicePath | None:
        """See `Store.device_path`: for NPUs, with `npu_transport`."""
        with self._lock:
            if self._wants_npus:
                self._wants_npus = False
                self._npus = npu_transport(self, self._where)
            return self._npus

    def _lost(self, what: str, error: Exception) -> ConnectionLostError:
        return ConnectionLostError(
            f"the Yuanrong worker at {self._where[0]}:{self._where[1]} {what}: {_first_line(error)}; check that it "
            f"is running, and the settings of backend.Yuanrong"
        )

    def _full(self, nbytes: int, error: Exception) -> CapacityError:
        return CapacityError(
            f"no capacity in the Yuanrong worker at {self._where[0]}:{self._where[1]} for {nbytes} bytes "
            f"({_first_line(error)}); clear samples, let consumers catch up, or give it more memory "
            f"(backend.Yuanrong.worker_args: --shared_memory_size_mb)"
        )

    @contextlib.contextmanager
    def buffer(self, key: str, nbytes: int) -> Iterator[Bytes]:
        """See `Store.buffer`: the worker's own memory, if it has space now."""
        client = self.connect()
        try:
            (made,) = client.mcreate([name_of(key)], [nbytes])
            memory = np.frombuffer(made.MutableData(), np.uint8)
        except RuntimeError:  # `write` tries again, and copies from this memory
            yield np.empty(nbytes, np.uint8)
            return
        address = memory.ctypes.data
        with self._lock:
            self._created[address] = made
        try:
            yield memory
        finally:
            with self._lock:
                self._created.pop(address, None)

    def write(self, key: str, data: Bytes, within: float) -> None:
        """See `Store.write`."""
        client = self.connect()
        with self._lock:
            made = self._created.get(data.ctypes.data)

        def attempt() -> Exception | None:
            nonlocal made
            try:
                if made is None:
                    (made,) = client.mcreate([name_of(key)], [data.size])
                    np.frombuffer(made.MutableData(), np.uint8)[:] = data
                client.mset_buffer([made])
            except RuntimeError as error:
                made = None
                full = any(word in str(error) for word in _FULL)
                return self._full(data.size, error) if full else self._lost(f"refuses {data.size} bytes", error)
            return None

        retry_attempt(within, attempt)

    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        """See `Store.read`: copies out of the worker's memory."""
        client = self.connect()
        wanted = {key: list(some) for key, some in groupby(pieces, key=lambda piece: piece.key)}
        missing: list[str] = []
        keys = list(wanted)
        for first in range(0, len(keys), MAX_KEYS):
            some = keys[first : first + MAX_KEYS]
            buffers: list[Any] = []

            def attempt(some: list[str] = some, buffers: list[Any] = buffers) -> Exception | None:
                try:
                    buffers[:] = client.get_buffers([name_of(key) for key in some])
                except RuntimeError as error:
                    if not is_missing(error):
                        return self._lost("does not respond", error)
                    buffers[:] = [None] * len(some)
                return None

            retry_attempt(within, attempt)
            for key, buffer in zip(some, buffers, strict=True):
                content = None if buffer is None else np.frombuffer(buffer, np.uint8)
                if content is None or any(piece.start + piece.length > content.size for piece in wanted[key]):
                    missing.append(key)
                    continue
                for piece in wanted[key]:
                    into[piece.at : piece.at + piece.length] = content[piece.start : piece.start + piece.length]
        return missing

    def remove(self, keys: Sequence[str]) -> None:
        """See `Store.remove`."""
        for first in range(0, len(keys), MAX_KEYS):
            try:
                self.connect().delete([name_of(key) for key in keys[first : first + MAX_KEYS]])
            except RuntimeError as error:
                if not is_missing(error):
                    raise self._lost("cannot remove blocks", error) from error

    def missing(self, keys: Sequence[str]) -> list[str]:
        """See `Store.missing`. Waits for a worker that is restarting."""
        missing: list[str] = []
        for first in range(0, len(keys), MAX_KEYS):
            some = list(keys[first : first + MAX_KEYS])
            exists: list[bool] = []

            def attempt(some: list[str] = some, exists: list[bool] = exists) -> Exception | None:
                client = self.connect()
                from yr.datasystem.kv_client import ReadParam

                try:
                    # `exist` also lists blocks of a dead worker
                    results = client.read([ReadParam(name_of(key), 0, 1) for key in some])
                    exists[:] = [each is not None for each in results]
                except RuntimeError as error:
                    if not is_missing(error):
                        return self._lost("does not respond", error)
                    exists[:] = [False] * len(some)
                return None

            retry_attempt(10.0, attempt)
            missing += [key for key, is_present in zip(some, exists, strict=True) if not is_present]
        return missing

    def rewrite(self, keys: Sequence[str]) -> None:
        """See `Store.rewrite`.

        A worker reads what it has itself without asking the store where the block is. If that record was lost with
        another worker, no other process finds the block. A write records it again.
        """
        failure: TransferQueueError | None = None
        end = time.monotonic() + REWRITE_SECONDS
        for key in keys:
            left = end - time.monotonic()
            if left <= 0.0 and failure is not None:
                break
            try:
                (content,) = self.connect().get_buffers([name_of(key)])
                if content is not None:
                    self.write(key, np.frombuffer(content, np.uint8).copy(), max(0.0, left))
            except RuntimeError as error:
                if not is_missing(error):
                    failure = self._lost("cannot read a block to write it again", error)
            except TransferQueueError as error:
                failure = error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            path, self._npus, self._wants_npus = self._npus, None, False
        if path is not None:
            path.close()
        with self._lock:
            self._client, self._closed = None, True
            self._created.clear()


def _first_line(error: Exception) -> str:
    """Return what the library says, without the places in its source."""
    return str(error).partition("\n")[0][:300]
