"""SequentialSampler: deals the first ready samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.sampler.base import BaseSampler, Share, check_batch_size


class SequentialSampler(BaseSampler):
    """Deal the first `batch_size` ready samples in the given order, or all if there are fewer.

    Example:
        >>> tq.SequentialSampler().sample([3, 4, 5, 6], 2)
        ([3, 4], [3, 4])
    """

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Raise InvalidArgumentError for a negative batch_size."""
        check_batch_size(batch_size)

    def deals_in_order(self, sampling_config: Mapping[str, Any]) -> bool:
        """Return True."""
        return True

    def sample(self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any) -> Share:
        """Return (sampled, consumed), both `ready_indexes[:batch_size]`; other arguments are ignored."""
        check_batch_size(batch_size)
        sampled = list(map(int, ready_indexes[:batch_size]))
        return sampled, list(sampled)
