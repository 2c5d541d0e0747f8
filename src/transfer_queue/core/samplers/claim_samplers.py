"""Finds the sampler of a claim, and the facts about a sampler that need no call of it."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

from transfer_queue.core.ready.ready_sets import ReadySet
from transfer_queue.core.samplers.user_sampler import (
    AnySampler,
    InlineRunner,
    UserSampler,
    Values,
    copy_containers,
    name_of,
)
from transfer_queue.core.state.partition import Partition
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.descriptors import ORDERS
from transfer_queue.messages.reports.progress import SamplerCost
from transfer_queue.sampler import GRPOGroupNSampler, PrioritySampler, RankAwareSampler, SequentialSampler
from transfer_queue.sampler.base import GROUP_SIZE, BaseSampler
from transfer_queue.sampler.ready_views import RankKey
from transfer_queue.sampler.sampler_wrapper import built_in, with_group_size

MOST_SIZES = 64  # samplers for other group sizes to keep; clients choose the sizes


class SamplerRegistry:
    """The system's sampler, and the built-in ones that a claim may name in `sampling_config["sampler"]`.

    A partition's own group_size overrides that of a built-in sampler. A sampler that was made without a size takes the
    size in the claim, or else the size of the groups that are declared in the partition (`declared_size`). A claim with
    another size than its sampler or its partition is refused.
    """

    def __init__(self, default: AnySampler, values: Values = copy_containers, strict: bool = False) -> None:
        self.strict = strict
        """Whether unknown entries of a sampling_config are errors instead of warnings."""
        self.warned: set[str] = set()
        """The partitions of which a client was warned that their groups have rows of several clients."""
        self.values = values
        self.replace_default(default)

    def replace_default(self, default: AnySampler) -> AnySampler:
        """Use another sampler from now on, and return it as the core uses it."""
        if isinstance(default, BaseSampler) and not built_in(default):
            default = UserSampler(InlineRunner(default, self.values))
        self.default: AnySampler = default
        self.costs: dict[str, SamplerCost] = {}
        """The calls of users' samplers and their time, by name."""
        self.restarts = 0
        """How often the sampler process was restarted."""
        self._of_groups: dict[tuple[BaseSampler, int, bool], BaseSampler] = {}
        return default

    def is_timed(self, claim: Claim) -> bool:
        """Return whether a user's sampler decides this claim in the controller's loop, so that its calls are timed."""
        sampler = self.sampler_for(claim, None)
        return isinstance(sampler, UserSampler) and isinstance(sampler.runner, InlineRunner)

    def note(self, seconds: float) -> None:
        """Count a call of the user's sampler that took this time."""
        name = name_of(self.default)
        before = self.costs.get(name, SamplerCost(name, 0, 0.0, 0.0))
        self.costs[name] = SamplerCost(
            name, before.asked + 1, before.seconds + seconds, max(before.longest, seconds), self.restarts
        )  # fmt: skip

    def sampler_for(self, claim: Claim, partition: Partition | None) -> AnySampler:
        """Return the sampler for a claim of this partition."""
        if partition is not None and partition.options.order:
            return _OF_ORDERS[partition.options.order]
        if not claim.sampling:  # the usual case
            return self.adapt_to_partition(self.default, partition)
        name = claim.sampling.get("sampler")
        sampler = self.default
        if name is not None:
            sampler = _built_in(str(name))
        said = claim.sampling.get(GROUP_SIZE)
        sized = isinstance(sampler, UserSampler) or getattr(sampler, "size_given", True)
        if isinstance(said, int) and said > 0 and not sized:
            return self._copy_for_size(cast(BaseSampler, sampler), said, given=True)
        return self.adapt_to_partition(sampler, partition)

    def adapt_to_partition(self, sampler: AnySampler, partition: Partition | None) -> AnySampler:
        """Return this sampler with the group size of a partition."""
        size = None if partition is None else declared_size(partition, sampler)
        if size is None or isinstance(sampler, UserSampler) or group_size(sampler) in (None, size):
            return sampler
        return self._copy_for_size(sampler, size, given=False)

    def _copy_for_size(self, sampler: BaseSampler, size: int, given: bool) -> BaseSampler:
        """Return a built-in sampler like this one for groups of that size."""
        found = self._of_groups.get((sampler, size, given))
        if found is None:
            if len(self._of_groups) == MOST_SIZES:
                self._of_groups.clear()
            found = self._of_groups[sampler, size, given] = with_group_size(sampler, size, given=given)
        return found


class _NewestFirst(PrioritySampler):
    """Deals the newest rows first."""

    @property
    def key(self) -> RankKey:
        return RankKey(self.tag, sign=0.0, aging=-1.0)


_OF_ORDERS: dict[str, BaseSampler] = dict(
    zip(ORDERS, (SequentialSampler(), _NewestFirst(), PrioritySampler()), strict=True)
)


@lru_cache
def _built_in(name: str) -> BaseSampler:
    if name == "SequentialSampler":
        return SequentialSampler()
    if name == "RankAwareSampler":
        return RankAwareSampler()
    if name == "GRPOGroupNSampler":
        return GRPOGroupNSampler()
    raise InvalidArgumentError(
        f"a claim may name SequentialSampler, RankAwareSampler or GRPOGroupNSampler, not {name!r}; "
        f"set any other sampler for the whole system in controller.sampler"
    )


def deals_itself(sampler: AnySampler) -> bool:
    """Return whether the outcome depends only on the state: the sampler is built-in, and wraps no user's sampler."""
    return not isinstance(sampler, UserSampler)


def group_size(sampler: AnySampler) -> int | None:
    """Return the number of samples in a group for this sampler; None if it deals single samples."""
    size = getattr(sampler, "n_samples_per_prompt", None)
    return size if isinstance(size, int) else None


def declared_size(partition: Partition, sampler: AnySampler) -> int | None:
    """Return the size of the groups of the partition, or None if it declares none, so that the sampler's own counts.

    This is the group_size of the partition. For a sampler that was made without a size it may also be the size of the
    largest group of `group_ids`, so that smaller groups wait for their missing samples.
    """
    groups = partition.groups
    if groups.size is None and not getattr(sampler, "size_given", True):
        return groups.largest or None
    return groups.size


def dealt_group_size(sampler: AnySampler, partition: Partition) -> int:
    """Return the number of samples in the groups that this sampler deals; 0 if it deals single samples."""
    size = group_size(sampler) or 0
    return size if size > 1 or partition.groups.explicit else 0


def available_rows(partition: Partition, ready: ReadySet, sampler: AnySampler) -> int:
    """Return how many ready rows this sampler could deal; for a sampler of groups, those in complete groups."""
    size = dealt_group_size(sampler, partition)
    if not size:
        return ready.total
    return len(ready.whole_groups(size, partition.groups)) * (partition.groups.size or size)


def forget_partition(sampler: AnySampler, partition: str) -> None:
    """Make a user's sampler forget what it keeps of a dropped partition."""
    if isinstance(sampler, UserSampler):
        sampler.clear_cache(partition)
