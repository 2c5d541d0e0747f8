"""Meets similar waiting claims together, so that one deal serves a thousand ranks that wait for the rows of one put.

Claims are similar if only their dp_rank differs. They are met together if the sampler would deal the same rows to one
large claim as to these claims one after the other. The deal is then cut into their batches, in order of arrival. Claims
for which one deal of the sampler contains a share each are also met together.

At most TOGETHER claims are met at once, so that the replies to the first ones are sent while the others are decided.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import cast

import msgspec
import numpy as np

from transfer_queue.core.claims import batch_selection, claim_handler, consumer_state, lease_decisions
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.queries.batch_metadata import meta_reply
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry
from transfer_queue.core.samplers.sampler_view import PartitionView, call_sampler
from transfer_queue.core.samplers.user_sampler import AnySampler, UserSampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ClaimQueue, ParkedRequest, RequestKey, share_key
from transfer_queue.core.tables.row_table import CLAIMED
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.tag_table import slice_tags
from transfer_queue.sampler.base import BaseSampler, RankConsistentSampler
from transfer_queue.sampler.sampler_wrapper import dealer

TOGETHER = 128  # claims
ONCE = (1).to_bytes(4, "little")  # the number of the delivery of a row that is delivered for the first time
PLACED = 32  # claims met together whose replies contain the locations of values; further ones look them up


def batchable_claims(
    partition: Partition,
    sampler: AnySampler,
    queued: Sequence[tuple[RequestKey, ParkedRequest]],
    at: int,
    have: int,
    connected: Container[RequestKey],
) -> list[ParkedRequest]:
    """Return the claim at a position of a queue, and the later ones to meet with it. have: rows that can be dealt."""
    first = queued[at][1]
    claim, found = first.claim, [first]
    if isinstance(sampler, UserSampler) or have < 2 * claim.count or not _is_divisible(partition, sampler, claim):
        return found
    ranks = _ranks_dealt(partition, sampler, claim)
    if ranks is not None:
        if _rank(claim) in ranks:
            return found
        ranks.add(_rank(claim))
    for waiter, waiting in islice(queued, at + 1, None):
        if len(found) == TOGETHER or have < (len(found) + 1) * claim.count or not _is_alike(claim, waiting.claim):
            break
        if waiter not in connected:
            continue
        if ranks is not None:
            if _rank(waiting.claim) in ranks:
                continue  # the batch of another claim found here, or one that was dealt before
            ranks.add(_rank(waiting.claim))
        found.append(waiting)
    return found


def batchable_shares(
    partition: Partition, samplers: SamplerRegistry, waits: Sequence[ParkedRequest], connected: Container[RequestKey]
) -> Iterator[list[ParkedRequest]]:
    """Return the claims that may ask for dealt batches, in lists that are answered together."""
    found: list[ParkedRequest] = []
    for waiting in waits:
        if waiting.waiter not in connected:
            continue
        claim = waiting.claim
        if found and (len(found) == TOGETHER or not _is_alike(found[0].claim, claim)):
            yield found
            found = []
        if found or _is_simple(partition, samplers.sampler_for(claim, partition), claim):
            found.append(waiting)
        else:
            yield [waiting]
    if found:
        yield found


def waiting_for_shares(partition: Partition, claim: Claim, queue: ClaimQueue) -> list[ParkedRequest]:
    """Return the claims for which the deal that met a claim contains shares."""
    key, dealt = share_key(claim.sampling), partition.dealt.get(claim.task)
    if key is None or dealt is None:
        return []
    keys = [(rank, batch) for rank, batch in queue.shares if batch == key[1] and dealt.was_dealt(rank, batch)]
    return [waiting for key in keys for waiting in queue.claims_for_batch(key)]


def _is_simple(partition: Partition, sampler: AnySampler, claim: Claim) -> bool:
    """Return whether all rows of this claim have the same reply and records: no loss, ack or skipped row."""
    task = claim.task
    if (
        claim.probe
        or claim.ahead
        or claim.since is not None
        or claim.least is not None
        or not claim_samplers.deals_itself(sampler)
    ):
        return False
    return not (
        (claim.lease is None and partition.claimed.get(task))
        or partition.losses.counts
        or (task, lease_decisions.POISON) in partition.passed.counts
    )


def _is_divisible(partition: Partition, sampler: BaseSampler, claim: Claim) -> bool:
    """Return whether one deal for this claim and others can be cut into their batches."""
    if partition.sealed or claim.count % (claim_samplers.group_size(sampler) or 1):
        return False
    return _is_simple(partition, sampler, claim) and sampler.deals_in_order(claim.sampling)


def _is_alike(claim: Claim, other: Claim) -> bool:
    """Return whether another claim equals this simple one, except for the rank and the time for which it waits."""
    return (
        claim.count == other.count
        and claim.fields == other.fields
        and claim.lease == other.lease
        and claim.replicas == other.replicas
        and claim.hand_over == other.hand_over
        and other.since is None
        and other.least is None
        and not other.probe
        and not other.ahead
        and len(claim.sampling) == len(other.sampling)
        and {**claim.sampling, "dp_rank": 0} == {**other.sampling, "dp_rank": 0}
    )


def _key(sampler: BaseSampler, claim: Claim) -> tuple[int, int] | None:
    """Return the (dp_rank, batch_index) of the requested batch; None if it belongs to no rank."""
    return cast(RankConsistentSampler, sampler).deal_key(claim.sampling) if dealer(sampler) is not None else None


def _ranks_dealt(partition: Partition, sampler: BaseSampler, claim: Claim) -> set[int] | None:
    """Return the ranks that were dealt the claim's batch_index before; None if its batch belongs to no rank."""
    key = _key(sampler, claim)
    if key is None:
        return None
    dealt = partition.dealt.get(claim.task)
    return set() if dealt is None else {rank for rank, issued in dealt.issued.items() if key[1] in issued}


