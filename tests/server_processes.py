"""The processes of a system's servers, by what their logs say; and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

import transfer_queue as tq
from transfer_queue.attachment import CURRENT
from transfer_queue.messages.storage import UnitStatus, UnitStatusReply
from transfer_queue.net.calls import Call
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


def unit_status(number: int = 0, client: tq.TransferQueueClient | None = None) -> UnitStatusReply:
    """Return the status of a storage unit. client: by default the client of this process."""

    def ask() -> Any:
        return (yield Call(("unit", number), UnitStatus()))

    reply = run_blocking((client or tq.get_client()).storage_manager.session, ask())
    assert isinstance(reply, UnitStatusReply)
    return reply


def server_process(name: str, system: RunningSystem | None = None) -> psutil.Process:
    """Return the process of a server ("controller", "unit-0") of a system, by default of the current one.

    It is the newest that was started. Raises `psutil.NoSuchProcess` if it has ended and was collected.
    """
    system = system or CURRENT.system
    assert system is not None
    text = (system.logs / f"{name}.log").read_text()
    return psutil.Process(int(text.rsplit("up, process ", 1)[1].split()[0]))
