"""The plan of a claim: what claims have in common that differ only in their rank and batch_index, resolved once.

A plan is kept until its partition ends, the samplers change, or the size of the declared groups changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any, cast

import msgspec
import numpy as np

from transfer_queue.core.context import Context, CoreService, observes
from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import Caller
from transfer_queue.core.samplers.calls import (
    AnySampler,
    InlineRunner,
    PartitionView,
    UserSampler,
    call_sampler,
    name_of,
)
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry, group_size
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.tables.ready_sets import ReadySet
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.claims import Claim
from transfer_queue.names import did_you_mean
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.sampler_spec import spec_of
from transfer_queue.sampler.sampler_wrapper import SamplerWrapper, built_in, dealer

LONGEST_LEASE = 1e9  # seconds
MAX_PLANS = 1024  # of one partition; clients choose what their claims ask for
OF_ONE_CLAIM = ("dp_rank", "batch_index")  # the entries of a sampling_config by which claims with one plan may differ

TAKEN_BY_ALL = frozenset({"sampler", "task_name", "partition_id", "partition", "dp_rank", "dp_size", "batch_index"})
"""The entries that a loader passes to any sampler, and those that choose a sampler."""

Key = tuple[int, int]  # dp_rank, batch_index


def rank_of(claim: Claim) -> int:
    """Return the dp_rank of a claim; 0 if it has none."""
    rank = claim.sampling.get("dp_rank")
    return rank if isinstance(rank, int) else 0


def consumer_of(claim: Claim) -> tuple[str, str, int]:
    """Return the consumer of a claim, by which its next claim is recognized: (partition, task, dp_rank)."""
    return claim.partition, claim.task, rank_of(claim)


def deal_record(
    claim: Claim, batch_index: int | None, size: int, shares: list[r.Share], consumed: bytes | None = None
) -> r.Dealt:
    """Return the record of a deal for a claim.

    batch_index: None if the batches belong to no rank. consumed: the rows that the task consumes; None: all.
    """
    taken = b"".join([share.rows for share in shares]) if consumed is None else consumed
    return r.Dealt(claim.partition, claim.task, batch_index, size, shares, taken, claim.lease is not None)


class OpenClaim(msgspec.Struct, frozen=True):
    """A claim that is not answered yet."""

    caller: Caller
    claim: Claim
    since: float
    """When it arrived, by the controller's clock."""
    waiting: ParkedRequest | None
    """The claim as a request that waits; None if it has just arrived."""


