"""Starts separate systems for the benchmarks, and worker processes that call functions on request."""

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

logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # it logs a warning at the first jagged tensor
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["transfer_queue.interface", "benchmarks.harness.payloads"])


@contextlib.contextmanager
def own_folder() -> Iterator[str]:
    """Use a new, empty runtime folder, which is removed at the end."""
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


def start_system(name: str, conf: dict[str, Any] | None = None) -> RunningSystem:
    """Start a system with these settings in the runtime folder of this process."""
    config = {"settings": Settings.from_config(conf).to_json(), "conf": {}}
    return start_local(name, config, environment=process_environment())


class System:
    """A running system, to which this process is attached (`transfer_queue.kv_put` works)."""

    def __init__(self, running: RunningSystem) -> None:
        self.running = running
        self.address = str(running.folder)
        logs = {log.stem: log.read_text() for log in running.logs.iterdir()}
        found = {name: re.findall(r"up, process (\d+)", text) for name, text in logs.items()}
        self.pids = {name: int(numbers[-1]) for name, numbers in found.items() if numbers}

    def cpu(self) -> float:
        """Return the processor seconds that the servers have used."""
        return cpu_seconds(list(self.pids.values()))


@contextlib.contextmanager
def system(conf: dict[str, Any] | None = None) -> Iterator[System]:
    """Start a system with these settings in its own folder, and stop it at the end."""
    with own_folder():
        running = start_system("bench", conf)
        try:
            tq.init()
            yield System(running)
        finally:
            tq.close()
            running.stop()


def waiting_claims(partition: str) -> int:
    """Return the number of claims that wait in a partition."""
    status = tq.get_client().status()
    return sum(task.waiting for each in status.partitions if each.name == partition for task in each.tasks)


class Worker:
    """A process that has imported all modules, is not attached to a system yet, and calls functions on request."""

    def __init__(self, address: str | None = None) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_obey, args=(theirs, address), daemon=True)
        self._process.start()
        theirs.close()
        self.do(os.getpid)

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def begin(self, act: Callable[..., Any], *arguments: Any) -> None:
        """Start a call of a module's function in the process; `result` returns the outcome."""
        self._pipe.send((act, arguments))

    def result(self) -> Any:
        """Return the result of the call, or the next value that it sends with `tell`.

        Raises:
            RuntimeError: The call failed. The message has its traceback.
        """
        words, value = self._pipe.recv()
        if words is not None:
            raise RuntimeError(f"a benchmark's process failed:\n{words}")
        return value

    def has_told(self) -> bool:
        """Return whether `result` would return at once, after a short wait."""
        return self._pipe.poll(0.0005)

    def has_ended(self) -> bool:
        """Return whether `result` would return at once, without waiting."""
        return self._pipe.poll()

    def do(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the process and return its result."""
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
    """Start `count` workers, and end them afterwards."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Worker(address)) for _ in range(count)]


@contextlib.contextmanager
def raw_socket() -> Iterator[RawSocket]:
    """Open a bare connection to another process."""
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
    """In a worker: send a value to the caller before the call ends."""
    _told[0].send((None, value))


def asked() -> bool:
    """In a worker: return whether the next call was requested, so that an endless call must end."""
    return _told[0].poll()


def _obey(pipe: Connection, address: str | None) -> None:
    environment = process_environment()
    for name in ("TQ_RUNTIME_DIR", "TQ_ADDRESS", "TQ_SYSTEM"):  # the fork server may have older values
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
