"""Which groups a task could be given whole, kept up to date beside a ready set.

Groups by order of reservation are counted in columns, like rows; declared groups, which may lie anywhere and are
ordered by their first member, in a dict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from transfer_queue.core.ready.rankings import Ranking
from transfer_queue.core.tables.row_table import CHUNK, CHUNK_BITS, MASK, RowTable, runs_of
from transfer_queue.sampler.ready_views import RankKey

if TYPE_CHECKING:
    from transfer_queue.core.tables.group_table import GroupTable

PART = CHUNK  # rows whose groups are marked in one go
MANY = 32  # groups that change at once are taken out of a list in one go


def counted(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each of these numbers once, ascending, and how often it is there."""
    low = int(numbers.min())
    if int(numbers.max()) - low > 8 * len(numbers):
        return np.unique(numbers, return_counts=True)
    counts = np.bincount(numbers - low)
    there = counts.nonzero()[0]
    return there + low, counts[there]


class CompleteGroups(ABC):
    """The groups of `size` all of whose members are ready.

    grown: groups that gained ready members since `grown_groups` was last asked; None until then.
    rankings: of the rows of whole groups; bits: chunk number -> 1 for these rows, kept once there is a ranking.
    uncounted: chunks whose ready rows are not counted yet, in order; none once it is made. unmarked: groups, in parts,
    of which those that are whole have still to be marked in `bits`, the last part next.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.grown: set[int] | None = None
        self.bits: dict[int, np.ndarray] = {}
        self.rankings: dict[RankKey, Ranking] = {}
        self.uncounted: dict[int, None] = {}
        self.unmarked: list[list[int]] = []

    @abstractmethod
    def __len__(self) -> int:
        """How many they are."""

    @abstractmethod
    def first(self, count: int) -> list[int]:
        """The numbers of the first ones, by their first member."""

    @abstractmethod
    def counted(self) -> dict[int, int]:
        """Ready members of each group that has any."""

    @abstractmethod
    def partial(self, group: int) -> bool:
        """Whether some of its members are ready, but fewer than `size`."""

    @abstractmethod
    def change(self, on: np.ndarray, off: np.ndarray, groups: GroupTable) -> None:
        """Rows became ready (on) and unready (off)."""

    @abstractmethod
    def joined(self, group: int, delta: int, groups: GroupTable) -> None:
        """A group has `delta` ready members more, or its size has changed."""

    @abstractmethod
    def parts(self) -> list[list[int]]:
        """The whole groups in parts of a few thousand rows."""

    @abstractmethod
    def whole_of(self, numbers: list[int], groups: GroupTable) -> list[int]:
        """Those of these groups that are whole."""

    @abstractmethod
    def partials(self) -> set[int]:
        """The groups that have ready members and are not whole."""

    def grown_groups(self) -> set[int]:
        """Groups with ready members that the caller has not seen; it takes out what it needs to see no more."""
        if self.grown is None:
            self.grown = self.partials()
        return self.grown

    def ranking(self, key: RankKey, rows: RowTable, groups: GroupTable) -> Ranking:
        """The rows of whole groups by this key; made at first use, then kept."""
        found = self.ranked(key, rows)
        self.mark(groups, len(self.unmarked))
        return found

    def ranked(self, key: RankKey, rows: RowTable) -> Ranking:
        """The same, of the rows that were marked so far."""
        found = self.rankings.get(key)
        if found is None:
            rows.watch(key.tag)
            if not self.rankings:
                self.unmarked = self.parts()[::-1]
            found = self.rankings[key] = Ranking(key)
            found.dirty.update(self.bits)
        return found

    def mark(self, groups: GroupTable, parts: int) -> None:
        """Marks so many parts; groups that became or were whole meanwhile are marked as they are now."""
        for _ in range(min(parts, len(self.unmarked))):
            whole = self.whole_of(self.unmarked.pop(), groups)
            self._mark(groups.members_of(whole, self.size), 1)

    def _mark(self, positions: np.ndarray, bit: int) -> None:
        """positions: ascending."""
        chunks = positions >> CHUNK_BITS
        edges = np.flatnonzero(np.diff(chunks, prepend=-1))
        for part in np.split(positions, edges[1:]) if len(positions) else ():
            key = int(part[0]) >> CHUNK_BITS
            bits = self.bits.get(key)
            if bits is None:
                if not bit:
                    continue  # it was dropped
                bits = self.bits[key] = np.zeros(CHUNK, "u1")
            bits[part & MASK] = bit
            for ranking in self.rankings.values():
                ranking.dirty.add(key)


class CompleteOrderedGroups(CompleteGroups):
    """Of groups by order of reservation: that of a row is its position divided by `size`.

    counts: number of a chunk of groups -> their ready members, no entry where none has any. full: the same -> how many
    of them are whole, no entry where none is. keys: of `full`, ascending. total: all that are whole.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.counts: dict[int, np.ndarray] = {}
        self.full: dict[int, int] = {}
        self.keys: list[int] = []
        self.total = 0

    def __len__(self) -> int:
        return self.total

    def first(self, count: int) -> list[int]:
        """See `CompleteGroups`."""
        found: list[int] = []
        for key in self.keys:
            if len(found) >= count:
                break
            at = (self.counts[key] == self.size).nonzero()[0][: count - len(found)]
            found += (at + (key << CHUNK_BITS)).tolist()
        return found

    def parts(self) -> list[list[int]]:
        """See `CompleteGroups`."""
        found = []
        for key in self.keys:
            numbers = ((self.counts[key] == self.size).nonzero()[0] + (key << CHUNK_BITS)).tolist()
            step = max(1, PART // self.size)
            found += [numbers[start : start + step] for start in range(0, len(numbers), step)]
        return found

    def whole_of(self, numbers: list[int], groups: GroupTable) -> list[int]:
        """See `CompleteGroups`."""
        return [number for number in numbers if self._has(number) == self.size]

    def partials(self) -> set[int]:
        """See `CompleteGroups`."""
        found: set[int] = set()
        for key, column in self.counts.items():
            at = ((column > 0) & (column < self.size)).nonzero()[0]
            found.update((at + (key << CHUNK_BITS)).tolist())
        return found

    def _has(self, group: int) -> int:
        """How many of its members are ready."""
        column = self.counts.get(group >> CHUNK_BITS)
        return 0 if column is None else int(column[group & MASK])

    def counted(self) -> dict[int, int]:
        """See `CompleteGroups`."""
        found: dict[int, int] = {}
        for key, column in self.counts.items():
            at = column.nonzero()[0]
            found.update(zip((at + (key << CHUNK_BITS)).tolist(), column[at].tolist(), strict=True))
        return found

    def partial(self, group: int) -> bool:
        """See `CompleteGroups`."""
        return 0 < self._has(group) < self.size

    def change(self, on: np.ndarray, off: np.ndarray, groups: GroupTable) -> None:
        """See `CompleteGroups`."""
        for positions, step in ((on, 1), (off, -1)):
            if len(positions):
                self._add(positions, step, groups)

    def joined(self, group: int, delta: int, groups: GroupTable) -> None:
        """See `CompleteGroups`."""
        if delta:
            self._add(np.full(abs(delta), group * self.size), 1 if delta > 0 else -1, groups)

    def _add(self, positions: np.ndarray, step: int, groups: GroupTable) -> None:
        """These rows became ready (step 1) or unready (-1)."""
        names, members = counted(positions // self.size)
        if step > 0 and self.grown is not None:
            self.grown.update(names.tolist())
        for key, where in runs_of(names >> CHUNK_BITS):
            column = self.counts.get(key)
            if column is None:
                column = self.counts[key] = np.zeros(CHUNK, "i4")
            mine = names[where] & MASK
            before = column[mine]
            after = before + step * members[where]
            column[mine] = after
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
    """Of declared groups. counts: ready members by group. order: (first position, group) of whole ones, ascending."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.counts: dict[int, int] = {}
        self.order: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.order)

    def first(self, count: int) -> list[int]:
        """See `CompleteGroups`."""
        return [group for _, group in islice(self.order, count)]

    def parts(self) -> list[list[int]]:
        """See `CompleteGroups`."""
        numbers, step = self.first(len(self)), max(1, PART // self.size)
        return [numbers[start : start + step] for start in range(0, len(numbers), step)]

    def whole_of(self, numbers: list[int], groups: GroupTable) -> list[int]:
        """See `CompleteGroups`."""
        return [number for number in numbers if 0 < self.counts.get(number, 0) == groups.size_of(number, self.size)]

    def partials(self) -> set[int]:
        """See `CompleteGroups`."""
        return self.counts.keys() - {group for _, group in self.order}

    def counted(self) -> dict[int, int]:
        """See `CompleteGroups`."""
        return self.counts

    def partial(self, group: int) -> bool:
        """See `CompleteGroups`."""
        return self.counts.get(group, self.size) < self.size

    def change(self, on: np.ndarray, off: np.ndarray, groups: GroupTable) -> None:
        """See `CompleteGroups`."""
        for positions, step in ((on, 1), (off, -1)):
            if not len(positions):
                continue
            names, counts = np.unique(groups.of(positions, self.size), return_counts=True)
            names, counts = names[names >= 0], counts[names >= 0]
            if step < 0 and len(names) > MANY:
                self._many_left(names.tolist(), counts.tolist(), groups)
                continue
            for group, count in zip(names.tolist(), counts.tolist(), strict=True):
                self.joined(group, step * count, groups)

    def _many_left(self, names: list[int], counts: list[int], groups: GroupTable) -> None:
        """Members of many groups became unready: none of these is whole any more."""
        for group, count in zip(names, counts, strict=True):
            now = self.counts.get(group, 0) - count
            if now:
                self.counts[group] = now
            else:
                self.counts.pop(group, None)
        firsts = [groups.first_of(group, self.size) for group in names]
        start = bisect_left(self.order, (min(firsts), -1))
        stop = bisect_left(self.order, (max(firsts) + 1, -1))
        left, among = set(names), self.order[start:stop]
        self.order[start:stop] = [entry for entry in among if entry[1] not in left]
        if self.rankings:
            gone = [group for _, group in among if group in left]
            self._mark(np.sort(groups.members_of(gone, self.size)), 0)

    def joined(self, group: int, delta: int, groups: GroupTable) -> None:
        """See `CompleteGroups`."""
        now = self.counts.get(group, 0) + delta
        if now:
            self.counts[group] = now
        else:
            self.counts.pop(group, None)
        if delta > 0 and self.grown is not None:
            self.grown.add(group)
        entry = (groups.first_of(group, self.size), group)
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
