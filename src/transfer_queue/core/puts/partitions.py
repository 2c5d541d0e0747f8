"""Handles the requests that create and seal partitions, and those about their progress."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import Caller, Decision, ParkDecision, handles
from transfer_queue.core.puts import clears, limits
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.check import check_options
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State, require_partition, unknown_partition_warning
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages import partitions
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import PartitionOptions


@handles(partitions.CreatePartition)
def handle_create_partition(context: Context, caller: Caller, request: partitions.CreatePartition) -> Decision:
    """Create a partition. The reply is False if it exists. Raises InvalidArgumentError if it has other options."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        records = create_partition(
            context.state, request.partition, request.pre_allocate, request.options, request.policy_version
        )
        if clears.has_limit(request.options):
            context.services[clears.Retention]
        if request.policy_version:
            context.services[TimelineRecorder].note_policy(caller.client, request.partition, 0, request.policy_version)
        return Decision(records, lambda: Done(True))
    check_same_options(partition, request.options)
    return Decision([], lambda: Done(False))


@handles(partitions.Seal)
def handle_seal(context: Context, caller: Caller, request: partitions.Seal) -> Decision:
    """Count the seal of one producer."""
    effect = "seal creates it, sealed and empty; if this is intended, call seal(..., create=True)"
    warning = None if request.create else unknown_partition_warning(context.state.partitions, request.partition, effect)
    return Decision(seal(context.state, request.partition, context.connections.peers), lambda: Done(None, warning))


@handles(partitions.ReportDone)
def handle_report_done(context: Context, caller: Caller, request: partitions.ReportDone) -> Decision:
    """Count rows as done. Raises InvalidArgumentError for more rows than were added."""
    partition = require_partition(context.state.partitions, request.partition)
    if request.count > partition.undone:
        raise InvalidArgumentError(
            f"{request.count} samples of partition {request.partition!r} were reported as done, but only "
            f"{partition.undone} of its samples are not done yet; report each sample once"
        )
    return Decision([r.RowsDone(request.partition, request.count)] if request.count else [], Done)


@handles(partitions.AwaitDone)
def handle_await_done(context: Context, caller: Caller, request: partitions.AwaitDone) -> Decision | ParkDecision:
    """Reply whether all rows are done, or park the request until they are."""
    partition = require_partition(context.state.partitions, request.partition)
    if partition.undone and request.wait is not None and request.wait > 0:
        return ParkDecision(request, request.wait)
    done = not partition.undone
    return Decision([], lambda: Done(done))


@handles(partitions.SetPolicyVersion)
def handle_set_policy_version(context: Context, caller: Caller, request: partitions.SetPolicyVersion) -> Decision:
    """Set the policy version of a partition."""
    records = limits.set_version(context.state, request)
    if records:
        before = context.state.partitions[request.partition].policy_version
        context.services[TimelineRecorder].note_policy(caller.client, request.partition, before, request.version)
    return Decision(records, Done)


@handles(partitions.ReadPolicyVersion, reads=True)
def handle_read_policy_version(context: Context, caller: Caller, request: partitions.ReadPolicyVersion) -> Done:
    """Reply with the policy version of a partition."""
    return Done(require_partition(context.state.partitions, request.partition).policy_version)


def create_partition(
    state: State, name: str, pre_allocate: int, options: PartitionOptions | None = None, policy_version: int = 0
) -> list[r.AnyRecord]:
    """Return the records of a new partition with its pre-allocated rows."""
    options = PartitionOptions() if options is None else options
    check_options(options)
    if not 0 <= pre_allocate <= limits.MAX_RESERVED:
        raise InvalidArgumentError(f"pre_allocate must be from 0 to {limits.MAX_RESERVED} rows, got {pre_allocate}")
    made: list[r.AnyRecord] = [r.PartitionMade(name, options)]
    if policy_version:
        made.append(r.PolicyAdvanced(name, policy_version))
    if pre_allocate:
        part = r.WriterPart("", pre_allocate)
        made.append(r.SamplesPut(name, [part], state.next_index, part.count, pre_allocated=True))
    return made


def check_same_options(partition: Partition, options: PartitionOptions) -> None:
    """Raise InvalidArgumentError if options other than defaults differ from those of the partition."""
    defaults, its = PartitionOptions(), partition.options
    differing = [
        f"{name}: requested {getattr(options, name)!r}, but it was created with {getattr(its, name)!r}"
        for name in PartitionOptions.__struct_fields__
        if getattr(options, name) not in (getattr(defaults, name), getattr(its, name))
    ]
    if differing:
        raise InvalidArgumentError(
            f"the partition {partition.name!r} exists with other settings: {'; '.join(differing)}. The settings of a "
            f"partition never change: request the same settings everywhere, before the first put, or choose another "
            f"name"
        )


def seal(state: State, name: str, connected: Collection[str], pre_allocate: int = 0) -> list[r.AnyRecord]:
    """Return the records of a seal by one producer.

    The last seal clears pre-allocated rows that were not taken, and drops rows that no client can put any more.
    """
    partition = state.partitions.get(name)
    if partition is None:
        made = create_partition(state, name, pre_allocate)
        return [*made, r.SealCounted(name)]
    if partition.sealed:
        return []
    made = [r.SealCounted(name)]
    if partition.seals + 1 >= partition.options.producers and partition.waiting:
        waiting = partition.rows.indexes_of(np.array(partition.waiting, "i8"))
        made.append(r.RowsCleared(name, waiting.tobytes()))
    if partition.seals + 1 >= partition.options.producers:
        made += unneeded_rows.drop_abandoned(partition, connected)
    return made
