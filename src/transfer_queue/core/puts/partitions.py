"""Handles the requests that create, seal, clear and drop partitions and rows, and those about their progress.

A clear of many rows or of a large partition is a job: each step clears some of the rows, and the last one replies. If
the controller or the client dies in between, some rows are cleared, and the request, when it is sent again, clears the
others. Retention drops the oldest rows beyond `keep_rows`, `keep_bytes` or `keep_seconds`, and declared groups as a
whole, because an incomplete group cannot be used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Union

import numpy as np

from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Begin, Caller, Decision, ParkDecision, Steps, handles
from transfer_queue.core.puts import limits
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.check import check_options
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State, require_partition, unknown_partition_warning
from transfer_queue.core.tables.rows import CHUNK, indexes_in, sort_unique
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.partitions import (
    AwaitDone,
    ClearPartition,
    CreatePartition,
    ReadPolicyVersion,
    ReportDone,
    Seal,
    SetPolicyVersion,
)
from transfer_queue.messages.puts import ClearKeys, ClearRows, Drop

# ------------------------------------------------------------ partitions


@handles(CreatePartition)
def handle_create_partition(context: Context, caller: Caller, request: CreatePartition) -> Decision:
    """Create a partition. The reply is False if it exists. Raises InvalidArgumentError if it has other options."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        records = create_partition(
            context.state, request.partition, request.pre_allocate, request.options, request.policy_version
        )
        if has_limit(request.options):
            context.services[Retention]
        if request.policy_version:
            context.services[TimelineRecorder].note_policy(caller.client, request.partition, 0, request.policy_version)
        return Decision(records, lambda: Done(True))
    check_same_options(partition, request.options)
    return Decision([], lambda: Done(False))


@handles(Seal)
def handle_seal(context: Context, caller: Caller, request: Seal) -> Decision:
    """Count the seal of one producer."""
    effect = "seal creates it, sealed and empty; if this is intended, call seal(..., create=True)"
    warning = None if request.create else unknown_partition_warning(context.state.partitions, request.partition, effect)
    return Decision(seal(context.state, request.partition, context.connections.peers), lambda: Done(None, warning))


@handles(ReportDone)
def handle_report_done(context: Context, caller: Caller, request: ReportDone) -> Decision:
    """Count rows as done. Raises InvalidArgumentError for more rows than were added."""
    partition = require_partition(context.state.partitions, request.partition)
    if request.count > partition.undone:
        raise InvalidArgumentError(
            f"{request.count} samples of partition {request.partition!r} were reported as done, but only "
            f"{partition.undone} of its samples are not done yet; report each sample once"
        )
    return Decision([r.RowsDone(request.partition, request.count)] if request.count else [], Done)


@handles(AwaitDone)
def handle_await_done(context: Context, caller: Caller, request: AwaitDone) -> Decision | ParkDecision:
    """Reply whether all rows are done, or park the request until they are."""
    partition = require_partition(context.state.partitions, request.partition)
    if partition.undone and request.wait is not None and request.wait > 0:
        return ParkDecision(request, request.wait)
    done = not partition.undone
    return Decision([], lambda: Done(done))


@handles(SetPolicyVersion)
def handle_set_policy_version(context: Context, caller: Caller, request: SetPolicyVersion) -> Decision:
    """Set the policy version of a partition."""
    name, version = request.partition, request.version
    before = require_partition(context.state.partitions, name).policy_version
    if version < before:
        raise InvalidArgumentError(
            f"the policy of partition {name!r} is at version {before} and cannot go back to {version}"
        )
    if version == before:
        return Decision([], Done)
    context.services[TimelineRecorder].note_policy(caller.client, name, before, version)
    return Decision([r.PolicyAdvanced(name, version)], Done)


@handles(ReadPolicyVersion, reads=True)
def handle_read_policy_version(context: Context, caller: Caller, request: ReadPolicyVersion) -> Done:
    """Reply with the policy version of a partition."""
    return Done(require_partition(context.state.partitions, request.partition).policy_version)


