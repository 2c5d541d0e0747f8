"""Starts and watches the processes of a run, and ends them also after errors."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import traceback
import zlib
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol

import torch
import transfer_queue as tq

from settings import Settings

PRELOADED = ["torch._dynamo", "transfer_queue", "matplotlib.figure", "rich.live", "rich.table"]
"""The modules that every process imports: optimizers import the first, and `run.py` imports the others."""
GRACE = 5.0
"""Seconds that a process has to end when it is asked to, before it is killed."""


class WorkerError(Exception):
    """A process of the run failed; the message holds its traceback."""


class Roles(Protocol):
    """The interface to the roles of a run: `Processes`, or `actors.Actors`."""

    killed: list[str]

    @property
    def alive(self) -> dict[str, int]:
        """See `Processes.alive`."""
        ...

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """See `Processes.start`."""

    def watch(self, seconds: float, expendable: str) -> None:
        """See `Processes.watch`."""

    def __enter__(self) -> Roles: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Processes(Roles):
    """A context that ends its processes when it is left. Torch is imported once, in the server that forks them."""

    def __init__(self, settings: Settings) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
            forkserver.ensure_running()  # it imports while the model warms up
        self._settings = settings
        self._running: dict[str, tuple[Any, Connection]] = {}
        self.killed: list[str] = []
        """Workers that were killed from outside."""

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """Run function(settings, name, *arguments) in a new process."""
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_child, args=(function, self._settings, name, arguments, writer), name=name, daemon=True
        )
        process.start()
        writer.close()
        self._running[name] = (process, reader)

    @property
    def alive(self) -> dict[str, int]:
        """Return the name and process id of every running process."""
        return {name: process.pid for name, (process, _) in self._running.items()}

    def watch(self, seconds: float, expendable: str) -> None:
        """Wait until a process ends, at most `seconds`.

        Processes whose names begin with `expendable` may be killed while one of them is left.

        Raises:
            WorkerError: Another process failed, or the last of these.
        """
        names = {process.sentinel: name for name, (process, _) in self._running.items()}
        for sentinel in wait(list(names), seconds):
            name = names[sentinel]  # type: ignore[index]
            process, reader = self._running.pop(name)
            process.join()
            if process.exitcode == 0:
                continue
            try:
                story = reader.recv()
            except EOFError:
                story = f"it ended with exit code {process.exitcode} and left no traceback"
            left = any(other.startswith(expendable) for other in self._running)
            if process.exitcode > 0 or not name.startswith(expendable) or not left:
                raise WorkerError(f"{name} failed:\n{story}")
            self.killed.append(name)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, _ in self._running.values():
            process.terminate()
        for process, _ in self._running.values():
            process.join(GRACE)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._running.clear()


def stop_forkserver() -> None:
    """End the server that forks processes, which would outlive this process for a moment."""
    stop = getattr(forkserver._forkserver, "_stop", None)  # type: ignore[attr-defined]
    if stop is not None:
        stop()


def _child(
    function: Callable[..., None], settings: Settings, name: str, arguments: tuple[Any, ...], errors: Connection
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    prepare(settings, name)
    try:
        function(settings, name, *arguments)
    except Exception:
        errors.send(traceback.format_exc())
        raise SystemExit(1) from None
    finally:
        tq.close()


def prepare(settings: Settings, name: str) -> None:
    """Prepare a process or actor of a run for its role."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the starter ends this process
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # slices of nested tensors warn about tracing
    torch.set_num_threads(1)
    torch.manual_seed(zlib.crc32(f"{settings.seed} {name}".encode()))
    os.environ["TQ_SYSTEM"] = settings.system


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
