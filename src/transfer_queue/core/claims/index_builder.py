"""Builds the indexes that dealing from a large partition needs (ready sets, complete groups, rankings) in parts.

An index of a million rows takes ten milliseconds or more, during which the controller could serve no other request. So
a claim whose index does not exist yet waits, each turn of the loop builds a part, and the claim is decided again when
the index is complete. If other code needs the index meanwhile (`Partition.ready_set`), the rest is built at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from transfer_queue.core.claims.plan import ClaimPlan
from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Steps
from transfer_queue.core.jobs import Jobs
from transfer_queue.core.samplers.calls import UserSampler
from transfer_queue.core.state.partition import Partition
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


def index_needs(plan: ClaimPlan) -> IndexNeeds:
    """Return what claims need. What a user's sampler reads is not known before, and is built when it reads it."""
    if isinstance(plan.sampler, UserSampler):
        return IndexNeeds(plan.task, plan.fields, 0, ())
    return IndexNeeds(plan.task, plan.fields, plan.unit, tuple(ranked_keys(plan.sampler)))


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
    wanted = index_needs(plan)
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
