"""Handlers of the reports of storage units, and of the requests of writers about their extents."""

from __future__ import annotations

from collections.abc import Collection

from transfer_queue.core.activity import Activity
from transfer_queue.core.checkpoints import Checkpoints
from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, FreeExtents, RemoveMirror, Send
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.row_table import indexes_in
from transfer_queue.core.units import location_checks, unit_drains, unit_registration
from transfer_queue.core.units.migration_planner import MigrationPlanner
from transfer_queue.core.units.mirror_writer import MirrorWriter
from transfer_queue.core.units.store_servers import StoreServers
from transfer_queue.core.units.unit_drains import UnitDrains
from transfer_queue.errors import ProtocolError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import MIRROR, UnitInfo
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import CloseExtents
from transfer_queue.messages.reports import store_reports, unit_reports
from transfer_queue.messages.system import Drain, NodeGone


class UnitConnections(CoreService):
    """The connections of the storage units."""

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return True

    def on_connection_ended(self, client: str, peer: int) -> None:
        """See `CoreService.on_connection_ended`."""
        for unit in self.context.connections.units_at(peer):
            forget_unit(self.context, unit)

    def on_extents_unneeded(self) -> list[Effect]:
        """Order the units to free what nobody needs."""
        context, effects = self.context, list[Effect]()
        pinned, freed = context.services.get(Checkpoints), context.services[Activity].freed
        blocks = context.state.blocks
        for unit, extents in blocks.take_freed(context.connections.units, () if pinned is None else pinned).items():
            freed[unit] = freed.get(unit, 0) + 1
            effects.append(FreeExtents(unit, extents))
        return effects


class RetiredMirrors(CoreService):
    """Removes the mirrors of earlier terms when they are empty."""

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return bool(context.state.mirrors)

    def after_event(self) -> list[Effect]:
        """Order the empty ones to remove their arenas."""
        state = self.context.state
        return end_retired_mirrors(self.context) if state.mirrors and state.draining else []


def forget_unit(context: Context, unit: int) -> None:
    """Forget the connection of a unit, and what it has reported on it."""
    context.connections.units.pop(unit, None)
    for service in context.services.with_hook["on_unit_gone"]:
        service.on_unit_gone(unit)


def lose_units_of_nodes(context: Context, when: str, named: bool = True) -> None:
    """Note that the units of all nodes that have a name, or of the node that has none, are lost.

    The nodes of a system of several nodes have names, that of a system of one machine has none. If the state of one is
    continued by the other, each client would wait for the former units otherwise. Mirrors belong to no node.

    Args:
        context: The context.
        when: The time, as text.
        named: Whether the nodes with a name are gone.
    """
    _lose_units(context, [unit for unit in _units_of_nodes(context.state) if bool(unit.node) == named], when)


def lose_missing_mirrors(context: Context, boot_ids: Collection[str], when: str) -> None:
    """Note that the mirrors are lost whose arenas do not exist any more.

    Args:
        context: The context.
        boot_ids: The boot ids of the arenas that exist.
        when: The time, as text.
    """
    units, mirrors = context.state.units, context.state.mirrors
    _lose_units(context, [units[number] for number in mirrors if units[number].boot_id not in boot_ids], when)


def end_retired_mirrors(context: Context) -> list[Effect]:
    """Forget each retired mirror that has no extents any more, and order it to remove its arena."""
    state, effects = context.state, list[Effect]()
    for unit in sorted(state.mirrors & state.draining):
        peer = context.connections.units.get(unit)
        if peer is not None and not state.blocks.leased_in.get(unit):
            forget_unit(context, unit)
            context.log.apply(r.UnitLost(unit, "it was a mirror of an earlier controller, and is empty"))
            effects.append(RemoveMirror(peer))
    return effects


def _units_of_nodes(state: State) -> list[UnitInfo]:
    """Return the units that are lost together with their nodes. A mirror is in the folder that the next node takes."""
    return [unit for unit in state.units.values() if unit.tier != MIRROR]


def _lose_units(context: Context, units: list[UnitInfo], when: str) -> None:
    for unit in units:
        forget_unit(context, unit.unit)
        context.log.apply(r.UnitLost(unit.unit, when))


@handles(CloseExtents)
def handle_close_extents(context: Context, caller: Caller, request: CloseExtents) -> Decision:
    """Close extents of the writer that sends the request. The reply has those in which no block is known."""
    records, unknown = location_checks.close_extents(context.state, caller.client, request.extents)
    return Decision(records, lambda: Done([list(place) for place in unknown]))


@handles(unit_reports.RegisterUnit)
def handle_register_unit(context: Context, caller: Caller, request: unit_reports.RegisterUnit) -> Decision:
    """Register a storage unit. The reply has its number."""
    records, number = unit_registration.register(context.state, request)
    for record in records:
        if isinstance(record, r.UnitLost):
            forget_unit(context, record.unit)
    context.connections.units[number] = caller.peer
    if request.tier == MIRROR:
        context.services[RetiredMirrors]
    if not request.store:  # blocks in an external store are not moved
        context.services[MigrationPlanner].on_connect(number)
    context.services[Activity].freed[number] = 0

    def reply() -> AnyReply:
        context.state.blocks.free_again(number)
        return Done(number)

    return Decision(records, reply)


