"""Which rows a task could be given, kept up to date by every change, for each (task, fields) asked for.

A row is ready when it is alive, has all the fields and the task has not consumed it. A ready set is a bitmap
with a count per chunk: a claim finds its rows by looking at counts, whatever the size of the partition.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from transfer_queue.core.rows import CHUNK_BITS, MASK, Chunk, Indexer, Rows

if TYPE_CHECKING:
    from transfer_queue.core.groups import Groups


def ones(bits: np.ndarray) -> np.ndarray:
    """Where a bitmap of u1 is 1. numpy searches bool an order faster than numbers."""
    return bits.view(bool).nonzero()[0]


class ReadySet:
    """The ready rows of one (task, fields).

    bits: chunk number -> 0/1 by position. counts: chunk number -> how many, no entry where none, ascending
    as `keys` (sorted chunk numbers with ready rows). total: all of them.
    """

    def __init__(self, task: str, fields: tuple[str, ...]) -> None:
        self.task = task
        self.fields = fields
        self.bits: dict[int, np.ndarray] = {}
        self.counts: dict[int, int] = {}
        self.keys: list[int] = []
        self.total = 0
        self.whole: dict[int, WholeGroups] = {}

    def build(self, rows: Rows) -> None:
        """Computes the set from scratch."""
        for key, chunk in rows.chunks.items():
            bits = self._compute(chunk, slice(0, chunk.size))
            column = np.zeros(chunk.capacity, "u1")
            column[: chunk.size] = bits
            self.bits[key] = column
            count = int(np.count_nonzero(bits))
            if count:
                self.counts[key] = count
                insort(self.keys, key)
                self.total += count

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

    def update(self, key: int, chunk: Chunk, at: np.ndarray, groups: Groups) -> bool:
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
                for whole in self.whole.values():
                    whole.change(positions[on], positions[~on], groups)
        gained = int(np.count_nonzero(new > old))
        delta = int(new.sum()) - int(old.sum())
        bits[at] = new
        if delta:
            self._count(key, delta)
        return gained > 0

    def _update_one(self, bits: np.ndarray, key: int, chunk: Chunk, at: int, groups: Groups) -> bool:
        """The same for one row without arrays: twenty ready sets beside puts of single rows are usual."""
        new = self._is_ready(chunk, at)
        if new == bits[at]:
            return False
        bits[at] = new
        self._count(key, 1 if new else -1)
        for whole in self.whole.values():
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

    def forget_chunk(self, key: int) -> None:
        """A chunk was dropped; its rows were cleared before."""
        self.bits.pop(key, None)

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

    def __contains__(self, position: int) -> bool:
        bits = self.bits.get(position >> CHUNK_BITS)
        at = position & MASK
        return bits is not None and at < len(bits) and bool(bits[at])

    def joined(self, position: int, group: int, groups: Groups) -> None:
        """A row that belonged to no group has joined a declared one; it may be ready already."""
        for whole in self.whole.values():
            whole.joined(group, int(position in self), groups)

    def unready(self, rows: Rows) -> Iterator[np.ndarray]:
        """The positions of live rows that are neither ready nor consumed, chunk by chunk."""
        for key, chunk in rows.chunks.items():
            open_ = chunk.alive[: chunk.size] == 1
            bits = self.bits.get(key)
            if bits is not None:
                open_[: len(bits)] &= bits[: chunk.size] == 0
            consumed = chunk.consumed.get(self.task)
            if consumed is not None:
                open_ &= consumed[: chunk.size] == 0
            found = np.flatnonzero(open_)
            if len(found):
                yield found + (key << CHUNK_BITS)

    def whole_groups(self, size: int, groups: Groups) -> WholeGroups:
        """The groups of `size` all of whose members are ready; built at first use, then kept."""
        found = self.whole.get(size)
        if found is None:
            found = self.whole[size] = WholeGroups(size)
            found.build(self.positions(), groups)
        return found


class WholeGroups:
    """counts: ready members by group. order: (first position, group) of the whole ones, ascending."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.counts: dict[int, int] = {}
        self.order: list[tuple[int, int]] = []

    def build(self, positions: np.ndarray, groups: Groups) -> None:
        """Counts from scratch; these are all that is ready."""
        names, counts = np.unique(groups.of(positions, self.size), return_counts=True)
        grouped = names >= 0
        names, counts = names[grouped], counts[grouped]
        self.counts = dict(zip(names.tolist(), counts.tolist(), strict=True))
        if groups.explicit:
            whole = [g for g, count in self.counts.items() if count == groups.size_of(g, self.size)]
            self.order = sorted((groups.first_of(g, self.size), g) for g in whole)
        else:
            names = names[counts == self.size]
            self.order = list(zip((names * self.size).tolist(), names.tolist(), strict=True))

    def change(self, on: np.ndarray, off: np.ndarray, groups: Groups) -> None:
        """Rows became ready (on) and unready (off)."""
        for positions, step in ((on, 1), (off, -1)):
            if not len(positions):
                continue
            names, counts = np.unique(groups.of(positions, self.size), return_counts=True)
            for group, count in zip(names.tolist(), counts.tolist(), strict=True):
                if group >= 0:
                    self.joined(group, step * count, groups)

    def joined(self, group: int, delta: int, groups: Groups) -> None:
        """A group has `delta` ready members more, or its size has changed."""
        now = self.counts.get(group, 0) + delta
        if now:
            self.counts[group] = now
        else:
            self.counts.pop(group, None)
        entry = (groups.first_of(group, self.size), group)
        at = bisect_left(self.order, entry)
        inside = at < len(self.order) and self.order[at] == entry
        wanted = groups.size_of(group, self.size)
        whole = wanted > 0 and self.counts.get(group, 0) == wanted
        if inside and not whole:
            del self.order[at]
        elif whole and not inside:
            insort(self.order, entry)


class Ready(Sequence[int]):
    """The ready rows as samplers see them: ascending global indexes, read lazily."""

    def __init__(self, ready: ReadySet, rows: Rows, groups: Groups) -> None:
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
            head = self._ready.positions(max(stop, 0))[start:stop:step]
            return self._rows.indexes_of(head).tolist()  # type: ignore[no-any-return]
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
        for key in self._ready.keys:
            found = ones(self._ready.bits[key])
            yield from self._rows.chunks[key].index[found].tolist()

    def whole_groups(self, size: int) -> Iterator[list[int]]:
        """Groups of `size` whose members are all ready, by first member; members ascending."""
        if size == 1 and not self._groups.explicit:
            yield from ([index] for index in self)
            return
        whole = self._ready.whole_groups(size, self._groups)
        for _, group in whole.order:
            members = self._groups.members(group, size)
            yield self._rows.indexes_of(members).tolist()
