"""Jobs for claims: the indexes of large partitions, which are built in parts, and long deals, which threads compute.

An index of a million rows takes ten milliseconds or more, during which the controller could serve no other request. So
a claim whose index does not exist yet waits, each turn of the loop builds a part, and the claim is decided again when
the index is complete. If other code needs the index meanwhile (`Partition.ready_set`), the rest is built at once.

Nothing here is part of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Union, cast

import numpy as np

from transfer_queue.core.claims.plan import ClaimPlan
from transfer_queue.core.context import Context, CoreService, observes
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import ComputeDeal, Effect
from transfer_queue.core.events.registry import BegunWork, Steps
from transfer_queue.core.jobs import Jobs
from transfer_queue.core.samplers.calls import AnySampler, UserSampler, call_sampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey
from transfer_queue.core.tables.ready_sets import ReadySet
from transfer_queue.errors import SamplerError, TransferQueueError
from transfer_queue.sampler.base import BaseSampler, Deal
from transfer_queue.sampler.ready_views import RankKey
from transfer_queue.sampler.sampler_wrapper import ranked_keys

SMALL = 8  # chunks of 4096 rows; the indexes of a partition with at most this many are built at once, by the callers
# Chunks that one turn reads, in one or two milliseconds.
BUILT = 64
COUNTED = 12
COUNTED_DECLARED = 2
MARKED = 6
RANKED = 16

Part = Callable[[], None]


class IndexNeeds(NamedTuple):
    """The indexes that dealing to a claim needs."""

    task: str
    fields: tuple[str, ...]
    size: int
    """Samples of a group; 0 if single rows are dealt."""
    keys: tuple[tuple[RankKey, bool], ...]
    """The orders of rows, each with whether it orders the rows of complete groups only."""


def next_part(partition: Partition, wanted: IndexNeeds) -> Part | None:
    """Return the function that builds the next part; None if all is built."""
    rows, groups = partition.rows, partition.groups
    begun = partition.begin_ready_set(wanted.task, wanted.fields)
    if begun.unbuilt:
        return partial(begun.build, rows, BUILT)
    if not wanted.size and not wanted.keys:
        return None
    ready = partition.ready_set(wanted.task, wanted.fields)
    whole = ready.begin_groups(wanted.size, groups) if wanted.size else None
    if whole is not None and whole.uncounted:
        return partial(ready.count_groups, whole, groups, COUNTED_DECLARED if groups.explicit else COUNTED)
    for key, of_groups in wanted.keys:
        ranking, bits = ready.ranking(key, rows), ready.bits
        if whole is not None and of_groups:
            ranking, bits = whole.begin_ranking(key, rows), whole.bits
            if whole.unmarked:
                return partial(whole.mark, groups, MARKED)
        if len(ranking.dirty) > RANKED:
            return partial(ranking.refresh, bits, rows, RANKED)
    return None


def needs_indexes(context: Context, partition: Partition, plan: ClaimPlan) -> bool:
    """Return whether a claim of a large partition has to wait for its indexes, and start to build them."""
    wanted = IndexNeeds(plan.task, plan.fields, 0, ())  # what a user's sampler reads is built when it reads it
    if not isinstance(plan.sampler, UserSampler):
        wanted = IndexNeeds(plan.task, plan.fields, plan.unit, tuple(ranked_keys(plan.sampler)))
    part = next_part(partition, wanted)
    if part is None:
        return False
    jobs, key = context.services[Jobs], (id(partition), wanted)
    if key in jobs:
        return True
    part()
    if next_part(partition, wanted) is None:
        return False
    jobs.begin(_build(context, partition, wanted), key)
    return True


def _build(context: Context, partition: Partition, wanted: IndexNeeds) -> Steps:
    """Build a part in each step. At the end, all claims of the task are looked at."""
    yield None
    while context.state.partitions.get(partition.name) is partition:
        part = next_part(partition, wanted)
        if part is not None:
            part()
        if next_part(partition, wanted) is None:
            context.changes.changes_of(partition.name).tasks |= {wanted.task}
            return
        yield None


# ------------------------------------------------------------ long deals

Shares = Mapping[int, tuple[Any, Any]]  # as `sampler.base.Share`, in lists or i8 columns


class DealTooLong(Exception):
    """A deal would take too long to compute in the controller's loop."""

    def __init__(self, deal: Deal, count: int) -> None:
        super().__init__()
        self.deal = deal
        self.count = count
        """The batch_size with which it was prepared."""


