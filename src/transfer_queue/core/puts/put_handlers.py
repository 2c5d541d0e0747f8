"""What requests that change something do: records to apply, and the reply to give when they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.core.claims import consumer_state, lease_decisions
from transfer_queue.core.control.unknown_names import no_partition
from transfer_queue.core.events import records as r
from transfer_queue.core.puts import clear_decisions, flow_control, put_decisions
from transfer_queue.core.queries.batch_metadata import meta_reply
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.tables.row_table import indexes_in
from transfer_queue.core.units import location_checks, unit_registration
from transfer_queue.errors import ProtocolError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Ack, Finish, Nack, RankGone, ResetConsumption
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import ClearPartition, CreatePartition, Seal, SetPolicyVersion, Want, Wanted
from transfer_queue.messages.puts import ClearKeys, ClearRows, CloseExtents, Drop, Publish, PublishReply, Reserve
from transfer_queue.messages.system import NodeGone
from transfer_queue.messages.unit_reports import (  # fmt: skip
    ExtentsGone,
    Freed,
    Moved,
    Recalled,
    RegisterUnit,
    WriterGone,
)

if TYPE_CHECKING:
    from transfer_queue.core.controller import Controller

Decision = tuple[list[r.AnyRecord], Callable[[], AnyReply]]


def create_partition(core: Controller, client: str, peer: int, request: CreatePartition) -> Decision:
    """Make a partition; the reply is False if it exists. InvalidArgumentError if it has other options."""
    partition = core.state.partitions.get(request.partition)
    if partition is None:
        return put_decisions.create_partition(core.state, request), lambda: Done(True)
    put_decisions.check_same_options(partition, request.options)
    return [], lambda: Done(False)


def reserve(core: Controller, client: str, peer: int, request: Reserve) -> Decision:
    """The rows, as their metadata."""
    records, indexes = put_decisions.reserve(core.state, client, request)

    def reply() -> AnyReply:
        partition = core.state.partitions[request.partition]
        positions = partition.rows.positions_of(indexes)
        fields = partition.common_fields(positions)
        produced = np.full(len(positions), bool(fields))
        return meta_reply(partition, positions, indexes, fields, produced)

    return records, reply


def publish(core: Controller, client: str, peer: int, request: Publish) -> Decision:
    """The rows, and of keys of which some are known already their tags and common fields."""
    records, indexes, new = put_decisions.publish(core.state, client, request)
    if request.block is not None:
        core.counters["published_rows"] += request.count

    def reply() -> AnyReply:
        partition = core.state.partitions[request.partition]
        dtypes = partition.several_dtypes(request.block)
        if new or request.keys is None:
            return PublishReply(indexes.tobytes(), epoch=core.state.epoch, dtypes=dtypes)
        positions = partition.rows.positions_of(indexes)
        fields = partition.common_fields(positions)
        return PublishReply(indexes.tobytes(), partition.tags_of(positions), fields, core.state.epoch, dtypes)

    return records, reply


def clear_rows(core: Controller, client: str, peer: int, request: ClearRows) -> Decision:
    """Those that live."""
    return clear_decisions.clear_rows(core.state, request.partition, indexes_in(request.rows)), Done


def clear_keys(core: Controller, client: str, peer: int, request: ClearKeys) -> Decision:
    """Those that are known."""
    return clear_decisions.clear_keys(core.state, request.partition, request.keys), Done


def clear_partition(core: Controller, client: str, peer: int, request: ClearPartition) -> Decision:
    """With all its rows; an unknown one is fine."""
    claim_samplers.forget(core.samplers.default, request.partition)
    known = request.partition in core.state.partitions
    return [r.PartitionDropped(request.partition)] if known else [], Done


def reset(core: Controller, client: str, peer: int, request: ResetConsumption) -> Decision:
    """A task (None: every one) begins anew."""
    warning = _unknown(core, request.partition, "reset_consumption has no effect")
    records: list[r.AnyRecord] = []
    if warning is None:
        records.append(r.ConsumptionForgotten(request.partition, request.task))
    return records, lambda: Done(True, warning)


def seal(core: Controller, client: str, peer: int, request: Seal) -> Decision:
    """By one of its producers."""
    effect = "seal makes it, sealed and empty; if this is intended, call seal(..., create=True)"
    warning = None if request.create else _unknown(core, request.partition, effect)
    return put_decisions.seal(core.state, request.partition, core.connections), lambda: Done(None, warning)


def drop(core: Controller, client: str, peer: int, request: Drop) -> Decision:
    """How many rows went."""
    warning = _unknown(core, request.partition, "drop has no effect")
    records, count = clear_decisions.drop(core.state, request)
    return records, lambda: Done(count, warning)


def _unknown(core: Controller, partition: str, effect: str) -> str | None:
    """Return a warning about a partition that does not exist; None if it exists. effect: what the request then does."""
    if partition in core.state.partitions:
        return None
    return f"{no_partition(partition, core.state.partitions)}: {effect}"


def finish_rows(core: Controller, client: str, peer: int, request: Finish) -> Decision:
    """A task is through with them."""
    partition = core.state.partitions.get(request.partition)
    if partition is None:
        return [], Done

    def reply() -> AnyReply:
        for consumer in consumer_state.idle(partition, request.task, request.holder, core.movers.busy):
            core.movers.back(request.holder, consumer)
        return Done()

    return clear_decisions.finished(partition, request.task, request.holder, indexes_in(request.rows)), reply


def ack(core: Controller, client: str, peer: int, request: Ack) -> Decision:
    """Whether it counts."""
    records = lease_decisions.ack(core.state, request)
    return records, lambda: Done(bool(records))


def nack(core: Controller, client: str, peer: int, request: Nack) -> Decision:
    """Whether the lease had any of it."""
    records = lease_decisions.nack(core.state, request, core.max_deliveries)
    return records, lambda: Done(bool(records))


def rank_gone(core: Controller, client: str, peer: int, request: RankGone) -> Decision:
    """How many rows are ready again."""
    records, count = lease_decisions.rank_gone(core.state, request, core.max_deliveries)
    return records, lambda: Done(count)


def set_policy_version(core: Controller, client: str, peer: int, request: SetPolicyVersion) -> Decision:
    """Of the policy."""
    return flow_control.set_version(core.state, request), Done


def want(core: Controller, client: str, peer: int, request: Want) -> Decision:
    """A task says how many groups it wants."""
    return consumer_state.want(core.state, request), Done


def wanted(core: Controller, client: str, peer: int, request: Wanted) -> Decision:
    """How many a producer is to make."""
    partition = core.state.partitions.get(request.partition)
    count, records = consumer_state.taken(partition, client, request, core.group_size_of(request.partition) or 1)
    return records, lambda: Done(count)


def close_extents(core: Controller, client: str, peer: int, request: CloseExtents) -> Decision:
    """Of the asking writer."""
    return location_checks.close_extents(core.state, client, request.extents), Done


def register_unit(core: Controller, client: str, peer: int, request: RegisterUnit) -> Decision:
    """Its number."""
    records, number = unit_registration.register(core.state, request)
    for record in records:
        if isinstance(record, r.UnitLost):
            core.unit_peers.pop(record.unit, None)
            core.movers.short.pop(record.unit, None)
            core.moves.gone(record.unit)
    core.unit_peers[number] = peer
    if not request.store:  # what is in an external store is moved by nobody
        core.moves.arrived(number)
    core.movers.freed[number] = 0

    def reply() -> AnyReply:
        core.state.blocks.tell_again(number)
        return Done(number)

    return records, reply


def node_gone(core: Controller, client: str, peer: int, request: NodeGone) -> Decision:
    """How many storage units were lost with it."""
    lost = [unit for unit in core.state.units.values() if unit.node and unit.node == request.node]
    for unit in lost:
        core.unit_peers.pop(unit.unit, None)
        core.movers.short.pop(unit.unit, None)
        core.moves.gone(unit.unit)
    return [r.UnitLost(unit.unit, request.when) for unit in lost], lambda: Done(len(lost))


def freed(core: Controller, client: str, peer: int, request: Freed) -> Decision:
    """By the unit itself."""
    if core.unit_peers.get(request.unit) != peer:
        raise ProtocolError("only the unit itself may say what it has freed")
    pending = core.state.blocks.freed
    extents = indexes_in(request.extents)
    known = extents[[(request.unit, extent) in pending for extent in extents.tolist()]]
    return [r.ExtentsFreed(request.unit, known.tobytes())] if len(known) else [], Done


def extents_gone(core: Controller, client: str, peer: int, request: ExtentsGone) -> Decision:
    """Values are lost, by the word of the unit whose store they were in."""
    if core.unit_peers.get(request.unit) != peer:
        raise ProtocolError("only the unit itself may say what its store has lost")
    return [r.ExtentsLost(request.unit, indexes_in(request.extents).tobytes(), request.when)], Done


def recalled(core: Controller, client: str, peer: int, request: Recalled) -> Decision:
    """Extents take no more blocks, by the word of their unit."""
    if core.unit_peers.get(request.unit) != peer:
        raise ProtocolError("only the unit itself may say what it has recalled")
    numbers, lengths = indexes_in(request.extents).tolist(), indexes_in(request.lengths).tolist()
    if len(numbers) != len(lengths):
        raise ProtocolError(f"a report of recalled extents has {len(numbers)} extents but {len(lengths)} lengths")
    return location_checks.close_new(core.state, request.unit, numbers, lengths), Done


def moved(core: Controller, client: str, peer: int, request: Moved) -> Decision:
    """Blocks lie elsewhere, as a unit has been told to bring about."""
    if core.unit_peers.get(request.unit) != peer:
        raise ProtocolError("only the unit itself may say what it has moved")
    return core.moves.answered(request, core.now), Done


def writer_gone(core: Controller, client: str, peer: int, request: WriterGone) -> Decision:
    """As its unit has proved."""
    if core.unit_peers.get(request.unit) != peer:
        raise ProtocolError("only the unit itself may say that a writer of its is gone")
    for number in request.extents:
        location_checks.check_extent_number(number)
    return [r.WriterFenced(request.writer, request.unit, request.extents)], Done


Decide = Callable[["Controller", str, int, Any], Decision]  # of the client, on this connection, asking this

MUTATIONS: dict[type, Decide] = {
    CreatePartition: create_partition,
    Reserve: reserve,
    Publish: publish,
    ClearRows: clear_rows,
    ClearKeys: clear_keys,
    ClearPartition: clear_partition,
    ResetConsumption: reset,
    Seal: seal,
    Drop: drop,
    Finish: finish_rows,
    Ack: ack,
    Nack: nack,
    RankGone: rank_gone,
    SetPolicyVersion: set_policy_version,
    Want: want,
    Wanted: wanted,
    CloseExtents: close_extents,
    RegisterUnit: register_unit,
    WriterGone: writer_gone,
    NodeGone: node_gone,
    Freed: freed,
    Moved: moved,
    Recalled: recalled,
    ExtentsGone: extents_gone,
}
