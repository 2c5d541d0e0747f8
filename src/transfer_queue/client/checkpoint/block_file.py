"""Files of blocks, which contain the samples' bytes in a checkpoint.

    head (64 bytes)   magic, version, position and checksum of the index
    data              blocks, each at a multiple of 64 bytes, in segments of some MiB with a checksum each
    index             the positions of the blocks (`BlockIndex`)

A file is written once, in one pass, directly out of mapped arenas, or in pieces from blocks elsewhere. The head is
written last, so that an incomplete file is not valid. Blocks never change and keep their numbers, so later checkpoints
link to a file that contains enough of their blocks. This module does not depend on folders, and does not interpret
blocks.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from transfer_queue.errors import CheckpointError
from transfer_queue.storage.protocols import Bytes

MAGIC = b"TQblocks"
VERSION = 1
ALIGNMENT = 64
SEGMENT = 8 << 20
"""Bytes with one checksum. A larger block has a segment of its own."""

_HEAD = struct.Struct("<8sIIQQI")
"""Magic, version, checksum of the index, its position, its length, and the checksum of all these."""
_PIECES = 512  # buffers of one writev

Numbers = np.ndarray


class Segment(NamedTuple):
    """A part of a file that has a checksum of its own."""

    blocks: slice
    """Its blocks."""
    position: int
    nbytes: int
    checksum: int


class BlockIndex(msgspec.Struct, array_like=True, frozen=True):
    """The blocks of a file in the order of their positions, as columns of little-endian bytes."""

    origin: str
    """The origin of the block numbers (`messages.checkpoints.BeginCheckpointReply`)."""
    number: bytes
    """The number of each block, i8."""
    position: bytes
    """The position of each block in the file, i8."""
    nbytes: bytes
    """The length of each block in bytes, i8."""
    first: bytes
    """The first block of each segment, i8."""
    checksum: bytes
    """The checksum of each segment, u4. A segment ends at the start of the next one."""
    end: int
    """The end of the last segment."""

    def column(self, name: str) -> Numbers:
        """Return number, position, nbytes or first as an array."""
        return np.frombuffer(getattr(self, name), "<i8")

    def is_sound(self, end: int) -> bool:
        """Whether the columns have equal lengths, and all blocks and segments are in order and end before `end`."""
        columns = (self.number, self.position, self.nbytes, self.first)
        if any(len(column) % 8 for column in columns) or len(self.checksum) != len(self.first) // 2:
            return False
        number, position, nbytes, first = (np.frombuffer(column, "<i8") for column in columns)
        if not len(number) == len(position) == len(nbytes) or self.end > end:
            return False
        if not len(number):
            return not len(first)
        ends = position + space_of_blocks(nbytes)
        in_order = bool((nbytes >= 0).all() and (nbytes <= end).all() and (ends[:-1] <= position[1:]).all())
        segments = len(first) > 0 and first[0] == 0 and bool((np.diff(first) > 0).all()) and first[-1] < len(number)
        return in_order and segments and position[0] >= ALIGNMENT and int(ends[-1]) <= self.end

    def segments(self) -> Iterator[Segment]:
        """Yield the segments in their order."""
        position = self.column("position")
        edges = [*self.column("first").tolist(), len(position)]
        checksums = np.frombuffer(self.checksum, "<u4").tolist()
        for first, last, checksum in zip(edges, edges[1:], checksums):
            start = int(position[first])
            end = int(position[last]) if last < len(position) else self.end
            yield Segment(slice(first, last), start, end - start, checksum)


def space_of_blocks(nbytes: Numbers) -> Numbers:
    """Return the space that blocks of these lengths need, in an arena and in a file."""
    taken: Numbers = np.maximum(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
    return taken


class BlockSource(Protocol):
    """The blocks of one unit, in an arena of this node or elsewhere."""

    def pieces(self, offset: Numbers, nbytes: Numbers) -> Iterator[list[memoryview]]:
        """Yield the space of these blocks (`space_of_blocks`), one after the other, in parts that fit in memory."""


class Mapped(BlockSource):
    """The blocks of an arena that this process has mapped."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory.data

    def pieces(self, offset: Numbers, nbytes: Numbers) -> Iterator[list[memoryview]]:
        """See `BlockSource.pieces`. The pieces are views of the arena."""
        starts, lengths = join_neighbors(offset, nbytes)
        for at in range(0, len(starts), _PIECES):
            some = slice(at, at + _PIECES)
            yield [self._memory[start : start + length] for start, length in zip(starts[some], lengths[some])]


def join_neighbors(offset: Numbers, nbytes: Numbers) -> tuple[list[int], list[int]]:
    """Join blocks that are neighbours into pieces, and return the starts and lengths of the pieces."""
    taken = space_of_blocks(nbytes)
    first = np.flatnonzero(np.concatenate([[-1], offset[:-1] + taken[:-1]]) != offset)
    return offset[first].tolist(), np.add.reduceat(taken, first).tolist()


def write_blocks(
    path: Path, origin: str, number: Numbers, unit: Numbers, offset: Numbers, nbytes: Numbers,
    held: Callable[[int], BlockSource],
) -> int:  # fmt: skip
    """Write these blocks (columns of equal length) into a new file, sync it, and return its length in bytes.

    `held` returns the blocks of a unit. Raises `OSError` if the disk is full or cannot be written to; the caller then
    removes the file.
    """
    order = np.lexsort((offset, unit))
    number, unit, offset, nbytes = number[order], unit[order], offset[order], nbytes[order]
    taken = space_of_blocks(nbytes)
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
    """Write the blocks of one segment and return its checksum."""
    checksum = 0
    for one in np.unique(unit).tolist():
        of_unit = unit == one
        for some in units[one].pieces(offset[of_unit], nbytes[of_unit]):
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
    """An open file of blocks, with its path and its index.

    Raises:
        CheckpointError: The file is not a file of blocks, has another version, or is damaged.
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
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, into: Bytes, position: int, checksum: int) -> None:
        """Read the segment at `position` into `into`. Raises `CheckpointError` if its checksum is wrong."""
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
                f"{self.path} is not a file of blocks: it must begin with {MAGIC!r}, got {head[:8]!r}; it is a file of "
                f"another program, or is not complete"
            )
        _, version, checksum, start, length, check = _HEAD.unpack(head)
        if version != VERSION:
            raise CheckpointError(
                f"{self.path} has version {version}, and this release reads version {VERSION}; load it with the "
                f"release that wrote it"
            )
        size = os.fstat(self._file).st_size
        fits = zlib.crc32(head[:-4]) == check and start + length <= size
        index = os.pread(self._file, length, start) if fits else b""
        if len(index) != length or not index or zlib.crc32(index) != checksum:
            raise self._damaged("the checksum of its index is wrong")
        try:
            decoded = msgspec.msgpack.decode(index, type=BlockIndex)
        except (msgspec.MsgspecError, ValueError) as error:
            raise self._damaged(f"its index cannot be decoded ({error})") from None
        if not decoded.is_sound(start):
            raise self._damaged("its index is not consistent")
        return decoded

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {error}; make it readable, or load another checkpoint")

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {why}; load another checkpoint")
