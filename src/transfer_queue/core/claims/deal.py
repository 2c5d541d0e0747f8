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

from transfer_queue.core.claims import deal_jobs, final_rounds, row_leases
from transfer_queue.core.claims.deal_jobs import ComputedDeal, DealTooLong, LongDeals, Shares
from transfer_queue.core.claims.final_rounds import column_of
from transfer_queue.core.claims.plan import ClaimPlan, Key, OpenClaim, deal_record, rank_of
from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.samplers.calls import UserSampler, call_sampler, name_of
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State, require_partition
from transfer_queue.core.tables.dealt import DealtBatches
from transfer_queue.core.tables.ready_sets import ReadySet
from transfer_queue.core.tables.rows import CLAIMED
from transfer_queue.errors import BatchGoneError, InvalidArgumentError, SamplerError, StorageKeyNotFoundError
from transfer_queue.messages.claims import Claim
from transfer_queue.sampler.base import BaseSampler, Deal, RankConsistentSampler, ReadyIndexes
from transfer_queue.sampler.freshness_sampler import too_old, version_key
from transfer_queue.sampler.sampler_wrapper import shown_rows

Passed = Mapping[str, Union[Sequence[int], np.ndarray]]  # reason -> rows that the task skips

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
    context: Context, plan: ClaimPlan, claims: Sequence[OpenClaim], made: ComputedDeal | None = None
) -> Outcome | None:
    """Skip the rows that the task skips, and return what these claims get now; None if each must be decided by itself.

    Several claims have one plan, and `wake` has found that one deal may be cut for them, or that they have shares.

    made: the long deal that such a claim has started, if another thread has computed it.
    """
    partition, claim = plan.partition, claims[0].claim
    if partition is None:
        if claim.again:
            require_partition(context.state.partitions, claim.partition)
        return NOTHING
    if len(partition.rows.chunks) > deal_jobs.SMALL and deal_jobs.needs_indexes(context, partition, plan):
        return BUSY
    is_timed = plan.is_timed and not claim.again
    began = context.config.timer() if is_timed else 0.0
    try:
        if not claim.again:  # otherwise nothing is dealt, so nothing is skipped
            dealt = partition.dealt.get(plan.task)
            for rank in [rank_of(each.claim) for each in claims] if dealt and dealt.unasked else ():
                if dealt and rank in dealt.unasked:  # it asks for the first time, but rounds hold batches for it
                    context.log.apply(r.RankAsked(claim.partition, claim.task, rank))
            if partition.options.max_staleness is not None:
                _skip(context, partition, plan, stale_rows(partition, plan))
            if plan.passes_over:
                _skip(context, partition, plan, _passed_over_rows(partition, plan, claim))
        is_busy = (partition.name, plan.task) in context.services[LongDeals].is_stale and not claim.again
        if len(claims) > 1:
            return Dealing(context.state, partition, plan, claim, is_busy, made).deal_to_all(claims)
        if plan.dealer is None and plan.user is None:
            outcome = BUSY if is_busy else _deal_plainly(partition, plan, claim)
        else:
            outcome = Dealing(context.state, partition, plan, claim, is_busy, made).deal_to_rank()
    finally:
        if is_timed:
            context.samplers.note(name_of(plan.sampler), context.config.timer() - began)
    if outcome.batches is not None:  # unless the client has seen this version, and could not use it
        return NOTHING if claim.since == partition.version else outcome
    is_open = not outcome.is_end and not outcome.is_busy
    return ENDED if is_open and claim.finite and partition.is_wholly_consumed(plan.task) else outcome


def stale_rows(partition: Partition, plan: ClaimPlan) -> Passed:
    """Return the rows that are too old for the partition (`max_staleness`), whatever the sampler is."""
    most, offered = partition.options.max_staleness, partition.sampler_view(plan.ready_set())
    size = plan.unit or None  # groups are skipped as a whole
    return {} if most is None else too_old(offered, version_key(), partition.policy_version, most, size)


