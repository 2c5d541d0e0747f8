"""Decides which rows a claim gets. Reads the state without changing it, and returns the rows and the records.

Built-in samplers are called through `validate`, `deal_key`, `deal` and `remainder`, which have no side effects; the
state keeps the dealt batches. A user's sampler is called through `sample` and keeps its own state. Its result is
checked: if it returns rows that it was not offered, the claim fails and nothing is dealt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, cast

import msgspec
import numpy as np

from transfer_queue.core.claims import consumer_state, final_rounds, lease_decisions
from transfer_queue.core.claims.background_deals import ComputedDeal, DealTooLong, Shares
from transfer_queue.core.events import records as r
from transfer_queue.core.ready.ready_sets import ReadySet, ReadySets
from transfer_queue.core.samplers.claim_samplers import (
    available_rows,
    deals_itself,
    dealt_group_size,
    group_size,
)
from transfer_queue.core.samplers.sampler_view import PartitionView, call_sampler
from transfer_queue.core.samplers.unused_entries import unused_entries_warning
from transfer_queue.core.samplers.user_sampler import AnySampler, UserSampler, name_of
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import least_count
from transfer_queue.core.tables.dealt_batches import DealtBatches
from transfer_queue.errors import BatchGoneError, InvalidArgumentError, SamplerError, StorageKeyNotFoundError
from transfer_queue.messages.claims import Claim
from transfer_queue.sampler.base import BaseSampler, Deal, RankConsistentSampler, ReadyIndexes
from transfer_queue.sampler.freshness_sampler import too_old, version_key
from transfer_queue.sampler.sampler_wrapper import SamplerWrapper, dealer, shown_rows

Dealer = Union[RankConsistentSampler, SamplerWrapper]


class ClaimOutcome:
    """What a claim gets."""

    __slots__ = ("busy", "ended", "long", "records", "rows")

    def __init__(
        self, rows: np.ndarray | None = None, records: Sequence[r.AnyRecord] = (), ended: bool = False
    ) -> None:
        self.rows = rows
        """Global indexes in dealt order; None if the claim gets nothing now."""
        self.records = list(records)
        self.ended = ended
        """Whether the claim will never get anything."""
        self.busy = False
        """Whether the claim must wait for a long deal of its task, or for an index that a deal needs."""
        self.long: DealTooLong | None = None
        """The long deal that this claim starts."""


def wait_for_deal(long: DealTooLong | None = None) -> ClaimOutcome:
    """Return the outcome of a claim that must wait for a computation. long: the deal that this claim starts."""
    outcome = ClaimOutcome()
    outcome.busy, outcome.long = True, long
    return outcome


LONGEST_LEASE = 1e9  # seconds
LONG = 512  # items, which are balanced within a millisecond
NOTHING = ClaimOutcome()
ENDED = ClaimOutcome(ended=True)


def sampling_of(claim: Claim) -> dict[str, Any]:
    """Return the sampling_config of a claim, with its task and partition added."""
    return {"task_name": claim.task, "partition_id": claim.partition, **claim.sampling}


def check_claim(partition: Partition | None, sampler: AnySampler, claim: Claim, strict: bool) -> None:
    """Raise an error if a claim can never be valid. strict: see `SamplerRegistry.strict`."""
    if claim.count < 0:
        raise InvalidArgumentError(f"batch_size must not be negative, got {claim.count}")
    if not claim.fields:
        raise InvalidArgumentError("data_fields must not be empty; name at least one field")
    if claim.lease is not None and not 0 < claim.lease <= LONGEST_LEASE:
        raise InvalidArgumentError(f"lease must be from 0 (excluded) to {LONGEST_LEASE:g} seconds, got {claim.lease}")
    if claim.replicas is not None and (claim.lease is None or claim.replicas < 1):
        raise InvalidArgumentError(
            f"replicas must be 1 or more, and needs a lease, got replicas {claim.replicas} and lease {claim.lease}"
        )
    if claim.least is not None and not 0 < claim.least <= claim.count:
        raise InvalidArgumentError(f"least must be from 1 to batch_size ({claim.count}), got {claim.least}")
    words = unused_entries_warning(sampler, claim.sampling) if strict else None
    if words is not None:
        raise InvalidArgumentError(words)
    if (claim.replicas or 1) > 1 and not _is_kept(sampler, claim):
        raise InvalidArgumentError(
            f"replicas is {claim.replicas}, but only batches with a (dp_rank, batch_index) are returned to several "
            f"replicas, and {name_of(sampler)} deals this batch to the first claim only; leave replicas out"
        )
    _validate(sampler, partition, claim)


def _validate(sampler: AnySampler, partition: Partition | None, claim: Claim) -> None:
    """Raise the sampler's error if a claim can never be met. The message also says where the group size comes from."""
    if isinstance(sampler, UserSampler):
        sampler.begin(claim)
        return
    try:
        call_sampler(sampler, sampler.validate, claim.count, sampling_of(claim))
    except InvalidArgumentError as error:
        size = group_size(sampler)
        if partition is None or partition.groups.size is not None or not _uses_declared_size(sampler, partition):
            if size is None or not claim.count % size:
                raise
            raise InvalidArgumentError(
                f"{error}. {name_of(sampler)} deals complete groups to task {claim.task!r}; a task that takes single "
                f"samples needs another sampler: {{'controller': {{'task_samplers': {{{claim.task!r}: "
                f"'SequentialSampler'}}}}}}"
            ) from None
        raise InvalidArgumentError(
            f"{error}. The groups declared in partition {partition.name!r} have up to {size} samples, and "
            f"n_samples_per_prompt was not set. If the samples of a group come in several puts, declare the size of a "
            f"group: create_partition(..., group_size=n), or n_samples_per_prompt of the sampler"
        ) from None


