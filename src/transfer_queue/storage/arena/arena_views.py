"""The views that this process has of arenas: memory over the values themselves, each with a read hold.

A view is an array over a private mapping of the arena: what is written to it goes to a page of this process alone. Two
views of one mapping never share a byte, so a write to one is not seen in another; a second view of the same bytes gets
a mapping of its own. Pages that a user wrote to are dropped with the last view of their granule, because otherwise a
later view would show them. All other pages stay mapped: mapping them again would take as long as a copy.

A view ends when nothing refers to its array any more: a tensor over the array, and whatever shares its storage, refers
to it. Views may end in any thread at any moment, also in a garbage collection, so a finalizer only appends the view to
a list, and whoever has the lock of this module carries out the end.

A forked child inherits the arrays but no lock of the kernel. It locks what they hold before the fork returns in the
parent, which ends no view meanwhile. So the arrays stay valid in both processes. A child that C code forked without
the hooks of Python must not read them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Union

import numpy as np
import numpy.typing as npt

from transfer_queue.errors import AttachError, InvalidArgumentError
from transfer_queue.messages.storage import ReadHold
from transfer_queue.storage.arena.arena import Arena, boot_id_of, stretches
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.arena.read_holds import CAN_HOLD, REGISTERED, HoldLocks
from transfer_queue.storage.protocols import Bytes

if TYPE_CHECKING:
    import torch

MAPPINGS = 4
"""The largest number of private mappings of one arena, and so of views of the same bytes at a time.

Further ones are copies."""
FORK_SECONDS = 10.0
"""The longest time for which a fork waits for the child's locks. After that, the views are never ended here."""

Buffer = Union[mmap.mmap, memoryview]
_PAGE = mmap.PAGESIZE
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the mapping may be larger than the memory of the machine
_PAGEMAP_PAGES = 1 << 16  # pages whose state is read at once
_FILE_PAGE = np.uint64(1 << 61)  # /proc/self/pagemap: a page of a file, not a private one
_ANY_PAGE = np.uint64(3 << 62)  # present or swapped

_lock = threading.Lock()
_arenas: dict[str, ArenaViews] = {}
"""Boot id -> the views of an arena, for the arenas that are open or have views."""
_ended: deque[tuple[ArenaViews, int]] = deque()
"""The views that ended, by their numbers; and number 0 for each `Arena` that was closed."""


class _View(NamedTuple):
    mapping: _PrivateMapping | None
    """None if it is a part of the mapping of an `Arena`, out of which it is copied."""
    start: int
    nbytes: int
    holder: _Holder

    @property
    def granules(self) -> slice:
        """The numbers of its granules."""
        return granules_of(self.start, self.start + self.nbytes)


class _Holder:
    """A client with views of an arena, and its entry in the file of holds."""

    def __init__(self, client: str, entry: int | None) -> None:
        self.client = client
        self.entry = entry
        """The number of the entry; None if all are in use."""
        self.since: dict[int, float] = {}
        """View -> when it was made, the oldest first."""
        self.nbytes = 0

    def describe(self) -> ReadHold:
        """Return what the file of holds says about it."""
        since = next(iter(self.since.values()), 0.0)
        return ReadHold(self.client, os.getpid(), since, self.nbytes, len(self.since))


