"""The interface of samplers: `BaseSampler` for all, `RankConsistentSampler` for those whose batches belong to ranks.

A sampler called directly keeps what it dealt in `_states`. In a system, the controller keeps dealt batches itself, and
asks built-in samplers only for `validate`, `deal_key`, `deal` and `remainder`. This module does not depend on
partitions, fields or messages.
"""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

import numpy as np

from transfer_queue.errors import InvalidArgumentError

# What one caller gets: the indexes in the batch, in its order, and those that are consumed with it.
Share: TypeAlias = tuple[list[int], list[int]]
Self = TypeVar("Self", bound="BaseSampler")

GROUP_SIZE = "n_samples_per_prompt"


@dataclass(frozen=True)
class Deal:
    """A deal whose samples are chosen, and which remains to be divided over the ranks.

    Example:
        >>> from transfer_queue.sampler.base import Deal
        >>> deal = Deal(size=2, rows=np.array([4, 5]), run=lambda: {0: ([4], [4]), 1: ([5], [5])})
        >>> sorted(deal.run())
        [0, 1]
    """

    size: int
    """The number of items to divide."""
    rows: np.ndarray
    """The global indexes of the samples, int64."""
    run: Callable[[], dict[int, Share]]
    """Computes the share of each rank. It uses only copies, so that it may run in another thread."""


@runtime_checkable
class ReadyIndexes(Protocol):
    """The ready rows of a partition whose groups are known: ascending global indexes, read lazily.

    A `collections.abc.Sequence[int]` with one more method. Samplers read slices of it and never the whole.

    Example:
        >>> from transfer_queue.sampler.base import ReadyIndexes
        >>> isinstance([4, 5, 6], ReadyIndexes)
        False
    """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> list[int]: ...
    def __iter__(self) -> Iterator[int]: ...
    def whole_groups(self, size: int) -> Iterator[list[int]]:
        """Iterate over the complete groups of a size of which all members are ready.

        Args:
            size: The number of samples in a group.

        Yields:
            The members of each group, ascending; groups in the order of their first members.
        """
        ...


