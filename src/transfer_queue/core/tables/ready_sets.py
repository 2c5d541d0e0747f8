"""The rows that are ready for a task, updated with every change, for each (task, fields) that was requested.

A row is ready when it is alive, has all the fields, and the task has neither consumed nor claimed it. A ready set is a
bitmap with a count for each chunk: a claim finds its rows by the counts, whatever the size of the partition is.

Ready sets process publications later, so that a put does not update the sets of tasks that do not wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from typing import overload

import msgspec
import numpy as np

from transfer_queue.core.tables.complete_groups import (
    CompleteDeclaredGroups,
    CompleteGroups,
    CompleteOrderedGroups,
    Ranking,
)
from transfer_queue.core.tables.groups import GroupTable
from transfer_queue.core.tables.rows import CHUNK_BITS, CONSUMED, MASK, Chunk, Indexer, RowTable
from transfer_queue.sampler.ready_views import RankKey

AT_ONCE = 16  # chunks whose groups are counted in one step, so that the arrays of the step stay in the CPU cache
MAX_SIZES = 8  # group sizes for which complete groups are kept in one ready set; claims choose the sizes
FIRST_RANKED = 32  # rows that a ranking sampler gets at first


def positions_of_ones(bits: np.ndarray) -> np.ndarray:
    """Return where a u1 bitmap is 1. numpy searches bool ten times faster than numbers."""
    return bits.view(bool).nonzero()[0]


def first_selected(values: np.ndarray, bits: np.ndarray, limit: int) -> np.ndarray:
    """Return the first `limit` values whose place in a u1 bitmap, which has at least one 1, is 1.

    The first ones are usually consecutive, so that most of the bitmap is not read.
    """
    start = bits.argmax()
    end = start + limit
    selected: np.ndarray = values[start:end][bits[start:end].view(bool)]
    return selected if len(selected) == limit or end >= len(bits) else values[positions_of_ones(bits)[:limit]]


class ReadySet:
    """The ready rows of one (task, fields)."""

    def __init__(self, task: str, fields: tuple[str, ...]) -> None:
        self.task = task
        self.fields = fields
        self.bits: dict[int, np.ndarray] = {}
        """Chunk number -> 0 or 1 for each row."""
        self.counts: dict[int, int] = {}
        """Chunk number -> number of ready rows; no entry if there are none."""
        self.keys: list[int] = []
        """The numbers of the chunks that have ready rows, ascending."""
        self.total = 0
        """The number of ready rows."""
        self.whole: dict[int, CompleteGroups] = {}
        """The complete groups by group size; the size that was requested last is at the end."""
        self.rankings: dict[RankKey, Ranking] = {}
        """The rankings that were requested, by key."""
        self.seen = 0
        """The number of the latest publication that it has processed (`ready_sets.DeferredUpdates`)."""
        self.unbuilt: list[int] = []
        """The numbers of the chunks that it has not read at all, the next one at the end; empty once it is built.

        Changes are processed while it is being built, but groups and rankings are requested only afterwards.
        """

    def build(self, rows: RowTable, chunks: int | None = None) -> None:
        """Read this number of chunks that it has not read (None: all)."""
        for _ in range(len(self.unbuilt) if chunks is None else min(chunks, len(self.unbuilt))):
            key = self.unbuilt.pop()
            chunk = rows.chunks.get(key)
            if chunk is None:
                continue  # removed in the meantime
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
        """Compute the rows `at` of a chunk again. Return whether some became ready."""
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
                for whole in self._counted_groups(key):
                    whole.update_rows(positions[on], positions[~on], groups)
        gained = int(np.count_nonzero(new > old))
        delta = int(new.sum()) - int(old.sum())
        bits[at] = new
        if gained or delta:
            self._count(key, delta)
        return gained > 0

    def take(self, key: int, chunk: Chunk, at: np.ndarray, groups: GroupTable) -> None:
        """Record that the task got the rows `at` of a chunk, so that none of them is ready any more."""
        bits = self.bits.get(key)
        if bits is None or len(bits) < chunk.capacity:
            self.update(key, chunk, at, groups)
            return
        ready = bits[at]
        count = ready.tobytes().count(1)  # faster than `np.count_nonzero` for the rows of a batch
        if not count:
            return
        if self.whole:
            off = (at if count == len(at) else at[ready.view(bool)]) + (key << CHUNK_BITS)
            for whole in self._counted_groups(key):
                whole.update_rows(off[:0], off, groups)
        bits[at] = 0
        self._count(key, -count)

    def _update_one(self, bits: np.ndarray, key: int, chunk: Chunk, at: int, groups: GroupTable) -> bool:
        """Update one row without arrays, because puts of single rows beside twenty ready sets are usual."""
        new = self._is_ready(chunk, at)
        if new == bits[at]:
            return False
        bits[at] = new
        self._count(key, 1 if new else -1)
        for whole in self._counted_groups(key):
            group = int(groups.groups_of(np.array([(key << CHUNK_BITS) + at]), whole.size)[0])
            if group >= 0:
                whole.update_group(group, 1 if new else -1, groups)
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
        """Record that rows of a chunk have changed. delta: the change of the number of ready rows."""
        count = self.counts.get(key, 0) + delta
        self.total += delta
        if count:
            if key not in self.counts:
                insort(self.keys, key)
            self.counts[key] = count
        else:
            del self.counts[key]
            del self.keys[bisect_left(self.keys, key)]
        for ranking in self.rankings.values():
            ranking.dirty.add(key)

    def _counted_groups(self, key: int) -> list[CompleteGroups]:
        """Return the complete groups for which the rows of this chunk are already counted."""
        return [whole for whole in self.whole.values() if key not in whole.uncounted]

    def mark_tag_changed(self, key: int, tag: str) -> None:
        """Record that a watched tag of a row of this chunk has changed."""
        for rankings in (self.rankings, *(whole.rankings for whole in self.whole.values())):
            for ranking in rankings.values():
                if ranking.key.tag == tag:
                    ranking.dirty.add(key)

    def ranking(self, key: RankKey, rows: RowTable) -> Ranking:
        """Return the ranking of the ready rows by this key. It is made at first use, and then kept."""
        ranking = self.rankings.get(key)
        if ranking is None:
            rows.watch(key.tag)
            ranking = self.rankings[key] = Ranking(key)
            ranking.dirty.update(self.keys)
        return ranking

    def forget_chunk(self, key: int) -> None:
        """Forget a chunk that is removed. Its rows were cleared before."""
        self.bits.pop(key, None)
        for whole in self.whole.values():
            whole.bits.pop(key, None)
            whole.uncounted.pop(key, None)

    def indexes(self, rows: RowTable, limit: int) -> np.ndarray:
        """Return the global indexes of the first `limit` ready rows, ascending."""
        parts: list[np.ndarray] = []
        for key in self.keys:
            bits = self.bits[key]
            indexes = first_selected(rows.chunks[key].index[: len(bits)], bits, limit)
            parts.append(indexes)
            limit -= len(indexes)
            if limit <= 0:
                break
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, "i8")

    def page(self, first: int, limit: int) -> tuple[np.ndarray, int]:
        """Return the first `limit` ready positions from `first` on, ascending, and the next one (-1: none)."""
        parts: list[np.ndarray] = []
        left = limit
        for key in self.keys[bisect_left(self.keys, first >> CHUNK_BITS) :]:
            positions = positions_of_ones(self.bits[key]) + (key << CHUNK_BITS)
            positions = positions[np.searchsorted(positions, first) :]
            parts.append(positions[:left])
            if len(positions) > left:
                return np.concatenate(parts), int(positions[left])
            left -= len(positions)
        return np.concatenate([np.zeros(0, "i8"), *parts]), -1

    def has_all(self, positions: np.ndarray, rows: RowTable) -> bool:
        """Return whether all these rows are ready."""
        for key, _, at, _ in rows.split(positions):
            bits = self.bits.get(key)
            if bits is None or (at >= len(bits)).any() or not bits[at].all():
                return False
        return True

    def __contains__(self, position: int) -> bool:
        bits = self.bits.get(position >> CHUNK_BITS)
        at = position & MASK
        return bits is not None and at < len(bits) and bool(bits[at])

    def add_group_member(self, position: int, group: int, groups: GroupTable) -> None:
        """Record that a row without a group has joined a declared group; it may be ready already."""
        for whole in self.whole.values():
            counted = position >> CHUNK_BITS not in whole.uncounted
            whole.update_group(group, int(counted and position in self), groups)

    def note_group_size(self, group: int, groups: GroupTable) -> None:
        """Record that a member that was not ready has left a declared group."""
        for whole in self.whole.values():
            whole.update_group(group, 0, groups)

    def unready_positions(self, rows: RowTable) -> Iterator[np.ndarray]:
        """Iterate over the positions of live rows that are neither ready nor consumed, claimed rows included."""
        for key, chunk in rows.chunks.items():
            open_ = chunk.alive[: chunk.size] == 1
            bits = self.bits.get(key)
            if bits is not None:
                open_[: len(bits)] &= bits[: chunk.size] == 0
            consumed = chunk.consumed.get(self.task)
            if consumed is not None:
                open_ &= consumed[: chunk.size] != CONSUMED
            places = np.flatnonzero(open_)
            if len(places):
                yield places + (key << CHUNK_BITS)

    def whole_groups(self, size: int, groups: GroupTable) -> CompleteGroups:
        """Return the groups of `size` whose members are all ready. They are counted at first use, then kept."""
        groups_of_size = self.begin_groups(size, groups)
        while groups_of_size.uncounted:
            self.count_groups(groups_of_size, groups, AT_ONCE)
        return groups_of_size

    def begin_groups(self, size: int, groups: GroupTable) -> CompleteGroups:
        """Return the same groups, of the rows that are counted so far."""
        groups_of_size = self.whole.pop(size, None)
        if groups_of_size is None:
            groups_of_size = CompleteDeclaredGroups(size) if groups.explicit else CompleteOrderedGroups(size)
            groups_of_size.uncounted = dict.fromkeys(self.keys)
            made = [each.size for each in self.whole.values() if not (each.uncounted or each.unmarked)]
            for old in made[: max(0, len(self.whole) + 1 - MAX_SIZES)]:  # no claim waits for these
                del self.whole[old]
        self.whole[size] = groups_of_size
        return groups_of_size

    def count_groups(self, whole: CompleteGroups, groups: GroupTable, chunks: int) -> None:
        """Count the ready rows of this number of chunks for complete groups."""
        keys = list(islice(whole.uncounted, chunks))
        for key in keys:
            del whole.uncounted[key]
        positions = np.concatenate([positions_of_ones(self.bits[key]) + (key << CHUNK_BITS) for key in keys])
        whole.update_rows(positions, positions[:0], groups)


class ReadySets(Sequence[int]):
    """The ready rows as samplers see them: ascending global indexes, which are read lazily."""

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
            start, stop, step = at.indices(self._ready.total)
            if step < 0:
                return self[:][at]
            indexes: list[int] = self._ready.indexes(self._rows, stop)[start:stop:step].tolist()
            return indexes
        position = at + len(self) if at < 0 else at
        if not 0 <= position < len(self):
            raise IndexError(f"ready row {at} of {len(self)}")
        for key in self._ready.keys:
            count = self._ready.counts[key]
            if position < count:
                place = positions_of_ones(self._ready.bits[key])[position]
                return int(self._rows.chunks[key].index[place])
            position -= count
        raise IndexError(f"ready row {at} of {len(self)}")

    def __iter__(self) -> Iterator[int]:
        chunks, bits = self._rows.chunks, self._ready.bits
        return chain.from_iterable(chunks[key].index[positions_of_ones(bits[key])].tolist() for key in self._ready.keys)

    def first_groups(self, size: int, count: int) -> np.ndarray:
        """Return the first `count` groups, or all if fewer, as i8 [groups, size], in the order of `whole_groups`."""
        if size == 1 and not self._groups.explicit:
            return self._ready.indexes(self._rows, count).reshape(-1, 1)
        numbers = self._ready.whole_groups(size, self._groups).first_groups(count)
        if not numbers:
            return np.zeros((0, size), "i8")
        if self._groups.explicit:
            members = np.sort(np.array([self._groups.declared[group].members for group in numbers], "i8"), axis=1)
        else:
            members = np.array(numbers, "i8")[:, None] * size + np.arange(size)
        return self._rows.indexes_of(members.reshape(-1)).reshape(members.shape)

    def whole_groups(self, size: int) -> Iterator[list[int]]:
        """Iterate over the groups of `size` whose members are all ready, by first member; members ascend."""
        if self._is_single(size):
            yield from ([index] for index in self)
            return
        whole = self._ready.whole_groups(size, self._groups)
        for group in whole.first_groups(len(whole)):
            yield self._indexes(self._groups.members(group, size))

    def ranked(self, key: RankKey) -> Iterator[int]:
        """See `sampler.ready_views.TaggedIndexes`."""
        ranking = self._ready.ranking(key, self._rows)
        return chain.from_iterable(map(self._indexes, self._descending(ranking, self._ready.bits)))

    def ranked_groups(self, key: RankKey, size: int) -> Iterator[list[int]]:
        """See `sampler.ready_views.TaggedIndexes`."""
        if self._is_single(size):
            yield from ([index] for index in self.ranked(key))
            return
        whole = self._ready.whole_groups(size, self._groups)
        ranking = whole.ranking(key, self._rows, self._groups)
        seen: set[int] = set()
        for positions in self._descending(ranking, whole.bits):
            for group in self._groups.groups_of(positions, size).tolist():
                if group not in seen:
                    seen.add(group)
                    yield self._indexes(self._groups.members(group, size))

    def above(self, key: RankKey, bound: float) -> list[int]:
        """See `sampler.ready_views.TaggedIndexes`."""
        return self._indexes(self._ready.ranking(key, self._rows).positions_above(self._ready.bits, self._rows, bound))

    def spoiled(self, key: RankKey, bound: float, size: int) -> list[int]:
        """See `sampler.ready_views.TaggedIndexes`."""
        if self._is_single(size):
            return self.above(key, bound)
        positions = self._ready.ranking(key, self._rows).positions_above(self._ready.bits, self._rows, bound)
        groups = np.unique(self._groups.groups_of(positions, size))
        members = [self._members(group, size) for group in groups[groups >= 0].tolist()]
        return self._open_rows(np.unique(np.concatenate([positions, *members])))

    def orphans(self, size: int) -> list[int]:
        """See `sampler.ready_views.TaggedIndexes`."""
        if self._is_single(size):
            return []
        whole = self._ready.whole_groups(size, self._groups)
        grown = whole.take_grown_groups()
        broken = []
        for group in list(grown):
            if whole.is_partial(group) and self._is_broken(group, size):
                broken.append(self._members(group, size))
            else:
                grown.discard(group)
        return self._open_rows(np.unique(np.concatenate(broken))) if broken else []

    def _is_broken(self, group: int, size: int) -> bool:
        """Return whether a member of the group was cleared, or consumed by the task."""
        members = self._members(group, size)
        if self._groups.explicit:
            cleared = self._groups.declared[group].cleared > 0
        else:
            cleared = self._rows.has_cleared(range(group * size, group * size + len(members)))
        if cleared:
            return True
        columns = ((chunk.consumed.get(self._ready.task), at) for _, chunk, at, _ in self._rows.split(members))
        return any(column is not None and (column[at] == CONSUMED).any() for column, at in columns)

    def _open_rows(self, positions: np.ndarray) -> list[int]:
        """Return those of these rows that live and are neither consumed nor claimed by the task."""
        keep = np.zeros(len(positions), bool)
        for _, chunk, at, where in self._rows.split(positions):
            consumed = chunk.consumed.get(self._ready.task)
            keep[where] = (chunk.alive[at] == 1) & (True if consumed is None else consumed[at] == 0)
        return self._indexes(positions[keep])

    def _members(self, group: int, size: int) -> np.ndarray:
        """Return the positions of the members that exist so far, ascending."""
        members = self._groups.members(group, size)
        return members[members < self._rows.end]

    def _descending(self, ranking: Ranking, bits: dict[int, np.ndarray]) -> Iterator[np.ndarray]:
        """Iterate over the positions of a ranking, the highest first, in parts of growing size."""
        count, done = FIRST_RANKED, 0
        while True:
            positions = ranking.highest_positions(bits, self._rows, count)
            yield positions[done:]
            if len(positions) < count:
                return
            count, done = 8 * count, len(positions)

    def _indexes(self, positions: np.ndarray) -> list[int]:
        return self._rows.indexes_of(positions).tolist()  # type: ignore[no-any-return]

    def _is_single(self, size: int) -> bool:
        """Return whether every row is a group by itself."""
        return size == 1 and not self._groups.explicit


MAX_ENTRIES = 256
MAX_ROWS = 4096

Fields = frozenset[str]


class DeferredUpdate(msgspec.Struct, eq=False):
    """Rows of one chunk that got values of these fields."""

    number: int
    """Ascends from 1."""
    fields: Fields
    key: int
    chunk: Chunk
    at: Indexer
    """A slice or an array."""

    def positions(self) -> np.ndarray:
        """Return where these rows are in their chunk."""
        return np.arange(self.at.start, self.at.stop) if isinstance(self.at, slice) else self.at


class DeferredUpdates:
    """The latest publications of a partition, for its ready sets. Derived.

    `ReadySet.seen` says which of them a set has processed. To process a row twice does no harm: its present
    state counts.
    """

    def __init__(self, rows: RowTable, groups: GroupTable) -> None:
        self._rows = rows
        self._groups = groups
        self._entries: list[DeferredUpdate] = []
        self._shown = 0  # the highest number that a set has processed
        self._size = 0  # the number of rows in all entries
        self.newest = 0
        """The number of the newest entry so far."""

    def add(self, fields: Fields, key: int, chunk: Chunk, at: Indexer) -> None:
        """Add rows of a chunk. A run joins the newest entry if it follows its rows and no set has processed that."""
        self._size += at.stop - at.start if isinstance(at, slice) else len(at)
        newest = self._entries[-1] if self._entries else None
        if (
            newest is not None
            and newest.number > self._shown
            and isinstance(at, slice)
            and isinstance(newest.at, slice)
            and (newest.key, newest.at.stop, newest.fields) == (key, at.start, fields)
        ):
            newest.at = slice(newest.at.start, at.stop)
            return
        self.newest += 1
        self._entries.append(DeferredUpdate(self.newest, fields, key, chunk, at))

    def apply_to(self, ready: ReadySet) -> bool:
        """Let a set process the entries that are new to it. Return whether rows became ready."""
        fresh = []
        for entry in reversed(self._entries):
            if entry.number <= ready.seen:
                break
            if not entry.fields.isdisjoint(ready.fields):
                fresh.append(entry)
        self.mark_processed(ready)
        if len(fresh) > 1:
            fresh = _merge_entries(fresh)
        gained = False
        for entry in fresh:
            if self._rows.chunks.get(entry.key) is entry.chunk:  # otherwise all its rows were removed
                gained |= ready.update(entry.key, entry.chunk, entry.positions(), self._groups)
        return gained

    def mark_processed(self, ready: ReadySet) -> None:
        """Record that a set has processed every entry: it was just built or updated."""
        ready.seen = self._shown = self.newest

    def trim(self, sets: Collection[ReadySet]) -> None:
        """Let all sets process the entries and then remove these, if there are many."""
        if self._size > MAX_ROWS or len(self._entries) > MAX_ENTRIES:
            self._entries = sorted(_merge_entries(self._entries), key=lambda entry: entry.number)
            for ready in sets:
                self.apply_to(ready)
            self.clear()

    def clear(self) -> None:
        """Remove the entries. All sets have processed them, or there are no sets."""
        self._entries.clear()
        self._size = 0


def _merge_entries(entries: list[DeferredUpdate]) -> list[DeferredUpdate]:
    """Return the same rows with one entry for each chunk and fields, numbered like the newest of its entries."""
    together: dict[tuple[int, Fields], list[DeferredUpdate]] = {}
    for entry in entries:
        together.setdefault((entry.key, entry.fields), []).append(entry)
    merged = []
    for (key, fields), some in together.items():
        if len(some) > 1:
            at = np.unique(np.concatenate([entry.positions() for entry in some]))
            some = [DeferredUpdate(max(entry.number for entry in some), fields, key, some[0].chunk, at)]
        merged += some
    return merged
