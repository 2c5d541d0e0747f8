"""What a sampler is: `BaseSampler` for all, `RankConsistentSampler` for those whose batches belong to ranks.

A sampler works alone, and then keeps what it dealt in `_states`; or it works for the controller, which keeps dealt
batches itself and asks built-in samplers only for `validate`, `deal_key`, `deal` and `remainder`. Nothing here knows of
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
    """A deal whose samples are chosen. size: how many items it divides. rows: their indexes, i8.

    run: computes the shares from copies alone, so that it may run in another thread while all else changes.
    """

    size: int
    rows: np.ndarray
    run: Callable[[], dict[int, Share]]


@runtime_checkable
class ReadyIndexes(Protocol):
    """Ready rows of a partition whose groups are known: ascending global indexes, read lazily.

    A `collections.abc.Sequence[int]` with one method more. Samplers take slices and never the whole.
    """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> list[int]: ...
    def __iter__(self) -> Iterator[int]: ...
    def whole_groups(self, size: int) -> Iterator[list[int]]:
        """The groups of `size` of which all are ready: members ascending, groups by their first member."""
        ...


class BaseSampler(ABC):
    """Chooses the next batch among the ready samples. Subclasses define `sample`.

    _states: {} at first, one dict an instance; what a sampler wants to keep between calls. Entries of the form
    `_states[partition_id][task_name][dp_rank][batch_index]` are found by `has_cached_result` and dropped by
    `clear_cache`.
    wants_list: the controller gives a user's sampler the ready rows as a list, made for it; one that says False gets
    them as they are, a lazy `ReadyIndexes`, and pays only for what it reads.
    sampling_entries: the entries of a sampling_config that a built-in sampler takes besides those that choose the
    sampler, the rank and the batch. A warning names other entries. A user's sampler takes any entry.
    """

    _states: dict[Any, Any]
    wants_list: bool = True
    sampling_entries: Collection[str] = ()

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        """Makes `_states` here, so that it is there though a subclass may not call `__init__` of its base."""
        self = super().__new__(cls)
        self._states = {}
        return self

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def sample(self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any) -> Share:
        """Deals a batch.

        ready_indexes: global indexes of samples that are ready and not consumed; the controller gives them
        ascending. kwargs: what the caller's sampling_config holds, with task_name, partition_id and, as `partition`,
        a read-only view with `partition_id` and `get_custom_meta(indexes) -> {index: tags}`.
        Returns (sampled, consumed), two lists of int; ([], []) if no batch can be dealt now. The controller checks
        that all of them are in ready_indexes, that no list has an index twice, and that sampled has at most batch_size
        indexes. A row that is sampled and not consumed stays ready, and may be dealt again. consumed may have rows
        that are not sampled.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Share:
        """The same as `sample`."""
        return self.sample(*args, **kwargs)

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:  # noqa: B027  # optional
        """Raises InvalidArgumentError for a request that no state of the system could ever meet.

        sampling_config has task_name and partition_id filled in.
        """

    def remainder(self, ready_indexes: Sequence[int], **config: Any) -> int:
        """The largest batch_size of a last deal: these rows are ready and no further ones will be.

        config: what `sample` takes by keyword.
        """
        return len(ready_indexes)

    def deals_in_order(self, sampling_config: Mapping[str, Any]) -> bool:
        """Whether callers that ask alike, one after the other, get what one of them would who asked for it all."""
        return False

    def passes_over(self, ready_indexes: Sequence[int], **config: Any) -> dict[str, list[int]]:
        """Rows that the task shall never be dealt, by reason. Changes nothing; asked before every deal.

        config: what `sample` takes by keyword. The controller takes these rows as consumed, and counts them by reason.
        """
        return {}

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None) -> bool:
        """Whether this caller's batch is dealt already, so that it can be asked for though nothing is ready."""
        config = sampling_config or {}
        return self._cached(partition_id, task_name, config.get("dp_rank"), config.get("batch_index")) is not None

    def clear_cache(self, partition_id: str) -> None:
        """Forgets what was dealt of this partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """What `load_checkpoint` of a sampler of the same class takes; a copy."""
        return {"states": copy.deepcopy(self._states)}

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replaces what is kept by what `save_checkpoint` returned. Raises InvalidArgumentError for anything else."""
        self._states = saved(state, "states")

    def _cached(self, *path: Any) -> Any:
        """The entry at _states[path[0]][path[1]]...; None where there is none."""
        found: Any = self._states
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found


