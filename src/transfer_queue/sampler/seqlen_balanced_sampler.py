"""The sampler that deals to all data-parallel ranks at once, so that each gets about as many tokens."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, pairwise
from numbers import Real
from typing import Any, Protocol

import numpy as np

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.balance import get_seqlen_balanced_partitions, karmarkar_karp
from transfer_queue.sampler.balance.checks import scalar
from transfer_queue.sampler.base import (
    GROUP_SIZE,
    Deal,
    RankConsistentSampler,
    Share,
    check_batch_size,
    natural,
    positive,
    saved,
)
from transfer_queue.sampler.groups import pick_rows, whole_groups

__all__ = ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions", "karmarkar_karp"]

_LENGTH_TAG = "total_lengths"


class Tagged(Protocol):
    """What this sampler needs of a partition."""

    def get_custom_meta(self, indexes: list[int], /) -> Mapping[int, Mapping[str, Any]]:
        """The tags of these rows by global index; rows without any may be left out."""
        ...


class SeqlenBalancedSampler(RankConsistentSampler):
    """Deals whole groups to all ranks in one deal; each rank's sum of the tag `total_lengths` is nearly the same.

    n_samples_per_prompt: samples in a group; None: as for `GRPOGroupNSampler`. dp_size: ranks. Both positive.
    batch_size is what one rank gets: a deal takes batch_size * dp_size samples. Where its groups do not divide evenly
    over the ranks their counts differ.
    After a seal the rest is dealt as one smaller batch for every rank, the same number of groups each, and what is left
    then is passed over; with `drop_last` all of it is.
    Alone, it caches (sampled, consumed) in _states[partition_id][task_name][dp_rank][batch_index], for all
    ranks, and the lists of all ranks in _balanced_cache[(partition_id, task_name, batch_index)].
    """

    deals_rounds = True
    dp_size: int

    def __init__(self, n_samples_per_prompt: int | None = None, dp_size: int = 1, drop_last: bool = False) -> None:
        super().__init__()
        self.drop_last = drop_last
        self.size_given = n_samples_per_prompt is not None
        self.n_samples_per_prompt = 1 if n_samples_per_prompt is None else positive(n_samples_per_prompt, GROUP_SIZE)
        self.dp_size = positive(dp_size, "dp_size")
        self._balanced_cache: dict[tuple[str, str, int], list[list[int]]] = {}

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError for a batch_size of no whole groups, or a rank beyond dp_size."""
        super().validate(batch_size, sampling_config)
        self._groups_in(batch_size, self._ranks_of(sampling_config))

    def ranks(self, sampling_config: Mapping[str, Any]) -> int:
        """dp_size, whatever the claim says."""
        return self.dp_size

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """Whole groups, the same number for every rank; without batch_index all, as the caller has no other ranks."""
        groups = sum(1 for _ in whole_groups(ready_indexes, self.n_samples_per_prompt))
        return groups // self._ranks_of(config) * self.n_samples_per_prompt

    def sample(self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any) -> Share:
        """(sampled, consumed) of the caller's dp_rank; ([], []) where there are too few, or beyond dp_size.

        dp_rank and batch_index are 0 where they are not given.
        """
        for name in ("dp_rank", "batch_index"):
            kwargs[name] = natural(kwargs, name) or 0
        if kwargs["dp_rank"] >= self.dp_size:
            return [], []
        return super().sample(ready_indexes, batch_size, *args, **kwargs)

    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int] | None:
        """(dp_rank, batch_index), the rank 0 where it is not given; None without batch_index."""
        rank, batch = natural(sampling_config, "dp_rank") or 0, natural(sampling_config, "batch_index")
        return None if batch is None else (rank, batch)

    def deal(
        self, ready_indexes: Sequence[int], batch_size: int, *, partition: Tagged | None = None, **config: Any
    ) -> dict[int, Share]:
        """The shares of all ranks, by rank. Without batch_index: whole groups for this caller alone.

        Without a partition the split is equal, in order. Raises InvalidArgumentError for a tag that is no length.
        """
        found = self.prepare(ready_indexes, batch_size, partition=partition, **config)
        return {} if found is None else found.run()

    def prepare(
        self, ready_indexes: Sequence[int], batch_size: int, *, partition: Tagged | None = None, **config: Any
    ) -> Deal | None:
        """Chooses the groups and takes their tags; what is left to do, and may fail, is to balance them."""
        ranks = self._ranks_of(config)
        count = self._groups_in(batch_size, ranks)
        groups = pick_rows(ready_indexes, self.n_samples_per_prompt, count)
        if len(groups) < count:
            return None
        rows = groups.reshape(-1)
        tags = None if partition is None or not count else _tags(rows, partition)
        size = self.n_samples_per_prompt
        return Deal(count, rows, lambda: _shares(groups.tolist(), tags, ranks, size))

    def clear_cache(self, partition_id: str) -> None:
        """Forgets what was dealt of this partition."""
        super().clear_cache(partition_id)
        for key in [key for key in self._balanced_cache if key[0] == partition_id]:
            del self._balanced_cache[key]

    def keep_only(self, partition_id: str, task_name: str, batches: Collection[tuple[int, int]]) -> None:
        """Forgets what was dealt to a task, but for these batches: (dp_rank, batch_index)."""
        super().keep_only(partition_id, task_name, batches)
        indexes = {batch_index for _, batch_index in batches}
        for key in [key for key in self._balanced_cache if key[:2] == (partition_id, task_name)]:
            if key[2] not in indexes:
                del self._balanced_cache[key]

    def save_checkpoint(self) -> dict[str, Any]:
        """What `load_checkpoint` takes; a copy."""
        return {**super().save_checkpoint(), "balanced_cache": copy.deepcopy(self._balanced_cache)}

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replaces what is kept by what `save_checkpoint` returned. Raises InvalidArgumentError for anything else."""
        balanced = saved(state, "balanced_cache")
        super().load_checkpoint(state)
        self._balanced_cache = balanced

    def _keep(self, names: tuple[str, str], batch_index: int, shares: dict[int, Share]) -> None:
        super()._keep(names, batch_index, shares)
        if shares:
            self._balanced_cache[(*names, batch_index)] = [sampled for sampled, _ in shares.values()]

    def _ranks_of(self, config: Mapping[str, Any]) -> int:
        """How many ranks a deal is for: without batch_index no other rank could come for its share."""
        return 1 if config.get("batch_index") is None else self.dp_size

    def _groups_in(self, batch_size: int, ranks: int) -> int:
        """Groups in a deal for so many ranks."""
        check_batch_size(batch_size)
        size = self.n_samples_per_prompt
        count, rest = divmod(batch_size * ranks, size)
        if rest:
            raise InvalidArgumentError(
                f"batch_size ({batch_size}) times dp_size ({ranks}) must be a multiple of n_samples_per_prompt ({size})"
            )
        if 0 < count < ranks:
            raise InvalidArgumentError(
                f"batch_size ({batch_size}) gives {count} groups of {size} to {ranks} ranks, "
                f"so that a rank gets none; it must be {size} or more"
            )
        return count


def _tags(rows: np.ndarray, partition: Tagged) -> list[Mapping[str, Any] | None]:
    """The tags of these rows, at once where the partition can."""
    tags_of = getattr(partition, "tags_of", None)
    if tags_of is not None:
        return tags_of(rows)  # type: ignore[no-any-return]
    wanted = rows.tolist()
    found = partition.get_custom_meta(wanted)
    return [found.get(row) for row in wanted]


def _shares(
    groups: list[list[int]], tags: list[Mapping[str, Any] | None] | None, ranks: int, size: int
) -> dict[int, Share]:
    """The groups of all ranks. tags: of each sample; None splits them equally, in order."""
    count = len(groups)
    if not count:
        return {rank: ([], []) for rank in range(ranks)}
    even = count % ranks == 0
    if tags is None:
        parts = _in_order(count, ranks)
    else:
        lengths = list(map(_length, chain.from_iterable(groups), tags))
        sums = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
        parts = get_seqlen_balanced_partitions(sums, ranks, even)
    shares = {}
    for rank, part in enumerate(parts):
        sampled = list(chain.from_iterable(groups[position] for position in part))
        shares[rank] = (sampled, list(sampled))
    if not even:
        _warn_uneven([len(sampled) for sampled, _ in shares.values()], size)
    return shares


def _length(index: int, tags: Mapping[str, Any] | None) -> float:
    """The length of one sample; 1 where it has none."""
    value = scalar((tags or {}).get(_LENGTH_TAG))
    if value is None:
        return 1.0
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            length = float(value)
        except OverflowError:
            length = math.inf
        if math.isfinite(length) and length >= 0:
            return length
        shown = str(length)
    else:
        shown = reprlib.repr(value)
    raise InvalidArgumentError(
        f"tag {_LENGTH_TAG!r} of row {index} must be a finite number, not negative, but is {shown} "
        f"({type(value).__name__}); set it to a plain int"
    )


def _in_order(count: int, ranks: int) -> list[list[int]]:
    """0..count-1 in runs for the ranks, of equal length but for the first ones, which may have one more."""
    each, more = divmod(count, ranks)
    cuts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return [list(range(start, stop)) for start, stop in pairwise(cuts)]


def _warn_uneven(counts: list[int], size: int) -> None:
    # Only here, so that a process that never warns sets up no logger.
    from transfer_queue.utils.logging_utils import get_logger

    get_logger(__name__).warning(
        "groups of %d do not divide evenly over %d ranks: they get %s samples; "
        "choose a batch_size that is a multiple of n_samples_per_prompt",
        size,
        len(counts),
        counts,
    )
