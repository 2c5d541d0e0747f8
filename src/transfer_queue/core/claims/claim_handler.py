"""Handles claims: meets, parks or refuses them. Handles the registration of a sampler for the claims of a task.

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

from transfer_queue.core.absent_holders import AbsentHolders
from transfer_queue.core.activity import Activity
from transfer_queue.core.claims import consumer_state, deal, index_builder, lease_decisions
from transfer_queue.core.claims.background_deals import ComputedDeal, DealTooLong, LongDeals
from transfer_queue.core.claims.lease_deadlines import Leases
from transfer_queue.core.claims.plan import ClaimPlan, OpenClaim, Plans
from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.queries import value_locations
from transfer_queue.core.queries.batch_metadata import meta_reply
from transfer_queue.core.samplers.remote_calls import PendingCall, SamplerAsks, hosted_runner
from transfer_queue.core.samplers.user_sampler import Answers, AnySampler, Ask, RowsTakenError, name_of, watched_tags
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.tables.row_table import rows_without
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.errors import InvalidArgumentError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.envelopes import AnyReply, RequestEnvelope
from transfer_queue.messages.system import RegisterSampler
from transfer_queue.messages.tag_table import slice_tags
from transfer_queue.sampler.sampler_spec import describe_spec, sampler_of, spec_of

PLACED = 32  # claims met together whose replies contain the locations of values; further ones look them up


class SamplerCalls(SamplerAsks):
    """See `SamplerAsks`."""

    def decide_again(self, waiting: ParkedRequest, pending: PendingCall) -> list[Effect]:
        """See `SamplerAsks.decide_again`."""
        return decide_parked(self.context, waiting, pending)


@handles(Claim)
def handle_claim(context: Context, caller: Caller, claim: Claim) -> list[Effect]:
    """Handle a claim that arrived."""
    return deal_to(context, [OpenClaim(caller, claim, context.now, None)])


def retry_claims(context: Context, waits: Sequence[ParkedRequest], made: ComputedDeal | None = None) -> list[Effect]:
    """Decide claims that wait again: one, or several with one plan. made: see `deal.decide`."""
    claims = _reopen(context, waits)
    calls = context.services.get(SamplerCalls)
    if not claims or (calls is not None and calls.is_pending(claims[0].caller.waiter)):
        return []
    return deal_to(context, claims, made)


def decide_parked(context: Context, waiting: ParkedRequest, pending: PendingCall) -> list[Effect]:
    """Decide a parked claim with the answers of the user's sampler so far, or when it is its turn for a call."""
    claims, runner = _reopen(context, [waiting]), pending.runner
    if not claims:
        return []
    if runner is not None:
        runner.answers = pending.answers
    try:
        return deal_to(context, claims, pending=pending)
    except RowsTakenError:
        pending.answers = Answers()
        return decide_parked(context, waiting, pending)
    finally:
        if runner is not None:
            runner.answers = None


def recheck_claim(context: Context, waiting: ParkedRequest) -> list[Effect]:
    """Refuse a parked claim that the new sampler can never meet."""
    claim = waiting.claim
    try:
        plan = context.services[Plans].of(context.state.partitions.get(claim.partition), claim)
        plan.check(claim, context.samplers.strict)
    except Ask:
        pass  # the sampler checks it when it is its turn for a call
    except TransferQueueError as error:
        return context.refuse(waiting, error)
    return []


def _reopen(context: Context, waits: Sequence[ParkedRequest]) -> list[OpenClaim]:
    """Return those of these waiting claims that have a connection."""
    claims = []
    for waiting in waits:
        peer = context.parked.peers.get(waiting.waiter)
        if peer is not None:
            caller = Caller(waiting.client, peer, RequestEnvelope(waiting.sequence, 0, waiting.claim))
            claims.append(OpenClaim(caller, waiting.claim, waiting.since, waiting))
    return claims


