"""One file of the journal: a head, then a frame for each commit.

    head    magic, number of the segment, salt, boot and clock of the process that wrote it, checksum
    frame   marker, number of the frame in the segment, length of the body, checksum; body: msgpack of a list of records

A process that dies during a write leaves an incomplete last frame, and reading stops before it. An incomplete frame
before a complete one is damage, and an error. Checksums begin with the segment's salt, so that no value of a record can
look like a frame.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Union

import msgspec

from transfer_queue.core.controller import RECORDS
from transfer_queue.core.earlier import EARLIER_RECORDS
from transfer_queue.core.events.records import AnyRecord, Record
from transfer_queue.errors import JournalError
from transfer_queue.private_files import sync_folder

MAGIC = b"TQjrnl\x00\x01"
MARKER = b"TQfr"
UNKNOWN_BOOT = bytes(16)
_HEAD = struct.Struct("<8sQI16sd")
_FRAME = struct.Struct("<4sQQI")
_CHECKSUM = struct.Struct("<I")
RESERVED_BYTES = 2 << 20  # bytes of disk space that are reserved for the next commits
HEAD_BYTES = _HEAD.size + _CHECKSUM.size

if TYPE_CHECKING:
    JournalRecord = Record
else:
    JournalRecord = Union[(*RECORDS, *EARLIER_RECORDS)]
"""A record in a journal, which an earlier build may have written."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[JournalRecord]).decode


@dataclass(frozen=True)
class ClockIdentity:
    """Identifies the clock of the times in records."""

    boot: bytes
    """16 bytes that distinguish one boot of the machine from the next."""
    offset: float
    """Seconds since 1970 at 0 of that clock."""

    @classmethod
    def now(cls) -> ClockIdentity:
        """Return the clock of this process."""
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = bytes.fromhex(file.read().strip().replace("-", ""))
        except (OSError, ValueError):
            boot = UNKNOWN_BOOT
        return cls(boot, time.time() - time.monotonic())

    def shift_from(self, other: ClockIdentity) -> float:
        """Return the seconds to add to a time of the other clock; 0 if both are the same clock."""
        same = self.boot == other.boot != UNKNOWN_BOOT
        return 0.0 if same else other.offset - self.offset


@dataclass(frozen=True)
class SegmentHeader:
    """The head of a segment."""

    number: int
    salt: int
    clock: ClockIdentity

    @classmethod
    def new(cls, number: int, clock: ClockIdentity) -> SegmentHeader:
        """Return the head of a new segment."""
        return cls(number, secrets.randbits(32), clock)

    def pack(self) -> bytes:
        """Return the bytes of the head."""
        head = _HEAD.pack(MAGIC, self.number, self.salt, self.clock.boot, self.clock.offset)
        return head + _CHECKSUM.pack(zlib.crc32(head))

    @classmethod
    def read(cls, data: bytes | memoryview) -> SegmentHeader | None:
        """Return the head at the beginning of a file; None if it is incomplete or damaged."""
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
        """Return the frame of these records."""
        body = _encode(records)
        number, self._next = self._next, self._next + 1
        return _FRAME.pack(MARKER, number, len(body), _checksum(self._head, number, body)) + body


def _checksum(head: SegmentHeader, number: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(struct.pack("<QQ", number, len(body)), head.salt))


class Reading:
    """Reads a segment. Raises JournalError, with the file and the position, if the segment is damaged."""

    def __init__(self, path: Path, data: bytes | memoryview, last: bool) -> None:
        """Read the head. `data` is the whole file. If `last` is set, it may end within a frame or its head."""
        self._path = path
        self._data = memoryview(data)
        self._last = last
        self.head = SegmentHeader.read(self._data)
        """None if the file ends within its head."""
        self.end = 0
        """The number of valid bytes, once all frames have been read."""
        if self.head is None:
            if data[: len(MAGIC) - 1] == MAGIC[:-1] and data[len(MAGIC) - 1 : len(MAGIC)] not in (b"", MAGIC[-1:]):
                version = data[len(MAGIC) - 1]
                raise self._damage(
                    0, f"another release wrote it, in version {version}, but this release reads version {MAGIC[-1]}"
                )
            if not last or len(data) >= HEAD_BYTES + _FRAME.size:
                raise self._damage(0, "its head cannot be read")
        else:
            self.end = HEAD_BYTES

    def frames(self) -> Iterator[list[JournalRecord]]:
        """Yield the records of each frame."""
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
                raise self._damage(self.end, f"another release wrote its records ({error})") from error
            yield records
            self.end += _FRAME.size + len(body)
            number += 1

    def _frame(self, head: SegmentHeader, at: int, least: int) -> memoryview | None:
        """Return the body of the complete frame at this position; None if there is none.

        Its number must be `least`, or may be greater if the position is not that of the next frame.
        """
        begin = at + _FRAME.size
        longest = len(self._data) - begin
        if longest < 0:
            return None
        marker, number, length, checksum = _FRAME.unpack_from(self._data, at)
        if marker != MARKER or number < least or length > longest or (at == self.end and number != least):
            return None
        body = self._data[begin : begin + length]
        return body if checksum == _checksum(head, number, body) else None

    def _check_torn(self, head: SegmentHeader, number: int) -> None:
        """Raise JournalError unless the bytes at `end` are the torn tail of the last segment."""
        if not self._last:
            raise self._damage(self.end, "a frame is incomplete, and later segments exist")
        rest = bytes(self._data[self.end + 1 :])
        at = rest.find(MARKER)
        while at >= 0:
            if self._frame(head, self.end + 1 + at, number + 1) is not None:
                raise self._damage(self.end, "a frame is incomplete, and a later one is complete")
            at = rest.find(MARKER, at + 1)

    def _damage(self, at: int, what: str) -> JournalError:
        return JournalError(
            f"the journal's file {self._path} is damaged at byte {at} of {len(self._data)}: {what}. Its state cannot "
            f"be restored completely: bring the file back, or start with an empty folder (durability.folder)"
        )