class ClaimPlan:
    """What claims with the same partition, task, fields, batch_size and sampling_config, but for the rank, share."""

    def __init__(self, samplers: SamplerRegistry, partition: Partition | None, claim: Claim) -> None:
        self.partition = partition
        """None if the partition does not exist."""
        self.task = claim.task
        self.fields = tuple(claim.fields)
        self.count = claim.count
        self.sampler: AnySampler = samplers.choose(claim.task, claim.sampling, partition)
        sampler = self.sampler
        self.declared = None if partition is None else (partition.groups.size, partition.groups.largest)
        """What the plan depends on that may change while the partition exists."""
        self.user = sampler if isinstance(sampler, UserSampler) else None
        """The sampler if it is a user's one, which may depend on anything and have side effects."""
        self.is_timed = self.user is not None and isinstance(self.user.runner, InlineRunner)
        """Whether the sampler runs in the controller's loop and is a user's one, so that its calls are timed."""
        self.dealer = None if isinstance(sampler, UserSampler) else dealer(sampler)
        """The innermost sampler if it is a built-in one whose batches belong to ranks."""
        self.group_size = group_size(sampler)
        """The number of samples in a group for the sampler; None if it deals single samples."""
        self.unit = self.group_size or 0
        """The number of samples in the groups that are dealt; 0 if single samples are dealt."""
        self.warning = _unused_entries(sampler, claim.sampling)
        """The sentence about entries of the sampling_config that have no effect; None if there are none."""
        self.uses_declared_size = False
        """Whether the group size is that of the declared `group_ids`."""
        self.groups_by_order = False
        """Whether the groups are formed by order of reservation, so that they may have rows of several clients."""
        overridden = type(sampler).passes_over is not BaseSampler.passes_over
        self.passes_over = overridden if self.user is None else self.user.runner.facts.passes
        """Whether the sampler may skip rows before a deal."""
        self.config: dict[str, Any] = {"task_name": claim.task, "partition_id": claim.partition, **claim.sampling}
        """The keyword arguments of the sampler, but for those of one claim."""
        for name in OF_ONE_CLAIM:
            self.config.pop(name, None)
        if partition is not None:
            self.uses_declared_size = (
                self.user is None and not getattr(sampler, "size_given", True) and partition.groups.largest > 1
            )
            self.groups_by_order = self.unit > 1 and not partition.groups.explicit
            self.unit = self.unit if self.unit > 1 or partition.groups.explicit else 0
            self.config["partition"] = PartitionView(partition)
        self.claim = claim
        """The first claim with this plan."""
        self._is_valid = False  # whether the sampler has accepted claims with this plan, of any rank

    def facts(self) -> tuple[object, ...]:
        """Return what is equal if the plan would be made equally now."""
        sampler = self.sampler if isinstance(self.sampler, UserSampler) else spec_of(self.sampler)
        groups = self.group_size, self.unit, self.uses_declared_size, self.groups_by_order
        return sampler, self.warning, groups, self.passes_over, self.is_timed

    @cached_property
    def cuts(self) -> bool:
        """Whether one deal for several of these claims can be cut into their batches, in order of arrival."""
        sampler = self.sampler
        if isinstance(sampler, UserSampler) or self.count % (self.group_size or 1):
            return False
        return sampler.deals_in_order(self.claim.sampling)

    def config_of(self, claim: Claim) -> dict[str, Any]:
        """Return the keyword arguments of the sampler for one claim."""
        return {**claim.sampling, **self.config}

    def key_of(self, claim: Claim) -> Key | None:
        """Return the (dp_rank, batch_index) of the batch for which a claim asks; None if it belongs to no rank."""
        if self.user is not None:
            return self.user.begin(claim).key
        return None if self.dealer is None else self.dealer.deal_key(claim.sampling)

    def ready_set(self) -> ReadySet:
        """Return the ready rows. The partition must exist."""
        return cast(Partition, self.partition).ready_set(self.task, self.fields)

    def available(self) -> int:
        """Return how many ready rows could be dealt; if groups are dealt, those in complete groups."""
        ready = self.ready_set()
        if not self.unit:
            return ready.total
        groups = cast(Partition, self.partition).groups
        return len(ready.whole_groups(self.unit, groups)) * (groups.size or self.unit)

    def is_final(self, ready: ReadySet) -> bool:
        """Return whether no further row can become ready: the partition is sealed and each row is ready or consumed.

        If the sampler deals groups, rows of groups that can never be complete do not count.
        """
        partition = cast(Partition, self.partition)
        if not partition.sealed:
            return False
        size, groups = self.group_size, partition.groups
        if partition.rows.count - partition.tasks.get(self.task, 0) == ready.total:
            return True
        return size is not None and all(
            groups.is_orphaned(group, size, sealed=True)
            for positions in ready.unready_positions(partition.rows)
            for group in np.unique(groups.groups_of(positions, size)).tolist()
        )

    # ------------------------------------------------------------ checks

    def check(self, claim: Claim, strict: bool) -> None:
        """Raise an error if a claim can never be valid. strict: see `SamplerRegistry.strict`."""
        if claim.count < 0:
            raise InvalidArgumentError(f"batch_size must not be negative, got {claim.count}")
        if not claim.fields:
            raise InvalidArgumentError("data_fields must not be empty; name at least one field")
        if claim.lease is not None and not 0 < claim.lease <= LONGEST_LEASE:
            raise InvalidArgumentError(
                f"lease must be from 0 (excluded) to {LONGEST_LEASE:g} seconds, got {claim.lease}"
            )
        if claim.replicas is not None and (claim.lease is None or claim.replicas < 1):
            raise InvalidArgumentError(
                f"replicas must be 1 or more, and needs a lease, got replicas {claim.replicas} and lease {claim.lease}"
            )
        if claim.least is not None and not 0 < claim.least <= claim.count:
            raise InvalidArgumentError(f"least must be from 1 to batch_size ({claim.count}), got {claim.least}")
        if strict and self.warning is not None:
            raise InvalidArgumentError(self.warning)
        if (claim.replicas or 1) > 1 and self.key_of(claim) is None:
            raise InvalidArgumentError(
                f"replicas is {claim.replicas}, but only batches with a (dp_rank, batch_index) are returned to several "
                f"replicas, and {name_of(self.sampler)} deals this batch to the first claim only; leave replicas out"
            )
        if not self._is_valid:
            self.validate(claim)
            self._is_valid = self.user is None and self.dealer is None

    def validate(self, claim: Claim) -> None:
        """Raise the sampler's error if a claim can never be met. It also says where the group size comes from."""
        sampler, size = self.sampler, self.group_size
        if isinstance(sampler, UserSampler):
            sampler.begin(claim)
            return
        try:
            call_sampler(sampler, sampler.validate, claim.count, self.config_of(claim))
        except InvalidArgumentError as error:
            if self.partition is None or self.partition.groups.size is not None or not self.uses_declared_size:
                if size is None or not claim.count % size:
                    raise
                raise InvalidArgumentError(
                    f"{error}. {name_of(sampler)} deals complete groups to task {claim.task!r}; a task that takes "
                    f"single samples needs another sampler: {{'controller': {{'task_samplers': {{{claim.task!r}: "
                    f"'SequentialSampler'}}}}}}"
                ) from None
            raise InvalidArgumentError(
                f"{error}. The groups declared in partition {self.partition.name!r} have up to {size} samples, and "
                f"n_samples_per_prompt was not set. If the samples of a group come in several puts, declare the size "
                f"of a group: create_partition(..., group_size=n), or n_samples_per_prompt of the sampler"
            ) from None

    def check_declared(self) -> None:
        """Raise InvalidArgumentError if the groups of the partition have another size than the sampler deals."""
        partition = cast(Partition, self.partition)
        declared = partition.groups.size
        if declared is not None and self.group_size not in (None, declared):
            raise InvalidArgumentError(
                f"partition {partition.name!r} has groups of {declared} samples (its group_size), but "
                f"{name_of(self.sampler)} deals groups of {self.group_size}; set n_samples_per_prompt to {declared}"
            )