def deal_to(
    context: Context,
    claims: Sequence[OpenClaim],
    made: ComputedDeal | None = None,
    pending: PendingCall | None = None,
) -> list[Effect]:
    """Meet claims with one plan, let them wait, end or refuse them, or begin work that they need.

    Args:
        context: The context of the controller.
        claims: One claim, or several that `wake` has found.
        made: The long deal that the claim has started, if another thread has computed it.
        pending: The call of the user's sampler that the claim has waited for.

    Raises:
        TransferQueueError: A claim that has just arrived is refused.
    """
    first, claim = claims[0], claims[0].claim
    is_new = first.waiting is None if pending is None else pending.fresh
    try:
        plan = context.services[Plans].of(context.state.partitions.get(claim.partition), claim)
        if is_new:
            plan.check(claim, context.samplers.strict)
        if is_new and not claim.count and not claim.probe:
            if first.waiting is not None:
                context.parked.unpark(first.waiting.waiter)
            return [context.answer(first.caller.waiter, first.caller.peer, ClaimReply(rows=b""))]
        outcome = deal.decide(context, plan, claims, made)
    except Ask as ask:
        if pending is not None:
            return context.services[SamplerCalls].start_further(pending, ask)
        if is_new:
            context.parked.park(first.caller, claim, _wait_of(claim))
        return context.services[SamplerCalls].request_call(first.caller.waiter, ask, fresh=is_new)
    except TransferQueueError as error:
        if first.waiting is None:
            raise
        return context.refuse(first.waiting, error)
    if outcome is None:
        return [effect for each in claims for effect in deal_to(context, [each])]
    if pending is not None:
        pending.fresh = False
    if is_new and not claim.hold and not claim.probe:
        context.services[Activity].end_work(first.caller.client, consumer_state.consumer_of(claim))
        if plan.partition is not None and plan.task in plan.partition.holds.tasks:
            _finish_previous_batch(context, plan.partition, first, outcome)
    if outcome.is_busy or (outcome.batches is None and not outcome.is_end and (claim.wait or 0.0) > 0):
        if first.waiting is None:
            context.parked.park(first.caller, claim, _wait_of(claim))
        return _begin_long_deal(context, plan, first, outcome.long)
    return _carry_out(context, plan, claims, outcome)


def empty_reply(context: Context, claim: Claim, ended: bool) -> ClaimReply:
    """Return the reply to a claim that gets no rows, with the known types of its fields, and of fields around them."""
    partition = context.state.partitions.get(claim.partition)
    fields = []
    if partition is not None and not claim.probe:
        names = value_locations.with_nested(partition, claim.fields)
        fields = [partition.fields[name].to_field_type() for name in sorted(set(names)) if name in partition.fields]
    version = -1 if partition is None or not claim.probe else partition.version
    dealt = partition.dealt.get(claim.task) if ended and partition is not None else None
    words = (context.services[Plans].of(partition, claim).warning, dealt.describe_held(claim.task) if dealt else None)
    return ClaimReply(b"", fields, ended=ended, version=version, warning=". ".join(filter(None, words)) or None)


def _begin_long_deal(context: Context, plan: ClaimPlan, opened: OpenClaim, long: DealTooLong | None) -> list[Effect]:
    """Start the long deal of a claim that waits, if it has one."""
    if long is None or plan.partition is None:
        return []
    return context.services[LongDeals].begin(plan, opened.caller.waiter, long, retry_claims)


