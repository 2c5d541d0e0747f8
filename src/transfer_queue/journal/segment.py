"""One file of the journal: a head, then a frame for each commit.

    head    magic, number of the segment, salt, boot and clock of who wrote it, checksum
    frame   marker, number of the frame in the segment, length of the body, checksum; body: msgpack of a list of records

A process that dies in the middle of a write leaves a frame that is not whole, the last one: reading stops before it.
A frame that is not whole though a whole one comes later is damage, and an error. Checksums begin with the segment's
salt, so that no value of a record can look like a frame.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from transfer_queue.core.events.records import AnyRecord
from transfer_queue.errors import JournalError

MAGIC = b"TQjrnl\x00\x01"
MARKER = b"TQfr"
UNKNOWN_BOOT = bytes(16)
_HEAD = struct.Struct("<8sQI16sd")
_FRAME = struct.Struct("<4sQQI")
_CHECKSUM = struct.Struct("<I")
ROOM = 2 << 20  # bytes that the disk holds for what comes next
HEAD_BYTES = _HEAD.size + _CHECKSUM.size

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[AnyRecord]).decode


@dataclass(frozen=True)
class ClockIdentity:
    """By what clock times in records are. boot: 16 bytes that tell one run of the machine from the next.

    offset: seconds since 1970 at 0 of that clock.
    """

    boot: bytes
    offset: float

    @classmethod
    def now(cls) -> ClockIdentity:
        """That of this process."""
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = bytes.fromhex(file.read().strip().replace("-", ""))
        except (OSError, ValueError):
            boot = UNKNOWN_BOOT
        return cls(boot, time.time() - time.monotonic())

    def shift_from(self, other: ClockIdentity) -> float:
        """What is to be added to a time of the other clock; 0 where both are the same one."""
        same = self.boot == other.boot != UNKNOWN_BOOT
        return 0.0 if same else other.offset - self.offset


@dataclass(frozen=True)
class SegmentHeader:
    """What a segment begins with."""

    number: int
    salt: int
    clock: ClockIdentity

    @classmethod
    def new(cls, number: int, clock: ClockIdentity) -> SegmentHeader:
        """That of a new segment."""
        return cls(number, secrets.randbits(32), clock)

    def packed(self) -> bytes:
        """Its bytes."""
        head = _HEAD.pack(MAGIC, self.number, self.salt, self.clock.boot, self.clock.offset)
        return head + _CHECKSUM.pack(zlib.crc32(head))

    @classmethod
    def read(cls, data: bytes | memoryview) -> SegmentHeader | None:
        """The head at the beginning of a file; None where it is not whole."""
        if len(data) < HEAD_BYTES:
            return None
        (checksum,) = _CHECKSUM.unpack_from(data, _HEAD.size)
        magic, number, salt, boot, offset = _HEAD.unpack_from(data)
        if magic != MAGIC or checksum != zlib.crc32(data[: _HEAD.size]):
            return None
        return cls(number, salt, ClockIdentity(boot, offset))


class Frames:
    """Makes the frames of a segment."""

    def __init__(self, head: SegmentHeader) -> None:
        self._head = head
        self._next = 0

    def pack(self, records: Sequence[AnyRecord]) -> bytes:
        """The frame of these records."""
        body = _encode(records)
        number, self._next = self._next, self._next + 1
        return _FRAME.pack(MARKER, number, len(body), _checksum(self._head, number, body)) + body


def _checksum(head: SegmentHeader, number: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(struct.pack("<QQ", number, len(body)), head.salt))


class Reading:
    """Reads a segment. data: the whole file. last: it may end in the middle of a frame, or of its head.

    head: None where the file ends in the middle of it. end: bytes that are whole, once all frames have been read.
    JournalError, naming the file and the place, where it is damaged.
    """

    def __init__(self, path: Path, data: bytes | memoryview, last: bool) -> None:
        self._path = path
        self._data = memoryview(data)
        self._last = last
        self.head = SegmentHeader.read(self._data)
        self.end = 0
        if self.head is None:
            if not last or len(data) >= HEAD_BYTES + _FRAME.size:
                raise self._damage(0, "its head cannot be read")
        else:
            self.end = HEAD_BYTES

    def frames(self) -> Iterator[list[AnyRecord]]:
        """The records of each frame."""
        if self.head is None:
            return
        number = 0
        while self.end < len(self._data):
            body = self._frame(self.head, self.end, number)
            if body is None:
                self._check_torn(self.head, number)
                return
            try:
                records = _decode(body)
            except msgspec.DecodeError as error:
                raise self._damage(self.end, f"its records are of another version ({error})") from error
            yield records
            self.end += _FRAME.size + len(body)
            number += 1

    def _frame(self, head: SegmentHeader, at: int, least: int) -> memoryview | None:
        """The body of the whole frame that begins here, with this number or, if it is not the next, a later one."""
        if len(self._data) - at < _FRAME.size:
            return None
        marker, number, length, checksum = _FRAME.unpack_from(self._data, at)
        begin = at + _FRAME.size
        if marker != MARKER or number < least or length > len(self._data) - begin:
            return None
        if at == self.end and number != least:
            return None
        body = self._data[begin : begin + length]
        return body if checksum == _checksum(head, number, body) else None

    def _check_torn(self, head: SegmentHeader, number: int) -> None:
        """JournalError unless what begins at `end` is the torn tail of the last segment."""
        if not self._last:
            raise self._damage(self.end, "a frame is not whole, and later segments exist")
        rest = bytes(self._data[self.end + 1 :])
        at = rest.find(MARKER)
        while at >= 0:
            if self._frame(head, self.end + 1 + at, number + 1) is not None:
                raise self._damage(self.end, "a frame is not whole, and later ones are")
            at = rest.find(MARKER, at + 1)

    def _damage(self, at: int, what: str) -> JournalError:
        return JournalError(
            f"the journal's file {self._path} is damaged at byte {at} of {len(self._data)}: {what}. What it held "
            f"cannot be restored whole: begin with an empty folder (controller.journal.folder), or bring the file back"
        )


class SegmentWriter:
    """Appends frames to a new file. durable: `commit` returns when the bytes are on the disk.

    size: bytes of the file, with those that are not written yet; 0 while there is no file.
    """

    def __init__(self, path: Path, head: SegmentHeader, durable: bool) -> None:
        self.path = path
        self.size = 0
        self._durable = durable
        self._head = head
        self._frames = Frames(head)
        self._pending = b""  # not committed yet
        self._written = 0  # of these
        self._end = 0  # bytes that are committed
        self._file = -1
        self._room = 0  # the disk has these bytes for the file

    def append(self, records: Sequence[AnyRecord]) -> None:
        """Adds a frame, which `commit` writes; the file begins with the first."""
        if not self.size:
            self._add(self._head.packed())
        self._add(self._frames.pack(records))

    def _add(self, data: bytes) -> None:
        self._pending += data
        self.size += len(data)

    @property
    def committed(self) -> bool:
        """Whether nothing waits for a commit."""
        return not self._pending

    def commit(self) -> None:
        """Writes what was appended. OSError: some of it was not; to be called again, which goes on from there."""
        if not self._pending:
            return
        if self._file < 0:
            self._create()
        while self._written < len(self._pending):
            rest = memoryview(self._pending)[self._written :] if self._written else self._pending
            self._written += os.pwrite(self._file, rest, self._end + self._written)
        if self._durable:
            try:
                _sync_data(self._file)
            except OSError:
                # what the system could not write it may have forgotten: a sync alone would not bring it back
                self._written = 0
                raise
        self._end += len(self._pending)
        self._pending = b""
        self._written = 0

    def take_room(self) -> None:
        """Sees to it that ROOM more bytes can be committed, however full the disk gets. OSError where they cannot."""
        if self._file < 0:
            self._create()
        if self._room < self.size + ROOM:
            try:
                take_room(self._file, self.size, 2 * ROOM)
                self._room = self.size + 2 * ROOM
            except OSError:
                take_room(self._file, self.size, ROOM)
                self._room = self.size + ROOM

    def _create(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o600)
        if self._durable:
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end + self._written)  # gives back room that was not needed
            os.close(self._file)
            self._file = -1


_sync_data = getattr(os, "fdatasync", os.fsync)


def sync_folder(folder: Path) -> None:
    """Returns when the folder's entries are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


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
