"""PrioritySampler: deals the samples with the highest priority first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.ready_views import RankKey, ShownRows, as_tagged
from transfer_queue.sampler.sampler_wrapper import SamplerWrapper
from transfer_queue.sampler.sequential_sampler import SequentialSampler


class PrioritySampler(SamplerWrapper):
    """Deal ready samples by descending priority; those of equal priority in order.

    The priority of a group is that of its highest member. With `aging`, samples are ordered by `priority - aging *
    global_index`. This needs no clock, because all samples age alike: with aging 0.01 a sample waits for at most 100
    newer samples whose priority is higher by 1. Without aging a sample waits as long as samples of higher priority
    arrive.

    Args:
        tag: The tag entry with the priority, a number; 0 for a sample without it. Default: "priority".
        inner: The sampler that deals from the ordered samples. Default: a SequentialSampler.
        aging: What the priority of a sample gains with each sample that is inserted after it; not negative. Default: 0.

    Raises:
        InvalidArgumentError: An argument is not valid.

    Example:
        >>> class Tags:
        ...     def get_custom_meta(self, indexes):
        ...         return {index: {"priority": index % 3} for index in indexes}
        >>> tq.PrioritySampler().sample([3, 4, 5, 6], 2, partition=Tags())
        ([5, 4], [5, 4])
    """

    ranks_groups = True
    """See `SamplerWrapper`."""

    def __init__(self, tag: str = "priority", inner: BaseSampler | None = None, aging: float = 0.0) -> None:
        super().__init__(SequentialSampler() if inner is None else inner)
        if not isinstance(tag, str):
            raise InvalidArgumentError(f"tag must be the name of a tag, got {tag!r}")
        if not isinstance(aging, (int, float)) or isinstance(aging, bool) or not 0 <= aging < math.inf:
            raise InvalidArgumentError(f"aging must be a finite number, not negative, got {aging!r}")
        self.tag = tag
        """The tag entry with the priority."""
        self.aging = float(aging)
        """What the priority of a sample gains with each sample that is inserted after it."""

    @property
    def key(self) -> RankKey:
        """The order: the priority, and the age."""
        return RankKey(self.tag, aging=self.aging)

    def view(self, ready_indexes: Sequence[int], config: Mapping[str, Any]) -> Sequence[int]:
        """Return the rows by descending priority. Raises InvalidArgumentError if one is not a number."""
        return ShownRows(as_tagged(ready_indexes, config.get("partition")), self.key)

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """Return the result of the inner sampler, because the order makes no difference."""
        return self.inner.remainder(ready_indexes, **config)

    def passes_over(self, ready_indexes: Sequence[int], **config: Any) -> dict[str, list[int]]:
        """Return the result of the inner sampler, because the order makes no difference."""
        return self.inner.passes_over(ready_indexes, **config)