class BaseSampler(ABC):
    """Base class of samplers: chooses the next batch from the ready samples. Subclasses define `sample`.

    Entries of the form `_states[partition_id][task_name][dp_rank][batch_index]` are found by `has_cached_result` and
    removed by `clear_cache`.

    Example:
        >>> class NewestFirst(tq.BaseSampler):
        ...     def sample(self, ready_indexes, batch_size, *args, **kwargs):
        ...         batch = list(ready_indexes[-batch_size:])
        ...         return batch, batch
        >>> NewestFirst()([3, 4, 5, 6], 2)
        ([5, 6], [5, 6])
    """

    _states: dict[Any, Any]
    """What the sampler keeps between calls, one dict for each instance; {} at first."""

    wants_list: bool = True
    """Whether the controller makes a list of the ready rows for a user's sampler.

    With False it passes a lazy `ReadyIndexes`, which costs only what the sampler reads. Default: True.
    """
    sampling_entries: Collection[str] = ()
    """The entries of a sampling_config that a built-in sampler uses besides those that choose sampler, rank and batch.

    A warning names other entries. A user's sampler may use any entry.
    """

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        """Make `_states` here, so that it exists even if a subclass does not call `__init__` of its base."""
        self = super().__new__(cls)
        self._states = {}
        return self

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def sample(self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any) -> Share:
        """Choose a batch.

        A row that is sampled and not consumed stays ready, and may be dealt again. `consumed` may contain rows that are
        not sampled. The controller checks that all rows are in `ready_indexes`, that no list repeats one, and that
        `sampled` has at most `batch_size` rows.

        Args:
            ready_indexes: The global indexes of the samples that are ready and not consumed. The controller passes them
                in ascending order.
            batch_size: The number of samples in the batch.
            *args: Further positional arguments; built-in samplers ignore them.
            **kwargs: The entries of the sampling_config, with `task_name`, `partition_id` and `partition`: a read-only
                view with `partition_id` and `get_custom_meta(indexes) -> {index: tag}`.

        Returns:
            (sampled, consumed), two lists of global indexes; ([], []) if no batch can be dealt now.

        Raises:
            InvalidArgumentError: The request can never be met.

        Example:
            >>> tq.SequentialSampler().sample([3, 4, 5, 6], 2)
            ([3, 4], [3, 4])
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Share:
        """Return `sample` of the same arguments."""
        return self.sample(*args, **kwargs)

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:  # noqa: B027  # optional
        """Check a request. The default accepts every request.

        Args:
            batch_size: The number of samples in the batch.
            sampling_config: The sampling_config of the request, with `task_name` and `partition_id`.

        Raises:
            InvalidArgumentError: No state of the system could ever meet the request.

        Example:
            >>> tq.SequentialSampler().validate(2, {})
        """

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """Return the largest batch size of a last deal: these rows are ready, and no more will be.

        Args:
            ready_indexes: The global indexes of the ready rows.
            **config: The keyword arguments of `sample`.

        Returns:
            The batch size, which is the number of ready rows by default.

        Example:
            >>> tq.SequentialSampler().remainder([3, 4, 5])
            3
        """
        return len(ready_indexes)

    def deals_in_order(self, sampling_config: Mapping[str, Any]) -> bool:
        """Return whether several equal requests, one after the other, get what one request for all of it would get.

        The controller then meets waiting requests together.

        Args:
            sampling_config: The sampling_config of the requests.

        Returns:
            True if so; False by default.

        Example:
            >>> tq.SequentialSampler().deals_in_order({})
            True
        """
        return False

    def passes_over(self, ready_indexes: Sequence[int], **config: Any) -> dict[str, list[int]]:
        """Return rows that the task shall never be dealt. The controller calls this before every deal.

        The controller marks these rows as consumed and counts them by reason. This method changes nothing.

        Args:
            ready_indexes: The global indexes of the ready rows.
            **config: The keyword arguments of `sample`.

        Returns:
            Reason -> rows; {} by default.

        Example:
            >>> tq.SequentialSampler().passes_over([3, 4, 5])
            {}
        """
        return {}

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None) -> bool:
        """Return whether the caller's batch was dealt before, so that it can be fetched although nothing is ready.

        Args:
            partition_id: The partition.
            task_name: The task.
            sampling_config: The sampling_config of the caller, with `dp_rank` and `batch_index`.

        Returns:
            True if the batch was dealt before.

        Example:
            >>> tq.SequentialSampler().has_cached_result("train_0", "update", {"dp_rank": 0, "batch_index": 0})
            False
        """
        config = sampling_config or {}
        return self._cached(partition_id, task_name, config.get("dp_rank"), config.get("batch_index")) is not None

    def clear_cache(self, partition_id: str) -> None:
        """Forget what was dealt of a partition.

        Args:
            partition_id: The partition.

        Example:
            >>> tq.SequentialSampler().clear_cache("train_0")
        """
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """Return a copy of the state of this sampler, for `load_checkpoint` of a sampler of the same class.

        Returns:
            The state.

        Example:
            >>> tq.SequentialSampler().save_checkpoint()
            {'states': {}}
        """
        return {"states": copy.deepcopy(self._states)}

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the state of this sampler.

        Args:
            state: What `save_checkpoint` returned.

        Raises:
            InvalidArgumentError: `state` is something else.

        Example:
            >>> sampler = tq.SequentialSampler()
            >>> sampler.load_checkpoint(sampler.save_checkpoint())
        """
        self._states = copy_saved_part(state, "states")

    def _cached(self, *path: Any) -> Any:
        """Return the entry at `_states[path[0]][path[1]]...`; None if there is none."""
        entry: Any = self._states
        for key in path:
            entry = entry.get(key) if isinstance(entry, dict) else None
        return entry


