"""Handles claims: meets, parks or refuses them.

`deal` decides which rows claims get. This module makes the records and the replies from that, and notes what the
clients now reference or lease. One claim is a list of one: claims that wait and differ only in their rank are met
together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import cast

import msgspec
import numpy as np

from transfer_queue.core.claims import consumer_state, deal, index_builder, lease_decisions
from transfer_queue.core.claims.background_deals import ComputedDeal
from transfer_queue.core.claims.plan import ClaimPlan
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import ComputeDeal, Effect, Send
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.queries import value_locations
from transfer_queue.core.queries.batch_metadata import meta_reply
from transfer_queue.core.samplers.remote_calls import PendingCall
from transfer_queue.core.samplers.user_sampler import Answers, Ask, RowsTakenError
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.tables.row_table import rows_without
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.tag_table import slice_tags

PLACED = 32  # claims met together whose replies contain the locations of values; further ones look them up


class OpenClaim(msgspec.Struct, frozen=True):
    """A claim that is not answered yet."""

    caller: Caller
    claim: Claim
    since: float
    """When it arrived, by the controller's clock."""
    waiting: ParkedRequest | None
    """The claim as a request that waits; None if it has just arrived."""


@handles(Claim)
def handle_claim(context: ControllerContext, caller: Caller, claim: Claim) -> list[Effect]:
    """Handle a claim that arrived."""
    plan = context.plans.of(context.state.partitions.get(claim.partition), claim)
    try:
        plan.check(claim, context.samplers.strict)
        if not claim.count and not claim.probe:
            return [Send(caller.peer, caller.envelope.sequence, ClaimReply(rows=b""))]
        outcome = deal.decide(context, plan, [claim])
    except Ask as ask:
        context.parked.park(caller, claim, _wait_of(claim))
        return context.sampler_calls.request_call(context, caller.waiter, ask, fresh=True)
    assert outcome is not None
    if not claim.hold and not claim.probe:
        _end_previous_batch(context, caller.client, claim, outcome)
    return _carry_out(context, plan, [OpenClaim(caller, claim, context.now, None)], outcome)


def retry_claims(
    context: ControllerContext, waits: Sequence[ParkedRequest], made: ComputedDeal | None = None
) -> list[Effect]:
    """Decide claims that wait again: one, or several that differ only in their rank.

    made: the long deal that the claim has started, if another thread has computed it.
    """
    peers, claim = context.parked.peers, waits[0].claim
    waits = [waiting for waiting in waits if waiting.waiter in peers]
    if not waits or context.sampler_calls.is_pending(waits[0].waiter):
        return []
    try:
        plan = context.plans.of(context.state.partitions.get(claim.partition), claim)
        outcome = deal.decide(context, plan, [waiting.claim for waiting in waits], made)
    except Ask as ask:
        return context.sampler_calls.request_call(context, waits[0].waiter, ask)
    except TransferQueueError as error:
        return context.refuse(waits[0], error)
    if outcome is None:
        return [effect for waiting in waits for effect in retry_claims(context, [waiting])]
    return _carry_out(context, plan, [_reopen(context, waiting) for waiting in waits], outcome)


def decide_parked(context: ControllerContext, waiting: ParkedRequest, pending: PendingCall) -> list[Effect]:
    """Decide a parked claim with the answers of the user's sampler so far, or when it is its turn for a call."""
    claim, runner = waiting.claim, pending.runner
    if waiting.waiter not in context.parked.peers:
        return []
    if runner is not None:
        runner.answers = pending.answers
    try:
        plan = context.plans.of(context.state.partitions.get(claim.partition), claim)
        if pending.fresh:
            plan.check(claim, context.samplers.strict)
            if not claim.count and not claim.probe:
                peer = context.parked.peers[waiting.waiter]
                context.parked.unpark(waiting.waiter)
                return [Send(peer, waiting.sequence, ClaimReply(rows=b""))]
        outcome = deal.decide(context, plan, [claim])
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
    assert outcome is not None
    if pending.fresh and not claim.hold and not claim.probe:
        _end_previous_batch(context, waiting.client, claim, outcome)
    pending.fresh = False
    return _carry_out(context, plan, [_reopen(context, waiting)], outcome)


def recheck_claim(context: ControllerContext, waiting: ParkedRequest) -> list[Effect]:
    """Refuse a parked claim that the new sampler can never meet."""
    claim = waiting.claim
    try:
        plan = context.plans.of(context.state.partitions.get(claim.partition), claim)
        plan.check(claim, context.samplers.strict)
    except Ask:
        pass  # the sampler checks it when it is its turn for a call
    except TransferQueueError as error:
        return context.refuse(waiting, error)
    return []


