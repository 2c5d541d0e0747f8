"""Applies what tasks get, return, acknowledge and finish: deals, leases, ranks, and the rows that clients refer to."""

from __future__ import annotations

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import applies
from transfer_queue.core.puts.apply import free_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.dealt import DealtBatches
from transfer_queue.core.tables.leases import RowLease


@applies(r.Dealt)
def _apply_dealt(state: State, record: r.Dealt) -> None:
    partition = state.new_version(record.partition)
    consumed: np.ndarray | None = None
    if record.batch_index is not None:
        shares = [(share.dp_rank, np.frombuffer(share.rows, "<i8")) for share in record.shares]
        positions = partition.deal(record.task, record.batch_index, record.batch_size, shares)
        partition.dealt[record.task].unasked.update(record.unasked)
        if b"".join(share.rows for share in record.shares) == record.consumed:  # true for all built-in samplers
            consumed = positions
    if consumed is None:
        consumed = partition.rows.positions_of(np.frombuffer(record.consumed, "<i8"))
    if record.claimed:
        given = b"".join(share.rows for share in record.shares)
        claimed, consumed = consumed, consumed[:0]
        if given != record.consumed:
            is_given = np.isin(claimed, partition.rows.positions_of(np.frombuffer(given, "<i8")))
            claimed, consumed = claimed[is_given], claimed[~is_given]
        partition.claim(record.task, claimed)
    partition.consume(record.task, consumed)
    for batch in record.unseen:
        partition.unseen_batches.by_token[batch.token] = batch
        state.next_token = max(state.next_token, batch.token + 1)
    if record.lease is not None:
        _apply_leased(state, record.lease)
    for lease in record.leases:
        _apply_leased(state, lease)


@applies(r.RowsLeased)
def _apply_leased(state: State, record: r.RowsLeased) -> None:
    partition = state.partitions[record.partition]
    state.next_token = max(state.next_token, record.token + 1)
    partition.leases.add(
        RowLease(
            record.token, record.task, record.client, np.frombuffer(record.rows, "<i8"), record.seconds,
            None if record.batch is None else (record.task, *record.batch), record.replicas, record.unit,
        )
    )  # fmt: skip


@applies(r.HandedOver)
def _apply_handed_over(state: State, record: r.HandedOver) -> None:
    del state.partitions[record.partition].unseen_batches.by_token[record.token]


@applies(r.LeaseAcked)
def _apply_lease_acked(state: State, record: r.LeaseAcked) -> None:
    partition = state.new_version(record.partition)
    rows, consumed = np.frombuffer(record.rows, "<i8"), np.frombuffer(record.consumed, "<i8")
    leases = partition.leases
    leases.remove_rows(record.token, rows)
    leases.acked.add_one(record.task, partition.rows.positions_of(rows))
    done = partition.rows.positions_of(consumed)
    if len(done):
        batch = partition.batch_of(record.task, int(done[0]))
        if batch is not None:
            leases.remove_consumed(batch, consumed)
        leases.acked.reset(record.task, done)
        partition.consume(record.task, done)
        if record.token:  # without a lease, the client that got the rows still refers to them
            partition.holds.skip(record.task, done)
    free_rows(partition, record.freed)


@applies(r.LeaseEnded)
def _apply_lease_ended(state: State, record: r.LeaseEnded) -> None:
    partition = state.new_version(record.partition)
    if record.token in partition.unseen_batches.by_token:
        partition.take_back(record.token)
        return
    partition.leases.remove_rows(record.token, np.frombuffer(record.rows, "<i8"))
    _count_deliveries(partition, record.task, record.counted)
    returned = partition.rows.positions_of(np.frombuffer(record.returned, "<i8"))
    partition.return_claimed(record.task, returned)


@applies(r.RankLeft)
def _apply_rank_left(state: State, record: r.RankLeft) -> None:
    partition = state.new_version(record.partition)
    _count_deliveries(partition, record.task, record.counted)
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
    partition.return_claimed(task, positions)


@applies(r.PassedOver)
def _apply_passed_over(state: State, record: r.PassedOver) -> None:
    partition = state.new_version(record.partition)
    partition.pass_over(record.task, partition.rows.positions_of(np.frombuffer(record.rows, "<i8")), record.reason)
    free_rows(partition, record.freed)


@applies(r.RowsHeld)
def _apply_handed(state: State, record: r.RowsHeld) -> None:
    holds = state.partitions[record.partition].holds
    holds.add(record.task, record.client, record.dp_rank, np.frombuffer(record.rows, "<i8"))


@applies(r.HoldInherited)
def _apply_inherited(state: State, record: r.HoldInherited) -> None:
    holds = state.partitions[record.partition].holds
    holds.transfer(record.task, record.client, record.dp_rank, record.heir)


@applies(r.RowsFinished)
def _apply_finished(state: State, record: r.RowsFinished) -> None:
    partition = state.partitions[record.partition]
    partition.holds.finish(record.task, record.client, np.frombuffer(record.rows, "<i8"))
    if record.freed:
        free_rows(state.new_version(record.partition), record.freed)


@applies(r.GroupsTaken)
def _apply_groups_taken(state: State, record: r.GroupsTaken) -> None:
    state.partitions[record.partition].wants.promise(record.task, record.client, record.rows)


@applies(r.ConsumptionForgotten)
def _apply_consumption_forgotten(state: State, record: r.ConsumptionForgotten) -> None:
    state.new_version(record.partition).forget_consumption(record.task)


@applies(r.RankAsked)
def _apply_rank_asked(state: State, record: r.RankAsked) -> None:
    state.partitions[record.partition].dealt[record.task].unasked.discard(record.dp_rank)


def _count_deliveries(partition: Partition, task: str, counted: bytes) -> None:
    partition.leases.delivered.add_one(task, partition.rows.positions_of(np.frombuffer(counted, "<i8")))
