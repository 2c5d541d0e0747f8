"""Reports what the controller knows of one sample, and finds the samples that are stuck.

A report has the values, group and tasks of a sample, and the history of its row. A reply examines a limited part of the
timeline and a limited number of fields, and the client asks for further pages.

A sample is stuck if it has not changed for some time and is not finished; some chunks of a partition are examined at a
time. When a row changed follows from `Chunk.changed`, the version of the partition at the last change of its fields or
tags: versions ascend with time, so the rows that are old enough are those below one version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np

from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.fields import MIXED_RANK, FieldStats, dims_parts, mixed_shapes
from transfer_queue.core.tables.rows import CHUNK_BITS, CLAIMED, CONSUMED, MASK, Chunk
from transfer_queue.core.timeline.event_ring import cut_text
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.messages.descriptors import FieldSpec
from transfer_queue.messages.reports import samples
from transfer_queue.messages.reports.samples import (
    DescribeSample,
    FindStuck,
    SampleEvent,
    SampleField,
    SampleGroup,
    SampleMember,
    SampleReport,
    SampleTask,
    StuckPage,
)
from transfer_queue.messages.reports.timeline import Lane
from transfer_queue.timeline.events import EVENT, NEW_ROWS, WHOLE, EventKind

MAX_HISTORY = 32
"""Events of a reply."""
MAX_FIELDS = 256
"""Fields of a reply."""
MAX_TASKS = 64
"""Tasks of a reply."""
MAX_MEMBERS = 64
"""Members of a group in a reply."""
MAX_COUNTED = 64
"""Fields that are counted as missing for the other members of a group."""
MAX_LEASES = 1024
"""Leases among which that of the sample is searched."""
MAX_CLEARS = 8192
"""Clears among which the key of a cleared sample is searched."""
MAX_SCHEMA = 2048
"""Fields of a block up to which the shape of a value is looked up in it."""

_KINDS = {
    EventKind.PUT: samples.PUT,
    EventKind.CLAIM: samples.CLAIM,
    EventKind.ACK: samples.ACK,
    EventKind.RETURN: samples.RETURNED,
    EventKind.CLEAR: samples.CLEAR,
}
_BITS = re.compile(r"\d+")
_NO_LANE = Lane(0, "", "")


@handles(DescribeSample, reads=True)
def handle_describe_sample(context: Context, caller: Caller, request: DescribeSample) -> SampleReport:
    """Reply with a page of the report about a sample."""
    context.services[TimelineRecorder].flush()
    partition = context.state.partitions.get(request.partition)
    position, row, key = _find(partition, request)
    now, wall = context.now, context.services[TimelineRecorder].wall
    report: dict[str, Any] = {"partition": request.partition, "now": now + wall, "index": row, "key": key}
    first = request.before is None and not request.field
    if row >= 0 and (first or request.before is not None):
        report.update(_history(context.services[TimelineRecorder], request.partition, row, request.before))
    if partition is not None and position >= 0:
        report["state"] = samples.LIVE
        if first or request.field:
            report.update(_fields(context, partition, position, request.field))
        if first:
            report.update(_about(context, partition, position))
    else:
        cleared = any(event.kind == samples.CLEAR for event in report.get("history", ()))
        known = key is not None and row >= 0 and request.row is None
        dropped = partition is not None and row >= 0 and partition.drops.reason(row) is not None
        report["state"] = samples.CLEARED if cleared or known or dropped else samples.UNKNOWN
    return SampleReport(**report)


def _find(partition: Partition | None, request: DescribeSample) -> tuple[int, int, str | None]:
    """Return the position (-1 if it does not live), the global index (-1 if it is not known) and the key."""
    if partition is None:
        return -1, -1 if request.row is None else request.row, request.key
    if request.key is not None:
        position = partition.keys.get(request.key, -1)
        if position < 0:
            return -1, _cleared_row(partition, request.key), request.key
        return position, int(partition.rows.indexes_of(np.array([position]))[0]), request.key
    if request.row is None:
        return -1, -1, None
    position = partition.rows.position_of(request.row)
    key = partition.keys_of(np.array([position]))[0] if position >= 0 else _cleared_key(partition, request.row)
    return position, request.row, key


def _cleared_row(partition: Partition, key: str) -> int:
    """Return the global index of the newest cleared sample with a key; -1 if none is remembered."""
    for _, rows, keys in islice(reversed(partition.changes.cleared), MAX_CLEARS):
        if keys is not None and key in keys:
            return int(np.frombuffer(rows, "<i8")[keys.index(key)])
    return -1


def _cleared_key(partition: Partition, row: int) -> str | None:
    """Return the key that a cleared sample had; None if it had none, or is not remembered."""
    for _, rows, keys in islice(reversed(partition.changes.cleared), MAX_CLEARS):
        if keys is not None:
            places_of_row = np.flatnonzero(np.frombuffer(rows, "<i8") == row)
            if len(places_of_row):
                return cast("str | None", keys[int(places_of_row[0])])
    return None


# ------------------------------------------------------------ history


def _history(timeline: TimelineRecorder, partition: str, row: int, before: int | None) -> dict[str, Any]:
    """Return the events of a row in one page of the timeline, and where the next page begins."""
    positions, rest = timeline.rows.find(row, before)
    place = timeline.partitions.numbers.get(cut_text(partition))
    events: list[SampleEvent] = []
    complete = rest is None and timeline.rows.reaches_start() and timeline.from_start
    for position in positions:
        (event,) = np.frombuffer(timeline.ring.read(position, 1), EVENT)
        kind = _KINDS.get(int(event["kind"]))  # type: ignore[call-overload]
        if kind is None or event["partition"] != place:
            continue
        if kind == samples.CLEAR and event["flags"] & WHOLE:
            kind = samples.PARTITION_CLEAR
        if kind == samples.PUT and event["flags"] & NEW_ROWS:
            events, complete, rest = [], True, None
        events.append(_event(timeline, kind, event))
    if len(events) > MAX_HISTORY:
        events, complete, rest = events[-MAX_HISTORY:], False, None
    return {"history": events, "complete": complete, "before": rest}


def _event(timeline: TimelineRecorder, kind: str, event: Any) -> SampleEvent:
    _, lane = timeline.lanes.values.get(int(event["lane"]), (None, _NO_LANE))
    fields = timeline.fields.values.get(int(event["fields"]))
    names = [] if fields is None else fields[1]
    if kind == samples.PUT and not names and not event["flags"] & NEW_ROWS:
        kind = samples.TAGGED
    block = int(event["block"]) if kind == samples.PUT else 0
    return SampleEvent(
        float(event["time"]) + timeline.wall, kind, lane.client, lane.task, lane.rank, names, int(event["rows"]), block,
        lane.host, lane.pid,
    )  # fmt: skip


# ------------------------------------------------------------ fields


def _fields(context: Context, partition: Partition, position: int, start: int) -> dict[str, Any]:
    """Return the fields of a sample from a field on, and where the next page begins."""
    chunk, at = partition.rows.chunks[position >> CHUNK_BITS], position & MASK
    blocks = _BlocksOfSample(context, partition)
    fields, missing = [], []
    start = min(start, len(partition.fields))
    names = islice(partition.fields, start, start + MAX_FIELDS)
    for name, numbers, slots in partition.values_of(names, np.array([position])):
        stats = partition.fields[name]
        if numbers[0]:
            fields.append(blocks.field(stats, int(numbers[0]), int(slots[0])))
        elif stats.live:
            missing.append(name)
    lost = [name for name in missing if name in chunk.lost and chunk.lost[name][at]]
    end = start + MAX_FIELDS
    return {
        "fields": fields, "missing": missing, "lost": lost,
        "next_field": end if end < len(partition.fields) else None,
    }  # fmt: skip


class _BlocksOfSample:
    """The blocks that contain the values of one sample. What is equal for all fields of a block is looked up once."""

    def __init__(self, context: Context, partition: Partition) -> None:
        self._state = context.state
        self._timeline = context.services[TimelineRecorder]
        self._partition = partition
        self._common: dict[int, dict[str, Any]] = {}
        self._dims: dict[int, dict[str, tuple[FieldSpec, np.ndarray]]] = {}

    def field(self, stats: FieldStats, number: int, slot: int) -> SampleField:
        """Return the description of a value."""
        common = self._common.get(number)
        if common is None:
            common = self._common[number] = self._describe(number)
        dtype, shape, nbytes = self._shape(stats, number, slot)
        return SampleField(stats.name, stats.kind, dtype, shape, nbytes, block=number, **common)

    def _describe(self, number: int) -> dict[str, Any]:
        blocks, timeline = self._partition.blocks, self._timeline
        places = blocks.places(number)
        unit, extent = self._state.units.get(places[0].unit), blocks.extents.get((places[0].unit, places[0].extent))
        writer = "" if extent is None else extent.writer
        worker, time = self._state.introductions.get(writer), timeline.block_times.time_of(number)
        return {
            "unit": places[0].unit, "tier": "" if unit is None else unit.report_tier,
            "copy_unit": places[1].unit if len(places) > 1 else -1, "client": writer,
            "task": "" if worker is None else worker.task, "rank": -1 if worker is None else worker.rank,
            "host": "" if worker is None else worker.host, "pid": 0 if worker is None else worker.pid,
            "time": None if math.isnan(time) else time + timeline.wall,
        }  # fmt: skip

    def _shape(self, stats: FieldStats, number: int, slot: int) -> tuple[str, list[int] | None, int | None]:
        """Return the dtype, the shape and the bytes of a value; the shape of an object is None."""
        known = self._dims.get(number)
        if known is None:
            known = self._dims[number] = self._dims_of(number)
        if stats.name not in known:
            is_uniform = stats.kind == "tensor" and not (stats.others or stats.differs or stats.mixed_rank)
            return stats.dtype, *(_sized(stats.dtype, list(stats.shape)) if is_uniform else (None, None))
        spec, dims = known[stats.name]
        if spec.kind == "nested":
            return spec.dtype, None, None
        if spec.kind == "object":
            return spec.dtype, None, int(dims[slot if spec.ragged else 0])
        return spec.dtype, *_sized(spec.dtype, _shape_of_row(spec, dims, slot))

    def _dims_of(self, number: int) -> dict[str, tuple[FieldSpec, np.ndarray]]:
        schema, dims, rows = self._partition.blocks.shape_source(number)
        if len(schema) > MAX_SCHEMA:
            return {}
        numbers = np.frombuffer(dims, "<i8")
        parts = dims_parts(schema, numbers, rows)
        return {spec.name: (spec, part) for spec, part in zip(schema, parts, strict=True)}


def _shape_of_row(spec: FieldSpec, dims: np.ndarray, slot: int) -> list[int]:
    """Return the shape of a row of a tensor's column, whose part of the block's dims this is."""
    if spec.ndim == MIXED_RANK:
        return mixed_shapes(dims)[slot]
    start = slot * spec.ndim if spec.ragged else 0
    return dims[start : start + spec.ndim].tolist()  # type: ignore[no-any-return]


def _sized(dtype: str, shape: list[int]) -> tuple[list[int], int]:
    """Return a shape, and the bytes of a tensor of this shape."""
    bits = _BITS.search(dtype)
    return shape, math.prod(shape) * (1 if bits is None else max(1, int(bits.group()) // 8))


# ------------------------------------------------------------ tags, group and tasks


def _about(context: Context, partition: Partition, position: int) -> dict[str, Any]:
    """Return what is not in pages: the state, tags, group and tasks of a sample."""
    where = np.array([position])
    chunk, at = partition.rows.chunks[position >> CHUNK_BITS], position & MASK
    tags = partition.tags_of(where)
    unwritten = not chunk.changed[at]
    return {
        "state": samples.RESERVED if chunk.waiting[at] or unwritten else samples.LIVE,
        "tags": {} if tags is None else tags[0],
        "group": _group(context, partition, position),
        "tasks": list(_tasks(context, partition, position)),
    }


def _group(context: Context, partition: Partition, position: int) -> SampleGroup | None:
    """Return the declared group of a sample, or that by order of reservation if the system's sampler deals groups."""
    groups, dealt = partition.groups, context.group_size_of(partition.name, None)
    if not groups.explicit:
        if dealt is None or dealt < 2:
            return None
        first = position // dealt * dealt
        living = [p for p in range(first, min(first + dealt, partition.rows.end)) if _lives(partition, p)]
        cleared = min(first + dealt, partition.rows.end) - first - len(living)
        return SampleGroup(None, dealt, _members(partition, living), len(living), cleared)
    number = int(groups.groups_of(np.array([position]), 1)[0])
    if number < 0:
        return None
    group = groups.declared[number]
    living = [p for p in group.members[: 16 * MAX_MEMBERS] if _lives(partition, p)]
    count = len(group.members) - group.cleared
    return SampleGroup(group.name, groups.size or dealt, _members(partition, living), count, group.cleared)