def _carry_out(context: Context, plan: ClaimPlan, claims: Sequence[OpenClaim], outcome: deal.Outcome) -> list[Effect]:
    """Answer claims: record what they get, or that they have ended."""
    first, claim, records = claims[0], claims[0].claim, outcome.records
    if first.waiting is not None:
        context.parked.unpark_claims([each.waiting for each in claims if each.waiting is not None])
    if outcome.is_end:
        context.services[TimelineRecorder].note_end(first.caller.client, claim, first.since)
    if claim.probe or (outcome.batches is None and not records):
        reply = empty_reply(context, claim, outcome.is_end)
        return [context.answer(first.caller.waiter, first.caller.peer, reply)]
    for record in records:
        for share in record.shares if isinstance(record, r.Dealt) else ():
            context.measures.counters["dealt_rows"] += len(share.rows) // 8
    if outcome.batches is None:  # the end: the remainder was dealt to other ranks, or is skipped
        return context.commit(first.caller, Decision(records, lambda: empty_reply(context, claim, outcome.is_end)))
    return _meet(context, plan, claims, outcome.batches, records)


def _meet(
    context: Context,
    plan: ClaimPlan,
    claims: Sequence[OpenClaim],
    batches: list[np.ndarray],
    records: list[r.AnyRecord],
) -> list[Effect]:
    """Record what these claims get, and reply to them."""
    partition, claim = cast(Partition, plan.partition), claims[0].claim
    tokens = lease_decisions.grant(context.state, plan, claims, batches, records)
    held = []
    if plan.task in partition.holds.tasks and not (tokens and claim.lease is not None):
        for each, rows in zip(claims, batches, strict=True):
            held.append(consumer_state.hold_records(partition, each.caller.client, each.claim, rows))
    context.log.actor = claims[0].caller.client
    for record in [*records, *chain.from_iterable(held)]:
        context.log.apply(record)
    context.log.actor = ""
    replies = _make_replies(context, plan, claims, batches, tokens, held)
    client, envelope = claims[0].caller.client, claims[0].caller.envelope
    if len(claims) > 1:
        callers = [each.caller for each in claims]
        answers: list[tuple[str, int, AnyReply]] = [
            (each.client, each.envelope.sequence, reply) for each, reply in zip(callers, replies, strict=True)
        ]
        context.log.apply(r.RepliesSent(answers))
    else:
        acknowledged, finished = envelope.acknowledged, envelope.finished
        context.log.apply(r.ReplySent(client, envelope.sequence, acknowledged, replies[0], finished))
    effects: list[Effect] = []
    for each, rows, reply in zip(claims, batches, replies, strict=True):
        if each.claim.places and len(claims) <= PLACED:
            # The reply that is kept for retries does not contain the locations, because a retry may come much later.
            places = value_locations.locate_claimed(context.state, partition, rows, sorted(set(each.claim.fields)))
            reply = msgspec.structs.replace(reply, places=places)
        effects.append(Send(each.caller.peer, each.caller.envelope.sequence, reply))
    return effects