def empty_reply(context: ControllerContext, claim: Claim, ended: bool) -> ClaimReply:
    """Return the reply to a claim that gets no rows, with the known types of its fields, and of fields around them."""
    partition = context.state.partitions.get(claim.partition)
    fields = []
    if partition is not None and not claim.probe:
        names = value_locations.with_nested(partition, claim.fields)
        fields = [partition.fields[name].to_field_type() for name in sorted(set(names)) if name in partition.fields]
    version = -1 if partition is None or not claim.probe else partition.version
    dealt = partition.dealt.get(claim.task) if ended and partition is not None else None
    words = (context.plans.of(partition, claim).warning, dealt.describe_held(claim.task) if dealt else None)
    return ClaimReply(b"", fields, ended=ended, version=version, warning=". ".join(filter(None, words)) or None)


def _reopen(context: ControllerContext, waiting: ParkedRequest) -> OpenClaim:
    """Return a claim that waits and has a connection."""
    peer = context.parked.peers[waiting.waiter]
    caller = Caller(waiting.client, peer, RequestEnvelope(waiting.sequence, 0, waiting.claim))
    return OpenClaim(caller, waiting.claim, waiting.since, waiting)


def _carry_out(
    context: ControllerContext, plan: ClaimPlan, claims: Sequence[OpenClaim], outcome: deal.Outcome
) -> list[Effect]:
    """Let claims wait, begin the long deal of a claim, end it, or meet them."""
    first, claim, client = claims[0], claims[0].claim, claims[0].caller.client
    if outcome.is_busy or (outcome.batches is None and not outcome.is_end and (claim.wait or 0.0) > 0):
        if first.waiting is None:
            context.parked.park(first.caller, claim, _wait_of(claim))
        return _begin_long_deal(context, plan, first, outcome)
    if first.waiting is not None:
        context.parked.unpark_claims([each.waiting for each in claims if each.waiting is not None])
    if outcome.is_end:
        context.timeline.note_end(client, claim, first.since)
    if claim.probe or (outcome.batches is None and not outcome.records):
        reply = empty_reply(context, claim, outcome.is_end)
        return [Send(first.caller.peer, first.caller.envelope.sequence, reply)]
    for record in outcome.records:
        if isinstance(record, r.Dealt):
            context.measures.counters["dealt_rows"] += sum([len(share.rows) for share in record.shares]) // 8
    if outcome.batches is None:  # the end: the remainder was dealt to other ranks, or is skipped
        return context.commit(
            first.caller, Decision(outcome.records, lambda: empty_reply(context, claim, outcome.is_end))
        )
    return _meet(context, plan, claims, outcome.batches, outcome.records)


def _begin_long_deal(
    context: ControllerContext, plan: ClaimPlan, opened: OpenClaim, outcome: deal.Outcome
) -> list[Effect]:
    """Start the long deal of this claim, if it has one."""
    long = outcome.long
    if long is None:
        return []
    job = context.background_deals.begin(cast(Partition, plan.partition), plan.task, opened.caller.waiter, long)
    return [ComputeDeal(job.number, lambda: deal.compute_deal(plan.sampler, long.deal))]


def _meet(
    context: ControllerContext,
    plan: ClaimPlan,
    claims: Sequence[OpenClaim],
    batches: list[np.ndarray],
    records: list[r.AnyRecord],
) -> list[Effect]:
    """Record what these claims get, and reply to them."""
    partition, claim = cast(Partition, plan.partition), claims[0].claim
    tokens = lease_decisions.grant(
        context.state, plan, [(each.caller.client, each.claim) for each in claims], batches, records
    )
    held = []
    if plan.task in partition.holds.tasks and not (tokens and claim.lease is not None):
        for each, rows in zip(claims, batches, strict=True):
            held.append(consumer_state.hold_records(partition, each.caller.client, each.claim, rows))
    context.timeline.actor = claims[0].caller.client
    for record in [*records, *chain.from_iterable(held)]:
        context.log.apply(record)
    context.timeline.actor = ""
    replies = _make_replies(context, plan, claims, batches, tokens, held)
    if len(claims) == 1:
        effects = context.reply(claims[0].caller, replies[0])
    else:
        answered = [(each.caller.client, each.caller.envelope.sequence) for each in claims]
        context.log.apply(r.RepliesSent([(*each, reply) for each, reply in zip(answered, replies, strict=True)]))
        effects = [
            Send(each.caller.peer, each.caller.envelope.sequence, reply)
            for each, reply in zip(claims, replies, strict=True)
        ]
    for at, each in enumerate(claims) if len(claims) <= PLACED else ():
        if each.claim.places:
            effects[at] = _add_locations(context, partition, each.claim, batches[at], effects[at])
    return effects


