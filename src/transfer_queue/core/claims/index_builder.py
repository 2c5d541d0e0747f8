"""Builds the indexes that dealing from a large partition needs (ready sets, complete groups, rankings) in parts.

An index of a million rows takes ten milliseconds or more, during which the controller could serve no other request. So
a claim whose index does not exist yet waits, each turn of the loop builds a part, and the claim is decided again when
the index is complete. If other code needs the index meanwhile (`Partition.ready_set`), the rest is built at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from transfer_queue.core.claims.plan import ClaimPlan
from transfer_queue.core.samplers.user_sampler import UserSampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
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


class IndexBuilder:
    """The indexes that are being built. Each turn builds a part of the next one."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Partition, IndexNeeds]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def needs_indexes(self, partition: Partition, plan: ClaimPlan) -> bool:
        """Return whether a claim of a large partition has to wait for its indexes, and start to build them."""
        wanted = index_needs(plan)
        part = next_part(partition, wanted)
        if part is None:
            return False
        if any(job[0] is partition and job[1] == wanted for job in self._jobs):
            return True
        part()
        if next_part(partition, wanted) is None:
            return False
        self._jobs.append((partition, wanted))
        return True

    def step(self, state: State) -> tuple[str, str] | None:
        """Build a part of the next index. Returns its (partition, task) if it is complete now."""
        if not self._jobs:
            return None
        partition, wanted = self._jobs.popleft()
        if state.partitions.get(partition.name) is not partition:
            return None
        part = next_part(partition, wanted)
        if part is not None:
            part()
        if next_part(partition, wanted) is not None:
            self._jobs.append((partition, wanted))
            return None
        return partition.name, wanted.task