def _lives(partition: Partition, position: int) -> bool:
    chunk = partition.rows.chunks.get(position >> CHUNK_BITS)
    return chunk is not None and bool(chunk.alive[position & MASK])


def _members(partition: Partition, positions: Sequence[int]) -> list[SampleMember]:
    where = np.array(positions[:MAX_MEMBERS], "i8")
    if not len(where):
        return []
    names = [stats.name for stats in islice(partition.fields.values(), MAX_COUNTED) if stats.live]
    lacks = len(names) - partition.produced_flags(names, where).sum(axis=1)
    indexes, keys = partition.rows.indexes_of(where).tolist(), partition.keys_of(where)
    return [SampleMember(*member) for member in zip(indexes, keys, lacks.tolist(), strict=True)]


def tasks_of(context: Context, partition: Partition) -> list[str]:
    """Return the tasks that take samples of a partition, or wait for some, by name."""
    waiting = context.state.waiting.claim_queues(partition.name)
    return sorted({*partition.tasks, *partition.claimed, *waiting})


def _tasks(context: Context, partition: Partition, position: int) -> Iterator[SampleTask]:
    """Iterate over the states of a sample for the tasks of its partition."""
    chunk, at = partition.rows.chunks[position >> CHUNK_BITS], position & MASK
    where = np.array([position])
    requested_fields: dict[str, dict[str, None]] = {}
    for task, fields in [*partition.ready, *context.state.waiting.awaited(partition.name)]:
        requested_fields.setdefault(task, {}).update(dict.fromkeys(fields[:MAX_FIELDS]))
    for task in tasks_of(context, partition)[:MAX_TASKS]:
        column = chunk.consumed.get(task)
        taken = 0 if column is None else int(column[at])
        known: dict[str, Any] = {"deliveries": int(partition.leases.delivered.numbers_of(task, where)[0])}
        batch = partition.batch_of(task, position)
        if batch is not None:
            known["rank"], known["batch_index"] = batch[1], batch[2]
        if taken == CLAIMED:
            holder = _holder(partition, task, position, batch)
            worker = None if holder is None else context.state.introductions.get(holder)
            if worker is not None:
                known.update(host=worker.host, pid=worker.pid)
            yield SampleTask(task, samples.CLAIMED, client=holder or "", leased=holder is not None, **known)
        elif taken:
            reason = partition.passed.reason(task, position)
            yield SampleTask(
                task, samples.CONSUMED if reason is None else samples.SKIPPED, reason=reason or "", **known
            )
        else:
            lacks = partition.missing_fields(requested_fields.get(task, ()), position)
            yield SampleTask(task, samples.WAITING if lacks else samples.READY, lacks, **known)


