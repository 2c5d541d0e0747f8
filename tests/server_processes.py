"""The processes of a system's servers, by what their logs say."""

from __future__ import annotations

import psutil

from transfer_queue.attachment import CURRENT
from transfer_queue.node.system.launcher import RunningSystem


def server_process(name: str, system: RunningSystem | None = None) -> psutil.Process:
    """Return the process of a server ("controller", "unit-0") of a system, by default of the current one.

    It is the newest that was started. Raises `psutil.NoSuchProcess` if it has ended and was collected.
    """
    system = system or CURRENT.system
    assert system is not None
    text = (system.logs / f"{name}.log").read_text()
    return psutil.Process(int(text.rsplit("up, process ", 1)[1].split()[0]))
