"""How clears and drops change a partition. Called only in this folder."""

from __future__ import annotations

import numpy as np

from transfer_queue.core.events.records import RowsDropped
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.rows import CHUNK_BITS, CONSUMED, Chunk


def drop_rows(partition: Partition, dropped: RowsDropped) -> None:
    """Apply a `records.RowsDropped`."""
    rows = np.frombuffer(dropped.rows, "<i8")
    positions = partition.rows.positions_of(rows)
    partition.admitted -= len(rows)
    if not dropped.withdrawn:
        partition.drops.add(rows, dropped.reason)
    clear_rows(partition, positions, withdrawn=dropped.withdrawn)
    for name, count in dropped.unborn:
        if count:
            partition.groups.unborn[name] = count
        else:
            partition.groups.unborn.pop(name, None)


def clear_all(partition: Partition) -> None:
    """Remove all rows of a partition that is removed itself."""
    partition.ready.clear()
    partition.unseen.clear()
    clear_rows(partition, partition.rows.live_positions())


def clear_rows(partition: Partition, positions: np.ndarray, *, withdrawn: bool = False) -> None:
    """Remove these rows. withdrawn: as if they had never joined their groups."""
    for key, chunk, at, _ in partition.rows.split(np.sort(positions)):
        partition.window.remove(key, chunk, at)
        chunk.alive[at] = 0
        chunk.living -= len(at)
        partition.rows.count -= len(at)
        for task, taken in chunk.consumed.items():
            partition.tasks[task] -= int(np.count_nonzero(taken[at] == CONSUMED))
            partition.count_unclaimed(task, taken[at])
            taken[at] = 0
        partition.leases.clear_rows(key, at)
        for column in (*chunk.held.values(), *chunk.finished.values()):
            column[at] = 0
        partition.passed.codes.clear_rows(key, at)
        for task, dealt in chunk.dealt.items():
            numbers, counts = np.unique(dealt[at], return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                if number:
                    partition.dealt[task].remove_rows(number, count)
            dealt[at] = 0
        for ready in partition.ready.values():
            ready.update(key, chunk, at, partition.groups)
        if chunk.group is not None:
            for place, number in zip(at.tolist(), chunk.group[at].tolist(), strict=True):
                if number >= 0 and withdrawn:
                    _forget_member(partition, number, place + (key << CHUNK_BITS))
                elif number >= 0:
                    partition.groups.leave(number)
            chunk.group[at] = -1
        partition.changes.clear(partition.version, chunk, at)
        _clear_values(partition, chunk, at)
        if chunk.waiting[at].any():
            gone = set((at[chunk.waiting[at] == 1] + (key << CHUNK_BITS)).tolist())
            partition.waiting = [p for p in partition.waiting if p not in gone]
            chunk.waiting[at] = 0
        if partition.rows.drop_if_empty(key):
            partition.changes.forget_chunk(key)
            for ready in partition.ready.values():
                ready.forget_chunk(key)
    partition.forget_gone_ranks()


def _forget_member(partition: Partition, number: int, position: int) -> None:
    partition.groups.forget_member(number, position)
    if number in partition.groups.declared:
        for ready in partition.ready.values():
            ready.note_group_size(number, partition.groups)
            partition.gained.add(ready.task)  # a group that was too large may be complete now


def _clear_values(partition: Partition, chunk: Chunk, at: np.ndarray) -> None:
    released: list[np.ndarray] = []
    for name in chunk.lost:
        partition.losses.forget(chunk, name, at)
    partition.field_ranks.remove(chunk, at)
    for name, (column, _) in chunk.field.items():
        old = column[at]
        count = int(np.count_nonzero(old))
        if count:
            column[at] = 0
            released.append(old)
            partition.remove_values(name, count)
    if released:
        partition.nbytes -= partition.blocks.release(np.concatenate(released))
    chunk.clear_tags(at)
    for key in chunk.take_keys(at):
        del partition.keys[key]
