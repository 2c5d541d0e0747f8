"""Decides which rows claims get. Only rows that the task skips are recorded here; the rest is returned as records.

Built-in samplers are called through `validate`, `deal_key`, `deal` and `remainder`, which have no side effects; the
state keeps the dealt batches. A user's sampler is called through `sample` and keeps its own state. Its result is
checked: if it returns rows that it was not offered, the claim fails and nothing is dealt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, cast

import msgspec
import numpy as np

from transfer_queue.core.claims import consumer_state, final_rounds, index_builder, lease_decisions
from transfer_queue.core.claims.background_deals import ComputedDeal, DealTooLong, Shares
from transfer_queue.core.claims.plan import ClaimPlan, Key
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events import records as r
from transfer_queue.core.ready.ready_sets import ReadySet, ReadySets
from transfer_queue.core.samplers.sampler_view import call_sampler
from transfer_queue.core.samplers.user_sampler import AnySampler, UserSampler, name_of
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.unknown_partitions import require_partition
from transfer_queue.core.tables.dealt_batches import DealtBatches
from transfer_queue.core.tables.row_table import CLAIMED
from transfer_queue.errors import BatchGoneError, InvalidArgumentError, SamplerError, StorageKeyNotFoundError
from transfer_queue.messages.claims import Claim
from transfer_queue.sampler.base import BaseSampler, Deal, RankConsistentSampler, ReadyIndexes
from transfer_queue.sampler.freshness_sampler import too_old, version_key
from transfer_queue.sampler.sampler_wrapper import SamplerWrapper, shown_rows

Dealer = Union[RankConsistentSampler, SamplerWrapper]

LONG = 512  # items, which are balanced within a millisecond


class Outcome(msgspec.Struct):
    """What claims with one plan get that are decided together."""

    batches: list[np.ndarray] | None = None
    """The rows of each claim, as global indexes in dealt order; None if they get nothing now."""
    records: list[r.AnyRecord] = []
    is_end: bool = False
    """Whether the claim will never get anything."""
    is_busy: bool = False
    """Whether the claims must wait for a long deal of their task, or for an index that a deal needs."""
    long: DealTooLong | None = None
    """The long deal that this claim starts."""


NO_ROWS = np.zeros(0, "i8")
NOTHING = Outcome()
ENDED = Outcome(is_end=True)
BUSY = Outcome(is_busy=True)
MET = Outcome([NO_ROWS])
"""The outcome of a probe, which gets no rows."""


def decide(
    context: ControllerContext, plan: ClaimPlan, claims: Sequence[Claim], made: ComputedDeal | None = None
) -> Outcome | None:
    """Skip the rows that the task skips, and return what these claims get now; None if each must be decided by itself.

    Several claims differ only in their rank, and in the time for which they wait (`wake.equal_claims`).

    made: the long deal that such a claim has started, if another thread has computed it.
    """
    partition, claim = plan.partition, claims[0]
    if partition is None:
        if claim.again:
            require_partition(context.state.partitions, claim.partition)
        return NOTHING
    if len(partition.rows.chunks) > index_builder.SMALL and context.index_builder.needs_indexes(partition, plan):
        return BUSY
    is_timed = plan.is_timed and not claim.again
    began = context.timer() if is_timed else 0.0
    try:
        if not claim.again:  # otherwise nothing is dealt, so nothing is skipped
            dealt = partition.dealt.get(plan.task)
            if dealt is not None and dealt.unasked:
                _note_asked(context, dealt, claims)
            if partition.options.max_staleness is not None:
                for record in decide_stale(partition, plan):
                    context.log.apply(record)
            if plan.passes_over:
                for record in _decide_passed_over(partition, plan, claim):
                    context.log.apply(record)
        is_busy = (partition.name, plan.task) in context.background_deals.by_task
        if len(claims) > 1:
            return _cut_deal(partition, plan, claims, is_busy)
        outcome = _decide_one(context.state, partition, plan, claim, is_busy and not claim.again, made)
    finally:
        if is_timed:
            context.samplers.note(name_of(plan.sampler), context.timer() - began)
    if outcome.batches is not None and claim.since == partition.version:
        return NOTHING  # the client has seen this version, and could not use it
    is_open = outcome.batches is None and not outcome.is_end and not outcome.is_busy
    return ENDED if is_open and claim.finite and partition.is_wholly_consumed(plan.task) else outcome


def _note_asked(context: ControllerContext, dealt: DealtBatches, claims: Sequence[Claim]) -> None:
    """Record which ranks ask for the first time although rounds already hold batches for them."""
    for claim in claims:
        rank = consumer_state.rank_of(claim)
        if rank in dealt.unasked:
            context.log.apply(r.RankAsked(claim.partition, claim.task, rank))


def decide_stale(partition: Partition, plan: ClaimPlan) -> list[r.AnyRecord]:
    """Return the records of rows that are too old for the partition (`max_staleness`), whatever the sampler is."""
    most = partition.options.max_staleness
    offered = partition.sampler_view(plan.ready_set())
    size = plan.unit or None  # groups are skipped as a whole
    passed = too_old(offered, version_key(), partition.policy_version, most, size) if most is not None else {}
    return _skips(partition, plan.task, passed)


def _decide_passed_over(partition: Partition, plan: ClaimPlan, claim: Claim) -> list[r.AnyRecord]:
    """Return the records of rows that the claim's sampler skips now."""
    sampler, ready = plan.sampler, plan.ready_set()
    passed: Mapping[str, Sequence[int] | np.ndarray]
    if isinstance(sampler, UserSampler):
        passed = sampler.passes_over(claim, partition, ready)
    else:
        passed = call_sampler(sampler, sampler.passes_over, partition.sampler_view(ready), **plan.config_of(claim))
    return _skips(partition, plan.task, passed)


