"""Handles claims: meets, parks or refuses them.

`batch_selection` decides which rows a claim gets. This module makes the records and the reply from that, and notes what
the client now references or leases.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from transfer_queue.core.claims import batch_selection, consumer_state, index_builder, lease_decisions
from transfer_queue.core.claims.background_deals import ComputedDeal
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import ComputeDeal, Effect, Send
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.queries import value_locations
from transfer_queue.core.queries.batch_metadata import meta_reply
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.remote_calls import PendingCall
from transfer_queue.core.samplers.unused_entries import unused_entries_warning
from transfer_queue.core.samplers.user_sampler import Answers, AnySampler, Ask, RowsTakenError, name_of
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.unknown_partitions import require_partition
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey
from transfer_queue.core.tables.row_table import rows_without
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.envelopes import AnyReply, RequestEnvelope


@handles(Claim)
def handle_claim(context: ControllerContext, caller: Caller, claim: Claim) -> list[Effect]:
    """Handle a claim that arrived."""
    partition = context.state.partitions.get(claim.partition)
    sampler = context.samplers.sampler_for(claim, partition)
    try:
        batch_selection.check_claim(partition, sampler, claim, context.samplers.strict)
        if not claim.count and not claim.probe:
            return [Send(caller.peer, caller.envelope.sequence, ClaimReply(rows=b""))]
        outcome = _decide(context, partition, sampler, claim)
    except Ask as ask:
        context.parked.park(caller, claim, _wait_of(claim) or math.inf)
        return context.sampler_calls.request_call(context, caller.waiter, ask, fresh=True)
    if not claim.hold and not claim.probe:
        _end_previous_batch(context, caller.client, claim, outcome.rows)
    if outcome.busy or (outcome.rows is None and not outcome.ended and _wait_of(claim)):
        context.parked.park(caller, claim, _wait_of(claim) or math.inf)
        return _begin_long_deal(context, sampler, claim, caller.waiter, outcome)
    return _answer_claim(context, sampler, caller, claim, outcome, context.now)


def retry_claim(context: ControllerContext, waiting: ParkedRequest, made: ComputedDeal | None = None) -> list[Effect]:
    """Decide a parked claim again. made: the long deal that it started, if another thread has computed it."""
    claim = waiting.claim
    waiter = waiting.waiter
    peer = context.parked.peers.get(waiter)
    if peer is None or context.sampler_calls.is_pending(waiter):
        return []
    partition = context.state.partitions.get(claim.partition)
    try:
        sampler = context.samplers.sampler_for(claim, partition)
        outcome = _decide(context, partition, sampler, claim, made)
    except Ask as ask:
        return context.sampler_calls.request_call(context, waiter, ask)
    except TransferQueueError as error:
        return context.refuse(waiting, error)
    return _effects_of_decision(context, sampler, waiting, peer, outcome)


def decide_parked(context: ControllerContext, waiting: ParkedRequest, pending: PendingCall) -> list[Effect]:
    """Decide a parked claim with the answers of the user's sampler so far, or when it is its turn for a call."""
    claim, peer, runner = waiting.claim, context.parked.peers.get(waiting.waiter), pending.runner
    if peer is None:
        return []
    if runner is not None:
        runner.answers = pending.answers
    partition = context.state.partitions.get(claim.partition)
    try:
        sampler = context.samplers.sampler_for(claim, partition)
        if pending.fresh:
            batch_selection.check_claim(partition, sampler, claim, context.samplers.strict)
            if not claim.count and not claim.probe:
                context.parked.unpark(waiting.waiter)
                return [Send(peer, waiting.sequence, ClaimReply(rows=b""))]
        outcome = _decide(context, partition, sampler, claim)
    except Ask as ask:
        return context.sampler_calls.start_further(context, pending, ask)
    except RowsTakenError:
        pending.answers = Answers()
        return decide_parked(context, waiting, pending)
    except TransferQueueError as error:
        return context.refuse(waiting, error)
    finally:
        if runner is not None:
            runner.answers = None
    if pending.fresh and not claim.hold and not claim.probe:
        _end_previous_batch(context, waiting.client, claim, outcome.rows)
    pending.fresh = False
    return _effects_of_decision(context, sampler, waiting, peer, outcome)