class _PrivateMapping:
    """A private mapping of a whole arena, and the views over it."""

    def __init__(self, file: int, capacity: int) -> None:
        flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        self.memory = mmap.mmap(file, capacity, flags=flags, prot=access)
        self.address = int(np.frombuffer(self.memory, np.uint8, 1).__array_interface__["data"][0])
        self.counts: npt.NDArray[np.int32] = np.zeros(capacity // GRANULE, np.int32)
        """The views of each granule."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        """The bytes of the views, ascending; no two of them overlap."""

    def is_free(self, start: int, end: int) -> bool:
        """Whether no view has any of these bytes, and the mapping shows them as they are in the arena."""
        at = bisect_left(self._ends, start + 1)
        return (at == len(self._starts) or self._starts[at] >= end) and not self._is_written(start, end)

    def _is_written(self, start: int, end: int) -> bool:
        """Whether a page of these bytes may have been written to. That is possible only in granules that have views."""
        part = granules_of(start, end)
        counts = self.counts[part]
        if not counts.any():
            return False
        for first, last in _stretches_of(counts > 0, part.start):
            low, high = max(start, first * GRANULE), min(end, last * GRANULE)
            try:
                if _private_pages(self.address + low, self.address + high):
                    return True
            except OSError:
                return True
        return False

    def covers(self, address: int) -> bool:
        """Whether a byte at this address belongs to a view."""
        place = address - self.address
        at = bisect_left(self._ends, place + 1)
        return at < len(self._starts) and self._starts[at] <= place

    def add(self, start: int, end: int) -> None:
        """Add a view."""
        at = bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        self.counts[granules_of(start, end)] += 1

    def remove(self, start: int, end: int) -> None:
        """Remove a view, and drop pages that were written to of granules that no other view has."""
        at = bisect_left(self._starts, start)
        del self._starts[at], self._ends[at]
        part = granules_of(start, end)
        self.counts[part] -= 1
        for first, last in _stretches_of(self.counts[part] == 0, part.start):
            self._drop_written(first * GRANULE, last * GRANULE)

    def _drop_written(self, start: int, end: int) -> None:
        """Drop the private pages of these granules, so that the mapping shows the arena again."""
        try:
            written = _private_pages(self.address + start, self.address + end)
        except OSError:  # without the state of pages, all are dropped
            self.memory.madvise(mmap.MADV_DONTNEED, start, end - start)
            return
        for first, last in written:
            self.memory.madvise(mmap.MADV_DONTNEED, start + first * _PAGE, (last - first) * _PAGE)


class ArenaViews:
    """The views that this process has of one arena. There is one for each arena; `open_views` returns it."""

    def __init__(self, folder: Path, capacity: int, boot_id: str) -> None:
        self.users = 0
        """The arenas that are open and the views that exist. The last one closes this."""
        self.boot_id = boot_id
        """Identifies the arena."""
        self._capacity = capacity
        # On a mistake the file of holds is not closed again: that would drop the locks of this process in it.
        if boot_id_of(folder) != boot_id:
            raise AttachError(f"the arena in {folder} was replaced; get the values again")
        self._file = os.open(folder / "arena", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._locks = HoldLocks(folder)
        except OSError:
            os.close(self._file)
            raise
        if boot_id_of(folder) != boot_id:
            raise AttachError(f"the arena in {folder} was replaced; get the values again")
        self.mappings: list[_PrivateMapping] = []
        self._held: npt.NDArray[np.int32] = np.zeros(capacity // GRANULE, np.int32)
        """The views of each granule, in all mappings."""
        self.views: dict[int, _View] = {}
        self._next = 1
        self._holders: dict[str, _Holder] = {}
        """Client -> its entry, for the clients with views."""

    def take(self, client: str, start: int, nbytes: int) -> Bytes | None:
        """Return these bytes of the arena, and hold them until nothing refers to the result any more.

        The caller must compare the generation afterwards. Returns None if there can be no view of these bytes.
        """
        return self.take_all(client, [(start, nbytes)])[0]

    def take_all(self, client: str, parts: Sequence[tuple[int, int]]) -> list[Bytes | None]:
        """Do the same for several parts (start, bytes), each of which ends by itself."""
        with _locked():
            if not self._lock_parts(parts):
                return [None] * len(parts)
            holder = self._holder(client)
            taken: list[Bytes | None] = []
            for start, nbytes in parts:
                mapping = self._mapping_for(start, start + nbytes)
                array = None if mapping is None else self._hold(mapping, mapping.memory, holder, start, nbytes)
                taken.append(array)
            self._write_entry(holder)
            if not all(array is not None for array in taken):
                self._unlock_unheld(parts)
            return taken

    def hold_all(self, arena: Arena, client: str, parts: Sequence[tuple[int, int]]) -> list[Bytes] | None:
        """Return and hold parts of the arena itself, as `take_all` does, for copies. Nobody may write to them.

        Returns None if they cannot be held.
        """
        with _locked():
            if not self._lock_parts(parts):
                return None
            holder = self._holder(client)
            arrays = [self._hold(None, arena.memory.data, holder, start, nbytes) for start, nbytes in parts]
            self._write_entry(holder)
            return arrays

    def _lock_parts(self, parts: Sequence[tuple[int, int]]) -> bool:
        """Lock the granules of all parts, with one call for those that are neighbours. Returns whether it could."""
        if all(self._locks.lock(part.start, part.stop - part.start) for part in join_granules(parts)):
            return True
        self._unlock_unheld(parts)
        return False

    def _unlock_unheld(self, parts: Sequence[tuple[int, int]]) -> None:
        """Unlock those granules of the parts of which there is no view."""
        for start, nbytes in parts:
            part = granules_of(start, start + nbytes)
            for first, end in _stretches_of(self._held[part] == 0, part.start):
                self._locks.unlock(first, end - first)

    def _hold(self, mapping: _PrivateMapping | None, memory: Buffer, holder: _Holder, start: int, nbytes: int) -> Bytes:
        """Return locked bytes as an array whose end is noted. The caller writes the entry of the holder."""
        array: Bytes = np.frombuffer(memory, np.uint8, nbytes, start)
        number, self._next = self._next, self._next + 1
        if mapping is not None:
            mapping.add(start, start + nbytes)
        self._held[granules_of(start, start + nbytes)] += 1
        self.views[number] = _View(mapping, start, nbytes, holder)
        self.users += 1
        weakref.finalize(array, _note_ended, self, number).atexit = False
        holder.since[number] = time.time()
        holder.nbytes += nbytes
        return array

    def keep_pages(self, first: int, count: int) -> bool:
        """Keep the pages of these granules, which this process holds, until `drop_pages`. Returns whether it does."""
        with _locked():
            return self._locks.lock(REGISTERED + first, count)

    def drop_pages(self, first: int, count: int) -> None:
        """See `keep_pages`."""
        with _locked():
            self._locks.unlock(REGISTERED + first, count)

    def _mapping_for(self, start: int, end: int) -> _PrivateMapping | None:
        for mapping in self.mappings:
            if mapping.is_free(start, end):
                return mapping
        if len(self.mappings) == MAPPINGS:
            return None
        try:
            self.mappings.append(_PrivateMapping(self._file, self._capacity))
        except (OSError, ValueError):
            return None
        return self.mappings[-1]

    def end(self, number: int) -> None:
        """End a view, or for number 0 the use by an `Arena`. The caller has the lock."""
        if number:
            view = self.views.pop(number)
            if view.mapping is not None:
                view.mapping.remove(view.start, view.start + view.nbytes)
            held = self._held[view.granules]
            held -= 1
            for first, last in _stretches_of(held == 0, view.granules.start):
                self._locks.unlock(first, last - first)
            del view.holder.since[number]
            view.holder.nbytes -= view.nbytes
            self._write_entry(view.holder)
        self.users -= 1
        if not self.users:
            del _arenas[self.boot_id]
            self._locks.close()
            os.close(self._file)

    def _holder(self, client: str) -> _Holder:
        """Return the entry of a client, a new one if it has no views."""
        existing = self._holders.get(client)
        if existing is not None:
            return existing
        taken = {holder.entry for holder in self._holders.values()}
        self._holders[client] = holder = _Holder(client, self._locks.take_entry(taken))
        return holder

    def _write_entry(self, holder: _Holder) -> None:
        """Write the entry of a client, or leave it if the client has no view any more."""
        if not holder.since:
            del self._holders[holder.client]
        if holder.entry is None:
            return
        if not holder.since:
            self._locks.leave_entry(holder.entry)
            return
        self._locks.write_entry(holder.entry, holder.describe())

    def holders(self, start: int, end: int) -> list[ReadHold]:
        """Return the clients with views whose granules overlap these bytes. The caller has the lock."""
        part = granules_of(start, end)
        some = [v for v in self.views.values() if v.granules.start < part.stop and part.start < v.granules.stop]
        return [holder.describe() for holder in dict.fromkeys(v.holder for v in some)]

    def lock_in_child(self) -> None:
        """Lock in a forked child what its inherited arrays hold. The parent still has its own locks."""
        for view in self.views.values():
            self._locks.lock(view.granules.start, view.granules.stop - view.granules.start)
        for holder in self._holders.values():
            holder.entry = None
        for holder in self._holders.values():
            holder.entry = self._locks.take_entry({other.entry for other in self._holders.values()})
            self._write_entry(holder)

    def keep_all(self) -> None:
        """Never end the present views here, because a forked child may have them without locks."""
        for view in self.views.values():
            self._held[view.granules] += 1
        self.users += 1


def open_views(arena: Arena) -> ArenaViews | None:
    """Return the views of an arena, which this process has mapped; None if it cannot have any.

    They are closed when the arena is not in use any more and no view is left.
    """
    if not CAN_HOLD:
        return None
    with _locked():
        views = _arenas.get(arena.boot_id)
        if views is None:
            try:
                views = ArenaViews(arena.folder, arena.capacity, arena.boot_id)
            except (OSError, AttachError):
                return None
            _arenas[arena.boot_id] = views
        views.users += 1
    weakref.finalize(arena, _note_ended, views, 0).atexit = False
    return views


def is_viewed(address: int) -> bool:
    """Whether the byte at this address of this process belongs to a view."""
    with _locked():
        return any(mapping.covers(address) for views in _arenas.values() for mapping in views.mappings)


def holders_here(boot_id: str, offset: int, length: int) -> list[ReadHold]:
    """Return the clients of this process with views of these bytes of an arena, for simulations in one process."""
    with _locked():
        views = _arenas.get(boot_id)
        return [] if views is None else views.holders(offset, offset + length)


def granules_of(start: int, end: int) -> slice:
    """Return the numbers of the granules of these bytes."""
    return slice(start // GRANULE, -(-end // GRANULE))


def join_granules(parts: Sequence[tuple[int, int]]) -> list[slice]:
    """Return the granules of parts (start, bytes), of which there is at least one. Neighbours are joined."""
    spans = sorted((part.start, part.stop) for part in (granules_of(start, start + size) for start, size in parts))
    runs = [slice(*spans[0])]
    for low, high in spans[1:]:
        if low <= runs[-1].stop:
            runs[-1] = slice(runs[-1].start, max(runs[-1].stop, high))
        else:
            runs.append(slice(low, high))
    return runs


def _stretches_of(chosen: npt.NDArray[np.bool_], start: int) -> list[tuple[int, int]]:
    """Return the chosen numbers as (first, end) of consecutive ones; the first entry is for the number `start`."""
    if chosen.all():
        return [(start, start + len(chosen))]
    if not chosen.any():
        return []
    return [(first + start, end + start) for first, end in stretches(np.flatnonzero(chosen))]


def _private_pages(start: int, end: int) -> list[tuple[int, int]]:
    """Return (first, end) of the pages of a private mapping of a file that were written to, counted from the first one.

    Raises OSError if the kernel does not report them.
    """
    first, count = start // _PAGE, -(-end // _PAGE) - start // _PAGE
    pages: list[tuple[int, int]] = []
    file = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at in range(0, count, _PAGEMAP_PAGES):
            some = min(_PAGEMAP_PAGES, count - at)
            content = os.pread(file, some * 8, (first + at) * 8)
            if len(content) < some * 8:
                raise OSError(f"the state of {some} pages cannot be read")
            states = np.frombuffer(content, "<u8")
            pages += _stretches_of(((states & _ANY_PAGE) != 0) & ((states & _FILE_PAGE) == 0), at)
    finally:
        os.close(file)
    return pages


def _note_ended(views: ArenaViews, number: int) -> None:
    """Note that a view ended. May run in any thread at any moment, also in one that has the lock."""
    _ended.append((views, number))
    _settle()


def _settle() -> None:
    """End the views that were noted, unless another call has the lock, which then does it when it releases it."""
    while _ended and _lock.acquire(blocking=False):
        try:
            _end_noted()
        finally:
            _lock.release()


def _end_noted() -> None:
    while _ended:
        views, number = _ended.popleft()
        views.end(number)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Hold the lock, with all noted ends carried out before and after."""
    with _lock:
        _end_noted()
        yield
    _settle()


# ---------------------------------------------------------------- forks

_pipe: tuple[int, int] | None = None
"""During a fork with views: the child closes or writes to the second descriptor when it has locked them."""


def _before_fork() -> None:
    global _pipe
    _lock.acquire()
    _pipe = os.pipe() if any(views.views for views in _arenas.values()) else None


def _after_fork_in_parent() -> None:
    global _pipe
    try:
        if _pipe is not None:
            reader, writer = _pipe
            _pipe = None
            os.close(writer)
            child = select.poll()  # unlike `select.select` it accepts every descriptor
            child.register(reader, select.POLLIN)
            if not child.poll(FORK_SECONDS * 1000):
                for views in _arenas.values():
                    views.keep_all()
            os.close(reader)
    finally:
        _lock.release()
    _settle()


def _after_fork_in_child() -> None:
    global _pipe
    try:
        if _pipe is not None:
            reader, writer = _pipe
            _pipe = None
            os.close(reader)
            for views in _arenas.values():
                views.lock_in_child()
            os.close(writer)
    finally:
        _lock.release()


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of values in the store, as a get with `copy=False` returns them.

    A slice of a view is one, too. A view holds the space of its values in the store: it is free for other values when
    no tensor refers to it any more.

    Args:
        tensor: The tensor, also a nested one.

    Returns:
        True if the elements are those in the store; False if they are in memory of their own.

    Raises:
        InvalidArgumentError: `tensor` is not a tensor.

    Example:
        >>> put = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.zeros(2)})
        >>> values = client.kv_batch_get(["a", "b"], "train_0", copy=False)
        >>> tq.is_view(values["reward"]), tq.is_view(values["reward"].clone())
        (True, False)
    """
    import torch  # not for servers

    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"tensor must be a torch.Tensor, got a {type(tensor).__name__}; pass one field")
    elements = tensor.values() if tensor.is_nested else tensor
    return elements.is_cpu and elements.numel() > 0 and is_viewed(elements.data_ptr())


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
