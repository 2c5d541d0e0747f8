"""One partition: its rows, fields, keys, tags, groups, consumption and ready sets.

Methods that change something are called only by appliers of records; all other code only reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from transfer_queue.core.columns.kinds import numbers_of_texts
from transfer_queue.core.columns.schema import (
    Column,
    Count,
    Persisted,
    counter,
    custom_column,
    linked_part,
    map_of,
    numbers,
    part,
    parts_of,
    scalar,
    value_of,
)
from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import applies_to_partition
from transfer_queue.core.tables.blocks import BlockTable
from transfer_queue.core.tables.changes import ChangeFeed, LostValues
from transfer_queue.core.tables.dealt import DealtBatches, SkippedRows
from transfer_queue.core.tables.fields import BlockShape, FieldRanks, FieldStats
from transfer_queue.core.tables.groups import GroupQuotas, GroupTable
from transfer_queue.core.tables.leases import BatchKey, LeaseTable, UnseenBatches
from transfer_queue.core.tables.ready_sets import DeferredUpdates, Fields, ReadySet, ReadySets
from transfer_queue.core.tables.rows import CHUNK_BITS, CLAIMED, CONSUMED, MASK, Chunk, RowTable, sort_with_values
from transfer_queue.core.tables.tags import Places, pack_tags
from transfer_queue.core.tables.windows import AdmissionWindow, DropLog, RowAges, RowRefcounts
from transfer_queue.messages.descriptors import NewBlock, PartitionOptions
from transfer_queue.messages.tag_table import (
    COLUMNS_FROM,
    DELETED,
    MISSING,
    SentTags,
    StoredTags,
    TagTable,
    has_entry,
)

MAX_READY_SETS = 64
FEW_KEYS = 16
"""Keys that are looked up one by one."""
LONG_RUN = 256
"""The number of rows from which it is worth finding out whether they are one after the other."""

ReadyKey = tuple[str, tuple[str, ...]]  # task, fields


def _give_keys(partition: Partition, names: np.ndarray, positions: np.ndarray) -> None:
    """Give the restored keys to their rows, which were restored before, one chunk at a time."""
    for _, chunk, at, where in partition.rows.split(positions):
        column = np.full(chunk.capacity, None, object)
        column[at] = names[where]
        chunk.keys = column.tolist()


class _FurtherDtypes(Column):
    """The further dtypes of fields, which are saved apart from the fields."""

    def save(self, table: Partition, tree: dict[str, Any]) -> None:
        """See `Column`."""
        tree[self.key] = self.to_comparable(table)

    def load(self, table: Partition, loaded: Any) -> None:
        """See `Column`."""
        for name, others in loaded.dtypes.items():
            table.fields[name].others = tuple(others)

    def to_comparable(self, table: Partition) -> Any:
        """See `Column`."""
        return {name: list(field.others) for name, field in table.fields.items() if field.others and field.live}


class Partition(Persisted):
    """The rows of one partition, and everything that is recorded about them."""

    options: PartitionOptions = value_of(PartitionOptions, None, msgspec.to_builtins, lambda options: options)
    number: int = counter()
    """The version at which the partition was made. No other partition of the state has the same."""
    nbytes: int = counter()
    """Bytes of the blocks that the rows need."""
    seals: int = counter()
    """How many producers have sealed."""
    rows: RowTable = part(RowTable)
    changes: ChangeFeed = linked_part(ChangeFeed)
    """The rows that changed or were cleared, and when."""
    losses: LostValues = linked_part(LostValues)
    """The values that were lost with their storage."""
    groups: GroupTable = linked_part(GroupTable)
    admitted: int = scalar(int, 0)
    """The number of rows that were added so far, without dropped ones."""
    policy_version: int = scalar(int, 0)
    done: int = counter(missing=0)
    """The number of rows that were reported as done so far."""
    owners: dict[str, int] = map_of(str, Count)
    """Client -> the number under which rows refer to the client that reserved them."""
    births: RowAges = linked_part(RowAges)
    """When rows were added."""
    holds: RowRefcounts = linked_part(RowRefcounts)
    """The rows that clients have not finished yet."""
    drops: DropLog = part(DropLog)
    wants: GroupQuotas = part(GroupQuotas)
    """The group demand of tasks."""
    freed: int = counter()
    """The number of rows that `free_when` has cleared."""
    fields: dict[str, FieldStats] = parts_of(str, FieldStats, FieldStats)
    dtypes: Any = custom_column(_FurtherDtypes(dict[str, list[str]], None))
    field_ranks: FieldRanks = linked_part(FieldRanks, missing={})
    """The ranks of the fields whose rows differ in rank."""
    keys: dict[str, int] = numbers_of_texts("keys", "keyed", _give_keys)
    """Key -> position, in order of creation."""
    waiting: list[int] = numbers()
    """The positions of pre-allocated rows that are not taken yet, ascending."""
    tasks: dict[str, int] = map_of(str, Count)
    """Task -> number of live rows that it has consumed."""
    claimed: dict[str, int] = map_of(str, Count)
    """Task -> number of live rows that it has claimed and not acknowledged."""
    leases: LeaseTable = linked_part(LeaseTable)
    unseen_batches: UnseenBatches = part(UnseenBatches, missing=[])
    """The batches that were dealt and not handed over."""
    consumed_ever: dict[str, int] = map_of(str, Count)
    """Task -> number of rows that it has consumed so far."""
    dealt: dict[str, DealtBatches] = parts_of(str, DealtBatches)
    passed: SkippedRows = linked_part(SkippedRows)
    """The rows that tasks skipped."""
    window: AdmissionWindow = linked_part(AdmissionWindow, missing=0)
    """The rows that count for `max_staleness`."""
    version: int = counter()
    """Grows with every change."""

    def __init__(
        self,
        name: str,
        options: PartitionOptions,
        blocks: BlockTable,
        awaited: Callable[[str], Collection[ReadyKey]],
        epoch: int = 0,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.name = name
        self.number = number
        self.epoch = epoch
        """See `State`."""
        self.awaited = awaited
        """Returns the (task, fields) of a partition for which claims wait.

        Their ready sets are never removed, and process publications at once.
        """
        self.blocks = blocks
        """The table of all blocks."""
        self.options = options
        self.keeps_all = options.keep_rows is None and options.keep_bytes is None and options.keep_seconds is None
        """Whether the options have no limit beyond which rows are dropped. Derived."""
        self.field_ranks = FieldRanks(self.rows, self.fields, blocks)
        self.changes = ChangeFeed(self.rows)
        self.losses = LostValues(self.rows)
        self.groups = GroupTable(self.rows, options.group_size)
        self.births = RowAges(options.keep_seconds)
        self.holds = RowRefcounts(self.rows, options.free_when, options.replicas)
        self.leases = LeaseTable(self.rows)
        self.passed = SkippedRows(self.rows)
        self.window = AdmissionWindow(self.rows, self.passed, options)
        self.is_limited = self.window.limit is not None or options.max_rows is not None
        """Whether it has a limit of its rows, see `core.puts.limits`. Derived."""
        self.ready: dict[ReadyKey, ReadySet] = {}
        """The ready sets that were requested; the least recently used one is first."""
        self.unseen = DeferredUpdates(self.rows, self.groups)
        """The publications that the other ready sets have not processed yet."""
        self.gained: set[str] = set()
        """The tasks for which rows became ready in one of these sets since the controller last asked."""
        self.learnt: BlockShape | None = None
        """The shape of the block of the last put, if the types of fields still contain all of it.

        None after a put of several blocks.
        """
        self.learnt_fields: Fields = frozenset()
        """The fields of that block."""

    def derive(self) -> None:
        """See `Persisted`."""
        self.window.recount(self.tasks)

    # ------------------------------------------------------------ reading

    @property
    def sealed(self) -> bool:
        """Whether all producers have sealed."""
        return self.seals >= self.options.producers

    @property
    def row_count(self) -> int:
        """The number of live rows without pre-allocated ones that are not taken."""
        return self.rows.count - len(self.waiting)

    @property
    def open_rows(self) -> int:
        """The number of live rows that some task of `free_when` has not consumed, or of all live rows without tasks.

        With several tasks it may be larger by rows that one client still reads.
        """
        tasks = self.options.free_when
        if not tasks:
            return self.row_count
        consumed = sum(self.tasks.get(task, 0) for task in tasks) - (len(tasks) - 1) * self.row_count
        return self.row_count - max(0, consumed)

    @property
    def undone(self) -> int:
        """The number of rows that were added, and neither reported as done nor dropped."""
        return max(0, self.admitted - self.done)

    def ready_set(self, task: str, fields: tuple[str, ...]) -> ReadySet:
        """Return the ready set of (task, fields). It is built if it does not exist."""
        ready_set = self.begin_ready_set(task, fields)
        if ready_set.unbuilt:
            ready_set.build(self.rows)
        if ready_set.seen < self.unseen.newest:
            self.unseen.apply_to(ready_set)
        return ready_set

    def begin_ready_set(self, task: str, fields: tuple[str, ...]) -> ReadySet:
        """Return the same set with the chunks that it has read so far. From now on it is updated with every change."""
        key = (task, fields)
        ready_set = self.ready.pop(key, None)
        if ready_set is None:
            ready_set = ReadySet(task, fields)
            ready_set.unbuilt = list(self.rows.chunks)[::-1]
            self.unseen.mark_processed(ready_set)
            spare = len(self.ready) + 1 - MAX_READY_SETS
            if spare > 0:
                awaited = self.awaited(self.name)
                for old in [old for old in self.ready if old not in awaited][:spare]:
                    del self.ready[old]
        self.ready[key] = ready_set
        return ready_set

    def sampler_view(self, ready: ReadySet) -> ReadySets:
        """Return a ready set as samplers see it."""
        return ReadySets(ready, self.rows, self.groups)

    def tags_of(self, positions: np.ndarray) -> list[dict[str, Any]] | None:
        """Return a new dict with the tag of each row; None if all are empty."""
        out: list[dict[str, Any]] = [{} for _ in range(len(positions))]
        for _, chunk, at, where in self.rows.split(positions):
            tags = chunk.tags
            if tags is None:
                continue
            if isinstance(where, slice):
                out[where] = tags.rows(at)
            else:
                for place, tag in zip(where.tolist(), tags.rows(at), strict=True):
                    out[place] = tag
        return out if any(out) else None

    def packed_tags_of(self, positions: np.ndarray) -> StoredTags | None:
        """Return the tags of these rows for a reply: as columns if there are many rows; None if all are empty."""
        if len(positions) < COLUMNS_FROM:
            return self.tags_of(positions)
        parts = [(chunk.tags, at, where) for _, chunk, at, where in self.rows.split(positions) if chunk.tags]
        if any(tags.rest for tags, _, _ in parts):
            return self.tags_of(positions)
        packed = pack_tags(parts, len(positions))
        return packed if packed.columns else None

    def has_no_other_tags(self, positions: np.ndarray, put: TagTable) -> bool:
        """Return whether these rows have exactly the tags that were merged into theirs last."""
        names = set()
        for column in put.columns:
            if MISSING in column.kinds or DELETED in column.kinds:
                return False
            names.add(column.name)
        for _, chunk, at, _ in self.rows.split(positions):
            tags = chunk.tags
            if tags is not None and tags.has_others(names, at):
                return False
        return True

    def keys_of(self, positions: np.ndarray) -> list[str | None]:
        """Return the keys of these rows (position -1: None)."""
        out: list[str | None] = []
        for p in positions.tolist():
            chunk = self.rows.chunks.get(p >> CHUNK_BITS) if p >= 0 else None
            out.append(chunk.keys[p & MASK] if chunk is not None and chunk.keys is not None else None)
        return out

    def positions_of_keys(self, keys: list[str]) -> np.ndarray:
        """Return the positions of the rows with those of these keys that exist, in the order of the keys."""
        known = self.keys
        if len(keys) > FEW_KEYS and (start := known.get(keys[0], -1)) >= 0 and self._are_keys_from(start, keys):
            return np.arange(start, start + len(keys))
        return np.array([p for key in keys if (p := known.get(key)) is not None], "i8")

    def _are_keys_from(self, start: int, keys: list[str]) -> bool:
        """Return whether these are the keys of consecutive rows. To compare them is faster than to hash them."""
        done = 0
        while done < len(keys):
            chunk, first = self.rows.chunks.get((start + done) >> CHUNK_BITS), (start + done) & MASK
            stored = [] if chunk is None or chunk.keys is None else chunk.keys[first : first + len(keys) - done]
            if not stored or stored != keys[done : done + len(stored)]:
                return False
            done += len(stored)
        return True

    def values_of(self, names: Iterable[str], positions: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Iterate over (field, block number of each row, row in the block); block 0 for a row without a value.

        The arrays may be parts of the columns of a chunk: do not change them.
        """
        count = len(positions)
        parts = self.rows.split(positions)
        together = len(parts) == 1 and len(parts[0][2]) == count  # all rows are in one chunk
        if together:
            _, chunk, at, _ = parts[0]
            if count >= LONG_RUN and int(at[-1]) - int(at[0]) == count - 1 and (at[1:] > at[:-1]).all():
                at = slice(int(at[0]), int(at[-1]) + 1)  # selects a part of a column without a copy
        for name in names:
            if together and (columns := chunk.field.get(name)) is not None:
                yield name, columns[0][at], columns[1][at]
                continue
            blocks, slots = np.zeros(count, "i8"), np.zeros(count, "i4")
            for _, each, places, where in parts:
                if (columns := each.field.get(name)) is not None:
                    blocks[where], slots[where] = columns[0][places], columns[1][places]
            yield name, blocks, slots

    def blocks_of(self, name: str, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the block number (0: no value) and the row in the block of one field of these rows."""
        _, blocks, slots = next(self.values_of((name,), positions))
        return blocks, slots

    def produced_flags(self, fields: list[str], positions: np.ndarray) -> np.ndarray:
        """Return int8 [rows, fields]: 1 if the row has the field."""
        out = np.zeros((len(positions), len(fields)), "i1")
        for column, (_, blocks, _) in enumerate(self.values_of(fields, positions)):
            out[:, column] = blocks != 0
        return out

    def missing_fields(self, fields: Iterable[str], position: int) -> list[str]:
        """Return those of these fields of which a row has no value."""
        return [name for name, blocks, _ in self.values_of(fields, np.array([position])) if not blocks[0]]

    def consumption_states(self, task: str, positions: np.ndarray) -> np.ndarray:
        """Return int8 [rows]: CONSUMED, CLAIMED or 0, the state of each row for the task."""
        out = np.zeros(len(positions), "i1")
        for _, chunk, at, where in self.rows.split(positions):
            column = chunk.consumed.get(task)
            if column is not None:
                out[where] = column[at]
        return out

    def consumed_flags(self, task: str, positions: np.ndarray) -> np.ndarray:
        """Return int8 [rows]: 1 if the task has consumed the row."""
        consumed: np.ndarray = self.consumption_states(task, positions) == CONSUMED
        return consumed.astype("i1")

    def batch_of(self, task: str, position: int) -> BatchKey | None:
        """Return the key of the dealt batch that contains a row for the task; None if there is none."""
        column = self.rows.chunks[position >> CHUNK_BITS].dealt.get(task)
        number = 0 if column is None else int(column[position & MASK])
        if not number:
            return None
        batch = self.dealt[task].batches[number]
        return task, batch.dp_rank, batch.batch_index

    def common_fields(self, positions: np.ndarray) -> list[str]:
        """Return the fields that all of these rows have, sorted."""
        common, counted = list(self.fields), 0
        for _, chunk, at, _ in self.rows.split(positions):
            columns, count = chunk.field, len(at)
            common = [name for name in common if name in columns and np.count_nonzero(columns[name][0][at]) == count]
            counted += count
        return sorted(common) if 0 < counted == len(positions) else []

    def common_fields_of_parts(self, positions: np.ndarray, lengths: Sequence[int]) -> list[list[str]]:
        """Return the same for each part of these rows. lengths: the numbers of rows of the parts, at least 1 each."""
        names = sorted(name for name, field in self.fields.items() if field.live)
        starts = np.cumsum([0, *lengths[:-1]])
        flags = np.minimum.reduceat(self.produced_flags(names, positions), starts, axis=0)
        known: dict[bytes, list[str]] = {}
        common = []
        for having in flags:
            packed = having.tobytes()
            if packed not in known:
                known[packed] = [names[at] for at in np.flatnonzero(having).tolist()]
            common.append(known[packed])
        return common

    def mixed_dtypes(self, blocks: Sequence[NewBlock]) -> dict[str, list[str]]:
        """Return the dtypes of those fields of the blocks of a put whose rows have several dtypes."""
        fields = (self.fields[spec.name] for block in blocks for spec in block.schema)
        return {field.name: [field.dtype, *field.others] for field in fields if field.others}

    def is_wholly_consumed(self, task: str) -> bool:
        """Return whether the task has consumed every live row, reserved ones included, and at least one row so far.

        Rows that are cleared after the task has consumed them do not change this.
        """
        return self.tasks.get(task) == self.rows.count and (self.rows.count or self.consumed_ever.get(task, 0)) > 0

    # ------------------------------------------------------------ changing (apply only)

    def reserving_clients(self) -> Collection[str]:
        """Return the clients whose reserved rows may keep others from putting, because the partition has a limit."""
        return self.owners if self.is_limited and not self.sealed else ()

    def join(self, groups: Sequence[str | None], positions: Sequence[int]) -> None:
        """Make rows members of declared groups (None: of no group). A row that is a member already stays in its group.

        Rows that are members of no group are dropped at once.
        """
        if not self.groups.explicit:
            for ready in self.ready.values():
                ready.whole.clear()  # the partition has no groups by order of reservation any longer
        for name, p in zip(groups, positions, strict=True):
            column = self.rows.chunks[p >> CHUNK_BITS].group_column()
            if column[p & MASK] >= 0 or name is None:
                continue
            group = self.groups.join(name, p)
            for ready in self.ready.values():
                ready.add_group_member(p, group.number, self.groups)

    def update_awaited_sets(self, fields: Fields) -> None:
        """Update at once the ready sets for which claims wait, after rows that `unseen` contains got these fields."""
        for key in self.awaited(self.name):
            ready = self.ready.get(key)
            if ready is not None and not fields.isdisjoint(ready.fields) and self.unseen.apply_to(ready):
                self.gained.add(ready.task)
        self.unseen.trim(self.ready.values())

    def forget_empty_ranks(self) -> None:
        """Forget the ranks of fields of which no row has a value any more, at the end of a change."""
        if not self.field_ranks.names:
            return
        for name in self.field_ranks.forget_empty():
            self.blocks.equal.forget_field(self.number, name)
            self.learnt = None

    def remove_values(self, name: str, count: int) -> None:
        """Record that this number of values of a field was removed."""
        field = self.fields[name]
        field.live -= count
        if not field.live:
            field.forget()
            self.blocks.equal.forget_field(self.number, name)
            self.learnt = None

    def set_tags(self, positions: np.ndarray, tags: SentTags, replace: bool) -> None:
        """Merge tags into rows, or replace their tags."""
        for key, chunk, at, where in self.rows.split(positions):
            self.put_tags(key, chunk, at, tags, where, replace)

    def put_tags(
        self, key: int, chunk: Chunk, at: Places, tags: SentTags, where: Places, replace: bool = False
    ) -> None:
        """Merge tags into rows of a chunk, or replace their tags.

        Args:
            key: The number of the chunk.
            chunk: The chunk.
            at: The places of the rows in the chunk.
            tags: The tags of the put.
            where: The places of these rows in `tags`.
            replace: Whether their other tags are removed.
        """
        if isinstance(tags, TagTable):
            if tags.columns or replace:
                (chunk.tags or chunk.tag_columns()).put_table(at, tags, where, replace)
        else:
            chunk_tags = tags[where] if isinstance(where, slice) else [tags[place] for place in where.tolist()]
            if replace or any(chunk_tags):
                places = range(at.start, at.stop) if isinstance(at, slice) else at.tolist()
                (chunk.tags or chunk.tag_columns()).put(places, chunk_tags, replace)
        for name in self.rows.watched:
            if replace or has_entry(tags, name):
                chunk.set_watched(name, at)
                for ready in self.ready.values():
                    ready.mark_tag_changed(key, name)

    def consume(self, task: str, positions: np.ndarray) -> None:
        """Record that the task has consumed these rows."""
        for key, chunk, at, _ in self.rows.split(positions):
            column = chunk.consumed_column(task)
            before = column[at]
            if before.tobytes() != bytes(len(before)) or 0 in chunk.alive[at].tobytes():
                fresh = at[(before != CONSUMED) & (chunk.alive[at] == 1)]
                self.count_unclaimed(task, column[fresh])
            else:
                fresh = at
            self.add_task(task)
            self.window.consume(task, key, chunk, fresh)
            column[fresh] = CONSUMED
            self.tasks[task] += len(fresh)
            self.consumed_ever[task] = self.consumed_ever.get(task, 0) + len(fresh)
            self.remove_from_ready_sets(task, key, chunk, fresh)

    def claim(self, task: str, positions: np.ndarray) -> None:
        """Record that the task got these rows under a lease."""
        self.add_task(task)
        for key, chunk, at, _ in self.rows.split(positions):
            column = chunk.consumed_column(task)
            fresh = at[(column[at] == 0) & (chunk.alive[at] == 1)]
            column[fresh] = CLAIMED
            self.claimed[task] = self.claimed.get(task, 0) + len(fresh)
            self.remove_from_ready_sets(task, key, chunk, fresh)

    def return_claimed(self, task: str, positions: np.ndarray) -> None:
        """Make those of these rows that the task has claimed ready again."""
        for key, chunk, at, _ in self.rows.split(positions):
            column = chunk.consumed_column(task)
            back = at[column[at] == CLAIMED]
            self.count_unclaimed(task, column[back])
            column[back] = 0
            self.update_ready_sets(task, key, chunk, back)

    def end_all_leases(self) -> None:
        """End all leases. Their rows are delivered again, without counting as delivered."""
        for token in list(self.unseen_batches.by_token):
            self.take_back(token)
        for token, lease in list(self.leases.by_token.items()):
            if lease.batch is None:
                self.return_claimed(lease.task, self.rows.positions_of(self.leases.live_rows(lease)))
            self.leases.remove(token)

    def take_back(self, token: int) -> None:
        """Make the rows of a batch that was not handed over ready again, as if they had not been dealt.

        Its client does not refer to them any longer.
        """
        batch = self.unseen_batches.by_token.pop(token)
        self.holds.drop(batch.task, batch.indexes)
        task, is_current = batch.task, batch.policy_version == self.policy_version
        for key, chunk, at, _ in self.rows.split(self.rows.positions_of(batch.indexes)):
            column = chunk.consumed_column(task)
            back = at[(column[at] == CONSUMED) & (chunk.alive[at] == 1)]
            self.window.take_back(task, key, chunk, back, is_current)
            column[back] = 0
            self.tasks[task] -= len(back)
            self.consumed_ever[task] -= len(back)
            self.update_ready_sets(task, key, chunk, back)

    def add_task(self, task: str) -> None:
        """Record that a task gets rows."""
        if task not in self.tasks:
            self.tasks[task] = 0
            self.window.add_task(self.tasks)

    def count_unclaimed(self, task: str, before: np.ndarray) -> None:
        """Record that rows with these former states are not claimed any more."""
        count = int(np.count_nonzero(before == CLAIMED))
        if count:
            self.claimed[task] -= count

    def remove_from_ready_sets(self, task: str, key: int, chunk: Chunk, at: np.ndarray) -> None:
        """Record that the task got these rows of a chunk."""
        for ready in self.ready.values():
            if ready.task == task:
                ready.take(key, chunk, at, self.groups)

    def update_ready_sets(self, task: str, key: int, chunk: Chunk, at: np.ndarray) -> None:
        """Record that the state of these rows of a chunk for the task has changed."""
        for ready in self.ready.values():
            if ready.task == task and ready.update(key, chunk, at, self.groups):
                self.gained.add(task)

    def deal(self, task: str, batch_index: int, batch_size: int, shares: list[tuple[int, np.ndarray]]) -> np.ndarray:
        """Keep dealt batches, given as (dp_rank, rows). Return the positions of all these rows, ascending."""
        dealt = self.dealt[task] = self.dealt.get(task) or DealtBatches()
        issued = [dealt.add(dp_rank, batch_index, batch_size, rows) for dp_rank, rows in shares]
        numbers = np.repeat(np.array(issued, "i8"), [len(rows) for _, rows in shares])
        rows, numbers = sort_with_values(np.concatenate([np.zeros(0, "i8"), *(rows for _, rows in shares)]), numbers)
        positions = self.rows.positions_of(rows)
        for _, chunk, at, where in self.rows.split(positions):
            chunk.dealt_column(task)[at] = numbers[where]
        return positions

    def pass_over(self, task: str, positions: np.ndarray, reason: str) -> None:
        """Apply a `records.PassedOver`."""
        for key, chunk, at, _ in self.rows.split(positions):
            self.window.remove(key, chunk, at)
        self.passed.add(task, positions, reason)
        self.holds.skip(task, positions)
        self.leases.acked.reset(task, positions)
        self.consume(task, positions)

    def forget_consumption(self, task: str | None) -> None:
        """Apply a `records.ConsumptionForgotten`."""
        before = self.window.finished_rows()
        for name in list(self.tasks) if task is None else [task]:
            self.tasks.pop(name, None)
            self.claimed.pop(name, None)
            self.leases.forget(name)
            self.unseen_batches.forget(name)
            self.dealt.pop(name, None)
            self.passed.forget(name)
            for chunk in self.rows.chunks.values():
                chunk.consumed.pop(name, None)
                chunk.dealt.pop(name, None)
            self.holds.forget(name)
            for key in [key for key in self.ready if key[0] == name]:
                del self.ready[key]
            self.gained.add(name)
        self.window.change_tasks(before, self.tasks)

    def seal(self) -> None:
        """Record that one more producer has sealed. After the last one, the controller clears pre-allocated rows."""
        self.seals += 1
        if self.sealed:
            self.changes.sealed = self.version


# ------------------------------------------------------------ records of one partition


@applies_to_partition(r.PolicyAdvanced)
def _apply_policy_advanced(partition: Partition, record: r.PolicyAdvanced) -> None:
    partition.policy_version = record.version
    partition.window.finished = 0


@applies_to_partition(r.RowsDone)
def _apply_rows_done(partition: Partition, record: r.RowsDone) -> None:
    partition.done += record.count


@applies_to_partition(r.GroupsWanted)
def _apply_groups_wanted(partition: Partition, record: r.GroupsWanted) -> None:
    partition.wants.set_demand(record.task, record.groups)