def recheck_claim(context: ControllerContext, waiting: ParkedRequest) -> list[Effect]:
    """Refuse a parked claim that the new sampler can never meet."""
    claim = waiting.claim
    partition = context.state.partitions.get(claim.partition)
    try:
        sampler = context.samplers.sampler_for(claim, partition)
        batch_selection.check_claim(partition, sampler, claim, context.samplers.strict)
    except Ask:
        pass  # the sampler checks it when it is its turn for a call
    except TransferQueueError as error:
        return context.refuse(waiting, error)
    return []


def _effects_of_decision(
    context: ControllerContext,
    sampler: AnySampler,
    waiting: ParkedRequest,
    peer: int,
    outcome: batch_selection.ClaimOutcome,
) -> list[Effect]:
    """Return the effects of a decision about a parked claim."""
    claim, waiter = waiting.claim, waiting.waiter
    if outcome.busy:
        return _begin_long_deal(context, sampler, claim, waiter, outcome)
    if outcome.rows is None and not outcome.ended and _wait_of(claim):
        return []
    context.parked.unpark(waiter)
    caller = Caller(waiting.client, peer, RequestEnvelope(waiting.sequence, 0, claim))
    return _answer_claim(context, sampler, caller, claim, outcome, waiting.since)


def empty_reply(context: ControllerContext, claim: Claim, ended: bool) -> ClaimReply:
    """Return the reply to a claim that gets no rows, with the known types of its fields, and of fields around them."""
    partition = context.state.partitions.get(claim.partition)
    fields = []
    if partition is not None and not claim.probe:
        names = value_locations.with_nested(partition, claim.fields)
        fields = [partition.fields[name].to_field_type() for name in sorted(set(names)) if name in partition.fields]
    version = -1 if partition is None or not claim.probe else partition.version
    sampler = context.samplers.sampler_for(claim, partition)
    dealt = partition.dealt.get(claim.task) if ended and partition is not None else None
    words = (unused_entries_warning(sampler, claim.sampling), dealt.describe_held(claim.task) if dealt else None)
    return ClaimReply(b"", fields, ended=ended, version=version, warning=". ".join(filter(None, words)) or None)


def _begin_long_deal(
    context: ControllerContext,
    sampler: AnySampler,
    claim: Claim,
    waiter: RequestKey,
    outcome: batch_selection.ClaimOutcome,
) -> list[Effect]:
    """Start the long deal of this claim, if it has one."""
    long = outcome.long
    if long is None:
        return []
    partition = context.state.partitions[claim.partition]
    job = context.background_deals.begin(partition, claim.task, waiter, long)
    return [ComputeDeal(job.number, lambda: batch_selection.compute_deal(sampler, long.deal))]


def _answer_claim(
    context: ControllerContext,
    sampler: AnySampler,
    caller: Caller,
    claim: Claim,
    outcome: batch_selection.ClaimOutcome,
    since: float,
) -> list[Effect]:
    """Answer a claim that arrived at `since`."""
    client = caller.client
    if outcome.ended:
        context.timeline.note_end(client, claim, since)
    if claim.probe or (outcome.rows is None and not outcome.records):
        return [Send(caller.peer, caller.envelope.sequence, empty_reply(context, claim, outcome.ended))]
    rows, records = outcome.rows, lease_decisions.mark_claimed(claim, outcome.records)
    for record in records:
        if isinstance(record, r.Dealt):
            context.measures.counters["dealt_rows"] += sum([len(share.rows) for share in record.shares]) // 8
    partition = context.state.partitions[claim.partition]
    if rows is None:  # the end: the remainder was dealt to other ranks, or is skipped
        return context.commit(caller, Decision(records, lambda: empty_reply(context, claim, outcome.ended)))
    context.activity.begin_work(client, consumer_state.consumer_of(claim))
    unit = claim_samplers.dealt_group_size(sampler, partition)
    records, token = lease_decisions.grant(context.state, partition, client, claim, rows, records, unit)
    leased = token and claim.lease is not None
    handed = consumer_state.hold_records(partition, client, claim, rows) if not leased else []
    warning = warning_of(context, sampler, partition, claim, rows)
    count = lease_decisions.deliveries(partition, claim.task, rows) if leased else None

    def reply() -> AnyReply:
        positions = partition.rows.positions_of(rows)
        meta = meta_reply(partition, positions, rows, claim.fields)
        context.timeline.note_claim(client, claim, since, partition, meta.rows, positions)
        if leased:
            context.lease_deadlines.begin(partition.name, partition.leases.by_token[token])
        elif token:
            context.absent_holders.note_holder(client)
        elif not handed and warning is None:
            return meta
        return msgspec.structs.replace(meta, held=bool(handed), warning=warning, token=token, deliveries=count)

    effects = context.commit(caller, Decision([*records, *handed], reply))
    return [add_locations(context, partition, claim, rows, effect) for effect in effects] if claim.places else effects


