"""A file with one tree of plain values and numpy arrays: the journal's snapshot, a checkpoint's state, a loaded state.

`core.state.serialization` makes the tree. The file consists of:

    preamble   64 bytes: magic, version, CRC of the head, its length, length and CRC of the rest, CRC of the preamble
    head       the tree as msgpack; an array in it is an extension with its dtype, length and position
    arrays     each at a multiple of 64 bytes, in the order of the head

All numbers are little-endian. `read` maps the file privately: arrays are writable views of the mapping, and writes to
them do not change the file. So a file may be removed or replaced while it is in use, but must never be overwritten;
`write` makes a new one beside it and renames it.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import struct
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from transfer_queue.core.events.records import StateLoaded
from transfer_queue.core.state.serialization import load_state
from transfer_queue.core.state.state import State
from transfer_queue.errors import CheckpointError
from transfer_queue.journal.segment import reserve_space
from transfer_queue.private_files import no_link, sync_folder

MAGIC = b"TQSTATE\n"
VERSION = 1  # grows with every change of the content of the tree, or of the layout of the file
ALIGNMENT = 64
ARRAY_CODE = 1  # msgpack extension: an array of one dimension

_PREAMBLE = struct.Struct("<8sIIQQI")
_CRC = struct.Struct("<I")
_ARRAY = struct.Struct("<3sQQ")  # dtype as numpy writes it, number of elements, bytes from the first array to this one
_DTYPES = {np.dtype(kind).str.encode(): np.dtype(kind) for kind in ("i1", "u1", "<u2", "<i4", "<i8", "<f8")}


def write(path: Path, tree: Any, sync: bool = True) -> None:
    """Write a tree of dicts, lists, text, numbers, bytes, None and arrays of one dimension.

    If `sync` is set, the file survives a crash of the machine once this returns. The file `path` is replaced
    atomically at the end. Raises OSError as the file system does; then no draft is left.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with open(draft, "wb", buffering=1 << 20, opener=no_link) as file:
            _write(file, tree)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    if sync:
        sync_folder(path.parent)


def _write(file: BinaryIO, tree: Any) -> None:
    arrays: list[np.ndarray] = []
    end = 0

    def place(value: object) -> msgspec.msgpack.Ext:
        nonlocal end
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.str.encode() not in _DTYPES:
            raise TypeError(
                f"a state file can contain plain values and arrays of numbers with one dimension, "
                f"got {type(value).__name__}"
            )
        arrays.append(np.ascontiguousarray(value))
        packed = _ARRAY.pack(value.dtype.str.encode(), len(value), end)
        end += value.nbytes + _gap(value.nbytes)
        return msgspec.msgpack.Ext(ARRAY_CODE, packed)

    head = msgspec.msgpack.Encoder(enc_hook=place).encode(tree)
    crc = 0
    file.write(bytes(ALIGNMENT))
    file.write(head)
    for part in _parts(len(head), arrays):
        crc = zlib.crc32(part, crc)
        file.write(part)
    end += _gap(len(head))
    preamble = _PREAMBLE.pack(MAGIC, VERSION, zlib.crc32(head), len(head), end, crc)
    file.seek(0)
    file.write(preamble + _CRC.pack(zlib.crc32(preamble)))


def _parts(head: int, arrays: list[np.ndarray]) -> Iterator[memoryview | bytes]:
    """Yield what follows a head of this many bytes: the arrays, with zeros between them."""
    yield bytes(_gap(head))
    for array in arrays:
        yield array.data.cast("B") if len(array) else b""
        yield bytes(_gap(array.nbytes))


def _gap(size: int) -> int:
    return -size % ALIGNMENT


def read(path: Path) -> Any:
    """Return the tree that was written. Tuples become lists; arrays are writable and keep the mapping alive.

    Raises FileNotFoundError, or OSError as the file system does, and CheckpointError if `write` did not write the
    file, or if the file has changed since.
    """
    with open(path, "rb") as file:
        whole = _mapped(file)
    try:
        return _tree(whole)
    except _Unreadable as error:
        raise CheckpointError(
            f"{path} is not a state that this release can load: {error}. Load another checkpoint, or the same one from "
            f"where it was saved; nothing was changed."
        ) from None


class _Unreadable(Exception):
    """What is wrong with a file."""


def _mapped(file: BinaryIO) -> np.ndarray:
    """Return all bytes of a file, u1; as a private mapping if its file system supports that."""
    if os.fstat(file.fileno()).st_size:
        with suppress(OSError):
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), "u1")
    return np.frombuffer(bytearray(file.read()), "u1")


