"""Decides which rows a request clears or drops. Reads the state and returns records; changes nothing."""

from __future__ import annotations

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.put_withdrawal import are_undealt
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.row_table import indexes_in, sort_unique
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.puts import Drop


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
    members: list[int] = []
    for name in dict.fromkeys(request.groups):
        group = partition.groups.by_name.get(name)
        if group is not None:
            members += [p for p in group.members if not partition.rows.has_cleared(range(p, p + 1))]
    positions = np.union1d(positions, np.array(members, "i8"))
    if request.withdraws:
        positions = positions[are_undealt(partition, positions)]
    if not len(positions):
        return [], 0
    rows = partition.rows.indexes_of(positions)
    missing = [] if request.withdraws else partition.groups.missing_after(positions)
    return [r.RowsDropped(request.partition, rows.tobytes(), request.reason, missing, request.withdraws)], len(rows)
