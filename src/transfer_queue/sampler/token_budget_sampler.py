"""The sampler that deals micro-batches by tokens: to every data-parallel rank whole groups up to a budget."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np

from transfer_queue.errors import BalanceInputError, InvalidArgumentError
from transfer_queue.sampler.balance import balance, pack
from transfer_queue.sampler.base import Deal, RankConsistentSampler, Share, check_batch_size, natural, positive
from transfer_queue.sampler.groups import DealsGroups, whole_groups
from transfer_queue.sampler.tags import Tagged, numbers

WEIGHT = 40  # one group here takes about as long as so many that are only balanced


class TokenBudgetSampler(DealsGroups, RankConsistentSampler):
    """Deals one micro-batch to each rank at once: whole groups, in order, of token_budget tokens at most.

    token_budget: the most that the tags `tag` of a micro-batch's samples add up to; a group that is longer stands alone
    in its micro-batch. n_samples_per_prompt: samples in a group, as in GRPOGroupNSampler. dp_size: ranks. All three
    positive.
    batch_size is the most samples in a micro-batch, and a multiple of n_samples_per_prompt.
    A deal takes groups until the next one fits to no rank; that one and all behind it stay ready. Fewer tokens wait
    for more samples, but for the last deals (`final=True`), which take what there is as long as every rank gets a
    group: all ranks get the same number of micro-batches. drop_last: nothing but full deals.
    Alone, it caches (sampled, consumed) in `_states[partition_id][task_name][dp_rank][batch_index]`, for all ranks.
    """

    deals_rounds = True
    deals_finally = True
    dp_size: int
    sampling_entries: Collection[str] = ("dp_size", "n_samples_per_prompt")

    def __init__(
        self,
        token_budget: int,
        n_samples_per_prompt: int | None = None,
        dp_size: int = 1,
        tag: str = "total_lengths",
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(tag, str):
            raise InvalidArgumentError(f"tag must be the name of a tag, but is {tag!r}")
        self.token_budget = positive(token_budget, "token_budget")
        self._take_group_size(n_samples_per_prompt)
        self.dp_size = positive(dp_size, "dp_size")
        self.tag = tag
        self.drop_last = bool(drop_last)

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError for a batch_size of no whole groups, or a rank beyond dp_size."""
        super().validate(batch_size, sampling_config)
        self._groups_in(batch_size, sampling_config)

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Share:
        """(sampled, consumed) of the caller's dp_rank; ([], []) where the micro-batches are not full.

        dp_rank and batch_index are 0 where they are not given. Errors as `validate` and `deal`.
        """
        for name in ("dp_rank", "batch_index"):
            kwargs[name] = natural(kwargs, name) or 0
        self.validate(batch_size, kwargs)
        return super().sample(ready_indexes, batch_size, task_name, partition_id, *args, **kwargs)

    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int] | None:
        """(dp_rank, batch_index), the rank 0 where it is not given; None without batch_index."""
        rank, batch = natural(sampling_config, "dp_rank") or 0, natural(sampling_config, "batch_index")
        return None if batch is None else (rank, batch)

    def deal(
        self, ready_indexes: Sequence[int], batch_size: int, *, partition: Tagged | None = None, **config: Any
    ) -> dict[int, Share]:
        """The micro-batches of all ranks, by rank; {} while they are not full, unless it is a last deal (`final`).

        Without batch_index one micro-batch for this caller alone. Raises InvalidArgumentError for a missing length,
        and one that is no finite number of 0 or more.
        """
        found = self.prepare(ready_indexes, batch_size, partition=partition, **config)
        return {} if found is None else found.run()

    def prepare(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        *,
        partition: Tagged | None = None,
        final: bool = False,
        **config: Any,
    ) -> Deal | None:
        """Finds that the micro-batches can be full; what is left to do is to fill them as well as can be."""
        held = self._groups_in(batch_size, config)
        size = self._group_size(config)
        ranks = 1 if config.get("batch_index") is None else self.dp_size
        # one group more than the ranks can hold tells whether all of them are full
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
        """Which groups each rank gets, by place: as many of the first ones as a quick search makes fit.

        bins: those that fit in order, none empty. Packed tightly, some more may fit; so many are divided evenly.
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
        """Each of the first groups to the rank with the fewest tokens, by place, until that has no room.

        As an empty rank takes any group, one stays empty only where there are fewer groups than ranks.
        """
        bins: list[list[int]] = [[] for _ in range(ranks)]
        # (tokens, rank) of those that have room for one more, the lightest first; -1 tokens where it is empty
        open_ = [(-1.0, rank) for rank in range(ranks)] if held else []
        for place, length in enumerate(lengths):
            if not open_ or (open_[0][0] + length > self.token_budget and open_[0][0] >= 0):
                break
            load, rank = heapq.heappop(open_)
            bins[rank].append(place)
            if len(bins[rank]) < held:
                heapq.heappush(open_, (max(load, 0.0) + length, rank))
        return bins

    def _lengths(self, groups: list[list[int]], partition: Tagged | None) -> list[float]:
        """The tokens of each group."""
        rows = list(chain.from_iterable(groups))
        if not rows:
            return []
        found = numbers(rows, self.tag, partition)
        wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
        if len(wrong):
            value = float(found[wrong[0]])
            shown = "missing" if np.isnan(value) else str(value)
            raise InvalidArgumentError(
                f"tag {self.tag!r} of row {rows[wrong[0]]} is {shown}, and TokenBudgetSampler needs the number of "
                f"tokens there, finite and not negative; put it with the sample"
            )
        return [float(length) for length in found.reshape(len(groups), -1).sum(axis=1)]

    def _groups_in(self, batch_size: int, config: Mapping[str, Any]) -> int:
        check_batch_size(batch_size)
        size = self._group_size(config)
        if batch_size % size:
            raise InvalidArgumentError(f"batch_size ({batch_size}) must be a multiple of n_samples_per_prompt ({size})")
        return batch_size // size