def _make_replies(
    context: Context,
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
    timeline, activity = context.services[TimelineRecorder], context.services[Activity]
    start = 0
    for at, each in enumerate(claims):
        end = start + len(batches[at])
        client, reply, token = each.caller.client, replies[at], tokens[at] if tokens else 0
        timeline.note_claim(client, each.claim, each.since, partition, reply.rows, positions[start:end])
        activity.begin_work(client, consumer_state.consumer_of(each.claim))
        numbers = None
        if counts is not None:
            context.services[Leases].begin(partition.name, partition.leases.by_token[token])
            numbers = None if (counts[start:end] == 1).all() else counts[start:end].tobytes()
        elif token:
            context.services[AbsentHolders].note_holder(client)
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


def needs_indexes(context: Context, partition: Partition, claim: Claim) -> bool:
    """Return whether a claim has to wait for its indexes, and start to build them."""
    if len(partition.rows.chunks) <= index_builder.SMALL:
        return False
    return index_builder.needs_indexes(context, partition, context.services[Plans].of(partition, claim))


def _finish_previous_batch(context: Context, partition: Partition, opened: OpenClaim, outcome: deal.Outcome) -> None:
    """Finish the earlier rows of a client that fetches its next batch, except for rows that it fetches again."""
    client, task, rank = opened.caller.client, opened.claim.task, consumer_state.rank_of(opened.claim)
    if not partition.holds.by_holder:
        return
    if not len(partition.holds.rows_of(task, client, rank)):
        gone = partition.holds.find_disconnected(task, rank, context.connections.peers)
        if gone is not None:
            context.log.apply(r.HoldInherited(partition.name, task, gone, rank, client))
    held = partition.holds.rows_of(task, client, rank)
    ended = held if outcome.batches is None else rows_without(held, outcome.batches[0])
    for record in unneeded_rows.finish_rows(partition, task, client, ended):
        context.log.apply(record)


def _add_spanning_warning(context: Context, plan: ClaimPlan, rows: np.ndarray) -> str | None:
    """Return the plan's warning, with one, once for each partition, about groups with rows of several clients."""
    partition = cast(Partition, plan.partition)
    words = consumer_state.describe_spanning_group(partition, rows, plan.group_size or 1)
    if words is not None:
        context.samplers.warned.add(partition.name)
    return ". ".join(filter(None, (words, plan.warning))) or None


def _wait_of(claim: Claim) -> float:
    """Return the seconds for which a claim is parked; without an end if it waits only for a computation."""
    return max(0.0, claim.wait or 0.0) or math.inf


@handles(RegisterSampler)
def handle_register_sampler(context: Context, caller: Caller, request: RegisterSampler) -> list[Effect]:
    """Use a built-in sampler for a task. Batches that were dealt stay; claims that wait are decided again."""
    task, sampler = request.task, sampler_of(request.sampler, request.arguments)
    spec = spec_of(sampler)
    assert spec is not None
    known = _own_sampler(context, task)
    if known is not None and known[1] != spec:
        raise InvalidArgumentError(
            f"task {task!r} has the sampler {known[0]}, but {describe_spec(*spec)} is requested for it now. All "
            f"datasets of a task need the same sampler: pass the same one to all of them, or to one of them only, or "
            f"give this dataset another task_name"
        )
    if known is not None:
        return context.commit(caller, Decision([], Done))
    effects = context.commit(caller, Decision([r.SamplerRegistered(task, *spec)], Done))
    context.state.watched = list(dict.fromkeys([*context.state.watched, *watched_tags(sampler)]))
    for waiting in list(context.state.waiting.by_waiter.values()):
        if isinstance(waiting.request, Claim) and waiting.request.task == task:
            effects += recheck_claim(context, waiting)
            context.changes.changes_of(waiting.request.partition).tasks |= {task}
    return effects


def _own_sampler(context: Context, task: str) -> tuple[str, tuple[str, str] | None] | None:
    """Return the sampler that the configuration or a dataset has set for exactly this task; None if there is none.

    It is described, with its specification, which is None for a user's sampler. The specification of a registered one
    is made again, because it may be from a release in which the sampler had other arguments.
    """
    configured, registered = context.samplers.of_tasks.get(task), context.state.samplers.get(task)
    if configured is None and registered is None:
        return None
    sampler = configured if configured is not None else context.samplers.of_task(task)
    where = "of another dataset" if configured is None else "controller.task_samplers"
    spec = spec_of(sampler)
    return f"{name_of(sampler) if spec is None else describe_spec(*spec)} ({where})", spec


def use_sampler(context: Context, sampler: AnySampler) -> list[Effect]:
    """Replace the system's sampler. Batches that are dealt stay; claims that wait are checked and decided again."""
    former = hosted_runner(context.samplers.default)
    context.samplers.replace_default(sampler)
    context.services[Plans].forget_all()
    effects = [] if former is None else context.services[SamplerCalls].replace(former)
    context.state.watched = watched_tags(*context.samplers.all)
    context.services.start_needed()
    for waiting in list(context.state.waiting.by_waiter.values()):
        if isinstance(waiting.request, Claim):
            effects += recheck_claim(context, waiting)
    for name in {**context.state.partitions, **context.state.waiting.claims}:  # claims may wait for new partitions
        context.changes.changes_of(name).everything = True
    return effects
