"""Which rows are the samples of one prompt, by declared group id or by order of reservation; and the group demand.

If any row of a partition was declared a member of a group, the partition has declared groups only, and its other rows
belong to no group. Otherwise the group of a row is its position divided by the sampler's group size, which clears do
not change. Groups are numbered; -1 means no group.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from transfer_queue.core.columns.kinds import Joined, join_columns, split_columns
from transfer_queue.core.columns.schema import (
    I8,
    Count,
    Persisted,
    counter,
    map_of,
    map_of_tuples,
    several,
    unique_dict,
)
from transfer_queue.core.tables.rows import CHUNK_BITS, RowTable


class Group:
    """A declared group."""

    __slots__ = ("cleared", "members", "name", "number")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.members: list[int] = []
        """The positions of the members in the order in which they joined, cleared ones included."""
        self.cleared = 0
        """The number of members that are cleared."""


def _group_columns(declared: dict[int, Group]) -> tuple[Any, ...]:
    groups = declared.values()
    return (
        [group.name for group in groups],
        np.array([group.number for group in groups], "i8"),
        np.array([group.cleared for group in groups], "i8"),
        join_columns([np.array(group.members, "i8") for group in groups]),
    )


def _groups(names: list[str], numbers: np.ndarray, cleared: np.ndarray, members: Joined) -> dict[int, Group]:
    groups = []
    for name, number, count, at in zip(names, numbers.tolist(), cleared.tolist(), split_columns(members), strict=True):
        group = Group(name, number)
        group.members = at.tolist()
        group.cleared = count
        groups.append((number, group))
    return unique_dict(groups)


class GroupTable(Persisted):
    """The groups of one partition."""

    declared: dict[int, Group] = several(
        {"names": list[str], "numbers": I8, "cleared": I8, "members": Joined}, dict, _group_columns, _groups
    )
    """The declared groups by number."""
    next_number: int = counter()
    unborn: dict[str, int] = map_of(str, Count)
    """Id of a dropped group -> the number of its members that are not put yet (`core.puts.group_decisions`)."""
    largest: int = counter()
    """The largest number of members that a declared group has ever had; the default group size of a sampler."""

    def __init__(self, rows: RowTable, size: int | None) -> None:
        super().__init__()
        self.rows = rows
        self.size = size
        """The number of members of each declared group; None if it is not known."""
        self.by_name: dict[str, Group] = {}
        """The declared groups by id. Derived."""
        self.broken = 0
        """The number of declared groups of which one member is cleared and another lives. Derived."""

    def derive(self) -> None:
        """Compute what is derived from the declared groups. A file may contain a `largest` that is too small."""
        self.by_name = {}
        for group in self.declared.values():
            self.by_name[group.name] = group
            self.broken += group.cleared > 0
            self.largest = max(self.largest, len(group.members))

    @property
    def explicit(self) -> bool:
        """Whether the partition has declared groups."""
        return self.next_number > 0

    def join(self, name: str, position: int) -> Group:
        """Make a row a member of a declared group."""
        group = self.by_name.get(name)
        if group is None:
            group = self.by_name[name] = Group(name, self.next_number)
            self.declared[group.number] = group
            self.next_number += 1
        group.members.append(position)
        self.largest = max(self.largest, len(group.members))
        chunk = self.rows.chunks[position >> CHUNK_BITS]
        chunk.group_column()[position & ((1 << CHUNK_BITS) - 1)] = group.number
        return group

    def take_over(self, other: GroupTable) -> None:
        """Take over the groups of a table with the same rows, but without their cleared members.

        The other table must not be used afterwards.
        """
        self.unborn = other.unborn
        if not other.declared:
            return
        for group in other.declared.values():
            if group.cleared:
                group.members = [member for member in group.members if not self.rows.has_cleared((member,))]
                group.cleared = 0
        self.declared, self.by_name, self.next_number = other.declared, other.by_name, other.next_number
        for key, chunk in other.rows.chunks.items():
            self.rows.chunks[key].group = chunk.group

    def leave(self, number: int) -> None:
        """Record that a member was cleared. The group is removed with its last member."""
        group = self.declared[number]
        group.cleared += 1
        if group.cleared == 1:
            self.broken += 1
        self._remove_if_cleared(group)

    def forget_member(self, number: int, position: int) -> None:
        """Remove a member as if it had never joined. The group is removed with its last member."""
        group = self.declared[number]
        group.members.remove(position)
        self._remove_if_cleared(group)

    def _remove_if_cleared(self, group: Group) -> None:
        if group.cleared == len(group.members):
            self.broken -= group.cleared > 0
            del self.declared[group.number]
            del self.by_name[group.name]

    def groups_of(self, positions: np.ndarray, size: int) -> np.ndarray:
        """Return the group number of each position, with groups of `size` if the partition has no declared groups."""
        if not self.explicit:
            return positions // size
        out = np.full(len(positions), -1, "i8")
        for _, chunk, at, where in self.rows.split(positions):
            if chunk.group is not None:
                out[where] = chunk.group[at]
        return out

    def size_of(self, group: int, size: int) -> int:
        """Return how many ready members make the group complete; 0 if it can never be complete."""
        if not self.explicit:
            return size
        declared = self.declared.get(group)
        wanted = self.size or size
        if declared is None or declared.cleared or len(declared.members) > wanted:
            return 0
        return wanted

    def is_orphaned(self, group: int, size: int, sealed: bool) -> bool:
        """Return whether a group can never be complete: a member is cleared, it is too large, or a seal came first."""
        if not self.explicit:
            first = group * size
            if first + size > self.rows.end:
                return sealed or self.rows.has_cleared(range(first, self.rows.end))
            return self.rows.has_cleared(range(first, first + size))
        wanted = self.size_of(group, size)
        return not wanted or (sealed and len(self.declared[group].members) < wanted)

    def count_orphaned(self, sealed: bool) -> int:
        """Return how many declared groups can never be complete, as far as their size is known."""
        least = self.size if sealed and self.size is not None else 0
        return sum(group.cleared > 0 or len(group.members) < least for group in self.declared.values())

    def with_members(self, positions: np.ndarray) -> np.ndarray:
        """Return these rows together with all other live members of their declared groups, ascending."""
        if not self.explicit:
            return positions
        numbers = np.unique(self.groups_of(positions, 1))
        members = [p for number in numbers.tolist() if number >= 0 for p in self.declared[number].members]
        alive = [p for p in members if not self.rows.has_cleared(range(p, p + 1))]
        return np.union1d(positions, np.array(alive, "i8"))

    def missing_after(self, positions: np.ndarray) -> list[tuple[str, int]]:
        """Return (id, members that were never put) of the incomplete groups that end when these rows are dropped."""
        if not self.explicit or self.size is None:
            return []
        numbers, counts = np.unique(self.groups_of(positions, 1), return_counts=True)
        ends = [
            group
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
            if number >= 0 and (group := self.declared[number]).cleared + count == len(group.members)
        ]
        return [(group.name, self.size - len(group.members)) for group in ends if len(group.members) < self.size]

    def first_position(self, group: int, size: int) -> int:
        """Return the position by which a group is ordered."""
        if not self.explicit:
            return group * size
        declared = self.declared.get(group)
        return declared.members[0] if declared else -1

    def members(self, group: int, size: int) -> np.ndarray:
        """Return the positions of the members of a group, ascending."""
        if not self.explicit:
            return np.arange(group * size, (group + 1) * size)
        return np.sort(np.array(self.declared[group].members, "i8"))

    def members_of(self, groups: list[int], size: int) -> np.ndarray:
        """Return the positions of the members of all these groups, ascending."""
        if not self.explicit:
            return np.sort((np.array(groups, "i8")[:, None] * size + np.arange(size)).ravel())
        return np.sort(np.fromiter(chain.from_iterable(self.declared[group].members for group in groups), "i8"))


class GroupQuotas(Persisted):
    """The group demand of tasks, and the promises of producers to make some of these groups.

    Filtering makes batches too small: dynamic sampling, as in DAPO, drops groups whose rewards are all equal. Producers
    ask how many groups are missing and make that many. What one producer has promised is not offered to another one.
    """

    groups: dict[str, int] = map_of(str, Count)
    """Task -> the number of groups that it wants to exist or to be in production."""
    promised: dict[tuple[str, str], int] = map_of_tuples((str, str), Count)
    """(task, client) -> rows of new groups that the client has promised and not yet begun."""

    def set_demand(self, task: str, groups: int) -> None:
        """Set the number of groups that a task wants; 0 removes its demand."""
        if groups:
            self.groups[task] = groups
        else:
            self.groups.pop(task, None)

    def promise(self, task: str, client: str, rows: int) -> None:
        """Add this number of rows to what a producer has promised a task; 0 withdraws its promise."""
        if rows:
            self.promised[task, client] = self.promised.get((task, client), 0) + rows
        else:
            self.promised.pop((task, client), None)

    def fulfil(self, client: str, rows: int) -> None:
        """Record that a producer has begun new rows, which fulfil its promises."""
        for key in [key for key in self.promised if key[1] == client]:
            self.promised[key] -= rows
            if self.promised[key] <= 0:
                del self.promised[key]

    def promised_rows(self, task: str) -> int:
        """Return the rows that producers have promised a task."""
        return sum(rows for (name, _), rows in self.promised.items() if name == task)
