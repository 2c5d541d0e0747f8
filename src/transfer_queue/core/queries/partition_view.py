"""Lists the keys or the samples of a partition in pages, so that a million of them delay no other request.

It also counts the samples that wait for a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer_queue.core.columns.tag_filter import matching_rows
from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.row_table import CHUNK_BITS, Chunk
from transfer_queue.messages.queries import (
    Backlog,
    KeysReply,
    ListKeys,
    ReadBacklog,
    SnapshotReply,
    TakeSnapshot,
)
from transfer_queue.messages.tag_table import StoredTags

PAGE_KEYS = 2048  # keys of one reply, which take about two milliseconds
SCANNED_ROWS = 16384  # live rows that are read for one reply
ROWS_OF_A_CHUNK = 16  # live rows that take as long as the search of a chunk for them
STEP_ROWS = 2048  # live rows that are read together
ROWS_OF_A_PARTITION = 16  # live rows that take as long as the step to another partition

Tag = dict[str, Any]


@handles(ReadBacklog, reads=True)
def handle_read_backlog(context: Context, caller: Caller, request: ReadBacklog) -> Backlog:
    """Return how many rows of a partition wait for a task, and how many are not done."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        return Backlog(0, 0, 0, False)
    claimed = partition.claimed.get(request.task, 0)
    waiting = partition.row_count - partition.tasks.get(request.task, 0) - claimed
    return Backlog(waiting, claimed, partition.undone, partition.sealed, partition.options.max_rows)


@handles(ListKeys, reads=True)
def handle_list_keys(context: Context, caller: Caller, request: ListKeys) -> KeysReply:
    """Return the next page of keys with their tags, in order of creation, which is the order of positions."""
    names = list(context.state.partitions) if request.partitions is None else request.partitions
    page = KeyPage()
    made, start = request.made, request.start
    for number, name in enumerate(names):
        if number and page.is_full:
            return page.reply(names[number:])
        partition = context.state.partitions.get(name)
        if partition is not None and made in (None, partition.changes.made):
            stopped = page.add(partition, start, request.where)
            if stopped is not None:
                return page.reply(names[number:], partition.changes.made, stopped)
        page.rows -= ROWS_OF_A_PARTITION
        made, start = None, 0  # if the listed partition was dropped, a newer one of its name is not listed
    return page.reply()


class KeyPage:
    """The keys of one reply, with their tags, and how many more it may have."""

    def __init__(self) -> None:
        self.keys = PAGE_KEYS
        """The number of keys that still fit."""
        self.rows = SCANNED_ROWS
        """The number of live rows that may still be read."""
        self._keys: dict[str, list[str]] = {}
        self._tags: dict[str, StoredTags] = {}

    @property
    def is_full(self) -> bool:
        """Whether nothing fits any more."""
        return self.keys <= 0 or self.rows <= 0

    def reply(self, left: Sequence[str] = (), made: int | None = None, start: int = 0) -> KeysReply:
        """Return the reply. The arguments are those of `KeysReply`."""
        return KeysReply(self._keys, self._tags, list(left), made, start)

    def add(self, partition: Partition, start: int, where: Tag) -> int | None:
        """Add the keys of live rows from a position on. Returns the position of the first row that does not fit."""
        listed = self._keys[partition.name] = []
        found: list[int] = []
        stopped = None
        for key, chunk in partition.rows.chunks.items():
            first = key << CHUNK_BITS
            if chunk.keys is None or first + chunk.size <= start:
                continue
            begin = max(0, start - first)
            live = np.flatnonzero(chunk.alive[begin : chunk.size]) + begin
            stopped = self._add_chunk(chunk, live, where, listed, found, first)
            if stopped is not None:
                break
        tags = partition.packed_tags_of(np.array(found, "i8"))
        if tags is not None:
            self._tags[partition.name] = tags
        return stopped

    def _add_chunk(
        self, chunk: Chunk, live: np.ndarray, where: Tag, listed: list[str], found: list[int], first: int
    ) -> int | None:
        """Add the keys of live rows of a chunk. Returns the position of the first row that does not fit."""
        assert chunk.keys is not None
        cost = ROWS_OF_A_CHUNK
        while len(live):
            if self.is_full:
                return first + int(live[0])
            step = min(self.rows, STEP_ROWS)
            at, live = live[:step], live[step:]
            self.rows -= len(at) + cost
            cost = 0
            fitting = at[matching_rows(chunk.tags, where, at)] if where else at
            for place in fitting.tolist():
                if self.keys <= 0:
                    return first + int(place)
                key = chunk.keys[place]
                if key is not None:
                    listed.append(key)
                    found.append(first + place)
                    self.keys -= 1
        return None


SNAPSHOT_ROWS = 4096  # rows of one reply, which take about two milliseconds


@handles(TakeSnapshot, reads=True)
def handle_take_snapshot(context: Context, caller: Caller, request: TakeSnapshot) -> SnapshotReply:
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
        tags=partition.packed_tags_of(positions),
        start=int(positions[-1]) + 1 if more else None,
    )