@handles(NodeGone)
def handle_node_gone(context: Context, caller: Caller, request: NodeGone) -> Decision:
    """Note that a node is gone. The reply has the number of storage units that were lost with it."""
    lost = [unit for unit in _units_of_nodes(context.state) if unit.node and unit.node == request.node]
    for unit in lost:
        forget_unit(context, unit.unit)
    stores = context.services.get(StoreServers)
    if stores is not None:
        stores.forget_node(request.node, context.now)
    return Decision([r.UnitLost(unit.unit, request.when) for unit in lost], lambda: Done(len(lost)))


@handles(unit_reports.ExtentsFreedReport)
def handle_extents_freed(context: Context, caller: Caller, request: unit_reports.ExtentsFreedReport) -> Decision:
    """Note which extents a unit has freed."""
    if context.connections.units.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report what it has freed")
    pending = context.state.blocks.freed
    extents = indexes_in(request.extents)
    known = extents[[(request.unit, extent) in pending for extent in extents.tolist()]]
    return Decision([r.ExtentsFreed(request.unit, known.tobytes())] if len(known) else [], Done)


@handles(unit_reports.ExtentsGone)
def handle_extents_gone(context: Context, caller: Caller, request: unit_reports.ExtentsGone) -> Decision:
    """Note that a unit reports values lost with its store."""
    if context.connections.units.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report what its store has lost")
    cause = context.services[StoreServers].cause(request.unit, context.now)
    when = f"{request.when}: {cause}" if cause else request.when
    return Decision([r.ExtentsLost(request.unit, indexes_in(request.extents).tobytes(), when)], Done)


@handles(store_reports.ReportStoreServer)
def handle_report_store_server(
    context: Context, caller: Caller, request: store_reports.ReportStoreServer
) -> list[Effect]:
    """Note that a server of an external store runs."""
    context.services[StoreServers].note_up(caller.peer, request, context.now)
    return [Send(caller.peer, caller.envelope.sequence, Done())]


@handles(store_reports.AwaitFirstStoreServer)
def handle_await_first_store_server(
    context: Context, caller: Caller, request: store_reports.AwaitFirstStoreServer
) -> list[Effect]:
    """Reply when the first node has another server of a store."""
    context.services[StoreServers].await_first(caller.peer, caller.envelope.sequence, request)
    return []


@handles(store_reports.StoreChanged)
def handle_store_changed(context: Context, caller: Caller, request: store_reports.StoreChanged) -> list[Effect]:
    """Order a unit whose store may have lost blocks to check those that are published."""
    if context.connections.units.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report that its store has changed")
    context.services[StoreServers].on_changed(request)
    return [Send(caller.peer, caller.envelope.sequence, Done())]


@handles(unit_reports.ExtentsRecalledReport)
def handle_extents_recalled(context: Context, caller: Caller, request: unit_reports.ExtentsRecalledReport) -> Decision:
    """Close extents that a unit has recalled."""
    if context.connections.units.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report what it has recalled")
    numbers, lengths = indexes_in(request.extents).tolist(), indexes_in(request.lengths).tolist()
    if len(numbers) != len(lengths):
        raise ProtocolError(f"a report of recalled extents has {len(numbers)} extents but {len(lengths)} lengths")
    return Decision(location_checks.close_reported_extents(context.state, request.unit, numbers, lengths), Done)


@handles(unit_reports.BlocksMovedReport)
def handle_blocks_moved(context: Context, caller: Caller, request: unit_reports.BlocksMovedReport) -> Decision:
    """Note the new locations of blocks that a unit has moved on order."""
    if context.connections.units.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report what it has moved")
    mirror = context.services.get(MirrorWriter)
    if mirror is not None and mirror.carries_out(request):
        return Decision(mirror.on_report(request), Done)
    return Decision(context.services[MigrationPlanner].on_report(request, context.now), Done)


@handles(unit_reports.WriterGone)
def handle_writer_gone(context: Context, caller: Caller, request: unit_reports.WriterGone) -> Decision:
    """Note that a writer is dead, which its unit has proved."""
    if context.connections.units.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report that its writer is gone")
    for number in request.extents:
        location_checks.check_extent_number(number)
    return Decision([r.WriterFenced(request.writer, request.unit, request.extents)], Done)


@handles(unit_reports.SpaceShortReport)
def handle_space_short(context: Context, caller: Caller, request: unit_reports.SpaceShortReport) -> list[Effect]:
    """Note which writers wait for space of a unit."""
    if context.connections.units.get(request.unit) != caller.peer:
        raise ProtocolError("only the unit itself may report which writers wait for its space")
    context.services[Activity].short[request.unit] = request
    context.services[MigrationPlanner].set_waiting_writers(request.unit, bool(request.writers))
    return [Send(caller.peer, caller.envelope.sequence, Done())]


@handles(Drain)
def handle_drain(context: Context, caller: Caller, request: Drain) -> list[Effect]:
    """Drain a unit, or use it again. The reply has the number of blocks that are left in it."""
    record = unit_drains.decide(context.state, context.config.replicas, request)
    if record is not None:
        context.log.apply(record)
        context.services[MigrationPlanner].drain(request.unit, record.draining)
    if request.wait is not None and request.wait > 0 and not request.undo:
        context.services[UnitDrains].wait(caller.waiter, caller.peer, request.unit, context.now + request.wait)
        return []
    blocks = unit_drains.remaining_blocks(context.state, request.unit)
    return [Send(caller.peer, caller.envelope.sequence, Done(blocks))]
