"""RankAwareSampler, for data-parallel ranks that fetch independently: one batch for each (dp_rank, batch_index)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.base import (
    RankConsistentSampler,
    Share,
    split_in_order,
    validated_count,
)


class RankAwareSampler(RankConsistentSampler):
    """Deal the first ready samples, the same to all processes of a rank that ask for the same batch index.

    If the number of ranks is known, here or in the sampling_config, a deal is a round: one batch for every rank, dealt
    as soon as enough samples for all of them are ready, so that no rank is ever a batch ahead of the others. After a
    seal the remainder is divided evenly over a last round. It is skipped if some rank would get nothing, or, with
    `drop_last`, less than `batch_size`. If the number is not known, a batch is dealt to the rank that asks. After a
    seal, all ranks that were dealt a batch or wait for one get the same number of batches as far as the remaining
    samples suffice.

    A sampler that is called directly caches the list of samples in
    `_states[partition_id][task_name][dp_rank][batch_index]`.

    Args:
        dp_size: The number of ranks. In a system, a larger dp_rank is an error. A request with another number is
            refused, unless the sampler is that of the system (`controller.sampler`): a task may have another number of
            ranks. Default: the number of the request; without it, not known.
        drop_last: True to skip the remainder unless it suffices for `batch_size` for every rank. Default: False.

    Raises:
        InvalidArgumentError: `dp_size` is not positive.

    Example:
        >>> sampler = tq.RankAwareSampler(dp_size=2)
        >>> config = {"task_name": "update", "partition_id": "train_0", "batch_index": 0}
        >>> sampler.sample([3, 4, 5, 6], 2, dp_rank=0, **config)
        ([3, 4], [3, 4])
        >>> sampler.sample([3, 4, 5, 6], 2, dp_rank=1, **config)
        ([5, 6], [5, 6])
    """

    def __init__(self, dp_size: int | None = None, drop_last: bool = False) -> None:
        super().__init__()
        self._take_dp_size(dp_size)
        self.drop_last = drop_last

    def sample(  # type: ignore[override]  # the base class does not require a rank
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Share:
        """Return the batch of the caller's rank, batch index, task and partition. All four are required.

        Args:
            ready_indexes: The global indexes of the samples that are ready and not consumed.
            batch_size: The number of samples in the batch.
            dp_rank: The data-parallel rank that asks, from 0.
            batch_index: The number of the batch of this rank, from 0.
            task_name: The task that asks.
            partition_id: The partition of the samples.
            *args: Ignored.
            **kwargs: The other entries of the sampling_config, and `partition`.

        Returns:
            (sampled, consumed), two lists of global indexes; ([], []) if fewer than `batch_size` are ready.

        Raises:
            TypeError: One of the four is missing.
            InvalidArgumentError: One of the four is of another type, or a number is negative, or a name is empty.
        """
        if not all(name and isinstance(name, str) for name in (task_name, partition_id)):
            raise InvalidArgumentError(
                f"RankAwareSampler needs task_name and partition_id, got {task_name!r} and {partition_id!r}; the "
                f"arguments of sample are ready_indexes, batch_size, dp_rank, batch_index, task_name, partition_id in "
                f"this order"
            )
        ranked = {"dp_rank": dp_rank, "batch_index": batch_index}
        return super().sample(ready_indexes, batch_size, task_name, partition_id, *args, **ranked, **kwargs)

    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int]:
        """Return (dp_rank, batch_index). Raises InvalidArgumentError if one of them is missing."""
        rank, batch = validated_count(sampling_config, "dp_rank"), validated_count(sampling_config, "batch_index")
        if rank is None or batch is None:
            raise InvalidArgumentError("RankAwareSampler needs dp_rank and batch_index; give both in sampling_config")
        return rank, batch

    def deal(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> dict[int, Share]:
        """Deal the first ready samples to every rank, or to the rank that asks if their number is not known."""
        rank, _ = self.deal_key(config)
        ranks = self._ranks_of_deal(rank, config)
        count = batch_size * len(ranks)
        if len(ready_indexes) < count:
            return {}
        return split_in_order(ranks, list(map(int, ready_indexes[:count])))

    def _entry(self, share: Share) -> list[int]:
        return share[0]

    def _share(self, entry: Any) -> Share:
        return list(entry), list(entry)
