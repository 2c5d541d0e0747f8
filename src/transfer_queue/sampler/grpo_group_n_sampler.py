"""GRPOGroupNSampler, for group-relative methods: the n samples of one prompt are dealt together or not at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from transfer_queue.sampler.base import (
    RankConsistentSampler,
    Share,
    split_in_order,
    validated_count,
)
from transfer_queue.sampler.ready_views import DealsGroups, pick_groups, whole_groups


class GRPOGroupNSampler(DealsGroups, RankConsistentSampler):
    """Deal complete groups in order. Rank-consistent if dp_rank and batch_index are given.

    In a system, a group consists of the samples with one declared id, or of consecutive samples in order of
    reservation. Called directly without group information, the sampler sorts the ready indexes and takes runs of n
    consecutive ones.

    A sampler that is called directly caches (sampled, consumed) in
    `_states[partition_id][task_name][dp_rank][batch_index]`.

    Args:
        n_samples_per_prompt: The number of samples in a group, positive. A request with another number in its
            sampling_config is refused. Default: the number in the sampling_config; without it, in a system, the size of
            the groups that the partition declares (`group_ids`, `group_size`); otherwise 1.
        dp_size: The number of ranks; see RankAwareSampler. Default: not known.
        drop_last: See RankAwareSampler, counted in groups. Default: False.

    Raises:
        InvalidArgumentError: `n_samples_per_prompt` or `dp_size` is not positive.

    Example:
        >>> tq.GRPOGroupNSampler(n_samples_per_prompt=3).sample([0, 1, 3, 4, 5, 6, 7, 9, 10, 11], 6)
        ([3, 4, 5, 9, 10, 11], [3, 4, 5, 9, 10, 11])
    """

    sampling_entries: Collection[str] = ("dp_size", "n_samples_per_prompt")

    def __init__(
        self, n_samples_per_prompt: int | None = None, dp_size: int | None = None, drop_last: bool = False
    ) -> None:
        super().__init__()
        self._take_group_size(n_samples_per_prompt)
        self._take_dp_size(dp_size)
        self.drop_last = drop_last

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Raise InvalidArgumentError for a batch_size that is not a multiple of the group size, or a negative rank."""
        super().validate(batch_size, sampling_config)
        self._groups_in(batch_size, sampling_config)

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """Return the number of samples in complete groups."""
        size = self._group_size(config)
        return sum(1 for _ in whole_groups(ready_indexes, size)) * size

    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return (dp_rank, batch_index); None unless both are given."""
        rank, batch = validated_count(sampling_config, "dp_rank"), validated_count(sampling_config, "batch_index")
        return None if rank is None or batch is None else (rank, batch)

    def deal(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> dict[int, Share]:
        """Deal complete groups to every rank, or to the caller if the number of ranks is not known."""
        key = self.deal_key(config)
        ranks = [0] if key is None else self._ranks_of_deal(key[0], config)
        count = self._groups_in(batch_size, config) * len(ranks)
        groups = pick_groups(ready_indexes, self._group_size(config), count)
        if len(groups) < count:
            return {}
        return split_in_order(ranks, list(chain.from_iterable(groups)))