class RankConsistentSampler(BaseSampler):
    """Base class of samplers that return the same batch to every caller of one rank that asks for one batch index.

    Subclasses define the key of a batch (`deal_key`) and what is dealt (`deal`). A sampler that is called directly
    caches the batch in `sample`; entries stay until `clear_cache`.

    Example:
        >>> sampler = tq.RankAwareSampler()
        >>> config = {"task_name": "update", "partition_id": "train_0", "dp_rank": 0, "batch_index": 0}
        >>> sampler.sample([3, 4, 5], 2, **config)
        ([3, 4], [3, 4])
        >>> sampler.sample([5, 6, 7], 2, **config)
        ([3, 4], [3, 4])
    """

    sampling_entries: Collection[str] = ("dp_size",)
    deals_rounds = False
    """Whether a deal always gives every rank its share. A smaller last round is then one deal, too."""
    deals_finally = False
    """Whether `deal` takes `final=True` and then decides itself what the last rounds of a sealed partition are."""
    dp_size: int | None = None
    """The number of ranks; None if it is not known."""
    dp_size_given: bool = True
    """Whether a request with another number than `dp_size` is refused. False: the number of the request counts."""
    drop_last = False
    """Whether samples that do not suffice for `batch_size` for every rank are dealt to none after a seal."""

    @abstractmethod
    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return the key under which the requested batch is kept.

        Args:
            sampling_config: The sampling_config of the request.

        Returns:
            (dp_rank, batch_index); None if the batch is not to be kept.

        Raises:
            InvalidArgumentError: They are not non-negative ints, or are missing although required.

        Example:
            >>> tq.RankAwareSampler().deal_key({"dp_rank": 1, "batch_index": 0})
            (1, 0)
        """

    @abstractmethod
    def deal(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> dict[int, Share]:
        """Return the shares of one deal. Changes nothing.

        Args:
            ready_indexes: The global indexes of the ready rows.
            batch_size: The number of samples in the batch of one rank.
            **config: The keyword arguments of `sample`.

        Returns:
            Rank -> (sampled, consumed); {} if the deal cannot be met now. A share that is not to be kept has the key 0.

        Raises:
            InvalidArgumentError: A deal can never have this `batch_size`.

        Example:
            >>> tq.RankAwareSampler(dp_size=2).deal([3, 4, 5], 1, dp_rank=0, batch_index=0)
            {0: ([3], [3]), 1: ([4], [4])}
        """

    def prepare(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> Deal | None:
        """Do the same as `deal` in two steps: choose the samples, which is quick, and divide them later.

        Args:
            ready_indexes: See `deal`.
            batch_size: See `deal`.
            **config: See `deal`.

        Returns:
            The deal; None if it cannot be met now.

        Raises:
            InvalidArgumentError: See `deal`.

        Example:
            >>> deal = tq.RankAwareSampler().prepare([3, 4, 5], 1, dp_rank=0, batch_index=0)
            >>> deal.run()
            {0: ([3], [3])}
        """
        shares = self.deal(ready_indexes, batch_size, **config)
        return Deal(0, np.zeros(0, "i8"), lambda: shares) if shares else None

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Raise InvalidArgumentError for a batch_size or a rank that is not valid."""
        check_batch_size(batch_size)
        self.deal_key(sampling_config)
        rank, ranks = validated_count(sampling_config, "dp_rank") or 0, self.ranks(sampling_config)
        if ranks is not None and rank >= ranks:
            raise InvalidArgumentError(f"dp_rank ({rank}) must be less than dp_size ({ranks})")

    def ranks(self, sampling_config: Mapping[str, Any]) -> int | None:
        """Return the number of ranks: `dp_size` of the request, or else of the sampler.

        Args:
            sampling_config: The sampling_config of the request.

        Returns:
            The number of ranks; None if neither has it.

        Raises:
            InvalidArgumentError: The two differ, and the sampler was made with a number (`dp_size_given`).

        Example:
            >>> tq.RankAwareSampler().ranks({"dp_size": 4})
            4
        """
        wanted = validated_count(sampling_config, "dp_size")
        if wanted is None:
            return self.dp_size
        if self.dp_size_given and self.dp_size not in (None, wanted):
            raise InvalidArgumentError(
                f"dp_size ({wanted}) must be equal to that of the task's sampler, which is {self.dp_size}. A dataset "
                f"that was made without dp_size= sends the number of dp_ranks of the processes of torch.distributed; "
                f"pass dp_size= to it if these are not all ranks"
            )
        return wanted

    def deals_in_order(self, sampling_config: Mapping[str, Any]) -> bool:
        """Return True if a deal is only for the rank that asks."""
        return self.ranks(sampling_config) is None

    def _ranks_of_deal(self, rank: int, config: Mapping[str, Any]) -> Sequence[int]:
        """Return the ranks that a deal is for: all of them, or the one that asks if their number is not known."""
        known = self.ranks(config)
        return [rank] if known is None else range(known)

    def _take_dp_size(self, dp_size: int | None, otherwise: int | None = None) -> None:
        """Set the number of ranks with which the sampler is made. otherwise: the number if it is made without one."""
        self.dp_size_given = dp_size is not None
        self.dp_size = otherwise if dp_size is None else validated_positive(dp_size, "dp_size")

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Share:
        """Return the caller's batch: the one dealt under its key before, or a new deal. See `BaseSampler.sample`.

        Batches of two tasks are independent of each other. Without a partition_id, it is that of `partition`.
        """
        check_batch_size(batch_size)
        config = self._completed({**kwargs, "task_name": task_name, "partition_id": partition_id})
        names = _names(config)
        key = self.deal_key(config)
        if not self._takes_part(batch_size, config) or batch_size == 0:
            return [], []
        if key is None:
            return self.deal(ready_indexes, batch_size, **config).get(0, ([], []))
        entry = self._cached(*names, *key)
        if entry is None:
            self._keep(names, key[1], self.deal(ready_indexes, batch_size, **config))
            entry = self._cached(*names, *key)
        return ([], []) if entry is None else self._share(entry)

    def _completed(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a direct call of `sample`, with the defaults of this sampler."""
        return config

    def _takes_part(self, batch_size: int, config: Mapping[str, Any]) -> bool:
        """Return whether a deal has a share for the caller's rank. Raises InvalidArgumentError for a bad request."""
        return True

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None) -> bool:
        """Return whether the caller's batch was dealt before."""
        try:
            key = self.deal_key(sampling_config or {})
        except InvalidArgumentError:
            return False
        return key is not None and self._cached(partition_id, task_name, *key) is not None

    def keep_only(self, partition_id: str, task_name: str, batches: Collection[tuple[int, int]]) -> None:
        """Forget what was dealt to a task, except for some batches.

        Args:
            partition_id: The partition.
            task_name: The task.
            batches: The (dp_rank, batch_index) of the batches to keep.

        Example:
            >>> tq.RankAwareSampler().keep_only("train_0", "update", [(0, 1)])
        """
        ranks = self._states.get(partition_id, {}).get(task_name, {})
        for rank, kept in ranks.items():
            for batch_index in [index for index in kept if (rank, index) not in batches]:
                del kept[batch_index]

    def _keep(self, names: tuple[str, str], batch_index: int, shares: dict[int, Share]) -> None:
        """Cache all shares of one deal. names: (partition_id, task_name)."""
        for rank, share in shares.items():
            ranks = self._states.setdefault(names[0], {}).setdefault(names[1], {})
            ranks.setdefault(rank, {})[batch_index] = self._entry(share)

    def _entry(self, share: Share) -> Any:
        """Return a share as it is cached."""
        return share

    def _share(self, entry: Any) -> Share:
        """Return a cached share as new lists."""
        sampled, consumed = entry
        return list(sampled), list(consumed)