def _skips(partition: Partition, task: str, passed: Mapping[str, Sequence[int] | np.ndarray]) -> list[r.AnyRecord]:
    """Return the records that the task skips these rows, by reason. The first reason of a row counts."""
    records: list[r.AnyRecord] = []
    gone = NO_ROWS
    for reason, rows in passed.items():
        left = np.setdiff1d(np.array(rows, "i8"), gone)
        gone = np.union1d(gone, left)
        if len(left):
            records.append(final_rounds.pass_over_record(partition, task, left, str(reason)))
    return records


def _decide_one(
    state: State, partition: Partition, plan: ClaimPlan, claim: Claim, is_busy: bool, made: ComputedDeal | None
) -> Outcome:
    """Return what one claim gets. is_busy: a long deal of its task is being computed, so no other one starts."""
    if plan.user is not None:
        return _with_unasked(state, partition, claim, _decide_by_user(state, partition, plan, plan.user, claim))
    if plan.dealer is None:
        return BUSY if is_busy else _decide_plainly(partition, plan, claim)
    try:
        outcome = _decide_by_deal(state, partition, plan, plan.dealer, claim, is_busy, made)
    except DealTooLong as long:
        return MET if claim.probe else Outcome(is_busy=True, long=long)
    return _with_unasked(state, partition, claim, outcome)


