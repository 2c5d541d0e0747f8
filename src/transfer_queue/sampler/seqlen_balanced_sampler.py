"""SeqlenBalancedSampler: deals to all ranks at once, so that each gets about the same number of tokens."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, pairwise
from numbers import Real
from typing import Any

import numpy as np

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler.balance import get_seqlen_balanced_partitions, karmarkar_karp
from transfer_queue.sampler.base import (
    Deal,
    RoundSampler,
    Share,
    check_batch_size,
    copy_saved_part,
)
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.numeric_tags import TagColumns, entries_of, numbers_of
from transfer_queue.sampler.ready_views import pick_rows, whole_groups

__all__ = ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions", "karmarkar_karp"]

_LENGTH_TAG = "total_lengths"


class SeqlenBalancedSampler(RoundSampler, GRPOGroupNSampler):
    """Deal complete groups to all ranks at once, so that their sums of the tag `total_lengths` are nearly equal.

    `batch_size` is what one rank gets: a deal takes `batch_size * dp_size` samples. If the groups do not divide evenly
    over the ranks, their counts differ, and a warning is logged. After a seal the remainder is dealt as one smaller
    batch with the same number of groups for every rank, and what is left then is skipped; with `drop_last` all of it is
    skipped.

    Called directly without dp_rank or batch_index, `sample` takes 0; a rank that is not less than dp_size gets nothing.
    A sampler that is called directly caches (sampled, consumed) of all ranks in
    `_states[partition_id][task_name][dp_rank][batch_index]`, and the lists of all ranks in
    `_balanced_cache[(partition_id, task_name, batch_index)]`.

    Args:
        n_samples_per_prompt: The number of samples in a group; see GRPOGroupNSampler.
        dp_size: The number of ranks, positive; see RankAwareSampler. Default: that of the request, or else 1.
        drop_last: True to skip the remainder after a seal unless it suffices for `batch_size` for every rank. Default:
            False.

    Raises:
        InvalidArgumentError: `n_samples_per_prompt` or `dp_size` is not positive.

    Example:
        A GRPO batch for two ranks. Groups stay whole, and the ranks get nearly the same number of tokens.

        >>> lengths = {"p0": [812, 640, 905, 731], "p1": [120, 95, 133, 88],
        ...            "p2": [310, 280, 450, 296], "p3": [520, 610, 388, 702]}
        >>> for prompt, tokens in lengths.items():  # the numbers of tokens of four answers to each prompt
        ...     put = client.put(
        ...         TensorDict({"answer": torch.zeros(4, 9)}, batch_size=[4]),
        ...         partition_id="train_0",
        ...         group_ids=[prompt] * 4,
        ...         tags=[{"prompt": prompt, "total_lengths": count} for count in tokens],
        ...     )
        >>> sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=4, dp_size=2)
        >>> for rank in (0, 1):
        ...     dataset = tq.StreamingDataset(None, 8, 8, ["answer"], "train_0", "actor_update", rank, sampler=sampler)
        ...     data, meta = next(iter(dataset))
        ...     prompts = [tag["prompt"] for tag in meta.custom_meta]
        ...     print(prompts, sum(tag["total_lengths"] for tag in meta.custom_meta), "tokens")
        ['p0', 'p0', 'p0', 'p0', 'p1', 'p1', 'p1', 'p1'] 3524 tokens
        ['p2', 'p2', 'p2', 'p2', 'p3', 'p3', 'p3', 'p3'] 3556 tokens
    """

    def __init__(
        self, n_samples_per_prompt: int | None = None, dp_size: int | None = None, drop_last: bool = False
    ) -> None:
        super().__init__(n_samples_per_prompt, drop_last=drop_last)
        self._take_dp_size(dp_size, otherwise=1)
        self._balanced_cache: dict[tuple[str, str, int], list[list[int]]] = {}
        self._warned: set[str] = set()

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """Return the samples of the complete groups of one rank; without batch_index, of all complete groups."""
        size = self._group_size(config)
        groups = sum(1 for _ in whole_groups(ready_indexes, size))
        return groups // self._ranks_of(config) * size

    def _takes_part(self, batch_size: int, config: Mapping[str, Any]) -> bool:
        return bool(config["dp_rank"] < (self.ranks(config) or 1))

    def prepare(
        self, ready_indexes: Sequence[int], batch_size: int, *, partition: TagColumns | None = None, **config: Any
    ) -> Deal | None:
        """Choose the groups and read their tags. What remains, and may fail, is to balance them.

        Without batch_index, complete groups are for this caller alone. Without a partition, or if no sample has a
        length, the samples are divided equally, in order, and a warning is logged once.
        """
        size, count = self._group_size(config), self._groups_in(batch_size, config)
        groups = pick_rows(ready_indexes, size, count)
        if len(groups) < count:
            return None
        rows = groups.reshape(-1)
        values = None if partition is None or not count else entries_of(rows.tolist(), _LENGTH_TAG, partition)
        ranks = self._ranks_of(config)
        return Deal(count, rows, lambda: self._shares(groups.tolist(), values, ranks, size))

    def clear_cache(self, partition_id: str) -> None:
        """Forget what was dealt of a partition."""
        super().clear_cache(partition_id)
        for key in [key for key in self._balanced_cache if key[0] == partition_id]:
            del self._balanced_cache[key]

    def keep_only(self, partition_id: str, task_name: str, batches: Collection[tuple[int, int]]) -> None:
        """Forget what was dealt to a task, except for some batches."""
        super().keep_only(partition_id, task_name, batches)
        indexes = {batch_index for _, batch_index in batches}
        for key in [key for key in self._balanced_cache if key[:2] == (partition_id, task_name)]:
            if key[2] not in indexes:
                del self._balanced_cache[key]

    def save_checkpoint(self) -> dict[str, Any]:
        """Return a copy of the state of this sampler, for `load_checkpoint`."""
        return {**super().save_checkpoint(), "balanced_cache": copy.deepcopy(self._balanced_cache)}

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the state of this sampler. Raises InvalidArgumentError if `state` is not from `save_checkpoint`."""
        balanced = copy_saved_part(state, "balanced_cache")
        super().load_checkpoint(state)
        self._balanced_cache = balanced

    def _keep(self, names: tuple[str, str], batch_index: int, shares: dict[int, Share]) -> None:
        super()._keep(names, batch_index, shares)
        if shares:
            self._balanced_cache[(*names, batch_index)] = [sampled for sampled, _ in shares.values()]

    def _ranks_of(self, config: Mapping[str, Any]) -> int:
        """Return the number of ranks of a deal: without batch_index no other rank could fetch its share."""
        return 1 if config.get("batch_index") is None else self.ranks(config) or 1

    def _groups_in(self, batch_size: int, config: Mapping[str, Any]) -> int:
        """Return the number of groups in a deal for all its ranks."""
        check_batch_size(batch_size)
        size, ranks = self._group_size(config), self._ranks_of(config)
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

    def _shares(self, groups: list[list[int]], values: list[Any] | None, ranks: int, size: int) -> dict[int, Share]:
        """Return the groups of all ranks. values: See `_lengths`."""
        count = len(groups)
        if not count:
            return {rank: ([], []) for rank in range(ranks)}
        even = count % ranks == 0
        lengths = self._lengths(list(chain.from_iterable(groups)), values)
        if lengths is None:
            parts = _in_order(count, ranks)
        else:
            sums = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
            parts = get_seqlen_balanced_partitions(sums, ranks, even)
        shares = {}
        for rank, part in enumerate(parts):
            sampled = list(chain.from_iterable(groups[position] for position in part))
            shares[rank] = (sampled, list(sampled))
        if not even:
            _warn(
                f"num_groups={count} is not divisible by dp_size={ranks}: the ranks get "
                f"{[len(sampled) for sampled, _ in shares.values()]} samples, in groups of {size}; choose a batch_size "
                f"that is a multiple of n_samples_per_prompt"
            )
        return shares

    def _lengths(self, rows: list[int], values: list[Any] | None) -> list[float] | None:
        """Return the length of each sample, 1 if it has none; None if no sample has one.

        values: the tag of each sample, None if it has none; None if there is no partition to read them from.
        """
        if values is None:
            self._warn_once(
                "partition",
                "no partition object provided, falling back to equal-split without balancing: the samples are divided "
                "in order, because their lengths are not known; pass partition=, an object with "
                "get_custom_meta(indexes)",
            )
            return None
        quick = numbers_of(values)
        if quick is not None and np.isfinite(quick).all() and (quick >= 0).all():
            return list(quick.tolist())
        sizes = list(map(_length, rows, values))
        missing = sizes.count(None)
        if missing:
            counted = "is divided equally, in order" if missing == len(sizes) else "counts the missing ones as 1"
            self._warn_once(
                "lengths",
                f"the tag {_LENGTH_TAG!r} is missing in {missing} of the {len(sizes)} samples of a deal, first in row "
                f"{rows[sizes.index(None)]}: the deal {counted}; put each sample with its number of tokens in this tag",
            )
        return None if missing == len(sizes) else [1.0 if length is None else length for length in sizes]

    def _warn_once(self, about: str, text: str) -> None:
        """Log a warning, unless this sampler has logged one about the same before."""
        if about not in self._warned:
            self._warned.add(about)
            _warn(f"{type(self).__name__}: {text}")


def _length(index: int, value: Any) -> float | None:
    """Return the length of one sample from its tag; None if it has none."""
    if value is None:
        return None
    if not isinstance(value, Real):
        # Imported only here, so that a process whose lengths are plain numbers does not import the wire package.
        from transfer_queue.wire.objects.object_decoder import lone_number

        value = lone_number(value)
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
        f"tag {_LENGTH_TAG!r} of row {index} must be a finite number, not negative, got {shown} "
        f"({type(value).__name__}); set it to a plain int"
    )


def _in_order(count: int, ranks: int) -> list[list[int]]:
    """Divide 0..count-1 into consecutive runs for the ranks; the first ones may have one more."""
    each, more = divmod(count, ranks)
    cuts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return [list(range(start, stop)) for start, stop in pairwise(cuts)]


def _warn(text: str) -> None:
    # Only here, so that a process that never warns sets up no logger.
    from transfer_queue.utils.logging_utils import get_logger

    get_logger(__name__).warning("%s", text)