class RoundSampler(RankConsistentSampler):
    """Base class of samplers whose deals are for all ranks at once. Subclasses define `prepare`.

    Example:
        >>> tq.SeqlenBalancedSampler(dp_size=2).deal_key({"batch_index": 3})
        (0, 3)
    """

    deals_rounds = True
    dp_size: int

    def _completed(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**config, **{name: validated_count(config, name) or 0 for name in ("dp_rank", "batch_index")}}

    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return (dp_rank, batch_index), with dp_rank 0 if it is not given; None without batch_index."""
        rank, batch = validated_count(sampling_config, "dp_rank") or 0, validated_count(sampling_config, "batch_index")
        return None if batch is None else (rank, batch)

    def deal(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> dict[int, Share]:
        """Return the shares of all ranks, or of the caller alone without batch_index.

        Args:
            ready_indexes: See `RankConsistentSampler.deal`.
            batch_size: See `RankConsistentSampler.deal`.
            **config: See `RankConsistentSampler.deal`; `partition` is the object to read the tags from.

        Returns:
            Rank -> (sampled, consumed); {} if the deal cannot be met now.

        Raises:
            InvalidArgumentError: A length is not valid, or no deal can have this `batch_size`.
        """
        prepared = self.prepare(ready_indexes, batch_size, **config)
        return {} if prepared is None else prepared.run()


def overrides_sample(sampler: BaseSampler) -> bool:
    """Return whether a user defined this sampler's `sample`, so that `deal` does not replace it."""
    return "sample" in vars(sampler) or not _samples_as_here(type(sampler))


