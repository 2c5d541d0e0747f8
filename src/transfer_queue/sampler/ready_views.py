"""Views of ready rows for samplers inside other samplers: in another order, or without some rows.

All of them read tags through one protocol, `TaggedIndexes`. The controller's ready rows keep tags in columns, so they
need not read every row. `ListedRows` implements the protocol for any list, with a partition's `get_custom_meta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, filterfalse, islice
from typing import Any, NamedTuple, Protocol, cast, overload, runtime_checkable

import numpy as np

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import GROUP_SIZE, ReadyIndexes, check_batch_size, validated_positive
from transfer_queue.sampler.numeric_tags import Floats, TagColumns, numbers


class RankKey(NamedTuple):
    """An order of rows, the highest first: `sign * tag - aging * global_index`. Equal rows keep their order."""

    tag: str
    sign: float = 1.0
    missing: float = 0.0
    """Replaces `sign * tag` for a row without the tag."""
    aging: float = 0.0

    def keys_of(self, values: Floats, indexes: np.ndarray) -> Floats:
        """Return the keys of rows with these values of the tag (NaN: missing) and global indexes."""
        keys = values if self.sign == 1.0 else self.sign * values
        missing = np.isnan(values)
        if missing.any():
            keys = np.where(missing, self.missing, keys)
        return keys - self.aging * indexes if self.aging else keys


@runtime_checkable
class TaggedIndexes(ReadyIndexes, Protocol):
    """Ready rows that can be ordered and picked by a tag.

    The methods raise InvalidArgumentError if a tag is not a number.
    """

    def ranked(self, key: RankKey) -> Iterator[int]:
        """Iterate over the rows, the highest key first."""
        ...

    def ranked_groups(self, key: RankKey, size: int) -> Iterator[list[int]]:
        """Iterate over the complete groups of `size`, that with the highest member first; members ascending."""
        ...

    def above(self, key: RankKey, bound: float) -> list[int]:
        """Return the rows whose key is above the bound, ascending."""
        ...

    def spoiled(self, key: RankKey, bound: float, size: int) -> list[int]:
        """Return the rows of all groups of `size` with a ready member above the bound, ascending.

        This includes members that are not ready yet. A row without a group counts as a group of its own.
        """
        ...

    def orphans(self, size: int) -> list[int]:
        """Return the ready rows of groups of `size` of which other members were cleared or consumed by the task."""
        ...


class _Rows(Sequence[int]):
    """Rows that are read lazily: a slice from the start costs only the rows in it."""

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            return list(self)[at] if step < 0 else list(islice(self, start, max(start, stop), step))
        place = at + len(self) if at < 0 else at
        if not 0 <= place < len(self):
            raise IndexError(f"ready row {at} of {len(self)}")
        return next(islice(self, place, None))


class ListedRows(_Rows):
    """Ready rows in any sequence, with the tags of a partition. Groups are those of `whole_groups`."""

    def __init__(self, ready_indexes: Sequence[int], partition: TagColumns | None) -> None:
        self._ready = ready_indexes
        self._partition = partition

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ready)

    def whole_groups(self, size: int) -> Iterator[list[int]]:
        """See `ReadyIndexes`."""
        return whole_groups(self._ready, size)

    def ranked(self, key: RankKey) -> Iterator[int]:
        """See `TaggedIndexes`."""
        rows = list(self._ready)
        return (rows[place] for place in np.argsort(-self._keys(rows, key), kind="stable").tolist())

    def ranked_groups(self, key: RankKey, size: int) -> Iterator[list[int]]:
        """See `TaggedIndexes`."""
        groups = list(self.whole_groups(size))
        highest = self._keys(list(chain.from_iterable(groups)), key).reshape(-1, size).max(axis=1, initial=-np.inf)
        return (groups[place] for place in np.argsort(-highest, kind="stable").tolist())

    def above(self, key: RankKey, bound: float) -> list[int]:
        """See `TaggedIndexes`."""
        rows = sorted(self._ready)
        return [rows[place] for place in np.flatnonzero(self._keys(rows, key) > bound).tolist()]

    def spoiled(self, key: RankKey, bound: float, size: int) -> list[int]:
        """See `TaggedIndexes`. Only complete groups are known here."""
        rows = set(self.above(key, bound))
        for group in self.whole_groups(size):
            if not rows.isdisjoint(group):
                rows.update(group)
        return sorted(rows)

    def orphans(self, size: int) -> list[int]:
        """Return [], because only complete groups are known here."""
        return []

    def _keys(self, rows: list[int], key: RankKey) -> Floats:
        return key.keys_of(numbers(rows, key.tag, self._partition), np.array(rows, "i8"))


def as_tagged(ready_indexes: Sequence[int], partition: TagColumns | None) -> TaggedIndexes:
    """Return ready rows by whose tags one can order and pick."""
    if _has_methods(type(ready_indexes), TaggedIndexes):
        return cast("TaggedIndexes", ready_indexes)
    return ListedRows(ready_indexes, partition)


@cache
def _has_methods(kind: type, protocol: type) -> bool:
    """Return whether a class has the methods of a protocol; kept, because Python 3.11 needs 20 us to find it out."""
    return issubclass(kind, protocol)


class ShownRows(_Rows):
    """Ready rows in another order, or without some of them.

    Args:
        base: The ready rows.
        key: The order. Default: that of `base`.
        without: The rows that are left out, with all rows of their groups. Default: none.
    """

    def __init__(self, base: TaggedIndexes, key: RankKey | None = None, without: Sequence[int] = ()) -> None:
        self._base = base
        self._key = key
        self._without = frozenset(without)
        self._left_out = sum(1 for row in base if row in self._without) if without else 0

    def __len__(self) -> int:
        return len(self._base) - self._left_out

    def __iter__(self) -> Iterator[int]:
        return self._kept(iter(self._base) if self._key is None else self._base.ranked(self._key))

    def whole_groups(self, size: int) -> Iterator[list[int]]:
        """See `ReadyIndexes`. In another order, the group with the highest member comes first."""
        base, key = self._base, self._key
        return self._kept_groups(base.whole_groups(size) if key is None else base.ranked_groups(key, size))

    def ranked(self, key: RankKey) -> Iterator[int]:
        """See `TaggedIndexes`. The new order replaces this one."""
        return self._kept(self._base.ranked(key))

    def ranked_groups(self, key: RankKey, size: int) -> Iterator[list[int]]:
        """See `TaggedIndexes`. The new order replaces this one."""
        return self._kept_groups(self._base.ranked_groups(key, size))

    def above(self, key: RankKey, bound: float) -> list[int]:
        """See `TaggedIndexes`."""
        return list(self._kept(self._base.above(key, bound)))

    def spoiled(self, key: RankKey, bound: float, size: int) -> list[int]:
        """See `TaggedIndexes`."""
        return list(self._kept(self._base.spoiled(key, bound, size)))

    def orphans(self, size: int) -> list[int]:
        """See `TaggedIndexes`."""
        return list(self._kept(self._base.orphans(size)))

    def _kept(self, rows: Iterable[int]) -> Iterator[int]:
        return filterfalse(self._without.__contains__, rows) if self._without else iter(rows)

    def _kept_groups(self, groups: Iterator[list[int]]) -> Iterator[list[int]]:
        return filter(self._without.isdisjoint, groups) if self._without else groups


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
        self.n_samples_per_prompt = validated_positive(
            1 if n_samples_per_prompt is None else n_samples_per_prompt, GROUP_SIZE
        )

    def _group_size(self, config: Mapping[str, Any]) -> int:
        """Return the group size of one request. Raises InvalidArgumentError if it is not the sampler's own."""
        requested = config.get(GROUP_SIZE)
        if requested is None:
            return self.n_samples_per_prompt
        size = validated_positive(requested, GROUP_SIZE)
        if self.size_given and size != self.n_samples_per_prompt:
            raise InvalidArgumentError(
                f"{GROUP_SIZE} ({size}) must be equal to the sampler's, which is {self.n_samples_per_prompt}; "
                f"leave it out of the sampling_config, or make the sampler without it"
            )
        return size

    def _groups_in(self, batch_size: int, config: Mapping[str, Any]) -> int:
        """Return the number of groups in a batch."""
        check_batch_size(batch_size)
        size = self._group_size(config)
        if batch_size % size:
            raise InvalidArgumentError(f"batch_size ({batch_size}) must be a multiple of n_samples_per_prompt ({size})")
        return batch_size // size


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
    first = getattr(ready_indexes, "first_groups", None)  # the controller's ready rows return all groups at once
    groups = first(size, count) if first is not None else list(islice(whole_groups(ready_indexes, size), count))
    return np.array(groups, "i8").reshape(-1, size) if len(groups) == count else none


def whole_groups(ready_indexes: Sequence[int], size: int) -> Iterator[list[int]]:
    """Iterate over all complete groups of `size`, in order."""
    if _has_methods(type(ready_indexes), ReadyIndexes):
        return cast("ReadyIndexes", ready_indexes).whole_groups(size)
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