def _cut_deal(partition: Partition, plan: ClaimPlan, claims: Sequence[Claim], is_busy: bool) -> Outcome | None:
    """Return what several claims get: batches that were dealt to their ranks before, or one deal that is cut.

    Returns None if each of them must be decided by itself.
    """
    keys, dealt = [plan.key_of(claim) for claim in claims], partition.dealt.get(plan.task)
    if dealt is not None and keys[0] is not None and dealt.was_dealt(*keys[0]):
        found = [dealt.find(*key) for key in keys if key is not None]
        batches = [batch.rows for batch in found if batch is not None and batch.batch_size == plan.count]
        positions = partition.rows.positions_of(np.concatenate([NO_ROWS, *batches]))
        whole = len(batches) == len(claims) and (positions >= 0).all()
        if whole and claims[0].lease is not None:  # each claim leases all rows of its batch
            whole = (partition.consumption_states(plan.task, positions) == CLAIMED).all()
        return Outcome(batches) if whole else None
    count = plan.count * len(claims)
    if is_busy or not plan.cuts or plan.available() < count:
        return None
    sampler, offered = cast(BaseSampler, plan.sampler), partition.sampler_view(plan.ready_set())
    if isinstance(sampler, RankConsistentSampler):
        ((sampled, _),) = call_sampler(sampler, sampler.deal, offered, count, **plan.config_of(claims[0])).values()
    else:
        sampled, _ = call_sampler(sampler, sampler.sample, offered, count, **plan.config)
    rows = np.array(sampled, "i8")
    ranks = [0 if key is None else key[0] for key in keys]
    batches = list(rows.reshape(len(claims), plan.count))
    shares = [r.Share(rank, batch.tobytes()) for rank, batch in zip(ranks, batches, strict=True)]
    return Outcome(batches, [_deal_record(claims[0], keys[0], shares, rows.tobytes())])


def _deal_record(claim: Claim, key: Key | None, shares: list[r.Share], consumed: bytes) -> r.Dealt:
    """Return the record of a deal. key: that of the claim's batch; None if it belongs to no rank."""
    batch_index = None if key is None else key[1]
    leased = claim.lease is not None
    return r.Dealt(claim.partition, claim.task, batch_index, claim.count, shares, consumed, leased)


def _with_unasked(state: State, partition: Partition, claim: Claim, outcome: Outcome) -> Outcome:
    """Return the outcome with the ranks of its deals that have never asked for a batch.

    They were dealt no batch before, and do not wait for one.
    """
    for at, record in enumerate(outcome.records):
        if not isinstance(record, r.Dealt) or record.batch_index is None or len(record.shares) < 2:
            continue
        dealt = partition.dealt.get(claim.task)
        queue = state.waiting.claim_queues(partition.name).get(claim.task)
        asked = {consumer_state.rank_of(claim)}.union(() if dealt is None else dealt.issued)
        asked.update(() if queue is None else (rank for rank, _ in queue.shares))
        unasked = [share.dp_rank for share in record.shares if share.dp_rank not in asked]
        if unasked:
            outcome.records[at] = msgspec.structs.replace(record, unasked=unasked)
    return outcome


def _find_dealt(partition: Partition, claim: Claim, key: Key | None) -> Outcome | None:
    """Return the batch that was dealt under this key before; None if there is none.

    Raises BatchGoneError if its rows are cleared or skipped, or if the claim needs a batch that was dealt before
    (`Claim.again`), StorageKeyNotFoundError if values are lost, and InvalidArgumentError for another batch_size.
    """
    dealt = partition.dealt.get(claim.task)
    if key is None or dealt is None:
        _refuse_undealt(partition, claim, key)
        return None
    batch = dealt.find(*key)
    words = f"batch {key[1]} of dp_rank {key[0]} for task {claim.task!r} in partition {partition.name!r} was dealt"
    if batch is not None and lease_decisions.has_poisoned_rows(partition, claim.task, batch.rows):
        raise BatchGoneError(
            f"{words} too often without an ack (max_deliveries), so the task skips its samples; explain() describes "
            f"them. Fetch the next batch_index."
        )
    if batch is not None:
        if batch.batch_size != claim.count:
            raise InvalidArgumentError(
                f"{words} with batch_size {batch.batch_size}, but this claim has {claim.count}; all replicas of a rank "
                f"must use the same batch_size"
            )
        lost = partition.losses.describe(claim.fields, partition.rows.positions_of(batch.rows))
        if lost:
            raise StorageKeyNotFoundError(f"{words}; {lost}")
        return Outcome([batch.rows])
    if dealt.is_gone(*key):
        raise BatchGoneError(
            f"{words} before, and its rows were cleared later{_describe_left_rank(dealt.left, key[0])}; other rows do "
            f"not replace it. Fetch the next batch_index, or clear rows only after all replicas have fetched them."
        )
    _refuse_undealt(partition, claim, key)
    return None


