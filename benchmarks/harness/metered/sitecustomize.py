"""Measures the turns of the server loops of a system, if this folder is in PYTHONPATH when it is started.

Python imports the module at the start of each process. A server appends each turn of its loop that took a millisecond
of processor time to a file of the folder TQB_TURNS: (time of the clock CLOCK_MONOTONIC at its end, processor seconds).
The processor time of a turn does not depend on what else the machine does.
"""

from __future__ import annotations

import os
import struct
import time

NOTABLE = 1e-3
TURN = struct.Struct("<dd")


def meter_turns(folder: str) -> None:
    """Replace the turn of a server loop by one that measures itself."""
    from transfer_queue.net.server.server_loop import ServerLoop

    original = ServerLoop._turn
    files: dict[int, int] = {}

    def turn(self: ServerLoop) -> None:
        began = time.thread_time()
        original(self)
        took = time.thread_time() - began
        if took >= NOTABLE:
            pid = os.getpid()
            if pid not in files:
                files[pid] = os.open(f"{folder}/{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(files[pid], TURN.pack(time.monotonic(), took))

    ServerLoop._turn = turn  # type: ignore[method-assign]


if "TQB_TURNS" in os.environ:
    meter_turns(os.environ["TQB_TURNS"])
