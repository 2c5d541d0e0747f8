"""The arena of a storage unit: one mapped file of bytes and one of generations, in a folder.

    arena        mode 0600, as long as the capacity; only its first `held` bytes are allocated, without `holes`, and
                 nothing else is ever touched, so that a full file system is an error at growth and no SIGBUS
    generations  one little-endian u8 a granule of 64 KiB; only the unit writes it
    extents      which of it is leased (`storage.arena.extent_file`); only the unit looks at it
    header       JSON (`ArenaHeader`); written last, so where it is the rest is too

The unit creates the arena, or reopens the one of a unit before it, and every process of the node maps it once,
whole. This module moves no payload and does not know what is leased (`storage.arena.extent_table`).
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

from transfer_queue.errors import AttachError, CapacityError, InvalidArgumentError, ProtocolError, StartError
from transfer_queue.messages.descriptors import DISK, MEMORY
from transfer_queue.storage.arena.extent_file import ENTRY_BYTES, HEAD_BYTES, ExtentFile, size_of
from transfer_queue.storage.arena.extent_table import GRANULE, round_up
from transfer_queue.storage.protocols import ArenaMemory, Bytes

MAGIC = "transfer_queue arena"
VERSION = 1
SEGMENT = 64 * 1024 * 1024
"""Bytes an arena usually grows by."""
LEAST_SHARED_MEMORY = 256 * 1024 * 1024
"""Bytes that must be free in a memory file system before an arena is put there."""

_GENERATION_BYTES = 8
_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module has no name for it
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})
_HEADER_LIMIT = 4096
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Generations = npt.NDArray[np.uint64]


class ArenaHeader(msgspec.Struct, frozen=True):
    """What the header file says. boot_id: of this arena alone; another arena in the same folder has another."""

    magic: str
    version: int
    granule: int
    capacity: int
    boot_id: str


class FolderChoice(NamedTuple):
    """Where to put arenas, and what to warn of, if anything."""

    folder: Path
    warning: str | None


def choose_folder(
    shared_memory: Path = Path("/dev/shm"), fallback: Path | None = None, least: int = LEAST_SHARED_MEMORY
) -> FolderChoice:
    """The folder of shared memory if it can be written and has `least` bytes free, else the fallback.

    The fallback is the folder for temporary files; it is usually on a disk, hence the warning.
    """
    trouble = _why_not(shared_memory, least)
    if trouble is None:
        return FolderChoice(shared_memory, None)
    import tempfile  # which takes a megabyte of each server

    chosen = Path(tempfile.gettempdir()) if fallback is None else fallback
    return FolderChoice(
        chosen,
        f"samples are stored in {chosen}, which may be slow, because {shared_memory} {trouble}; "
        f"give the machine or container more shared memory (docker run --shm-size=8g)",
    )


def _why_not(folder: Path, least: int) -> str | None:
    if not folder.is_dir():
        return "does not exist"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "cannot be written"
    available = _available(folder)
    if available < least:
        return f"has {available} bytes free of the {least} wanted"
    return None


class Arena(ArenaMemory):
    """A mapped arena. `create` makes one for its unit, `reopen` is for a later unit; `open` is for everybody else.

    folder, capacity (bytes it may grow to), boot_id: as the header says.
    memory: all of it, u8, length `capacity`. generations: u8 a granule, read-only but for the unit.
    extents: the file that says what is leased (the unit only).
    warm: bytes made resident by `prefault_some`, from offset 0 (the unit only); at most `held`.
    tier: where it lies (`messages.MEMORY`, `messages.DISK`), as its unit was told (the unit only); on disk nothing is
    made resident, and what was written is let go of.
    holes: which granules below `held` are given back to the file system, and hole_bytes how much that is (the unit
    only). Nobody has them leased, and nobody may touch them before `fill`.
    """

    def __init__(
        self, folder: Path, header: ArenaHeader, memory: int, generations: int, extents: int | None, tier: str = MEMORY
    ) -> None:
        self.folder = folder
        self.tier = tier
        self.capacity = header.capacity
        self.boot_id = header.boot_id
        self.warm = 0
        owner = extents is not None
        self._files: tuple[int, ...] = (memory, generations, extents) if extents is not None else ()
        self._extents = ExtentFile(extents, header.capacity) if extents is not None else None
        self.holes = np.zeros(header.capacity // GRANULE if owner else 0, bool)
        self.hole_bytes = 0
        self._punches = hasattr(mmap, "MADV_REMOVE")
        self._populates = True
        # An mmap object goes away with the last array that looks into it, and is never closed by hand:
        # closing it under a living view is a segfault.
        self._mapping: mmap.mmap | None = mmap.mmap(memory, header.capacity)
        self.memory: Bytes = np.frombuffer(self._mapping, np.uint8)
        access = mmap.ACCESS_WRITE if owner else mmap.ACCESS_READ
        table = mmap.mmap(generations, _generations_size(header.capacity), access=access)
        self.generations: Generations = np.frombuffer(table, "<u8")

    @classmethod
    def create(cls, folder: Path, capacity: int | None = None, tier: str = MEMORY) -> Arena:
        """A new arena in this folder, which is made with mode 0700 if missing.

        capacity: most bytes it may grow to; no more than the file system is big, which is also the default.
        StartError if the folder holds an arena or cannot be used; CapacityError if there is no room to begin.
        """
        if capacity is not None and capacity < GRANULE:
            raise InvalidArgumentError(f"an arena of {capacity} bytes is too small; give it {GRANULE} or more")
        made: list[Path] = []
        files: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            size = _capacity(folder, capacity)
            header = ArenaHeader(MAGIC, VERSION, GRANULE, size, uuid.uuid4().hex)
            for name, length in _sizes(size).items():
                path = folder / name
                files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
                made.append(path)
                os.ftruncate(files[-1], length)
            _allocate(files[2], 0, HEAD_BYTES)
            arena = cls(folder, header, files[0], files[1], files[2], tier)
            arena.extents.begin(header.boot_id)
            _write_whole(folder / "header", msgspec.json.encode(header))
        except BaseException as error:
            for file in files:
                os.close(file)
            for path in made:
                path.unlink()
            if isinstance(error, FileExistsError):
                raise StartError(f"{error.filename} exists, so that no arena can be made in {folder}: another one, or "
                                 f"what is left of it; remove it or choose another folder") from None  # fmt: skip
            if isinstance(error, OSError):
                kind = CapacityError if error.errno in _NO_ROOM else StartError
                raise kind(f"no arena can be made in {folder} (capacity {capacity}): {error}; "
                           f"free space there or choose another folder") from error  # fmt: skip
            raise
        return arena

    @classmethod
    def reopen(cls, folder: Path, tier: str = MEMORY) -> Arena:
        """The arena of a unit that ended, for the unit in its place. No other may have it any more.

        AttachError, saying why, if it is not there, not whole, or not of this version.
        """
        arena = cls._opened(folder, owner=True)
        arena.tier = tier
        arena.extents.read(folder, arena.boot_id)
        arena.holes = arena.extents.holes()
        arena.hole_bytes = int(np.count_nonzero(arena.holes)) * GRANULE
        return arena

    @classmethod
    def open(cls, folder: Path) -> Arena:
        """Maps an arena that a unit created. AttachError, saying why, if there is none that this version can read."""
        return cls._opened(folder, owner=False)

    @classmethod
    def _opened(cls, folder: Path, owner: bool) -> Arena:
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as closing:
            try:
                header = _parse(folder, _read_header(folder))
                files = []
                for name, size in _sizes(header.capacity).items():
                    if name == "extents" and not owner:
                        continue
                    mode = os.O_RDWR if owner or name == "arena" else os.O_RDONLY
                    files.append(os.open(folder / name, mode | _SAFELY))
                    (on_failure if owner else closing).callback(os.close, files[-1])
                    found = os.fstat(files[-1])
                    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                        raise AttachError(f"{folder / name} has {found.st_size} bytes and its header says {size}; "
                                          f"the arena is damaged, restart the system")  # fmt: skip
                arena = cls(folder, header, files[0], files[1], files[2] if owner else None)
            except OSError as error:
                raise AttachError(f"no arena can be opened in {folder}: {error}; is its storage unit running, "
                                  f"on this machine and as this user?") from error  # fmt: skip
            on_failure.pop_all()
            return arena

    @property
    def extents(self) -> ExtentFile:
        """What is leased."""
        if self._extents is None:
            raise ProtocolError(f"what is leased of the arena {self.folder} is known to its storage unit only")
        return self._extents

    @property
    def held(self) -> int:
        """Bytes allocated, from offset 0 (known to the unit only, while it is open; 0 elsewhere)."""
        return self._extents.held if self._extents is not None else 0

    def view(self, offset: int, nbytes: int) -> Bytes:
        """See `ArenaMemory.view`."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.memory.size:
            raise ProtocolError(
                f"{nbytes} bytes at offset {offset} are not in the arena {self.folder} of {self.memory.size} bytes"
            )
        return self.memory[offset : offset + nbytes]

    def write(self, offset: int, data: Bytes) -> None:
        """Writes bytes where the unit itself has leased space; on disk past the mapping, so that no page is mapped."""
        if self.tier == MEMORY:
            self.memory[offset : offset + len(data)] = data
            return
        while len(data):
            written = os.pwrite(self._files[0], data.data, offset)
            data, offset = data[written:], offset + written

    def let_go(self, offset: int, length: int) -> None:
        """Of these granules, on disk: has what is not written yet written, and drops from memory what is.

        Does not wait, so that it takes two calls. What other processes have mapped stays.
        """
        if self._mapping is not None and hasattr(os, "posix_fadvise"):
            self._mapping.madvise(mmap.MADV_DONTNEED, offset, length)
            os.posix_fadvise(self._files[0], offset, length, os.POSIX_FADV_DONTNEED)

    def generation(self, offset: int) -> int:
        """See `ArenaMemory.generation`."""
        granule = offset // GRANULE
        if not 0 <= granule < self.generations.size:
            raise ProtocolError(f"offset {offset} is not in the arena {self.folder} of {self.memory.size} bytes")
        return int(self.generations[granule])

    def bump(self, offset: int, length: int) -> None:
        """Ends the generations of these granules: what was read there before is from now on seen to be gone."""
        self.generations[offset // GRANULE : (offset + length) // GRANULE] += np.uint64(1)

    def settle(self, offset: int, length: int) -> None:
        """Gives one generation, at least 1, to granules about to be leased as one extent.

        It is the greatest they have. No descriptor of before names it: those of a granule's earlier
        extents name less than what the granule has had since they were freed.
        """
        granules = self.generations[offset // GRANULE : (offset + length) // GRANULE]
        granules[:] = max(1, int(granules.max()))

    def grow(self, least: int) -> int:
        """Allocates at least this many more bytes after `held`, usually a segment; answers how many.

        CapacityError, with nothing allocated, if the capacity or the file system does not let it.
        """
        least = round_up(least)
        room = self.capacity - self.held
        if least > room:
            raise self._full(least, f"its capacity is {self.capacity} bytes")
        available = _available(self.folder)
        if least > available:
            raise self._full(least, f"the file system has {available} bytes left")
        step = max(least, min(SEGMENT, room, available // GRANULE * GRANULE))
        while (error := self._allocate(step)) is not None:
            if step == least or error.errno not in _NO_ROOM:
                raise self._full(least, f"the file system refuses: {error}")
            step = max(least, round_up(step // 2))
        self.extents.held += step
        return step

    def punch(self, offset: int, length: int) -> bool:
        """Gives these granules, which nobody has leased, back to the file system; False where it cannot take them.

        Who still reads there of what was freed finds zeros, and that the generation is another.
        """
        if not self._punches or self._mapping is None:
            return False
        first, end = offset // GRANULE, (offset + length) // GRANULE
        self.extents.mark(first, end, hole=True)
        try:
            self._mapping.madvise(mmap.MADV_REMOVE, offset, length)
        except OSError:  # not every file system can
            self._punches = False
            self.extents.mark(first, end, hole=False)
            return False
        self.hole_bytes += (end - first - int(np.count_nonzero(self.holes[first:end]))) * GRANULE
        self.holes[first:end] = True
        return True

    def fill(self, offset: int, length: int) -> bool:
        """Makes sure that these granules are allocated; False, with nothing changed, where there is no room."""
        first, end = offset // GRANULE, (offset + length) // GRANULE
        count = int(np.count_nonzero(self.holes[first:end])) if self.hole_bytes else 0
        if not count:
            return True
        if not self._files or count * GRANULE > _available(self.folder):
            return False
        try:
            _allocate(self._files[0], offset, length)
        except OSError:
            return False
        self.extents.mark(first, end, hole=False)
        self.holes[first:end] = False
        self.hole_bytes -= count * GRANULE
        return True

    def warm_up(self, offset: int, length: int) -> bool:
        """Fills these granules and makes them resident, as `prefault_some`; False where there is no room."""
        if not self.fill(offset, length):
            return False
        if self.tier == MEMORY:
            self._make_resident(offset, offset + length)
        return True

    def prefault_some(self, max_bytes: int) -> bool:
        """Makes up to this many held bytes resident; whether more remain. Call it when there is nothing to do.

        It changes no byte, so it may run over space that is leased already.
        """
        if self.tier == DISK:
            return False
        end = min(self.held, self.warm + max_bytes)
        if end > self.warm:
            for first, last in stretches(np.flatnonzero(~self.holes[self.warm // GRANULE : -(-end // GRANULE)])):
                start = max(self.warm, (first + self.warm // GRANULE) * GRANULE)
                self._make_resident(start, min(end, (last + self.warm // GRANULE) * GRANULE))
            self.warm = end
        return self.warm < self.held

    def close(self) -> None:
        """Lets go of the files. The mappings stay for as long as views of them live."""
        for file in self._files:
            os.close(file)
        self._files = ()
        self._mapping = None
        self._extents = None
        self.memory = np.empty(0, np.uint8)
        self.generations = np.empty(0, np.uint64)

    def remove(self) -> None:
        """Unlinks the files; the space returns when the last process has let go of it."""
        for name in ("header", "arena", "generations", "extents"):
            (self.folder / name).unlink(missing_ok=True)

    def _allocate(self, step: int) -> OSError | None:
        """Allocates all files for `step` bytes after `held`, or answers why not and leaves nothing over."""
        if not self._files:
            raise ProtocolError(f"the arena {self.folder} is grown by its storage unit only, while it is open")
        memory, generations, extents = self._files
        first, count = self.held // GRANULE, step // GRANULE
        try:
            _allocate(generations, first * _GENERATION_BYTES, count * _GENERATION_BYTES)
            _allocate(extents, HEAD_BYTES + first * ENTRY_BYTES, count * ENTRY_BYTES)
            _allocate(memory, self.held, step)
        except OSError as error:
            # tmpfs takes back what it gave, other file systems keep it
            os.ftruncate(memory, self.held)
            os.ftruncate(memory, self.capacity)
            return error
        return None

    def _make_resident(self, start: int, end: int) -> None:
        start -= start % _PAGE
        if self._populates and self._mapping is not None:
            try:
                self._mapping.madvise(_POPULATE_WRITE, start, end - start)
            except (OSError, AttributeError):
                self._populates = False
            else:
                return
        self.memory[start:end:_PAGE].max(initial=0)  # reads a byte of each page

    def _full(self, wanted: int, why: str) -> CapacityError:
        return CapacityError(f"no capacity in the arena {self.folder}: {wanted} bytes more wanted, {self.held} held, "
                             f"and {why}; clear samples or give storage more room")  # fmt: skip


def _capacity(folder: Path, wanted: int | None) -> int:
    """Bytes, in whole granules: what is wanted, but no more than the file system and the limits allow."""
    system = os.statvfs(folder)
    total = system.f_blocks * system.f_frsize
    if total == 0:  # a tmpfs without a size
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        total = min(total, limit)
    size = (total if wanted is None else min(total, wanted)) // GRANULE * GRANULE
    if size == 0:
        raise OSError(errno.ENOSPC, f"its file system has {total} bytes and {GRANULE} are the least")
    return size


def _available(folder: Path) -> int:
    system = os.statvfs(folder)
    if system.f_blocks == 0:  # a tmpfs without a size: there is no telling
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return system.f_bavail * system.f_frsize


def _generations_size(capacity: int) -> int:
    return capacity // GRANULE * _GENERATION_BYTES


def _sizes(capacity: int) -> dict[str, int]:
    """The files of an arena but for its header, and how long they are."""
    return {"arena": capacity, "generations": _generations_size(capacity), "extents": size_of(capacity)}


def _allocate(file: int, offset: int, length: int) -> None:
    """Allocates a range of a file that nobody uses; by writing zeros where there is no other way."""
    if hasattr(os, "posix_fallocate"):
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
    """Ascending numbers as (first, end) of those that follow each other."""
    edges = np.flatnonzero(np.diff(granules) > 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(granules, edges) if len(part)]


def _write_whole(path: Path, content: bytes) -> None:
    """A file that appears with all its content or not at all."""
    draft = path.with_name(path.name + ".new")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            os.write(file, content)
        finally:
            os.close(file)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _read_header(folder: Path) -> bytes:
    file = os.open(folder / "header", os.O_RDONLY | _SAFELY)
    try:
        return os.read(file, _HEADER_LIMIT)
    finally:
        os.close(file)


def _parse(folder: Path, content: bytes) -> ArenaHeader:
    """The header, if this version can read such an arena."""
    path = folder / "header"
    try:
        header = msgspec.json.decode(content, type=ArenaHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AttachError(f"{path} is not the header of an arena ({error}); remove the folder") from None
    if header.magic != MAGIC:
        raise AttachError(f"{path} begins with {header.magic[:40]!r} and not {MAGIC!r}; it is not an arena's")
    if header.version != VERSION:
        raise AttachError(f"{path} is of version {header.version} and this package reads version {VERSION}; "
                          f"use the same release on both sides")  # fmt: skip
    if header.granule != GRANULE:
        raise AttachError(f"{path} has granules of {header.granule} bytes and this package wants {GRANULE}; "
                          f"use the same release on both sides")  # fmt: skip
    if header.capacity <= 0 or header.capacity % GRANULE:
        raise AttachError(f"{path} says a capacity of {header.capacity} bytes, which is not in whole granules; "
                          f"the arena is damaged, restart the system")  # fmt: skip
    return header
