"""Decides what a claim gets. Reads the state, changes nothing, gives records and the dealt rows.

Built-in samplers are asked through `validate`, `needed`, `deal_key`, `deal` and `remainder`, all without side
effects; what they dealt is kept here, in the state. A user's sampler is asked through `sample`, keeps its own
state, and its outcome is checked: rows that it was not offered fail its caller, and nothing is dealt.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer_queue.core import records as r
from transfer_queue.core.partition import Partition
from transfer_queue.core.ready import ReadySet
from transfer_queue.core.state import State
from transfer_queue.errors import BatchGoneError, InvalidArgumentError, SamplerError, TransferQueueError
from transfer_queue.messages import Claim
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SequentialSampler
from transfer_queue.sampler.base import BaseSampler, RankConsistentSampler, overrides_sample


class PartitionView:
    """A partition as samplers see it; read-only. group_size: members of a declared group, where known."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.partition_id = partition.name
        self.group_size = partition.groups.size

    def get_custom_meta(self, indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """{global index: tag} of those of these rows that live."""
        wanted = np.asarray(indexes, "i8")
        positions = self._partition.rows.positions_of(wanted)
        there = positions >= 0
        tags = self._partition.tags_of(positions[there])
        live = wanted[there].tolist()
        return {i: dict(tag) for i, tag in zip(live, tags)} if tags is not None else {i: {} for i in live}


class Outcome:
    """What a claim gets: rows (global indexes in dealt order), the records that say so, or the end.

    rows None: nothing now. ended: nothing ever.
    """

    __slots__ = ("ended", "records", "rows")

    def __init__(
        self, rows: np.ndarray | None = None, records: Sequence[r.AnyRecord] = (), ended: bool = False
    ) -> None:
        self.rows = rows
        self.records = list(records)
        self.ended = ended


NOTHING = Outcome()
ENDED = Outcome(ended=True)


class Samplers:
    """The system's sampler, and the built-in ones that a claim may name in `sampling_config["sampler"]`."""

    def __init__(self, default: BaseSampler) -> None:
        self.default = default
        self._named: dict[tuple[str, int], BaseSampler] = {}

    def of(self, sampling: dict[str, Any]) -> BaseSampler:
        """The sampler for a claim."""
        name = sampling.get("sampler")
        if name is None:
            return self.default
        group = sampling.get("n_samples_per_prompt", 1)
        key = (str(name), group if isinstance(group, int) else 1)
        if key not in self._named:
            self._named[key] = _built_in(*key)
        return self._named[key]


def _built_in(name: str, group: int) -> BaseSampler:
    if name == "SequentialSampler":
        return SequentialSampler()
    if name == "RankAwareSampler":
        return RankAwareSampler()
    if name == "GRPOGroupNSampler":
        return GRPOGroupNSampler(n_samples_per_prompt=group)
    raise InvalidArgumentError(
        f"a claim may name SequentialSampler, RankAwareSampler or GRPOGroupNSampler, not {name!r}; "
        f"set any other sampler for the whole system in controller.sampler"
    )


def deals_itself(sampler: BaseSampler) -> bool:
    """Whether the outcome depends on the state alone: a built-in sampler, not one of a user's."""
    return isinstance(sampler, (RankConsistentSampler, SequentialSampler)) and not overrides_sample(sampler)


def forget(sampler: BaseSampler, partition: str) -> None:
    """A partition is dropped: a user's sampler forgets what it keeps of it."""
    if not deals_itself(sampler):
        _asked(sampler, sampler.clear_cache, partition)


def sampling_of(claim: Claim) -> dict[str, Any]:
    """The claim's sampling_config with task and partition filled in."""
    return {"task_name": claim.task, "partition_id": claim.partition, **claim.sampling}


def check(samplers: Samplers, claim: Claim) -> None:
    """Raises for a claim that can never be right."""
    if claim.count < 0:
        raise InvalidArgumentError(f"batch_size must not be negative, and is {claim.count}")
    if not claim.fields:
        raise InvalidArgumentError("data_fields is empty: name at least one field")
    sampler = samplers.of(claim.sampling)
    try:
        sampler.validate(claim.count, sampling_of(claim))
    except TransferQueueError:
        raise
    except Exception as error:
        raise _sampler_error(sampler, error) from None


def decide(state: State, samplers: Samplers, claim: Claim) -> Outcome:
    """What this claim gets now."""
    partition = state.partitions.get(claim.partition)
    if partition is None:
        return NOTHING
    sampler = samplers.of(claim.sampling)
    if isinstance(sampler, RankConsistentSampler) and not overrides_sample(sampler):
        outcome = _decide_by_deal(partition, sampler, claim)
    else:
        outcome = _decide_by_sample(partition, sampler, claim)
    if outcome.rows is None and not outcome.ended and claim.finite and partition.wholly_consumed(claim.task):
        return ENDED
    return outcome


def _decide_by_deal(partition: Partition, sampler: RankConsistentSampler, claim: Claim) -> Outcome:
    sampling = sampling_of(claim)
    key = sampler.deal_key(sampling)
    dealt = partition.dealt.get(claim.task)
    if key is not None and dealt is not None:
        batch = dealt.find(*key)
        if batch is not None:
            if batch.batch_size != claim.count:
                raise InvalidArgumentError(
                    f"batch {key[1]} of dp_rank {key[0]} for task {claim.task!r} in partition {partition.name!r} was "
                    f"dealt with batch_size {batch.batch_size} and is asked with {claim.count}; all replicas of a "
                    f"rank must ask alike"
                )
            return Outcome(batch.rows)
        if dealt.gone(*key):
            raise BatchGoneError(
                f"batch {key[1]} of dp_rank {key[0]} for task {claim.task!r} in partition {partition.name!r} was dealt "
                f"before, and its rows are cleared since; it is not replaced by other rows. Ask for the next "
                f"batch_index, or clear rows only when all replicas have fetched them."
            )
    declared = partition.groups.size
    wanted = getattr(sampler, "n_samples_per_prompt", declared)
    if declared is not None and wanted != declared:
        raise InvalidArgumentError(
            f"partition {partition.name!r} has groups of {declared} samples (its group_size), but "
            f"{type(sampler).__name__} deals groups of {wanted}; set n_samples_per_prompt to {declared}"
        )
    ready = partition.ready_set(claim.task, tuple(claim.fields))
    offered = partition.offered(ready)
    view = PartitionView(partition)
    final = _is_final(partition, ready)
    for size in dict.fromkeys((claim.count, sampler.remainder(offered) if final else 0)):
        if not 0 < size <= claim.count or ready.total < (sampler.needed(size) if final else claim.count):
            continue
        shares = sampler.deal(offered, size, **{**sampling, "partition": view})
        if shares:
            return _dealt(claim, key, shares)
    return ENDED if final else NOTHING


def _dealt(
    claim: Claim, key: tuple[int, int] | None, shares: dict[int, tuple[list[int], list[int]]]
) -> Outcome:
    kept = [r.Share(rank, _column(sampled)) for rank, (sampled, _) in sorted(shares.items())]
    consumed = [row for _, taken in shares.values() for row in taken]
    mine = shares[key[0]] if key is not None else next(iter(shares.values()))
    batch_index = key[1] if key is not None else None
    record = r.Dealt(claim.partition, claim.task, batch_index, claim.count, kept, _column(consumed))
    return Outcome(np.array(mine[0], "i8"), [record])


def _decide_by_sample(partition: Partition, sampler: BaseSampler, claim: Claim) -> Outcome:
    sampling = sampling_of(claim)
    ready = partition.ready_set(claim.task, tuple(claim.fields))
    built_in = deals_itself(sampler)
    size = claim.count
    final = False
    announced = False
    if ready.total < size:
        announced = not built_in and _asked(sampler, sampler.has_cached_result, claim.partition, claim.task, sampling)
        final = _is_final(partition, ready)
        if not announced:
            if not final:
                return NOTHING
            size = ready.total
            if not size:
                return ENDED
    if claim.probe and not built_in:
        # a user's sampler may have side effects: it is asked only by a claim that takes what it deals
        return Outcome(np.zeros(0, "i8"))
    offered: Sequence[int] = partition.offered(ready)
    if not built_in:
        offered = list(offered)
    keywords = {**sampling, "partition": PartitionView(partition)}
    sampled, consumed = _asked(sampler, sampler, offered, size, **keywords)
    rows, taken = _checked(partition, sampler, ready, sampled, consumed, announced or built_in)
    if not len(rows):
        return ENDED if final else NOTHING
    record = r.Dealt(claim.partition, claim.task, None, claim.count, [r.Share(0, rows.tobytes())], taken.tobytes())
    return Outcome(rows, [record] if len(taken) else [])


def _checked(
    partition: Partition, sampler: BaseSampler, ready: ReadySet, sampled: Any, consumed: Any, trusted: bool
) -> tuple[np.ndarray, np.ndarray]:
    try:
        rows, taken = np.array(list(sampled), "i8"), np.array(list(consumed), "i8")
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplerError(
            f"{type(sampler).__name__}.sample must give two lists of global indexes, (sampled, consumed): {error}"
        ) from None
    both = np.concatenate([rows, taken])
    positions = partition.rows.positions_of(both)
    if (positions < 0).any() or not (trusted or ready.contains(positions)):
        raise SamplerError(
            f"{type(sampler).__name__}.sample gave rows that it was not offered, among them {both[:5].tolist()}; "
            f"nothing was dealt"
        )
    return rows, taken


def _is_final(partition: Partition, ready: ReadySet) -> bool:
    """No row that is not ready now will be: the partition is sealed and every live row is ready or consumed."""
    return partition.sealed and partition.rows.count - partition.tasks.get(ready.task, 0) == ready.total


def _asked(sampler: BaseSampler, function: Any, *arguments: Any, **keywords: Any) -> Any:
    try:
        return function(*arguments, **keywords)
    except TransferQueueError:
        raise
    except Exception as error:
        raise _sampler_error(sampler, error) from None


def _sampler_error(sampler: BaseSampler, error: Exception) -> TransferQueueError:
    kind = InvalidArgumentError if isinstance(error, ValueError) else SamplerError
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return kind(f"the sampler {type(sampler).__name__} raised {type(error).__name__}: {error}\n{told}")


def _column(rows: list[int]) -> bytes:
    return np.array(rows, "i8").tobytes()
