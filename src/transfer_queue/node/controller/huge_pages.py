"""Moves the memory of the controller into huge pages, beside its loop.

A fork copies the page tables of the process, and the controller forks to write its state. In huge pages, the tables are
a small fraction of their size. glibc requests huge pages for its own memory (`launcher._environment`), but not the
allocator of Python's objects. After a fork, the kernel also divides each huge page to which the controller writes while
the child exists. So a thread collapses the pages again and again (`MADV_COLLAPSE`, Linux 6.1). For memory that is in
huge pages already, this costs microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator

HUGE = 2 << 20
"""Bytes of a huge page on x86-64 and, with pages of 4 KiB, on ARM."""
SMALLEST = 64 << 20
"""Bytes of a process whose fork is fast enough without huge pages."""
PAUSE = 5.0
"""Seconds between two passes over the memory."""

_MADV_COLLAPSE = 25

Collapse = Callable[[int, int], bool]
"""Collapses (address, bytes); returns whether the range is in huge pages."""


def collapse_regularly(pause: float = PAUSE) -> None:
    """Begin to collapse the memory of this process, every `pause` seconds, until the kernel collapses nothing."""
    collapse = _load_collapse()
    if collapse is not None:
        threading.Thread(target=_repeat, args=(collapse, pause), name="huge pages", daemon=True).start()


def _repeat(collapse: Collapse, pause: float) -> None:
    waiting = threading.Event()
    collapsed = 1
    while collapsed:
        waiting.wait(pause)
        if _resident_bytes() >= SMALLEST:
            collapsed = collapse_memory(collapse)


def collapse_memory(collapse: Collapse) -> int:
    """Collapse the anonymous memory of this process.

    Args:
        collapse: See `Collapse`. Each call is for one huge page, so that page faults of other threads do not wait long.

    Returns:
        The number of huge pages that the memory is in now. 0 if the kernel does not collapse memory.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        return sum(collapse(page, HUGE) for page in huge_pages_of(maps.read()))
    return 0


def huge_pages_of(maps: str) -> Iterator[int]:
    """Iterate over the addresses of the whole huge pages in private anonymous memory.

    Args:
        maps: The text of `/proc/self/maps`.
    """
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        addresses, permissions, inode, name = fields[0], fields[1], fields[4], "".join(fields[5:])
        if permissions != "rw-p" or inode != "0" or (name.startswith("[") and name != "[heap]"):
            continue
        first, end = (int(address, 16) for address in addresses.split("-"))
        yield from range(-(-first // HUGE) * HUGE, end - HUGE + 1, HUGE)


def _load_collapse() -> Collapse | None:
    """Return the function of the kernel; None if the C library has none."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return lambda address, nbytes: madvise(address, nbytes, _MADV_COLLAPSE) == 0


def _resident_bytes() -> int:
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
