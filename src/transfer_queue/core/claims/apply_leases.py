"""How leases, acknowledgements and lost ranks change a partition. Called only in this folder."""

from __future__ import annotations

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.dealt import DealtBatches
from transfer_queue.core.tables.rows import CLAIMED


def claim_rows(partition: Partition, task: str, positions: np.ndarray) -> None:
    """Record that the task got these rows under a lease."""
    partition.add_task(task)
    for key, chunk, at, _ in partition.rows.split(positions):
        column = chunk.consumed_column(task)
        fresh = at[(column[at] == 0) & (chunk.alive[at] == 1)]
        column[fresh] = CLAIMED
        partition.claimed[task] = partition.claimed.get(task, 0) + len(fresh)
        partition.remove_from_ready_sets(task, key, chunk, fresh)


def return_rows(partition: Partition, task: str, positions: np.ndarray) -> None:
    """Make those of these rows that the task has claimed ready again."""
    for key, chunk, at, _ in partition.rows.split(positions):
        column = chunk.consumed_column(task)
        back = at[column[at] == CLAIMED]
        partition.count_unclaimed(task, column[back])
        column[back] = 0
        partition.update_ready_sets(task, key, chunk, back)


def acknowledge(partition: Partition, record: r.LeaseAcked) -> None:
    """Apply a `records.LeaseAcked`."""
    rows, consumed = np.frombuffer(record.rows, "<i8"), np.frombuffer(record.consumed, "<i8")
    leases = partition.leases
    leases.remove_rows(record.token, rows)
    leases.acked.add_one(record.task, partition.rows.positions_of(rows))
    done = partition.rows.positions_of(consumed)
    if not len(done):
        return
    batch = partition.batch_of(record.task, int(done[0]))
    if batch is not None:
        leases.remove_consumed(batch, consumed)
    leases.acked.reset(record.task, done)
    partition.consume(record.task, done)
    if record.token:  # without a lease, the client that got the rows still refers to them
        partition.holds.skip(record.task, done)


def take_back_batch(partition: Partition, token: int) -> None:
    """Make the rows of a batch that was not handed over ready again. Its client does not refer to them any longer."""
    batch = partition.unseen_batches.by_token.pop(token)
    partition.holds.drop(batch.task, batch.indexes)
    partition.take_back(batch)


def end_all_leases(partition: Partition) -> None:
    """End all leases. Their rows are delivered again, without counting as delivered."""
    for token in list(partition.unseen_batches.by_token):
        take_back_batch(partition, token)
    for token, lease in list(partition.leases.by_token.items()):
        if lease.batch is None:
            return_rows(partition, lease.task, partition.rows.positions_of(partition.leases.live_rows(lease)))
        partition.leases.remove(token)


def apply_rank_left(partition: Partition, record: r.RankLeft) -> None:
    """Apply a `records.RankLeft`."""
    task = record.task
    for token in record.tokens:
        partition.leases.remove(token)
    dealt = partition.dealt.setdefault(task, DealtBatches())
    dealt.left.add(record.dp_rank)
    dealt.unasked.discard(record.dp_rank)
    positions = partition.rows.positions_of(np.frombuffer(record.rows, "<i8"))
    for key in {partition.batch_of(task, position) for position in positions.tolist()}:
        assert key is not None
        batch = dealt.find(*key[1:])
        assert batch is not None
        everything = partition.rows.positions_of(batch.rows)
        dealt.remove_rows(dealt.by_key[key[1:]], batch.live)
        for _, chunk, at, _ in partition.rows.split(everything[everything >= 0]):
            chunk.dealt[task][at] = 0
    partition.leases.acked.reset(task, positions)
    return_rows(partition, task, positions)