def _uses_declared_size(sampler: AnySampler, partition: Partition) -> bool:
    """Return whether the sampler takes its group size from the declared `group_ids`."""
    return not getattr(sampler, "size_given", True) and partition.groups.largest > 1 and deals_itself(sampler)


def _is_kept(sampler: AnySampler, claim: Claim) -> bool:
    """Return whether the batch of this claim is kept for other claims with the same key."""
    if isinstance(sampler, UserSampler):
        return sampler.begin(claim).key is not None
    if dealer(sampler) is None and not isinstance(sampler, RankConsistentSampler):
        return False
    return call_sampler(sampler, cast(Dealer, sampler).deal_key, sampling_of(claim)) is not None


def decide_passed_over(partition: Partition, sampler: AnySampler, claim: Claim) -> list[r.AnyRecord]:
    """Return the records of rows that the claim's sampler skips now. Apply them before `select_batch`."""
    if isinstance(sampler, UserSampler):
        passed = sampler.passes_over(claim, partition, partition.ready_set(claim.task, tuple(claim.fields)))
    elif type(sampler).passes_over is BaseSampler.passes_over:
        return []
    else:
        offered = partition.sampler_view(partition.ready_set(claim.task, tuple(claim.fields)))
        sampling = {**sampling_of(claim), "partition": PartitionView(partition)}
        passed = call_sampler(sampler, sampler.passes_over, offered, **sampling)
    return _skips(partition, claim.task, passed)


def decide_asked(partition: Partition, claim: Claim) -> list[r.AnyRecord]:
    """Return the record that a rank asks for the first time, if rounds already hold batches for it."""
    dealt = partition.dealt.get(claim.task)
    if dealt is None or not dealt.unasked or (rank := consumer_state.rank_of(claim)) not in dealt.unasked:
        return []
    return [r.RankAsked(claim.partition, claim.task, rank)]


def decide_stale(partition: Partition, sampler: AnySampler, claim: Claim) -> list[r.AnyRecord]:
    """Return the records of rows that are too old for the partition (`max_staleness`), whatever the sampler is.

    Apply them before `decide_passed_over`.
    """
    most = partition.options.max_staleness
    if most is None:
        return []
    size = dealt_group_size(sampler, partition) or None  # groups are skipped as a whole
    offered = partition.sampler_view(partition.ready_set(claim.task, tuple(claim.fields)))
    return _skips(partition, claim.task, too_old(offered, version_key(), partition.policy_version, most, size))


def _skips(partition: Partition, task: str, passed: Mapping[str, Sequence[int] | np.ndarray]) -> list[r.AnyRecord]:
    """Return the records that the task skips these rows, by reason. The first reason of a row counts."""
    records: list[r.AnyRecord] = []
    gone = np.zeros(0, "i8")
    for reason, rows in passed.items():
        left = np.setdiff1d(np.array(rows, "i8"), gone)
        gone = np.union1d(gone, left)
        if len(left):
            records.append(final_rounds.pass_over_record(partition, task, left, str(reason)))
    return records


