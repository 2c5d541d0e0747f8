"""Handlers of the requests that create, fill, clear and seal partitions."""

from __future__ import annotations

import msgspec
import numpy as np

from transfer_queue.core.absent_holders import AbsentHolders
from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import Caller, Decision, ParkDecision, handles
from transfer_queue.core.puts import flow_control, put_decisions, retention
from transfer_queue.core.queries.batch_metadata import meta_reply
from transfer_queue.core.state.unknown_partitions import require_partition, unknown_partition_warning
from transfer_queue.core.tables.field_types import with_schemas
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.core.units import location_checks
from transfer_queue.errors import (
    CapacityError,
    InvalidArgumentError,
    PartitionFullError,
    ProtocolError,
    StalenessError,
)
from transfer_queue.messages import partitions, puts
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.tag_table import TagTable

LIMITS = (PartitionFullError, StalenessError)
"""The errors of a partition that accepts no more rows. Rows that clients which are gone have reserved make space."""


@handles(partitions.CreatePartition)
def handle_create_partition(context: Context, caller: Caller, request: partitions.CreatePartition) -> Decision:
    """Create a partition. The reply is False if it exists. Raises InvalidArgumentError if it has other options."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        records = put_decisions.create_partition(context.state, request)
        if retention.has_limit(request.options):
            context.services[retention.Retention]
        if request.policy_version:
            context.services[TimelineRecorder].note_policy(caller.client, request.partition, 0, request.policy_version)
        return Decision(records, lambda: Done(True))
    put_decisions.check_same_options(partition, request.options)
    return Decision([], lambda: Done(False))


@handles(puts.Reserve)
def handle_reserve(context: Context, caller: Caller, request: puts.Reserve) -> Decision | ParkDecision:
    """Reserve rows. The reply has their metadata."""
    try:
        records, indexes, new = put_decisions.reserve(context.state, caller.client, request)
    except CapacityError as error:
        if isinstance(error, LIMITS) and context.services[AbsentHolders].drop_abandoned(request.partition):
            return handle_reserve(context, caller, request)
        if request.wait is None or request.wait <= 0:
            raise flow_control.refused_put(error, request.wait) from None
        return ParkDecision(request, request.wait)
    context.services[AbsentHolders].note_holder(caller.client)

    def reply() -> AnyReply:
        partition = context.state.partitions[request.partition]
        positions = partition.rows.positions_of(indexes)
        fields = partition.common_fields(positions)
        produced = np.full(len(positions), bool(fields))
        meta = meta_reply(partition, positions, indexes, fields, produced)
        return msgspec.structs.replace(meta, version=partition.version) if new else meta

    return Decision(records, reply)


@handles(puts.Publish)
def handle_publish(context: Context, caller: Caller, request: puts.Publish) -> Decision | ParkDecision:
    """Publish a put. The reply has the rows, and their tags and common fields if some of the keys existed before."""
    if request.further or (request.block is not None and request.block.parts):
        request = with_schemas(request)
    try:
        records, indexes, new, warning = put_decisions.publish(context.state, caller.client, request)
    except CapacityError as error:
        if isinstance(error, LIMITS) and context.services[AbsentHolders].drop_abandoned(request.partition):
            return handle_publish(context, caller, request)
        if request.wait is None or request.wait <= 0:
            raise flow_control.refused_put(error, request.wait) from None
        return ParkDecision(request, request.wait)
    except ProtocolError:
        lost = location_checks.find_overwritten(context.state, caller.client, request.blocks)
        if not lost:
            raise
        for record in lost:
            context.log.apply(record)
        return handle_publish(context, caller, request)
    if request.block is not None or request.equal:
        context.measures.counters["published_rows"] += request.count

    def reply() -> AnyReply:
        partition = context.state.partitions[request.partition]
        dtypes = partition.mixed_dtypes(request)
        if new or request.keys is None:
            version, epoch = partition.version if new else 0, context.state.epoch
            return puts.PublishReply(indexes.tobytes(), epoch=epoch, dtypes=dtypes, warning=warning, version=version)
        positions = partition.rows.positions_of(indexes)
        fields = partition.common_fields(positions)
        as_sent = isinstance(request.tags, TagTable) and partition.has_no_other_tags(positions, request.tags)
        tags = None if as_sent else partition.packed_tags_of(positions)
        each = partition.common_fields_of_parts(positions, request.puts) if request.puts else []
        return puts.PublishReply(indexes.tobytes(), tags, fields, context.state.epoch, dtypes, each, as_sent, warning)

    return Decision(records, reply)


@handles(partitions.Seal)
def handle_seal(context: Context, caller: Caller, request: partitions.Seal) -> Decision:
    """Count the seal of one producer."""
    effect = "seal creates it, sealed and empty; if this is intended, call seal(..., create=True)"
    warning = None if request.create else unknown_partition_warning(context.state.partitions, request.partition, effect)
    return Decision(
        put_decisions.seal(context.state, request.partition, context.connections.peers), lambda: Done(None, warning)
    )


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
    records = flow_control.set_version(context.state, request)
    if records:
        before = context.state.partitions[request.partition].policy_version
        context.services[TimelineRecorder].note_policy(caller.client, request.partition, before, request.version)
    return Decision(records, Done)


@handles(partitions.ReadPolicyVersion, reads=True)
def handle_read_policy_version(context: Context, caller: Caller, request: partitions.ReadPolicyVersion) -> Done:
    """Reply with the policy version of a partition."""
    return Done(require_partition(context.state.partitions, request.partition).policy_version)
