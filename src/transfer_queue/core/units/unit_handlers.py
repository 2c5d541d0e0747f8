"""Handlers of the reports of storage units, of the requests of writers about their extents, and of drains.

A unit that registers, for the first time, again, or as a replacement, is compared with the state. It is identified by
its arena's boot id and path; a mirror, which may be moved with its folder, by the boot id. It reports its leased
extents. The state knows which extents it needs, and which ones it has freed before the unit confirmed it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transfer_queue.core.activity import Activity
from transfer_queue.core.checkpoints import Checkpoints
from transfer_queue.core.context import Context, CoreService, observes
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, RemoveMirror, SendToUnit
from transfer_queue.core.events.records import LARGEST
from transfer_queue.core.events.registry import Begin, Caller, Decision, Ends, Steps, Until, handles
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.rows import indexes_in
from transfer_queue.core.units import location_checks
from transfer_queue.core.units.mover import Mover
from transfer_queue.core.units.store_servers import StoreServers, backend_of
from transfer_queue.errors import InvalidArgumentError, ProtocolError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.descriptors import MEMORY, MIRROR, UnitInfo
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import CloseExtents
from transfer_queue.messages.reports import store_reports, unit_reports
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.messages.system import Drain, NodeGone


class UnitConnections(CoreService):
    """The connections of the storage units."""

    runs_always = True

    def on_connection_ended(self, client: str, peer: int) -> None:
        """See `CoreService.on_connection_ended`."""
        for unit in [unit for unit, known in self.context.connections.units.items() if known == peer]:
            self._forget(unit)

    @observes(r.UnitLost)
    def note_lost(self, record: r.UnitLost) -> None:
        """Forget a unit that is lost."""
        self._forget(record.unit)

    def _forget(self, unit: int) -> None:
        """Forget the connection of a unit, and what it has reported on it."""
        self.context.connections.units.pop(unit, None)
        for service in self.context.services.with_hook["on_unit_removed"]:
            service.on_unit_removed(unit)

    def on_extents_unneeded(self) -> list[Effect]:
        """Order the units to free what nobody needs."""
        context, effects = self.context, list[Effect]()
        pinned, freed = context.services.get(Checkpoints), context.services[Activity].freed
        blocks = context.state.blocks
        for unit, extents in blocks.take_freed(context.connections.units, () if pinned is None else pinned).items():
            freed[unit] = freed.get(unit, 0) + 1
            effects.append(SendToUnit(unit, unit_reports.ReleaseExtents(extents)))
        return effects


class RetiredMirrors(CoreService):
    """Removes the mirrors of earlier terms when they are empty."""

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return bool(context.state.mirrors)

    def after_event(self) -> list[Effect]:
        """Forget those without extents, and order them to remove their arenas."""
        context, effects = self.context, list[Effect]()
        for unit in sorted(context.state.mirrors & context.state.draining):
            peer = context.connections.units.get(unit)
            if peer is not None and not context.state.blocks.leased_in.get(unit):
                context.log.apply(r.UnitLost(unit, "it was a mirror of an earlier controller, and is empty"))
                effects.append(RemoveMirror(peer))
        return effects


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


def _units_of_nodes(state: State) -> list[UnitInfo]:
    """Return the units that are lost together with their nodes. A mirror is in the folder that the next node takes."""
    return [unit for unit in state.units.values() if unit.tier != MIRROR]


def _lose_units(context: Context, units: list[UnitInfo], when: str) -> None:
    for unit in units:
        context.log.apply(r.UnitLost(unit.unit, when))


def _check_sender(context: Context, caller: Caller, unit: int, what: str) -> None:
    """Raise ProtocolError if a report does not come from the unit that it names. what: what it reports."""
    if context.connections.units.get(unit) != caller.peer:
        raise ProtocolError(f"only the unit itself may report {what}")


@handles(CloseExtents)
def handle_close_extents(context: Context, caller: Caller, request: CloseExtents) -> Decision:
    """Close extents of the writer that sends the request. The reply has those in which no block is known."""
    records, unknown = location_checks.close_extents(context.state, caller.client, request.extents)
    return Decision(records, lambda: Done([list(place) for place in unknown]))


@handles(RegisterUnit)
def handle_register_unit(context: Context, caller: Caller, request: RegisterUnit) -> Decision:
    """Register a storage unit. The reply has its number."""
    records, number = _register(context.state, request)
    context.connections.units[number] = caller.peer
    if request.tier == MIRROR:
        context.services[RetiredMirrors]
    if not request.store:  # blocks in an external store are not moved
        context.services[Mover].on_connect(number)
    context.services[Activity].freed[number] = 0

    def reply() -> AnyReply:
        context.state.blocks.free_again(number)
        return Done(number)

    return Decision(records, reply)


def _register(state: State, request: RegisterUnit) -> tuple[list[r.AnyRecord], int]:
    """Return the records, and the number of the unit: that of its arena if it is known, otherwise a new one.

    Raises:
        ProtocolError: The address of its store cannot be read.
    """
    if request.store:
        backend_of(request.store)
    records: list[r.AnyRecord] = []
    number = next((known.unit for known in state.units.values() if _is_of(known, request)), -1)
    if number < 0:
        number = 1 + max([*state.units, *state.lost_units], default=-1)
        replaced = [known.unit for known in state.units.values() if known.name and known.name == request.name]
        records += [r.UnitLost(unit, request.when) for unit in replaced]
    facts = request.boot_id, request.name, request.node, request.remote, request.tier, request.capacity, request.store
    records.append(r.UnitRegistered(number, request.address, request.arena, *facts))
    if request.retired and number not in state.draining:
        records.append(r.UnitDraining(number, True))
    if request.extents is not None:
        newer = LARGEST if request.next_extent is None else request.next_extent
        records += _compare_extents(state, number, indexes_in(request.extents), newer, request.when)
    return records, number


def _is_of(known: UnitInfo, request: RegisterUnit) -> bool:
    """Whether a unit that registers has the arena of a known one."""
    if known.boot_id != request.boot_id:
        return False
    return known.arena == request.arena or (known.tier == request.tier == MIRROR and bool(known.boot_id))


def _compare_extents(state: State, number: int, leased: np.ndarray, newer: int, when: str) -> list[r.AnyRecord]:
    """Return the records of needed extents that the unit has lost, and of freed ones that it has not confirmed.

    The report does not cover extents from number `newer` on, which were leased after it.
    """
    reported = set(leased.tolist())
    table = state.blocks
    needed = [extent for (unit, extent), e in table.extents.items() if unit == number and e.blocks and extent < newer]
    lost = sorted(extent for extent in needed if extent not in reported)
    freed = sorted(e for unit, e in table.freed if unit == number and e not in reported and e < newer)
    records: list[r.AnyRecord] = []
    if lost:
        records.append(r.ExtentsLost(number, np.array(lost, "i8").tobytes(), when))
    if freed:
        records.append(r.ExtentsFreed(number, np.array(freed, "i8").tobytes()))
    return records


@handles(NodeGone)
def handle_node_gone(context: Context, caller: Caller, request: NodeGone) -> Decision:
    """Note that a node is gone. The reply has the number of storage units that were lost with it."""
    lost = [unit for unit in _units_of_nodes(context.state) if unit.node and unit.node == request.node]
    stores = context.services.get(StoreServers)
    if stores is not None:
        stores.forget_node(request.node)
    return Decision([r.UnitLost(unit.unit, request.when) for unit in lost], lambda: Done(len(lost)))


@handles(unit_reports.ExtentsFreedReport)
def handle_extents_freed(context: Context, caller: Caller, request: unit_reports.ExtentsFreedReport) -> Decision:
    """Note which extents a unit has freed."""
    _check_sender(context, caller, request.unit, "what it has freed")
    pending = context.state.blocks.freed
    extents = indexes_in(request.extents)
    known = extents[[(request.unit, extent) in pending for extent in extents.tolist()]]
    return Decision([r.ExtentsFreed(request.unit, known.tobytes())] if len(known) else [], Done)


@handles(unit_reports.ExtentsGone)
def handle_extents_gone(context: Context, caller: Caller, request: unit_reports.ExtentsGone) -> Decision:
    """Note that a unit reports values lost with its store."""
    _check_sender(context, caller, request.unit, "what its store has lost")
    cause = context.services[StoreServers].cause(request.unit)
    when = f"{request.when}: {cause}" if cause else request.when
    return Decision([r.ExtentsLost(request.unit, indexes_in(request.extents).tobytes(), when)], Done)


@handles(store_reports.ReportStoreServer)
def handle_report_store_server(context: Context, caller: Caller, request: store_reports.ReportStoreServer) -> Done:
    """Note that a server of an external store runs."""
    context.services[StoreServers].note_up(caller.peer, request)
    return Done()


@handles(store_reports.AwaitFirstStoreServer)
def handle_await_first_store_server(
    context: Context, caller: Caller, request: store_reports.AwaitFirstStoreServer
) -> list[Effect]:
    """Reply when the first node has another server of a store."""
    context.services[StoreServers].await_first(caller.peer, caller.envelope.sequence, request)
    return []


@handles(store_reports.StoreChanged)
def handle_store_changed(context: Context, caller: Caller, request: store_reports.StoreChanged) -> Done:
    """Order a unit whose store may have lost blocks to check those that are published."""
    _check_sender(context, caller, request.unit, "that its store has changed")
    context.services[StoreServers].on_changed(request)
    return Done()


@handles(unit_reports.ExtentsRecalledReport)
def handle_extents_recalled(context: Context, caller: Caller, request: unit_reports.ExtentsRecalledReport) -> Decision:
    """Close extents that a unit has recalled."""
    _check_sender(context, caller, request.unit, "what it has recalled")
    numbers, lengths = indexes_in(request.extents).tolist(), indexes_in(request.lengths).tolist()
    if len(numbers) != len(lengths):
        raise ProtocolError(f"a report of recalled extents has {len(numbers)} extents but {len(lengths)} lengths")
    return Decision(location_checks.close_reported_extents(context.state, request.unit, numbers, lengths), Done)


@handles(unit_reports.BlocksMovedReport)
def handle_blocks_moved(context: Context, caller: Caller, request: unit_reports.BlocksMovedReport) -> Decision:
    """Note the new locations of blocks that a unit has moved on order."""
    _check_sender(context, caller, request.unit, "what it has moved")
    return Decision(context.services[Mover].on_report(request), Done)


@handles(unit_reports.WriterGone)
def handle_writer_gone(context: Context, caller: Caller, request: unit_reports.WriterGone) -> Decision:
    """Note that a writer is dead, which its unit has proved."""
    _check_sender(context, caller, request.unit, "that its writer is gone")
    for number in request.extents:
        location_checks.check_extent_number(number)
    return Decision([r.WriterFenced(request.writer, request.unit, request.extents)], Done)


@handles(unit_reports.SpaceShortReport)
def handle_space_short(context: Context, caller: Caller, request: unit_reports.SpaceShortReport) -> Done:
    """Note which writers wait for space of a unit."""
    _check_sender(context, caller, request.unit, "which writers wait for its space")
    context.services[Activity].short[request.unit] = request
    context.services[Mover].set_waiting_writers(request.unit, bool(request.writers))
    return Done()


@handles(Drain)
def handle_drain(context: Context, caller: Caller, request: Drain) -> Done | Begin:
    """Drain a unit, or use it again. The reply has the number of blocks that are left in it."""
    record = _decide_drain(context.state, context.config.replicas, request)
    if record is not None:
        context.log.apply(record)
        context.services[Mover].drain(request.unit, record.draining)
    if request.wait is not None and request.wait > 0 and not request.undo:
        return Begin(_await_empty(context, request.unit, context.now + request.wait), Ends.WITH_CONNECTION)
    return Done(_remaining_blocks(context.state, request.unit))


def _await_empty(context: Context, unit: int, deadline: float) -> Steps:
    """Wait until a unit is empty, at most until the deadline."""
    while blocks := _remaining_blocks(context.state, unit):
        if context.now >= deadline:
            return Failure(
                "WaitTimeoutError",
                f"storage unit {unit} still holds {blocks} blocks; the drain continues, call it again to wait for its "
                f"end",
            )
        yield Until(deadline, f"A drain waits until storage unit {unit} is empty; it still holds {blocks} blocks.")
    return Done(0)


def _remaining_blocks(state: State, unit: int) -> int:
    """Return how many blocks a unit still holds."""
    return sum(extent.blocks for (number, _), extent in state.blocks.extents.items() if number == unit)


def _decide_drain(state: State, replicas: int, request: Drain) -> r.UnitDraining | None:
    """Return the record of the request; None if it changes nothing.

    Raises:
        InvalidArgumentError: The unit is unknown, or too few other units would be left for new blocks.
    """
    if request.unit not in state.units:
        raise InvalidArgumentError(
            f"{location_checks.no_unit_text(request.unit, state.units)}; pass the number of one that exists"
        )
    if request.unit in state.stores:
        raise InvalidArgumentError(
            f"storage unit {request.unit} has its blocks in an external store, which are not moved; to empty it, clear "
            f"their samples"
        )
    if request.unit in state.mirrors:
        raise InvalidArgumentError(
            f"storage unit {request.unit} has the copies on disk (durability.values: machine) and cannot be drained; "
            f"drain a unit in memory"
        )
    others = state.units_of(MEMORY) - state.draining - {request.unit}
    if not request.undo and len(others) < replicas:
        raise InvalidArgumentError(
            f"storage unit {request.unit} cannot be drained: writers need {replicas} other units in memory "
            f"(backend.SimpleStorage.replicas), but there would be {len(others)}; start a system with more units"
        )
    if (request.unit in state.draining) != request.undo:
        return None
    return r.UnitDraining(request.unit, not request.undo)