def add_locations(
    context: ControllerContext, partition: Partition, claim: Claim, rows: np.ndarray, effect: Effect
) -> Effect:
    """Add the present locations of the values to the reply.

    The reply that is kept for retries does not contain them, because a retry may come much later.
    """
    if not isinstance(effect, Send) or not isinstance(effect.reply, ClaimReply):
        return effect
    places = value_locations.locate_claimed(context.state, partition, rows, sorted(set(claim.fields)))
    return msgspec.structs.replace(effect, reply=msgspec.structs.replace(effect.reply, places=places))


def needs_indexes(context: ControllerContext, partition: Partition, claim: Claim) -> bool:
    """Return whether a claim has to wait for its indexes, and start to build them."""
    return index_builder.needs_indexes(context, partition, context.samplers.sampler_for(claim, partition), claim)


def _decide(
    context: ControllerContext,
    partition: Partition | None,
    sampler: AnySampler,
    claim: Claim,
    made: ComputedDeal | None = None,
) -> batch_selection.ClaimOutcome:
    """Skip the rows that the sampler skips, and return what the claim gets. It waits until the needed indexes exist."""
    if partition is None:
        if claim.again:
            require_partition(context.state.partitions, claim.partition)
        return batch_selection.NOTHING
    if index_builder.needs_indexes(context, partition, sampler, claim):
        return batch_selection.wait_for_deal()
    if claim.again:  # nothing is dealt, so nothing is skipped
        return batch_selection.select_batch(context.state, partition, sampler, claim)
    timed = context.samplers.is_timed(sampler)
    began = context.config.timer() if timed else 0.0
    try:
        for record in batch_selection.decide_asked(partition, claim):
            context.log.apply(record)
        for record in batch_selection.decide_stale(partition, sampler, claim):
            context.log.apply(record)
        for record in batch_selection.decide_passed_over(partition, sampler, claim):
            context.log.apply(record)
        busy = context.background_deals.is_computing(claim.partition, claim.task)
        return batch_selection.select_batch(context.state, partition, sampler, claim, busy, made)
    finally:
        if timed:
            context.samplers.note(name_of(sampler), context.config.timer() - began)


def _end_previous_batch(context: ControllerContext, client: str, claim: Claim, rows: np.ndarray | None) -> None:
    """Finish the earlier rows of a client that fetches its next batch, except for rows that it fetches again."""
    context.activity.end_work(client, consumer_state.consumer_of(claim))
    partition = context.state.partitions.get(claim.partition)
    if partition is not None and partition.holds.by_holder and claim.task in partition.holds.tasks:
        rank = consumer_state.rank_of(claim)
        if not len(partition.holds.rows_of(claim.task, client, rank)):
            gone = partition.holds.find_disconnected(claim.task, rank, context.connections.peers)
            if gone is not None:
                context.log.apply(r.HoldInherited(partition.name, claim.task, gone, rank, client))
        held = partition.holds.rows_of(claim.task, client, rank)
        ended = held if rows is None else rows_without(held, rows)
        for record in unneeded_rows.finish_rows(partition, claim.task, client, ended):
            context.log.apply(record)


def warning_of(
    context: ControllerContext, sampler: AnySampler, partition: Partition, claim: Claim, rows: np.ndarray
) -> str | None:
    """Return a warning for the log of the client that sent the claim; None if there is none."""
    spanning = _spanning_warning(context, sampler, partition, rows)
    unused = unused_entries_warning(sampler, claim.sampling)
    return f"{spanning}. {unused}" if spanning and unused else spanning or unused


def _spanning_warning(
    context: ControllerContext, sampler: AnySampler, partition: Partition, rows: np.ndarray
) -> str | None:
    """Return a warning, once for each partition, if a group by order of reservation has rows of several clients."""
    size = claim_samplers.group_size(sampler)
    if size is None or size < 2 or partition.groups.explicit or partition.name in context.samplers.warned:
        return None
    words = consumer_state.describe_spanning_group(partition, rows, size)
    if words is not None:
        context.samplers.warned.add(partition.name)
    return words


def _wait_of(claim: Claim) -> float:
    """Return the seconds for which a claim that cannot be met is parked; 0 if it is answered at once."""
    return max(0.0, claim.wait or 0.0)
