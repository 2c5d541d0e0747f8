"""Handlers of the reports of storage units, and of the requests of writers about their extents."""

from __future__ import annotations

from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.tables.row_table import indexes_in
from transfer_queue.core.units import location_checks, unit_registration
from transfer_queue.errors import ProtocolError
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import CloseExtents
from transfer_queue.messages.system import NodeGone
from transfer_queue.messages.unit_reports import (
    BlocksMovedReport,
    ExtentsFreedReport,
    ExtentsGone,
    ExtentsRecalledReport,
    RegisterUnit,
    SpaceShortReport,
    WriterGone,
)


@handles(CloseExtents)
def close_extents(core: ControllerContext, caller: Caller, request: CloseExtents) -> Decision:
    """Close extents of the writer that sends the request."""
    return Decision(location_checks.close_extents(core.state, caller.client, request.extents), Done)


@handles(RegisterUnit)
def register_unit(core: ControllerContext, caller: Caller, request: RegisterUnit) -> Decision:
    """Register a storage unit. The reply has its number."""
    records, number = unit_registration.register(core.state, request)
    for record in records:
        if isinstance(record, r.UnitLost):
            core.unit_peers.pop(record.unit, None)
            core.movers.short.pop(record.unit, None)
            core.moves.gone(record.unit)
    core.unit_peers[number] = caller.peer
    if not request.store:  # blocks in an external store are not moved
        core.moves.arrived(number)
    core.movers.freed[number] = 0

    def reply() -> AnyReply:
        core.state.blocks.tell_again(number)
        return Done(number)

    return Decision(records, reply)


@handles(NodeGone)
def node_gone(core: ControllerContext, caller: Caller, request: NodeGone) -> Decision:
    """Note that a node is gone. The reply has the number of storage units that were lost with it."""
    lost = [unit for unit in core.state.units.values() if unit.node and unit.node == request.node]
    for unit in lost:
        core.unit_peers.pop(unit.unit, None)
        core.movers.short.pop(unit.unit, None)
        core.moves.gone(unit.unit)
    return Decision([r.UnitLost(unit.unit, request.when) for unit in lost], lambda: Done(len(lost)))


@handles(ExtentsFreedReport)
def freed(core: ControllerContext, caller: Caller, request: ExtentsFreedReport) -> Decision:
    """Note which extents a unit has freed."""
    if core.unit_peers.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report what it has freed")
    pending = core.state.blocks.freed
    extents = indexes_in(request.extents)
    known = extents[[(request.unit, extent) in pending for extent in extents.tolist()]]
    return Decision([r.ExtentsFreed(request.unit, known.tobytes())] if len(known) else [], Done)


@handles(ExtentsGone)
def extents_gone(core: ControllerContext, caller: Caller, request: ExtentsGone) -> Decision:
    """Note that a unit reports values lost with its store."""
    if core.unit_peers.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report what its store has lost")
    return Decision([r.ExtentsLost(request.unit, indexes_in(request.extents).tobytes(), request.when)], Done)


@handles(ExtentsRecalledReport)
def recalled(core: ControllerContext, caller: Caller, request: ExtentsRecalledReport) -> Decision:
    """Close extents that a unit has recalled."""
    if core.unit_peers.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report what it has recalled")
    numbers, lengths = indexes_in(request.extents).tolist(), indexes_in(request.lengths).tolist()
    if len(numbers) != len(lengths):
        raise ProtocolError(f"a report of recalled extents has {len(numbers)} extents but {len(lengths)} lengths")
    return Decision(location_checks.close_new(core.state, request.unit, numbers, lengths), Done)


@handles(BlocksMovedReport)
def moved(core: ControllerContext, caller: Caller, request: BlocksMovedReport) -> Decision:
    """Note the new locations of blocks that a unit has moved on order."""
    if core.unit_peers.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report what it has moved")
    return Decision(core.moves.answered(request, core.now), Done)


@handles(WriterGone)
def writer_gone(core: ControllerContext, caller: Caller, request: WriterGone) -> Decision:
    """Note that a writer is dead, which its unit has proved."""
    if core.unit_peers.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report that its writer is gone")
    for number in request.extents:
        location_checks.check_extent_number(number)
    return Decision([r.WriterFenced(request.writer, request.unit, request.extents)], Done)


@handles(SpaceShortReport)
def space_short(core: ControllerContext, caller: Caller, request: SpaceShortReport) -> list[Effect]:
    """Note which writers wait for space of a unit."""
    if core.unit_peers.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report which writers wait for its space")
    core.movers.short[request.unit] = request
    core.moves.waits(request.unit, bool(request.writers))
    return [Send(caller.peer, caller.envelope.sequence, Done())]
