"""What dealing needs of a large partition, made in parts: ready sets, whole groups, rankings, when first asked for.

A million rows take ten milliseconds and more, in which nobody else would be served. So a claim that needs what is not
there waits, while each turn of the loop makes a part, and is looked at again once all is there. Whoever asks for one of
these meanwhile (`Partition.ready_set`) gets it whole: the rest is then made at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry
from transfer_queue.core.samplers.user_sampler import UserSampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.messages.claims import Claim
from transfer_queue.sampler.ready_views import RankKey
from transfer_queue.sampler.sampler_wrapper import ranked_keys

SMALL = 8  # chunks of 4096 rows; for so many all is made at once
# chunks that are looked at in a turn, for a millisecond or two
BUILT = 64
COUNTED = 12
COUNTED_DECLARED = 2
MARKED = 6
RANKED = 16

Part = Callable[[], None]


class IndexNeeds(NamedTuple):
    """What dealing to a claim needs. size: of groups that are dealt whole, 0 where rows are dealt one by one.

    keys: by which rows are ordered or picked, and whether this is of the rows of whole groups.
    """

    task: str
    fields: tuple[str, ...]
    size: int
    keys: tuple[tuple[RankKey, bool], ...]


def needs(samplers: SamplerRegistry, partition: Partition, claim: Claim) -> IndexNeeds:
    """A user's sampler may ask for anything, which is then made at once."""
    sampler = samplers.of(claim, partition)
    size = 0
    keys: tuple[tuple[RankKey, bool], ...] = ()
    if not isinstance(sampler, UserSampler):
        size, keys = claim_samplers.unit(sampler, partition), tuple(ranked_keys(sampler))
    return IndexNeeds(claim.task, tuple(claim.fields), size, keys)


def next_part(partition: Partition, wanted: IndexNeeds) -> Part | None:
    """What makes the next part; None where all is made."""
    rows, groups = partition.rows, partition.groups
    begun = partition.begun_set(wanted.task, wanted.fields)
    if begun.unbuilt:
        return partial(begun.build, rows, BUILT)
    ready = partition.ready_set(wanted.task, wanted.fields)
    whole = ready.counted(wanted.size, groups) if wanted.size else None
    if whole is not None and whole.uncounted:
        return partial(ready.count, whole, groups, COUNTED_DECLARED if groups.explicit else COUNTED)
    for key, of_groups in wanted.keys:
        ranking, bits = ready.ranking(key, rows), ready.bits
        if whole is not None and of_groups:
            ranking, bits = whole.ranked(key, rows), whole.bits
            if whole.unmarked:
                return partial(whole.mark, groups, MARKED)
        if len(ranking.dirty) > RANKED:
            return partial(ranking.refresh, bits, rows, RANKED)
    return None


class IndexBuilder:
    """What is being made, for whom: (partition, needs), each has a part in turn. True while there is any."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Partition, IndexNeeds]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def waits(self, samplers: SamplerRegistry, partition: Partition, claim: Claim) -> bool:
        """Whether a claim has to wait for what it needs, which is made from here on."""
        if len(partition.rows.chunks) <= SMALL:
            return False
        wanted = needs(samplers, partition, claim)
        if any(job[0] is partition and job[1] == wanted for job in self._jobs):
            return True
        part = next_part(partition, wanted)
        if part is None:
            return False
        part()
        if next_part(partition, wanted) is None:
            return False
        self._jobs.append((partition, wanted))
        return True

    def step(self, state: State) -> tuple[str, str] | None:
        """Makes the next part of what is next in turn. Returns the partition and the task for which all is made now."""
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
