"""Which parked claims are worth another look after a change: a thousand may wait, and most lack rows as before."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from transfer_queue.core.claims import batch_selection, claim_batching
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry
from transfer_queue.core.samplers.user_sampler import AnySampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ClaimQueue, ParkedRequest, RequestKey, ShareKey
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
    """Those of a queue that could be met: a thousand ranks may wait here, and most lack rows as before.

    Several at a time are to be met together. Each must be looked at before the next are asked for.
    gained: rows became ready for the task. shares: the batches of it that were dealt. consumed: all rows are consumed.
    connected: those who can be answered.
    """
    of_shares = [waiting for key in shares for waiting in queue.of_share(key)]
    yield from claim_batching.batchable_shares(partition, samplers, of_shares, connected)
    yield from [[queue.claims[waiter]] for waiter in queue.watchers]
    if consumed:
        yield from [[queue.claims[waiter]] for waiter in queue.finite]
    others = not claim_samplers.deals_itself(samplers.default)  # a user's sampler may look at anything
    if not gained and not others:
        return
    hopes: dict[tuple[tuple[str, ...], AnySampler], bool] = {}
    unmet: set[object] = set()  # as these, no other claim can be met
    if not others and not partition.sealed and not _enough(partition, task, queue):
        return
    queued = list(queue.claims.items())
    for at, (waiter, waiting) in enumerate(queued):
        if waiter not in connected or waiter not in queue.claims:
            continue  # nobody to answer, or met with another
        claim = waiting.claim
        fields = tuple(claim.fields)
        sampler = samplers.of(claim, partition)
        if others and not claim_samplers.deals_itself(sampler):
            yield [waiting]
            continue
        ready = partition.ready_set(task, fields)
        alike = fields, claim.count, _but_for_its_share(claim)
        if alike in unmet:
            continue
        have = claim_samplers.available(partition, ready, sampler)
        if have >= claim.count:
            yield from _with_others(samplers, partition, queue, queued, at, have, connected)
            if not partition.sealed and waiter in queue.claims and not claim.ahead:
                unmet.add(alike)
            if not others and not partition.sealed and not _enough(partition, task, queue):
                return
        elif partition.sealed:
            if (fields, sampler) not in hopes:
                hopes[fields, sampler] = batch_selection.is_final(partition, ready, sampler)
            if hopes[fields, sampler]:
                yield [waiting]
    queue.recount()


def all_claims(
    samplers: SamplerRegistry, partition: Partition | None, queue: ClaimQueue, connected: Container[RequestKey]
) -> Iterator[list[ParkedRequest]]:
    """Everybody in a queue, those who can be met together at a time."""
    queued = list(queue.claims.items())
    for at, (waiter, waiting) in enumerate(queued):
        if waiter not in connected or waiter not in queue.claims:
            continue
        sampler = samplers.of(waiting.claim, partition)
        if partition is None or partition.sealed or not claim_samplers.deals_itself(sampler):
            yield [waiting]
            continue
        ready = partition.ready_set(waiting.claim.task, tuple(waiting.claim.fields))
        have = claim_samplers.available(partition, ready, sampler)
        yield from _with_others(samplers, partition, queue, queued, at, have, connected)


def _with_others(
    samplers: SamplerRegistry,
    partition: Partition,
    queue: ClaimQueue,
    queued: Sequence[tuple[RequestKey, ParkedRequest]],
    at: int,
    have: int,
    connected: Container[RequestKey],
) -> Iterator[list[ParkedRequest]]:
    """One of a queue with those who are to be met with it, then those for whom its deal had shares."""
    waiter, waiting = queued[at]
    yield claim_batching.batchable_claims(partition, samplers.of(waiting.claim, partition), queued, at, have, connected)
    if waiter not in queue.claims:
        found = claim_batching.dealt_with(partition, waiting.claim, queue)
        yield from claim_batching.batchable_shares(partition, samplers, found, connected)


def _enough(partition: Partition, task: str, queue: ClaimQueue) -> bool:
    """Whether any claim of the queue has as many ready rows as it wants."""
    return any(partition.ready_set(task, fields).total >= least for fields, (_, least) in queue.wanted.items())


def _but_for_its_share(claim: Claim) -> tuple[tuple[str, str], ...]:
    """What a claim says to its sampler, but for which share it asks for: whether it asks for one makes a difference."""
    said = [(name, repr(value)) for name, value in claim.sampling.items() if name not in ("dp_rank", "batch_index")]
    return tuple(sorted([*said, ("batch_index", str(claim.sampling.get("batch_index") is not None))]))
