"""Reference measurements of this machine, and the processor time and memory of processes from /proc."""

from __future__ import annotations

import contextlib
import mmap
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 1 << 20  # bytes of one transfer of a raw socket
MAX_COPIED = 512 << 20  # bytes of one measured memcpy; the time of more bytes is extrapolated


def clocked(act: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds that a call took."""
    start = time.perf_counter()
    act(*arguments)
    return time.perf_counter() - start


class Memcpy:
    """Copies of `nbytes` bytes between memory that was used before, in one thread."""

    def __init__(self, nbytes: int) -> None:
        copied = max(1, min(nbytes, MAX_COPIED))
        self._factor = nbytes / copied
        self._source, self._target = np.ones(copied, np.uint8), np.zeros(copied, np.uint8)

    def seconds(self) -> float:
        """Return the seconds of one copy."""
        return clocked(np.copyto, self._target, self._source) * self._factor


class ThreadedMemcpy:
    """Copies of `nbytes` bytes by plain threads into a mapping of shared memory that was written before.

    Args:
        nbytes: The number of bytes.
    """

    def __init__(self, nbytes: int) -> None:
        copied = max(1, min(nbytes, MAX_COPIED))
        self._factor = nbytes / copied
        self._source = np.ones(copied, np.uint8)
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(copied)
            self.target = np.frombuffer(mmap.mmap(file.fileno(), copied), np.uint8)
            """The mapping."""
        self.target[:] = 0

    def seconds(self, threads: int) -> float:
        """Return the seconds of one copy by this number of threads, which start with it."""
        bounds = [len(self._source) * part // threads for part in range(threads + 1)]

        def copy(begin: int, end: int) -> None:
            self.target[begin:end] = self._source[begin:end]

        def copy_all() -> None:
            others = [threading.Thread(target=copy, args=bounds_of) for bounds_of in pairwise(bounds[1:])]
            for each in others:
                each.start()
            copy(*bounds[:2])
            for each in others:
                each.join()

        return clocked(copy_all) * self._factor


class RawSocket:
    """A UNIX socket to a process (`answer`) that sends the requested number of bytes, without encoding."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        while True:
            with contextlib.suppress(OSError):  # the other process is still starting
                self._socket.connect(path)
                return

    def seconds(self, up: int, down: int) -> float:
        """Return the seconds of sending `up` bytes and receiving `down` bytes (at least one)."""
        body, into = up.to_bytes(8, "little") + max(1, down).to_bytes(8, "little") + bytes(up), bytearray(max(1, down))
        start = time.perf_counter()
        self._socket.sendall(body)
        _fill(self._socket, memoryview(into))
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the socket. The other process ends, too."""
        self._socket.close()


def answer(path: str) -> None:
    """Serve one `RawSocket` until it is closed."""
    head = bytearray(16)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sock, _ = listener.accept()
    with sock, contextlib.suppress(EOFError):
        while True:
            _fill(sock, memoryview(head))
            up, down = (int.from_bytes(head[i : i + 8], "little") for i in (0, 8))
            _fill(sock, memoryview(bytearray(up)))
            sock.sendall(bytes(down))


def _fill(sock: socket.socket, memory: memoryview) -> None:
    while memory:
        count = sock.recv_into(memory, min(len(memory), CHUNK))
        if not count:
            raise EOFError
        memory = memory[count:]


def cpu_seconds(pids: list[int]) -> float:
    """Return the processor seconds that the living threads of these processes have used."""
    return sum(_ran(task) for pid in pids for task in _tasks(pid))


def _tasks(pid: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from Path(f"/proc/{pid}/task").iterdir()


def _ran(task: Path) -> float:
    with contextlib.suppress(OSError):
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    return 0.0


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """Return the bytes of a process: resident, anonymous, shared (mapped shared memory), peak (of resident) and pss."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    lines += Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    values = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (each.partition(":") for each in lines) if "kB" in rest
    }
    wanted = {"resident": "VmRSS", "anonymous": "RssAnon", "shared": "RssShmem", "peak": "VmHWM", "pss": "Pss"}
    return {name: values[key] for name, key in wanted.items()}


def reset_peak(pid: int | str = "self") -> None:
    """Reset `peak` to the present resident memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
