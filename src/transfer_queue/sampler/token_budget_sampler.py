"""TokenBudgetSampler: deals micro-batches by tokens, to every rank complete groups up to a budget."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np

from transfer_queue.errors import BalanceInputError, InvalidArgumentError
from transfer_queue.sampler.balance import balance, pack
from transfer_queue.sampler.base import (
    Deal,
    RoundSampler,
    Share,
    validated_positive,
)
from transfer_queue.sampler.numeric_tags import TagColumns, numbers
from transfer_queue.sampler.ready_views import DealsGroups, whole_groups

WEIGHT = 40  # the time for one group here, in groups that are only balanced


class TokenBudgetSampler(DealsGroups, RoundSampler):
    """Deal one micro-batch to each rank at once: complete groups, in order, with at most `token_budget` tokens.

    `batch_size` is the maximum number of samples in a micro-batch, and a multiple of `n_samples_per_prompt`. A deal
    takes groups until the next one fits into no rank's micro-batch; that group and all after it stay ready. If there
    are fewer tokens, the deal waits for more samples. After a seal, the last deals take what is left as long as every
    rank gets a group, so that all ranks get the same number of micro-batches.

    A sampler that is called directly caches (sampled, consumed) of all ranks in
    `_states[partition_id][task_name][dp_rank][batch_index]`.

    Args:
        token_budget: The maximum sum of the tag entries `tag` of a micro-batch, positive. A group that is longer is
            alone in its micro-batch.
        n_samples_per_prompt: The number of samples in a group; see GRPOGroupNSampler.
        dp_size: The number of ranks, positive; see RankAwareSampler. Default: that of the request, or else 1.
        tag: The tag entry with the number of tokens of a sample. Default: "total_lengths".
        drop_last: True to deal nothing but full micro-batches. Default: False.

    Raises:
        InvalidArgumentError: An argument is not valid.

    Example:
        >>> class Tags:
        ...     def get_custom_meta(self, indexes):
        ...         return {index: {"total_lengths": 100} for index in indexes}
        >>> sampler = tq.TokenBudgetSampler(token_budget=250)
        >>> sampler.sample([0, 1, 2, 3], 4, "update", "train_0", partition=Tags())[0]
        [0, 1]
    """

    deals_finally = True
    sampling_entries: Collection[str] = ("dp_size", "n_samples_per_prompt")

    def __init__(
        self,
        token_budget: int,
        n_samples_per_prompt: int | None = None,
        dp_size: int | None = None,
        tag: str = "total_lengths",
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(tag, str):
            raise InvalidArgumentError(f"tag must be the name of a tag, got {tag!r}")
        self.token_budget = validated_positive(token_budget, "token_budget")
        """The maximum number of tokens in a micro-batch."""
        self._take_group_size(n_samples_per_prompt)
        self._take_dp_size(dp_size, otherwise=1)
        self.tag = tag
        """The tag entry with the number of tokens of a sample."""
        self.drop_last = bool(drop_last)

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Raise InvalidArgumentError for a batch_size or a rank that is not valid."""
        super().validate(batch_size, sampling_config)
        self._groups_in(batch_size, sampling_config)

    def _takes_part(self, batch_size: int, config: Mapping[str, Any]) -> bool:
        self.validate(batch_size, config)
        return True

    def prepare(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        *,
        partition: TagColumns | None = None,
        final: bool = False,
        **config: Any,
    ) -> Deal | None:
        """Find out whether the micro-batches can be full. What remains is to fill them as well as possible.

        Without batch_index, one micro-batch is for this caller alone. With `final` they need not be full.
        """
        held = self._groups_in(batch_size, config)
        size = self._group_size(config)
        ranks = 1 if config.get("batch_index") is None else self.ranks(config) or 1
        # One group more than the ranks can hold shows whether all of them are full.
        groups = list(islice(whole_groups(ready_indexes, size), ranks * held + 1))
        lengths = self._lengths(groups, partition)
        bins = self._in_order(lengths, ranks, held)
        taken = sum(map(len, bins))
        full = taken < len(groups) or taken == ranks * held
        if not all(bins) or not (full or (final and not self.drop_last)):
            return None

        def run() -> dict[int, Share]:
            shares = {}
            for rank, places in enumerate(self._filled(bins, lengths, held)):
                sampled = list(chain.from_iterable(groups[place] for place in sorted(places)))
                shares[rank] = (sampled, list(sampled))
            return shares

        rows = np.array(groups, "i8").reshape(-1)
        return Deal(WEIGHT * len(groups), rows, run)

    def _filled(self, bins: list[list[int]], lengths: list[float], held: int) -> list[list[int]]:
        """Return the groups of each rank, by position: as many of the first ones as a quick search makes fit.

        bins: the groups that fit in order, none empty. Packed tightly, some more may fit; this number is divided
        evenly.
        """
        ranks, count = len(bins), sum(map(len, bins))
        filled = accumulate(min(length, self.token_budget) for length in lengths[: ranks * held])
        most = sum(1 for tokens in filled if tokens <= ranks * self.token_budget)
        while count < most:
            middle = (count + most + 1) // 2
            if len(pack(lengths[:middle], self.token_budget)) <= ranks:
                count = middle
            else:
                most = middle - 1
        try:
            parts = balance(lengths[:count], ranks, max_tokens=self.token_budget)
        except BalanceInputError:
            return bins
        return parts if max(map(len, parts)) <= held else bins

    def _in_order(self, lengths: list[float], ranks: int, held: int) -> list[list[int]]:
        """Assign each of the first groups, by position, to the rank with the fewest tokens that has space for it.

        As an empty rank accepts any group, a rank stays empty only if there are fewer groups than ranks.
        """
        bins: list[list[int]] = [[] for _ in range(ranks)]
        # (tokens, rank) of the ranks that have space for one more group, the lightest first; -1 tokens if it is empty
        open_ = [(-1.0, rank) for rank in range(ranks)] if held else []
        for place, length in enumerate(lengths):
            if not open_ or (open_[0][0] + length > self.token_budget and open_[0][0] >= 0):
                break
            load, rank = heapq.heappop(open_)
            bins[rank].append(place)
            if len(bins[rank]) < held:
                heapq.heappush(open_, (max(load, 0.0) + length, rank))
        return bins

    def _lengths(self, groups: list[list[int]], partition: TagColumns | None) -> list[float]:
        """Return the number of tokens of each group."""
        rows = list(chain.from_iterable(groups))
        if not rows:
            return []
        lengths = numbers(rows, self.tag, partition)
        wrong = np.flatnonzero(~(np.isfinite(lengths) & (lengths >= 0)))
        if len(wrong):
            value = float(lengths[wrong[0]])
            shown = "missing" if np.isnan(value) else str(value)
            raise InvalidArgumentError(
                f"tag {self.tag!r} of row {rows[wrong[0]]} is {shown}, and TokenBudgetSampler needs the number of "
                f"tokens there, finite and not negative; put it with the sample"
            )
        return [float(length) for length in lengths.reshape(len(groups), -1).sum(axis=1)]
