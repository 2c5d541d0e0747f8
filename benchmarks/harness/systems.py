"""Systems of the benchmarks' own, beside any that run already, and processes that do what they are told."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.harness.machine import RawSocket, answer, cpu_seconds
from transfer_queue import interface as tq
from transfer_queue.config.environment import process_environment
from transfer_queue.config.settings import Settings
from transfer_queue.net.drivers.connection import MAX_PATH
from transfer_queue.node.system.launcher import RunningSystem, start_local

logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of itself at the first jagged tensor
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["transfer_queue.interface", "benchmarks.harness.payloads"])


@contextlib.contextmanager
def own_folder() -> Iterator[str]:
    """A runtime folder of this run's own, in which no system is to be found yet; removed at the end."""
    environment = process_environment()
    names = ("TQ_RUNTIME_DIR", "TQ_ADDRESS", "TQ_SYSTEM")
    before = {name: environment.pop(name) for name in names if name in environment}
    parent = tempfile.gettempdir()
    if len(parent) + 50 > MAX_PATH:
        parent = "/tmp"  # the paths of sockets must be short
    with tempfile.TemporaryDirectory(prefix="tqb-", dir=parent, ignore_cleanup_errors=True) as folder:
        environment["TQ_RUNTIME_DIR"] = folder
        try:
            yield folder
        finally:
            for name in names:
                environment.pop(name, None)
            environment.update(before)


class System:
    """A running system, to which this process is attached (`transfer_queue.kv_put` works)."""

    def __init__(self, running: RunningSystem) -> None:
        self.running = running
        self.address = str(running.folder)
        logs = {log.stem: log.read_text() for log in running.logs.iterdir()}
        found = {name: re.findall(r"up, process (\d+)", text) for name, text in logs.items()}
        self.pids = {name: int(numbers[-1]) for name, numbers in found.items() if numbers}

    def cpu(self) -> float:
        """Processor seconds that its servers have used until now."""
        return cpu_seconds(list(self.pids.values()))


@contextlib.contextmanager
def system(conf: dict[str, Any] | None = None, sampler: object | None = None) -> Iterator[System]:
    """A system with these settings, in a folder of its own; stopped at the end."""
    with own_folder():
        settings = Settings.from_config(conf)
        config = {"settings": settings.to_json(), "conf": {}}
        running = start_local("bench", config, sampler, environment=process_environment())
        try:
            tq.init()
            yield System(running)
        finally:
            tq.close()
            running.stop()


class Worker:
    """A process that has imported everything, has met no system yet, and does what it is told."""

    def __init__(self, address: str | None = None) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_obey, args=(theirs, address), daemon=True)
        self._process.start()
        theirs.close()
        self.do(os.getpid)

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def begin(self, act: Callable[..., Any], *arguments: Any) -> None:
        """Has it call a function of a module; `result` is to follow."""
        self._pipe.send((act, arguments))

    def result(self) -> Any:
        """What the call gave, or the next thing that it tells (`tell`). RuntimeError with its words where it failed."""
        words, value = self._pipe.recv()
        if words is not None:
            raise RuntimeError(f"a benchmark's process failed:\n{words}")
        return value

    def has_told(self) -> bool:
        """Whether `result` has something at once; waits a moment for it."""
        return self._pipe.poll(0.0005)

    def do(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """`begin` and `result`."""
        self.begin(act, *arguments)
        return self.result()

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def workers(count: int, address: str | None = None) -> Iterator[list[Worker]]:
    """Some of them."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Worker(address)) for _ in range(count)]


@contextlib.contextmanager
def raw_socket() -> Iterator[RawSocket]:
    """A bare connection to another process."""
    with tempfile.TemporaryDirectory(prefix="tqb-", dir="/tmp") as folder, Worker() as other:
        path = f"{folder}/bare"
        other.begin(answer, path)
        bare = RawSocket(path)
        try:
            yield bare
        finally:
            bare.close()
            other.result()


_told: list[Connection] = []


def tell(value: Any) -> None:
    """In a worker: gives something to who called, before the call ends."""
    _told[0].send((None, value))


def asked() -> bool:
    """In a worker: whether the next call waits already, so that one without an end of its own is to end."""
    return _told[0].poll()


def _obey(pipe: Connection, address: str | None) -> None:
    environment = process_environment()
    for name in ("TQ_RUNTIME_DIR", "TQ_ADDRESS", "TQ_SYSTEM"):  # the server that forked us may have older ones
        environment.pop(name, None)
    if address is not None:
        environment["TQ_ADDRESS"] = address
    _told.append(pipe)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        for act, arguments in iter(pipe.recv, None):
            reply: tuple[str | None, Any]
            try:
                reply = (None, act(*arguments))
            except Exception:
                reply = (traceback.format_exc(), None)
            pipe.send(reply)
    tq.close()