def _rank(claim: Claim) -> int:
    rank: int = claim.sampling["dp_rank"]
    return rank


def meet_together(context: ControllerContext, waits: list[ParkedRequest]) -> list[Effect]:
    """Meet the claims that `batchable_claims` or `batchable_shares` returned."""
    claim = waits[0].claim
    partition = context.state.partitions[claim.partition]
    sampler = cast(
        BaseSampler, context.samplers.sampler_for(claim, partition)
    )  # `batchable_claims` and `batchable_shares` leave out users' samplers
    batches = _known_batches(partition, sampler, waits)
    known = batches is not None
    if batches is None and _is_enough(context, partition, sampler, waits):
        batches = _deal(partition, sampler, claim, len(waits))
        context.measures.counters["dealt_rows"] += claim.count * len(waits)
    rows = np.concatenate(batches) if batches else np.zeros(0, "i8")
    positions = partition.rows.positions_of(rows)
    if not batches or (positions < 0).any() or (known and not _may_lease(partition, claim, positions)):
        return [effect for waiting in waits for effect in claim_handler.retry_claim(context, waiting)]
    leases, unseen = _held(context, partition, sampler, waits, batches)
    for record in leases if known else [_record(sampler, waits, batches, leases, unseen)]:
        context.log.apply(record)
    held = _hold(context, partition, waits, batches)
    whole = meta_reply(partition, positions, rows, claim.fields)
    warning = claim_handler.warning_of(context, sampler, partition, claim, rows)
    if any(field.mixed_rank for field in whole.fields):  # not in all of the batches
        parts = (meta_reply(partition, partition.rows.positions_of(mine), mine, claim.fields) for mine in batches)
        replies = [msgspec.structs.replace(reply, held=mine) for reply, mine in zip(parts, held, strict=True)]
    else:
        replies = list(_split_reply(whole, batches, held))
    if unseen:
        replies = [msgspec.structs.replace(each, token=its.token) for each, its in zip(replies, unseen, strict=True)]
        for waiting in waits:
            context.absent_holders.note_holder(waiting.client)
    elif leases:
        replies = _leased_replies(context, partition, leases, rows, replies)
    if warning is not None:
        replies[0] = msgspec.structs.replace(replies[0], warning=warning)
    peers = context.parked.unpark_claims(waits)
    context.log.apply(
        r.RepliesSent([(each.client, each.sequence, reply) for each, reply in zip(waits, replies, strict=True)])
    )
    note_claim, begin_work = context.timeline.note_claim, context.activity.begin_work
    effects: list[Effect] = []
    end = 0
    for waiting, peer, mine, reply in zip(waits, peers, batches, replies, strict=True):
        start, end = end, end + len(mine)
        note_claim(waiting.client, waiting.claim, waiting.since, partition, reply.rows, positions[start:end])
        begin_work(waiting.client, consumer_state.consumer_of(waiting.claim))
        effects.append(Send(peer, waiting.sequence, reply))
        if waiting.claim.places and len(waits) <= PLACED:
            effects[-1] = claim_handler.add_locations(context, partition, claim, mine, effects[-1])
    return effects