def _make_replies(
    context: ControllerContext,
    plan: ClaimPlan,
    claims: Sequence[OpenClaim],
    batches: list[np.ndarray],
    tokens: list[int],
    held: list[list[r.AnyRecord]],
) -> list[ClaimReply]:
    """Return the replies to claims that are met, and note what the clients have now.

    tokens: see `lease_decisions.grant`. held: for each claim, the record that its client references the rows.
    """
    partition, claim = cast(Partition, plan.partition), claims[0].claim
    rows = batches[0] if len(batches) == 1 else np.concatenate(batches)
    positions = partition.rows.positions_of(rows)
    whole = meta_reply(partition, positions, rows, claim.fields)
    replies = [whole] if len(batches) == 1 else _cut_reply(partition, plan, whole, batches)
    counts = lease_decisions.deliveries(partition, plan.task, positions) if tokens and claim.lease is not None else None
    warning = plan.warning
    if plan.groups_by_order and partition.name not in context.samplers.warned:
        warning = _add_spanning_warning(context, plan, rows)
    start = 0
    for at, each in enumerate(claims):
        end = start + len(batches[at])
        client, reply, token = each.caller.client, replies[at], tokens[at] if tokens else 0
        context.timeline.note_claim(client, each.claim, each.since, partition, reply.rows, positions[start:end])
        context.activity.begin_work(client, consumer_state.consumer_of(each.claim))
        numbers = None
        if counts is not None:
            context.lease_deadlines.begin(partition.name, partition.leases.by_token[token], context.now)
            numbers = None if (counts[start:end] == 1).all() else counts[start:end].tobytes()
        elif token:
            context.absent_holders.note_holder(client)
        is_held = bool(held and held[at])
        if token or is_held or warning is not None:
            replies[at] = msgspec.structs.replace(reply, held=is_held, warning=warning, token=token, deliveries=numbers)
            warning = None
        start = end
    return replies


def _cut_reply(partition: Partition, plan: ClaimPlan, whole: ClaimReply, batches: list[np.ndarray]) -> list[ClaimReply]:
    """Cut the reply for all rows into one reply for each batch."""
    if any(field.mixed_rank for field in whole.fields):  # not in all of the batches
        names = list(plan.fields)
        return [meta_reply(partition, partition.rows.positions_of(rows), rows, names) for rows in batches]
    ends = [0, *accumulate(map(len, batches))]
    column, fields, tags, epoch = whole.rows, whole.fields, whole.tags, whole.epoch
    steps = {name: len(shapes) // ends[-1] for name, shapes in whole.shapes.items()}
    return [
        ClaimReply(
            rows=column[8 * start : 8 * end], fields=fields, epoch=epoch,
            tags=None if tags is None else slice_tags(tags, start, end),
            shapes={name: whole.shapes[name][start * step : end * step] for name, step in steps.items()},
            dtypes={name: codes[start:end] for name, codes in whole.dtypes.items()},
        )
        for start, end in pairwise(ends)
    ]  # fmt: skip


def _add_locations(
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
    if len(partition.rows.chunks) <= index_builder.SMALL:
        return False
    return context.index_builder.needs_indexes(partition, context.plans.of(partition, claim))


def _end_previous_batch(context: ControllerContext, client: str, claim: Claim, outcome: deal.Outcome) -> None:
    """Finish the earlier rows of a client that fetches its next batch, except for rows that it fetches again."""
    context.activity.end_work(client, consumer_state.consumer_of(claim))
    partition = context.state.partitions.get(claim.partition)
    if partition is None or not partition.holds.by_holder or claim.task not in partition.holds.tasks:
        return
    rank = consumer_state.rank_of(claim)
    if not len(partition.holds.rows_of(claim.task, client, rank)):
        gone = partition.holds.find_disconnected(claim.task, rank, context.connections.peers)
        if gone is not None:
            context.log.apply(r.HoldInherited(partition.name, claim.task, gone, rank, client))
    held = partition.holds.rows_of(claim.task, client, rank)
    ended = held if outcome.batches is None else rows_without(held, outcome.batches[0])
    for record in unneeded_rows.finish_rows(partition, claim.task, client, ended):
        context.log.apply(record)


def _add_spanning_warning(context: ControllerContext, plan: ClaimPlan, rows: np.ndarray) -> str | None:
    """Return the plan's warning, with one, once for each partition, about groups with rows of several clients."""
    partition = cast(Partition, plan.partition)
    words = consumer_state.describe_spanning_group(partition, rows, plan.group_size or 1)
    if words is not None:
        context.samplers.warned.add(partition.name)
    return ". ".join(filter(None, (words, plan.warning))) or None


def _wait_of(claim: Claim) -> float:
    """Return the seconds for which a claim is parked; without an end if it waits only for a computation."""
    return max(0.0, claim.wait or 0.0) or math.inf
