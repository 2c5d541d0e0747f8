"""Decides which rows a request clears or drops. Reads the state and returns records; changes nothing."""

from __future__ import annotations

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.put_withdrawal import are_undealt
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.row_table import indexes_in, sort_unique
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.puts import Drop

UNBORN = "of a dropped group"  # saved states and the status of older releases count rows under this text


def clear_rows(state: State, name: str, indexes: np.ndarray) -> list[r.AnyRecord]:
    """Return the record that clears those of these rows that exist."""
    partition = state.partitions.get(name)
    if partition is None or not len(indexes):
        return []
    indexes = sort_unique(indexes)
    live = indexes[partition.rows.positions_of(indexes) >= 0]
    return [r.RowsCleared(name, live.tobytes())] if len(live) else []


def clear_keys(state: State, name: str, keys: list[str]) -> list[r.AnyRecord]:
    """Return the record that clears the rows of those of these keys that exist."""
    partition = state.partitions.get(name)
    if partition is None:
        return []
    positions = sort_unique(partition.positions_of_keys(keys))
    if not len(positions):
        return []
    return [r.RowsCleared(name, partition.rows.indexes_of(positions).tobytes())]


def drop_rows(state: State, request: Drop) -> tuple[list[r.AnyRecord], int]:
    """Return the records of a drop, and the number of dropped rows.

    Unknown rows and groups are ignored, because they may have been cleared meanwhile.
    """
    if not request.reason:
        raise InvalidArgumentError("reason must not be empty; dropped samples are counted under it")
    partition = state.partitions.get(request.partition)
    if partition is None:
        return [], 0
    positions = partition.rows.positions_of(sort_unique(indexes_in(request.rows)))
    positions = positions[positions >= 0]
    unborn: list[tuple[str, int]] = []
    members: list[int] = []
    for name in dict.fromkeys(request.groups):
        group = partition.groups.by_name.get(name)
        if group is None:
            continue
        members += [p for p in group.members if not partition.rows.has_cleared(range(p, p + 1))]
        if partition.groups.size is not None and len(group.members) < partition.groups.size:
            unborn.append((name, partition.groups.size - len(group.members)))
    positions = np.union1d(positions, np.array(members, "i8"))
    if request.withdraws:
        positions = positions[are_undealt(partition, positions)]
    if not len(positions):
        return [], 0
    rows = partition.rows.indexes_of(positions)
    dropped = r.RowsDropped(request.partition, rows.tobytes(), request.reason, unborn, request.withdraws)
    return [dropped], len(rows)


def drop_late_members(partition: Partition | None, groups: list[str] | None, rows: np.ndarray) -> list[r.AnyRecord]:
    """Return the record that drops those of these new rows whose groups were dropped before."""
    if partition is None or groups is None or not partition.groups.unborn:
        return []
    late = [i for i, name in enumerate(groups) if name in partition.groups.unborn]
    if not late:
        return []
    left = {groups[i]: partition.groups.unborn[groups[i]] for i in late}
    for i in late:
        left[groups[i]] -= 1
    return [r.RowsDropped(partition.name, rows[late].tobytes(), UNBORN, list(left.items()))]