def create_partition(
    state: State, name: str, pre_allocate: int, options: PartitionOptions | None = None, policy_version: int = 0
) -> list[r.AnyRecord]:
    """Return the records of a new partition with its pre-allocated rows."""
    options = PartitionOptions() if options is None else options
    check_options(options)
    if not 0 <= pre_allocate <= limits.MAX_RESERVED:
        raise InvalidArgumentError(f"pre_allocate must be from 0 to {limits.MAX_RESERVED} rows, got {pre_allocate}")
    made: list[r.AnyRecord] = [r.PartitionMade(name, options)]
    if policy_version:
        made.append(r.PolicyAdvanced(name, policy_version))
    if pre_allocate:
        part = r.WriterPart("", pre_allocate)
        made.append(r.SamplesPut(name, [part], state.next_index, part.count, pre_allocated=True))
    return made


def check_same_options(partition: Partition, options: PartitionOptions) -> None:
    """Raise InvalidArgumentError if options other than defaults differ from those of the partition."""
    defaults, current = PartitionOptions(), partition.options
    differing = [
        f"{name}: requested {getattr(options, name)!r}, but it was created with {getattr(current, name)!r}"
        for name in PartitionOptions.__struct_fields__
        if getattr(options, name) not in (getattr(defaults, name), getattr(current, name))
    ]
    if differing:
        raise InvalidArgumentError(
            f"the partition {partition.name!r} exists with other settings: {'; '.join(differing)}. The settings of a "
            f"partition never change: request the same settings everywhere, before the first put, or choose another "
            f"name"
        )


def seal(state: State, name: str, connected: Collection[str]) -> list[r.AnyRecord]:
    """Return the records of a seal by one producer.

    The last seal clears pre-allocated rows that were not taken, and drops rows that no client can put any more.
    """
    partition = state.partitions.get(name)
    if partition is None:
        return [*create_partition(state, name, 0), r.SealCounted(name)]
    if partition.sealed:
        return []
    if partition.seals + 1 < partition.options.producers:
        return [r.SealCounted(name)]
    ended = unneeded_rows.clear_pre_allocated(partition) + unneeded_rows.drop_abandoned(partition, connected)
    return [r.SealCounted(name), *ended]


# ------------------------------------------------------------ retention


def has_limit(options: PartitionOptions) -> bool:
    """Return whether a partition with these options drops rows by itself."""
    return not (options.keep_rows is None and options.keep_bytes is None and options.keep_seconds is None)


class Retention(CoreService):
    """Drops rows after each event that changes a partition with a limit, and when they are too old."""

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return not all(partition.keeps_all for partition in context.state.partitions.values())

    def on_partition_changed(self, partition: Partition) -> None:
        """See `CoreService.on_partition_changed`. Each drop is applied before the next one is decided."""
        log = self.context.log
        if partition.keeps_all:
            return
        if partition.options.keep_seconds is not None and partition.births.end < partition.rows.end:
            log.apply(r.AgesRecorded(partition.name, log.now))
        for drop in rows_to_drop(partition, log.now):
            log.apply(drop)

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        times = (next_expiry(partition) for partition in self.context.state.aging.values())
        return min((time for time in times if time is not None), default=None)

    def on_due(self) -> list[Effect]:
        """Drop the rows that are too old."""
        for partition in list(self.context.state.aging.values()):
            self.on_partition_changed(partition)
        return []


def next_expiry(partition: Partition) -> float | None:
    """Return the time at which the next row becomes too old; None if no row will."""
    keep = partition.options.keep_seconds
    first = None if keep is None else partition.births.first_time(partition.rows.first_position())
    return None if keep is None or first is None else first + keep


def rows_to_drop(partition: Partition, now: float) -> Iterator[r.RowsDropped]:
    """Iterate over the records that drop rows beyond the limits. The caller applies each before it takes the next."""
    options = partition.options
    if options.keep_seconds is not None:
        old = partition.births.expired_end(now, options.keep_seconds)
        yield from _drop_records(partition, partition.rows.first_positions(below=old), "retention: keep_seconds")
    if options.keep_rows is not None:
        over = partition.row_count - options.keep_rows
        if over > 0:
            yield from _drop_records(partition, partition.rows.first_positions(over), "retention: keep_rows")
    while options.keep_bytes is not None and partition.nbytes > options.keep_bytes and partition.row_count:
        # A block's bytes are freed with its last row, so this drops the estimated number of rows and checks again.
        share = (partition.nbytes - options.keep_bytes) / partition.nbytes
        oldest = partition.rows.first_positions(max(1, int(share * partition.row_count)))
        yield from _drop_records(partition, oldest, "retention: keep_bytes")