def _passed_over_rows(partition: Partition, plan: ClaimPlan, claim: Claim) -> Passed:
    """Return the rows that the claim's sampler skips now."""
    if plan.user is not None:
        return plan.user.passes_over(claim, partition, plan.ready_set())
    sampler, offered = cast(BaseSampler, plan.sampler), partition.sampler_view(plan.ready_set())
    passed: Passed = call_sampler(sampler, sampler.passes_over, offered, **plan.config_of(claim))
    return passed


def _skip(context: Context, partition: Partition, plan: ClaimPlan, passed: Passed) -> None:
    """Record that the task skips these rows, by reason. The first reason of a row counts."""
    skipped = NO_ROWS
    for reason, rows in passed.items():
        left = np.setdiff1d(np.array(rows, "i8"), skipped)
        skipped = np.union1d(skipped, left)
        if len(left):
            context.log.apply(final_rounds.pass_over_record(partition, plan.task, left, str(reason)))


def _deal_plainly(partition: Partition, plan: ClaimPlan, claim: Claim) -> Outcome:
    """Decide with a built-in sampler whose batches belong to no rank."""
    is_final = False
    if claim.again:
        raise _undealt_error(claim, None)
    sampler: Any = plan.sampler
    config, ready = plan.config_of(claim), partition.ready_set(plan.task, plan.fields)
    offered, count = partition.sampler_view(ready), ready.total
    if count < (claim.least or claim.count):
        is_final = plan.is_final(ready)
        count = call_sampler(sampler, sampler.remainder, offered, **config) if is_final else 0
        if count < (claim.least or 0):
            count = 0
    size = min(claim.count, count)
    sampled, _ = call_sampler(sampler, sampler.sample, offered, size, **config) if size > 0 else ((), ())
    if not sampled:
        return ENDED if is_final else NOTHING
    rows = np.array(sampled, "i8")
    column = rows.tobytes()
    return Outcome([rows], [deal_record(claim, None, claim.count, [r.Share(0, column)], column)])


def _undealt_error(claim: Claim, key: Key | None) -> BatchGoneError:
    """Return the error of a claim that asks again for a batch which was not dealt."""
    if key is None:
        return BatchGoneError(
            f"the sampler of task {claim.task!r} keeps no batches under a (dp_rank, batch_index), so no batch of "
            f"partition {claim.partition!r} can be returned again; use a rank-consistent sampler, such as "
            f"RankAwareSampler, to replay batches"
        )
    return BatchGoneError(
        f"batch {key[1]} of dp_rank {key[0]} was not dealt to task {claim.task!r} in partition "
        f"{claim.partition!r}, so it cannot be returned again; the task's consumption was reset, or this is "
        f"another system"
    )


