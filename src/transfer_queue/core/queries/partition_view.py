"""Lists, counts and watches a partition, in steps so short that they delay no other request.

Keys or samples are listed in pages: there may be a million of them. The samples that wait for a task are counted, too.

Ranges of rows, called columns, are counted in steps of about a millisecond. A step is one request. It counts whole
chunks of the row table, until it has examined `CELLS` values.

A request that waits for changes is answered from the state.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import islice
from typing import Any, Union

import numpy as np

from transfer_queue.core.context import Context
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import RequestKey
from transfer_queue.core.tables.changes import is_first_watch, keys_or_none
from transfer_queue.core.tables.rows import CHUNK_BITS, CLAIMED, CONSUMED, Chunk, Indexer
from transfer_queue.core.tables.tags import matching_rows
from transfer_queue.messages.queries import (
    Backlog,
    ChangeReply,
    KeysReply,
    ListKeys,
    ReadBacklog,
    SnapshotReply,
    TakeSnapshot,
    Watch,
)
from transfer_queue.messages.reports.overview import MAX_COLUMNS, MAX_FIELDS, MAX_TASKS, ColumnCounts, CountColumns
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
        places: list[int] = []
        stopped = None
        for key, chunk in partition.rows.chunks.items():
            first = key << CHUNK_BITS
            if chunk.keys is None or first + chunk.size <= start:
                continue
            begin = max(0, start - first)
            live = np.flatnonzero(chunk.alive[begin : chunk.size]) + begin
            stopped = self._add_chunk(chunk, live, where, listed, places, first)
            if stopped is not None:
                break
        tags = partition.packed_tags_of(np.array(places, "i8"))
        if tags is not None:
            self._tags[partition.name] = tags
        return stopped

    def _add_chunk(
        self, chunk: Chunk, live: np.ndarray, where: Tag, listed: list[str], places: list[int], first: int
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
                    places.append(first + place)
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


CELLS = 1 << 18  # values of rows that a step examines
SKIPPED_ROWS = 256  # what a chunk outside of the columns costs, in rows
MAX_NAMES = 4096  # fields of a task
STATES = 4  # ready, claimed, consumed and skipped


@handles(CountColumns, reads=True)
def handle_count_columns(context: Context, caller: Caller, request: CountColumns) -> ColumnCounts:
    """Return the counts of the next rows of a partition."""
    partition = context.state.partitions.get(request.partition)
    if partition is None or request.made not in (None, partition.changes.made):
        return ColumnCounts(known=False)
    size = _group_size(context, partition) if request.group_task else 0
    count = _Count(partition, request, size)
    same = request.version == partition.version
    chunk, before = (None, 0) if same else count.step()
    return ColumnCounts(
        True, partition.changes.made, partition.version, same, partition.row_count, len(partition.waiting), size,
        count.column, count.index[: count.used].tobytes(), count.encoded(count.produced), count.encoded(count.lost),
        {task: [line.tobytes() for line in lines[:, : count.used]] for task, lines in count.tasks.items()},
        count.whole, count.lack_field, np.concatenate([np.zeros(0, "i8"), *count.parts]).tobytes(), chunk, before,
    )  # fmt: skip


def _group_size(context: Context, partition: Partition) -> int:
    """Return the samples of a group; 0 if the partition has no groups."""
    if partition.groups.explicit:
        return partition.groups.size or context.group_size_of(partition.name, None) or partition.groups.largest
    size = context.group_size_of(partition.name, None) or 0
    return size if size > 1 else 0


class _Count:
    """The counts of one step."""

    def __init__(self, partition: Partition, request: CountColumns, group_size: int) -> None:
        self._partition = partition
        self._request = request
        self._group_size = group_size
        self._last = min(request.last, request.first + request.width * MAX_COLUMNS)
        self._fields = list(islice(partition.fields, MAX_FIELDS))
        takes = {task: request.takes.get(task, []) for task in [*request.takes, *sorted(partition.tasks)]}
        self._takes: Mapping[str, list[str]] = {
            task: fields[:MAX_NAMES] for task, fields in islice(takes.items(), MAX_TASKS)
        }
        self.column = max(request.before - request.first, 0) // request.width
        """The first column of the step."""
        self.used = 0
        """The number of columns that have rows."""
        most = MAX_COLUMNS - min(self.column, MAX_COLUMNS)
        self.index = np.zeros(most, "<i8")
        self.produced = {name: np.zeros(most, "<i4") for name in self._fields}
        self.lost = {name: np.zeros(most, "<i4") for name in partition.losses.counts if name in self.produced}
        self.tasks = {task: np.zeros((STATES, most), "<i4") for task in self._takes}
        self.whole = self.lack_field = 0
        self.parts: list[np.ndarray] = []

    def encoded(self, lines: Mapping[str, np.ndarray]) -> dict[str, bytes]:
        """Return the lines without their unused ends."""
        return {name: line[: self.used].tobytes() for name, line in lines.items()}

    def step(self) -> tuple[int | None, int]:
        """Count some chunks. Returns the number of the next chunk, or None, and the live rows before it."""
        request, before = self._request, self._request.before
        lines = len(self._fields) + STATES * len(self._takes) + sum(len(fields) for fields in self._takes.values())
        budget = CELLS
        if request.first >= self._partition.rows.count:
            return None, before
        for key, chunk in self._partition.rows.chunks.items():
            if key < request.chunk:
                continue
            if before >= self._last:
                return None, before
            if budget <= 0:
                return key, before
            taken = (chunk.alive[: chunk.size] == 1) & (chunk.waiting[: chunk.size] == 0)
            count = int(np.count_nonzero(taken))
            if before + count > request.first:
                self._count_chunk(key, chunk, taken, count, before)
                budget -= chunk.size * max(lines, 1)
            budget -= SKIPPED_ROWS
            before += count
        return None, before

    def _count_chunk(self, key: int, chunk: Chunk, taken: np.ndarray, count: int, before: int) -> None:
        """Count the rows of a chunk that are within the columns."""
        request = self._request
        places = np.flatnonzero(taken)
        start, stop = max(request.first - before, 0), min(self._last - before, count)
        places = places[start:stop]
        if not len(places):
            return
        whole = int(places[-1] - places[0]) + 1 == len(places)
        at: Indexer = slice(int(places[0]), int(places[-1]) + 1) if whole else places
        rank = before + start - request.first  # of the first row among those of all columns
        column = rank // request.width
        edges = np.arange(-(rank % request.width), len(places), request.width)
        edges[0] = 0
        columns = slice(column - self.column, column - self.column + len(edges))
        self.used = max(self.used, columns.stop)
        index = self.index[columns]
        fresh = np.ones(len(edges), bool)
        fresh[0] = index[0] == 0 or rank % request.width == 0
        index[fresh] = chunk.index[at][edges[fresh]]
        have = {}
        for name in {*self._fields, *(field for fields in self._takes.values() for field in fields)}:
            blocks = chunk.field.get(name)
            have[name] = None if blocks is None else blocks[0][at] != 0
        for name in self._fields:
            _add(self.produced[name], columns, edges, have[name])
        for name, line in self.lost.items():
            column_of = chunk.lost.get(name)
            _add(line, columns, edges, None if column_of is None else column_of[at] != 0)
        for task, fields in self._takes.items():
            self._count_task(task, fields, key, chunk, at, len(places), columns, edges, have)
        if self._group_size:
            complete = _all_of(self._takes.get(request.group_task, []), have, len(places))
            self._count_groups(chunk, at, (key << CHUNK_BITS) + places, complete)

    def _count_task(
        self, task: str, fields: list[str], key: int, chunk: Chunk, at: Indexer, count: int, columns: slice,
        edges: np.ndarray, have: Mapping[str, np.ndarray | None],
    ) -> None:  # fmt: skip
        ready, claimed, consumed, passed = self.tasks[task]
        state = chunk.consumed.get(task)
        complete = _all_of(fields, have, count) if fields else None
        if state is None:
            _add(ready, columns, edges, complete)
            return
        state = state[at]
        _add(ready, columns, edges, None if complete is None else complete & (state == 0))
        _add(claimed, columns, edges, state == CLAIMED)
        done = state == CONSUMED
        codes = self._partition.passed.codes.column_of(task, key)
        if codes is not None:
            over = codes[at] != 0
            _add(passed, columns, edges, over)
            done &= ~over
        _add(consumed, columns, edges, done)

    def _count_groups(self, chunk: Chunk, at: Indexer, positions: np.ndarray, complete: np.ndarray) -> None:
        """Count the groups of rows, by whether all members are there and have all fields."""
        groups, size = self._partition.groups, self._group_size
        if not groups.explicit:
            numbers = positions // size
        elif chunk.group is None:
            return
        else:
            numbers = chunk.group[at]
        if (numbers[1:] < numbers[:-1]).any():
            order = np.argsort(numbers, kind="stable")
            numbers, complete = numbers[order], complete[order]
        first = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
        members = np.diff(np.append(first, len(numbers)))
        with_all = np.add.reduceat(complete, first, dtype="i8")
        numbers = numbers[first]
        known = numbers >= 0
        entire = known & (members >= size)
        self.whole += int(np.count_nonzero(entire & (with_all == members)))
        self.lack_field += int(np.count_nonzero(entire & (with_all < members)))
        some = known & ~entire
        self.parts.append(np.stack([numbers[some], members[some], with_all[some]], axis=1).ravel().astype("<i8"))


def _add(line: np.ndarray, columns: slice, edges: np.ndarray, values: np.ndarray | None) -> None:
    """Add the number of true values of each column to a line."""
    if values is not None:
        line[columns] += np.add.reduceat(values, edges, dtype="i4")


def _all_of(fields: list[str], have: Mapping[str, np.ndarray | None], count: int) -> np.ndarray:
    """Return which rows have all of these fields."""
    complete = np.ones(count, bool)
    for name in fields:
        has_field = have[name]
        if has_field is None:
            return np.zeros(count, bool)
        complete &= has_field
    return complete


@handles(Watch)
def handle_watch(context: Context, caller: Caller, request: Watch) -> Union[ChangeReply, list[Effect]]:
    """Reply with the changes since the caller's version, or park the request if there are none."""
    reply = watch_reply(context.state, request)
    if reply is None and request.wait is not None and request.wait > 0:
        context.parked.park(caller, request, request.wait)
        mark_seen(context.state, request.partition)
        return []
    return reply or empty_watch_reply(context.state, request)


