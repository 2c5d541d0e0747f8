"""The sampler that takes what comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.sampler.base import BaseSampler, Share, check_batch_size


class SequentialSampler(BaseSampler):
    """Deals the first batch_size ready samples in the order given, or all where there are fewer."""

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError for a negative batch_size."""
        check_batch_size(batch_size)

    def deals_in_order(self, sampling_config: Mapping[str, Any]) -> bool:
        """It does."""
        return True

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Share:
        """Return (sampled, consumed), both ready_indexes[:batch_size].

        Args:
            ready_indexes: Global indexes of the samples that are ready and not consumed.
            batch_size: Number of samples in the batch.
            task_name: Ignored.
            partition_id: Ignored.
            *args: Ignored.
            **kwargs: Ignored.

        Raises:
            InvalidArgumentError: batch_size is negative.
        """
        check_batch_size(batch_size)
        sampled = [int(index) for index in ready_indexes[:batch_size]]
        return sampled, list(sampled)
