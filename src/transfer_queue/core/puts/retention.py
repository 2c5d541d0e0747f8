"""Drops the oldest rows of a partition beyond its `keep_rows`, `keep_bytes` or `keep_seconds`.

Declared groups are dropped as a whole, because an incomplete group cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.state.partition import Partition
from transfer_queue.messages.descriptors import PartitionOptions


def has_limit(options: PartitionOptions) -> bool:
    """Return whether a partition with these options drops rows by itself."""
    return not (options.keep_rows is None and options.keep_bytes is None and options.keep_seconds is None)


def record_age(partition: Partition, now: float) -> list[r.AnyRecord]:
    """Return the record that notes the time, if rows were added since the last one."""
    if partition.options.keep_seconds is None or partition.births.end >= partition.rows.end:
        return []
    return [r.AgesRecorded(partition.name, now)]


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
        for record in record_age(partition, log.now):
            log.apply(record)
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
        yield from _drop_records(
            partition, partition.rows.first_positions(partition.rows.count, old), "retention: keep_seconds"
        )
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
