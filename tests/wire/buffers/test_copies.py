"""Copies and gathers of plain bytes, by every path."""

import mmap
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from differential import differential
from transfer_queue.wire.buffers import copies
from transfer_queue.wire.buffers.copies import address_of, allocate, copy_all, copy_bytes, gather_equal, gather_pieces

SHARED = {"PARALLEL": 0, "PER_THREAD": 1, "MIN_PART": 1}
"""Limits with which threads share any copy."""
MEMORY = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)


def naive(memory, starts, lengths):
    pieces = [memory[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return np.concatenate([*pieces, np.empty(0, np.uint8)])


@st.composite
def pieces(draw):
    cell = draw(st.sampled_from([1, 2, 4, 8, 64, 12]))
    count = draw(st.integers(1, 60))
    lengths = st.just(draw(st.integers(0, 9))) if draw(st.booleans()) else st.integers(0, 9)
    base = draw(st.integers(0, 100))
    places = [(base + cell * draw(st.integers(0, 400)), cell * draw(lengths)) for _ in range(count)]
    return np.array([place[0] for place in places]), np.array([place[1] for place in places])


@pytest.mark.parametrize("settings_of_paths", [
    {}, {"CELLS_PER_ROW": 0}, {"CELLS_PER_ROW": 10**9}, {"RUN": 0}, {"CELLS_PER_ROW": 0, "HUGE": 0},
    {"CELLS_PER_ROW": 10**9, **SHARED, "_most": 2}, {"RUN": 0, **SHARED, "_most": 8, "HUGE": 0},
], ids=str)  # fmt: skip
@given(pieces())
@settings(max_examples=60, deadline=None)
def test_gather(settings_of_paths, places):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings_of_paths.items():
            patch.setattr(copies, name, value)
        found = gather_pieces(MEMORY, *places)
    assert found.tolist() == naive(MEMORY, *places).tolist()
    assert found.flags.writeable
    assert not np.shares_memory(found, MEMORY)


def coinciding_pieces(seed):
    """Pieces of 0, 1 and 2 cells at few places, some of them after each other, some again, some out of line."""
    random = np.random.default_rng(seed)
    cell, count = random.choice([1, 1, 2, 3, 4, 8, 16, 64]), random.integers(1, 40)
    counts = np.full(count, random.integers(0, 3)) if random.random() < 0.1 else random.integers(0, 3, count)
    if random.random() < 0.3:  # as many cells as pieces, though not each has one
        longer = random.integers(0, 2, count // 2)
        counts = random.permutation([*(1 + longer), *(1 - longer), *[1] * (count % 2)])
    if random.random() < 0.2:
        counts[[0, -1]] = 0
    starts = random.integers(0, 12, count) * cell
    if random.random() < 0.2:
        starts += random.integers(0, 2, count)
    for at in np.flatnonzero(random.random(count) < random.choice([0, 0.3, 0.8])):
        starts[at] = starts[at - 1] + cell * counts[at - 1] if at else starts[at]
    return starts, cell * counts


@given(st.integers(0, 2**63), st.sampled_from([{}, {}, {"CELLS_PER_ROW": 10**9}, {"CELLS_PER_ROW": 0, "HUGE": 0}]))
@differential(300)
def test_gather_of_pieces_of_few_lengths(seed, limits):
    starts, lengths = coinciding_pieces(seed)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(copies, name, value)
        found = gather_pieces(MEMORY, starts, lengths)
    assert found.tobytes() == naive(MEMORY, starts, lengths).tobytes(), (starts.tolist(), lengths.tolist())


def test_gather_of_pieces_whose_mean_length_is_the_first_ones():
    """Pieces of 1, 2 and 0 cells have the same sum as pieces of one cell each, but must not be copied as these."""
    lengths = np.array([1, 1, 2, 0, 1, 2, 0, 2, 0] * 3)
    starts = np.array([95, 95, 188, 7, 95, 188, 0, 188, 3] * 3)
    assert gather_pieces(MEMORY, starts, lengths).tolist() == naive(MEMORY, starts, lengths).tolist()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (4 << 20) - 1, 4 << 20, (9 << 20) + 5])
def test_allocate(nbytes):
    memory = allocate(nbytes)
    assert (memory.nbytes, memory.flags.writeable, memory.flags.c_contiguous) == (nbytes, True, True)
    memory[:] = 3
    assert bool((memory == 3).all())


@pytest.fixture
def kept(monkeypatch):
    """The kept mappings, none at first."""
    mappings = []
    monkeypatch.setattr(copies, "_kept", mappings)
    return mappings


@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="this system cannot keep what it gave back")
@pytest.mark.parametrize("view_of", [lambda a: a, lambda a: a[5:10], lambda a: torch.from_numpy(a)[7:].view(3, -1)],
                         ids=["whole", "array", "tensor"])  # fmt: skip
