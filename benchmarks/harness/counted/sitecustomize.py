"""Counts the bytecode instructions that a process executes, if this folder is in PYTHONPATH when it is started.

Python imports the module at the start of each process. With TQB_INSTRUCTIONS, a folder, all threads are traced from the
start; a process without it calls `count_instructions` itself. The counts of the threads are in a file of the folder,
which is named after the process. They do not depend on what else the machine does.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

SLOTS = 512
"""Threads with a count of their own. Later ones share them."""


def count_instructions(folder: str) -> None:
    """Trace this thread and all threads that are started later, also in forked children."""
    numbers = count()
    counts: memoryview = memoryview(b"")

    def open_counts() -> None:
        nonlocal counts
        descriptor = os.open(f"{folder}/{os.getpid()}", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, SLOTS * 8)
        counts = memoryview(mmap.mmap(descriptor, SLOTS * 8)).cast("Q")
        os.close(descriptor)

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        """Trace the first call of a thread: from here on the thread has a slot."""
        slot = next(numbers) % SLOTS

        def called(frame: FrameType, event: str, argument: Any) -> Any:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return within

        def within(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                counts[slot] += 1
            return within

        sys.settrace(called)
        return called(frame, event, argument)

    open_counts()
    os.register_at_fork(after_in_child=open_counts)
    threading.settrace(begin)
    sys.settrace(begin)


def counted(folder: str) -> int:
    """Return the instructions of all processes so far."""
    return sum(sum(memoryview(file.read_bytes()).cast("Q")) for file in Path(folder).iterdir())


if "TQB_INSTRUCTIONS" in os.environ:
    count_instructions(os.environ["TQB_INSTRUCTIONS"])
