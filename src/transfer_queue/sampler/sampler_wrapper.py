"""SamplerWrapper: a sampler around another one, and the facts about the inner sampler that the controller needs."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import BaseSampler, Deal, RankConsistentSampler, Share, of_package, overrides_sample
from transfer_queue.sampler.ready_views import RankKey


class SamplerWrapper(BaseSampler):
    """Base class of samplers that show a sampler other ready rows, and otherwise behave like it.

    If the inner sampler deals by itself, so does this one: rank-consistent, in complete groups, kept by the controller.
    A user's sampler is called through its `sample`, with a list unless it has `wants_list = False`. Subclasses define
    `view`, which changes nothing.

    Args:
        inner: The inner sampler.

    Raises:
        InvalidArgumentError: `inner` is not a sampler.

    Example:
        >>> from transfer_queue.sampler import SamplerWrapper
        >>> class Newest(SamplerWrapper):
        ...     def view(self, ready_indexes, config):
        ...         return list(reversed(ready_indexes))
        >>> Newest(tq.SequentialSampler()).sample([3, 4, 5, 6], 2)
        ([6, 5], [6, 5])
    """

    wants_list = False
    ranks_groups = False
    """Whether `key` orders only the rows of complete groups if the inner sampler deals groups."""

    def __init__(self, inner: BaseSampler) -> None:
        super().__init__()
        if not isinstance(inner, BaseSampler):
            raise InvalidArgumentError(
                f"inner of {type(self).__name__} must be a sampler, an instance of BaseSampler, got {inner!r}"
            )
        self.inner = inner
        """The inner sampler."""
        self._states = inner._states

    @abstractmethod
    def view(self, ready_indexes: Sequence[int], config: Mapping[str, Any]) -> Sequence[int]:
        """Return the rows to show to the inner sampler.

        Args:
            ready_indexes: The global indexes of the ready rows.
            config: The keyword arguments of `sample`.

        Returns:
            The rows.

        Raises:
            InvalidArgumentError: A tag that is needed is not valid.

        Example:
            >>> tq.PrioritySampler().view([3, 4], {})[:]
            [3, 4]
        """

    @property
    def key(self) -> RankKey | None:
        """What this sampler orders or picks ready rows by; None for nothing."""
        return None

    @property
    def n_samples_per_prompt(self) -> int:
        """The number of samples in a group of the inner sampler. AttributeError if it deals single samples."""
        return self.inner.n_samples_per_prompt  # type: ignore[attr-defined,no-any-return]

    @property
    def size_given(self) -> bool:
        """Whether the inner sampler was made with a group size."""
        return getattr(self.inner, "size_given", True)

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Check the request as the inner sampler does."""
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
        """Return the batch that the inner sampler deals from the rows that this sampler shows it. See `BaseSampler`.

        Rows that this sampler skips for ever, such as those that are too old, are consumed together with the batch.
        """
        config = {**kwargs, "task_name": task_name, "partition_id": partition_id}
        shown = self.view(ready_indexes, config)
        if getattr(self.inner, "wants_list", True) and not built_in(self.inner):
            shown = list(shown)
        return self._with_skipped(self.inner.sample(shown, batch_size, **config), ready_indexes, config)

    def _with_skipped(self, share: Share, ready_indexes: Sequence[int], config: Mapping[str, Any]) -> Share:
        """Return a share of the inner sampler, with the rows that this sampler skips as consumed."""
        return share

    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return the key of the inner sampler, which must be rank-consistent.

        Args:
            sampling_config: The sampling_config of the request.

        Returns:
            (dp_rank, batch_index); None if the batch is not to be kept.

        Raises:
            InvalidArgumentError: The inner sampler does not deal to ranks.

        Example:
            >>> tq.PrioritySampler(inner=tq.RankAwareSampler()).deal_key({"dp_rank": 1, "batch_index": 0})
            (1, 0)
        """
        return self._dealing().deal_key(sampling_config)

    def deal(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> dict[int, Share]:
        """Return what the inner sampler, which must be rank-consistent, deals from the rows that it is shown.

        Args:
            ready_indexes: The global indexes of the ready rows.
            batch_size: The number of samples in the batch of one rank.
            **config: The keyword arguments of `sample`.

        Returns:
            Rank -> (sampled, consumed); {} if the deal cannot be met now.

        Raises:
            InvalidArgumentError: The inner sampler does not deal to ranks.

        Example:
            >>> sampler = tq.PrioritySampler(inner=tq.RankAwareSampler())
            >>> sampler.deal([3, 4, 5], 1, dp_rank=0, batch_index=0)
            {0: ([3], [3])}
        """
        return self._dealing().deal(self.view(ready_indexes, config), batch_size, **config)

    def prepare(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> Deal | None:
        """Do the same as `deal` in two steps; see `RankConsistentSampler.prepare`.

        Args:
            ready_indexes: See `deal`.
            batch_size: See `deal`.
            **config: See `deal`.

        Returns:
            The deal; None if it cannot be met now.

        Raises:
            InvalidArgumentError: See `deal`.

        Example:
            >>> sampler = tq.PrioritySampler(inner=tq.RankAwareSampler())
            >>> sampler.prepare([3, 4, 5], 1, dp_rank=0, batch_index=0).run()
            {0: ([3], [3])}
        """
        return self._dealing().prepare(self.view(ready_indexes, config), batch_size, **config)

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """Return the remainder of the inner sampler for the rows that it is shown."""
        return self.inner.remainder(self.view(ready_indexes, config), **config)

    def passes_over(self, ready_indexes: Sequence[int], **config: Any) -> dict[str, list[int]]:
        """Return the rows that the inner sampler skips, out of those that it is shown."""
        return self.inner.passes_over(self.view(ready_indexes, config), **config)

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None) -> bool:
        """Return the result of the inner sampler."""
        return self.inner.has_cached_result(partition_id, task_name, sampling_config)

    def clear_cache(self, partition_id: str) -> None:
        """Clear the cache of the inner sampler."""
        self.inner.clear_cache(partition_id)

    def save_checkpoint(self) -> dict[str, Any]:
        """Return the state of the inner sampler."""
        return self.inner.save_checkpoint()

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the state of the inner sampler."""
        self.inner.load_checkpoint(state)
        self._states = self.inner._states

    def _dealing(self) -> RankConsistentSampler | SamplerWrapper:
        if not isinstance(self.inner, (RankConsistentSampler, SamplerWrapper)):
            raise InvalidArgumentError(
                f"{type(self.inner).__name__} does not deal to ranks; use {type(self).__name__} around a "
                f"RankAwareSampler, GRPOGroupNSampler, SeqlenBalancedSampler or TokenBudgetSampler"
            )
        return self.inner