def watch_reply(state: State, watch: Watch) -> ChangeReply | None:
    """Return the reply to a watch; None if nothing has changed since its version."""
    since = -1 if watch.since is None else watch.since
    return ChangeQuery(state.partitions.get(watch.partition), since).answer(watch.where, is_first_watch(watch))


def empty_watch_reply(state: State, watch: Watch) -> ChangeReply:
    """Return the reply that nothing has changed."""
    partition = state.partitions.get(watch.partition)
    return ChangeReply(-1) if partition is None else ChangeReply(partition.version, sealed=partition.sealed)


def mark_seen(state: State, name: str) -> None:
    """Note that all connected watches of a partition have been answered up to its present version."""
    watches = state.waiting.watches.get(name)
    if watches is not None:
        partition = state.partitions.get(name)
        watches.looked = -1 if partition is None else partition.version


def watch_replies(state: State, name: str, connected: Container[RequestKey]) -> list[tuple[RequestKey, ChangeReply]]:
    """Return the watches to answer after a change of a partition, with their replies.

    The changes are collected once, and matched once for all watches with the same conditions.
    """
    watches = state.waiting.watches.get(name)
    if watches is None:
        return []
    news = ChangeQuery(state.partitions.get(name), watches.looked)
    mark_seen(state, name)
    replies = []
    for (_, beginning), group in watches.groups.items():
        waiters = [waiter for waiter in group if waiter in connected]
        reply = news.answer(group[waiters[0]].watch.where, beginning) if waiters else None
        if reply is not None:
            replies += [(waiter, reply) for waiter in waiters]
    return replies


