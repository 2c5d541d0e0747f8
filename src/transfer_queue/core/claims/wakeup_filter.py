"""Chooses the waiting claims to decide again after a change: a thousand may wait, and most still lack rows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from transfer_queue.core.claims import batch_selection, claim_batching
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry
from transfer_queue.core.samplers.user_sampler import AnySampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ClaimQueue, ParkedRequest, RequestKey, ShareKey, least_count
from transfer_queue.messages.claims import Claim


def claims_to_retry(
    samplers: SamplerRegistry,
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
        samplers: The samplers of the system.
        partition: The partition of the claims.
        task: The task of the claims.
        queue: The waiting claims.
        gained: Whether rows became ready for the task.
        shares: The batches that were dealt to the task.
        consumed: Whether all rows are consumed.
        connected: The requests whose clients are connected, so that they can get a reply.
    """
    of_shares = [waiting for key in shares for waiting in queue.claims_for_batch(key)]
    yield from claim_batching.batchable_shares(partition, samplers, of_shares, connected)
    yield from [[queue.claims[waiter]] for waiter in queue.watchers]
    if consumed:
        yield from [[queue.claims[waiter]] for waiter in queue.finite]
    others = not claim_samplers.deals_itself(samplers.of_task(task))  # a user's sampler may depend on anything
    if not gained and not others:
        return
    hopes: dict[tuple[tuple[str, ...], AnySampler], bool] = {}
    unmet: set[object] = set()  # no claim similar to one of these can be met
    if not others and not partition.sealed and not _has_enough_rows(partition, task, queue):
        return
    queued = list(queue.claims.items())
    for at, (waiter, waiting) in enumerate(queued):
        if waiter not in connected or waiter not in queue.claims:
            continue  # its client is not connected, or it was met together with another claim
        claim = waiting.claim
        fields = tuple(claim.fields)
        sampler = samplers.sampler_for(claim, partition)
        if others and not claim_samplers.deals_itself(sampler):
            yield [waiting]
            continue
        ready = partition.ready_set(task, fields)
        alike = fields, claim.count, claim.least, _request_without_share(claim)
        if alike in unmet:
            continue
        have = claim_samplers.available_rows(partition, ready, sampler)
        if have >= least_count(claim):
            yield from _batches_with(samplers, partition, queue, queued, at, have, connected)
            if not partition.sealed and waiter in queue.claims and not claim.ahead:
                unmet.add(alike)
            if not others and not partition.sealed and not _has_enough_rows(partition, task, queue):
                return
        elif partition.sealed:
            if (fields, sampler) not in hopes:
                hopes[fields, sampler] = batch_selection.is_final(partition, ready, sampler)
            if hopes[fields, sampler]:
                yield [waiting]
    queue.tighten_bounds()


def all_claims(
    samplers: SamplerRegistry, partition: Partition | None, queue: ClaimQueue, connected: Container[RequestKey]
) -> Iterator[list[ParkedRequest]]:
    """Iterate over all claims of a queue, in lists that are met together."""
    queued = list(queue.claims.items())
    for at, (waiter, waiting) in enumerate(queued):
        if waiter not in connected or waiter not in queue.claims:
            continue
        sampler = samplers.sampler_for(waiting.claim, partition)
        if partition is None or partition.sealed or not claim_samplers.deals_itself(sampler):
            yield [waiting]
            continue
        ready = partition.ready_set(waiting.claim.task, tuple(waiting.claim.fields))
        have = claim_samplers.available_rows(partition, ready, sampler)
        yield from _batches_with(samplers, partition, queue, queued, at, have, connected)


def _batches_with(
    samplers: SamplerRegistry,
    partition: Partition,
    queue: ClaimQueue,
    queued: Sequence[tuple[RequestKey, ParkedRequest]],
    at: int,
    have: int,
    connected: Container[RequestKey],
) -> Iterator[list[ParkedRequest]]:
    """Iterate over the claim at a position with those met with it, then over those for which its deal has shares."""
    waiter, waiting = queued[at]
    yield claim_batching.batchable_claims(
        partition, samplers.sampler_for(waiting.claim, partition), queued, at, have, connected
    )
    if waiter not in queue.claims:
        found = claim_batching.waiting_for_shares(partition, waiting.claim, queue)
        yield from claim_batching.batchable_shares(partition, samplers, found, connected)


def _has_enough_rows(partition: Partition, task: str, queue: ClaimQueue) -> bool:
    """Return whether enough rows are ready for any claim of the queue."""
    return any(partition.ready_set(task, fields).total >= least for fields, (_, least) in queue.wanted.items())


def _request_without_share(claim: Claim) -> tuple[tuple[str, str], ...]:
    """Return the sampling_config of a claim with only whether it asks for a share, and not for which one."""
    said = [(name, repr(value)) for name, value in claim.sampling.items() if name not in ("dp_rank", "batch_index")]
    return tuple(sorted([*said, ("batch_index", str(claim.sampling.get("batch_index") is not None))]))