def test_memory_is_used_again_once_nobody_views_it(kept, view_of):
    size = copies.HUGE + 1  # three times a whole number after 7
    view = view_of(allocate(size - (size - 7) % 3))
    view[:] = 1
    other = allocate(size)
    other[:] = 2
    assert kept == []
    assert bool((view == 1).all())
    address = other.ctypes.data
    del other
    assert len(kept) == 1
    again = allocate(size)
    assert (again.ctypes.data, kept) == (address, [])
    again[:] = 3
    assert bool((view == 1).all())
    del view
    assert len(kept) == 1


@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="this system cannot keep what it gave back")
def test_little_is_kept(kept, monkeypatch):
    """No more than KEPT, the oldest go first; and what is much larger than wanted is not taken."""
    monkeypatch.setattr(copies, "KEPT", 30 << 20)
    sizes = [8 << 20, 12 << 20, 40 << 20, 14 << 20]
    memories = [allocate(size) for size in sizes]
    while memories:
        del memories[0]
        assert sum(map(len, kept)) <= 30 << 20
    assert [len(pages) >> 20 for pages in kept] == [14, 16]
    assert allocate(5 << 20).nbytes == 5 << 20  # given back at once, which drops the oldest
    assert [len(pages) >> 20 for pages in kept] == [16, 8]


def test_large_copies():
    source = np.random.default_rng(0).integers(0, 256, 17 << 20, dtype=np.uint8)
    destination = allocate(len(source))
    copy_bytes(destination, source)
    assert np.array_equal(destination, source)
    starts = np.array([9 << 20, 0, 5])
    lengths = np.array([8 << 20, 9 << 20, 1000])
    assert np.array_equal(gather_pieces(source, starts, lengths), naive(source, starts, lengths))


@given(st.lists(st.integers(0, 3 << 20), max_size=5), st.sampled_from([2, 4, 8]))
@settings(max_examples=30, deadline=None)
def test_many_copies_are_one(sizes, threads):
    data = np.arange(3 << 20, dtype=np.uint32).view(np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_most", threads)
        patch.setattr(copies, "PARALLEL", 1 << 20)
        patch.setattr(copies, "PER_THREAD", 1 << 18)
        patch.setattr(copies, "MIN_PART", 1 << 18)
        pairs = [(np.zeros(size, np.uint8), data[i * 64 : i * 64 + size]) for i, size in enumerate(sizes)]
        copy_all(pairs)
    for destination, source in pairs:
        assert np.array_equal(destination, source)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork():
    """A child copies, though its parent used the same paths before."""
    from transfer_queue.wire.buffers.tensors import copy_elements

    source = np.ones(9 << 20, np.uint8)
    matrix = torch.ones(2048, 2048)
    matrix.clone()  # the parent's torch has its threads now

    def everything():
        copy_bytes(allocate(len(source)), source)
        gather_pieces(source, np.arange(9000) * 1000, np.full(9000, 999))
        copy_elements(allocate(matrix.nbytes), matrix.t())

    everything()
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(30)  # ends a child that hangs
        everything()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "array", [MEMORY, MEMORY[100:200], MEMORY[::3], MEMORY[:0], np.frombuffer(b"read-only", np.uint8)],
    ids=["whole", "part", "strided", "empty", "read-only"],
)  # fmt: skip
def test_the_address_of_any_array_is_that_of_its_first_byte(array):
    assert address_of(array) == array.ctypes.data


@given(st.lists(st.integers(0, 200), min_size=1, max_size=12), st.integers(1, 300), st.sampled_from([1, 2, 8, 64]))
@differential(100)
def test_pieces_of_one_length_are_those_of_the_general_copy(places, length, step):
    memory = np.random.default_rng(1).integers(0, 255, 200 * step + length, np.uint8)
    starts = np.array(places, np.int64) * step
    general = gather_pieces(memory, starts, np.full(len(starts), length))
    assert gather_equal(memory, starts, length).tolist() == general.tolist()
