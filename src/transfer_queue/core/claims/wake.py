"""Chooses the waiting claims to decide again after a change, in lists of claims that are met together.

A thousand claims may wait, and most still lack rows. Claims of a list have one plan, and differ only in their rank.
They are met together if the sampler would deal the same rows to one large claim as to these claims one after the other,
or if their batches were dealt before. At most TOGETHER claims are met at once, so that the replies to the first ones
are sent while the others are decided.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from transfer_queue.core.claims import lease_decisions
from transfer_queue.core.claims.plan import ClaimPlan, Plans
from transfer_queue.core.samplers.user_sampler import UserSampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import (
    ClaimQueue,
    ParkedRequest,
    RequestKey,
    ShareKey,
    least_count,
    share_key,
)
from transfer_queue.messages.claims import Claim

TOGETHER = 128  # claims
_REQUESTED = attrgetter(
    "count", "fields", "lease", "replicas", "hand_over", "since", "least", "probe", "ahead"
)  # what claims that are met together have in common


def claims_to_retry(
    plans: Plans,
    partition: Partition,
    task: str,
    queue: ClaimQueue,
    gained: bool,
    shares: Iterable[ShareKey],
    consumed: bool,
    connected: Container[RequestKey],
) -> Iterator[list[ParkedRequest]]:
    """Iterate over the claims of a queue that could be met now, in lists that are met together.

    The caller decides each list before it takes the next one.

    Args:
        plans: The plans of claims.
        partition: The partition of the claims.
        task: The task of the claims.
        queue: The waiting claims.
        gained: Whether rows became ready for the task.
        shares: The batches that were dealt to the task.
        consumed: Whether all rows are consumed.
        connected: The requests whose clients are connected, so that they can get a reply.
    """
    of_shares = [waiting for key in shares for waiting in queue.claims_for_batch(key)]
    yield from _claims_of_shares(plans, partition, of_shares, connected)
    yield from [[queue.claims[waiter]] for waiter in queue.watchers]
    if consumed:
        yield from [[queue.claims[waiter]] for waiter in queue.finite]
    others = isinstance(plans.samplers.of_task(task), UserSampler)  # which may depend on anything
    if not gained and not others:
        return
    if not others and not partition.sealed and not _has_enough_rows(partition, task, queue):
        return
    final: dict[ClaimPlan, bool] = {}
    unmet: set[object] = set()  # no claim similar to one of these can be met
    queued = list(queue.claims.items())
    for at, (waiter, waiting) in enumerate(queued):
        if waiter not in connected or waiter not in queue.claims:
            continue  # its client is not connected, or it was met together with another claim
        claim = waiting.claim
        plan = plans.of(partition, claim)
        if plan.user is not None:
            yield [waiting]
            continue
        similar = plan, claim.least, claim.sampling.get("batch_index") is None
        if similar in unmet:
            continue
        have = plan.available()
        if have >= least_count(claim):
            yield from _claims_from(plans, plan, queue, queued, at, have, connected)
            if not partition.sealed and waiter in queue.claims and not claim.ahead:
                unmet.add(similar)
            if not others and not partition.sealed and not _has_enough_rows(partition, task, queue):
                return
        elif partition.sealed:
            if plan not in final:
                final[plan] = plan.is_final(plan.ready_set())
            if final[plan]:
                yield [waiting]
    queue.tighten_bounds()


def all_claims(
    plans: Plans, partition: Partition | None, queue: ClaimQueue, connected: Container[RequestKey]
) -> Iterator[list[ParkedRequest]]:
    """Iterate over all claims of a queue, in lists that are met together."""
    queued = list(queue.claims.items())
    for at, (waiter, waiting) in enumerate(queued):
        if waiter not in connected or waiter not in queue.claims:
            continue
        plan = plans.of(partition, waiting.claim)
        if partition is None or partition.sealed or plan.user is not None:
            yield [waiting]
        else:
            yield from _claims_from(plans, plan, queue, queued, at, plan.available(), connected)


def _claims_from(
    plans: Plans,
    plan: ClaimPlan,
    queue: ClaimQueue,
    queued: Sequence[tuple[RequestKey, ParkedRequest]],
    at: int,
    have: int,
    connected: Container[RequestKey],
) -> Iterator[list[ParkedRequest]]:
    """Iterate over the claim at a position of a queue with those met with it, then over those with shares of its deal.

    have: the rows that can be dealt.
    """
    waiter, waiting = queued[at]
    yield claims_of_a_deal(plan, queued, at, have, connected)
    claim, partition = waiting.claim, plan.partition
    dealt = None if partition is None else partition.dealt.get(plan.task)
    key = share_key(claim.sampling)
    if waiter in queue.claims or partition is None or dealt is None or key is None:
        return
    keys = [(rank, batch) for rank, batch in queue.shares if batch == key[1] and dealt.was_dealt(rank, batch)]
    found = [other for key in keys for other in queue.claims_for_batch(key)]
    yield from _claims_of_shares(plans, partition, found, connected)


def claims_of_a_deal(
    plan: ClaimPlan,
    queued: Sequence[tuple[RequestKey, ParkedRequest]],
    at: int,
    have: int,
    connected: Container[RequestKey],
) -> list[ParkedRequest]:
    """Return the claim at a position of a queue, and the later ones to meet with it by one deal, which is cut."""
    first = queued[at][1]
    claim, found = first.claim, [first]
    if have < 2 * plan.count or plan.partition is None or plan.partition.sealed:
        return found
    if plan.user is not None or not _is_simple(plan, claim) or not plan.cuts:
        return found
    key, ranks = plan.key_of(claim), set()
    if key is not None:  # a rank gets a batch once
        dealt = plan.partition.dealt.get(plan.task)
        ranks = set() if dealt is None else {rank for rank, issued in dealt.issued.items() if key[1] in issued}
        if key[0] in ranks:
            return found
        ranks.add(key[0])
    for waiter, waiting in islice(queued, at + 1, None):
        if len(found) == TOGETHER or have < (len(found) + 1) * plan.count or not _is_equal(claim, waiting.claim):
            break
        if waiter not in connected:
            continue
        if key is not None:
            rank = waiting.claim.sampling["dp_rank"]
            if rank in ranks:
                continue  # the batch of another claim found here, or one that was dealt before
            ranks.add(rank)
        found.append(waiting)
    return found


def _claims_of_shares(
    plans: Plans, partition: Partition, waits: Sequence[ParkedRequest], connected: Container[RequestKey]
) -> Iterator[list[ParkedRequest]]:
    """Iterate over the claims that may ask for dealt batches, in lists that are answered together."""
    found: list[ParkedRequest] = []
    for waiting in waits:
        if waiting.waiter not in connected:
            continue
        claim = waiting.claim
        if found and (len(found) == TOGETHER or not _is_equal(found[0].claim, claim)):
            yield found
            found = []
        if found or _is_simple(plans.of(partition, claim), claim):
            found.append(waiting)
        else:
            yield [waiting]
    if found:
        yield found


def _is_simple(plan: ClaimPlan, claim: Claim) -> bool:
    """Return whether all rows of this claim have the same reply and records: no loss, ack or skipped row."""
    partition = plan.partition
    if claim.probe or claim.ahead or claim.since is not None or claim.least is not None:
        return False
    return (
        plan.user is None
        and partition is not None
        and not (claim.lease is None and partition.claimed.get(plan.task))
        and not partition.losses.counts
        and (plan.task, lease_decisions.POISON) not in partition.passed.counts
    )


def _is_equal(claim: Claim, other: Claim) -> bool:
    """Return whether another claim equals this simple one, except for the rank and the time for which it waits."""
    return (
        _REQUESTED(claim) == _REQUESTED(other)
        and len(claim.sampling) == len(other.sampling)
        and {**claim.sampling, "dp_rank": 0} == {**other.sampling, "dp_rank": 0}
    )


def _has_enough_rows(partition: Partition, task: str, queue: ClaimQueue) -> bool:
    """Return whether enough rows are ready for any claim of the queue."""
    return any(partition.ready_set(task, fields).total >= least for fields, (_, least) in queue.wanted.items())
