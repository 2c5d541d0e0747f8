"""Applies records to the state, live and in a replay. No other code changes the state.

The appliers of puts, claims and storage units are in their rooms, in modules with the name `apply`. Those of
partitions, locks, merged states, waiting requests and clients are here.
"""

from __future__ import annotations

from transfer_queue.core.claims import apply as apply_claims
from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import APPLIERS as APPLIERS
from transfer_queue.core.events.registry import applies
from transfer_queue.core.puts import apply as apply_puts
from transfer_queue.core.state.restore import merge_state, take_loaded
from transfer_queue.core.state.state import ReplyCache, State
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.tables.leases import KeyLock
from transfer_queue.core.units import apply as apply_units

MODULES = (apply_puts, apply_claims, apply_units)
"""The other modules with appliers, imported so that these are registered."""


def apply_record(state: State, record: r.AnyRecord) -> None:
    """Apply one record."""
    APPLIERS[type(record)](state, record)


@applies(r.PartitionMade)
def _apply_partition_made(state: State, record: r.PartitionMade) -> None:
    state.make_partition(record.partition, record.options)


@applies(r.LockGranted)
def _apply_lock_granted(state: State, record: r.LockGranted) -> None:
    lock = KeyLock(record.token, record.partition, record.keys, record.client, record.seconds, record.since)
    state.locks.add(lock)
    state.next_token = max(state.next_token, record.token + 1)


@applies(r.LockEnded)
def _apply_lock_ended(state: State, record: r.LockEnded) -> None:
    state.locks.remove(record.token)


@applies(r.StateMerged)
def _apply_state_merged(state: State, record: r.StateMerged) -> None:
    merge_state(state, take_loaded(state, record)[1])


@applies(r.AgesRecorded)
def _apply_aged(state: State, record: r.AgesRecorded) -> None:
    partition = state.partitions[record.partition]
    partition.births.add(record.time, partition.rows.end, partition.rows.first_position())


@applies(r.PartitionDropped)
def _apply_partition_dropped(state: State, record: r.PartitionDropped) -> None:
    partition = state.partitions.pop(record.partition)
    apply_puts.clear_all(partition)
    state.blocks.stored.pop(partition.number, None)
    state.blocks.saved.pop(partition.number, None)
    state.counted.mark_changed(record.partition)
    state.aging.pop(record.partition, None)


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


@applies(r.ClientIntroduced)
def _apply_client_introduced(state: State, record: r.ClientIntroduced) -> None:
    state.introductions[record.client] = record.introduction


@applies(r.ClientForgotten)
def _apply_client_forgotten(state: State, record: r.ClientForgotten) -> None:
    state.clients.pop(record.client, None)
    state.introductions.pop(record.client, None)