class SegmentWriter:
    """Appends frames to a new file.

    If `durable` is set, `commit` returns when the bytes are on the disk; with `late`, the caller waits for the disk by
    itself, with `descriptor`.
    """

    def __init__(self, path: Path, head: SegmentHeader, durable: bool, late: bool = False) -> None:
        self.path = path
        self.size = 0
        """Bytes of the file, including those that are not written yet; 0 if there is no file."""
        self._durable = durable
        self._late = late
        self._head = head
        self._frames = Frames(head)
        self._pending = b""
        """Bytes that are not committed yet."""
        self._written = 0
        """The number of pending bytes that are written."""
        self._end = 0
        """The number of committed bytes."""
        self._file = -1
        self._reserved = 0
        """The number of bytes for which the disk has reserved space."""

    def append(self, records: Sequence[AnyRecord]) -> None:
        """Append a frame, which `commit` writes. The first frame creates the file."""
        if not self.size:
            self._add(self._head.pack())
        self._add(self._frames.pack(records))

    def _add(self, data: bytes) -> None:
        self._pending += data
        self.size += len(data)

    @property
    def committed(self) -> bool:
        """Whether all appended frames are committed."""
        return not self._pending

    def commit(self) -> None:
        """Write what was appended. After an OSError it is incomplete: call it again, and it continues from there."""
        pending = self._pending
        if not pending:
            return
        if self._file < 0:
            self._create()
        while self._written < len(pending):
            rest = memoryview(pending)[self._written :] if self._written else pending
            self._written += os.pwrite(self._file, rest, self._end + self._written)
        if self._durable and not self._late:
            try:
                os.fdatasync(self._file)
            except OSError:
                # the kernel may have dropped pages that it could not write, so all bytes are written again
                self._written = 0
                raise
        self._end += len(pending)
        self._pending = b""
        self._written = 0

    def reserve_space(self) -> None:
        """Reserve disk space for the next RESERVED_BYTES bytes. Raises OSError if the disk is too full."""
        if self._file < 0:
            self._create()
        if self._reserved < self.size + RESERVED_BYTES:
            try:
                reserve_space(self._file, self.size, 2 * RESERVED_BYTES)
                self._reserved = self.size + 2 * RESERVED_BYTES
            except OSError:
                reserve_space(self._file, self.size, RESERVED_BYTES)
                self._reserved = self.size + RESERVED_BYTES

    def _create(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o600)
        if self._durable:
            sync_folder(self.path.parent)

    def descriptor(self) -> int | None:
        """Return another descriptor of the file, which the caller closes; None if there is no file."""
        return None if self._file < 0 else os.dup(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end + self._written)  # frees reserved space that was not needed
            os.close(self._file)
            self._file = -1


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_KEEP_SIZE = 1
_PAGE = 4096
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def reserve_space(file: int, start: int, length: int) -> None:
    """Reserve disk space for this many bytes of a file from `start` on. The size of the file does not change.

    Raises OSError if the disk is too full, or if this process may not write that far. Does nothing if the file system
    cannot reserve space: then the write itself fails.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and start + length > most:
        raise OSError(errno.EFBIG, f"the process's limit for the size of a file is {most} bytes; raise it (ulimit -f)")
    if not _fallocate(file, _KEEP_SIZE, start, length):
        return
    number = ctypes.get_errno()
    if number not in _CANNOT:
        raise OSError(number, os.strerror(number))


def check_space(folder: Path, length: int) -> None:
    """Raise OSError unless a file of `length` bytes can be written in the folder. Leaves no file there."""
    name = folder / f"space-{os.getpid()}"
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        reserve_space(file, 0, length)
        os.write(file, bytes(_PAGE))  # if space cannot be reserved, a full disk is noticed here
        os.fsync(file)
    finally:
        os.close(file)
        os.unlink(name)