def ranked_tags(sampler: BaseSampler) -> list[str]:
    """Return the tags by which this sampler, and those inside it, order and pick rows."""
    if not isinstance(sampler, SamplerWrapper):
        return []
    tag = getattr(sampler, "tag", None)
    return ([tag] if isinstance(tag, str) else []) + ranked_tags(sampler.inner)


def ranked_keys(sampler: BaseSampler) -> list[tuple[RankKey, bool]]:
    """Return `key` and `ranks_groups` of this sampler and of those inside it."""
    if not isinstance(sampler, SamplerWrapper):
        return []
    return ([(sampler.key, sampler.ranks_groups)] if sampler.key is not None else []) + ranked_keys(sampler.inner)


def built_in(sampler: BaseSampler) -> bool:
    """Return whether the outcome depends only on the ready rows: no sampler of a user is involved."""
    if not of_package(type(sampler)) or "sample" in vars(sampler):
        return False
    return not isinstance(sampler, SamplerWrapper) or built_in(sampler.inner)


def with_group_size(sampler: BaseSampler, size: int, *, given: bool) -> BaseSampler:
    """Return a built-in sampler like this one for groups of `size`; the sampler itself if it deals single samples.

    given: whether the new sampler counts as made with this size, so that it refuses claims with another size.
    """
    if not hasattr(sampler, "n_samples_per_prompt"):
        return sampler
    twin: Any = copy.copy(sampler)
    if isinstance(twin, SamplerWrapper):
        twin.inner = with_group_size(twin.inner, size, given=given)
    else:
        twin.n_samples_per_prompt = size
        twin.size_given = given or twin.size_given
    return twin  # type: ignore[no-any-return]


def with_open_dp_size(sampler: BaseSampler) -> BaseSampler:
    """Return a built-in sampler like this one whose number of ranks counts only for requests that have none."""
    if not isinstance(sampler, (SamplerWrapper, RankConsistentSampler)):
        return sampler
    twin: Any = copy.copy(sampler)
    if isinstance(twin, SamplerWrapper):
        twin.inner = with_open_dp_size(twin.inner)
    else:
        twin.dp_size_given = False
    return twin  # type: ignore[no-any-return]


def dealer(sampler: BaseSampler) -> RankConsistentSampler | None:
    """Return the innermost sampler if `deal` may replace `sample` for it and all around it; otherwise None."""
    if overrides_sample(sampler):
        return None
    if isinstance(sampler, SamplerWrapper):
        return dealer(sampler.inner)
    return sampler if isinstance(sampler, RankConsistentSampler) else None


def shown_rows(sampler: BaseSampler, ready_indexes: Sequence[int], config: Mapping[str, Any]) -> Sequence[int]:
    """Return the ready rows that the innermost sampler is shown. config: the keyword arguments of `sample`."""
    if not isinstance(sampler, SamplerWrapper):
        return ready_indexes
    return shown_rows(sampler.inner, sampler.view(ready_indexes, config), config)
