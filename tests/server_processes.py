"""The processes of a system's servers, by what their logs say; and waiting for what they do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

import transfer_queue as tq
from transfer_queue.attachment import CURRENT
from transfer_queue.messages.storage import UnitStatus, UnitStatusReply
from transfer_queue.net.calls import Request
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.node.system.launcher import RunningSystem

SECONDS = 120.0
"""Within which what is to happen happens, also on a busy machine."""


def until(condition: Callable[[], Any], what: str | Callable[[], str] = f"not so within {SECONDS:g} s") -> Any:
    """Wait for what other processes do, and return what the condition gives then.

    what: the words of the failure, or a function that returns them.
    """
    limit = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < limit, what() if callable(what) else what
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def started(name: str, **sections: Any) -> Iterator[Any]:
    """A system of this process, with these sections of the configuration. Yields the result of `init`."""
    tq.close()
    config = tq.init({"system": {"name": name}, **sections})
    try:
        yield config
    finally:
        tq.close()


def unit_status(number: int = 0, client: tq.TransferQueueClient | None = None) -> UnitStatusReply:
    """Return the status of a storage unit. client: by default the client of this process."""

    def ask() -> Any:
        return (yield Request(("unit", number), UnitStatus()))

    reply = run_blocking((client or tq.get_client()).storage_manager.session, ask())
    assert isinstance(reply, UnitStatusReply)
    return reply


def server_process(name: str, system: RunningSystem | None = None) -> psutil.Process:
    """Return the process of a server ("controller", "unit-0") of a system, by default of the current one.

    It is the newest that was started. Raises `psutil.NoSuchProcess` if it has ended and was collected.
    """
    system = system or CURRENT.system
    text = (system.logs / f"{name}.log").read_text()
    return psutil.Process(int(text.rsplit("up, process ", 1)[1].split()[0]))


def living_server(name: str) -> psutil.Process | None:
    """Return the process of a server of the current system; None while it is being started again."""
    with contextlib.suppress(psutil.Error):
        process = server_process(name)
        if process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def restart(name: str) -> None:
    """Kill a server of the current system, and wait until another one is up in its place."""
    log = CURRENT.system.logs / f"{name}.log"
    ups = log.read_text().count("up, process")
    until(lambda: living_server(name)).kill()
    until(lambda: log.read_text().count("up, process") > ups)


def kill_together(processes: Sequence[psutil.Process]) -> None:
    """Kill processes at once, so that none can tidy up after another one."""
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()


def kill_all(system: RunningSystem | None = None) -> None:
    """Kill the supervisor and all servers of a system at once, by default of the current one."""
    system = system or CURRENT.system
    supervisor = psutil.Process(system.description.pid)
    kill_together([supervisor, *supervisor.children(recursive=True)])
    until(lambda: not system.is_alive())
