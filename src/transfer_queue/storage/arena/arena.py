"""The arena of a storage unit: one mapped file of bytes and one of generations, in a folder.

    arena        mode 0600; its size is the capacity, but only its first `held` bytes are allocated, without `holes`.
                 No other byte is ever touched, so that a full file system is an error at growth and not a SIGBUS
    generations  one little-endian u8 per granule of 64 KiB; only the unit writes it
    extents      the leased extents (`storage.arena.extent_file`); only the unit reads it
    holds        which granules readers have views of (`storage.arena.read_holds`)
    header       JSON (`ArenaHeader`); written last, so if it exists, the other files are complete

The unit creates the arena, or reopens the one of the unit before it, and every process of the node maps all of it once.
This module copies no payload and does not know what is leased (`storage.arena.extent_table`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import stat
import uuid
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.errors import (
    AttachError,
    CapacityError,
    InvalidArgumentError,
    ProtocolError,
    StartError,
    with_advice,
)
from transfer_queue.messages.descriptors import MEMORY, MIRROR
from transfer_queue.private_files import replace_private, sync_folder
from transfer_queue.storage.arena.extent_file import ENTRY_BYTES, HEAD_BYTES, ExtentFile, size_of
from transfer_queue.storage.arena.extent_table import GRANULE, round_up
from transfer_queue.storage.arena.read_holds import HOLDS, HoldFile, ReadHolds
from transfer_queue.storage.protocols import ArenaMemory, Bytes

MAGIC = "transfer_queue arena"
VERSION = 1
SEGMENT = 64 * 1024 * 1024
"""The bytes by which an arena usually grows."""
MIN_SHARED_MEMORY = 256 * 1024 * 1024
"""Bytes that must be free in a memory file system before an arena is put there."""

_GENERATION_BYTES = 8
_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module has no name for it
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})
_HEADER_LIMIT = 4096
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Generations = npt.NDArray[np.uint64]


class ArenaHeader(msgspec.Struct, frozen=True):
    """The content of the header file."""

    magic: str
    version: int
    granule: int
    capacity: int
    boot_id: str
    """Identifies this arena: another arena in the same folder has another one."""


_decode_header = msgspec.json.Decoder(ArenaHeader).decode


class FolderChoice(NamedTuple):
    """Where to put arenas."""

    folder: Path
    warning: str | None
    """A warning for the user, or None."""


def choose_folder(
    shared_memory: Path = Path("/dev/shm"), fallback: Path | None = None, least: int = MIN_SHARED_MEMORY
) -> FolderChoice:
    """Return the folder of shared memory if it is writable and has `least` bytes free, else the fallback.

    The fallback (None: the folder for temporary files) is usually on a disk, which the warning says.
    """
    trouble = _folder_problem(shared_memory, least)
    if trouble is None:
        return FolderChoice(shared_memory, None)
    import tempfile  # imported here, because it takes a megabyte of each server

    chosen = Path(tempfile.gettempdir()) if fallback is None else fallback
    return FolderChoice(
        chosen,
        f"samples are stored in {chosen}, which may be slow, because {shared_memory} {trouble}; "
        f"give the machine or container more shared memory (docker run --shm-size=8g)",
    )


def _folder_problem(folder: Path, least: int) -> str | None:
    if not folder.is_dir():
        return "does not exist"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "is not writable"
    available = _available(folder)
    if available < least:
        return f"has {available} free bytes of the {least} wanted"
    return None


class Arena(ArenaMemory):
    """A mapped arena. A unit calls `create` for a new one and `reopen` after a restart; other processes call `open`."""

    def __init__(
        self, folder: Path, header: ArenaHeader, memory: int, generations: int, extents: int | None, tier: str = MEMORY
    ) -> None:
        self.folder = folder
        self.tier = tier
        """Its tier: `MEMORY`, or `DISK` or `MIRROR` (`messages.descriptors`; for the unit only).

        On disk no page is made resident, and written pages are dropped from memory.
        """
        self.capacity = header.capacity
        """Bytes to which it may grow."""
        self.boot_id = header.boot_id
        self.warm = 0
        """Bytes that `prefault_some` made resident, from offset 0; at most `held` (for the unit only)."""
        owner = extents is not None
        self._files: tuple[int, ...] = (memory, generations, extents) if extents is not None else ()
        self._extents = ExtentFile(extents, header.capacity) if extents is not None else None
        self.holes = np.zeros(header.capacity // GRANULE if owner else 0, bool)
        """Which granules below `held` were returned to the file system (for the unit only).

        They are not leased, and must not be touched before `fill`.
        """
        self.hole_bytes = 0
        """The size of the holes (for the unit only)."""
        self.spared = 0
        """Bytes of its file system that the arena leaves free, for the journal beside it (for the unit only)."""
        self._punches = True
        self._populates = True
        # The mmap object is freed with the last array that views it. It is never closed explicitly, because closing it
        # under a view in use is a segfault.
        self._mapping: mmap.mmap | None = mmap.mmap(memory, header.capacity)
        self.memory: Bytes = np.frombuffer(self._mapping, np.uint8)
        """The whole arena, u8, of length `capacity`."""
        access = mmap.ACCESS_WRITE if owner else mmap.ACCESS_READ
        table = mmap.mmap(generations, _generations_size(header.capacity), access=access)
        self.generations: Generations = np.frombuffer(table, "<u8")
        """u8 per granule; only the unit can write it."""
        self.holds: ReadHolds | None = HoldFile(folder) if owner else None
        """The read holds of its readers (for the unit only). Simulations replace it."""

    @classmethod
    def create(cls, folder: Path, capacity: int | None = None, tier: str = MEMORY) -> Arena:
        """Create an arena in this folder, which is created with mode 0700 if it is missing.

        `capacity` is the number of bytes to which it may grow. It is limited to the size of the file system, which is
        also the default. Raises StartError if the folder contains an arena or cannot be used, and CapacityError if it
        has too little free space.
        """
        if capacity is not None and capacity < GRANULE:
            raise InvalidArgumentError(f"the capacity of an arena must be at least {GRANULE} bytes, got {capacity}")
        made: list[Path] = []
        files: list[int] = []
        arena: Arena | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            size = _capacity(folder, capacity)
            header = ArenaHeader(MAGIC, VERSION, GRANULE, size, uuid.uuid4().hex)
            for name, length in _sizes(size).items():
                path = folder / name
                files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
                made.append(path)
                os.ftruncate(files[-1], length)
            made.append(folder / HOLDS)
            _allocate(files[2], 0, HEAD_BYTES)
            arena = cls(folder, header, files[0], files[1], files[2], tier)
            arena.extents.begin(header.boot_id)
            replace_private(folder / "header", msgspec.json.encode(header), "header.new", sync=tier == MIRROR)
            if tier == MIRROR:
                sync_folder(folder.parent)
        except BaseException as error:
            if arena is not None:
                arena.close()
            else:
                for file in files:
                    os.close(file)
            for path in made:
                path.unlink(missing_ok=True)
            if isinstance(error, FileExistsError):
                raise StartError(f"the arena cannot be created in {folder}, because {error.filename} exists: another "
                                 f"arena or a part of one; remove it or choose another folder") from None  # fmt: skip
            if isinstance(error, OSError):
                kind = CapacityError if error.errno in _NO_SPACE else StartError
                raise kind(f"the arena cannot be created in {folder} (capacity {capacity}): {error}; "
                           f"free some space there or choose another folder") from error  # fmt: skip
            raise
        return arena

    @classmethod
    def reopen(cls, folder: Path, tier: str = MEMORY) -> Arena:
        """Open the arena of a unit that ended, for the unit that replaces it. No other process may have it open.

        Raises AttachError, with the reason, if it does not exist, is incomplete, or is of another version.
        """
        arena = cls._open_folder(folder, is_owner=True)
        arena.tier = tier
        arena.extents.read(folder, arena.boot_id)
        arena.holes = arena.extents.holes()
        arena.hole_bytes = int(np.count_nonzero(arena.holes)) * GRANULE
        return arena

    @classmethod
    def open(cls, folder: Path) -> Arena:
        """Map an arena that a unit created. Raises AttachError, with the reason, if this version cannot read it."""
        return cls._open_folder(folder, is_owner=False)

    @classmethod
    def _open_folder(cls, folder: Path, is_owner: bool) -> Arena:
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as closing:
            try:
                header = _parse(folder, _read_header(folder))
                files = []
                for name, size in _sizes(header.capacity).items():
                    if name == "extents" and not is_owner:
                        continue
                    mode = os.O_RDWR if is_owner or name == "arena" else os.O_RDONLY
                    files.append(os.open(folder / name, mode | _SAFELY))
                    (on_failure if is_owner else closing).callback(os.close, files[-1])
                    status = os.fstat(files[-1])
                    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                        raise AttachError(f"{folder / name} has {status.st_size} bytes, but its header says {size}; "
                                          f"the arena is damaged, restart the system")  # fmt: skip
                arena = cls(folder, header, files[0], files[1], files[2] if is_owner else None)
            except OSError as error:
                advice = "check that its storage unit runs on this machine and as this user"
                raise AttachError(f"the arena in {folder} cannot be opened: {with_advice(error, advice)}") from error
            on_failure.pop_all()
            return arena

    @property
    def extents(self) -> ExtentFile:
        """The file of leased extents."""
        if self._extents is None:
            raise ProtocolError(f"only the storage unit of the arena {self.folder} can read its leased extents")
        return self._extents

    @property
    def held(self) -> int:
        """Bytes allocated, from offset 0; 0 in other processes than the unit, and after `close`."""
        return self._extents.held if self._extents is not None else 0

    def view(self, offset: int, nbytes: int) -> Bytes:
        """See `ArenaMemory.view`."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.memory.size:
            raise ProtocolError(
                f"{nbytes} bytes at offset {offset} are not in the arena {self.folder} of {self.memory.size} bytes"
            )
        return self.memory[offset : offset + nbytes]

    def write(self, offset: int, data: Bytes) -> None:
        """Write into space that the unit itself has leased; on disk without the mapping, so that no page is mapped."""
        if self.tier == MEMORY:
            self.memory[offset : offset + len(data)] = data
            return
        while len(data):
            written = os.pwrite(self._files[0], data.data, offset)
            data, offset = data[written:], offset + written

    def drop_pages(self, offset: int, length: int) -> None:
        """On disk, start to write back the dirty pages of these granules, and drop the clean ones from memory.

        Does not wait, so that a page needs two calls. Pages that other processes have mapped stay.
        """
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED, offset, length)
            os.posix_fadvise(self._files[0], offset, length, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Wait until the disk has all that was written, and the generations and extents that belong to it.

        Raises OSError if the disk cannot write. Another thread than the unit's may call it.
        """
        for file in self._files:
            os.fdatasync(file)

    def generation(self, offset: int) -> int:
        """See `ArenaMemory.generation`."""
        granule = offset // GRANULE
        if not 0 <= granule < self.generations.size:
            raise ProtocolError(f"offset {offset} is not in the arena {self.folder} of {self.memory.size} bytes")
        return int(self.generations[granule])

    def bump(self, offset: int, length: int) -> None:
        """End the generations of these granules, so that readers of their previous content notice that it is gone."""
        self.generations[offset // GRANULE : (offset + length) // GRANULE] += np.uint64(1)

    def set_generation(self, offset: int, length: int) -> None:
        """Give one generation, at least 1, to granules that are about to be leased as one extent.

        It is the greatest generation that they have. No older descriptor contains it, because each granule's
        generation was increased when its earlier extents were freed.
        """
        granules = self.generations[offset // GRANULE : (offset + length) // GRANULE]
        granules[:] = max(1, int(granules.max()))

    def grow(self, least: int) -> int:
        """Allocate at least this many more bytes after `held`, usually a segment. Returns the number.

        Raises CapacityError, with nothing allocated, if the capacity or the file system does not allow it.
        """
        least = round_up(least)
        space = self.capacity - self.held
        if least > space:
            raise self._full(least, f"its capacity is {self.capacity} bytes")
        available = _available(self.folder) - self.spared
        if least > available:
            raise self._full(least, f"its file system has {available} bytes left")
        step = max(least, min(SEGMENT, space, available // GRANULE * GRANULE))
        while (error := self._allocate(step)) is not None:
            if step == least or error.errno not in _NO_SPACE:
                raise self._full(least, f"its file system refuses them: {error}")
            step = max(least, round_up(step // 2))
        self.extents.held += step
        return step

    def punch(self, offset: int, length: int) -> bool:
        """Return these granules, which are not leased, to the file system. Returns False if it does not support this.

        A process that is still reading their previous content finds zeros and another generation.
        """
        if not self._punches or self._mapping is None:
            return False
        first, end = offset // GRANULE, (offset + length) // GRANULE
        self.extents.mark(first, end, is_hole=True)
        try:
            self._mapping.madvise(mmap.MADV_REMOVE, offset, length)
        except OSError:  # not every file system supports this
            self._punches = False
            self.extents.mark(first, end, is_hole=False)
            return False
        self.hole_bytes += (end - first - int(np.count_nonzero(self.holes[first:end]))) * GRANULE
        self.holes[first:end] = True
        return True

    def fill(self, offset: int, length: int) -> bool:
        """Allocate the holes among these granules. Returns False, with nothing changed, if there is no space."""
        first, end = offset // GRANULE, (offset + length) // GRANULE
        count = int(np.count_nonzero(self.holes[first:end])) if self.hole_bytes else 0
        if not count:
            return True
        if not self._files or count * GRANULE > _available(self.folder) - self.spared:
            return False
        try:
            _allocate(self._files[0], offset, length)
        except OSError:
            return False
        self.extents.mark(first, end, is_hole=False)
        self.holes[first:end] = False
        self.hole_bytes -= count * GRANULE
        return True

    def warm_up(self, offset: int, length: int) -> bool:
        """Fill these granules and make them resident, as `prefault_some`. Returns False if there is no space."""
        if not self.fill(offset, length):
            return False
        if self.tier == MEMORY:
            self._make_resident(offset, offset + length)
        return True

    def prefault_some(self, max_bytes: int) -> bool:
        """Make up to this many held bytes resident. Returns whether more remain. Call it when the unit is idle.

        It changes no byte, so it may run over leased space.
        """
        if self.tier != MEMORY:
            return False
        end = min(self.held, self.warm + max_bytes)
        if end > self.warm:
            for first, last in stretches(np.flatnonzero(~self.holes[self.warm // GRANULE : -(-end // GRANULE)])):
                start = max(self.warm, (first + self.warm // GRANULE) * GRANULE)
                self._make_resident(start, min(end, (last + self.warm // GRANULE) * GRANULE))
            self.warm = end
        return self.warm < self.held

    def close(self) -> None:
        """Close the files. The mappings stay while views of them are in use."""
        for file in self._files:
            os.close(file)
        self._files = ()
        if self.holds is not None:
            self.holds.close()
        self._mapping = None
        self._extents = None
        self.memory = np.empty(0, np.uint8)
        self.generations = np.empty(0, np.uint64)

    def remove(self) -> None:
        """Unlink the files. Their space is freed when the last process has unmapped them."""
        for name in ("header", "arena", "generations", "extents", HOLDS):
            (self.folder / name).unlink(missing_ok=True)

    def _allocate(self, step: int) -> OSError | None:
        """Allocate `step` bytes after `held` in all files; on failure, return the error and allocate nothing."""
        if not self._files:
            raise ProtocolError(f"the arena {self.folder} can only be grown by its storage unit, before it is closed")
        memory, generations, extents = self._files
        first, count = self.held // GRANULE, step // GRANULE
        try:
            _allocate(generations, first * _GENERATION_BYTES, count * _GENERATION_BYTES)
            _allocate(extents, HEAD_BYTES + first * ENTRY_BYTES, count * ENTRY_BYTES)
            _allocate(memory, self.held, step)
        except OSError as error:
            # tmpfs undoes a failed allocation itself, other file systems do not
            os.ftruncate(memory, self.held)
            os.ftruncate(memory, self.capacity)
            return error
        return None

    def _make_resident(self, start: int, end: int) -> None:
        start -= start % _PAGE
        if self._populates and self._mapping is not None:
            try:
                self._mapping.madvise(_POPULATE_WRITE, start, end - start)
            except OSError:
                self._populates = False
            else:
                return
        self.memory[start:end:_PAGE].max(initial=0)  # reads a byte of each page

    def _full(self, wanted: int, why: str) -> CapacityError:
        return CapacityError(f"no capacity in the arena {self.folder}: {wanted} bytes more wanted, {self.held} held, "
                             f"and {why}; clear samples or give storage more space")  # fmt: skip


def _capacity(folder: Path, wanted: int | None) -> int:
    """Return the capacity in bytes, in whole granules: what is wanted, limited by the file system and by ulimit."""
    system = os.statvfs(folder)
    total = system.f_blocks * system.f_frsize
    if total == 0:  # a tmpfs without a size
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        total = min(total, limit)
    size = (total if wanted is None else min(total, wanted)) // GRANULE * GRANULE
    if size == 0:
        raise OSError(errno.ENOSPC, f"its file system must have at least {GRANULE} bytes, and has {total}")
    return size


def _available(folder: Path) -> int:
    system = os.statvfs(folder)
    if system.f_blocks == 0:  # a tmpfs without a size does not report its free space
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return system.f_bavail * system.f_frsize


def _generations_size(capacity: int) -> int:
    return capacity // GRANULE * _GENERATION_BYTES


def _sizes(capacity: int) -> dict[str, int]:
    """Return the files of an arena without its header, and their sizes."""
    return {"arena": capacity, "generations": _generations_size(capacity), "extents": size_of(capacity)}


def _allocate(file: int, offset: int, length: int) -> None:
    """Allocate a range of a file that is not in use, by writing zeros if the file system has no other way."""
    try:
        os.posix_fallocate(file, offset, length)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    else:
        return
    zeros = memoryview(bytes(min(length, 1 << 20)))
    while length > 0:
        written = os.pwrite(file, zeros[:length], offset)
        offset += written
        length -= written


def stretches(granules: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ascending numbers as (first, end) of consecutive ones."""
    edges = np.flatnonzero(np.diff(granules) > 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(granules, edges) if len(part)]


def check_files(folder: Path) -> None:
    """Raise StartError if an arena that was complete once lacks a file, or has one of another size.

    An arena without a header was never complete, so nothing was stored in it.
    """
    if not (folder / "header").exists():
        return
    try:
        sizes = _sizes(_parse(folder, _read_header(folder)).capacity)
    except (AttachError, OSError) as error:
        raise StartError(f"{error}. {_accept_the_loss(folder)}") from error
    for name, size in sizes.items():
        path = folder / name
        try:
            facts = path.lstat()
        except FileNotFoundError:
            raise StartError(f"the arena in {folder} lacks its file {name!r}. {_accept_the_loss(folder)}") from None
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != size:
            raise StartError(
                f"{path} has {facts.st_size} bytes, but the header of its arena says {size}. {_accept_the_loss(folder)}"
            )


def _accept_the_loss(folder: Path) -> str:
    return (
        f"The values in this arena cannot be read. Bring the file back; or remove the folder {folder}, and its values "
        f"are reported as lost"
    )


def boot_id_of(folder: Path) -> str:
    """Return the boot id of the arena in a folder. Raises AttachError or OSError if there is none."""
    return _parse(folder, _read_header(folder)).boot_id


def _read_header(folder: Path) -> bytes:
    file = os.open(folder / "header", os.O_RDONLY | _SAFELY)
    try:
        return os.read(file, _HEADER_LIMIT)
    finally:
        os.close(file)


def _parse(folder: Path, content: bytes) -> ArenaHeader:
    """Return the header if this version can read such an arena."""
    path = folder / "header"
    try:
        header = _decode_header(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AttachError(f"{path} is not the header of an arena ({error}); remove the folder") from None
    if header.magic != MAGIC:
        raise AttachError(f"{path} begins with {header.magic[:40]!r} and not {MAGIC!r}: it is not the header of an "
                          f"arena; remove the folder")  # fmt: skip
    if header.version != VERSION:
        raise AttachError(f"{path} has version {header.version}, but this package reads version {VERSION}; "
                          f"use the same release on both sides")  # fmt: skip
    if header.granule != GRANULE:
        raise AttachError(f"{path} has granules of {header.granule} bytes, but this package needs {GRANULE}; "
                          f"use the same release on both sides")  # fmt: skip
    if header.capacity <= 0 or header.capacity % GRANULE:
        raise AttachError(f"{path} has a capacity of {header.capacity} bytes, which must be in whole granules; "
                          f"the arena is damaged, restart the system")  # fmt: skip
    return header
