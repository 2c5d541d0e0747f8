"""Samplers around others: what any of them passes on, and what the controller must know of the one inside."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import BaseSampler, Deal, RankConsistentSampler, Share, of_package, overrides_sample
from transfer_queue.sampler.views import Key


class SamplerWrapper(BaseSampler):
    """Shows other ready rows to the sampler inside, and is for the rest what that one is.

    inner: any sampler. Where it deals by itself this one does, too: rank-consistent, in whole groups, kept by the
    controller. A user's sampler is asked through its `sample`, with a list unless it has `wants_list = False`.
    Subclasses define `view`, which changes nothing.

    ranks_groups: where the sampler inside deals groups, `key` is of the rows of whole groups alone.
    """

    wants_list = False
    ranks_groups = False

    def __init__(self, inner: BaseSampler) -> None:
        super().__init__()
        if not isinstance(inner, BaseSampler):
            raise InvalidArgumentError(
                f"inner of {type(self).__name__} must be a sampler, an instance of BaseSampler, but is {inner!r}"
            )
        self.inner = inner
        self._states = inner._states

    @abstractmethod
    def view(self, ready_indexes: Sequence[int], config: Mapping[str, Any]) -> Sequence[int]:
        """What the sampler inside is shown of these ready rows. config: what `sample` takes by keyword."""

    @property
    def key(self) -> Key | None:
        """By which it orders or picks ready rows; None where by nothing."""
        return None

    @property
    def n_samples_per_prompt(self) -> int:
        """Samples in a group of the sampler inside; AttributeError where it deals single ones."""
        return self.inner.n_samples_per_prompt  # type: ignore[attr-defined,no-any-return]

    @property
    def size_given(self) -> bool:
        """Whether the sampler inside was made with a group size."""
        return getattr(self.inner, "size_given", True)

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """As the sampler inside."""
        self.inner.validate(batch_size, sampling_config)

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Share:
        """Return the batch that the sampler inside deals, out of the rows that this sampler shows it.

        The sampler inside gets task_name, partition_id and **kwargs by keyword; *args are ignored.
        """
        config = {**kwargs, "task_name": task_name, "partition_id": partition_id}
        shown = self.view(ready_indexes, config)
        if getattr(self.inner, "wants_list", True) and not built_in(self.inner):
            shown = list(shown)
        return self.inner.sample(shown, batch_size, **config)

    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int] | None:
        """As the sampler inside, which must be a rank-consistent one."""
        return self._dealing().deal_key(sampling_config)

    def deal(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> dict[int, Share]:
        """What the sampler inside, a rank-consistent one, deals of the rows that it is shown."""
        return self._dealing().deal(self.view(ready_indexes, config), batch_size, **config)

    def prepare(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> Deal | None:
        """As the sampler inside, of the rows that it is shown."""
        return self._dealing().prepare(self.view(ready_indexes, config), batch_size, **config)

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """As the sampler inside."""
        return self.inner.remainder(self.view(ready_indexes, config), **config)

    def passes_over(self, ready_indexes: Sequence[int], **config: Any) -> dict[str, list[int]]:
        """As the sampler inside."""
        return self.inner.passes_over(self.view(ready_indexes, config), **config)

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None) -> bool:
        """As the sampler inside."""
        return self.inner.has_cached_result(partition_id, task_name, sampling_config)

    def clear_cache(self, partition_id: str) -> None:
        """As the sampler inside."""
        self.inner.clear_cache(partition_id)

    def save_checkpoint(self) -> dict[str, Any]:
        """That of the sampler inside."""
        return self.inner.save_checkpoint()

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """As the sampler inside."""
        self.inner.load_checkpoint(state)
        self._states = self.inner._states

    def _dealing(self) -> RankConsistentSampler | SamplerWrapper:
        if not isinstance(self.inner, (RankConsistentSampler, SamplerWrapper)):
            raise InvalidArgumentError(
                f"{type(self.inner).__name__} deals nothing to ranks; put {type(self).__name__} around a "
                f"RankAwareSampler, GRPOGroupNSampler, SeqlenBalancedSampler or TokenBudgetSampler"
            )
        return self.inner


def ranked_tags(sampler: BaseSampler) -> list[str]:
    """The tags by which this sampler, and those inside, order and pick rows."""
    if not isinstance(sampler, SamplerWrapper):
        return []
    tag = getattr(sampler, "tag", None)
    return ([tag] if isinstance(tag, str) else []) + ranked_tags(sampler.inner)


def ranked_keys(sampler: BaseSampler) -> list[tuple[Key, bool]]:
    """`key` and `ranks_groups` of this sampler and of those inside."""
    if not isinstance(sampler, SamplerWrapper):
        return []
    return ([(sampler.key, sampler.ranks_groups)] if sampler.key is not None else []) + ranked_keys(sampler.inner)


def built_in(sampler: BaseSampler) -> bool:
    """Whether the outcome depends on the ready rows alone: a sampler of this package, and around none of a user's."""
    if not of_package(type(sampler)) or "sample" in vars(sampler):
        return False
    return not isinstance(sampler, SamplerWrapper) or built_in(sampler.inner)


def of_groups(sampler: BaseSampler, size: int, *, given: bool) -> BaseSampler:
    """Return a built-in sampler like this one for groups of `size`; the sampler itself if it deals single samples.

    given: whether the new sampler counts as made with this size, so that it refuses claims with another size.
    """
    if not hasattr(sampler, "n_samples_per_prompt"):
        return sampler
    twin: Any = copy.copy(sampler)
    if isinstance(twin, SamplerWrapper):
        twin.inner = of_groups(twin.inner, size, given=given)
    else:
        twin.n_samples_per_prompt = size
        twin.size_given = given or twin.size_given
    return twin  # type: ignore[no-any-return]


def dealer(sampler: BaseSampler) -> RankConsistentSampler | None:
    """The innermost sampler, where `deal` stands for it and for all around it: nobody wrote another `sample`."""
    if overrides_sample(sampler):
        return None
    if isinstance(sampler, SamplerWrapper):
        return dealer(sampler.inner)
    return sampler if isinstance(sampler, RankConsistentSampler) else None


def shown(sampler: BaseSampler, ready_indexes: Sequence[int], config: Mapping[str, Any]) -> Sequence[int]:
    """The ready rows as the innermost sampler is shown them. config: what `sample` takes by keyword."""
    if not isinstance(sampler, SamplerWrapper):
        return ready_indexes
    return shown(sampler.inner, sampler.view(ready_indexes, config), config)