class Plans(CoreService):
    """The plans of all partitions."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.samplers = context.samplers
        self._by_partition: dict[str, dict[Hashable, ClaimPlan]] = {}

    def of(self, partition: Partition | None, claim: Claim) -> ClaimPlan:
        """Return the plan of a claim, which is made for the first claim with it.

        partition: that of the claim; None if it does not exist.

        Raises:
            InvalidArgumentError: The claim names a sampler that no claim may name.
        """
        if partition is None:
            return ClaimPlan(self.samplers, None, claim)  # not kept: clients choose the names
        entries = ""
        if claim.sampling:
            entries = repr([entry for entry in claim.sampling.items() if entry[0] not in OF_ONE_CLAIM])
        key = claim.task, claim.count, tuple(claim.fields), entries
        plans = self._by_partition.setdefault(partition.name, {})
        plan = plans.get(key)
        if plan is None or plan.declared != (partition.groups.size, partition.groups.largest):
            if len(plans) == MAX_PLANS:
                plans.clear()
            plan = plans[key] = ClaimPlan(self.samplers, partition, claim)
        return plan

    @observes(r.PartitionDropped)
    def forget_partition(self, record: r.PartitionDropped) -> None:
        """End the plans of a partition that has ended."""
        self._by_partition.pop(record.partition, None)
        self.samplers.warned.discard(record.partition)

    @observes(r.SamplerRegistered, r.StateLoaded, r.StateMerged)
    def forget_all(self, record: r.AnyRecord | None = None) -> None:
        """End all plans, because the samplers or the partitions have changed."""
        self._by_partition.clear()

    def check(self, partitions: Mapping[str, Partition]) -> None:
        """Verify that no plan is out of date.

        Raises:
            AssertionError: A plan differs from one that is made now.
        """
        for name, plans in self._by_partition.items():
            for kept in list(plans.values()):
                assert kept.partition is partitions.get(name), f"a plan of partition {name!r} was not ended with it"
                plan, now = self.of(kept.partition, kept.claim), ClaimPlan(self.samplers, kept.partition, kept.claim)
                assert plan.facts() == now.facts(), f"a plan of partition {name!r} is stale"


def _unused_entries(sampler: AnySampler, sampling: Mapping[str, Any]) -> str | None:
    """Return a sentence about entries of a sampling_config that the sampler does not take; None if there are none.

    A user's sampler takes any entry.
    """
    if isinstance(sampler, UserSampler) or sampling.keys() <= TAKEN_BY_ALL:
        return None
    known = _accepted_entries(sampler)
    unused = [] if known is None else [name for name in sampling if name not in known]
    if known is None or not unused:
        return None
    described = [f"{name!r}{did_you_mean(name, sorted(known)).rstrip('?')}" for name in unused]
    return (
        f"sampling_config has entries that {type(sampler).__name__} does not take and that have no effect: "
        f"{', '.join(described)}. It takes: {', '.join(sorted(known - {'partition'}))}"
    )


def _accepted_entries(sampler: BaseSampler) -> frozenset[str] | None:
    """The entries that a sampler takes; None: any."""
    if not built_in(sampler):
        return None
    own = TAKEN_BY_ALL | frozenset(sampler.sampling_entries)
    if not isinstance(sampler, SamplerWrapper):
        return own
    inner = _accepted_entries(sampler.inner)
    return None if inner is None else own | inner
