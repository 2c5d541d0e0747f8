"""Applies records to the state, live and in a replay. No other code changes the state.

The appliers of puts and clears are in `core.puts.apply`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import APPLIERS as APPLIERS
from transfer_queue.core.events.registry import applies
from transfer_queue.core.puts import apply as apply_puts
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.restore import merge_state, replace_state, take_loaded
from transfer_queue.core.state.state import ReplyCache, State
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.tables.changes import Found, LossEvent, values_in_blocks
from transfer_queue.core.tables.dealt import DealtBatches
from transfer_queue.core.tables.leases import KeyLock, RowLease
from transfer_queue.core.tables.rows import CHUNK_BITS, ValueColumns
from transfer_queue.messages.descriptors import MOVER, BlockLocation, NewBlock, UnitInfo

MAX_FENCED = 4096  # writers proven dead that are remembered; connections of earlier ones ended long ago

MODULES = (apply_puts,)
"""The other module with appliers, imported so that these are registered."""


def apply_record(state: State, record: r.AnyRecord) -> None:
    """Apply one record."""
    APPLIERS[type(record)](state, record)


@applies(r.PartitionMade)
def _apply_partition_made(state: State, record: r.PartitionMade) -> None:
    state.make_partition(record.partition, record.options)


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
        claimed = consumed
        if given != record.consumed:
            claimed = np.isin(consumed, partition.rows.positions_of(np.frombuffer(given, "<i8")))
            claimed, consumed = consumed[claimed], consumed[~claimed]
        else:
            consumed = consumed[:0]
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
    _free(state, partition, record.freed)


@applies(r.LeaseEnded)
def _apply_lease_ended(state: State, record: r.LeaseEnded) -> None:
    partition = state.new_version(record.partition)
    if record.token in partition.unseen_batches.by_token:
        partition.take_back(record.token)
        return
    partition.leases.remove_rows(record.token, np.frombuffer(record.rows, "<i8"))
    _count_deliveries(state, partition, record.task, record.counted)
    returned = partition.rows.positions_of(np.frombuffer(record.returned, "<i8"))
    partition.return_claimed(record.task, returned)


@applies(r.RankLeft)
def _apply_rank_left(state: State, record: r.RankLeft) -> None:
    partition = state.new_version(record.partition)
    _count_deliveries(state, partition, record.task, record.counted)
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


@applies(r.LockGranted)
def _apply_lock_granted(state: State, record: r.LockGranted) -> None:
    lock = KeyLock(record.token, record.partition, record.keys, record.client, record.seconds, record.since)
    state.locks.add(lock)
    state.next_token = max(state.next_token, record.token + 1)


@applies(r.LockEnded)
def _apply_lock_ended(state: State, record: r.LockEnded) -> None:
    state.locks.remove(record.token)


@applies(r.PassedOver)
def _apply_passed_over(state: State, record: r.PassedOver) -> None:
    partition = state.new_version(record.partition)
    partition.pass_over(record.task, partition.rows.positions_of(np.frombuffer(record.rows, "<i8")), record.reason)
    _free(state, partition, record.freed)


@applies(r.RowsHeld)
def _apply_handed(state: State, record: r.RowsHeld) -> None:
    holds = state.partitions[record.partition].holds
    holds.add(record.task, record.client, record.dp_rank, np.frombuffer(record.rows, "<i8"))


@applies(r.HoldInherited)
def _apply_inherited(state: State, record: r.HoldInherited) -> None:
    holds = state.partitions[record.partition].holds
    holds.transfer(record.task, record.client, record.dp_rank, record.heir)


@applies(r.StateLoaded)
def _apply_state_loaded(state: State, record: r.StateLoaded) -> None:
    replace_state(state, record)


@applies(r.StateMerged)
def _apply_state_merged(state: State, record: r.StateMerged) -> None:
    merge_state(state, take_loaded(state, record)[1])


@applies(r.RowsFinished)
def _apply_finished(state: State, record: r.RowsFinished) -> None:
    partition = state.partitions[record.partition]
    partition.holds.finish(record.task, record.client, np.frombuffer(record.rows, "<i8"))
    if record.freed:
        _free(state, state.new_version(record.partition), record.freed)


@applies(r.AgesRecorded)
def _apply_aged(state: State, record: r.AgesRecorded) -> None:
    partition = state.partitions[record.partition]
    partition.births.add(record.time, partition.rows.end, partition.rows.first_position())


@applies(r.GroupsTaken)
def _apply_groups_taken(state: State, record: r.GroupsTaken) -> None:
    state.partitions[record.partition].wants.promise(record.task, record.client, record.rows)


@applies(r.PartitionDropped)
def _apply_partition_dropped(state: State, record: r.PartitionDropped) -> None:
    partition = state.partitions.pop(record.partition)
    apply_puts.clear_all(partition)
    state.blocks.stored.pop(partition.number, None)
    state.blocks.saved.pop(partition.number, None)
    state.counted.mark_changed(record.partition)
    state.aging.pop(record.partition, None)


@applies(r.ConsumptionForgotten)
def _apply_consumption_forgotten(state: State, record: r.ConsumptionForgotten) -> None:
    state.new_version(record.partition).forget_consumption(record.task)


@applies(r.SealCounted)
def _apply_seal_counted(state: State, record: r.SealCounted) -> None:
    state.new_version(record.partition).seal()


@applies(r.RequestParked)
def _apply_parked(state: State, record: r.RequestParked) -> None:
    state.waiting.add(ParkedRequest(record.client, record.sequence, record.since, record.deadline, record.request))


@applies(r.Unparked)
def _apply_unparked(state: State, record: r.Unparked) -> None:
    state.waiting.remove((record.client, record.sequence))


@applies(r.ReplySent)
def _apply_replied(state: State, record: r.ReplySent) -> None:
    kept = state.clients.get(record.client)
    if kept is None:
        kept = state.clients[record.client] = ReplyCache()
    if record.acknowledged > kept.acknowledged or record.finished:
        kept.advance(record.acknowledged, record.finished)
    if not kept.is_finished(record.sequence):  # otherwise the client does not ask for it again
        kept.replies[record.sequence] = record.reply


@applies(r.RepliesSent)
def _apply_answered(state: State, record: r.RepliesSent) -> None:
    for client, sequence, reply in record.answers:
        _apply_replied(state, r.ReplySent(client, sequence, 0, reply))


@applies(r.SamplerRegistered)
def _apply_sampler_registered(state: State, record: r.SamplerRegistered) -> None:
    state.samplers[record.task] = (record.sampler, record.arguments)


@applies(r.RankAsked)
def _apply_rank_asked(state: State, record: r.RankAsked) -> None:
    state.partitions[record.partition].dealt[record.task].unasked.discard(record.dp_rank)


@applies(r.ClientIntroduced)
def _apply_client_introduced(state: State, record: r.ClientIntroduced) -> None:
    state.introductions[record.client] = record.introduction


@applies(r.ClientForgotten)
def _apply_client_forgotten(state: State, record: r.ClientForgotten) -> None:
    state.clients.pop(record.client, None)
    state.introductions.pop(record.client, None)


def _count_deliveries(state: State, partition: Partition, task: str, counted: bytes) -> None:
    partition.leases.delivered.add_one(task, partition.rows.positions_of(np.frombuffer(counted, "<i8")))


def _free(state: State, partition: Partition, freed: bytes) -> None:
    rows = np.frombuffer(freed, "<i8")
    apply_puts.clear_rows(partition, partition.rows.positions_of(rows))
    partition.freed += len(rows)


# ------------------------------------------------------------ storage units


@applies(r.ExtentsClosed)
def _apply_extents_closed(state: State, record: r.ExtentsClosed) -> None:
    state.blocks.shorten(record.extents, record.lengths)
    state.blocks.close([(unit, extent) for unit, extent in record.extents])


@applies(r.UnitRegistered)
def _apply_unit_registered(state: State, record: r.UnitRegistered) -> None:
    state.add_unit(UnitInfo(*msgspec.structs.astuple(record)))  # with the same columns


@applies(r.UnitLost)
def _apply_unit_lost(state: State, record: r.UnitLost) -> None:
    state.units.pop(record.unit)
    state.disks.discard(record.unit)
    state.stores.discard(record.unit)
    state.mirrors.discard(record.unit)
    state.draining.discard(record.unit)
    state.lost_units[record.unit] = record.when
    _lose(state, lambda units, extents: units == record.unit, record.unit, record.when)
    places = [*state.blocks.extents, *state.blocks.freed]
    state.blocks.forget([place for place in places if place[0] == record.unit])


@applies(r.ExtentsLost)
def _apply_extents_lost(state: State, record: r.ExtentsLost) -> None:
    gone = np.frombuffer(record.extents, "<i8")
    _lose(state, lambda units, extents: (units == record.unit) & np.isin(extents, gone), record.unit, record.when)
    state.blocks.forget([(record.unit, extent) for extent in gone.tolist()])


@applies(r.ExtentsFreed)
def _apply_extents_freed(state: State, record: r.ExtentsFreed) -> None:
    state.blocks.forget([(record.unit, extent) for extent in np.frombuffer(record.extents, "<i8").tolist()])


@applies(r.BlocksMoved)
def _apply_moved(state: State, record: r.BlocksMoved) -> None:
    place = BlockLocation(record.unit, record.extent, 0, record.generation, record.length)
    closed = [(record.unit, record.extent)]
    numbers, offsets = np.frombuffer(record.blocks, "<i8"), np.frombuffer(record.offsets, "<i8")
    state.blocks.relocate(numbers, place, offsets, record.left, MOVER, state.mirrors)
    for repacked in record.repacked:
        state.next_block = max(state.next_block, repacked.first_block + len(repacked.blocks))
        closed += [(copy.unit, copy.extent) for block in repacked.blocks for copy in block.copies]
        partition = state.partitions.get(repacked.partition)
        if partition is not None:
            _apply_repacked(partition, repacked, MOVER)
    state.blocks.close(list(dict.fromkeys(closed)))


@applies(r.UnitDraining)
def _apply_unit_draining(state: State, record: r.UnitDraining) -> None:
    (state.draining.add if record.draining else state.draining.discard)(record.unit)


@applies(r.WriterFenced)
def _apply_writer_fenced(state: State, record: r.WriterFenced) -> None:
    state.fenced[record.writer] = None
    while len(state.fenced) > MAX_FENCED:
        del state.fenced[next(iter(state.fenced))]
    state.blocks.close([(record.unit, extent) for extent in record.extents])


def _lose(state: State, gone: Callable[[np.ndarray, np.ndarray], np.ndarray], unit: int, when: str) -> None:
    """Record that values are lost whose blocks have no location left."""
    blocks = state.blocks.remove_lost_locations(gone)
    if not len(blocks):
        return
    state.losses += 1
    for name, partition in state.partitions.items():
        found = list(values_in_blocks(partition.rows, blocks))
        if found:
            _lose_values(state.new_version(name), found, state.losses, LossEvent(unit, when, partition.version))


def _lose_values(partition: Partition, found: list[Found], number: int, loss: LossEvent) -> None:
    """Record that these values are lost by event `number`, so that their rows do not have them any more."""
    partition.losses.events[number] = loss
    released: list[np.ndarray] = []
    touched: dict[int, list[np.ndarray]] = {}
    for key, chunk, name, columns, at in found:
        released.append(columns[0][at])
        partition.field_ranks.remove(chunk, at)
        columns[0][at] = 0
        partition.field_ranks.add(chunk, at)
        partition.losses.mark(chunk, name, at, number)
        partition.remove_values(name, len(at))
        touched.setdefault(key, []).append(at)
    partition.forget_gone_ranks()
    partition.nbytes -= partition.blocks.release(np.concatenate(released))
    for key, parts in touched.items():
        at = np.unique(np.concatenate(parts))
        partition.changes.mark_changed(partition.version, at + (key << CHUNK_BITS))
        for ready in partition.ready.values():
            ready.update(key, partition.rows.chunks[key], at, partition.groups)


def _apply_repacked(partition: Partition, repacked: r.RowsRepacked, writer: str) -> None:
    """Apply a `records.RowsRepacked`."""
    blocks, first = repacked.blocks, repacked.first_block
    rows, sources, slots = (
        np.frombuffer(column, kind)
        for column, kind in ((repacked.rows, "<i8"), (repacked.sources, "<i8"), (repacked.slots, "<i4"))
    )
    taken = [_slot_column(block, 0, block.rows if block.slots is None else len(block.slots) // 4) for block in blocks]
    counts, fresh = [len(each) for each in taken], np.concatenate(taken)
    numbers = np.repeat(np.arange(first, first + len(blocks)), counts)
    positions = partition.rows.positions_of(rows)
    values = np.zeros(len(blocks), "i8")
    found: list[tuple[str, ValueColumns, np.ndarray, np.ndarray]] = []
    names = [{spec.name for spec in block.schema} for block in blocks]
    for name in sorted(set().union(*names)):
        having = np.repeat([name in each for each in names], counts)
        there = np.flatnonzero((positions >= 0) & having)
        for _, chunk, at, where in partition.rows.split(positions[there]):
            columns = chunk.field.get(name)
            if columns is None:
                continue
            chosen = there[where]
            same = (columns[0][at] == sources[chosen]) & (columns[1][at] == slots[chosen])
            found.append((name, columns, np.asarray(at)[same], chosen[same]))
            values += np.bincount(numbers[chosen[same]] - first, minlength=len(blocks))
    for number, block, needed in zip(range(first, first + len(blocks)), blocks, values.tolist(), strict=True):
        if needed:
            partition.blocks.add(number, writer, block, needed, partition.number)
            partition.nbytes += block.nbytes
    released: list[np.ndarray] = []
    for name, columns, at, chosen in found:
        columns[0][at], columns[1][at] = numbers[chosen], fresh[chosen]
        if partition.blocks.equal.of_block:
            old, new = (sources[chosen], slots[chosen]), (numbers[chosen], fresh[chosen])
            places = (zip(*(column.tolist() for column in pair), strict=True) for pair in (old, new))
            partition.blocks.equal.move(partition.number, name, dict(zip(*places, strict=True)))
        released.append(sources[chosen])
    if released:
        partition.nbytes -= partition.blocks.release(np.concatenate(released))


def _slot_column(block: NewBlock, first: int, last: int) -> np.ndarray:
    """Return the row of a block that has the value of each target from `first` to before `last`, i4."""
    if block.slots is None:
        return np.arange(first, last, dtype="i4")
    return np.frombuffer(block.slots, "<i4")[first:last]
