"""What ready sets keep besides their rows: the rows with the highest keys, and the groups whose members are all ready.

The keys of a ranking are computed from a column of the tag (`rows.Chunk.numbers`). The highest key of each chunk is
kept, and computed again after a change. A chunk is read only if its highest key is among the highest keys that are
needed.

Groups by order of reservation are counted in columns, like rows. Declared groups, whose members may be anywhere and
which are ordered by their first member, are counted in a dict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from transfer_queue.core.tables.rows import CHUNK, CHUNK_BITS, MASK, Chunk, RowTable, count_values, runs_of
from transfer_queue.sampler.numeric_tags import not_a_number_error
from transfer_queue.sampler.ready_views import RankKey

if TYPE_CHECKING:
    from transfer_queue.core.tables.groups import GroupTable

Bits = dict[int, np.ndarray]


class Ranking:
    """The highest keys of the chunks of a bitmap."""

    def __init__(self, key: RankKey) -> None:
        self.key = key
        self.highest: dict[int, float] = {}
        """Chunk number -> the highest key of its rows in the bitmap; no entry if it has no such row."""
        self.dirty: set[int] = set()
        """The chunks whose rows, tags or bits have changed since their highest key was computed."""

    def refresh(self, bits: Bits, rows: RowTable, chunks: int | None = None) -> None:
        """Compute the highest keys of this number of changed chunks (None: all)."""
        for number in sorted(self.dirty)[:chunks]:
            chunk = rows.chunks.get(number)
            self.highest.pop(number, None)
            if chunk is not None and number in bits:
                keys = self._keys(bits[number], chunk)[1]
                if len(keys):
                    self.highest[number] = float(keys.max())
            self.dirty.discard(number)

    def _keys(self, bits: np.ndarray, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        """Return where the bitmap has rows in a chunk, and their keys. Raise InvalidArgumentError for a wrong tag."""
        at = bits.view(bool).nonzero()[0]
        wrong = chunk.wrong.get(self.key.tag)
        if wrong:
            for place in sorted(wrong.intersection(at.tolist())):
                assert chunk.tags is not None
                raise not_a_number_error(int(chunk.index[place]), self.key.tag, chunk.tags.row(place)[self.key.tag])
        return at, self.key.keys_of(chunk.numbers[self.key.tag][at], chunk.index[at] if self.key.aging else at)

    def highest_positions(self, bits: Bits, rows: RowTable, count: int) -> np.ndarray:
        """Return the positions of the `count` highest rows, or all if fewer: by key, descending, then by position."""
        self.refresh(bits, rows)
        numbers = np.fromiter(self.highest, "i8", len(self.highest))
        highest = np.fromiter(self.highest.values(), "f8", len(self.highest))
        # each chunk has at least one row, so `count` chunks contain enough rows, and no lower chunk is needed
        order = np.lexsort((numbers, -highest))[:count]
        least = highest[order[-1]] if len(order) == count else -np.inf
        positions, keys = np.zeros(0, "i8"), np.zeros(0)
        start, step = 0, 1
        while start < len(order):
            first = order[start]
            if len(keys) == count and (highest[first], -numbers[first] << CHUNK_BITS) < (keys[-1], -positions[-1]):
                break  # neither this chunk nor a later one contains a higher row
            parts, values = [positions], [keys]
            for number in numbers[order[start : start + step]].tolist():
                at, key_values = self._keys(bits[number], rows.chunks[number])
                good = key_values >= least
                parts.append(at[good] + (number << CHUNK_BITS))
                values.append(key_values[good])
            positions, keys = _highest(np.concatenate(parts), np.concatenate(values), count)
            if len(keys) == count:
                least = keys[-1]
            start, step = start + step, 2 * step
        return positions

    def positions_above(self, bits: Bits, rows: RowTable, bound: float) -> np.ndarray:
        """Return the positions of the rows whose key is above the bound, ascending."""
        self.refresh(bits, rows)
        parts = []
        for number in sorted(number for number, most in self.highest.items() if most > bound):
            at, keys = self._keys(bits[number], rows.chunks[number])
            parts.append(at[keys > bound] + (number << CHUNK_BITS))
        return np.concatenate(parts) if parts else np.zeros(0, "i8")


def _highest(positions: np.ndarray, keys: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` highest positions and their keys: by key, descending, then by position."""
    if len(keys) > 2 * count:
        least = np.partition(keys, len(keys) - count)[len(keys) - count]
        above = np.flatnonzero(keys > least)
        equal = np.flatnonzero(keys == least)
        first = equal[np.argsort(positions[equal], kind="stable")[: count - len(above)]]
        kept = np.concatenate([above, first])
        positions, keys = positions[kept], keys[kept]
    order = np.lexsort((positions, -keys))[:count]
    return positions[order], keys[order]


