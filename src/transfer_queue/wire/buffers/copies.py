"""Copies bytes: into memory that is fast to write, in several threads if they are many, and from scattered pieces.

This module does not depend on blocks, fields or torch.
"""

from __future__ import annotations

import _thread
import bisect
import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# ---------------------------------------------------------------- threads
# numpy releases the GIL in copies and takes, so plain threads multiply the rate of a large copy. torch's own threads
# (OpenMP) are not used: after a fork, a parallel torch operation in the child would wait forever for threads that only
# the parent has. A process that makes no large copy starts no thread, and an idle one has none.


PARALLEL = 8 << 20
"""Bytes from which threads share a copy."""
PER_THREAD = 4 << 20
"""The least number of bytes for each thread."""
MIN_PART = 1 << 20
"""The least number of bytes that a thread copies at a time."""

_most = min(2, len(os.sched_getaffinity(0)))


def set_copy_threads(most: int) -> None:
    """Use at most this number of threads for a copy, with that of the caller, in the whole process."""
    global _most
    _most = most


def run_in_parts(count: int, nbytes: int, work: Callable[[int, int], None]) -> None:
    """Call work(0, count), or if `nbytes` are many, call it for parts that several threads take in turn.

    Parts get smaller towards the end, and the caller waits only for parts that other threads have begun. So a thread
    costs nothing if no core is free for it.
    """
    threads = min(_most, nbytes // PER_THREAD, count)
    if nbytes < PARALLEL or threads < 2:
        work(0, count)
        return
    bounds = _bounds(count, nbytes, threads)
    turns = iter(range(len(bounds) - 1))  # `next` is atomic in the interpreter
    failures: list[BaseException] = []
    todo = [work]  # so that a thread that starts late, when all is done, does not keep `work` alive

    def other(busy: threading.Lock) -> None:
        while not failures:
            with busy:
                turn = next(turns, None)
                if turn is None:
                    return
                try:
                    todo[0](bounds[turn], bounds[turn + 1])
                except BaseException as error:  # raised again below, in the caller's thread
                    failures.append(error)

    locks = [threading.Lock() for _ in range(threads - 1)]
    with contextlib.suppress(RuntimeError):  # no thread can be started, or the interpreter is shutting down
        for busy in locks:
            _thread.start_new_thread(other, (busy,))  # `threading.Thread.start` would wait until the thread runs
    try:
        for turn in turns:
            work(bounds[turn], bounds[turn + 1])
    finally:
        for _ in turns:  # if this thread was interrupted
            pass
        for busy in locks:
            with busy:
                pass
        todo.clear()
    if failures:
        raise failures[0]


def _bounds(count: int, nbytes: int, threads: int) -> list[int]:
    """Return the bounds of the parts of `nbytes` in `count` steps.

    Each part is the rest divided by twice the number of threads, and at least MIN_PART.
    """
    bounds, least = [0], max(1, MIN_PART * count // nbytes)
    while bounds[-1] < count:
        bounds.append(min(count, bounds[-1] + max(least, (count - bounds[-1]) // (2 * threads))))
    return bounds


# ---------------------------------------------------------------- copies

U8 = NDArray[np.uint8]
I8 = NDArray[np.int64]
Copies = list[tuple[U8, U8]]  # (destination, source) of each

HUGE = 4 << 20
"""Bytes from which memory is allocated in huge pages."""
HUGE_PAGE = 2 << 20
KEPT = 1 << 30
"""The largest number of bytes of freed memory that is kept for later allocations."""
LARGEST = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
"""The bytes of memory of this machine."""
LARGEST_CELL = 4096
RUN = 32 << 10
"""The mean length from which runs are copied one at a time."""
CELLS_PER_ROW = 24
"""The number of cells per row above which copying row by row is faster than by cells."""


def allocate(nbytes: int) -> U8:
    """Return writable memory of this length with undefined content. It is freed with the last view of it.

    Large memory consists of aligned huge pages, which are used again when they are freed: the first write to new pages
    costs more than the copy, four times as much with small pages. The kernel may take back kept pages (MADV_FREE), of
    which there are at most KEPT bytes.
    """
    if nbytes > LARGEST:
        raise MemoryError(f"cannot allocate {nbytes} bytes: this machine has {LARGEST}")
    if nbytes < HUGE:
        return np.empty(nbytes, np.uint8)
    length = (nbytes + 2 * HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
    pages = _kept_pages(length) or _fresh_pages(length)
    whole: U8 = np.frombuffer(pages, np.uint8)
    weakref.finalize(whole, _keep_pages, pages).atexit = False
    skip = -int(whole.__array_interface__["data"][0]) % HUGE_PAGE
    return whole[skip : skip + nbytes] if skip + nbytes <= len(whole) else whole[:nbytes]


def _fresh_pages(length: int) -> mmap.mmap:
    try:
        pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {length} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages is slower, but works
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


# Mappings without views, the oldest first. There is no lock, because a finalizer may run anywhere, also in a thread
# that already has the lock. Each operation on the list is atomic, and a race costs at most a new mapping.
_kept: list[mmap.mmap] = []


def _kept_pages(length: int) -> mmap.mmap | None:
    """Return a kept mapping of at least this length and at most a quarter more; None if there is none."""
    for pages in list(_kept):
        if length <= len(pages) <= length + length // 4:
            try:
                _kept.remove(pages)
            except ValueError:  # another thread has taken it
                continue
            return pages
    return None


def _keep_pages(pages: mmap.mmap) -> None:
    if len(pages) > KEPT or not hasattr(mmap, "MADV_FREE"):
        return
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_FREE)
    _kept.append(pages)
    while sum(map(len, list(_kept))) > KEPT:
        with contextlib.suppress(IndexError):
            _kept.pop(0)


def address_of(memory: U8) -> int:
    """Return the address of the first byte of an array."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory.data))  # a fifth of the time of `memory.ctypes.data`
    except (TypeError, ValueError):  # the array is read-only, not contiguous or empty
        return int(memory.ctypes.data)


def copy_bytes(destination: U8, source: U8) -> None:
    """Copy `source` to `destination`, both contiguous and of equal length."""
    copy_all([(destination, source)])


def copy_all(copies: Copies) -> None:
    """Copy each (destination, source), contiguous and of equal length, all as one copy."""
    ends = list(itertools.accumulate(len(source) for _, source in copies))
    if not ends or ends[-1] < PARALLEL:
        for destination, source in copies:
            destination[:] = source
        return

    def work(start: int, stop: int) -> None:
        at = bisect.bisect_right(ends, start)
        while start < stop:
            destination, source = copies[at]
            begin = ends[at] - len(source)
            end = min(stop, ends[at])
            destination[start - begin : end - begin] = source[start - begin : end - begin]
            start, at = end, at + 1

    run_in_parts(ends[-1], ends[-1], work)


def gather_pieces(memory: U8, starts: I8, lengths: I8, later: Copies | None = None, into: U8 | None = None) -> U8:
    """Return the pieces memory[starts[i] : starts[i] + lengths[i]] one after the other.

    The caller has checked that the pieces are inside the memory.

    Args:
        memory: The memory.
        starts: The start of each piece.
        lengths: The length of each piece in bytes.
        later: A large copy may be added to it for a `copy_all` by the caller. Default: None, all copies are made.
        into: The memory to fill, of the total length. Default: None, new memory.
    """
    if len(starts) == 1:
        return copy_range(memory, int(starts[0]), int(lengths[0]), later, into)
    total = int(lengths.sum())
    if total == 0:
        return np.empty(0, np.uint8)
    runs, run_lengths = join_runs(starts, lengths)
    if len(runs) == 1:
        return copy_range(memory, int(runs[0]), total, later, into)
    if len(runs) * RUN <= total or len(runs) <= 8:
        return _gather_runs(memory, runs, run_lengths, total, into)
    base, cell = _cells(starts, lengths)
    if total // cell <= CELLS_PER_ROW * len(runs):
        return _gather_cells(memory[base:], starts - base, lengths, total, cell, into)
    if total < HUGE and into is None:
        view = memory.data
        ends = (runs + run_lengths).tolist()
        joined = bytearray().join([view[start:end] for start, end in zip(runs.tolist(), ends, strict=True)])
        return np.frombuffer(joined, np.uint8)
    return _gather_runs(memory, runs, run_lengths, total, into)


def gather_equal(memory: U8, starts: I8, length: int) -> U8:
    """Do the same as `gather_pieces` for pieces of one length, which is not 0. The caller has checked them, too."""
    bits = int(np.bitwise_or.reduce(starts)) | length
    cell = min(bits & -bits, LARGEST_CELL)
    cells = length // cell
    if len(starts) * length >= HUGE or cells > CELLS_PER_ROW:
        return gather_pieces(memory, starts, np.full(len(starts), length))
    index = starts // cell
    if cells > 1:
        index = (index[:, None] + np.arange(cells)).reshape(-1)
    whole = memory[: len(memory) // cell * cell].view(_cell_kind(cell))
    taken: U8 = whole.take(index).view(np.uint8)
    return taken


@functools.lru_cache(maxsize=16)
def _cell_kind(cell: int) -> np.dtype[np.void]:
    return np.dtype((np.void, cell))


def copy_range(memory: U8, start: int, length: int, later: Copies | None = None, into: U8 | None = None) -> U8:
    """Return a copy of memory[start : start + length]. For `later` and `into` see `gather_pieces`."""
    destination = allocate(length) if into is None else into
    copies = [(destination, memory[start : start + length])]
    if later is not None and length >= MIN_PART:
        later += copies
    else:
        copy_all(copies)
    return destination


def join_runs(starts: I8, lengths: I8) -> tuple[I8, I8]:
    """Join consecutive pieces that are neighbours in memory into runs."""
    first = np.empty(len(starts), np.bool_)
    first[0] = True
    np.not_equal(starts[1:], starts[:-1] + lengths[:-1], out=first[1:])
    positions = np.flatnonzero(first)
    if len(positions) == len(starts):
        return starts, lengths
    return starts[positions], np.add.reduceat(lengths, positions)


def _gather_runs(memory: U8, starts: I8, lengths: I8, total: int, into: U8 | None) -> U8:
    destination = allocate(total) if into is None else into
    places = (np.cumsum(lengths) - lengths).tolist()
    runs = list(zip(places, starts.tolist(), lengths.tolist(), strict=True))
    if total >= PARALLEL:
        # numpy's assignment releases the GIL; that of a memoryview (below) is faster for short runs, but keeps it
        def work(start: int, stop: int) -> None:
            for place, origin, length in runs[start:stop]:
                destination[place : place + length] = memory[origin : origin + length]

        if len(runs) >= 16:
            run_in_parts(len(runs), total, work)
        else:
            for place, origin, length in runs:
                copy_bytes(destination[place : place + length], memory[origin : origin + length])
        return destination
    written, out_of = destination.data, memory.data
    for place, origin, length in runs:
        written[place : place + length] = out_of[origin : origin + length]
    return destination


def _cells(starts: I8, lengths: I8) -> tuple[int, int]:
    """Return a base and the largest cell size such that all pieces consist of complete cells counted from the base."""
    base = int(starts.min())
    relative = starts - base
    length = int(lengths[0])
    if (lengths == length).all():
        if not (relative % length).any():
            return base, length
        bits = int(np.bitwise_or.reduce(relative)) | length
    else:
        bits = int(np.bitwise_or.reduce(relative)) | int(np.bitwise_or.reduce(lengths))
    return base, min(bits & -bits, LARGEST_CELL)


def _gather_cells(memory: U8, starts: I8, lengths: I8, total: int, cell: int, into: U8 | None) -> U8:
    if (lengths == cell).all():  # comparing the sums would be wrong: 1, 2 and 0 have the same sum as three ones
        index = starts // cell
    else:
        counts = lengths // cell
        ends = np.cumsum(counts)
        index = np.repeat(starts // cell - (ends - counts), counts)
        index += np.arange(total // cell)
    kind = np.dtype((np.void, cell))
    cells = memory[: len(memory) // cell * cell].view(kind)
    destination = allocate(total) if into is None else into
    taken = destination.view(kind)

    def work(start: int, stop: int) -> None:
        # mode "clip" writes directly into `out`; "raise" would use a buffer
        np.take(cells, index[start:stop], out=taken[start:stop], mode="clip")

    run_in_parts(len(index), total, work)
    return destination
