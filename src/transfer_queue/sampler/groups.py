"""Picking whole groups of samples out of the ready ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from transfer_queue.sampler.base import ReadyIndexes


def pick_groups(ready_indexes: Sequence[int], size: int, count: int) -> list[list[int]]:
    """The first `count` whole groups of `size`, or [] where there are fewer.

    Where the ready indexes know their groups these are taken. Else a group is a run of `size` consecutive
    indexes, taken greedily from the lowest.
    """
    picked: list[list[int]] = pick_rows(ready_indexes, size, count).tolist()
    return picked


def pick_rows(ready_indexes: Sequence[int], size: int, count: int) -> np.ndarray:
    """The same as i8 [count, size]; [0, size] where there are fewer."""
    none = np.zeros((0, size), "i8")
    if len(ready_indexes) < size * count:
        return none
    first = getattr(ready_indexes, "first_groups", None)  # all at once, where they can
    found = first(size, count) if first is not None else list(islice(whole_groups(ready_indexes, size), count))
    return np.array(found, "i8").reshape(-1, size) if len(found) == count else none


def whole_groups(ready_indexes: Sequence[int], size: int) -> Iterator[list[int]]:
    """All whole groups of `size`, the first ones first, found one by one."""
    if isinstance(ready_indexes, ReadyIndexes):
        return ready_indexes.whole_groups(size)
    return _runs(sorted(map(int, ready_indexes)), size)


def _runs(ascending: list[int], size: int) -> Iterator[list[int]]:
    run: list[int] = []
    for index in ascending:
        if run and index != run[-1] + 1:
            run = []
        run.append(index)
        if len(run) == size:
            yield run
            run = []
