"""Finds the pages of a private mapping of a file that were written to, and so are memory of this process alone.

Linux 6.7 and later searches for them itself (the ioctl PAGEMAP_SCAN). On an older kernel, this module reads the state
of every page, which takes longer.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct

import numpy as np
import numpy.typing as npt

from transfer_queue.storage.arena.arena import stretches

PAGEMAP = "/proc/self/pagemap"
_PAGE = mmap.PAGESIZE
_PAGES_AT_ONCE = 1 << 16  # pages whose state is read at once
_FILE_PAGE = np.uint64(1 << 61)  # in the state of a page: a page of a file, not a private one
_ANY_PAGE = np.uint64(3 << 62)  # present or swapped

# struct pm_scan_arg: size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted, category_mask,
# category_anyof_mask, return_mask
_SCAN_ARGUMENT = struct.Struct("@12Q")
_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_WALK_END = 4
_REGIONS = 64  # stretches of pages that one call reports
_NO_SCAN = (errno.ENOTTY, errno.EINVAL)
"""The errors of a kernel that does not know the ioctl, or not this form of it."""

_can_scan = struct.calcsize("P") == 8
"""Whether the kernel may know the ioctl. The first call that it refuses sets this to False."""


def private_pages(start: int, end: int) -> list[tuple[int, int]]:
    """Return the (first, end) of the private pages between two addresses of pages, as bytes from the first address.

    Raises:
        OSError: The kernel does not report the state of pages.
    """
    global _can_scan
    low, high = start // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE
    file = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _can_scan:
            try:
                return [(first - low, last - low) for first, last in _scan(file, low, high)]
            except OSError as error:
                if error.errno not in _NO_SCAN:
                    raise
                _can_scan = False
        return _read_states(file, low, high)
    finally:
        os.close(file)


def _scan(file: int, start: int, end: int) -> list[tuple[int, int]]:
    """Return the addresses of private pages as the kernel finds them."""
    found: list[tuple[int, int]] = []
    regions = np.empty((_REGIONS, 3), np.uint64)  # start, end, categories
    place = int(regions.__array_interface__["data"][0])
    while start < end:
        argument = bytearray(
            _SCAN_ARGUMENT.pack(
                _SCAN_ARGUMENT.size, 0, start, end, 0, place, _REGIONS, 0,
                _IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, _IS_FILE,
            )
        )  # fmt: skip
        count = fcntl.ioctl(file, _SCAN, argument)
        found += [(first, last) for first, last, _ in regions[:count].tolist()]
        start = _SCAN_ARGUMENT.unpack(argument)[_WALK_END]
    return found


def _read_states(file: int, start: int, end: int) -> list[tuple[int, int]]:
    """Return the private pages as bytes from `start`, found in the state of every page."""
    first, count = start // _PAGE, (end - start) // _PAGE
    found: list[tuple[int, int]] = []
    for at in range(0, count, _PAGES_AT_ONCE):
        some = min(_PAGES_AT_ONCE, count - at)
        content = os.pread(file, some * 8, (first + at) * 8)
        if len(content) < some * 8:
            raise OSError(f"the state of {some} pages cannot be read")
        states: npt.NDArray[np.uint64] = np.frombuffer(content, "<u8")
        private = np.flatnonzero(((states & _ANY_PAGE) != 0) & ((states & _FILE_PAGE) == 0))
        found += [((one + at) * _PAGE, (last + at) * _PAGE) for one, last in stretches(private)]
    return found