def _drop_records(partition: Partition, positions: np.ndarray, reason: str) -> Iterator[r.RowsDropped]:
    if len(positions):
        positions = partition.groups.with_members(positions)
        rows = partition.rows.indexes_of(positions)
        yield r.RowsDropped(partition.name, rows.tobytes(), reason, partition.groups.missing_after(positions))


# ------------------------------------------------------------ clears and drops

STEP = CHUNK // 2  # rows; they take half a millisecond, or a few milliseconds if they have keys and tags

Clear = Union[ClearRows, ClearKeys, ClearPartition]


@handles(ClearRows)
def handle_clear_rows(context: Context, caller: Caller, request: ClearRows) -> Decision | Begin:
    """Clear those of these rows that exist."""
    indexes_in(request.rows)  # an error comes before the first step
    return _clear(context, request)


@handles(ClearKeys)
def handle_clear_keys(context: Context, caller: Caller, request: ClearKeys) -> Decision | Begin:
    """Clear the rows of those of these keys that exist."""
    return _clear(context, request)


@handles(ClearPartition)
def handle_clear_partition(context: Context, caller: Caller, request: ClearPartition) -> Decision | Begin:
    """Drop a partition with all its rows. An unknown partition is ignored."""
    return _clear(context, request)


@handles(Drop)
def handle_drop(context: Context, caller: Caller, request: Drop) -> Decision:
    """Drop rows and groups. The reply has the number of dropped rows."""
    warning = unknown_partition_warning(context.state.partitions, request.partition, "drop has no effect")
    records, count = drop_rows(context.state, request)
    return Decision(records, lambda: Done(count, warning))


def _clear(context: Context, request: Clear) -> Decision | Begin:
    """Clear rows at once, or if they are many, in steps."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        return Decision(
            _drop_partition(context, request.partition) if isinstance(request, ClearPartition) else [], Done
        )
    records, is_last = _clear_some(context, partition, request, 0)
    return Decision(records, Done) if is_last else Begin(_clear_in_steps(context, partition, request))


def _clear_in_steps(context: Context, partition: Partition, request: Clear) -> Steps:
    """Clear some of the rows in each step. A newer partition of the same name is not cleared."""
    start, is_last, records = 0, False, list[r.AnyRecord]()
    while not is_last:
        for record in records:
            context.log.apply(record)
        yield None
        if context.state.partitions.get(request.partition) is not partition:
            return Decision([], Done)
        context.state.check_epoch(request)
        records, is_last = _clear_some(context, partition, request, start)
        start += STEP
    return Decision(records, Done)


def _clear_some(context: Context, partition: Partition, request: Clear, start: int) -> tuple[list[r.AnyRecord], bool]:
    """Return the records of a step, and whether it is the last one. start: the rows or keys that are done."""
    name, end = partition.name, start + STEP
    if isinstance(request, ClearRows):
        some = indexes_in(request.rows[8 * start : 8 * end])
        return clear_rows(context.state, name, some), 8 * end >= len(request.rows)
    if isinstance(request, ClearKeys):
        return clear_keys(context.state, name, request.keys[start:end]), end >= len(request.keys)
    if partition.rows.count <= STEP:
        return _drop_partition(context, name), True
    chunk = next(iter(partition.rows.chunks.values()))
    rows = chunk.index[: chunk.size][chunk.alive[: chunk.size] == 1][:STEP]
    return clear_rows(context.state, name, rows), False


def _drop_partition(context: Context, name: str) -> list[r.AnyRecord]:
    for sampler in context.samplers.of_users.values():
        sampler.clear_cache(name)
    return [r.PartitionDropped(name)] if name in context.state.partitions else []


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
        positions = positions[unneeded_rows.are_undealt(partition, positions)]
    if not len(positions):
        return [], 0
    rows = partition.rows.indexes_of(positions)
    missing = [] if request.withdraws else partition.groups.missing_after(positions)
    return [r.RowsDropped(request.partition, rows.tobytes(), request.reason, missing, request.withdraws)], len(rows)
