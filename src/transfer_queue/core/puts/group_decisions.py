"""Decides which rows of a put join declared groups, and which are late for a group that was dropped.

A dropped group is over. If it was not complete, its other members may still arrive, and then a producer may put the
whole group once more under the same id. A partition with `group_size` tells the two apart by completeness: a put of all
members of a group begins a new group, because at least one member of the dropped one was put before, so that fewer than
all are missing of it. A put of at most as many members as are missing is late: its rows are dropped when they arrive.
Any other put cannot be told apart, and is refused. So a new attempt must be put in one call, or under another id; no
attempt needs a number. Puts that a client has joined are looked at one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.errors import InvalidArgumentError

LATE = "of a dropped group"
"""The reason under which late members are dropped. Saved states of older releases contain it, too."""


class Joining(NamedTuple):
    """What becomes of the rows of a put, in their order."""

    groups: list[str | None] | None
    """The group that each row joins, or is in already; None for a late row. None if the put declares no groups."""
    late: Sequence[int]
    """The places in the put of the rows that are late."""
    missing: dict[str, int]
    """Id of a dropped group with late rows in this put -> the number of members that are missing after the put."""

    def drop_late(self, partition: str, rows: np.ndarray) -> list[r.AnyRecord]:
        """Return the record that drops the late rows. rows: the global indexes of all rows of the put."""
        if not self.late:
            return []
        return [r.RowsDropped(partition, rows[self.late].tobytes(), LATE, list(self.missing.items()))]

    def warning(self, partition: Partition) -> str | None:
        """Return the warning for the client that put late rows; None if there are none."""
        if not self.late:
            return None
        names = list(self.missing)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (
            f"{len(self.late)} samples of partition {partition.name!r} were dropped when they were put, because they "
            f"are late: their groups {names[:3]!r}{more} were dropped before. If they belong to a new attempt, put "
            f"all {partition.groups.size} samples of a group in one call, or give each attempt another group_id."
        )


NO_GROUPS = Joining(None, (), {})
"""The groups of a put that declares none."""


def join_groups(
    partition: Partition | None, groups: list[str] | None, rows: Sequence[int], puts: Sequence[int] = ()
) -> Joining:
    """Return which rows of a put join their groups.

    Args:
        partition: The partition; None if the put makes it.
        groups: The group of each row; None if the put declares none.
        rows: The position of each row; -1 for a new one.
        puts: The numbers of rows of the puts that were joined. Empty: one put.

    Raises:
        InvalidArgumentError: A row, which may be a new one, cannot become a member of its group.
    """
    if groups is None or partition is None:
        return NO_GROUPS if groups is None else Joining([*groups], (), {})
    table = partition.groups
    known = table.groups_of(np.array(rows, "i8"), 1).tolist() if table.explicit else [-1] * len(rows)
    for name, number in zip(groups, known, strict=True):
        if number >= 0 and table.declared[number].name != name:
            raise InvalidArgumentError(
                f"a sample of group {table.declared[number].name!r} cannot join group {name!r}; "
                f"the group of a sample cannot change"
            )
    if table.size is None:
        return Joining([*groups], (), {})
    members: Counter[str] = Counter()
    missing: dict[str, int] = {}
    joined: list[str | None] = []
    ends = np.cumsum(puts or [len(groups)]).tolist()
    for first, last in pairwise([0, *ends]):
        names, numbers = groups[first:last], known[first:last]
        arriving = Counter(name for name, number in zip(names, numbers, strict=True) if number < 0)
        late = {name for name, count in arriving.items() if _is_late(partition, name, count, members[name], missing)}
        members.update({name: count for name, count in arriving.items() if name not in late})
        joined += [None if number < 0 and name in late else name for name, number in zip(names, numbers, strict=True)]
    return Joining(joined, [place for place, name in enumerate(joined) if name is None], missing)


def _is_late(partition: Partition, name: str, count: int, joining: int, missing: dict[str, int]) -> bool:
    """Return whether a put of `count` members of a group is late, and note it in `missing`. See `Joining`.

    joining: the members that join the group with this request before.
    """
    table, size = partition.groups, partition.groups.size
    assert size is not None
    expected = missing.get(name, table.unborn.get(name, 0))
    group = table.by_name.get(name)
    members = joining + (len(group.members) if group else 0)
    if count < size and expected >= count:
        missing[name] = expected - count
        return True
    if members + count > size:
        raise InvalidArgumentError(
            f"group {name!r} of partition {partition.name!r} has at most {size} samples (group_size); it has "
            f"{members}, and this put adds {count}. Give the others another group_id."
        )
    if count < size and not members and expected:
        raise InvalidArgumentError(
            f"group {name!r} of partition {partition.name!r} was dropped while {expected} of its {size} samples were "
            f"missing, and this put adds {count}: it is neither late nor a whole new attempt. Put all {size} samples "
            f"of a new attempt in one call, or under another group_id."
        )
    return False