def _tree(whole: np.ndarray) -> Any:
    fixed = whole[: _PREAMBLE.size + _CRC.size].tobytes()
    if fixed[: len(MAGIC)] != MAGIC:
        raise _Unreadable(f"it begins with {fixed[: len(MAGIC)]!r} and not with {MAGIC!r}")
    if len(whole) < ALIGNMENT:
        raise _Unreadable(f"it ends after {len(whole)} bytes, within its first {ALIGNMENT}")
    preamble = fixed[: _PREAMBLE.size]
    if _CRC.unpack(fixed[_PREAMBLE.size :]) != (zlib.crc32(preamble),):
        raise _Unreadable("its first bytes are damaged")
    _, version, head_crc, head_size, size, crc = _PREAMBLE.unpack(preamble)
    if version != VERSION:
        raise _Unreadable(f"it is of version {version}, and this release reads version {VERSION}")
    wanted = ALIGNMENT + head_size + size
    if len(whole) != wanted:
        raise _Unreadable(f"it has {len(whole)} bytes and not {wanted}")
    head, rest = whole[ALIGNMENT : ALIGNMENT + head_size], whole[ALIGNMENT + head_size :]
    if zlib.crc32(head.data) != head_crc or zlib.crc32(rest.data) != crc:
        raise _Unreadable("its checksums do not match its content")
    try:
        return _decoded(head, rest[_gap(head_size) :])
    except (msgspec.MsgspecError, struct.error, LookupError, ValueError, TypeError, RecursionError) as error:
        raise _Unreadable(f"its head cannot be decoded ({error})") from None


def _decoded(head: np.ndarray, arrays: np.ndarray) -> Any:
    def view(code: int, data: memoryview) -> np.ndarray:
        kind, count, start = _ARRAY.unpack(data)
        end = start + count * _DTYPES[kind].itemsize
        if code != ARRAY_CODE or start % ALIGNMENT or end > len(arrays):
            raise ValueError(f"an array is at {start} to {end} of {len(arrays)} bytes")
        return arrays[start:end].view(_DTYPES[kind])

    return msgspec.msgpack.Decoder(ext_hook=view).decode(head.data)


# ---------------------------------------------------------------- states of loaded checkpoints
#     load-<32 hex digits>    a loaded state (`state_file.py`); a record names it (`core.events.records.StateLoaded`)
#
# A thread beside the loop writes the whole file, and then the loop writes the record that names it. So the record is
# small, however large the state is. If no record names a file, a controller died before it wrote the record; the next
# start removes the file.

_PREFIX = "load-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")


class LoadedStates:
    """The files in one folder. If `sync` is set, a file that `add` has added survives a crash of the machine."""

    def __init__(self, folder: Path, sync: bool = True) -> None:
        self.folder = folder
        self._sync = sync

    def path(self, name: str) -> Path:
        """The path of a file."""
        return self.folder / name

    def add(self, source: Path) -> str:
        """Copy a file and return the name of the copy. A hard link is not enough: its writer may still have it open.

        Raises OSError if the file cannot be read, and CheckpointError if the copy cannot be written. Then no copy
        remains.
        """
        name = f"{_PREFIX}{uuid.uuid4().hex}"
        with open(source, "rb") as read:
            try:
                self._copy(read, self.path(name))
            except OSError as error:
                with suppress(OSError):  # then the next start removes it
                    self.remove(name)
                raise CheckpointError(
                    f"the journal in {self.folder} cannot keep a copy of it: {error}. Nothing was changed; free some "
                    f"space there and load it again"
                ) from error
        return name

    def _copy(self, source: BinaryIO, path: Path) -> None:
        with open(path, "xb", opener=no_link) as file:
            reserve_space(file.fileno(), 0, max(1, os.fstat(source.fileno()).st_size))
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            if self._sync:
                os.fsync(file.fileno())
        if self._sync:
            sync_folder(self.folder)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        self.path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """The names of all files, including those that are not complete."""
        return [path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]

    def prepare(self, state: State, record: StateLoaded) -> None:
        """Read the file that a record names, before the record is replayed on the state.

        Raises CheckpointError or OSError if the file cannot be read.
        """
        if not _NAME.fullmatch(record.file):
            raise CheckpointError(f"{record.file[:80]!r} is not the name of a loaded state")
        tree = read(self.path(record.file))
        state.prepared = (record, tree, load_state(tree["state"], state.capacity, state.watched))
