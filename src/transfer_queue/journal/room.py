"""Room on the disk for what a file is going to take: who has it before is not surprised by a full disk."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

_KEEP_SIZE = 1
_PAGE = 4096
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def take_room(file: int, start: int, length: int) -> None:
    """The file system holds so many bytes from `start` on for this file, whose size stays as it is.

    OSError where it has not got them, or where this process may not write that far. Where a file system cannot hold
    room, nothing is done: then the write itself says it.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and start + length > most:
        raise OSError(errno.EFBIG, f"a file of this process may have {most} bytes (ulimit -f)")
    if _fallocate is None or not _fallocate(file, _KEEP_SIZE, start, length):
        return
    number = ctypes.get_errno()
    if number not in _CANNOT:
        raise OSError(number, os.strerror(number))


def check_room(folder: Path, length: int) -> None:
    """Raise OSError unless a file of `length` bytes can be written in the folder. Leaves no file there."""
    name = folder / f"room-{os.getpid()}"
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        take_room(file, 0, length)
        os.write(file, bytes(_PAGE))  # if room cannot be reserved, a full disk is noticed here
        os.fsync(file)
    finally:
        os.close(file)
        os.unlink(name)


def _found() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None  # another system
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function


_fallocate = _found()