@lru_cache(maxsize=256)
def _samples_as_here(kind: type[BaseSampler]) -> bool:
    return of_package(next(each for each in kind.__mro__ if "sample" in vars(each)))


@lru_cache(maxsize=256)
def of_package(kind: type) -> bool:
    """Return whether a class is defined in this package."""
    return kind.__module__.rpartition(".")[0] == __package__


# --- shared by the built-in samplers


def check_batch_size(batch_size: int) -> None:
    """Raise InvalidArgumentError for a negative batch_size."""
    if batch_size < 0:
        raise InvalidArgumentError(f"batch_size {batch_size} must be greater than or equal to 0")


def validated_count(config: Mapping[str, Any], name: str) -> int | None:
    """Return the non-negative int of this name; None if it is missing or None. Raises InvalidArgumentError."""
    value = config.get(name)
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} must be an int, got a {type(value).__name__}") from None
    if number < 0:
        raise InvalidArgumentError(f"{name} {number} must be greater than or equal to 0")
    return number


def validated_positive(value: int, name: str) -> int:
    """Return the value as an int. Raises InvalidArgumentError unless it is positive."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} must be positive, got a {type(value).__name__}") from None
    if number < 1:
        raise InvalidArgumentError(f"{name} must be positive, got {number}")
    return number


def split_in_order(ranks: Sequence[int], samples: list[int]) -> dict[int, Share]:
    """Divide samples into consecutive runs of equal length, one for each rank."""
    each = len(samples) // len(ranks)
    runs = [samples[at * each : (at + 1) * each] for at in range(len(ranks))]
    return {rank: (run, list(run)) for rank, run in zip(ranks, runs, strict=True)}


def _names(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return (partition_id, task_name) as given; without a partition_id, that of the partition.

    Raises InvalidArgumentError if one is not a str, because then the arguments by position are in another order.
    """
    for name in ("task_name", "partition_id"):
        value = config.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidArgumentError(
                f"{name} must be a str, got {value!r}; the arguments of sample are ready_indexes, batch_size, "
                f"task_name, partition_id in this order, and all others are passed by keyword"
            )
    partition_id = config.get("partition_id") or getattr(config.get("partition"), "partition_id", None)
    return partition_id if isinstance(partition_id, str) else "", config.get("task_name") or ""


def copy_saved_part(state: Mapping[str, Any], name: str) -> dict[Any, Any]:
    """Return a copy of one part of a saved state. Raises InvalidArgumentError if it is missing."""
    part = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(part, dict):
        raise InvalidArgumentError(
            f"state must be a dict with {name!r} that save_checkpoint returned, got a {type(state).__name__}"
        )
    return copy.deepcopy(part)
