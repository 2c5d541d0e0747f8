"""Memory that is registered with a driver: copies are divided where ranges begin and end."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.wire.blocks.device_memory import (
    add_range,
    device_to_host,
    host_to_device,
    pieces,
    remove_range,
)
from transfer_queue.wire.buffers.copies import address_of

SIZE = 64
cuts = st.lists(st.integers(0, SIZE), max_size=8, unique=True).map(sorted)


@given(cuts, st.integers(0, SIZE), st.integers(0, SIZE), st.randoms())
@differential(100)
def test_pieces_meet_at_most_one_range(edges: list[int], start: int, end: int, order: object) -> None:
    """Of the ranges between the edges every second is registered, or two neighbours are."""
    memory = np.arange(SIZE, dtype=np.uint8)
    address, (start, end) = address_of(memory), sorted((start, end))
    ranges = [(low, high) for number, (low, high) in enumerate(pairwise(edges)) if number % 3 != 2]
    order.shuffle(ranges)  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        for low, high in ranges:
            add_range(address + low, high - low)
            stack.callback(remove_range, address + low)
        part = memory[start:end]
        if len(part):
            found = pieces(address + start, len(part))
            assert [at for piece in found for at in range(piece.start, piece.stop)] == list(range(len(part)))
            for piece in found:
                met = [
                    range_ for range_ in ranges if range_[0] < start + piece.stop and start + piece.start < range_[1]
                ]
                assert len(met) <= 1
                assert all(low <= start + piece.start and start + piece.stop <= high for low, high in met)
        there = torch.zeros(len(part), dtype=torch.uint8)
        host_to_device(there, part)
        assert there.tolist() == part.tolist()
        device_to_host(part, there + 1)
    assert memory.tolist() == [at + 1 if start <= at < end else at for at in range(SIZE)]
    assert pieces(address, SIZE) == [slice(0, SIZE)], "nothing is left registered"