def _holder(partition: Partition, task: str, position: int, batch: Any) -> str | None:
    """Return the client that has a row under a lease; None if no lease is found."""
    index = int(partition.rows.indexes_of(np.array([position]))[0])
    leases: Sequence[Any] = partition.leases.leases_of_batch(batch) if batch is not None else []
    for lease in leases or islice(reversed(partition.leases.by_token.values()), MAX_LEASES):
        if lease.task == task and index in lease.rows:
            return cast(str, lease.client)
    return None


MAX_ROWS = 1024
"""Rows of a reply."""
MAX_EXAMINED_FIELDS = 256
"""Fields of a partition that are examined, the first ones."""
MAX_COLUMNS = 64
"""Columns of 4,096 rows that are read for one reply, at least those of one chunk."""


@handles(FindStuck, reads=True)
def handle_find_stuck(context: Context, caller: Caller, request: FindStuck) -> StuckPage:
    """Reply with the stuck samples of the next chunks of a partition."""
    timeline = context.services[TimelineRecorder]
    now = context.now + timeline.wall
    names = list(context.state.partitions) if request.partitions is None else request.partitions
    if not names:
        return StuckPage(now)
    partition = context.state.partitions.get(names[0])
    if partition is None or request.made not in (None, partition.changes.made):
        return StuckPage(now, names[0], left=names[1:])
    cutoff = context.now - max(0.0, request.seconds)
    search = _Search(context, partition, cutoff)
    following = search.read(request.start)
    left = names[1:] if following is None else names
    made = None if following is None else partition.changes.made
    rows, times = search.oldest(min(request.most, MAX_ROWS))
    return StuckPage(
        now, partition.name, search.count, rows.tobytes(), (times + timeline.wall).tobytes(), left, made, following or 0
    )


