"""Finds the sampler of a claim, and the facts about a sampler that need no call of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.samplers.calls import AnySampler, InlineRunner, UserSampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import ORDERS
from transfer_queue.messages.reports.progress import SamplerCost
from transfer_queue.sampler import GRPOGroupNSampler, PrioritySampler, RankAwareSampler, SequentialSampler
from transfer_queue.sampler.base import GROUP_SIZE, BaseSampler
from transfer_queue.sampler.ready_views import RankKey
from transfer_queue.sampler.sampler_spec import sampler_of
from transfer_queue.sampler.sampler_wrapper import built_in, with_group_size, with_open_dp_size


class SamplerRegistry:
    """The samplers of tasks: which one decides a claim. `choose` is the only place that chooses it.

    The first one of these counts:

    1. the order of the partition
    2. the built-in sampler that the claim names in `sampling_config["sampler"]`
    3. the sampler of the task: the one that the configuration names for exactly this task, the one that a dataset has
       registered for it (`State.samplers`), or the first pattern of the configuration that fits
    4. the system's sampler. Its number of ranks counts only for claims without a dp_size.

    A partition's own group_size overrides that of a built-in sampler. A sampler that was made without a size takes the
    size in the claim, or else the size of the groups that are declared in the partition (`declared_size`). A claim with
    another size than its sampler or its partition is refused.
    """

    def __init__(self, config: CoreConfig, registered: Callable[[], Mapping[str, tuple[str, str]]]) -> None:
        """Begin with the samplers of the configuration.

        registered: returns the samplers that datasets have registered, by task (`sampler.sampler_spec`).
        """
        self.strict = config.strict
        """Whether unknown entries of a sampling_config are errors instead of warnings."""
        self.warned: set[str] = set()
        """The partitions of which a client was warned that their groups have rows of several clients."""
        self._values = config.values
        self._registered = registered
        self.costs: dict[str, SamplerCost] = {}
        """The calls of users' samplers and their time, by name."""
        self.restarts: Counter[str] = Counter()
        """How often the process of a sampler was restarted, by name."""
        self.of_tasks = {pattern: self._in_core(sampler) for pattern, sampler in config.task_samplers.items()}
        """Task, or pattern of tasks -> the sampler in the configuration."""
        self.replace_default(config.sampler)

    def _in_core(self, sampler: AnySampler) -> AnySampler:
        """Return a sampler as the core uses it."""
        if isinstance(sampler, BaseSampler) and not built_in(sampler):
            return UserSampler(InlineRunner(sampler, self._values))
        return sampler

    def replace_default(self, default: AnySampler) -> None:
        """Use another system's sampler from now on."""
        default = self._in_core(default)
        self.default: AnySampler = default if isinstance(default, UserSampler) else with_open_dp_size(default)
        """The system's sampler."""
        named = {"": self.default, **self.of_tasks}
        self.of_users = {name: sampler for name, sampler in named.items() if isinstance(sampler, UserSampler)}
        """The users' samplers: by pattern, "" for the system's sampler."""
        self.costs.clear()
        self.restarts.clear()

    @property
    def all(self) -> list[AnySampler]:
        """The samplers of the system and of all tasks."""
        return [self.default, *self.of_tasks.values(), *(sampler_of(*spec) for spec in self._registered().values())]

    def note(self, name: str, seconds: float) -> None:
        """Count a call of the user's sampler of this name that took this time."""
        before = self.costs.get(name, SamplerCost(name, 0, 0.0, 0.0))
        self.costs[name] = SamplerCost(
            name, before.calls + 1, before.seconds + seconds, max(before.longest, seconds), self.restarts[name]
        )  # fmt: skip

    def of_task(self, task: str) -> AnySampler:
        """Return the sampler of a task, for claims that name no other."""
        if task in self.of_tasks:
            return self.of_tasks[task]
        spec = self._registered().get(task)
        if spec is not None:
            return sampler_of(*spec)
        if not self.of_tasks:  # the usual case
            return self.default
        fits = (sampler for pattern, sampler in self.of_tasks.items() if fnmatchcase(task, pattern))
        return next(fits, self.default)

    def choose(self, task: str, sampling: Mapping[str, Any], partition: Partition | None) -> AnySampler:
        """Return the sampler for claims of a task with this sampling_config in a partition."""
        if partition is not None and partition.options.order:
            return _OF_ORDERS[partition.options.order]
        name = sampling.get("sampler")
        sampler = self.of_task(task) if name is None else _NAMED.get(str(name))
        if sampler is None:
            raise InvalidArgumentError(
                f"a claim may name SequentialSampler, RankAwareSampler or GRPOGroupNSampler, not {str(name)!r}; "
                f"set any other sampler for the task in controller.task_samplers, or for the system in "
                f"controller.sampler"
            )
        if isinstance(sampler, UserSampler) or group_size(sampler) is None:
            return sampler
        requested_size = sampling.get(GROUP_SIZE)
        if isinstance(requested_size, int) and requested_size > 0 and not getattr(sampler, "size_given", True):
            return with_group_size(sampler, requested_size, given=True)
        size = None if partition is None else declared_size(partition, sampler)
        return sampler if size in (None, group_size(sampler)) else with_group_size(sampler, size, given=False)


class _NewestFirst(PrioritySampler):
    """Deals the newest rows first."""

    @property
    def key(self) -> RankKey:
        return RankKey(self.tag, sign=0.0, aging=-1.0)


_OF_ORDERS: dict[str, BaseSampler] = dict(
    zip(ORDERS, (SequentialSampler(), _NewestFirst(), PrioritySampler()), strict=True)
)


_NAMED: dict[str, BaseSampler] = {
    type(sampler).__name__: sampler for sampler in (SequentialSampler(), RankAwareSampler(), GRPOGroupNSampler())
}
"""The samplers that a claim may name."""


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
