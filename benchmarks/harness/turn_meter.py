"""Starts a system whose controller measures the turns of its loop, and reads the measurements."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.systems import System, system
from transfer_queue.config.environment import process_environment

METERED = Path(__file__).parent / "metered"

Turn = tuple[float, float]
"""(time at its end on CLOCK_MONOTONIC, processor seconds of the loop's thread) of a turn."""


class MeteredSystem:
    """A running system, with the turns of its controller's loop that took a millisecond or more."""

    def __init__(self, running: System, folder: str) -> None:
        self.system = running
        self._folder = Path(folder)

    def turns(self) -> list[Turn]:
        """Return all notable turns of the controller so far, in order."""
        file = self._folder / str(self.system.pids["controller"])
        return list(struct.iter_unpack("<dd", file.read_bytes())) if file.exists() else []


@contextlib.contextmanager
def metered_system(conf: dict[str, Any] | None = None) -> Iterator[MeteredSystem]:
    """Start a system as `systems.system`, and measure the turns of its loops."""
    environment = process_environment()
    before = environment.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="tqb-turns-") as folder:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(METERED), before)))
        environment["TQB_TURNS"] = folder
        try:
            with system(conf) as running:
                yield MeteredSystem(running, folder)
        finally:
            del environment["TQB_TURNS"]
            if before is None:
                del environment["PYTHONPATH"]
            else:
                environment["PYTHONPATH"] = before
