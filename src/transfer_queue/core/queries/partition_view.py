"""Lists the keys or the samples of a partition in pages, so that a million of them delay no other request.

It also counts the samples that wait for a task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.change_feed import tag_matcher
from transfer_queue.core.tables.row_table import CHUNK_BITS
from transfer_queue.messages.queries import (
    Backlog,
    KeysReply,
    ListKeys,
    ReadBacklog,
    SnapshotReply,
    TakeSnapshot,
)

PAGE_KEYS = 2048  # keys of one reply, which take about two milliseconds
SCANNED_ROWS = 16384  # live rows that are read for one reply
ROWS_OF_A_CHUNK = 16  # live rows that take as long as the search of a chunk for them
ROWS_OF_A_PARTITION = 16  # live rows that take as long as the step to another partition

Tag = dict[str, Any]


@handles(ReadBacklog, reads=True)
def handle_read_backlog(context: ControllerContext, caller: Caller, request: ReadBacklog) -> Backlog:
    """Return how many rows of a partition wait for a task, and how many are not done."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        return Backlog(0, 0, 0, False)
    claimed = partition.claimed.get(request.task, 0)
    waiting = partition.row_count - partition.tasks.get(request.task, 0) - claimed
    return Backlog(waiting, claimed, partition.undone, partition.sealed, partition.options.max_rows)


@handles(ListKeys, reads=True)
def handle_list_keys(context: ControllerContext, caller: Caller, request: ListKeys) -> KeysReply:
    """Return the next page of keys with their tags, in order of creation, which is the order of positions."""
    names = list(context.state.partitions) if request.partitions is None else request.partitions
    matches = tag_matcher(request.where) if request.where else None
    page: dict[str, dict[str, Tag]] = {}
    keys, rows = PAGE_KEYS, SCANNED_ROWS
    made, start = request.made, request.start
    for number, name in enumerate(names):
        if number and (keys <= 0 or rows <= 0):
            return KeysReply(page, names[number:])
        partition = context.state.partitions.get(name)
        if partition is not None and made in (None, partition.changes.made):
            listed = page[name] = {}
            for cost, position, key, tag in _rows_with_keys(partition, start):
                if keys <= 0 or rows <= 0:
                    return KeysReply(page, names[number:], partition.changes.made, position)
                rows -= cost
                if key is not None and (matches is None or matches(tag)):
                    listed[key] = tag
                    keys -= 1
        rows -= ROWS_OF_A_PARTITION
        made, start = None, 0  # if the listed partition was dropped, a newer one of its name is not listed
    return KeysReply(page)


def _rows_with_keys(partition: Partition, start: int) -> Iterator[tuple[int, int, str | None, Tag]]:
    """Iterate over the live rows from a position on: what it cost to find the row, its position, key and tag."""
    for number, chunk in partition.rows.chunks.items():
        first = number << CHUNK_BITS
        if chunk.keys is None or first + chunk.size <= start:
            continue
        tags, cost = chunk.tags, 1 + ROWS_OF_A_CHUNK
        begin = max(0, start - first)
        for at in (np.flatnonzero(chunk.alive[begin : chunk.size]) + begin).tolist():
            yield cost, first + at, chunk.keys[at], (tags[at] if tags is not None else None) or {}
            cost = 1


SNAPSHOT_ROWS = 4096  # rows of one reply, which take about two milliseconds


@handles(TakeSnapshot, reads=True)
def handle_take_snapshot(context: ControllerContext, caller: Caller, request: TakeSnapshot) -> SnapshotReply:
    """Return the next page of samples. Positions ascend like global indexes."""
    partition = context.state.partitions.get(request.partition)
    if partition is None or request.made not in (None, partition.changes.made):
        return SnapshotReply(known=False)
    live = partition.rows.live_positions()
    first = int(live.searchsorted(request.start))
    positions = live[first : first + SNAPSHOT_ROWS]
    more = first + SNAPSHOT_ROWS < len(live)
    fields = list(partition.fields)
    keys = partition.keys_of(positions)
    return SnapshotReply(
        known=True,
        made=partition.changes.made,
        rows=partition.rows.indexes_of(positions).tobytes(),
        fields=fields,
        produced=partition.produced_flags(fields, positions).tobytes(),
        consumed={task: partition.consumed_flags(task, positions).tobytes() for task in partition.tasks},
        keys=keys if any(key is not None for key in keys) else None,
        tags=partition.tags_of(positions),
        start=int(positions[-1]) + 1 if more else None,
    )