def _refuse_undealt(partition: Partition, claim: Claim, key: Key | None) -> None:
    """Raise BatchGoneError if the claim asks for a batch that was dealt before."""
    if not claim.again:
        return
    if key is None:
        raise BatchGoneError(
            f"the sampler of task {claim.task!r} keeps no batches under a (dp_rank, batch_index), so no batch of "
            f"partition {partition.name!r} can be returned again; use a rank-consistent sampler, such as "
            f"RankAwareSampler, to replay batches"
        )
    raise BatchGoneError(
        f"batch {key[1]} of dp_rank {key[0]} was not dealt to task {claim.task!r} in partition {partition.name!r}, so "
        f"it cannot be returned again; the task's consumption was reset, or this is another system"
    )


def _describe_left_rank(left: set[int], rank: int) -> str:
    return ", or were dealt to other ranks because the rank was declared gone" if rank in left else ""


def _decide_by_deal(
    state: State,
    partition: Partition,
    plan: ClaimPlan,
    inner: RankConsistentSampler,
    claim: Claim,
    is_busy: bool,
    made: ComputedDeal | None,
) -> Outcome:
    """Decide a claim with a rank-consistent sampler. inner: the innermost one, around which there may be others."""
    key = plan.key_of(claim)
    known = _find_dealt(partition, claim, key)
    if known is not None:
        return known
    plan.check_declared()
    if plan.uses_declared_size:
        plan.validate(claim)  # the groups may have been declared after the claim arrived
    if is_busy:
        return BUSY
    sampler, config, ready = cast(Dealer, plan.sampler), plan.config_of(claim), plan.ready_set()
    offered = partition.sampler_view(ready)

    def deal(count: int, **more: Any) -> Shares:
        if made is not None and made.is_valid(partition, ready, plan.group_size or 1, count):
            return made.shares
        return _deal(sampler, offered, count, {**config, **more})

    if partition.sealed and claim.count > 0 and key is not None:
        end = _final_round_of(state, partition, plan, inner, ready, claim, key, deal)
        given = final_rounds.decide(end)
        if given is None:
            return NOTHING
        mine, records = given
        return Outcome(None if mine is None else [mine], records, is_end=mine is None)
    if claim.ahead and key is not None and _needed_by_others(state, partition, plan, inner, claim, key):
        return NOTHING
    if ready.total >= claim.count > 0:
        shares = deal(claim.count)
        if shares:
            return _outcome_of_deal(partition, plan, claim, key, shares)
    if not plan.is_final(ready):
        return NOTHING
    if inner.drop_last:
        end = _final_round_of(state, partition, plan, inner, ready, claim, (0, 0), deal)
        return Outcome(None, final_rounds.skip_remainder(end), is_end=True)
    # Groups are counted only here, where there are fewer than a deal takes.
    if inner.deals_finally:
        shares = deal(claim.count, final=True)
    else:
        rest = call_sampler(sampler, sampler.remainder, offered, **config)
        shares = deal(rest) if 0 < rest < claim.count else {}
    return _outcome_of_deal(partition, plan, claim, key, shares) if shares else ENDED


def _deal(sampler: Dealer, offered: ReadySets, count: int, sampling: dict[str, Any]) -> Shares:
    """Return a deal. Raises DealTooLong if it would take too long."""
    found: Deal | None = call_sampler(sampler, sampler.prepare, offered, count, **sampling)
    if found is None:
        return {}
    if found.size > LONG:
        raise DealTooLong(found, count)
    return call_sampler(sampler, found.run)  # type: ignore[no-any-return]


