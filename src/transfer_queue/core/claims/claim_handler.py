"""Handles claims: meets, parks or refuses them, and decides them again when their sampler is replaced.

`deal` decides which rows claims get, and `answers` records it and replies. One claim is a list of one: claims that wait
and differ only in their rank are met together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from transfer_queue.core.activity import Activity
from transfer_queue.core.claims import answers, deal, deal_jobs
from transfer_queue.core.claims.deal_jobs import ComputedDeal, LongDeals
from transfer_queue.core.claims.plan import OpenClaim, Plans, consumer_of, rank_of
from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.samplers.calls import Answers, AnySampler, Ask, RowsTakenError, name_of, watched_tags
from transfer_queue.core.samplers.remote_calls import PendingCall, SamplerAsks, hosted_runner
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.tables.rows import rows_without
from transfer_queue.errors import InvalidArgumentError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.system import RegisterSampler
from transfer_queue.sampler.sampler_spec import describe_spec, sampler_of, spec_of


class SamplerCalls(SamplerAsks):
    """See `SamplerAsks`."""

    def decide_again(self, waiting: ParkedRequest, pending: PendingCall) -> list[Effect]:
        """See `SamplerAsks.decide_again`."""
        return decide_parked(self.context, waiting, pending)


@handles(Claim)
def handle_claim(context: Context, caller: Caller, claim: Claim) -> list[Effect]:
    """Handle a claim that arrived."""
    return deal_to(context, [OpenClaim(caller, claim, context.log.now, None)])


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


def _reopen(context: Context, waits: Sequence[ParkedRequest]) -> list[OpenClaim]:
    """Return those of these waiting claims that have a connection."""
    claims = []
    for waiting in waits:
        caller = context.parked.caller_of(waiting)
        if caller is not None:
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
    first = claims[0]
    claim = first.claim
    is_new = first.waiting is None if pending is None else pending.fresh
    try:
        plan = context.services[Plans].of(context.state.partitions.get(claim.partition), claim)
        if is_new:
            plan.check(claim, context.samplers.strict)
        if is_new and not claim.count and not claim.probe:
            if first.waiting is not None:
                context.parked.unpark(first.waiting)
            return [context.answer(first.caller.waiter, first.caller.peer, ClaimReply(rows=b""))]
        outcome = deal.decide(context, plan, claims, made)
    except Ask as ask:
        if pending is not None:
            return context.services[SamplerCalls].queue_of(ask.runner).start_further(pending, ask)
        if is_new:
            context.parked.park(first.caller, claim, _wait_of(claim))
        return context.services[SamplerCalls].queue_of(ask.runner).request_call(first.caller.waiter, ask, fresh=is_new)
    except TransferQueueError as error:
        if first.waiting is None:
            raise
        return context.refuse(first.waiting, error)
    if outcome is None:
        return [effect for each in claims for effect in deal_to(context, [each])]
    if pending is not None:
        pending.fresh = False
    if is_new and not claim.hold and not claim.probe:
        if outcome.batches is None:  # otherwise it begins with its next rows at once
            context.services[Activity].end_work(first.caller.client, consumer_of(claim))
        if plan.partition is not None and plan.task in plan.partition.holds.tasks:
            _finish_previous_batch(context, plan.partition, first, outcome)
    if outcome.is_busy or (outcome.batches is None and not outcome.is_end and (claim.wait or 0.0) > 0):
        if first.waiting is None:
            context.parked.park(first.caller, claim, _wait_of(claim))
        if outcome.long is None or plan.partition is None:
            return []
        return context.services[LongDeals].begin(plan, first.caller.waiter, outcome.long, retry_claims)
    return answers.answer(context, plan, claims, outcome)


def needs_indexes(context: Context, partition: Partition, claim: Claim) -> bool:
    """Return whether a claim has to wait for its indexes, and start to build them."""
    if len(partition.rows.chunks) <= deal_jobs.SMALL:
        return False
    return deal_jobs.needs_indexes(context, partition, context.services[Plans].of(partition, claim))


def _finish_previous_batch(context: Context, partition: Partition, opened: OpenClaim, outcome: deal.Outcome) -> None:
    """Finish the earlier rows of a client that fetches its next batch, except for rows that it fetches again."""
    client, task, rank = opened.caller.client, opened.claim.task, rank_of(opened.claim)
    if not partition.holds.by_holder:
        return
    if not len(partition.holds.rows_of(task, client, rank)):
        previous = partition.holds.find_disconnected(task, rank, context.connections.peers)
        if previous is not None:
            context.log.apply(r.HoldInherited(partition.name, task, previous, rank, client))
    held = partition.holds.rows_of(task, client, rank)
    ended = held if outcome.batches is None else rows_without(held, outcome.batches[0])
    for record in unneeded_rows.finish_rows(partition, task, client, ended):
        context.log.apply(record)


def _wait_of(claim: Claim) -> float:
    """Return the seconds for which a claim is parked; without an end if it waits only for a computation."""
    return max(0.0, claim.wait or 0.0) or math.inf


# ------------------------------------------------------------ samplers that are replaced


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
            effects += _recheck_claim(context, waiting)
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
    effects = [] if former is None else context.services[SamplerCalls].queue_of(former).end()
    context.state.watched = watched_tags(*context.samplers.all)
    context.services.start_needed()
    for waiting in list(context.state.waiting.by_waiter.values()):
        if isinstance(waiting.request, Claim):
            effects += _recheck_claim(context, waiting)
    for name in {**context.state.partitions, **context.state.waiting.claims}:  # claims may wait for new partitions
        context.changes.changes_of(name).everything = True
    return effects


def _recheck_claim(context: Context, waiting: ParkedRequest) -> list[Effect]:
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
