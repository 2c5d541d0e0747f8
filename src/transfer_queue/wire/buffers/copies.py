"""Moving bytes: destinations that are quick to touch, large copies in two threads, gathers of scattered pieces.

numpy copies and takes release the GIL, so two plain threads double the rate of a large copy. OpenMP (torch's own
threads) is left alone on purpose: after a fork, a parallel torch operation in the child waits for ever for
threads that the parent had. Knows nothing of blocks, fields or torch.
"""

from __future__ import annotations

import _thread
import bisect
import contextlib
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
I8 = NDArray[np.int64]
Copies = list[tuple[U8, U8]]  # (destination, source) of each

HUGE = 4 << 20  # destinations from here on come from huge pages
PARALLEL = 8 << 20  # copies from here on are shared by two threads
LEAST_PART = 1 << 20  # what one of them takes at a time, at least
HUGE_PAGE = 2 << 20
KEPT = 1 << 30  # bytes of given back memory that are kept warm, at most
LARGEST = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE  # bytes of memory that this machine has
LARGEST_CELL = 4096
RUN = 32 << 10  # runs of at least this length on average are copied one by one
CELLS_PER_ROW = 24  # above, copying row by row is quicker than by cells

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allocate(nbytes: int) -> U8:
    """Writable memory of this length, its content undefined; given back with the last view of it.

    Large memory comes from whole aligned huge pages, used again once they are given back: touching fresh pages
    costs more than the copy into them, four times as much where they are small. The kernel may take back what
    is kept (MADV_FREE), of which there is KEPT at most.
    """
    if nbytes > LARGEST:
        raise MemoryError(f"no memory for {nbytes} bytes: this machine has {LARGEST}")
    if nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
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
        raise MemoryError(f"no memory for {length} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, and as right
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


# Mappings that nobody views any more, the oldest first. Without a lock, since a finalizer may run anywhere, within
# a section that holds it too: each step on the list is atomic, and a race costs a fresh mapping at most.
_kept: list[mmap.mmap] = []


def _kept_pages(length: int) -> mmap.mmap | None:
    """A kept mapping of at least this length, but not of much more."""
    for pages in list(_kept):
        if length <= len(pages) <= length + length // 4:
            try:
                _kept.remove(pages)
            except ValueError:  # another thread was quicker
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


def in_turns(count: int, nbytes: int, work: Callable[[int, int], None]) -> None:
    """work(0, count), or, where nbytes are many, in parts that two threads take in turn.

    Parts get smaller towards the end, and nobody waits for a part that was not begun: where no core is free for the
    second thread, it costs nothing.
    """
    if nbytes < PARALLEL or _CORES < 2 or count < 2:
        work(0, count)
        return
    bounds = _bounds(count, nbytes)
    turns = iter(range(len(bounds) - 1))  # taking the next is one step of the interpreter
    busy = threading.Lock()
    failures: list[BaseException] = []
    todo = [work]  # which a thread that runs at last, when all is done, must not keep alive

    def other() -> None:
        while not failures:
            with busy:
                turn = next(turns, None)
                if turn is None:
                    return
                try:
                    todo[0](bounds[turn], bounds[turn + 1])
                except BaseException as error:  # raised again below, in the caller's thread
                    failures.append(error)

    with contextlib.suppress(RuntimeError):  # no thread is to be had, or the interpreter is shutting down
        _thread.start_new_thread(other, ())  # a Thread would wait until it runs
    try:
        for turn in turns:
            work(bounds[turn], bounds[turn + 1])
    finally:
        for _ in turns:  # where this thread was interrupted
            pass
        with busy:
            todo.clear()
    if failures:
        raise failures[0]


def _bounds(count: int, nbytes: int) -> list[int]:
    """Where parts of nbytes in count steps begin and end: a quarter of what is left each, and LEAST_PART at least."""
    bounds, least = [0], max(1, LEAST_PART * count // nbytes)
    while bounds[-1] < count:
        bounds.append(min(count, bounds[-1] + max(least, (count - bounds[-1]) // 4)))
    return bounds


def copy_bytes(destination: U8, source: U8) -> None:
    """destination[:] = source, both contiguous and of equal length."""
    copy_all([(destination, source)])


def copy_all(copies: Copies) -> None:
    """destination[:] = source of each (destination, source), contiguous and of equal length: all as one copy."""
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

    in_turns(ends[-1], ends[-1], work)


def gather_pieces(memory: U8, starts: I8, lengths: I8, later: Copies | None = None) -> U8:
    """The pieces memory[starts[i] : starts[i] + lengths[i]] one after the other, in fresh memory.

    later: where a large copy may be noted, for a `copy_all` of the caller's, instead of being made.
    The caller has checked that the pieces lie within the memory.
    """
    if len(starts) == 1:
        return copied(memory, int(starts[0]), int(lengths[0]), later)
    total = int(lengths.sum())
    if total == 0:
        return np.empty(0, np.uint8)
    runs, run_lengths = joined_runs(starts, lengths)
    if len(runs) == 1:
        return copied(memory, int(runs[0]), total, later)
    if len(runs) * RUN <= total or len(runs) <= 8:
        return _gather_runs(memory, runs, run_lengths, total)
    base, cell = _cells(starts, lengths)
    if total // cell <= CELLS_PER_ROW * len(runs):
        return _gather_cells(memory[base:], starts - base, lengths, total, cell)
    if total < HUGE:
        view = memory.data
        ends = (runs + run_lengths).tolist()
        joined = bytearray().join([view[start:end] for start, end in zip(runs.tolist(), ends, strict=True)])
        return np.frombuffer(joined, np.uint8)
    return _gather_runs(memory, runs, run_lengths, total)


def copied(memory: U8, start: int, length: int, later: Copies | None = None) -> U8:
    """memory[start : start + length] in fresh memory; later: see `gather_pieces`."""
    destination = allocate(length)
    copies = [(destination, memory[start : start + length])]
    if later is not None and length >= LEAST_PART:
        later += copies
    else:
        copy_all(copies)
    return destination


def joined_runs(starts: I8, lengths: I8) -> tuple[I8, I8]:
    """Pieces with neighbours in memory that follow each other are one run."""
    first = np.empty(len(starts), np.bool_)
    first[0] = True
    np.not_equal(starts[1:], starts[:-1] + lengths[:-1], out=first[1:])
    positions = np.flatnonzero(first)
    if len(positions) == len(starts):
        return starts, lengths
    return starts[positions], np.add.reduceat(lengths, positions)


def _gather_runs(memory: U8, starts: I8, lengths: I8, total: int) -> U8:
    destination = allocate(total)
    places = (np.cumsum(lengths) - lengths).tolist()
    runs = list(zip(places, starts.tolist(), lengths.tolist(), strict=True))
    if total >= PARALLEL:
        # numpy's assignment releases the GIL; that of a memoryview below is quicker for short runs, but holds it
        def work(start: int, stop: int) -> None:
            for place, origin, length in runs[start:stop]:
                destination[place : place + length] = memory[origin : origin + length]

        if len(runs) >= 16:
            in_turns(len(runs), total, work)
        else:
            for place, origin, length in runs:
                copy_bytes(destination[place : place + length], memory[origin : origin + length])
        return destination
    into, out_of = destination.data, memory.data
    for place, origin, length in runs:
        into[place : place + length] = out_of[origin : origin + length]
    return destination


def _cells(starts: I8, lengths: I8) -> tuple[int, int]:
    """A base and the largest cell size such that all pieces are whole cells counted from the base."""
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


def _gather_cells(memory: U8, starts: I8, lengths: I8, total: int, cell: int) -> U8:
    if (lengths == cell).all():  # do not compare sums: lengths 1, 2 and 0 have the same sum as three equal ones
        index = starts // cell
    else:
        counts = lengths // cell
        ends = np.cumsum(counts)
        index = np.repeat(starts // cell - (ends - counts), counts)
        index += np.arange(total // cell)
    kind = np.dtype((np.void, cell))
    cells = memory[: len(memory) // cell * cell].view(kind)
    destination = allocate(total)
    into = destination.view(kind)

    def work(start: int, stop: int) -> None:
        # mode "clip" writes straight into `out`; "raise" would go through a buffer
        np.take(cells, index[start:stop], out=into[start:stop], mode="clip")

    in_turns(len(index), total, work)
    return destination
