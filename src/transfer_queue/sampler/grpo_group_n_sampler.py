"""The sampler for group-relative methods: the n samples of one prompt are dealt together or not at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import RankConsistentSampler, Share, check_batch_size, in_order, natural, positive
from transfer_queue.sampler.groups import DealsGroups, pick_groups, whole_groups


class GRPOGroupNSampler(DealsGroups, RankConsistentSampler):
    """Deals whole groups, the first ones first; rank-consistent where dp_rank and batch_index are given.

    Alone, it caches (sampled, consumed) in `_states[partition_id][task_name][dp_rank][batch_index]`.

    Args:
        n_samples_per_prompt: Samples in a group, positive. A claim with another number in its sampling_config is
            refused. Default: the number in the claim's sampling_config; without it, in a system, the size of the
            groups that the partition declares (`group_ids`, `group_size`); otherwise 1.
        dp_size: Number of ranks, as in RankAwareSampler. Default: not known.
        drop_last: As in RankAwareSampler, counted in groups.

    Raises:
        InvalidArgumentError: n_samples_per_prompt or dp_size is not positive.
    """

    sampling_entries: Collection[str] = ("dp_size", "n_samples_per_prompt")

    def __init__(
        self, n_samples_per_prompt: int | None = None, dp_size: int | None = None, drop_last: bool = False
    ) -> None:
        super().__init__()
        self._take_group_size(n_samples_per_prompt)
        self.dp_size = None if dp_size is None else positive(dp_size, "dp_size")
        self.drop_last = drop_last

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError for a batch_size that is no multiple of the group, or a negative rank."""
        super().validate(batch_size, sampling_config)
        self._groups_in(batch_size, sampling_config)

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """All whole groups."""
        size = self._group_size(config)
        return sum(1 for _ in whole_groups(ready_indexes, size)) * size

    def deals_in_order(self, sampling_config: Mapping[str, Any]) -> bool:
        """It does where a deal is for the rank that asks alone."""
        return self.ranks(sampling_config) is None

    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int] | None:
        """(dp_rank, batch_index); None unless both are given."""
        rank, batch = natural(sampling_config, "dp_rank"), natural(sampling_config, "batch_index")
        return None if rank is None or batch is None else (rank, batch)

    def deal(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> dict[int, Share]:
        """Whole groups, batch_size samples of them for every rank, or for who asks where dp_size is not known."""
        key = self.deal_key(config)
        known = None if key is None else self.ranks(config)
        ranks = [key[0] if key else 0] if known is None else range(known)
        count = self._groups_in(batch_size, config) * len(ranks)
        groups = pick_groups(ready_indexes, self._group_size(config), count)
        if len(groups) < count:
            return {}
        return in_order(ranks, list(chain.from_iterable(groups)))

    def _groups_in(self, batch_size: int, config: Mapping[str, Any]) -> int:
        check_batch_size(batch_size)
        size = self._group_size(config)
        if batch_size % size:
            raise InvalidArgumentError(f"batch_size ({batch_size}) must be a multiple of n_samples_per_prompt ({size})")
        return batch_size // size
