"""Shares the work of large copies between threads that are started for each of them.

numpy releases the GIL in copies and takes, so plain threads multiply the rate of a large copy. torch's own threads
(OpenMP) are not used: after a fork, a parallel torch operation in the child would wait forever for threads that only
the parent has. A process that makes no large copy starts no thread, and an idle one has none.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from collections.abc import Callable

PARALLEL = 8 << 20
"""Bytes from which threads share a copy."""
PER_THREAD = 4 << 20
"""The least number of bytes for each thread."""
LEAST_PART = 1 << 20
"""The least number of bytes that a thread copies at a time."""

_most = min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def set_copy_threads(most: int) -> None:
    """Use at most this number of threads for a copy, with that of the caller, in the whole process."""
    global _most
    _most = most


def run_in_parts(count: int, nbytes: int, work: Callable[[int, int], None]) -> None:
    """Call work(0, count), or if `nbytes` are many, call it for parts that several threads take in turn.

    Parts get smaller towards the end, and the caller waits only for parts that other threads have begun. So a thread
    costs nothing if no core is free for it.
    """
    threads = min(_most, nbytes // PER_THREAD, count)
    if nbytes < PARALLEL or threads < 2:
        work(0, count)
        return
    bounds = _bounds(count, nbytes, threads)
    turns = iter(range(len(bounds) - 1))  # `next` is atomic in the interpreter
    failures: list[BaseException] = []
    todo = [work]  # so that a thread that starts late, when all is done, does not keep `work` alive

    def other(busy: threading.Lock) -> None:
        while not failures:
            with busy:
                turn = next(turns, None)
                if turn is None:
                    return
                try:
                    todo[0](bounds[turn], bounds[turn + 1])
                except BaseException as error:  # raised again below, in the caller's thread
                    failures.append(error)

    locks = [threading.Lock() for _ in range(threads - 1)]
    with contextlib.suppress(RuntimeError):  # no thread can be started, or the interpreter is shutting down
        for busy in locks:
            _thread.start_new_thread(other, (busy,))  # `threading.Thread.start` would wait until the thread runs
    try:
        for turn in turns:
            work(bounds[turn], bounds[turn + 1])
    finally:
        for _ in turns:  # if this thread was interrupted
            pass
        for busy in locks:
            with busy:
                pass
        todo.clear()
    if failures:
        raise failures[0]


def _bounds(count: int, nbytes: int, threads: int) -> list[int]:
    """Return the bounds of the parts of `nbytes` in `count` steps.

    Each part is the rest divided by twice the number of threads, and at least LEAST_PART.
    """
    bounds, least = [0], max(1, LEAST_PART * count // nbytes)
    while bounds[-1] < count:
        bounds.append(min(count, bounds[-1] + max(least, (count - bounds[-1]) // (2 * threads))))
    return bounds