def select_batch(
    state: State,
    partition: Partition,
    sampler: AnySampler,
    claim: Claim,
    busy: bool = False,
    made: ComputedDeal | None = None,
) -> ClaimOutcome:
    """Return what this claim of a partition gets now from its sampler.

    busy: a long deal of its task is being computed, so no other one starts. made: the long deal that was computed.
    """
    if isinstance(sampler, UserSampler):
        outcome = _with_unasked(state, partition, claim, _decide_by_user(state, partition, sampler, claim))
    elif (inner := dealer(sampler)) is not None:
        try:
            outcome = _decide_by_deal(state, partition, cast(Dealer, sampler), inner, claim, busy, made)
        except DealTooLong as long:
            outcome = ClaimOutcome(np.zeros(0, "i8")) if claim.probe else wait_for_deal(long)
        outcome = _with_unasked(state, partition, claim, outcome)
    else:
        outcome = wait_for_deal() if busy else _decide_plainly(partition, sampler, claim)
    if outcome.busy:
        return outcome
    if outcome.rows is None and not outcome.ended and claim.finite and partition.is_wholly_consumed(claim.task):
        return ENDED
    if outcome.rows is not None and claim.since == partition.version:
        return NOTHING  # the client has seen this version, and could not use it
    return outcome


def _with_unasked(state: State, partition: Partition, claim: Claim, outcome: ClaimOutcome) -> ClaimOutcome:
    """Return the outcome with the ranks of its deals that have never asked for a batch."""
    for at, record in enumerate(outcome.records):
        if isinstance(record, r.Dealt) and record.batch_index is not None and len(record.shares) > 1:
            unasked = _unasked_ranks(state, partition, claim, record)
            outcome.records[at] = msgspec.structs.replace(record, unasked=unasked) if unasked else record
    return outcome


def _unasked_ranks(state: State, partition: Partition, claim: Claim, deal: r.Dealt) -> list[int]:
    """Return the ranks of a deal that have never asked: they were dealt no batch before, and do not wait for one."""
    dealt = partition.dealt.get(claim.task)
    queue = state.waiting.claim_queues(partition.name).get(claim.task)
    asked = {consumer_state.rank_of(claim)}.union(() if dealt is None else dealt.issued)
    asked.update(() if queue is None else (rank for rank, _ in queue.shares))
    return [share.dp_rank for share in deal.shares if share.dp_rank not in asked]


def _find_dealt(partition: Partition, claim: Claim, key: tuple[int, int] | None) -> ClaimOutcome | None:
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
        return ClaimOutcome(batch.rows)
    if dealt.is_gone(*key):
        raise BatchGoneError(
            f"{words} before, and its rows were cleared later{_describe_left_rank(dealt.left, key[0])}; other rows do "
            f"not replace it. Fetch the next batch_index, or clear rows only after all replicas have fetched them."
        )
    _refuse_undealt(partition, claim, key)
    return None


def _refuse_undealt(partition: Partition, claim: Claim, key: tuple[int, int] | None) -> None:
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
    sampler: Dealer,
    inner: RankConsistentSampler,
    claim: Claim,
    busy: bool,
    made: ComputedDeal | None,
) -> ClaimOutcome:
    """Decide a claim with a rank-consistent sampler. inner: the innermost one, which is `sampler` if it wraps none."""
    sampling = sampling_of(claim)
    key = call_sampler(sampler, sampler.deal_key, sampling)
    known = _find_dealt(partition, claim, key)
    if known is not None:
        return known
    _check_declared(partition, sampler)
    if _uses_declared_size(sampler, partition):
        _validate(sampler, partition, claim)  # the groups may have been declared after the claim arrived
    if busy:
        return wait_for_deal()
    ready = partition.ready_set(claim.task, tuple(claim.fields))
    offered = partition.sampler_view(ready)
    sampling["partition"] = PartitionView(partition)

    def deal(count: int, **more: Any) -> Shares:
        if made is not None and made.is_valid(partition, ready, group_size(sampler) or 1, count):
            return made.shares
        return _deal(sampler, offered, count, {**sampling, **more})

    if partition.sealed and claim.count > 0 and key is not None:
        end = _final_round_of(state, partition, sampler, inner, ready, claim, key, sampling, deal)
        given = final_rounds.decide(end)
        return NOTHING if given is None else ClaimOutcome(*given, ended=given[0] is None)
    if claim.ahead and key is not None and _needed_by_others(state, partition, sampler, inner, ready, claim, key):
        return NOTHING
    if ready.total >= claim.count > 0:
        shares = deal(claim.count)
        if shares:
            return _outcome_of_deal(partition, sampler, claim, key, shares)
    if not is_final(partition, ready, sampler):
        return NOTHING
    if inner.drop_last:
        end = _final_round_of(state, partition, sampler, inner, ready, claim, (0, 0), sampling, deal)
        return ClaimOutcome(None, final_rounds.skip_remainder(end), ended=True)
    # Groups are counted only here, where there are fewer than a deal takes.
    if inner.deals_finally:
        shares = deal(claim.count, final=True)
    else:
        rest = call_sampler(sampler, sampler.remainder, offered, **sampling)
        shares = deal(rest) if 0 < rest < claim.count else {}
    return _outcome_of_deal(partition, sampler, claim, key, shares) if shares else ENDED