class RankConsistentSampler(BaseSampler):
    """Gives every caller with the same task, partition, dp_rank and batch_index the same batch.

    Subclasses say who is meant (`deal_key`) and what is dealt (`deal`). Alone, `sample` caches it; entries stay
    until `clear_cache`.

    deals_rounds: a deal always gives every rank its share; a smaller last one is made by a deal of its own.
    deals_finally: `deal` takes `final=True`, and says with it what the last rounds of a sealed partition are.
    dp_size: how many ranks there are, None where it is not known. drop_last: after a seal, what is less than
    batch_size for every rank is dealt to none. Through the system both make ends equal (`core.ends`).
    """

    sampling_entries: Collection[str] = ("dp_size",)
    deals_rounds = False
    deals_finally = False
    dp_size: int | None = None
    drop_last = False

    @abstractmethod
    def deal_key(self, sampling_config: Mapping[str, Any]) -> tuple[int, int] | None:
        """(dp_rank, batch_index) of the batch that is asked for; None where it is not to be kept.

        Raises InvalidArgumentError where they are no non-negative ints, or missing though required.
        """

    @abstractmethod
    def deal(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> dict[int, Share]:
        """The shares of one deal by dp_rank; {} where it cannot be met now. Changes nothing.

        config: what `sample` takes by keyword. A share that is not to be kept has the key 0.
        Raises InvalidArgumentError for a batch_size that can never be dealt.
        """

    def prepare(self, ready_indexes: Sequence[int], batch_size: int, **config: Any) -> Deal | None:
        """The same as `deal` in two steps, the first of which is short; None where it cannot be met now."""
        shares = self.deal(ready_indexes, batch_size, **config)
        return Deal(0, np.zeros(0, "i8"), lambda: shares) if shares else None

    def validate(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError for a batch_size or a rank that can never be right."""
        check_batch_size(batch_size)
        self.deal_key(sampling_config)
        rank, ranks = natural(sampling_config, "dp_rank") or 0, self.ranks(sampling_config)
        if ranks is not None and rank >= ranks:
            raise InvalidArgumentError(f"dp_rank ({rank}) must be less than dp_size ({ranks})")

    def ranks(self, sampling_config: Mapping[str, Any]) -> int | None:
        """How many ranks there are: dp_size, where it is None the claim's; None where nobody says.

        Raises InvalidArgumentError where the two differ.
        """
        said = natural(sampling_config, "dp_size")
        if self.dp_size is not None and said not in (None, self.dp_size):
            raise InvalidArgumentError(
                f"dp_size ({said}) must be equal to the sampler's, which is {self.dp_size}. A dataset that was made "
                f"without dp_size= sends the number of dp_ranks of the processes of torch.distributed; pass dp_size= "
                f"to it if these are not all ranks"
            )
        return said if self.dp_size is None else self.dp_size

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Share:
        """Return the caller's batch: the one dealt under its key before, or a new deal.

        Args:
            ready_indexes: Global indexes of the samples that are ready and not consumed.
            batch_size: Number of samples in the batch.
            task_name: The task that asks. Batches of two tasks are independent of each other.
            partition_id: The partition that the samples belong to. Default: the id of `partition`, if there is one.
            *args: Ignored.
            **kwargs: The entries of the sampling_config, and `partition`.

        Returns:
            (sampled, consumed), two lists of global indexes; ([], []) if no batch can be dealt now.

        Raises:
            InvalidArgumentError: An argument is not allowed, for example a negative batch_size.
        """
        check_batch_size(batch_size)
        config = {**kwargs, "task_name": task_name, "partition_id": partition_id}
        names = _names(config)
        key = self.deal_key(config)
        if batch_size == 0:
            return [], []
        if key is None:
            return self.deal(ready_indexes, batch_size, **config).get(0, ([], []))
        entry = self._cached(*names, *key)
        if entry is None:
            self._keep(names, key[1], self.deal(ready_indexes, batch_size, **config))
            entry = self._cached(*names, *key)
        return ([], []) if entry is None else self._share(entry)

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None) -> bool:
        """Whether this caller's batch is dealt already."""
        try:
            key = self.deal_key(sampling_config or {})
        except InvalidArgumentError:
            return False
        return key is not None and self._cached(partition_id, task_name, *key) is not None

    def keep_only(self, partition_id: str, task_name: str, batches: Collection[tuple[int, int]]) -> None:
        """Forgets what was dealt to a task, but for these batches: (dp_rank, batch_index)."""
        ranks = self._states.get(partition_id, {}).get(task_name, {})
        for rank, kept in ranks.items():
            for batch_index in [index for index in kept if (rank, index) not in batches]:
                del kept[batch_index]

    def _keep(self, names: tuple[str, str], batch_index: int, shares: dict[int, Share]) -> None:
        """Caches all shares of one deal. names: (partition_id, task_name)."""
        for rank, share in shares.items():
            ranks = self._states.setdefault(names[0], {}).setdefault(names[1], {})
            ranks.setdefault(rank, {})[batch_index] = self._entry(share)

    def _entry(self, share: Share) -> Any:
        """A share as it is cached."""
        return share

    def _share(self, entry: Any) -> Share:
        """A cached share, in lists of its own."""
        sampled, consumed = entry
        return list(sampled), list(consumed)


def overrides_sample(sampler: BaseSampler) -> bool:
    """Whether a user wrote this sampler's `sample`, so that `deal` does not stand for it."""
    return "sample" in vars(sampler) or not _samples_as_here(type(sampler))


@lru_cache(maxsize=256)
def _samples_as_here(kind: type[BaseSampler]) -> bool:
    return of_package(next(each for each in kind.__mro__ if "sample" in vars(each)))


@lru_cache(maxsize=256)
def of_package(kind: type) -> bool:
    """Whether a class is one of this package."""
    return kind.__module__.rpartition(".")[0] == __package__


# --- shared by the built-in samplers


def check_batch_size(batch_size: int) -> None:
    """Raises InvalidArgumentError for a negative batch_size."""
    if batch_size < 0:
        raise InvalidArgumentError(f"batch_size {batch_size} must be greater than or equal to 0")


def natural(config: Mapping[str, Any], name: str) -> int | None:
    """The non-negative int of that name; None where it is missing or None. Raises InvalidArgumentError."""
    value = config.get(name)
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} must be an int, but is a {type(value).__name__}") from None
    if number < 0:
        raise InvalidArgumentError(f"{name} {number} must be greater than or equal to 0")
    return number


def positive(value: int, name: str) -> int:
    """The value as an int. Raises InvalidArgumentError unless it is a positive one."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} must be positive, but is a {type(value).__name__}") from None
    if number < 1:
        raise InvalidArgumentError(f"{name} must be positive, got {number}")
    return number


def in_order(ranks: Sequence[int], samples: list[int]) -> dict[int, Share]:
    """The samples in runs of equal length, one for each rank."""
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


def saved(state: Mapping[str, Any], name: str) -> dict[Any, Any]:
    """A copy of one part of what save_checkpoint returned. Raises InvalidArgumentError where it is not there."""
    found = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"load_checkpoint takes what save_checkpoint returned, a dict with {name!r} in it")
    return copy.deepcopy(found)
