"""Files of blocks: what a checkpoint keeps of the samples' bytes.

    head (64 bytes)   magic, version, where the index lies and its checksum
    data              blocks, each from a multiple of 64 bytes on, in segments of some MiB with a checksum each
    index             which blocks lie where (`BlockIndex`)

A file is written once, in one pass, straight out of mapped arenas, or piece by piece from where blocks lie else, and
its head last; what is not whole is no such file.
Blocks never change and have numbers for ever, so later checkpoints link to a file that still holds enough of theirs.
This module knows nothing of what a block contains, nor of folders.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from transfer_queue.errors import CheckpointError
from transfer_queue.storage.protocols import Bytes

MAGIC = b"TQblocks"
VERSION = 1
ALIGNMENT = 64
SEGMENT = 8 << 20
"""Bytes that share a checksum; a larger block has a segment of its own."""

_HEAD = struct.Struct(
    "<8sIIQQI"
)  # magic, version, checksum of the index, where it begins, its length, of what is before
_PIECES = 512  # of one writev

Numbers = np.ndarray


class BlockIndex(msgspec.Struct, array_like=True, frozen=True):
    """What a file holds, in order of position; columns as little-endian bytes.

    origin: whose block numbers they are. number, position, nbytes i8: a block each. first i8: the first block of each
    segment; checksum u4: of its bytes, which end where the next segment begins.
    """

    origin: str
    number: bytes
    position: bytes
    nbytes: bytes
    first: bytes
    checksum: bytes
    end: int

    def column(self, name: str) -> Numbers:
        """number, position, nbytes or first as an array."""
        return np.frombuffer(getattr(self, name), "<i8")

    def is_sound(self, end: int) -> bool:
        """Whether all columns have one length, and all blocks and segments are in order and end before `end`."""
        columns = (self.number, self.position, self.nbytes, self.first)
        if any(len(column) % 8 for column in columns) or len(self.checksum) != len(self.first) // 2:
            return False
        number, position, nbytes, first = (np.frombuffer(column, "<i8") for column in columns)
        if not len(number) == len(position) == len(nbytes) or self.end > end:
            return False
        if not len(number):
            return not len(first)
        ends = position + aligned(nbytes)
        in_order = bool((nbytes >= 0).all() and (nbytes <= end).all() and (ends[:-1] <= position[1:]).all())
        segments = len(first) > 0 and first[0] == 0 and bool((np.diff(first) > 0).all()) and first[-1] < len(number)
        return in_order and segments and position[0] >= ALIGNMENT and int(ends[-1]) <= self.end

    def segments(self) -> Iterator[tuple[slice, int, int, int]]:
        """(its blocks, where it begins, its length in bytes, its checksum) of each segment."""
        position = self.column("position")
        edges = [*self.column("first").tolist(), len(position)]
        checksums = np.frombuffer(self.checksum, "<u4").tolist()
        for first, last, checksum in zip(edges, edges[1:], checksums):
            start = int(position[first])
            end = int(position[last]) if last < len(position) else self.end
            yield slice(first, last), start, end - start, checksum


def aligned(nbytes: Numbers) -> Numbers:
    """What blocks of so many bytes take, in an arena and here."""
    taken: Numbers = np.maximum(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
    return taken


class BlockSource(Protocol):
    """The blocks of one unit, wherever they are."""

    def pieces(self, offset: Numbers, nbytes: Numbers) -> Iterator[list[memoryview]]:
        """What these blocks take (`aligned`), one after the other, and never much of it at once."""


class Mapped(BlockSource):
    """Those of an arena that is mapped here: memory is all of it."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory.data

    def pieces(self, offset: Numbers, nbytes: Numbers) -> Iterator[list[memoryview]]:
        """See `BlockSource.pieces`. Nothing is copied."""
        starts, lengths = runs(offset, nbytes)
        for at in range(0, len(starts), _PIECES):
            some = slice(at, at + _PIECES)
            yield [self._memory[start : start + length] for start, length in zip(starts[some], lengths[some])]


def runs(offset: Numbers, nbytes: Numbers) -> tuple[list[int], list[int]]:
    """Where pieces of blocks begin that lie side by side, and how long they are."""
    taken = aligned(nbytes)
    first = np.flatnonzero(np.concatenate([[-1], offset[:-1] + taken[:-1]]) != offset)
    return offset[first].tolist(), np.add.reduceat(taken, first).tolist()