def _hold(
    context: ControllerContext, partition: Partition, waits: list[ParkedRequest], batches: list[np.ndarray]
) -> list[bool]:
    """Record that the clients reference their batches, if the partition frees finished rows; return who does.

    A lease references its rows itself.
    """
    if waits[0].claim.task not in partition.holds.tasks or waits[0].claim.lease is not None:
        return [False] * len(waits)
    handed = [
        consumer_state.hold_records(partition, each.client, each.claim, mine)
        for each, mine in zip(waits, batches, strict=True)
    ]
    for record in chain.from_iterable(handed):
        context.log.apply(record)
    return [bool(records) for records in handed]


def _may_lease(partition: Partition, claim: Claim, positions: np.ndarray) -> bool:
    """Return whether a claim of dealt rows leases all of them, if it asks for a lease: none is acknowledged."""
    return claim.lease is None or bool((partition.consumption_states(claim.task, positions) == CLAIMED).all())


def _held(
    context: ControllerContext, partition: Partition, sampler: BaseSampler, waits: list[ParkedRequest],
    batches: list[np.ndarray],
) -> tuple[list[r.RowsLeased], list[r.UnseenBatch]]:  # fmt: skip
    """Return the leases of the clients on their batches, and what they hold until they have handed it over."""
    claim, token = waits[0].claim, context.state.next_token
    if claim.lease is None:
        if not claim.hand_over or _key(sampler, claim) is not None:
            return [], []
        return [], [
            r.UnseenBatch(number, claim.task, waiting.client, mine.tobytes(), partition.policy_version)
            for number, (waiting, mine) in enumerate(zip(waits, batches, strict=True), token)
        ]
    unit = claim_samplers.dealt_group_size(sampler, partition)
    leases = []
    for number, (waiting, mine) in enumerate(zip(waits, batches, strict=True), token):
        key = _key(sampler, waiting.claim)
        replicas = 1 if key is None else (claim.replicas or partition.options.replicas)
        leases.append(
            r.RowsLeased(
                partition.name, claim.task, number, waiting.client, np.sort(mine).tobytes(), claim.lease, key,
                replicas, unit,
            )
        )  # fmt: skip
    return leases, []


def _leased_replies(
    context: ControllerContext, partition: Partition, leases: list[r.RowsLeased], rows: np.ndarray,
    replies: list[ClaimReply],
) -> list[ClaimReply]:  # fmt: skip
    """Begin the time of these leases, and return the replies with their tokens. rows: those of all replies."""
    counts = lease_decisions.deliveries(partition, leases[0].task, rows)
    found, end, replace = [], 0, msgspec.structs.replace
    for lease, reply in zip(leases, replies, strict=True):
        context.lease_deadlines.begin(partition.name, partition.leases.by_token[lease.token])
        start, end = end, end + len(reply.rows) // 8
        mine = None if counts is None else counts[4 * start : 4 * end]
        if mine is not None and mine == ONCE * (end - start):
            mine = None
        found.append(replace(reply, token=lease.token, deliveries=mine))
    return found


