"""The sampler for data-parallel ranks that fetch on their own: one batch for each (dp_rank, batch_index)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import RankConsistentSampler, Share, in_order, natural, positive


class RankAwareSampler(RankConsistentSampler):
    """Deals the first ready samples, the same to all replicas of a dp_rank that ask for the same batch_index.

    dp_size: how many ranks there are; through the system a dp_rank beyond it is an error. Where it is known, here or in
    the sampling_config, a deal is a round: one batch for every rank, made when enough for all of them is ready, so that
    no rank is ever a batch ahead that others will not get. After a seal the rest is divided evenly over a last round,
    or passed over where some rank would get nothing, or with `drop_last` where some rank would get less than
    batch_size. Where dp_size is not known a batch is dealt to the rank that asks, and after a seal all ranks that
    were dealt to or wait get the same number of batches as far as what is left suffices.
    Alone, it caches the list of samples in `_states[partition_id][task_name][dp_rank][batch_index]`.
    """

    def __init__(self, dp_size: int | None = None, drop_last: bool = False) -> None:
        super().__init__()
        self.dp_size = None if dp_size is None else positive(dp_size, "dp_size")
        self.drop_last = drop_last

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Share:
        """Return the batch of the caller's task, partition, dp_rank and batch_index. All four are required.

        Args:
            ready_indexes: Global indexes of the samples that are ready and not consumed.
            batch_size: Number of samples in the batch.
            task_name: The task that asks.
            partition_id: The partition that the samples belong to.
            *args: Ignored.
            **kwargs: `dp_rank`, `batch_index`, and the other entries of the sampling_config.

        Returns:
            (sampled, consumed), two lists of global indexes; ([], []) if fewer than batch_size are ready.

        Raises:
            InvalidArgumentError: One of the four is missing, or dp_rank, batch_index or batch_size is negative.
        """
        if not task_name or not partition_id:
            raise InvalidArgumentError(
                f"RankAwareSampler needs task_name and partition_id, got {task_name!r} and {partition_id!r}; pass both"
            )
        return super().sample(ready_indexes, batch_size, task_name, partition_id, *args, **kwargs)

    def deals_in_order(self, sampling_config: Mapping[str, Any]) -> bool:
        """It does where a deal is for the rank that asks alone."""
        return self.ranks(sampling_config) is None

    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int]:
        """(dp_rank, batch_index), both required."""
        rank, batch = natural(sampling_config, "dp_rank"), natural(sampling_config, "batch_index")
        if rank is None or batch is None:
            raise InvalidArgumentError("RankAwareSampler needs dp_rank and batch_index; give both in sampling_config")
        return rank, batch

    def deal(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> dict[int, Share]:
        """The first ready samples: batch_size for every rank, or for the one that asks where dp_size is not known."""
        rank, _ = self.deal_key(config)
        known = self.ranks(config)
        ranks = [rank] if known is None else range(known)
        count = batch_size * len(ranks)
        if len(ready_indexes) < count:
            return {}
        return in_order(ranks, [int(index) for index in ready_indexes[:count]])

    def _entry(self, share: Share) -> list[int]:
        return share[0]

    def _share(self, entry: Any) -> Share:
        return list(entry), list(entry)
