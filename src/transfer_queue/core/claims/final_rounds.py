"""Divides the last rows of a sealed partition so that every dp_rank gets the same number of batches.

A *round* is one batch_index over all ranks, and a *share* is one rank's batch of it. If the number of ranks is known,
every deal is a round, so no rank is ever ahead. If it is not known, a share is *owed* if another rank was dealt the
same round. Counted in units (groups if the sampler deals groups, otherwise rows), there are three cases:

    enough for all owed shares and this one      it is dealt in full, as before the seal
    not enough, and more may become ready        the claim waits
    not enough, and no more can become ready     the remainder is divided over the owed shares, then over a last round
                                                 if every rank gets a unit of it; the task skips the rest

The remainder is divided for all ranks at once, so that a row that is cleared later does not change another share.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any, Union, cast

import numpy as np

from transfer_queue.core.claims.plan import ClaimPlan, Key, deal_record
from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.dealt import DealtBatches
from transfer_queue.core.tables.ready_sets import ReadySet
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.claims import Claim
from transfer_queue.sampler.base import RankConsistentSampler, ReadyIndexes

REMAINDER = "remainder"  # the reason under which rows are skipped here

# The rows for the claim, None if it will never get any; and the records.
Given = tuple[Union[np.ndarray, None], list[r.AnyRecord]]


@dataclass(frozen=True)
class FinalRound:
    """A claim of a sealed partition for a share that was not dealt yet."""

    plan: ClaimPlan
    ready: ReadySet
    offered: ReadyIndexes
    claim: Claim
    key: Key
    ranks: set[int]
    """All ranks that are known."""
    deal: Callable[..., Mapping[int, tuple[Any, Any]]]
    """Makes the sampler deal this number of rows for each share."""

    @cached_property
    def partition(self) -> Partition:
        """The partition, which exists."""
        return cast(Partition, self.plan.partition)

    @cached_property
    def sampler(self) -> RankConsistentSampler:
        """The innermost sampler."""
        return cast(RankConsistentSampler, self.plan.dealer)

    @cached_property
    def unit(self) -> int:
        """The number of rows in a unit."""
        return self.plan.group_size or 1

    @cached_property
    def have(self) -> int:
        """The number of complete units that are ready."""
        return self.plan.available() // self.unit

    def final(self) -> bool:
        """Return whether no further row can become ready."""
        return self.plan.is_final(self.ready)

    @cached_property
    def dealt(self) -> DealtBatches:
        """The batches that the task was dealt so far."""
        return self.partition.dealt.get(self.claim.task) or DealtBatches()

    def rows_of(self, rank: int) -> int:
        """Return the batch_size of a rank; that of this claim if the rank's is not known."""
        return self.claim.count if rank == self.key[0] else self.dealt.sizes.get(rank, self.claim.count)

    def units_of(self, rank: int) -> int:
        """Return the batch_size of a rank in units, at least 1."""
        return max(1, self.rows_of(rank) // self.unit)


def decide(end: FinalRound) -> Given | None:
    """Return what the claim gets; None if it waits."""
    if end.sampler.deals_finally:
        return _decide_by_sampler(end)
    return _decide_round(end) if end.sampler.ranks(end.claim.sampling) is not None else _decide_for_rank(end)


def skip_remainder(end: FinalRound) -> list[r.AnyRecord]:
    """Return the records that skip all remaining rows."""
    return _final_outcome(end, {}, end.have)[1]


def _decide_by_sampler(end: FinalRound) -> Given | None:
    """Decide with a sampler that chooses the last rounds itself."""
    shares = end.deal(end.claim.count)
    if not shares:
        if not end.final():
            return None
        shares = end.deal(end.claim.count, final=True)
    cut = {(rank, end.key[1]): sampled for rank, (sampled, _) in sorted(shares.items())}
    return _final_outcome(end, cut, 0 if shares else end.have)


def _decide_round(end: FinalRound) -> Given | None:
    """Decide if every deal is a round, so that no share is ever owed."""
    ranks = len(end.ranks)
    full = end.claim.count * ranks // end.unit
    few = full if end.sampler.drop_last else ranks
    if end.have >= full:
        count, cut = full, _round(end, end.claim.count)
    elif not end.final():
        return None
    elif end.have < few:
        count, cut = 0, {}
    elif end.sampler.deals_rounds:
        count = end.have // ranks * ranks
        cut = _round(end, count // ranks * end.unit)
    else:
        count = end.have
        cut = _in_order(end, split_evenly(count, [full // ranks] * ranks))
    rest = end.have - count
    return _final_outcome(end, cut, rest if rest < few and end.final() else 0)


def _round(end: FinalRound, count: int) -> dict[Key, Any]:
    """Deal `count` rows to every rank."""
    return {(rank, end.key[1]): sampled for rank, (sampled, _) in sorted(end.deal(count).items())}


def _in_order(end: FinalRound, sizes: list[int]) -> dict[Key, Any]:
    """Divide all remaining rows, in order, into a round. sizes: the units of each rank."""
    return _cut(end, _all_rows(end), [(rank, end.key[1]) for rank in sorted(end.ranks)], sizes)


def _decide_for_rank(end: FinalRound) -> Given | None:
    """Decide with a sampler that deals only to the rank that asks."""
    rank, number = end.key
    begins = number not in end.dealt.rounds
    lacking = {each: end.dealt.round_count - end.dealt.counts.get(each, 0) for each in end.ranks}
    a_round = sum(map(end.units_of, end.ranks))
    need = sum(count * end.units_of(each) for each, count in lacking.items()) + (a_round if begins else 0)
    if end.have >= end.units_of(rank) and _may_reach(end, need):
        rest = end.have - need
        few = a_round if end.sampler.drop_last else len(end.ranks)
        cut = _cut_deal(end, [end.key], [end.units_of(rank)])
        return _final_outcome(end, cut, rest if 0 < rest < few and end.final() else 0)
    return _divide_rest(end, lacking, begins) if end.final() else None


def _divide_rest(end: FinalRound, lacking: dict[int, int], begins: bool) -> Given:
    """Divide the remainder over the owed shares first, and then over a last round."""
    left = end.have
    if left < sum(lacking.values()):
        keys = _fewest_first(end, left)
        sizes = [1] * left
    else:
        owed = ((rank, number) for rank in end.ranks for number in end.dealt.missing_rounds(rank))
        keys = sorted(owed, key=itemgetter(1, 0))
        sizes = split_evenly(left, [end.units_of(rank) for rank, _ in keys])
        left -= sum(sizes)
        if begins and not end.sampler.drop_last and left >= len(end.ranks):
            keys += [(rank, end.key[1]) for rank in sorted(end.ranks)]
            sizes += split_evenly(left, [end.units_of(rank) for rank in sorted(end.ranks)])
    return _final_outcome(end, _cut_deal(end, keys, sizes), end.have - sum(sizes))


def _fewest_first(end: FinalRound, count: int) -> list[Key]:
    """Return `count` of the owed shares, those of the ranks with the fewest batches first."""
    rounds = {rank: end.dealt.missing_rounds(rank) for rank in end.ranks}
    heap = [(end.dealt.counts.get(rank, 0), rank) for rank in end.ranks]
    heapq.heapify(heap)
    keys: list[Key] = []
    while len(keys) < count:
        batches, rank = heap[0]
        keys.append((rank, next(rounds[rank])))
        heapq.heapreplace(heap, (batches + 1, rank))
    return keys


def split_evenly(count: int, most: list[int]) -> list[int]:
    """Divide `count` as evenly as possible; the first shares are the larger ones. most: the limit of each share."""
    sizes = [0] * len(most)
    left = count
    by_limit = sorted(range(len(most)), key=lambda at: (most[at], -at))
    for done, at in enumerate(by_limit):
        sizes[at] = min(most[at], left // (len(most) - done))
        left -= sizes[at]
    return sizes


def _may_reach(end: FinalRound, need: int) -> bool:
    """Return whether `need` units are ready or may become ready."""
    if end.have >= need:
        return True
    partition = end.partition
    if not end.plan.unit:
        return partition.rows.count - partition.tasks.get(end.claim.task, 0) >= need
    reachable, seen = end.have, set()
    for positions in end.ready.unready_positions(partition.rows):
        for group in np.unique(partition.groups.groups_of(positions, end.unit)).tolist():
            if group not in seen and not partition.groups.is_orphaned(group, end.unit, sealed=True):
                seen.add(group)
                reachable += 1
        if reachable >= need:
            return True
    return False


# --- rows and records


def _cut_deal(end: FinalRound, keys: list[Key], sizes: list[int]) -> dict[Key, Any]:
    """Cut one deal into shares of these sizes, in units. The groups of a deal are consecutive."""
    total = sum(sizes) * end.unit
    return _cut(end, end.deal(total)[end.key[0]][0] if total else [], keys, sizes)


def _cut(end: FinalRound, rows: Any, keys: list[Key], sizes: list[int]) -> dict[Key, Any]:
    cuts = [0, *accumulate(size * end.unit for size in sizes)]
    return {key: rows[start:stop] for key, (start, stop) in zip(keys, pairwise(cuts), strict=True)}


def check_undealt(partition: Partition, task: str, keys: Iterable[Key]) -> None:
    """Raise InvalidArgumentError if some batches of this deal for all ranks were dealt before to single ranks."""
    dealt = partition.dealt.get(task)
    twice = [key for key in keys if dealt is not None and dealt.was_dealt(*key)]
    if twice:
        raise InvalidArgumentError(
            f"batch {twice[0][1]} was already dealt to the dp_ranks {[rank for rank, _ in twice]} alone, but this "
            f"claim is for a batch of all ranks; all ranks of task {task!r} must pass the same dp_size"
        )


def _final_outcome(end: FinalRound, cut: dict[Key, Any], rest: int) -> Given:
    """Return the records of the shares, and of skipping the last `rest` of the other units."""
    claim = end.claim
    check_undealt(end.partition, claim.task, cut)
    shares: dict[tuple[int, int], list[r.Share]] = {}
    for (rank, number), rows in cut.items():
        shares.setdefault((number, end.rows_of(rank)), []).append(r.Share(rank, column_of(rows)))
    records: list[r.AnyRecord] = [deal_record(claim, number, size, kept) for (number, size), kept in shares.items()]
    if rest:
        everything = _all_rows(end)
        dealt = np.concatenate([np.zeros(0, "i8"), *(np.array(rows, "i8") for rows in cut.values())])
        left = everything[~np.isin(everything, dealt)][-rest * end.unit :]
        records.append(pass_over_record(end.partition, claim.task, left, REMAINDER))
    own_rows = cut.get(end.key)
    return None if own_rows is None else np.array(own_rows, "i8"), records


def pass_over_record(partition: Partition, task: str, rows: np.ndarray, reason: str) -> r.PassedOver:
    """Return the record that the task skips these rows. It frees those that no other task of `free_when` needs."""
    free = partition.holds.finished_rows(partition.rows.positions_of(rows), task, skips=True)
    return r.PassedOver(partition.name, task, rows.tobytes(), reason, rows[free].tobytes())


def _all_rows(end: FinalRound) -> np.ndarray:
    """Return the rows of all complete units that are ready."""
    if not end.plan.unit:
        return np.array(end.offered[:], "i8")
    first = getattr(end.offered, "first_groups", None)
    if first is not None:
        return np.asarray(first(end.unit, end.have)).reshape(-1)
    return np.array(list(chain.from_iterable(end.offered.whole_groups(end.unit))), "i8")


def column_of(rows: Any) -> bytes:
    """Return global indexes as in a record (i8)."""
    return np.array(rows, "i8").tobytes()
