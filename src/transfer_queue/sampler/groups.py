"""Choosing complete groups of samples from the ready ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import GROUP_SIZE, ReadyIndexes, positive


class DealsGroups:
    """The group size of a sampler that deals complete groups.

    If a sampler is made without a size, the entry `n_samples_per_prompt` of a request's sampling_config is its size.
    Without this entry, the system takes the size of the groups that the partition declares (`group_ids`, `group_size`),
    or 1 if it declares none. A sampler that is called outside a system then deals groups of 1.
    """

    n_samples_per_prompt: int
    """The number of samples in a group, unless the request has another number."""

    size_given: bool = True
    """Whether the sampler was made with a size, so that a request with another one is refused."""

    def _take_group_size(self, n_samples_per_prompt: int | None) -> None:
        self.size_given = n_samples_per_prompt is not None
        self.n_samples_per_prompt = positive(1 if n_samples_per_prompt is None else n_samples_per_prompt, GROUP_SIZE)

    def _group_size(self, config: Mapping[str, Any]) -> int:
        """Return the group size of one request. Raises InvalidArgumentError if it is not the sampler's own."""
        said = config.get(GROUP_SIZE)
        if said is None:
            return self.n_samples_per_prompt
        size = positive(said, GROUP_SIZE)
        if self.size_given and size != self.n_samples_per_prompt:
            raise InvalidArgumentError(
                f"{GROUP_SIZE} ({size}) must be equal to the sampler's, which is {self.n_samples_per_prompt}; "
                f"leave it out of the sampling_config, or make the sampler without it"
            )
        return size


def pick_groups(ready_indexes: Sequence[int], size: int, count: int) -> list[list[int]]:
    """Return the first `count` complete groups of `size`; [] if there are fewer.

    If the ready indexes know their groups, these are taken. Otherwise a group is a run of `size` consecutive indexes,
    taken greedily from the lowest.
    """
    picked: list[list[int]] = pick_rows(ready_indexes, size, count).tolist()
    return picked


def pick_rows(ready_indexes: Sequence[int], size: int, count: int) -> np.ndarray:
    """Return the same as an int64 array [count, size]; [0, size] if there are fewer."""
    none = np.zeros((0, size), "i8")
    if len(ready_indexes) < size * count:
        return none
    first = getattr(ready_indexes, "first_groups", None)  # all at once, where they can
    found = first(size, count) if first is not None else list(islice(whole_groups(ready_indexes, size), count))
    return np.array(found, "i8").reshape(-1, size) if len(found) == count else none


def whole_groups(ready_indexes: Sequence[int], size: int) -> Iterator[list[int]]:
    """Iterate over all complete groups of `size`, in order."""
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