class ChangeQuery:
    """The changes of a partition (None: it does not exist) since a version; a version below 1 means all changes."""

    def __init__(self, partition: Partition | None, since: int) -> None:
        self.partition = partition
        self.since = max(since, 0)
        self.dropped = since >= 1 and (partition is None or since < partition.changes.made)
        """Whether the partition of that version was dropped. A newer one of the same name may exist."""
        if partition is None or self.dropped:
            return
        changes = partition.changes
        self.positions, self.versions = changes.changed_since(self.since)
        self.cleared = changes.cleared_since(self.since)
        self.sealed = changes.sealed > self.since
        self.lost, self.lost_fields = partition.losses.lost_since(self.since)
        self.complete = self.since >= changes.forgotten

    def answer(self, where: dict[str, Any], begins: bool) -> ChangeReply | None:
        """Return the reply to a watch for rows with these tags; None if nothing has changed for it.

        begins: whether it has received no rows yet, so that cleared rows do not concern it.
        """
        if self.dropped:
            return ChangeReply(-1, changed=True, dropped=True)
        partition = self.partition
        if partition is None:
            return None
        chosen = self._matching_rows(where)
        cleared = [] if begins else self.cleared
        complete = begins or self.complete
        if not (len(chosen) or cleared or self.sealed) and complete:
            return None
        positions = self.positions[chosen]
        # a row that lost a value has changed, so its tags were matched above
        missed = np.isin(self.lost, positions) if len(self.lost) else np.zeros(0, bool)
        return ChangeReply(
            partition.version,
            changed=True,
            rows=partition.rows.indexes_of(positions).tobytes(),
            versions=self.versions[chosen].tobytes(),
            keys=keys_or_none(partition.keys_of(positions)),
            tags=partition.packed_tags_of(positions),
            cleared=b"".join(indexes for _, indexes, _ in cleared),
            cleared_versions=b"".join(version.to_bytes(8, "little") * (len(rows) // 8) for version, rows, _ in cleared),
            cleared_keys=keys_or_none(
                [key for _, indexes, keys in cleared for key in keys or [None] * (len(indexes) // 8)]
            ),
            sealed=partition.sealed,
            complete=complete,
            lost=partition.rows.indexes_of(self.lost[missed]).tobytes(),
            lost_keys=keys_or_none(partition.keys_of(self.lost[missed])),
            lost_fields={name: lost[missed].tobytes() for name, lost in self.lost_fields.items()},
        )

    def _matching_rows(self, where: dict[str, Any]) -> np.ndarray:
        """Return which of the changed rows have these tags."""
        if not where:
            return np.arange(len(self.positions))
        assert self.partition is not None
        fits = np.zeros(len(self.positions), bool)
        for _, chunk, at, places in self.partition.rows.split(self.positions):
            fits[places] = matching_rows(chunk.tags, where, at)
        return np.flatnonzero(fits)