def compute_deal(sampler: AnySampler, deal: Deal) -> Shares:
    """Return the shares of a long deal of a built-in sampler. Reads no state, because it runs in another thread."""
    columns = {
        rank: np.array(sampled, "i8")
        for rank, (sampled, _) in call_sampler(cast(BaseSampler, sampler), deal.run).items()
    }
    return {rank: (column, column) for rank, column in columns.items()}  # all sampled rows are consumed


def _final_round_of(
    state: State,
    partition: Partition,
    plan: ClaimPlan,
    inner: RankConsistentSampler,
    ready: ReadySet,
    claim: Claim,
    key: Key,
    deal: Callable[..., Shares],
) -> final_rounds.FinalRound:
    """Return what `final_rounds` needs to decide a claim of a sealed partition."""
    unit = plan.group_size or 1
    shown = shown_rows(cast(BaseSampler, plan.sampler), partition.sampler_view(ready), plan.config_of(claim))
    return final_rounds.FinalRound(
        partition,
        inner,
        ready,
        cast(ReadyIndexes, shown),
        claim,
        key,
        _ranks(state, inner, claim, key),
        inner.ranks(claim.sampling) is not None,
        unit,
        groups=plan.unit > 0,
        have=plan.available() // unit,
        final=lambda: plan.is_final(ready),
        deal=deal,
    )


def _needed_by_others(
    state: State, partition: Partition, plan: ClaimPlan, inner: RankConsistentSampler, claim: Claim, key: Key
) -> bool:
    """Return whether other ranks may need the rows of a batch that is fetched ahead.

    If other ranks are known, they do if too few rows are ready for this batch and for the ranks that are behind. If no
    other rank is known, others may still be starting while this rank needs its first batch. If the number of ranks is
    known, they do not: a deal has a batch for each rank.
    """
    if inner.ranks(claim.sampling) is not None:
        return False
    dealt = partition.dealt.get(claim.task) or DealtBatches()
    others = _ranks(state, inner, claim, key) - {key[0]}
    mine = dealt.counts.get(key[0], 0)
    if not others:
        return mine <= claim.ahead
    lacking = {rank: max(0, mine + 1 - dealt.counts.get(rank, 0)) for rank in others}
    need = sum(batches * dealt.sizes.get(rank, claim.count) for rank, batches in lacking.items())
    return plan.available() < claim.count + need


def _ranks(state: State, sampler: RankConsistentSampler, claim: Claim, key: Key) -> set[int]:
    """Return the ranks that get equally many batches: all if their number is known, otherwise those seen so far."""
    known = sampler.ranks(claim.sampling)
    if known is not None:
        return set(range(known))
    dealt = state.partitions[claim.partition].dealt.get(claim.task)
    queue = state.waiting.claim_queues(claim.partition).get(claim.task)
    seen = {rank for rank, _ in queue.shares} if queue is not None else set()
    ever = set(dealt.issued) - dealt.left if dealt is not None else set()
    return seen | {key[0]} | ever


def _outcome_of_deal(partition: Partition, plan: ClaimPlan, claim: Claim, key: Key | None, shares: Shares) -> Outcome:
    mine = shares.get(key[0] if key is not None else 0)
    if mine is None:
        raise SamplerError(
            f"{name_of(plan.sampler)}.deal returned no share for the dp_rank of the claim; nothing was dealt. Return a "
            f"share for each rank"
        )
    if key is not None:
        final_rounds.check_undealt(partition, claim.task, [(rank, key[1]) for rank in shares])
    kept = [r.Share(rank, _column(sampled)) for rank, (sampled, _) in sorted(shares.items())]
    if plan.user is None:
        consumed = b"".join(share.rows for share in kept)
    else:
        consumed = b"".join(_column(taken) for _, taken in shares.values())
    return Outcome([np.array(mine[0], "i8")], [_deal_record(claim, key, kept, consumed)])