def write_blocks(
    path: Path, origin: str, number: Numbers, unit: Numbers, offset: Numbers, nbytes: Numbers,
    held: Callable[[int], BlockSource],
) -> int:  # fmt: skip
    """Writes these blocks (columns of equal length) into a new file, and syncs it; how many bytes it has.

    held: what a unit has. OSError where the disk refuses; what was written is left to the caller then.
    """
    order = np.lexsort((offset, unit))
    number, unit, offset, nbytes = number[order], unit[order], offset[order], nbytes[order]
    taken = aligned(nbytes)
    end = ALIGNMENT + np.cumsum(taken)
    position = end - taken
    segment = (position - ALIGNMENT) // SEGMENT
    first = np.flatnonzero(np.diff(segment, prepend=-1)) if len(number) else np.zeros(0, "i8")
    units = {one: held(one) for one in np.unique(unit).tolist()}
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _write(file, [bytes(ALIGNMENT)])
        segments = [slice(a, b) for a, b in pairwise([*first.tolist(), len(number)])]
        checksums = [_write_segment(file, unit[some], offset[some], nbytes[some], units) for some in segments]
        total = int(end[-1]) if len(end) else ALIGNMENT
        packed = [column.astype("<i8").tobytes() for column in (number, position, nbytes, first)]
        index = msgspec.msgpack.encode(
            BlockIndex(origin, packed[0], packed[1], packed[2], packed[3], np.array(checksums, "<u4").tobytes(), total)
        )
        _write(file, [index])
        head = _HEAD.pack(MAGIC, VERSION, zlib.crc32(index), total, len(index), 0)
        os.pwrite(file, head[:-4] + struct.pack("<I", zlib.crc32(head[:-4])), 0)
        os.fsync(file)
    finally:
        os.close(file)
    return total + len(index)


def _write_segment(file: int, unit: Numbers, offset: Numbers, nbytes: Numbers, units: Mapping[int, BlockSource]) -> int:
    """Writes the blocks of one segment; its checksum."""
    checksum = 0
    for one in np.unique(unit).tolist():
        mine = unit == one
        for some in units[one].pieces(offset[mine], nbytes[mine]):
            for piece in some:
                checksum = zlib.crc32(piece, checksum)
            _write(file, some)
    return checksum


def _write(file: int, pieces: list[memoryview] | list[bytes]) -> None:
    left: list[memoryview | bytes] = list(pieces)
    while left:
        written = os.writev(file, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = memoryview(left[0])[written:]


class BlockFile:
    """An open file of blocks. path, index: which and what is in it.

    Raises:
        CheckpointError: it is none, of another version, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise CheckpointError(f"{path} is not a regular file; load another checkpoint")
            self.index = self._read_index()
        except OSError as error:
            self.close()
            raise self._unreadable(error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of it."""
        os.close(self._file)

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, into: Bytes, position: int, checksum: int) -> None:
        """Fills `into` with a segment that begins at `position`. CheckpointError where it is not what it was."""
        view, done = into.data, 0
        while done < len(view):
            try:
                read = os.preadv(self._file, [view[done:]], position + done)
            except OSError as error:
                raise self._unreadable(error) from error
            if not read:
                raise self._damaged(f"it ends at byte {position + done}")
            done += read
        if zlib.crc32(view) != checksum:
            raise self._damaged(f"the checksum of {len(view)} bytes at byte {position} is wrong")

    def _read_index(self) -> BlockIndex:
        head = os.pread(self._file, _HEAD.size, 0)
        if len(head) < _HEAD.size or head[: len(MAGIC)] != MAGIC:
            raise CheckpointError(
                f"{self.path} is no file of blocks: it begins with {head[:8]!r} and not with {MAGIC!r}; it is another "
                f"program's, or was not written to its end"
            )
        _, version, checksum, start, length, check = _HEAD.unpack(head)
        if version != VERSION:
            raise CheckpointError(
                f"{self.path} is of version {version} and this release reads version {VERSION}; load it with the "
                f"release that wrote it"
            )
        size = os.fstat(self._file).st_size
        fits = zlib.crc32(head[:-4]) == check and start + length <= size
        index = os.pread(self._file, length, start) if fits else b""
        if len(index) != length or not index or zlib.crc32(index) != checksum:
            raise self._damaged("the checksum of its index is wrong")
        try:
            found = msgspec.msgpack.decode(index, type=BlockIndex)
        except (msgspec.MsgspecError, ValueError) as error:
            raise self._damaged(f"its index cannot be decoded ({error})") from None
        if not found.is_sound(start):
            raise self._damaged("its index contradicts itself")
        return found

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {error}; make it readable, or load another checkpoint")

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {why}; load another checkpoint")
