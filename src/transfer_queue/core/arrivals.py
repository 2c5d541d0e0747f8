"""New rows begin with all that their put brings. Called by `State.apply` alone.

The way of most rows, and the short one: they are neighbours, and nothing was known of them, so that there is nothing
to look up, to merge or to release (`partition.Partition.reserve` and `values.py` do that).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue.core import values
from transfer_queue.core.partition import Partition
from transfer_queue.core.records import RowsPut
from transfer_queue.core.rows import Run
from transfer_queue.core.wide_columns import MANY_FIELDS


def arrive(partition: Partition, put: RowsPut) -> None:
    """See `records.RowsPut`."""
    count = put.count
    block = None if put.block is None else partition.blocks.opened(put.block)
    start = partition.rows.end
    runs = partition.rows.append(put.first_index, count, owner=partition.owner(put.client))
    partition.arrived(put.client, count)
    if put.keys is not None:
        partition.keys.update(zip(put.keys, range(start, start + count), strict=True))
    if block is not None:
        partition.blocks.add(put.block_number, put.client, block, count * len(block.schema), partition.number)
        partition.nbytes += block.nbytes
        values.learn(partition, block)
        for field in partition.fields_of(block.schema):
            field.live += count
            field.ever += count
    told = block is not None or put.keys is not None or put.tags is not None
    done = 0
    for key, chunk, at, first, last in runs:
        before, done = done, done + last - first
        if put.keys is not None:
            chunk.key_list()[first:last] = put.keys[before:done]
        if put.tags is not None:
            chunk.tag_list()[first:last] = [tag or None for tag in put.tags[before:done]]
        if block is not None:
            slots: Any = before if done - before == 1 else np.arange(before, done, dtype="i4")
            many = len(block.schema) >= MANY_FIELDS
            wide = values.made_together(partition, chunk, block) if many else None
            if wide is not None:
                wide.put(at, put.block_number, slots)
            for spec in () if wide is not None else block.schema:
                column, slot = chunk.field_columns(spec.name)
                column[at] = put.block_number
                slot[at] = slots
        if told:
            chunk.changed[at] = partition.version
            partition.changes.news(partition.version, key)
    if put.tags is not None and partition.rows.watched:
        _note(partition, runs, put.tags)
    if put.groups is not None:
        partition.join(put.groups, range(start, start + count))
    if block is not None and partition.ready:
        fields = partition.names_of(block.schema)
        for key, chunk, _, first, last in runs:
            partition.unseen.run(fields, key, chunk, first, last)
        partition.published(fields)


def _note(partition: Partition, runs: list[Run], tags: list[dict[str, Any] | None]) -> None:
    """Takes the watched ones of these tags into their columns."""
    done = 0
    for key, chunk, _, first, last in runs:
        mine = tags[done : done + last - first]
        done += last - first
        for name in partition.rows.watched:
            having = [(at, tag[name]) for at, tag in enumerate(mine, first) if tag and name in tag]
            if having:
                chunk.note(name, *map(list, zip(*having)))
                for ready in partition.ready.values():
                    ready.retagged(key, name)