def _decide_by_user(state: State, partition: Partition, plan: ClaimPlan, sampler: UserSampler, claim: Claim) -> Outcome:
    begun = sampler.begin(claim)
    known = _find_dealt(partition, claim, begun.key)
    if known is not None:
        return known
    deals = sampler.runner.facts.deals
    if deals:
        plan.check_declared()
    ready = plan.ready_set()
    if begun.cached:
        return _outcome_of_known_batch(state, partition, sampler, ready, claim)
    enough = ready.total >= claim.count
    if enough and claim.probe:
        return MET  # a user's sampler may have side effects, so only a claim that takes the rows calls it
    if enough:
        outcome = _deal_by_user(partition, plan, sampler, ready, claim, claim.count, begun.key)
        if outcome is not NOTHING or not deals:
            return outcome
    if not plan.is_final(ready):
        return NOTHING
    if sampler.runner.facts.finally_:
        outcome = _deal_by_user(partition, plan, sampler, ready, claim, claim.count, begun.key, final=True)
    else:
        rest = min(claim.count, sampler.remainder(claim, partition, ready))
        if rest <= 0 or (deals and rest == claim.count):
            return ENDED
        if claim.probe:
            return MET
        outcome = _deal_by_user(partition, plan, sampler, ready, claim, rest, begun.key)
    return ENDED if outcome is NOTHING else outcome


def _deal_by_user(
    partition: Partition,
    plan: ClaimPlan,
    sampler: UserSampler,
    ready: ReadySet,
    claim: Claim,
    size: int,
    key: Key | None,
    final: bool = False,
) -> Outcome:
    """Return a deal of a user's sampler; NOTHING if it returns none. Raises SamplerError for an invalid deal."""
    shares = sampler.deal(claim, partition, ready, size, key, final)
    if not shares:
        return NOTHING
    sampler.check(partition, ready, shares, key, size)
    mine = shares.get(0 if key is None else key[0])
    if mine is not None and not len(mine[0]):
        return NOTHING
    outcome = _outcome_of_deal(partition, plan, claim, key, shares)
    if key is None and mine is not None and not len(mine[1]):
        outcome.records.clear()  # nothing is consumed
    return outcome


def _outcome_of_known_batch(
    state: State, partition: Partition, sampler: UserSampler, ready: ReadySet, claim: Claim
) -> Outcome:
    """Return a batch that a user's sampler has dealt before and keeps itself."""
    if claim.probe:
        return MET
    shares = sampler.deal(claim, partition, ready, claim.count, None)
    rows, taken = shares[0]
    if not len(rows):
        return NOTHING
    open_ = sampler.check_known(partition, ready, (rows, taken), claim.count, state.next_index)
    record = _deal_record(claim, None, [r.Share(0, _column(rows))], _column(open_))
    return Outcome([rows], [record] if len(open_) else [])


def _decide_plainly(partition: Partition, plan: ClaimPlan, claim: Claim) -> Outcome:
    """Decide a claim with a built-in sampler whose batches belong to no rank."""
    if claim.again:
        _refuse_undealt(partition, claim, None)
    sampler, config, is_final = cast(BaseSampler, plan.sampler), plan.config_of(claim), False
    ready = partition.ready_set(plan.task, plan.fields)
    offered = partition.sampler_view(ready)
    if ready.total >= (claim.least or claim.count):
        size = min(claim.count, ready.total)
    else:
        is_final = plan.is_final(ready)
        rest = call_sampler(sampler, sampler.remainder, offered, **config) if is_final else 0
        size = 0 if rest < (claim.least or 0) else min(claim.count, rest)
    sampled, _ = call_sampler(sampler, sampler.sample, offered, size, **config) if size > 0 else ((), ())
    rows = np.array(sampled, "i8")
    if not len(rows):
        return ENDED if is_final else NOTHING
    column = rows.tobytes()
    return Outcome([rows], [_deal_record(claim, None, [r.Share(0, column)], column)])


def _column(rows: Any) -> bytes:
    return np.array(rows, "i8").tobytes()
