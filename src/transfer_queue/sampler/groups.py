"""Picking whole groups of samples out of the ready ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from transfer_queue.sampler.base import ReadyIndexes


def pick_groups(ready_indexes: Sequence[int], size: int, count: int) -> list[list[int]]:
    """The first `count` whole groups of `size`, or [] where there are fewer.

    Where the ready indexes know their groups these are taken. Else a group is a run of `size` consecutive
    indexes, taken greedily from the lowest.
    """
    if len(ready_indexes) < size * count:
        return []
    picked = list(islice(whole_groups(ready_indexes, size), count))
    return picked if len(picked) == count else []


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