class _Search:
    """The stuck rows of some chunks of a partition.

    Args:
        context: The controller.
        partition: The partition.
        cutoff: A row is stuck if it has not changed after this time, by the controller's clock.
    """

    def __init__(self, context: Context, partition: Partition, cutoff: float) -> None:
        timeline = context.services[TimelineRecorder]
        self._rows, self._chunks = partition.rows, partition.rows.chunks
        self._changes, self._reservations = timeline.change_times, timeline.reservation_times
        self._unknown = timeline.known_since <= cutoff
        """Whether rows that changed at an unknown time are old enough."""
        self._version = timeline.change_times.number_after(cutoff)
        """Rows that changed at this version or later are too young."""
        self._index = timeline.reservation_times.number_after(cutoff)
        """Rows without a version that were reserved at this global index or later are too young."""
        self._tasks = tasks_of(context, partition)
        self._fields = [stats.name for stats in islice(partition.fields.values(), MAX_EXAMINED_FIELDS) if stats.live]
        self.count = 0
        """The number of stuck rows."""
        self._stuck: list[tuple[np.ndarray, np.ndarray]] = []  # their indexes, and the versions of their changes

    def read(self, start: int) -> int | None:
        """Read chunks, beginning with this number. Returns the number of the next chunk; None after the last one."""
        left = MAX_COLUMNS
        for number, chunk in self._chunks.items():
            if number < start:
                continue
            if left <= 0:
                return number
            left -= self._read_chunk(chunk)
        return None

    def _read_chunk(self, chunk: Chunk) -> int:
        """Add the stuck rows of a chunk. Returns the number of columns that were read."""
        size = chunk.size
        changed = chunk.changed[:size]
        old = (changed > 0) & (changed < self._version)
        if not self._unknown:
            old &= changed >= self._changes.first
        reserved = np.flatnonzero((changed == 0) & (chunk.alive[:size] == 1) & (chunk.waiting[:size] == 0))
        if len(reserved):
            index = chunk.index[reserved]
            aged = (index < self._index) & (self._unknown | (index >= self._reservations.first))
            old[reserved[aged]] = True
        old &= chunk.alive[:size] == 1
        if not old.any():
            return 4
        unfinished = self._unfinished(chunk, size)
        at = np.flatnonzero(old & unfinished)
        self.count += len(at)
        if len(at):
            self._stuck.append((chunk.index[at], changed[at]))
        return 4 + len(self._tasks) + len(self._fields)

    def _unfinished(self, chunk: Chunk, size: int) -> np.ndarray:
        unfinished = np.zeros(size, bool)
        for task in self._tasks:
            column = chunk.consumed.get(task)
            if column is None:
                return np.ones(size, bool)
            unfinished |= column[:size] != CONSUMED
        for name in self._fields:
            columns = chunk.field.get(name)
            if columns is None:
                return np.ones(size, bool)
            unfinished |= columns[0][:size] == 0
        return unfinished

    def oldest(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that changed first, at most `most`, and when; NaN if it is not known."""
        if not self._stuck or not most:
            return np.zeros(0, "i8"), np.zeros(0, "f8")
        rows, versions = (np.concatenate(columns) for columns in zip(*self._stuck))
        chosen = []
        for some in (np.flatnonzero(versions == 0), np.flatnonzero(versions > 0)):
            if len(some) > most:  # a selection takes a tenth of the time of a sort
                some = some[versions[some] <= np.partition(versions[some], most - 1)[most - 1]]
            if not (versions[some][1:] >= versions[some][:-1]).all():
                some = some[np.argsort(versions[some], kind="stable")]
            chosen.append(some[:most])
        kept = np.concatenate(chosen)
        times = np.array([self._time(*row) for row in zip(rows[kept].tolist(), versions[kept].tolist())], "f8")
        order = np.lexsort((rows[kept], np.nan_to_num(times, nan=-math.inf)))[:most]
        return rows[kept][order].astype("<i8"), times[order].astype("<f8")

    def _time(self, row: int, version: int) -> float:
        return self._changes.time_of(version) if version else self._reservations.time_of(row)