class Dealing(msgspec.Struct):
    """The decision about a claim of an existing partition."""

    state: State
    partition: Partition
    plan: ClaimPlan
    claim: Claim
    is_busy: bool
    """Whether a long deal of its task is being computed, so that no other one starts."""
    made: ComputedDeal | None
    """The long deal that the claim has started, if another thread has computed it."""

    # ------------------------------------------------------------ several claims

    def deal_to_all(self, claims: Sequence[OpenClaim]) -> Outcome | None:
        """Return what several claims get: batches that were dealt to their ranks before, or one deal that is cut.

        Returns None if each of them must be decided by itself.
        """
        partition, plan, claim = self.partition, self.plan, self.claim
        keys, dealt = [plan.key_of(each.claim) for each in claims], partition.dealt.get(plan.task)
        if dealt is not None and keys[0] is not None and dealt.was_dealt(*keys[0]):
            earlier = [dealt.find(*key) for key in keys if key is not None]
            batches = [batch.rows for batch in earlier if batch is not None and batch.batch_size == plan.count]
            positions = partition.rows.positions_of(np.concatenate([NO_ROWS, *batches]))
            whole = len(batches) == len(claims) and (positions >= 0).all()
            if whole and claim.lease is not None:  # each claim leases all rows of its batch
                whole = (partition.consumption_states(plan.task, positions) == CLAIMED).all()
            return Outcome(batches) if whole else None
        count = plan.count * len(claims)
        if self.is_busy or not plan.cuts or plan.available() < count:
            return None
        sampler, offered = cast(BaseSampler, plan.sampler), partition.sampler_view(plan.ready_set())
        if isinstance(sampler, RankConsistentSampler):
            ((sampled, _),) = call_sampler(sampler, sampler.deal, offered, count, **plan.config_of(claim)).values()
        else:
            sampled, _ = call_sampler(sampler, sampler.sample, offered, count, **plan.config_of(claim))
        rows = np.array(sampled, "i8")
        batches = list(rows.reshape(len(claims), plan.count))
        shares = [
            r.Share(0 if key is None else key[0], batch.tobytes()) for key, batch in zip(keys, batches, strict=True)
        ]
        batch_index = None if keys[0] is None else keys[0][1]
        return Outcome(batches, [deal_record(claim, batch_index, claim.count, shares)])

    # ------------------------------------------------------------ batches that may belong to a rank

    def deal_to_rank(self) -> Outcome:
        """Decide with a user's sampler, or with a built-in one whose batches belong to ranks."""
        try:
            outcome = self._deal_by_user() if self.plan.user is not None else self._deal_by_dealer()
        except DealTooLong as long:
            return MET if self.claim.probe else Outcome(is_busy=True, long=long)
        for at, record in enumerate(outcome.records):
            if isinstance(record, r.Dealt) and record.batch_index is not None and len(record.shares) > 1:
                new_ranks = self._unasked_ranks(record)
                outcome.records[at] = msgspec.structs.replace(record, unasked=new_ranks) if new_ranks else record
        return outcome

    def _unasked_ranks(self, deal: r.Dealt) -> list[int]:
        """Return the ranks of a deal that have never asked: they were dealt no batch, and do not wait for one."""
        dealt = self.partition.dealt.get(self.plan.task)
        known = {rank_of(self.claim)}.union(() if dealt is None else dealt.issued, self._waiting_ranks())
        return [share.dp_rank for share in deal.shares if share.dp_rank not in known]

    def _waiting_ranks(self) -> set[int]:
        queue = self.state.waiting.claim_queues(self.partition.name).get(self.plan.task)
        return {rank for rank, _ in queue.shares} if queue is not None else set()

    def _find_dealt(self, key: Key | None) -> Outcome | None:
        """Return the batch that was dealt under this key before; None if there is none.

        Raises BatchGoneError if its rows are cleared or skipped, or if the claim needs a batch that was dealt before
        (`Claim.again`), StorageKeyNotFoundError if values are lost, and InvalidArgumentError for another batch_size.
        """
        partition, claim = self.partition, self.claim
        dealt = partition.dealt.get(claim.task)
        batch = None if key is None or dealt is None else dealt.find(*key)
        if key is None or dealt is None or (batch is None and not dealt.is_removed(*key)):
            if claim.again:
                raise _undealt_error(claim, key)
            return None
        prefix = f"batch {key[1]} of dp_rank {key[0]} for task {claim.task!r} in partition {partition.name!r} was dealt"
        if batch is None:
            left = ", or were dealt to other ranks because the rank was declared gone" if key[0] in dealt.left else ""
            raise BatchGoneError(
                f"{prefix} before, and its rows were cleared later{left}; other rows do "
                f"not replace it. Fetch the next batch_index, or clear rows only after all replicas have fetched them."
            )
        if row_leases.has_poisoned_rows(partition, claim.task, batch.rows):
            raise BatchGoneError(
                f"{prefix} too often without an ack (max_deliveries), so the task skips its samples; explain() "
                f"describes them. Fetch the next batch_index."
            )
        if batch.batch_size != claim.count:
            raise InvalidArgumentError(
                f"{prefix} with batch_size {batch.batch_size}, but this claim has {claim.count}; all replicas of a "
                f"rank must use the same batch_size"
            )
        if partition.losses.counts:
            lost = partition.losses.describe(claim.fields, partition.rows.positions_of(batch.rows))
            if lost:
                raise StorageKeyNotFoundError(f"{prefix}; {lost}")
        return Outcome([batch.rows])

    def _deal_by_dealer(self) -> Outcome:
        """Decide with a built-in sampler whose batches belong to ranks."""
        partition, plan, claim = self.partition, self.plan, self.claim
        inner, key = cast(RankConsistentSampler, plan.dealer), plan.key_of(claim)
        known = self._find_dealt(key)
        if known is not None:
            return known
        plan.check_declared()
        if plan.uses_declared_size:
            plan.validate(claim)  # the groups may have been declared after the claim arrived
        if self.is_busy:
            return BUSY
        sampler, config, ready = cast(RankConsistentSampler, plan.sampler), plan.config_of(claim), plan.ready_set()
        offered = partition.sampler_view(ready)

        def deal(count: int, **more: Any) -> Shares:
            made = self.made
            if made is not None and made.is_valid(partition, ready, plan.group_size or 1, count):
                return made.shares
            prepared: Deal | None = call_sampler(sampler, sampler.prepare, offered, count, **config, **more)
            if prepared is not None and prepared.size > LONG:
                raise DealTooLong(prepared, count)
            return {} if prepared is None else call_sampler(sampler, prepared.run)

        if partition.sealed and claim.count > 0 and key is not None:
            given = final_rounds.decide(self._final_round(inner, ready, key, deal))
            if given is None:
                return NOTHING
            rows, records = given
            return Outcome(None if rows is None else [rows], records, is_end=rows is None)
        if claim.ahead and key is not None and self._is_needed_by_others(inner, key):
            return NOTHING
        if ready.total >= claim.count > 0:
            shares = deal(claim.count)
            if shares:
                return self._outcome(key, shares)
        if not plan.is_final(ready):
            return NOTHING
        if inner.drop_last:
            skipped = final_rounds.skip_remainder(self._final_round(inner, ready, (0, 0), deal))
            return Outcome(None, skipped, is_end=True)
        # Groups are counted only here, where there are fewer than a deal takes.
        if inner.deals_finally:
            shares = deal(claim.count, final=True)
        else:
            rest = call_sampler(sampler, sampler.remainder, offered, **config)
            shares = deal(rest) if 0 < rest < claim.count else {}
        return self._outcome(key, shares) if shares else ENDED

    def _final_round(
        self, inner: RankConsistentSampler, ready: ReadySet, key: Key, deal: Callable[..., Shares]
    ) -> final_rounds.FinalRound:
        """Return what `final_rounds` needs to decide a claim of a sealed partition."""
        plan, claim, offered = self.plan, self.claim, self.partition.sampler_view(ready)
        shown = cast(ReadyIndexes, shown_rows(cast(BaseSampler, plan.sampler), offered, plan.config_of(claim)))
        return final_rounds.FinalRound(plan, ready, shown, claim, key, self._ranks(inner, key), deal)

    def _is_needed_by_others(self, inner: RankConsistentSampler, key: Key) -> bool:
        """Return whether other ranks may need the rows of a batch that is fetched ahead.

        If other ranks are known, they do if too few rows are ready for this batch and for the ranks that are behind. If
        no other rank is known, others may still be starting while this rank needs its first batch. If the number of
        ranks is known, they do not: a deal has a batch for each rank.
        """
        claim = self.claim
        if inner.ranks(claim.sampling) is not None:
            return False
        dealt = self.partition.dealt.get(claim.task) or DealtBatches()
        others = self._ranks(inner, key) - {key[0]}
        own_count = dealt.counts.get(key[0], 0)
        if not others:
            return own_count <= claim.ahead
        lacking = {rank: max(0, own_count + 1 - dealt.counts.get(rank, 0)) for rank in others}
        need = sum(batches * dealt.sizes.get(rank, claim.count) for rank, batches in lacking.items())
        return self.plan.available() < claim.count + need

    def _ranks(self, inner: RankConsistentSampler, key: Key) -> set[int]:
        """Return the ranks that get equally many batches: all if their number is known, otherwise those seen so far."""
        known = inner.ranks(self.claim.sampling)
        if known is not None:
            return set(range(known))
        dealt = self.partition.dealt.get(self.plan.task)
        dealt_ranks = set(dealt.issued) - dealt.left if dealt is not None else set()
        return self._waiting_ranks() | {key[0]} | dealt_ranks

    def _outcome(self, key: Key | None, shares: Shares) -> Outcome:
        """Return the outcome of a deal."""
        plan, claim = self.plan, self.claim
        own_share = shares.get(key[0] if key is not None else 0)
        if own_share is None:
            raise SamplerError(
                f"{name_of(plan.sampler)}.deal returned no share for the dp_rank of the claim; nothing was dealt. "
                f"Return a share for each rank"
            )
        if key is not None:
            final_rounds.check_undealt(self.partition, claim.task, [(rank, key[1]) for rank in shares])
        kept = [r.Share(rank, column_of(sampled)) for rank, (sampled, _) in sorted(shares.items())]
        consumed = None if plan.user is None else b"".join(column_of(taken) for _, taken in shares.values())
        record = deal_record(claim, None if key is None else key[1], claim.count, kept, consumed)
        return Outcome([np.array(own_share[0], "i8")], [record])

    # ------------------------------------------------------------ users' samplers

    def _deal_by_user(self) -> Outcome:
        plan, claim, sampler = self.plan, self.claim, cast(UserSampler, self.plan.user)
        begun = sampler.begin(claim)
        known = self._find_dealt(begun.key)
        if known is not None:
            return known
        deals = sampler.runner.facts.deals
        if deals:
            plan.check_declared()
        ready = plan.ready_set()
        if begun.cached:
            return self._find_known_batch(sampler, ready)
        enough = ready.total >= claim.count
        if enough and claim.probe:
            return MET  # a user's sampler may have side effects, so only a claim that takes the rows calls it
        if enough:
            outcome = self._call_user(sampler, ready, claim.count, begun.key)
            if outcome is not NOTHING or not deals:
                return outcome
        if not plan.is_final(ready):
            return NOTHING
        if sampler.runner.facts.finally_:
            outcome = self._call_user(sampler, ready, claim.count, begun.key, final=True)
        else:
            rest = min(claim.count, sampler.remainder(claim, self.partition, ready))
            if rest <= 0 or (deals and rest == claim.count):
                return ENDED
            if claim.probe:
                return MET
            outcome = self._call_user(sampler, ready, rest, begun.key)
        return ENDED if outcome is NOTHING else outcome

    def _call_user(
        self, sampler: UserSampler, ready: ReadySet, size: int, key: Key | None, final: bool = False
    ) -> Outcome:
        """Return a deal of a user's sampler; NOTHING if it returns none. Raises SamplerError for an invalid deal."""
        shares = sampler.deal(self.claim, self.partition, ready, size, key, final)
        if not shares:
            return NOTHING
        sampler.check(self.partition, ready, shares, key, size)
        own_share = shares.get(0 if key is None else key[0])
        if own_share is not None and not len(own_share[0]):
            return NOTHING
        outcome = self._outcome(key, shares)
        if key is None and own_share is not None and not len(own_share[1]):
            outcome.records.clear()  # nothing is consumed
        return outcome

    def _find_known_batch(self, sampler: UserSampler, ready: ReadySet) -> Outcome:
        """Return a batch that a user's sampler has dealt before and keeps itself."""
        claim = self.claim
        if claim.probe:
            return MET
        rows, taken = sampler.deal(claim, self.partition, ready, claim.count, None)[0]
        if not len(rows):
            return NOTHING
        open_ = sampler.check_known(self.partition, ready, (rows, taken), claim.count, self.state.next_index)
        record = deal_record(claim, None, claim.count, [r.Share(0, column_of(rows))], column_of(open_))
        return Outcome([rows], [record] if len(open_) else [])