def _check_declared(partition: Partition, sampler: AnySampler) -> None:
    """Raise InvalidArgumentError if the groups of a partition have another size than the sampler deals."""
    declared, size = partition.groups.size, group_size(sampler)
    if declared is not None and size not in (None, declared):
        raise InvalidArgumentError(
            f"partition {partition.name!r} has groups of {declared} samples (its group_size), but "
            f"{name_of(sampler)} deals groups of {size}; set n_samples_per_prompt to {declared}"
        )


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
    sampler: Dealer,
    inner: RankConsistentSampler,
    ready: ReadySet,
    claim: Claim,
    key: tuple[int, int],
    sampling: dict[str, Any],
    deal: Callable[..., Shares],
) -> final_rounds.FinalRound:
    """Return what `final_rounds` needs to decide a claim of a sealed partition."""
    size = group_size(sampler)
    unit = size or 1
    return final_rounds.FinalRound(
        partition,
        inner,
        ready,
        cast(ReadyIndexes, shown_rows(sampler, partition.sampler_view(ready), sampling)),
        claim,
        key,
        _ranks(state, inner, claim, key),
        inner.ranks(claim.sampling) is not None,
        unit,
        groups=size is not None and (size > 1 or partition.groups.explicit),
        have=available_rows(partition, ready, sampler) // unit,
        final=lambda: is_final(partition, ready, sampler),
        deal=deal,
    )