PART = CHUNK  # rows whose groups are marked in one step
MANY = 32  # if more groups change together, they are removed from a list in one step


class CompleteGroups(ABC):
    """The groups of `size` whose members are all ready."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.grown: set[int] | None = None
        """The groups that gained ready members, until a caller of `take_grown_groups` removes them; None before a
        call.
        """
        self.bits: dict[int, np.ndarray] = {}
        """Chunk number -> 1 for the rows of complete groups; kept once there is a ranking."""
        self.rankings: dict[RankKey, Ranking] = {}
        """The rankings of the rows of complete groups."""
        self.uncounted: dict[int, None] = {}
        """The chunks whose ready rows are not counted yet, in order; empty once all are."""
        self.unmarked: list[list[int]] = []
        """Lists of groups which must still be marked in `bits` if they are complete; the next list is at the end."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of complete groups."""

    @abstractmethod
    def first_groups(self, count: int) -> list[int]:
        """Return the numbers of the first `count` complete groups, ordered by their first member."""

    @abstractmethod
    def ready_counts(self) -> dict[int, int]:
        """Return the number of ready members of each group that has any."""

    @abstractmethod
    def _has(self, group: int) -> int:
        """Return how many members of the group are ready."""

    @abstractmethod
    def _add(self, positions: np.ndarray, step: int, groups: GroupTable) -> None:
        """Record that rows, at least one, became ready (step 1) or not ready (step -1)."""

    @abstractmethod
    def update_group(self, group: int, delta: int, groups: GroupTable) -> None:
        """Record that a group has `delta` more ready members, or that its size has changed."""

    def update_rows(self, on: np.ndarray, off: np.ndarray, groups: GroupTable) -> None:
        """Record that rows became ready (`on`) and not ready (`off`)."""
        for positions, step in ((on, 1), (off, -1)):
            if len(positions):
                self._add(positions, step, groups)

    def is_partial(self, group: int) -> bool:
        """Return whether some members of the group are ready, but fewer than `size`."""
        return 0 < self._has(group) < self.size

    def take_grown_groups(self) -> set[int]:
        """Return the groups with new ready members. The caller removes those that it does not need to see again."""
        if self.grown is None:
            self.grown = self.ready_counts().keys() - set(self.first_groups(len(self)))
        return self.grown

    def ranking(self, key: RankKey, rows: RowTable, groups: GroupTable) -> Ranking:
        """Return the ranking of the rows of complete groups by this key. It is made at first use, and then kept."""
        ranking = self.begin_ranking(key, rows)
        self.mark(groups, len(self.unmarked))
        return ranking

    def begin_ranking(self, key: RankKey, rows: RowTable) -> Ranking:
        """Return the same ranking, of the rows that are marked so far."""
        ranking = self.rankings.get(key)
        if ranking is None:
            rows.watch(key.tag)
            if not self.rankings:
                complete, step = self.first_groups(len(self)), max(1, PART // self.size)
                self.unmarked = [complete[at : at + step] for at in range(0, len(complete), step)][::-1]
            ranking = self.rankings[key] = Ranking(key)
            ranking.dirty.update(self.bits)
        return ranking

    def mark(self, groups: GroupTable, parts: int) -> None:
        """Mark this number of lists of groups, each group as it is now."""
        for _ in range(min(parts, len(self.unmarked))):
            among = self.unmarked.pop()
            whole = [group for group in among if 0 < self._has(group) == groups.size_of(group, self.size)]
            self._mark(groups.members_of(whole, self.size), 1)

    def _mark(self, positions: np.ndarray, bit: int) -> None:
        """Set the bits of these positions, which ascend."""
        chunks = positions >> CHUNK_BITS
        edges = np.flatnonzero(np.diff(chunks, prepend=-1))
        for part in np.split(positions, edges[1:]) if len(positions) else ():
            key = int(part[0]) >> CHUNK_BITS
            bits = self.bits.get(key)
            if bits is None:
                if not bit:
                    continue  # the chunk was removed
                bits = self.bits[key] = np.zeros(CHUNK, "u1")
            bits[part & MASK] = bit
            for ranking in self.rankings.values():
                ranking.dirty.add(key)


class CompleteOrderedGroups(CompleteGroups):
    """Complete groups by order of reservation. The group of a row is its position divided by `size`."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.counts: dict[int, np.ndarray] = {}
        """Number of a chunk of groups -> the ready members of each; no entry if there are none."""
        self.full: dict[int, int] = {}
        """Number of a chunk of groups -> how many of them are complete; no entry if there are none."""
        self.keys: list[int] = []
        """The keys of `full`, ascending."""
        self.total = 0
        """The number of complete groups."""

    def __len__(self) -> int:
        return self.total

    def first_groups(self, count: int) -> list[int]:
        """See `CompleteGroups`."""
        groups: list[int] = []
        for key in self.keys:
            if len(groups) >= count:
                break
            at = (self.counts[key] == self.size).nonzero()[0][: count - len(groups)]
            groups += (at + (key << CHUNK_BITS)).tolist()
        return groups

    def _has(self, group: int) -> int:
        column = self.counts.get(group >> CHUNK_BITS)
        return 0 if column is None else int(column[group & MASK])

    def ready_counts(self) -> dict[int, int]:
        """See `CompleteGroups`."""
        counts: dict[int, int] = {}
        for key, column in self.counts.items():
            at = column.nonzero()[0]
            counts.update(zip((at + (key << CHUNK_BITS)).tolist(), column[at].tolist(), strict=True))
        return counts

    def update_group(self, group: int, delta: int, groups: GroupTable) -> None:
        """See `CompleteGroups`."""
        if delta:
            self._add(np.full(abs(delta), group * self.size), 1 if delta > 0 else -1, groups)

    def _add(self, positions: np.ndarray, step: int, groups: GroupTable) -> None:
        names, members = count_values(positions // self.size)
        if step > 0 and self.grown is not None:
            self.grown.update(names.tolist())
        for key, where in runs_of(names >> CHUNK_BITS):
            column = self.counts.get(key)
            if column is None:
                column = self.counts[key] = np.zeros(CHUNK, "i4")
            entries = names[where] & MASK
            before = column[entries]
            after = before + step * members[where]
            column[entries] = after
            was, now = before == self.size, after == self.size
            self._count(key, int(np.count_nonzero(now)) - int(np.count_nonzero(was)))
            if self.rankings:
                for changed, bit in ((now & ~was, 1), (was & ~now, 0)):
                    numbers = names[where][changed].tolist()
                    if numbers:
                        self._mark(groups.members_of(numbers, self.size), bit)
            if step < 0 and not column.any():
                del self.counts[key]

    def _count(self, key: int, delta: int) -> None:
        if not delta:
            return
        self.total += delta
        count = self.full.get(key, 0) + delta
        if not count:
            del self.full[key]
            del self.keys[bisect_left(self.keys, key)]
            return
        if key not in self.full:
            insort(self.keys, key)
        self.full[key] = count


class CompleteDeclaredGroups(CompleteGroups):
    """Complete declared groups."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.counts: dict[int, int] = {}
        """Group -> number of ready members."""
        self.order: list[tuple[int, int]] = []
        """(first position, group) of the complete groups, ascending."""

    def __len__(self) -> int:
        return len(self.order)

    def first_groups(self, count: int) -> list[int]:
        """See `CompleteGroups`."""
        return [group for _, group in islice(self.order, count)]

    def ready_counts(self) -> dict[int, int]:
        """See `CompleteGroups`."""
        return self.counts

    def _has(self, group: int) -> int:
        return self.counts.get(group, 0)

    def _count(self, group: int, delta: int) -> None:
        now = self.counts.get(group, 0) + delta
        if now:
            self.counts[group] = now
        else:
            self.counts.pop(group, None)

    def _add(self, positions: np.ndarray, step: int, groups: GroupTable) -> None:
        names, counts = np.unique(groups.groups_of(positions, self.size), return_counts=True)
        names, counts = names[names >= 0], counts[names >= 0]
        if step < 0 and len(names) > MANY:
            self._many_left(names.tolist(), counts.tolist(), groups)
            return
        for group, count in zip(names.tolist(), counts.tolist(), strict=True):
            self.update_group(group, step * count, groups)

    def _many_left(self, names: list[int], counts: list[int], groups: GroupTable) -> None:
        """Record that members of many groups became not ready. None of these groups is complete any more."""
        for group, count in zip(names, counts, strict=True):
            self._count(group, -count)
        firsts = [groups.first_position(group, self.size) for group in names]
        start = bisect_left(self.order, (min(firsts), -1))
        stop = bisect_left(self.order, (max(firsts) + 1, -1))
        left, among = set(names), self.order[start:stop]
        self.order[start:stop] = [entry for entry in among if entry[1] not in left]
        if self.rankings:
            incomplete = [group for _, group in among if group in left]
            self._mark(np.sort(groups.members_of(incomplete, self.size)), 0)

    def update_group(self, group: int, delta: int, groups: GroupTable) -> None:
        """See `CompleteGroups`."""
        self._count(group, delta)
        if delta > 0 and self.grown is not None:
            self.grown.add(group)
        entry = (groups.first_position(group, self.size), group)
        at = bisect_left(self.order, entry)
        inside = at < len(self.order) and self.order[at] == entry
        wanted = groups.size_of(group, self.size)
        whole = wanted > 0 and self.counts.get(group, 0) == wanted
        if inside and not whole:
            del self.order[at]
        elif whole and not inside:
            insort(self.order, entry)
        if self.rankings and inside != whole:
            self._mark(groups.members(group, self.size), 1 if whole else 0)