class ComputedDeal:
    """A long deal that another thread has computed."""

    def __init__(self, partition: Partition, long: DealTooLong, shares: Shares) -> None:
        self.partition = partition
        self.long = long
        self.shares = shares

    def is_valid(self, partition: Partition, ready: ReadySet, unit: int, count: int) -> bool:
        """Return whether it is still valid: `count` rows for each share, all of them ready, and all groups complete."""
        if partition is not self.partition or count != self.long.count:
            return False
        positions = partition.rows.positions_of(self.long.deal.rows)
        if (positions < 0).any() or not ready.has_all(positions, partition.rows):
            return False
        if not partition.groups.explicit:
            return True  # a group by order of reservation changes only if one of its rows is cleared
        groups, sizes = np.unique(partition.groups.groups_of(positions, unit), return_counts=True)
        return bool((sizes == unit).all()) and all(
            partition.groups.size_of(group, unit) == unit for group in groups.tolist()
        )


def compute_deal(sampler: AnySampler, deal: Deal) -> Shares:
    """Return the shares of a long deal of a built-in sampler. Reads no state, because it runs in another thread."""
    shares = call_sampler(cast(BaseSampler, sampler), deal.run)
    columns = {rank: np.array(sampled, "i8") for rank, (sampled, _) in shares.items()}
    return {rank: (column, column) for rank, column in columns.items()}  # all sampled rows are consumed


Retry = Callable[["Context", Sequence[ParkedRequest], Union[ComputedDeal, None]], list[Effect]]


class LongDeals(CoreService):
    """The long deals that are computed, at most one for each (partition, task). Each has a job."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.is_stale: dict[tuple[str, str], bool] = {}
        """(partition, task) -> whether its deal is not valid any more: the consumption was reset, or another state
        was loaded."""
        self.begun = 0
        """The number of deals started so far."""

    def is_working(self) -> bool:
        """See `CoreService.is_working`."""
        return bool(self.is_stale)

    @observes(r.StateLoaded)
    def mark_all_stale(self, record: r.StateLoaded) -> None:
        """Mark all deals as stale."""
        self.is_stale = dict.fromkeys(self.is_stale, True)

    @observes(r.ConsumptionForgotten)
    def mark_stale(self, record: r.ConsumptionForgotten) -> None:
        """Mark the deals of a task, or of every task, as stale."""
        for name, task in self.is_stale:
            if name == record.partition and record.task in (None, task):
                self.is_stale[name, task] = True

    def begin(self, plan: ClaimPlan, waiter: RequestKey, long: DealTooLong, retry: Retry) -> list[Effect]:
        """Begin a deal, which another thread computes.

        Args:
            plan: The plan of the claim. Its partition exists.
            waiter: The claim. It gets the deal if it is still possible; otherwise it is decided again.
            long: The deal.
            retry: Decides the claim again, with the computed deal if it is not stale.
        """
        partition = cast(Partition, plan.partition)
        self.begun += 1
        self.is_stale[partition.name, plan.task] = False
        return self.context.services[Jobs].begin(self._compute(plan, partition, waiter, long, retry), object())

    def _compute(
        self, plan: ClaimPlan, partition: Partition, waiter: RequestKey, long: DealTooLong, retry: Retry
    ) -> Steps:
        context, key = self.context, (partition.name, plan.task)
        outcome: Any = None
        error: TransferQueueError | None = None
        effects: list[Effect] = []
        try:
            outcome = yield BegunWork(
                lambda number, resume: [ComputeDeal(number, lambda: compute_deal(plan.sampler, long.deal))]
            )
        except TransferQueueError as refused:
            error = refused
        except Exception as raised:
            error = SamplerError(f"a deal failed: {raised!r}")
        is_stale, waiting = self.is_stale.pop(key), context.state.waiting.by_waiter.get(waiter)
        if waiting is not None and error is not None:
            effects = context.refuse(waiting, error)
        elif waiting is not None:
            effects = retry(context, [waiting], None if is_stale else ComputedDeal(partition, long, outcome))
        context.changes.changes_of(partition.name).tasks |= {plan.task}
        return effects
