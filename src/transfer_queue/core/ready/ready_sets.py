"""Which rows a task could be given, kept up to date by every change, for each (task, fields) asked for.

A row is ready when it is alive, has all the fields and the task has neither consumed nor claimed it. A ready set
is a bitmap with a count per chunk: a claim finds its rows by looking at counts, whatever the size of the partition.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, overload

import numpy as np

from transfer_queue.core.ready.complete_groups import CompleteDeclaredGroups, CompleteGroups, CompleteOrderedGroups
from transfer_queue.core.ready.rankings import Ranking
from transfer_queue.core.tables.row_table import CHUNK_BITS, CONSUMED, MASK, Chunk, Indexer, RowTable
from transfer_queue.sampler.ready_views import RankKey

AT_ONCE = 16  # chunks whose groups are counted in one go: what is made for it stays in the cache
MOST_SIZES = 8  # of groups that are kept of a ready set; claims say the sizes
FIRST_RANKED = 32  # rows that a sampler of an order by tags is shown at first

if TYPE_CHECKING:
    from transfer_queue.core.tables.group_table import GroupTable


def ones(bits: np.ndarray) -> np.ndarray:
    """Where a bitmap of u1 is 1. numpy searches bool an order faster than numbers."""
    return bits.view(bool).nonzero()[0]


class ReadySet:
    """The ready rows of one (task, fields).

    bits: chunk number -> 0/1 by position. counts: chunk number -> how many, no entry where none, ascending
    as `keys` (sorted chunk numbers with ready rows). total: all of them. rankings: those asked for, by key.
    whole: whole groups by their size, the size that was asked for last at the end.
    seen: up to here it has looked at what was published (`unseen.Unseen`).
    unbuilt: numbers of the chunks that it has not looked at at all, the last one next; none once it is made. Changes
    may come in between, but groups and rankings are asked for only after.
    """

    def __init__(self, task: str, fields: tuple[str, ...]) -> None:
        self.task = task
        self.fields = fields
        self.bits: dict[int, np.ndarray] = {}
        self.counts: dict[int, int] = {}
        self.keys: list[int] = []
        self.total = 0
        self.whole: dict[int, CompleteGroups] = {}
        self.rankings: dict[RankKey, Ranking] = {}
        self.seen = 0
        self.unbuilt: list[int] = []

    def build(self, rows: RowTable, chunks: int | None = None) -> None:
        """Looks at so many chunks that it has not looked at (None: all)."""
        for _ in range(len(self.unbuilt) if chunks is None else min(chunks, len(self.unbuilt))):
            key = self.unbuilt.pop()
            chunk = rows.chunks.get(key)
            if chunk is None:
                continue  # dropped meanwhile
            bits = self._compute(chunk, slice(0, chunk.size))
            column = np.zeros(chunk.capacity, "u1")
            column[: chunk.size] = bits
            self.bits[key] = column
            delta = int(np.count_nonzero(bits)) - self.counts.get(key, 0)
            if delta:
                self._count(key, delta)

    def _compute(self, chunk: Chunk, at: Indexer) -> np.ndarray:
        ready: np.ndarray = chunk.alive[at]
        for name in self.fields:
            columns = chunk.field.get(name)
            if columns is None:
                return np.zeros(ready.shape, "u1")
            ready = ready & (columns[0][at] != 0)
        consumed = chunk.consumed.get(self.task)
        if consumed is not None:
            ready = ready & (consumed[at] == 0)
        return ready.astype("u1", copy=False)

    def update(self, key: int, chunk: Chunk, at: np.ndarray, groups: GroupTable) -> bool:
        """Recomputes the rows `at` of a chunk; True if some became ready."""
        bits = self.bits.get(key)
        if bits is None:
            bits = self.bits[key] = np.zeros(chunk.capacity, "u1")
        elif len(bits) < chunk.capacity:
            grown = np.zeros(chunk.capacity, "u1")
            grown[: len(bits)] = bits
            bits = self.bits[key] = grown
        if len(at) == 1:
            return self._update_one(bits, key, chunk, int(at[0]), groups)
        new = self._compute(chunk, at)
        old = bits[at]
        if self.whole:
            changed = old != new
            if changed.any():
                positions = at[changed] + (key << CHUNK_BITS)
                on = new[changed] == 1
                for whole in self._counting(key):
                    whole.change(positions[on], positions[~on], groups)
        gained = int(np.count_nonzero(new > old))
        delta = int(new.sum()) - int(old.sum())
        bits[at] = new
        if delta:
            self._count(key, delta)
        if gained or delta:
            self._changed(key)
        return gained > 0

    def take(self, key: int, chunk: Chunk, at: np.ndarray, groups: GroupTable) -> None:
        """The task was given the rows `at` of a chunk: none of them is ready, whatever else is true of them."""
        bits = self.bits.get(key)
        if bits is None or len(bits) < chunk.capacity:
            self.update(key, chunk, at, groups)
            return
        ready = bits[at].view(bool)
        count = int(np.count_nonzero(ready))
        if not count:
            return
        if self.whole:
            off = (at if count == len(at) else at[ready]) + (key << CHUNK_BITS)
            for whole in self._counting(key):
                whole.change(off[:0], off, groups)
        bits[at] = 0
        self._count(key, -count)
        self._changed(key)

    def _update_one(self, bits: np.ndarray, key: int, chunk: Chunk, at: int, groups: GroupTable) -> bool:
        """The same for one row without arrays: twenty ready sets beside puts of single rows are usual."""
        new = self._is_ready(chunk, at)
        if new == bits[at]:
            return False
        bits[at] = new
        self._count(key, 1 if new else -1)
        self._changed(key)
        for whole in self._counting(key):
            group = int(groups.of(np.array([(key << CHUNK_BITS) + at]), whole.size)[0])
            if group >= 0:
                whole.joined(group, 1 if new else -1, groups)
        return new

    def _is_ready(self, chunk: Chunk, at: int) -> bool:
        if not chunk.alive[at]:
            return False
        for name in self.fields:
            columns = chunk.field.get(name)
            if columns is None or not columns[0][at]:
                return False
        consumed = chunk.consumed.get(self.task)
        return consumed is None or not consumed[at]

    def _count(self, key: int, delta: int) -> None:
        count = self.counts.get(key, 0) + delta
        self.total += delta
        if count:
            if key not in self.counts:
                insort(self.keys, key)
            self.counts[key] = count
        else:
            del self.counts[key]
            del self.keys[bisect_left(self.keys, key)]

    def _changed(self, key: int) -> None:
        for ranking in self.rankings.values():
            ranking.dirty.add(key)

    def _counting(self, key: int) -> list[CompleteGroups]:
        """Those whole groups for which the rows of this chunk are counted already."""
        return [whole for whole in self.whole.values() if key not in whole.uncounted]

    def retagged(self, key: int, tag: str) -> None:
        """A watched tag of a row of this chunk has changed."""
        for rankings in (self.rankings, *(whole.rankings for whole in self.whole.values())):
            for ranking in rankings.values():
                if ranking.key.tag == tag:
                    ranking.dirty.add(key)

    def ranking(self, key: RankKey, rows: RowTable) -> Ranking:
        """The ready rows by this key; made at first use, then kept."""
        found = self.rankings.get(key)
        if found is None:
            rows.watch(key.tag)
            found = self.rankings[key] = Ranking(key)
            found.dirty.update(self.keys)
        return found

    def forget_chunk(self, key: int) -> None:
        """A chunk was dropped; its rows were cleared before."""
        self.bits.pop(key, None)
        for whole in self.whole.values():
            whole.bits.pop(key, None)
            whole.uncounted.pop(key, None)

    def positions(self, limit: int | None = None) -> np.ndarray:
        """The first `limit` ready positions (all where None), ascending."""
        parts: list[np.ndarray] = []
        left = self.total if limit is None else min(limit, self.total)
        for key in self.keys:
            if left <= 0:
                break
            found = ones(self.bits[key])[:left]
            left -= len(found)
            parts.append(found + (key << CHUNK_BITS))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, "i8")

    def page(self, first: int, limit: int) -> tuple[np.ndarray, int]:
        """The first `limit` ready positions from `first` on, ascending, and the next ready one (-1: none)."""
        parts: list[np.ndarray] = []
        left = limit
        for key in self.keys[bisect_left(self.keys, first >> CHUNK_BITS) :]:
            found = ones(self.bits[key]) + (key << CHUNK_BITS)
            found = found[np.searchsorted(found, first) :]
            parts.append(found[:left])
            if len(found) > left:
                return np.concatenate(parts), int(found[left])
            left -= len(found)
        return np.concatenate([np.zeros(0, "i8"), *parts]), -1

    def has_all(self, positions: np.ndarray, rows: RowTable) -> bool:
        """Whether all these rows are ready."""
        for key, _, at, _ in rows.split(positions):
            bits = self.bits.get(key)
            if bits is None or (at >= len(bits)).any() or not bits[at].all():
                return False
        return True

    def __contains__(self, position: int) -> bool:
        bits = self.bits.get(position >> CHUNK_BITS)
        at = position & MASK
        return bits is not None and at < len(bits) and bool(bits[at])

    def joined(self, position: int, group: int, groups: GroupTable) -> None:
        """A row that belonged to no group has joined a declared one; it may be ready already."""
        for whole in self.whole.values():
            counted = position >> CHUNK_BITS not in whole.uncounted
            whole.joined(group, int(counted and position in self), groups)

    def unready(self, rows: RowTable) -> Iterator[np.ndarray]:
        """The positions of live rows that are neither ready nor consumed, chunk by chunk: claimed ones, too."""
        for key, chunk in rows.chunks.items():
            open_ = chunk.alive[: chunk.size] == 1
            bits = self.bits.get(key)
            if bits is not None:
                open_[: len(bits)] &= bits[: chunk.size] == 0
            consumed = chunk.consumed.get(self.task)
            if consumed is not None:
                open_ &= consumed[: chunk.size] != CONSUMED
            found = np.flatnonzero(open_)
            if len(found):
                yield found + (key << CHUNK_BITS)

    def whole_groups(self, size: int, groups: GroupTable) -> CompleteGroups:
        """The groups of `size` all of whose members are ready; built at first use, kept while it is in use."""
        found = self.counted(size, groups)
        while found.uncounted:
            self.count(found, groups, AT_ONCE)
        return found

    def counted(self, size: int, groups: GroupTable) -> CompleteGroups:
        """The same, of the rows that were counted so far."""
        found = self.whole.pop(size, None)
        if found is None:
            found = CompleteDeclaredGroups(size) if groups.explicit else CompleteOrderedGroups(size)
            found.uncounted = dict.fromkeys(self.keys)
            made = [each.size for each in self.whole.values() if not (each.uncounted or each.unmarked)]
            for old in made[: max(0, len(self.whole) + 1 - MOST_SIZES)]:  # none for which a claim waits
                del self.whole[old]
        self.whole[size] = found
        return found

    def count(self, whole: CompleteGroups, groups: GroupTable, chunks: int) -> None:
        """Counts the ready rows of so many chunks for whole groups."""
        keys = list(islice(whole.uncounted, chunks))
        for key in keys:
            del whole.uncounted[key]
        positions = np.concatenate([ones(self.bits[key]) + (key << CHUNK_BITS) for key in keys])
        whole.change(positions, positions[:0], groups)


class ReadySets(Sequence[int]):
    """The ready rows as samplers see them: ascending global indexes, read lazily."""

    def __init__(self, ready: ReadySet, rows: RowTable, groups: GroupTable) -> None:
        self._ready = ready
        self._rows = rows
        self._groups = groups

    def __len__(self) -> int:
        return self._ready.total

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step < 0:
                return self[:][at]
            return self._indexes(self._ready.positions(max(stop, 0))[start:stop:step])
        position = at + len(self) if at < 0 else at
        if not 0 <= position < len(self):
            raise IndexError(f"ready row {at} of {len(self)}")
        for key in self._ready.keys:
            count = self._ready.counts[key]
            if position < count:
                found = ones(self._ready.bits[key])[position]
                return int(self._rows.chunks[key].index[found])
            position -= count
        raise IndexError(f"ready row {at} of {len(self)}")

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(self._in_chunk, self._ready.keys))

    def _in_chunk(self, key: int) -> list[int]:
        found: list[int] = self._rows.chunks[key].index[ones(self._ready.bits[key])].tolist()
        return found

    def first_groups(self, size: int, count: int) -> np.ndarray:
        """i8 [groups, size]: the first `count` groups, or as many as there are, in the order of `whole_groups`."""
        if size == 1 and not self._groups.explicit:
            return self._rows.indexes_of(self._ready.positions(count)).reshape(-1, 1)
        numbers = self._ready.whole_groups(size, self._groups).first(count)
        if not numbers:
            return np.zeros((0, size), "i8")
        if self._groups.explicit:
            members = np.sort(np.array([self._groups.declared[group].members for group in numbers], "i8"), axis=1)
        else:
            members = np.array(numbers, "i8")[:, None] * size + np.arange(size)
        return self._rows.indexes_of(members.reshape(-1)).reshape(members.shape)

    def whole_groups(self, size: int) -> Iterator[list[int]]:
        """Groups of `size` whose members are all ready, by first member; members ascending."""
        if self._single(size):
            yield from ([index] for index in self)
            return
        whole = self._ready.whole_groups(size, self._groups)
        for group in whole.first(len(whole)):
            yield self._indexes(self._groups.members(group, size))

    def ranked(self, key: RankKey) -> Iterator[int]:
        """See `sampler.ready_views.TaggedIndexes`."""
        ranking = self._ready.ranking(key, self._rows)
        return chain.from_iterable(map(self._indexes, self._falling(ranking, self._ready.bits)))

    def ranked_groups(self, key: RankKey, size: int) -> Iterator[list[int]]:
        """See `sampler.ready_views.TaggedIndexes`."""
        if self._single(size):
            yield from ([index] for index in self.ranked(key))
            return
        whole = self._ready.whole_groups(size, self._groups)
        ranking = whole.ranking(key, self._rows, self._groups)
        seen: set[int] = set()
        for positions in self._falling(ranking, whole.bits):
            for group in self._groups.of(positions, size).tolist():
                if group not in seen:
                    seen.add(group)
                    yield self._indexes(self._groups.members(group, size))

    def above(self, key: RankKey, bound: float) -> list[int]:
        """See `sampler.ready_views.TaggedIndexes`."""
        return self._indexes(self._ready.ranking(key, self._rows).above(self._ready.bits, self._rows, bound))

    def spoiled(self, key: RankKey, bound: float, size: int) -> list[int]:
        """See `sampler.ready_views.TaggedIndexes`."""
        if self._single(size):
            return self.above(key, bound)
        found = self._ready.ranking(key, self._rows).above(self._ready.bits, self._rows, bound)
        groups = np.unique(self._groups.of(found, size))
        members = [self._members(group, size) for group in groups[groups >= 0].tolist()]
        return self._open_rows(np.unique(np.concatenate([found, *members])))

    def orphans(self, size: int) -> list[int]:
        """See `sampler.ready_views.TaggedIndexes`."""
        if self._single(size):
            return []
        whole = self._ready.whole_groups(size, self._groups)
        grown = whole.grown_groups()
        broken = []
        for group in list(grown):
            if whole.partial(group) and self._broken(group, size):
                broken.append(self._members(group, size))
            else:
                grown.discard(group)
        return self._open_rows(np.unique(np.concatenate(broken))) if broken else []

    def _broken(self, group: int, size: int) -> bool:
        """Whether a member of the group was cleared, or the task has consumed one."""
        members = self._members(group, size)
        if self._groups.explicit:
            cleared = self._groups.declared[group].cleared > 0
        else:
            cleared = self._rows.dead(range(group * size, group * size + len(members)))
        if cleared:
            return True
        columns = ((chunk.consumed.get(self._ready.task), at) for _, chunk, at, _ in self._rows.split(members))
        return any(column is not None and (column[at] == CONSUMED).any() for column, at in columns)

    def _open_rows(self, positions: np.ndarray) -> list[int]:
        """Those of these rows that live and are neither consumed nor claimed by the task."""
        keep = np.zeros(len(positions), bool)
        for _, chunk, at, where in self._rows.split(positions):
            consumed = chunk.consumed.get(self._ready.task)
            keep[where] = (chunk.alive[at] == 1) & (True if consumed is None else consumed[at] == 0)
        return self._indexes(positions[keep])

    def _members(self, group: int, size: int) -> np.ndarray:
        """The positions of the members that were ever reserved, ascending."""
        members = self._groups.members(group, size)
        return members[members < self._rows.end]

    def _falling(self, ranking: Ranking, bits: dict[int, np.ndarray]) -> Iterator[np.ndarray]:
        """The positions of a ranking, the highest first, more at a time the more are asked for."""
        count, done = FIRST_RANKED, 0
        while True:
            positions = ranking.top(bits, self._rows, count)
            yield positions[done:]
            if len(positions) < count:
                return
            count, done = 8 * count, len(positions)

    def _indexes(self, positions: np.ndarray) -> list[int]:
        return self._rows.indexes_of(positions).tolist()  # type: ignore[no-any-return]

    def _single(self, size: int) -> bool:
        """Whether every row is a group of its own."""
        return size == 1 and not self._groups.explicit