def _needed_by_others(
    state: State,
    partition: Partition,
    sampler: Dealer,
    inner: RankConsistentSampler,
    ready: ReadySet,
    claim: Claim,
    key: tuple[int, int],
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
    return available_rows(partition, ready, sampler) < claim.count + need


def _ranks(state: State, sampler: RankConsistentSampler, claim: Claim, key: tuple[int, int]) -> set[int]:
    """Return the ranks that get equally many batches: all if their number is known, otherwise those seen so far."""
    known = sampler.ranks(claim.sampling)
    if known is not None:
        return set(range(known))
    dealt = state.partitions[claim.partition].dealt.get(claim.task)
    queue = state.waiting.claim_queues(claim.partition).get(claim.task)
    seen = {rank for rank, _ in queue.shares} if queue is not None else set()
    ever = set(dealt.issued) - dealt.left if dealt is not None else set()
    return seen | {key[0]} | ever


def _outcome_of_deal(
    partition: Partition,
    sampler: AnySampler,
    claim: Claim,
    key: tuple[int, int] | None,
    shares: Shares,
) -> ClaimOutcome:
    mine = shares.get(key[0] if key is not None else 0)
    if mine is None:
        raise SamplerError(
            f"{name_of(sampler)}.deal returned no share for the dp_rank of the claim; nothing was dealt. Return a "
            f"share for each rank"
        )
    if key is not None:
        final_rounds.check_undealt(partition, claim.task, [(rank, key[1]) for rank in shares])
    kept = [r.Share(rank, _column(sampled)) for rank, (sampled, _) in sorted(shares.items())]
    if deals_itself(sampler):
        consumed = b"".join(share.rows for share in kept)
    else:
        consumed = b"".join(_column(taken) for _, taken in shares.values())
    batch_index = key[1] if key is not None else None
    record = r.Dealt(claim.partition, claim.task, batch_index, claim.count, kept, consumed)
    return ClaimOutcome(np.array(mine[0], "i8"), [record])


def _decide_by_user(state: State, partition: Partition, sampler: UserSampler, claim: Claim) -> ClaimOutcome:
    begun = sampler.begin(claim)
    known = _find_dealt(partition, claim, begun.key)
    if known is not None:
        return known
    deals = sampler.runner.facts.deals
    if deals:
        _check_declared(partition, sampler)
    ready = partition.ready_set(claim.task, tuple(claim.fields))
    if begun.cached:
        return _outcome_of_known_batch(state, partition, sampler, ready, claim)
    enough = ready.total >= claim.count
    if enough and claim.probe:
        # A user's sampler may have side effects, so only a claim that takes the rows calls it.
        return ClaimOutcome(np.zeros(0, "i8"))
    if enough:
        outcome = _deal_by_user(partition, sampler, ready, claim, claim.count, begun.key)
        if outcome is not NOTHING or not deals:
            return outcome
    if not is_final(partition, ready, sampler):
        return NOTHING
    if sampler.runner.facts.finally_:
        outcome = _deal_by_user(partition, sampler, ready, claim, claim.count, begun.key, final=True)
    else:
        rest = min(claim.count, sampler.remainder(claim, partition, ready))
        if rest <= 0 or (deals and rest == claim.count):
            return ENDED
        if claim.probe:
            return ClaimOutcome(np.zeros(0, "i8"))
        outcome = _deal_by_user(partition, sampler, ready, claim, rest, begun.key)
    return ENDED if outcome is NOTHING else outcome


def _deal_by_user(
    partition: Partition,
    sampler: UserSampler,
    ready: ReadySet,
    claim: Claim,
    size: int,
    key: tuple[int, int] | None,
    final: bool = False,
) -> ClaimOutcome:
    """Return a deal of a user's sampler; NOTHING if it returns none. Raises SamplerError for an invalid deal."""
    shares = sampler.deal(claim, partition, ready, size, key, final)
    if not shares:
        return NOTHING
    sampler.check(partition, ready, shares, key, size)
    mine = shares.get(0 if key is None else key[0])
    if mine is not None and not len(mine[0]):
        return NOTHING
    outcome = _outcome_of_deal(partition, sampler, claim, key, shares)
    if key is None and mine is not None and not len(mine[1]):
        outcome.records.clear()  # nothing is consumed
    return outcome


def _outcome_of_known_batch(
    state: State, partition: Partition, sampler: UserSampler, ready: ReadySet, claim: Claim
) -> ClaimOutcome:
    """Return a batch that a user's sampler has dealt before and keeps itself."""
    if claim.probe:
        return ClaimOutcome(np.zeros(0, "i8"))
    shares = sampler.deal(claim, partition, ready, claim.count, None)
    rows, taken = shares[0]
    if not len(rows):
        return NOTHING
    open_ = sampler.check_known(partition, ready, (rows, taken), claim.count, state.next_index)
    record = r.Dealt(claim.partition, claim.task, None, claim.count, [r.Share(0, _column(rows))], _column(open_))
    return ClaimOutcome(rows, [record] if len(open_) else [])


def _decide_plainly(partition: Partition, sampler: BaseSampler, claim: Claim) -> ClaimOutcome:
    """Decide a claim with a built-in sampler whose batches belong to no rank."""
    _refuse_undealt(partition, claim, None)
    sampling = sampling_of(claim)
    ready = partition.ready_set(claim.task, tuple(claim.fields))
    size, final = _batch_size_now(partition, sampler, ready, claim, sampling)
    if size <= 0:
        return ENDED if final else NOTHING
    sampling["partition"] = PartitionView(partition)
    sampled, _ = call_sampler(sampler, sampler.sample, partition.sampler_view(ready), size, **sampling)
    rows = np.array(sampled, "i8")
    if not len(rows):
        return ENDED if final else NOTHING
    column = rows.tobytes()
    return ClaimOutcome(rows, [r.Dealt(claim.partition, claim.task, None, claim.count, [r.Share(0, column)], column)])


def _batch_size_now(
    partition: Partition, sampler: BaseSampler, ready: ReadySet, claim: Claim, sampling: dict[str, Any]
) -> tuple[int, bool]:
    """Return the batch_size of a deal now, 0 if none is possible, and whether it is one of the last after a seal."""
    if ready.total >= least_count(claim):
        return min(claim.count, ready.total), False
    if not is_final(partition, ready, sampler):
        return 0, False
    rest = min(claim.count, call_sampler(sampler, sampler.remainder, partition.sampler_view(ready), **sampling))
    return 0 if claim.least is not None and rest < claim.least else rest, True


def is_final(partition: Partition, ready: ReadySet, sampler: AnySampler) -> bool:
    """Return whether no further row can become ready: the partition is sealed and each row is ready or consumed.

    If the sampler deals groups, rows of groups that can never be complete do not count.
    """
    if not partition.sealed:
        return False
    if partition.rows.count - partition.tasks.get(ready.task, 0) == ready.total:
        return True
    size = group_size(sampler)
    return size is not None and _has_only_hopeless_groups(partition, ready, size)


def _has_only_hopeless_groups(partition: Partition, ready: ReadySet, size: int) -> bool:
    for positions in ready.unready_positions(partition.rows):
        for group in np.unique(partition.groups.groups_of(positions, size)).tolist():
            if not partition.groups.is_orphaned(group, size, sealed=True):
                return False
    return True


def _column(rows: Any) -> bytes:
    return np.array(rows, "i8").tobytes()
