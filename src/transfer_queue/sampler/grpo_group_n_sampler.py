"""The sampler for group-relative methods: the n samples of one prompt are dealt together or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import (
    GROUP_SIZE,
    RankConsistentSampler,
    Share,
    check_batch_size,
    in_order,
    natural,
    positive,
)
from transfer_queue.sampler.groups import pick_groups, whole_groups


class GRPOGroupNSampler(RankConsistentSampler):
    """Deals whole groups, the first ones first; rank-consistent where dp_rank and batch_index are given.

    n_samples_per_prompt: samples in a group, positive. None: through the system as many as the groups have that the
    partition declares (`group_ids`, `group_size`); 1 where it declares none, and for a sampler alone.
    The n_samples_per_prompt of a sampling_config is ignored: what a group is was settled when the samples were made.
    dp_size, drop_last: as in RankAwareSampler, counted in groups.
    Alone, it caches (sampled, consumed) in _states[partition_id][task_name][dp_rank][batch_index].
    """

    def __init__(
        self, n_samples_per_prompt: int | None = None, dp_size: int | None = None, drop_last: bool = False
    ) -> None:
        super().__init__()
        self.dp_size = None if dp_size is None else positive(dp_size, "dp_size")
        self.drop_last = drop_last
        self.size_given = n_samples_per_prompt is not None
        self.n_samples_per_prompt = 1 if n_samples_per_prompt is None else positive(n_samples_per_prompt, GROUP_SIZE)

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError for a batch_size that is no multiple of the group, or a negative rank."""
        super().validate(batch_size, sampling_config)
        self._groups_in(batch_size)

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """All whole groups."""
        return sum(1 for _ in whole_groups(ready_indexes, self.n_samples_per_prompt)) * self.n_samples_per_prompt

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
        count = self._groups_in(batch_size) * len(ranks)
        groups = pick_groups(ready_indexes, self.n_samples_per_prompt, count)
        if len(groups) < count:
            return {}
        return in_order(ranks, list(chain.from_iterable(groups)))

    def _groups_in(self, batch_size: int) -> int:
        check_batch_size(batch_size)
        if batch_size % self.n_samples_per_prompt:
            raise InvalidArgumentError(
                f"batch_size ({batch_size}) must be a multiple of n_samples_per_prompt ({self.n_samples_per_prompt})"
            )
        return batch_size // self.n_samples_per_prompt