def _known_batches(partition: Partition, sampler: BaseSampler, waits: list[ParkedRequest]) -> list[np.ndarray] | None:
    """Return the batches that were dealt to these claims before; None if the first has none.

    Returns [] if some must be decided one by one.
    """
    dealt = partition.dealt.get(waits[0].claim.task)
    if dealt is None or dealer(sampler) is None:
        return None
    given = cast(RankConsistentSampler, sampler).deal_key
    keys = [key for waiting in waits if (key := given(waiting.claim.sampling)) is not None]
    if not keys or not dealt.was_dealt(*keys[0]):
        return None
    found = [dealt.find(*key) for key in keys]
    size = waits[0].claim.count
    batches = [batch.rows for batch in found if batch is not None and batch.batch_size == size]
    return batches if len(batches) == len(waits) else []


def _is_enough(
    context: ControllerContext, partition: Partition, sampler: BaseSampler, waits: list[ParkedRequest]
) -> bool:
    """Return whether one deal can meet all these claims now."""
    claim = waits[0].claim
    if context.background_deals.is_computing(partition.name, claim.task) or not _is_divisible(
        partition, sampler, claim
    ):
        return False
    ready = partition.ready_set(claim.task, tuple(claim.fields))
    return claim_samplers.available_rows(partition, ready, sampler) >= claim.count * len(waits)


def _deal(partition: Partition, sampler: BaseSampler, claim: Claim, number: int) -> list[np.ndarray]:
    """Return the rows (i8) of `number` claims like this one."""
    ready = partition.ready_set(claim.task, tuple(claim.fields))
    sampling = {**batch_selection.sampling_of(claim), "partition": PartitionView(partition)}
    offered, count = partition.sampler_view(ready), number * claim.count
    if isinstance(sampler, RankConsistentSampler):
        ((sampled, _),) = call_sampler(sampler, sampler.deal, offered, count, **sampling).values()
    else:
        sampled, _ = call_sampler(sampler, sampler.sample, offered, count, **sampling)
    return list(np.array(sampled, "i8").reshape(number, claim.count))


def _record(
    sampler: BaseSampler, waits: list[ParkedRequest], batches: list[np.ndarray], leases: list[r.RowsLeased],
    unseen: list[r.UnseenBatch],
) -> r.Dealt:  # fmt: skip
    claim, key = waits[0].claim, _key(sampler, waits[0].claim)
    columns = [rows.tobytes() for rows in batches]
    ranks = [0] * len(waits) if key is None else [_rank(waiting.claim) for waiting in waits]
    shares = [r.Share(rank, column) for rank, column in zip(ranks, columns, strict=True)]
    batch_index = None if key is None else key[1]
    consumed = b"".join(columns)
    return r.Dealt(
        claim.partition, claim.task, batch_index, claim.count, shares, consumed, claim.lease is not None,
        leases=leases, unseen=unseen,
    )  # fmt: skip


def _split_reply(whole: ClaimReply, batches: list[np.ndarray], held: list[bool]) -> Iterator[ClaimReply]:
    """Cut the reply for all rows into one reply for each batch. held: whether the client references the batch."""
    ends = [0, *accumulate(map(len, batches))]
    rows, fields, tags, epoch = whole.rows, whole.fields, whole.tags, whole.epoch
    steps = {name: len(column) // ends[-1] for name, column in whole.shapes.items()}
    for (start, end), mine in zip(pairwise(ends), held, strict=True):
        yield ClaimReply(
            rows=rows[8 * start : 8 * end], fields=fields, epoch=epoch, held=mine,
            tags=None if tags is None else slice_tags(tags, start, end),
            shapes={name: whole.shapes[name][start * step : end * step] for name, step in steps.items()},
            dtypes={name: codes[start:end] for name, codes in whole.dtypes.items()},
        )  # fmt: skip
