"""Decides which rows end: cleared, dropped for a reason, freed. Reads the state, changes nothing, gives records."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.row_table import CHUNK_BITS, ascending, indexes_in
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.puts import Drop

UNBORN = "of a dropped group"
GONE = "reserved by a client that is gone"


def clear_rows(state: State, name: str, indexes: np.ndarray) -> list[r.AnyRecord]:
    """Clears those of these rows that live."""
    partition = state.partitions.get(name)
    if partition is None or not len(indexes):
        return []
    indexes = ascending(indexes)
    live = indexes[partition.rows.positions_of(indexes) >= 0]
    return [r.RowsCleared(name, live.tobytes())] if len(live) else []


def clear_keys(state: State, name: str, keys: list[str]) -> list[r.AnyRecord]:
    """Clears the rows of those of these keys that are known."""
    partition = state.partitions.get(name)
    if partition is None:
        return []
    positions = np.array(sorted({partition.keys[key] for key in keys if key in partition.keys}), "i8")
    if not len(positions):
        return []
    return [r.RowsCleared(name, partition.rows.indexes_of(positions).tobytes())]


def drop(state: State, request: Drop) -> tuple[list[r.AnyRecord], int]:
    """Records, and how many rows go. Unknown rows and groups are fine, as they may have been cleared meanwhile."""
    if not request.reason:
        raise InvalidArgumentError("a drop needs a reason: it is counted under it")
    partition = state.partitions.get(request.partition)
    if partition is None:
        return [], 0
    positions = partition.rows.positions_of(ascending(indexes_in(request.rows)))
    positions = positions[positions >= 0]
    unborn: list[tuple[str, int]] = []
    members: list[int] = []
    for name in dict.fromkeys(request.groups):
        group = partition.groups.by_name.get(name)
        if group is None:
            continue
        members += [p for p in group.members if not partition.rows.dead(range(p, p + 1))]
        if partition.groups.size is not None and len(group.members) < partition.groups.size:
            unborn.append((name, partition.groups.size - len(group.members)))
    positions = np.union1d(positions, np.array(members, "i8"))
    if not len(positions):
        return [], 0
    rows = partition.rows.indexes_of(positions)
    return [r.RowsDropped(request.partition, rows.tobytes(), request.reason, unborn)], len(rows)


def unborn(partition: Partition | None, groups: list[str] | None, rows: np.ndarray) -> list[r.AnyRecord]:
    """Drops those of these rows, which are just arriving, whose groups were dropped before."""
    if partition is None or groups is None or not partition.groups.unborn:
        return []
    late = [i for i, name in enumerate(groups) if name in partition.groups.unborn]
    if not late:
        return []
    left = {groups[i]: partition.groups.unborn[groups[i]] for i in late}
    for i in late:
        left[groups[i]] -= 1
    return [r.RowsDropped(partition.name, rows[late].tobytes(), UNBORN, list(left.items()))]


def never_put(partition: Partition, connected: Collection[str]) -> list[r.AnyRecord]:
    """Drops what clients that are gone have reserved in a partition that is sealed now, and never put."""
    gone = [number for client, number in partition.owners.items() if client not in connected]
    if not gone:
        return []
    parts = []
    for key, chunk in partition.rows.chunks.items():
        empty = (chunk.alive[: chunk.size] == 1) & np.isin(chunk.owner[: chunk.size], gone)
        for blocks, _ in chunk.field.values():
            empty &= blocks[: chunk.size] == 0
        found = np.flatnonzero(empty)
        if len(found) and chunk.tags is not None:  # tags that nobody has looked at stay as they were saved
            found = np.array([at for at in found.tolist() if not chunk.tags[at]], "i8")
        parts.append(found + (key << CHUNK_BITS))
    positions = np.concatenate(parts) if parts else np.zeros(0, "i8")
    if not len(positions):
        return []
    return [r.RowsDropped(partition.name, partition.rows.indexes_of(positions).tobytes(), GONE)]


def never_taken(partition: Partition) -> list[r.AnyRecord]:
    """Clears the rows of a loaded state that were pre-allocated and not taken when it was saved.

    They may have been taken since, and a global index names one sample for ever.
    """
    if not partition.waiting:
        return []
    rows = partition.rows.indexes_of(np.array(partition.waiting, "i8"))
    return [r.RowsCleared(partition.name, rows.tobytes())]


def finished(partition: Partition, task: str, client: str, rows: np.ndarray) -> list[r.AnyRecord]:
    """The client is through with these rows, where it holds them; those that nobody needs any more are freed."""
    mine, times = partition.holds.held_by(task, client, rows)
    if not len(mine):
        return []
    positions = partition.rows.positions_of(mine)
    there = positions >= 0
    free = mine[there][partition.holds.done(positions[there], task, times[there])]
    return [r.RowsFinished(partition.name, task, client, mine.tobytes(), free.tobytes())]
